"""The time from a report at its worker to its tokens at the gateway, by the machine's monotonic clock.

Workers and client are processes of one machine, so both read the same clock. Requests are sampled by their
id: both sides choose the same ones without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


def is_sampled(request_id: str) -> bool:
    """Return whether a request is sampled: each tenth one, so that nearly every report has some."""
    return request_id.endswith("0")


class Sample(NamedTuple):
    """One request in one report."""

    request_id: str
    position: int
    """Output position of its first token in the report."""
    sent_s: float
    """When the report was handed to the stream."""


class Arrivals:
    """When tokens of the sampled requests arrived at the client."""

    def __init__(self) -> None:
        self._noted: dict[str, list[tuple[int, float]]] = {}
        """By request: the number of its tokens after each delivery, and the time of it, in order."""

    def note(self, now_s: float, reached: Iterable[tuple[str, int]]) -> None:
        """Note one message of deliveries: requests with the number of their tokens after it."""
        for request_id, tokens in reached:
            if is_sampled(request_id):
                self._noted.setdefault(request_id, []).append((tokens, now_s))

    def when(self, request_id: str, position: int) -> float | None:
        """Return when the first delivery came that covers a position; None if none has.

        A delivery may contain the tokens of several rounds.
        """
        noted = self._noted.get(request_id, ())
        return next((at_s for tokens, at_s in noted if tokens > position), None)


class Latencies(NamedTuple):
    """Latencies of samples in ascending order, and how many samples have not arrived."""

    ms: list[float]
    not_arrived: int


def join(samples: Sequence[Sample], arrivals: Arrivals, until_s: float) -> Latencies:
    """Return the latencies of samples. One that had not arrived at `until_s` counts as if it arrived then."""
    latencies_ms = []
    not_arrived = 0
    for sample in samples:
        at_s = arrivals.when(sample.request_id, sample.position)
        if at_s is None:
            not_arrived += 1
            at_s = until_s
        latencies_ms.append((at_s - sample.sent_s) * 1e3)
    return Latencies(sorted(latencies_ms), not_arrived)
