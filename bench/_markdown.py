"""Markdown helpers for generated pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of Markdown with a blank line around it."""
    yield from ("", "| " + " | ".join(head) + " |", "|" + "---|" * len(head))
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""


def verdict_of(found: Sequence[float]) -> str:
    """Return a verdict on a ratio, according to whether its whole interval agrees."""
    _, low, high = found
    return "faster" if high < 1 else "slower" if low > 1 else "no difference shown"


def spread(found: Sequence[float] | None) -> str:
    """Return a ratio with its interval: bold where all of it is below 1, italic where all of it is above."""
    if found is None:
        return "–"
    middle, low, high = found
    mark = {"faster": "**", "slower": "*", "no difference shown": ""}[verdict_of(found)]
    return f"{mark}{middle:.3f}{mark} [{low:.3f}, {high:.3f}]"
