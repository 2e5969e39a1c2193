"""Specifications that the runner lacks: requested from the scheduler, and again when they do not come."""

from __future__ import annotations

from collections.abc import Sequence

from laps_sd.v1 import worker_link_pb2 as pb

MISSING_AGAIN_S = 1.0
"""Seconds before a missing specification is requested again."""


class MissingSpecifications:
    """Requests whose specification is missing, and when each was requested on the present stream."""

    def __init__(self) -> None:
        self._unsent: dict[str, None] = {}
        self._requested_s: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._unsent)

    def request(self, request_ids: Sequence[str], now_s: float) -> None:
        """Request specifications, but for those that were requested a moment ago."""
        for request_id in request_ids:
            if now_s - self._requested_s.get(request_id, -MISSING_AGAIN_S) >= MISSING_AGAIN_S:
                self._unsent[request_id] = None
                self._requested_s[request_id] = now_s

    def arrived(self, request_id: str) -> None:
        """Note that a specification came."""
        self._requested_s.pop(request_id, None)

    def next_message(self) -> pb.SpecificationsMissing:
        """Return all that is to be requested; it counts as sent."""
        missing, self._unsent = list(self._unsent), {}
        return pb.SpecificationsMissing(request_ids=missing)

    def clear(self) -> None:
        """Forget everything: on a new stream the runner requests again what it lacks."""
        self._unsent.clear()
        self._requested_s.clear()
