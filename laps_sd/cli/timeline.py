"""Timeline of a request as a bar: when it waited, ran and was paused. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from laps_sd.v1 import inference_pb2 as pb

__all__ = ["MARKS", "spans", "timeline"]

MARKS = {"waiting": "░", "running": "█", "paused": "▒", "not recorded": "·"}
BEGINS = {
    "arrived": "waiting",
    "leased": "waiting",
    "recovered": "waiting",
    "requeued": "waiting",
    "started": "running",
    "resumed": "running",
    "paused": "paused",
    "left_out": "not recorded",
}
"""State that an event of the timeline begins; other events do not change the state."""


def spans(story: Sequence[pb.StoryLine], until_s: float = 0.0) -> list[tuple[float, float, str]]:
    """Return (begin, end, state) in order, in seconds since acceptance.

    The last one ends with the last event, or at `until_s`.
    """
    found: list[tuple[float, float, str]] = []
    state = "waiting"
    ends_s = [line.at_s for line in story[1:]] + [until_s]
    for line, after_s in zip(story, ends_s, strict=False):
        # A paused request that gets a new lease keeps its slot and KV: it is still paused.
        if not (line.what == "leased" and state == "paused"):
            state = BEGINS.get(line.what, state)
        begin, end = line.at_s, max(line.at_s, after_s)
        if found and found[-1][2] == state:
            found[-1] = (found[-1][0], end, state)
        elif end > begin:
            found.append((begin, end, state))
    return found


def timeline(story: Sequence[pb.StoryLine], *, ended: bool, width: int, until_s: float = 0.0) -> list[str]:
    """Return a bar of `width` characters and the sum of each state; nothing if no time has passed.

    The bar of a request that has not ended reaches to `until_s`, now.
    """
    parts = spans(story, 0.0 if ended else until_s)
    if not parts:
        return []
    start, end = parts[0][0], parts[-1][1]
    cells = []
    for cell in range(width):
        begin_s = start + (end - start) * cell / width
        end_s = start + (end - start) * (cell + 1) / width
        shares = dict.fromkeys(MARKS, 0.0)
        for begin, stop, state in parts:
            shares[state] += max(0.0, min(stop, end_s) - max(begin, begin_s))
        cells.append(MARKS[max(shares, key=lambda state: shares[state])])
    sums = []
    for state, mark in MARKS.items():
        seconds = sum(stop - begin for begin, stop, one in parts if one == state)
        if seconds:
            sums.append(f"{mark} {state} {seconds:.3f} s")
    bar = "".join(cells) + ("|" if ended else "…")
    return [f"{start:.3f} s {bar} {end:.3f} s", "   ".join(sums)]
