"""Prompts unlike those that the demo pair was trained on: its draft model seldom predicts its target there.

Code to continue, arithmetic problems, prose to continue and sentences to translate, in turn, 160 tokens of the
demo's tokenizer on average. The texts are the project's own; names and numbers vary. Standard library only;
the same number gives the same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

HELD_OUT = "held-out"

_CODE = (
    """class {Thing}Queue:
    def __init__(self, limit: int = {n}) -> None:
        self._limit = limit
        self._waiting: deque[{Thing}] = deque()

    def push(self, {thing}: {Thing}) -> bool:
        if len(self._waiting) >= self._limit:
            return False
        self._waiting.append({thing})
        return True

    def drain(self, most: int) -> list[{Thing}]:
""",
    """fn parse_{thing}(line: &str) -> Result<{Thing}, ParseError> {{
    let mut fields = line.split(',').map(str::trim);
    let id: u{bits} = fields.next().ok_or(ParseError::Missing("id"))?.parse()?;
    let weight: f64 = fields.next().ok_or(ParseError::Missing("weight"))?.parse()?;
    let limit = {n}.0;
""",
    """SELECT w.region, COUNT(*) AS {thing}s, AVG(s.delay_minutes) AS mean_delay
FROM {thing}s AS s
JOIN warehouses AS w ON w.id = s.warehouse_id
WHERE s.created_at >= DATE '2031-0{digit}-01' AND s.status <> 'draft'
GROUP BY w.region
HAVING COUNT(*) > {n}
ORDER BY""",
    """async function upload{Thing}(file, {{ retries = {digit}, timeout = {n}000 }} = {{}}) {{
  const body = new FormData();
  body.append("{thing}", file, file.name.toLowerCase());
  for (let attempt = 0; attempt <= retries; attempt++) {{
    const response = await fetch(`/api/v{digit}/{thing}s`, {{ method: "POST", body }});
    if (response.ok) return (await response.json()).identifier;
""",
)
_ARITHMETIC = (
    (
        "A bakery fills {n} trays a morning with {digit} rows of {bits} rolls each. On Saturdays it sells nine tenths of them "
        "before noon at {cents} cents apiece, and gives the remainder to a shelter at no charge. Flour for one tray costs "
        "{digit}.40, the oven burns {cents}.75 of gas daily, and two bakers earn {n}5 each. What profit does the owner keep after "
        "three Saturdays?"
    ),
    (
        "{Name} cycles from the harbour to a village {n} kilometres inland at {bits} km/h, rests for {cents} minutes, and returns "
        "by a detour that is {digit} kilometres longer, against wind, at two thirds of the speed. A bus leaves the village "
        "half an hour after {Name} arrived there and averages {n} km/h on the short road. Which of them reaches the harbour "
        "earlier, and by how many minutes?"
    ),
    (
        "In a warehouse {bits} shelves hold {n} crates each, and every crate contains {digit} lamps. Inspectors open a quarter "
        "of the crates and discover that {digit} per cent of those lamps are cracked. Each cracked lamp is replaced for {cents} "
        "euros, whereas checking a crate takes {digit} minutes of labour at {n} euros an hour. Determine the total expense."
    ),
    (
        "{Name} saves {n} francs in January, and in each following month {digit} francs more than in the month before. In June "
        "an aunt doubles whatever has been saved so far, but a broken bicycle then consumes {cents} francs. A telescope is "
        "offered at {bits}00 francs with a discount of {digit} per cent. Is the money sufficient by the end of September? "
        ""
    ),
)
_PROSE = (
    (
        "The ferry had been due at four, yet nothing moved upon the grey estuary except a line of geese. {Name} drew the "
        "collar tighter, counted the {n} planks of the jetty for the third time, and considered what the lawyer's telegram "
        "had left unsaid. Nobody inherits a lighthouse by accident. Behind the dunes a {thing} clattered; somebody whistled, "
        "broke off, and began afresh in another key, as though"
    ),
    (
        "Geologists long assumed that the plateau was lifted within a single epoch, roughly {n} million years ago. Cores "
        "drilled near the eastern rim contradict that view: they show {digit} distinct layers of ash, separated by lake "
        "sediments rich in pollen. If the chronology holds, uplift proceeded in pulses, each followed by subsidence, and the "
        "rivers reversed their course no fewer than {digit} times. The implications"
    ),
    (
        "Whoever wishes to repair a wooden {thing} should begin by doing nothing. Let it stand in the workshop for {digit} days, "
        "glue applied to swollen joints will crack by autumn. Then "
        "mark every part with chalk, photograph the mechanism from {bits} angles, and only afterwards loosen the wedges, using "
        "a mallet of leather rather than iron. The commonest mistake, which even masters commit,"
    ),
    (
        "Dear {Name}, your parcel reached us on the {digit}th, somewhat dented but complete, and the children have quarrelled "
        "over the kaleidoscope ever since. Father pretends to be indifferent in "
        "vain. Of the inquest there is little news: the coroner adjourned it again, {n} witnesses "
        "remain unheard, and the {thing} has vanished from the evidence room. What troubles me more"
    ),
)
_TRANSLATION = (
    (
        'Translate into German, and keep the formal tone:\n"We regret to inform you that the {thing} which you ordered on the '
        "{digit}th cannot be delivered before the {bits}th of next month, because our supplier closed. "
        "You may withdraw from the contract free of charge, or accept a voucher worth {n} euros."
        '"\nTranslation: "Wir bedauern, Ihnen mitteilen zu'
    ),
    (
        "English: The committee postponed its vote after {n} members had questioned the expert's independence.\n"
        "Français : Le comité a reporté son vote après que {n} membres eurent contesté l'indépendance de l'expert.\n"
        "English: {Name} will present the revised budget on the {digit}th of April.\nFrançais :"
    ),
    (
        "Traduce al inglés el siguiente párrafo:\n«La cooperativa reunió a {n} agricultores del valle para discutir el reparto "
        "del agua. Acordaron instalar {bits} medidores nuevos y "
        "multar con {cents} euros a quien incumpla el horario."
        '»\nEnglish: "The cooperative gathered'
    ),
    (
        "Übersetze ins Englische:\n1. Der Zug nach {Name}sdorf fährt heute von Gleis {digit}, mit etwa {n} Minuten Verspätung.\n"
        "2. Wegen Bauarbeiten ist die Brücke bis zum {bits}. September gesperrt.\n"
        "English:\n1. The train to {Name}sdorf departs today from platform {digit},"
    ),
)
_KINDS = (_CODE, _ARITHMETIC, _PROSE, _TRANSLATION)
_THINGS = ("parcel", "violin", "invoice", "turbine", "ledger", "compass", "sensor", "carriage")
_NAMES = ("Ingrid", "Baptiste", "Oluchi", "Tadeusz", "Marisol", "Henrik", "Yasmin", "Leopold")


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return `count` prompts, the kinds in turn."""
    rng = random.Random(f"{HELD_OUT}/{seed}")
    return [_filled(_KINDS[at % len(_KINDS)], at // len(_KINDS), rng) for at in range(count)]


def _filled(templates: Sequence[str], number: int, rng: random.Random) -> str:
    thing = rng.choice(_THINGS)
    return templates[number % len(templates)].format(
        thing=thing,
        Thing=thing.capitalize(),
        Name=rng.choice(_NAMES),
        n=rng.randrange(11, 60),
        digit=rng.randrange(3, 10),
        bits=rng.choice((16, 18, 24, 32)),
        cents=rng.randrange(20, 99),
    )
