"""The head of docs/evidence/orders.md, and what all pages share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench._evidence.results import Results

GENERATED = (
    "<!-- Written by `python -m bench.evidence` from results. Run the benchmarks again to change it. -->"
)


def compared_orders(results: Results) -> Iterator[str]:
    """Yield what is compared with simulated orders, how to repeat it, and how to read the ratios."""
    about = results.about
    yield "Orders of the same requests on the same virtual machines: the production scheduling core runs in"
    yield "virtual time ([simulator](../../simulator)), with the same estimates, memory rules and costs for every policy"
    yield "([policies.md](../policies.md)). [On what data, and what simulations leave out](simulation.md)."
    yield ""
    yield f"Run on {about['date']}, {about['seeds']} seeds of each regime ([results](../../bench/results/{results.name})):"
    yield from ("", "```", about["command"], "```", "")
    yield "To repeat it, with [the recordings](simulation.md#on-what-data) in a folder:"
    yield from ("", "```", f"{about['command']} --data FOLDER --json bench/results/DATE-policy.json")
    yield from ("python -m bench.evidence", "```", "")
    yield "Ratios are mean latencies divided, paired by seed (each seed draws the same jobs for every policy), geometric mean over seeds"
    yield "with the 95 % interval (Student's t on the logarithm). Below 1, `laps-sd` is faster. **Bold**: the whole interval is below 1;"
    yield "*italic*: all of it is above; otherwise no difference is shown."
    if results.reduced:
        yield ""
        yield "**This is a reduced run: its regimes are not those of [bench/regimes](../../bench/regimes), and its figures show nothing but the form of this page.**"
    yield ""


def anchor(title: str) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
