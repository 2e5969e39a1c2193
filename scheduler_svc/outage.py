"""Whether the record can be used now, said once: one line when it goes, one when it is back, a gauge and a counter."""

from __future__ import annotations

import time

from laps_sd.log import get_logger
from laps_sd.v1 import admin_pb2 as admin_pb
from scheduler_svc import metrics
from scheduler_svc.store.errors import Fault, StoreUnavailable

log = get_logger(__name__)


class Outage:
    """One per process: a leader's loop, its lease and a standby all hear of the same record."""

    def __init__(self) -> None:
        self.stuck = False
        """A write of the leader waits for the record; submissions are refused at the door instead of queued behind it."""
        self._faults: list[Fault] = []
        self._error = ""
        """Of the latest fault."""
        self._began_s = 0.0

    @property
    def on(self) -> bool:
        """Whether the record was unavailable when it was last needed."""
        return bool(self._faults)

    def began(self, error: StoreUnavailable, *, stuck: bool = False) -> None:
        """Something could not be read or written. Each kind of fault is told once in an outage."""
        self.stuck = self.stuck or stuck
        self._error = str(error)
        if not self._faults:
            self._began_s = time.monotonic()
        if error.fault in self._faults:
            return
        self._faults.append(error.fault)
        metrics.STORE_DOWN.set(1)
        metrics.STORE_FAULTS.labels(error.fault.value).inc()
        log.error(
            "the record is unavailable: nothing is admitted or shown until it is back",
            fault=error.fault.value,
            error=str(error),
        )

    def report(self) -> admin_pb.RecordOutage | None:
        """Return what an operator is shown of the outage; None while there is none."""
        if not self._faults:
            return None
        lasts_s = time.monotonic() - self._began_s
        return admin_pb.RecordOutage(fault=self._faults[-1].value, error=self._error, lasts_s=lasts_s)

    def answered(self, *, writable: bool = False) -> None:
        """It can be reached; `writable`: and took a write that needs memory. That ends no outage while another write waits, and
        without `writable` none for which a server needs more memory.
        """
        if not self.stuck and (writable or Fault.FULL not in self._faults):
            self.wrote()

    def wrote(self) -> None:
        """It took what it was given."""
        self.stuck = False
        if self._faults:
            log.info("the record is back", faults=[fault.value for fault in self._faults])
            self._faults = []
            metrics.STORE_DOWN.set(0)
