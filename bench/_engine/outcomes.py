"""Outcomes of a cell: measured in slices, counted alike for all engines, joined and paired by turn."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Outcome:
    """Result of one cell."""

    outputs: list[list[int]]  # output tokens of each request, without an end token
    tokens: int  # end tokens included
    cpu_s: float
    wall_s: float
    decode_s: float | None = None  # CPU seconds of a round with the whole batch and without prompts; median
    told: dict[str, float] = field(default_factory=dict)  # statistics of speculation


def in_turn(runs: Iterable[Generator[None, None, Outcome]]) -> list[Outcome]:
    """Run each for a slice, in turn, until all are done; return the outcomes in their order."""
    outcomes: dict[int, Outcome] = {}
    going = list(enumerate(runs))
    while going:
        for at, run in list(going):
            try:
                next(run)
            except StopIteration as done:
                outcomes[at] = done.value
                going.remove((at, run))
    return [outcomes[at] for at in sorted(outcomes)]


def counted(
    outputs: list[list[int]], limit: int, ends: frozenset[int], cpu_s: float, wall_s: float
) -> Outcome:
    """Return the tokens up to the end token, which counts, whether the engine reports it or not: the same
    count for all engines.
    """
    cut = [next((row[:at] for at, token in enumerate(row) if token in ends), row) for row in outputs]
    tokens = sum(min(len(row) + 1, limit) if ends else len(row) for row in cut)
    return Outcome(cut, tokens, cpu_s, wall_s)


def together(parts: Sequence[Outcome]) -> Outcome:
    """Return one outcome with the outputs, tokens and seconds of all parts, and the means of their
    statistics."""
    if len(parts) == 1:
        return parts[0]
    return Outcome(
        [row for part in parts for row in part.outputs],
        sum(part.tokens for part in parts),
        sum(part.cpu_s for part in parts),
        sum(part.wall_s for part in parts),
        told=means([part.told for part in parts]),
    )


def paired(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return the outcomes in pairs. If there are several of ours in a turn, they are joined to one and paired
    with the other's of that turn.
    """
    several = len(ours) // len(theirs)
    turns = [ours[at : at + several] for at in range(0, len(ours), several)]
    decodes = [[one.decode_s for one in turn if one.decode_s is not None] for turn in turns]
    joined = [
        replace(together(turn), decode_s=statistics.median(decode) if decode else None)
        for turn, decode in zip(turns, decodes, strict=True)
    ]
    return list(zip(joined, theirs, strict=True))


def means(told: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each statistic over the outcomes that have it."""
    names = {name for one in told for name in one}
    return {name: statistics.fmean(one[name] for one in told if name in one) for name in sorted(names)}
