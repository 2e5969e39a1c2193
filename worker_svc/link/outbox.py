"""Reports that no leader has acknowledged: sent once on each stream, in order, until they are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from laps_sd.service.leader_link import COLUMNS_VERSION
from laps_sd.v1 import worker_link_pb2 as pb
from worker_svc import metrics
from worker_svc.link.wire import without_columns

__all__ = ["Outbox"]

REPORTS_PER_MESSAGE = 256
BYTES_PER_MESSAGE = 2 * 1024 * 1024
"""Bounds of one RoundReports message; only reached when reports are offered again."""


@dataclass(slots=True)
class _Kept:
    """A report that is not acknowledged by a leader."""

    report: pb.RoundReport
    tokens: int


class Outbox:
    """The unacknowledged reports of a worker; see the module's docstring."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self._unsent: deque[_Kept] = deque()
        """The tail of `_kept` that was not sent on the present stream."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def unsent(self) -> bool:
        """True if a report must be sent on the present stream."""
        return bool(self._unsent)

    def add(self, report: pb.RoundReport, tokens: int) -> None:
        """Keep a new report, which has `tokens` output tokens."""
        kept = _Kept(report, tokens)
        self._kept.append(kept)
        self._unsent.append(kept)
        self._tokens += tokens
        self._observe()

    def offer_again(self) -> None:
        """Send all reports again: a new stream begins."""
        self._unsent = deque(self._kept)

    def next_message(self, protocol_version: int) -> pb.RoundReports:
        """Return unsent reports, within the bounds of a message, and mark them as sent. They are as a scheduler
        of this version reads them.
        """
        batch: list[pb.RoundReport] = []
        room = BYTES_PER_MESSAGE
        while self._unsent and len(batch) < REPORTS_PER_MESSAGE and room > 0:
            report = self._unsent.popleft().report
            if protocol_version < COLUMNS_VERSION:
                report = without_columns(report)
            batch.append(report)
            if self._unsent:  # a report that goes alone need not be measured
                room -= report.ByteSize()
        return pb.RoundReports(reports=batch)

    def acknowledge(self, number: int) -> None:
        """Forget the report of this number and all before it."""
        while self._kept and self._kept[0].report.number <= number:
            self._tokens -= self._kept.popleft().tokens
        while self._unsent and self._unsent[0].report.number <= number:
            self._unsent.popleft()
        self._observe()

    def _observe(self) -> None:
        metrics.UNACKNOWLEDGED_TOKENS.set(self._tokens)
        metrics.UNACKNOWLEDGED_REPORTS.set(len(self._kept))
