"""Whether the record can be used now, said once: one line when it goes, one when it is back, a gauge and a counter."""

from __future__ import annotations

from laps_sd.log import get_logger
from scheduler_svc import metrics
from scheduler_svc.store.errors import Fault, StoreUnavailable

log = get_logger(__name__)


class Outage:
    """One per process: a leader's loop, its lease and a standby all hear of the same record."""

    def __init__(self) -> None:
        self.stuck = False
        """A write of the leader waits for the record; submissions are refused at the door instead of queued behind it."""
        self._faults: list[Fault] = []

    @property
    def on(self) -> bool:
        """Whether the record was unavailable when it was last needed."""
        return bool(self._faults)

    def began(self, error: StoreUnavailable, *, stuck: bool = False) -> None:
        """Something could not be read or written. Each kind of fault is told once in an outage."""
        self.stuck = self.stuck or stuck
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

    def answered(self) -> None:
        """It can be reached. That ends no outage while a write waits, nor one for which a server needs more memory."""
        if not self.stuck and Fault.FULL not in self._faults:
            self.wrote()

    def wrote(self) -> None:
        """It took what it was given."""
        self.stuck = False
        if self._faults:
            log.info("the record is back", faults=[fault.value for fault in self._faults])
            self._faults = []
            metrics.STORE_DOWN.set(0)
