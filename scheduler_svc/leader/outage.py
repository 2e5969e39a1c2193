"""The availability of the record, logged once: one line when an outage begins, one when it ends, a gauge and
a counter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from laps_sd.service.log import get_logger
from scheduler_svc import metrics
from scheduler_svc.store.errors import Fault, StoreUnavailable

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OutageReport:
    """State of an outage, for an operator."""

    fault: str
    error: str
    lasts_s: float


class Outage:
    """Availability of the record, one object per process: a leader's loop, its lease and a standby all use
    the same record.
    """

    def __init__(self) -> None:
        self.stuck = False
        """True while a write of the leader waits for the record; submissions are then refused on arrival
        instead of queued after it.
        """
        self.lasting = False
        """True while the leader could not renew its lease or make its trial write at the last attempt; submissions
        are then refused on arrival too. An error of one other exchange alone does not refuse the next.
        """
        self._faults: list[Fault] = []
        self._error = ""
        """Error text of the latest fault."""
        self._began_s = 0.0

    @property
    def on(self) -> bool:
        """Return True if the record was unavailable when it was last needed."""
        return bool(self._faults)

    def refuses(self, *, restores: bool) -> bool:
        """Return True if a submission need not be tried. One that restores a request is kept where it can be: its
        gateway may not come again.
        """
        return self.stuck or (self.lasting and not restores)

    def began(self, error: StoreUnavailable, *, stuck: bool = False, lasting: bool = False) -> None:
        """Note that a read or a write failed. Each kind of fault is logged once in an outage."""
        self.stuck = self.stuck or stuck
        self.lasting = self.lasting or lasting
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

    def report(self) -> OutageReport | None:
        """Return the state of the outage for an operator; None while there is none."""
        if not self._faults:
            return None
        lasts_s = time.monotonic() - self._began_s
        return OutageReport(fault=self._faults[-1].value, error=self._error, lasts_s=lasts_s)

    def answered(self, *, writable: bool = False) -> None:
        """Note that the record answered. This ends the outage, unless a write of the leader still waits, or the server
        was full and it is not known to be `writable`: it took a write that needs memory, or this process has none to
        make.
        """
        if not self.stuck and (writable or Fault.FULL not in self._faults):
            self.wrote()

    def wrote(self) -> None:
        """Note that the record took the write that was sent to it."""
        self.stuck = self.lasting = False
        if self._faults:
            log.info("the record is back", faults=[fault.value for fault in self._faults])
            self._faults = []
            metrics.STORE_DOWN.set(0)
