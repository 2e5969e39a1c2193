"""Watch, from outside, of whether the schedulers of a one-machine stack can write their record.

It gives one line when they no longer can, and one when they can again. `laps-sd up` uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from laps_sd.service.wire import channel_options
from laps_sd.stack.local import LocalStack
from laps_sd.stack.polling import Polling
from laps_sd.v1 import admin_pb2, admin_pb2_grpc

__all__ = ["RecordWatch"]

LOOK_EVERY_S = 1.0
ANSWER_S = 1.0
"""Time limit for the answer of one scheduler, which needs no access to the record."""


class RecordWatch(Polling):
    """Watch of the record; see the top of this file."""

    def __init__(
        self,
        stack: LocalStack,
        *,
        report: Callable[[str], None],
        describe: Callable[[admin_pb2.RecordOutage], str],
    ) -> None:
        """Prepare a watch.

        `report` gets the lines, from the thread of this watch; `describe` makes the first one.
        """
        super().__init__("laps-sd-record-watch", LOOK_EVERY_S)
        self._stack = stack
        self._report = report
        self._describe = describe
        self._began_s: float | None = None
        """Time at which the outage began; None while there is none."""

    def look(self) -> None:
        """Report what has changed since the last look."""
        answers = [self._query(address) for address in self._stack.scheduler_addresses]
        outages = [
            answer.record_outage
            for answer in answers
            if answer is not None and answer.HasField("record_outage")
        ]
        if outages and self._began_s is None:
            first = max(outages, key=lambda outage: outage.lasts_s)
            self._began_s = time.monotonic() - first.lasts_s
            self._report(self._describe(first))
        elif self._began_s is not None and not outages and any(answer is not None for answer in answers):
            lasted_s = time.monotonic() - self._began_s
            self._began_s = None
            self._report(f"the record can be written again, after {lasted_s:.0f} s")

    def _query(self, address: str) -> admin_pb2.GetRecordResponse | None:
        """Return a scheduler's state of its record; None if it does not answer."""
        with grpc.insecure_channel(address, options=channel_options(address)) as channel:
            try:
                answer: admin_pb2.GetRecordResponse = admin_pb2_grpc.AdminStub(channel).GetRecord(
                    admin_pb2.GetRecordRequest(), timeout=ANSWER_S
                )
            except grpc.RpcError:
                return None
        return answer
