"""The head of docs/evidence.md: what is compared, and the results in short."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bench._evidence.results import Results
from bench._markdown import table, verdict_of

GENERATED = "<!-- Written by `python -m bench.evidence` from the results of `laps-sd bench policy`, `serve`, `control`, `engine` and `gateway`. Run them again to change it. -->"


HEADING = re.compile("###? (.+)")


class Section(NamedTuple):
    """A section on what was measured."""

    lines: list[str]
    what: str
    """What ran."""
    date: str


def head(results: Results, sections: Sequence[Section]) -> Iterator[str]:
    about = results.about
    strongest = [
        (regime, found)
        for regime in results.regimes
        if (rival := results.strongest_length_only(regime)) and (found := results.ratio(regime, rival))
    ]
    fcfs = [found for regime in results.regimes if (found := results.ratio(regime, "fcfs"))]
    yield from (GENERATED, "# Evidence: what LAPS-SD gains, and where it gains nothing", "")
    if sections:
        yield from _contents(about["date"], sections)
    yield "## Orders, simulated"
    yield ""
    yield "These sections compare orders of the same requests on the same virtual machines: the production scheduling core runs in"
    yield "virtual time ([simulator](../simulator)), with the same estimates, memory rules and costs for every policy"
    yield "([policies.md](policies.md)). [What simulations leave out](#limits-of-the-simulation)."
    yield ""
    yield f"Run on {about['date']}, {about['seeds']} seeds of each regime ([results](../bench/results/{results.name})):"
    yield from ("", "```", about["command"], "```", "")
    yield "To repeat it, with [the recordings](#on-what-data) in a folder:"
    yield from ("", "```", f"{about['command']} --data FOLDER --json bench/results/DATE-policy.json")
    yield from ("python -m bench.evidence", "```", "")
    yield "Ratios are mean latencies divided, paired by seed (each seed draws the same jobs for every policy), geometric mean over seeds"
    yield "with the 95 % interval (Student's t on the logarithm). Below 1, `laps-sd` is faster. **Bold**: the whole interval is below 1;"
    yield "*italic*: all of it is above; otherwise no difference is shown."
    if results.reduced:
        yield ""
        yield "**This is a reduced run: its regimes are not those of [bench/regimes](../bench/regimes), and its figures show nothing but the form of this page.**"
    yield from ("", "### In short", "")
    if fcfs:
        middles = [found[0] for found in fcfs]
        yield f"- Against `fcfs`: {_count(fcfs)}; ratios from {min(middles):.2f} to {max(middles):.2f}."
    if strongest:
        middles = [found[0] for _, found in strongest]
        best = min(strongest, key=lambda each: each[1][0])[0]
        yield (
            f"- Against the strongest policy that uses predicted lengths but not acceptance: "
            f"{_count([found for _, found in strongest])}; ratios from {min(middles):.2f} (`{best}`) to {max(middles):.2f}, "
            f"median {statistics.median(middles):.2f}."
        )
        alone = statistics.median(
            float(row["ratio_fcfs"])
            for regime, _ in strongest
            if (row := results.row(regime, results.strongest_length_only(regime) or ""))
            and "ratio_fcfs" in row
        )
        yield (
            f"- That policy is itself at a median of {alone:.2f} of `fcfs`: this part of the first line comes from running short requests first, and only "
            "the second line from using acceptance."
        )
    yield ""


def _contents(date: str, sections: Sequence[Section]) -> Iterator[str]:
    """Yield a table of the sections, by what ran."""
    yield "Each section names the command that repeats it."
    titles = [[found[1] for line in each.lines if (found := HEADING.match(line))] for each in sections]
    yield from table(
        ("section", "what ran", "on"),
        (
            ("[Orders](#orders-simulated), and what they cost", "the scheduling core in the simulator", date),
            *(
                (", ".join(f"[{title}](#{_anchor(title)})" for title in found), each.what, each.date)
                for found, each in zip(titles, sections, strict=True)
                if found
            ),
        ),
    )
    yield "Results of the demo pair are of its weights of 2026-11-21, of whose draft tokens fewer were accepted (0.60 instead of 0.67 at temperature 0.8); those of"
    yield "[conversations](#conversations-on-the-real-stack) and of [vLLM](#inside-one-vllm-server) are of the present ones."
    yield ""


def _anchor(title: str) -> str:
    """Return the anchor that GitHub and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _count(found: Sequence[Sequence[float]]) -> str:
    words = [verdict_of(each) for each in found]
    counts = [f"{word} in {words.count(word)}" for word in ("faster", "slower") if word in words]
    if "no difference shown" in words:
        counts.append(f"no difference shown in {words.count('no difference shown')}")
    return f"{', '.join(counts)} of {len(words)} regimes"
