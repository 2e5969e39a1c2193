"""Watch, from outside, of whether the schedulers of a one-machine stack can write their record.

It gives one line when they no longer can, and one when they can again. `laps-sd up` uses it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc

__all__ = ["RecordWatch"]

LOOK_EVERY_S = 1.0
ANSWER_S = 1.0
"""Time limit for the answer of one scheduler, which needs no access to the record."""


class RecordWatch:
    """Watch of the record; see the top of this file.

    Its own thread checks from the start of `with` to its end.
    """

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
        self._stack = stack
        self._report = report
        self._describe = describe
        self._began_s: float | None = None
        """Time at which the outage began; None while there is none."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laps-sd-record-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
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
        with grpc.insecure_channel(address) as channel:
            try:
                answer: admin_pb2.GetRecordResponse = admin_pb2_grpc.AdminStub(channel).GetRecord(
                    admin_pb2.GetRecordRequest(), timeout=ANSWER_S
                )
            except grpc.RpcError:
                return None
        return answer
