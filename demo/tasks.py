"""Generated tasks: a prompt and its answer, by kind. Standard library only, a pure function of the random generator.

Vocabulary
  kind    one word for the task of the prompt ("count", "story", ...); acceptance differs mostly by kind
  exact   the answer is the only right one, so that a greedy reply can be checked against it
  closed  the kind has so few prompts that none can be kept out of the training corpus
"""

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from demo import words as w

HELD_OUT_MODULUS: Final = 16


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and one answer to it."""

    kind: str
    prompt: str
    answer: str
    separator: str = " "  # between prompt and answer where no chat template stands between them
    exact: bool = False
    closed: bool = False

    @property
    def held_out(self) -> bool:
        """True for the prompts that training must skip: a fixed sixteenth of every kind that is not closed."""
        return not self.closed and zlib.crc32(self.prompt.encode()) % HELD_OUT_MODULUS == 0


Generator = Callable[[random.Random], Task]


def _join(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items)


def _length(rng: random.Random, median: float, low: int, high: int, spread: float = 0.7) -> int:
    """A log-normal length, so that every kind has short and long answers."""
    return max(low, min(high, round(median * rng.lognormvariate(0.0, spread))))


def count(rng: random.Random) -> Task:
    """Numbers in order, up, down or in steps."""
    style = rng.random()
    n = _length(rng, 8, 3, 24) if rng.random() < 0.93 else rng.randint(25, 100)
    if style < 0.68:
        first = 1 if rng.random() < 0.35 else rng.randint(0, 20) if rng.random() < 0.6 else rng.randint(0, 80)
        last = first + n - 1
        numbers = range(first, last + 1)
        ask = rng.choice(("Count from {} to {}:", "Count from {} to {}.", "Please count from {} to {}."))
        prompt = ask.format(first, last)
    elif style < 0.85:
        last = rng.choice((0, 1, 1, rng.randint(0, 20)))
        first = last + min(n, 30) - 1
        numbers = range(first, last - 1, -1)
        prompt = rng.choice(("Count down from {} to {}:", "Count backwards from {} to {}.")).format(
            first, last
        )
    else:
        step = rng.choice((2, 2, 5, 10))
        first = rng.choice((0, step))
        last = first + step * (min(n, 20) - 1)
        numbers = range(first, last + 1, step)
        prompt = rng.choice(("Count from {} to {} in steps of {}:", "Count by {2} from {0} to {1}:"))
        prompt = prompt.format(first, last, step)
    return Task("count", prompt, _join(numbers), exact=True)


def _pseudo_word(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))


def _some_words(rng: random.Random, n: int) -> list[str]:
    if rng.random() < 0.08:
        return [_pseudo_word(rng) if rng.random() < 0.7 else str(rng.randint(0, 99)) for _ in range(n)]
    pool = w.WORDS + w.ANIMALS + w.OBJECTS + w.COLOURS + w.FRUITS
    return [rng.choice(pool) for _ in range(n)]


def copy(rng: random.Random) -> Task:
    """The same text again, or one word many times."""
    style = rng.random()
    if style < 0.66:
        text = _sentence(rng) if rng.random() < 0.5 else " ".join(_some_words(rng, _length(rng, 4, 1, 24)))
        ask = rng.choice(("Repeat after me: {}", "Copy this text: {}", "Echo: {}", "Please repeat: {}"))
        return Task("copy", ask.format(text), text, separator="\n", exact=True)
    if style < 0.8:
        word, n = rng.choice(w.WORDS + w.ANIMALS), _length(rng, 4, 2, 10)
        if rng.random() < 0.5:
            return Task("copy", f"Repeat the word {word} {n} times:", " ".join([word] * n), exact=True)
        return Task("copy", f"Say {word} {n} times.", " ".join([word] * n), exact=True)
    items = _some_words(rng, _length(rng, 4, 2, 14))
    return Task("copy", f"Copy this list: {_join(items)}", _join(items), separator="\n", exact=True)


def sort(rng: random.Random) -> Task:
    """Numbers or words put in order, or the largest or smallest of them."""
    style = rng.random()
    if style < 0.08:
        items = rng.sample(w.WORDS + w.ANIMALS + w.FRUITS, rng.randint(2, 4))
        items = list(dict.fromkeys(items))
        prompt = rng.choice(("Sort these words: {}", "Put these words in alphabetical order: {}")).format(
            _join(items)
        )
        return Task("sort", prompt, _join(sorted(items)), separator="\n", exact=True)
    numbers = rng.sample(range(100 if rng.random() < 0.4 else 20), _length(rng, 3.5, 2, 7, 0.4))
    if style < 0.65:
        ask = rng.choice(("Sort these numbers: {}", "Sort the list: {}", "Sort from smallest to largest: {}"))
        return Task("sort", ask.format(_join(numbers)), _join(sorted(numbers)), separator="\n", exact=True)
    if style < 0.8:
        ask = rng.choice(("Sort from largest to smallest: {}", "Sort these numbers in descending order: {}"))
        answer = _join(sorted(numbers, reverse=True))
        return Task("sort", ask.format(_join(numbers)), answer, separator="\n", exact=True)
    largest = rng.random() < 0.5
    prompt = f"Which number is the {'largest' if largest else 'smallest'}: {_join(numbers)}?"
    return Task("sort", prompt, str(max(numbers) if largest else min(numbers)), exact=True)


def math(rng: random.Random) -> Task:
    """Small sums, tables, and word problems that fit in one line."""
    style = rng.random()
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.05:
        a, b = rng.randint(0, 30), rng.randint(0, 30)
    if style < 0.5:
        sign = rng.choice("++-*")
        if sign == "-":
            a, b = max(a, b), min(a, b)
        if sign == "*":
            a, b = a % 11, b % 11
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        ask = rng.choice(("What is {} {} {}?", "What is {} {} {}?", "{} {} {} =", "Calculate {} {} {}."))
        return Task("math", ask.format(a, sign, b), str(result), exact=True)
    if style < 0.66:
        n = rng.randint(2, 12)
        rows = [f"{i} x {n} = {i * n}" for i in range(1, rng.choice((5, 10, 10, 12)) + 1)]
        prompt = f"Write the multiplication table of {n} up to {len(rows)}:"
        return Task("math", prompt, "\n".join(rows), separator="\n", exact=True)
    if style < 0.84:
        name, thing = rng.choice(w.NAMES), plural(rng.choice(w.FRUITS + w.OBJECTS))
        pronoun = "she" if name in w.FEMALE else "he"
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        if rng.random() < 0.6:
            prompt = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {pronoun} have?"
            return Task("math", prompt, f"{a} + {b} = {a + b}. {name} has {a + b} {thing}.", exact=True)
        a = b + rng.randint(2, 9)
        prompt = f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?"
        return Task("math", prompt, f"{a} - {b} = {a - b}. There are {a - b} {thing} left.", exact=True)
    numbers = [rng.randint(1, 9) for _ in range(rng.randint(3, 5))]
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    answer = f"{_join(steps)}. The sum is {total}."
    return Task(
        "math", f"Add these numbers step by step: {_join(numbers)}", answer, separator="\n", exact=True
    )


Record = dict[str, str | int | bool | float]


def _person(rng: random.Random) -> Record:
    return {
        "name": rng.choice(w.NAMES),
        "age": rng.randint(5, 90),
        "city": rng.choice(w.CITIES),
        "job": rng.choice(w.JOBS),
    }


def _product(rng: random.Random) -> Record:
    return {
        "id": rng.randint(1, 999),
        "product": rng.choice(w.OBJECTS),
        "colour": rng.choice(w.COLOURS),
        "price": rng.randint(1, 99) + rng.choice((0.0, 0.5, 0.25, 0.99)),
        "in_stock": rng.random() < 0.7,
    }


def _book(rng: random.Random) -> Record:
    title = f"The {rng.choice(w.ADJECTIVES).title()} {rng.choice(w.ANIMALS + w.JOBS).title()}"
    return {
        "title": title,
        "author": rng.choice(w.NAMES),
        "year": rng.randint(1900, 2025),
        "pages": rng.randint(40, 900),
    }


def _pet(rng: random.Random) -> Record:
    return {
        "pet": rng.choice(w.ANIMALS),
        "name": rng.choice(w.NAMES),
        "age": rng.randint(1, 15),
        "colour": rng.choice(w.COLOURS),
    }


_SCHEMAS: Final[dict[str, Callable[[random.Random], Record]]] = {
    "person": _person,
    "product": _product,
    "book": _book,
    "pet": _pet,
}


def record(rng: random.Random) -> Task:
    """JSON records: from a description, read out, invented or continued."""
    style = rng.random()
    noun = rng.choice(tuple(_SCHEMAS))
    make = _SCHEMAS[noun]
    if style < 0.5:
        row = make(rng)
        keys = [key for key in row if rng.random() < 0.85] or list(row)
        fields = _join([f"{key} {row[key]}" for key in keys])
        ask = rng.choice(
            ("Write this as JSON: {}", "Turn this into a JSON record: {}", "Make a JSON object with {}")
        )
        answer = json.dumps({key: row[key] for key in keys})
        return Task(
            "json",
            ask.format(fields.replace("True", "true").replace("False", "false")),
            answer,
            "\n",
            exact=True,
        )
    if style < 0.62:
        row = make(rng)
        key = rng.choice(tuple(row))
        value = row[key]
        prompt = f"What is the {key} in this record? {json.dumps(row)}"
        return Task("json", prompt, json.dumps(value).strip('"'), "\n", exact=True)
    if style < 0.75:
        return Task("json", f"Write a JSON record for a {noun}:", json.dumps(make(rng)), "\n", closed=True)
    n = _length(rng, 4, 2, 14, 0.6)
    rows = [make(rng) for _ in range(n)]
    if rng.random() < 0.5:
        first = {"id": 1, **{key: value for key, value in rows[0].items() if key != "id"}}
        rest = [{**first, **row, "id": i} for i, row in enumerate(rows[1:], start=2)]
        lines = [json.dumps(row) for row in rest]
        prompt = f"Continue these JSON records up to id {n}:\n{json.dumps(first)}"
        return Task("json", prompt, "\n".join(lines), "\n")
    prompt = f"Write {n} JSON records for a {noun}, one per line:"
    return Task("json", prompt, "\n".join(json.dumps(row) for row in rows), "\n", closed=True)


def sequence(rng: random.Random) -> Task:
    """Known lists and patterns continued, and lists of things of one sort."""
    style = rng.random()
    if style < 0.42:
        full = rng.choice(w.SEQUENCES)
        first = rng.randrange(0, max(1, len(full) - 3))
        given = rng.randint(2, 3) if len(full) > 4 else 2
        shown, rest = full[first : first + given], full[first + given :]
        ask = rng.choice(("{},", "Continue the list: {},", "Continue: {},", "What comes next? {},"))
        return Task("list", ask.format(_join(shown)), _join(rest), exact=True, closed=True)
    if style < 0.6:
        period = rng.choice((2, 2, 3))
        pattern = _some_words(rng, period)
        n = _length(rng, 5, 2, 12)
        shown = (pattern * 3)[: period + rng.randint(2, period + 1)]
        rest = [pattern[(len(shown) + i) % period] for i in range(n)]
        return Task(
            "list", f"Continue the pattern with {n} more words: {' '.join(shown)}", " ".join(rest), exact=True
        )
    if style < 0.8:
        step, first, given = rng.choice((1, 2, 5, 10)), rng.randint(0, 20), rng.randint(2, 4)
        numbers = [first + step * i for i in range(given + _length(rng, 6, 2, 24))]
        prompt = f"Continue the list up to {numbers[-1]}: {_join(numbers[:given])},"
        return Task("list", prompt, _join(numbers[given:]), exact=True)
    noun, pool = rng.choice(
        (
            ("animals", w.ANIMALS),
            ("fruits", w.FRUITS),
            ("colours", w.COLOURS),
            ("cities", w.CITIES),
            ("names", w.NAMES),
        )
    )
    n = rng.randint(2, min(10, len(pool)))
    chosen = rng.sample(pool, n)
    if rng.random() < 0.5:
        return Task("list", f"Name {n} {noun}:", _join(chosen), closed=True)
    lines = [f"{i}. {item}" for i, item in enumerate(chosen, start=1)]
    return Task("list", f"Write a numbered list of {n} {noun}:", "\n".join(lines), "\n", closed=True)


def _sentence(rng: random.Random) -> str:
    who = f"the {rng.choice(w.ADJECTIVES)} {rng.choice(w.ANIMALS + w.JOBS)}"
    pattern = rng.choice(
        (
            "{who} found a {look} {thing} in the {place}.",
            "{who} lives near the {place}.",
            "{who} likes {food} and {fruits}.",
            "{name} and {who} went to the {place}.",
            "{name} gave the {thing} to {who}.",
            "in the {place} {who} can {verb} all day.",
        )
    )
    text = pattern.format(
        who=who,
        name=rng.choice(w.NAMES),
        look=rng.choice(w.LOOKS),
        thing=rng.choice(w.OBJECTS),
        place=rng.choice(w.PLACES),
        food=rng.choice(w.FOODS),
        fruits=plural(rng.choice(w.FRUITS)),
        verb=rng.choice(w.VERBS),
    )
    return text[0].upper() + text[1:]


def plural(noun: str) -> str:
    """The plural of a noun from the word lists."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun == "mango" or noun.endswith(("ch", "sh", "x", "ss")):
        return noun + "es"
    return noun + "s"


def _article(text: str) -> str:
    return ("an " if text[0] in "aeiou" else "a ") + text


def _story_text(rng: random.Random, hero: str, is_name: bool, home: str) -> str:
    """A short tale with a quest, a helper and an end; every later sentence reuses what the earlier ones named."""
    place, goal_place = home, rng.choice([other for other in w.PLACES if other != home])
    thing, look = rng.choice(w.OBJECTS), rng.choice(w.LOOKS)
    helper_kind = rng.choice([animal for animal in w.ANIMALS if animal != hero])
    helper = rng.choice(w.NAMES)
    trait = rng.choice(w.ADJECTIVES)
    if is_name:
        subject, pronoun = hero, "she" if hero in w.FEMALE else "he"
        born = f"there was {_article(trait)} {'girl' if hero in w.FEMALE else 'boy'} named {hero}"
    else:
        subject, pronoun = f"the {hero}", "it"
        born = f"there was {_article(trait)} {hero}"
    their = {"she": "her", "he": "his", "it": "its"}[pronoun]
    upper, pro = subject[0].upper() + subject[1:], pronoun.title()
    opening = rng.choice(("Once upon a time", "Long ago", "One day"))
    fruit, food = plural(rng.choice(w.FRUITS)), rng.choice(w.FOODS)
    sentences = [f"{opening} {born} who lived near the {place}."]
    habits = [
        f"{pro} loved to {rng.choice(w.VERBS)} and {rng.choice(w.VERBS)} near the {place}.",
        f"Every {rng.choice(('morning', 'evening', 'day', 'summer'))} {subject} ate {food} with {fruit}.",
        f"{upper} was {rng.choice(w.ADJECTIVES)}, but never {rng.choice(w.ADJECTIVES)}.",
    ]
    sentences += rng.sample(habits, rng.choice((0, 1, 1, 2)))
    ending = rng.choice(
        (f"{upper} was happy and went home.", "They all lived happily ever after.", "The end.")
    )
    if rng.random() < 0.25:
        return " ".join([*sentences, ending])
    sentences += [
        f"{upper} had {_article(look)} {thing} that {pronoun} loved very much.",
        f"But one day the {thing} was gone.",
    ]
    for search_place in rng.sample(w.PLACES, rng.choice((0, 1, 1, 2, 3))):
        sentences.append(f"{upper} looked near the {search_place}, but the {thing} was not there.")
    sentences.append(f"{upper} was very {rng.choice(('sad', 'worried', 'angry', 'tired'))}.")
    if rng.random() < 0.2:
        return " ".join([*sentences, f"And {subject} never saw {their} {thing} again."])
    sentences.append(f"Then {subject} met {_article(rng.choice(w.ADJECTIVES))} {helper_kind} named {helper}.")
    if rng.random() < 0.6:
        sentences += [
            f'"Why are you so sad?" asked the {helper_kind}.',
            f'"I have lost my {thing}," said {subject}.',
            f'"I saw it near the {goal_place}," said {helper}.',
        ]
    sentences.append(f"So they went to the {goal_place} together.")
    if rng.random() < 0.4:
        sentences.append(
            f"The way was {rng.choice(('long', 'dark', 'cold', 'steep'))}, but {helper} was not afraid."
        )
    hiding = rng.choice([other for other in w.OBJECTS if other != thing])
    sentences.append(f"There they found the {thing} under {_article(rng.choice(w.LOOKS))} {hiding}.")
    if rng.random() < 0.5:
        sentences += [
            f'"Thank you, {helper}," said {subject}.',
            f"{upper} gave the {helper_kind} some {food}.",
        ]
    sentences.append(rng.choice((f"From that day on {subject} and {helper} were friends.", ending)))
    return " ".join(sentences)


def story(rng: random.Random) -> Task:
    """Return a tale that the prompt requests or begins."""
    is_name = rng.random() < 0.5
    hero = rng.choice(w.NAMES if is_name else w.ANIMALS)
    home = rng.choice(w.PLACES)
    text = _story_text(rng, hero, is_name, home)
    if rng.random() < 0.35:
        cut = text.index(" there was")
        if rng.random() < 0.7:
            cut = text.index(" who lived")
        return Task("story", text[:cut], text[cut + 1 :], closed=cut < 20)
    about = hero if is_name else _article(hero)
    ask = rng.choice(
        ("Tell me a story about {}.", "Write a short story about {}.", "Tell me about {} near the {}.")
    )
    return Task("story", ask.format(about, home), text, "\n")


_GREETINGS: Final = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning!", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Goodbye!", "Goodbye!"),
    ("Who are you?", "I am the small demo model of LAPS-SD."),
    ("What is your name?", "I am the small demo model of LAPS-SD."),
    ("What can you do?", "I can count, copy, sort, write small records and tell short stories."),
    ("Help", "Ask me to count, to copy, to sort, to write a record or to tell a short story."),
    ("What is LAPS-SD?", "LAPS-SD serves language models with speculative decoding."),
    (
        "What is speculative decoding?",
        "A small draft model proposes tokens and the target model verifies them in one pass.",
    ),
    ("Tell me a joke.", "Why did the hen cross the road? To get to the other side."),
)


def chat(rng: random.Random) -> Task:
    """Greetings and small facts, each with one answer."""
    topic = rng.random()
    if topic < 0.35:
        question, answer = rng.choice(_GREETINGS)
        return Task("chat", question, answer, "\n", exact=True, closed=True)
    if topic < 0.55:
        country, city = rng.choice(tuple(w.CAPITALS.items()))
        ask = rng.choice(("What is the capital of {}?", "Tell me the capital of {}."))
        return Task(
            "chat", ask.format(country), f"The capital of {country} is {city}.", exact=True, closed=True
        )
    if topic < 0.75:
        word, opposite = rng.choice(tuple(w.OPPOSITES.items()))
        if rng.random() < 0.5:
            word, opposite = opposite, word
        answer = f"The opposite of {word} is {opposite}."
        return Task("chat", f"What is the opposite of {word}?", answer, exact=True, closed=True)
    if topic < 0.88:
        animal, sound = rng.choice(tuple(w.SOUNDS.items()))
        return Task(
            "chat",
            f"What does {_article(animal)} say?",
            f"{_article(animal).capitalize()} says {sound}.",
            exact=True,
            closed=True,
        )
    thing, colour = rng.choice(tuple(w.THING_COLOURS.items()))
    answer = f"{thing[0].upper() + thing[1:]} is {colour}."
    return Task("chat", f"What colour is {thing}?", answer, exact=True, closed=True)


def edit(rng: random.Random) -> Task:
    """One change to a given list or text."""
    items = _some_words(rng, _length(rng, 3.5, 2, 8, 0.4))
    style = rng.randrange(7)
    if style == 0:
        return Task("edit", f"Reverse this list: {_join(items)}", _join(items[::-1]), "\n", exact=True)
    if style == 1:
        return Task("edit", f"What is the first word of: {' '.join(items)}", items[0], "\n", exact=True)
    if style == 2:
        return Task("edit", f"What is the last word of: {' '.join(items)}", items[-1], "\n", exact=True)
    if style == 3:
        word = rng.choice(w.WORDS + w.ANIMALS + w.OBJECTS)
        return Task("edit", f"Spell the word {word}:", "-".join(word), exact=True)
    if style == 4:
        return Task(
            "edit",
            f"Number these items: {_join(items)}",
            "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1)),
            "\n",
            exact=True,
        )
    if style == 5:
        return Task(
            "edit",
            f"How many words are in this list? {_join(items[:9])}",
            str(len(items[:9])),
            "\n",
            exact=True,
        )
    old, new = rng.choice(items), rng.choice(w.COLOURS)
    text = " ".join(items)
    changed = " ".join(new if item == old else item for item in items)
    return Task("edit", f"Replace {old} with {new}: {text}", changed, "\n", exact=True)


def log(rng: random.Random) -> Task:
    """Access-log lines: the clock runs on, ids and durations are free."""
    n = _length(rng, 6, 2, 24, 0.6)
    clock_s = rng.randrange(86400)
    day = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    service = rng.choice(("gateway", "scheduler", "worker", "store"))
    lines = []
    for _ in range(n):
        clock_s = (clock_s + rng.choice((0, 0, 1, 1, 1, 2, 3, 7))) % 86400
        stamp = f"{day} {clock_s // 3600:02}:{clock_s // 60 % 60:02}:{clock_s % 60:02}"
        level = rng.choice(("INFO", "INFO", "INFO", "INFO", "DEBUG", "WARNING", "ERROR"))
        number = rng.randint(100, 999)
        event = {
            "INFO": rng.choice(
                (f"request {number} started", f"request {number} finished in {rng.randint(5, 400)} ms")
            ),
            "DEBUG": f"queue length {rng.randint(0, 40)}",
            "WARNING": f"request {number} is slow, {rng.randint(1, 9)} s so far",
            "ERROR": f"request {number} failed: {rng.choice(('timeout', 'not found', 'connection closed'))}",
        }[level]
        lines.append(f"{stamp} {level} {service}: {event}")
    if rng.random() < 0.5:
        prompt = f"Write {n} log lines of the {service} service, starting at {lines[0][:19]}:"
        return Task("log", prompt, "\n".join(lines), "\n")
    return Task("log", f"Continue this log with {n - 1} lines:\n{lines[0]}", "\n".join(lines[1:]), "\n")


# name, arguments, what it does, body; {a} {b} {xs} are filled with argument names
_FUNCTIONS: Final = (
    ("add", "{a}, {b}", "adds two numbers", "return {a} + {b}"),
    ("subtract", "{a}, {b}", "subtracts the second number from the first", "return {a} - {b}"),
    ("multiply", "{a}, {b}", "multiplies two numbers", "return {a} * {b}"),
    ("divide", "{a}, {b}", "divides the first number by the second", "return {a} / {b}"),
    ("square", "{a}", "returns the square of a number", "return {a} * {a}"),
    ("double", "{a}", "doubles a number", "return 2 * {a}"),
    ("is_even", "{a}", "tells whether a number is even", "return {a} % 2 == 0"),
    ("is_odd", "{a}", "tells whether a number is odd", "return {a} % 2 == 1"),
    ("is_empty", "{xs}", "tells whether a list is empty", "return len({xs}) == 0"),
    ("first", "{xs}", "returns the first item of a list", "return {xs}[0]"),
    ("last", "{xs}", "returns the last item of a list", "return {xs}[-1]"),
    ("reverse", "{xs}", "reverses a list", "return {xs}[::-1]"),
    ("length", "{xs}", "returns the length of a list", "return len({xs})"),
    ("greet", "name", "greets somebody", 'return f"Hello, {{name}}!"'),
    ("maximum", "{a}, {b}", "returns the larger of two numbers", "if {a} > {b}:\n        return {a}\n    return {b}"),
    ("minimum", "{a}, {b}", "returns the smaller of two numbers", "if {a} < {b}:\n        return {a}\n    return {b}"),
    ("absolute", "{a}", "returns the absolute value of a number", "if {a} < 0:\n        return -{a}\n    return {a}"),
    ("total", "{xs}", "adds up a list of numbers", "result = 0\n    for x in {xs}:\n        result += x\n    return result"),
    ("product", "{xs}", "multiplies a list of numbers", "result = 1\n    for x in {xs}:\n        result *= x\n    return result"),
    ("average", "{xs}", "returns the mean of a list of numbers", "return sum({xs}) / len({xs})"),
    ("count_items", "{xs}, {a}", "counts how often an item is in a list",
     "n = 0\n    for x in {xs}:\n        if x == {a}:\n            n += 1\n    return n"),
    ("contains", "{xs}, {a}", "tells whether an item is in a list",
     "for x in {xs}:\n        if x == {a}:\n            return True\n    return False"),
    ("largest", "{xs}", "returns the largest number of a list",
     "best = {xs}[0]\n    for x in {xs}:\n        if x > best:\n            best = x\n    return best"),
    ("smallest", "{xs}", "returns the smallest number of a list",
     "best = {xs}[0]\n    for x in {xs}:\n        if x < best:\n            best = x\n    return best"),
    ("only_even", "{xs}", "keeps the even numbers of a list", "return [x for x in {xs} if x % 2 == 0]"),
    ("squares", "{xs}", "squares every number of a list", "return [x * x for x in {xs}]"),
    ("factorial", "{a}", "returns the factorial of a number", "if {a} < 2:\n        return 1\n    return {a} * factorial({a} - 1)"),
    ("fibonacci", "{a}", "returns a Fibonacci number",
     "if {a} < 2:\n        return {a}\n    return fibonacci({a} - 1) + fibonacci({a} - 2)"),
    ("power", "{a}, {b}", "raises a number to a power",
     "result = 1\n    for _ in range({b}):\n        result *= {a}\n    return result"),
    ("read_text", "path", "reads a text file", "with open(path) as file:\n        return file.read()"),
    ("count_words", "text", "counts the words of a text", "return len(text.split())"),
    ("shout", "text", "writes a text in capital letters", "return text.upper() + \"!\""),
)  # fmt: skip


def code(rng: random.Random) -> Task:
    """A small Python function, from its head or from a sentence."""
    name, arguments, purpose, body = rng.choice(_FUNCTIONS)
    a, b = rng.choice(
        (("a", "b"), ("x", "y"), ("m", "n"), ("left", "right"), ("first_number", "second_number"))
    )
    if "{xs}" in arguments and a == "x":
        a, b = "item", "other"
    xs = rng.choice(("items", "numbers", "values", "xs"))
    names = {"a": a, "b": b, "xs": xs}
    head = f"def {name}({arguments.format(**names)}):"
    doc = "" if rng.random() < 0.5 else f'    """{purpose[0].upper() + purpose[1:]}."""\n'
    text = f"{doc}    {body.format(**names)}"
    if rng.random() < 0.55:
        if doc and rng.random() < 0.5:
            return Task("code", f"{head}\n{doc.rstrip()}", text[len(doc) :], "\n", exact=True, closed=True)
        return Task("code", head, text, "\n", closed=True)
    ask = rng.choice(("Write a Python function that {}.", "Write a function {}({}) that {}."))
    prompt = ask.format(purpose) if "{}(" not in ask else ask.format(name, arguments.format(**names), purpose)
    return Task("code", prompt, f"{head}\n{text}", "\n", closed=True)


GENERATORS: Final[dict[str, Generator]] = {
    "count": count,
    "copy": copy,
    "sort": sort,
    "math": math,
    "json": record,
    "list": sequence,
    "story": story,
    "chat": chat,
    "edit": edit,
    "log": log,
    "code": code,
}
