"""Kubernetes Events of one pool, which `kubectl describe` shows: one for each action, and Warnings for problems."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from laps_sd.service.log import get_logger
from laps_sd_operator.kubernetes import Kubernetes
from laps_sd_operator.objects import GROUP, KIND, VERSION, Object
from laps_sd_operator.problems import MAX_MESSAGE, Problem

REPEAT_S = 1800.0
"""Seconds after which a Warning that still holds is sent again; Kubernetes keeps an Event for an hour."""
LEAST_S = 60.0
"""Least seconds between two Warnings with the same reason, if the words differ or the problem was over in between."""

log = get_logger("operator")


class Events:
    """Events of one pool. `clock` returns seconds."""

    def __init__(self, kubernetes: Kubernetes, clock: Callable[[], float] = time.monotonic) -> None:
        self._kubernetes = kubernetes
        self._clock = clock
        self._warned: dict[str, tuple[str, float]] = {}
        """Message and time of the last Warning with each reason; an empty message: the problem is over."""
        self._failed = ""

    async def warn(self, pool: Object, problem: Problem | None) -> None:
        """Send a Warning about the pool's problem, unless it was sent a short time ago. None: there is none."""
        for reason, (_, sent_s) in self._warned.items():
            if problem is None or reason != problem.reason:
                self._warned[reason] = "", sent_s
        if problem is None:
            return
        message, now_s = str(problem), self._clock()
        if problem.reason in self._warned:
            before, sent_s = self._warned[problem.reason]
            if now_s < sent_s + (REPEAT_S if before == message else LEAST_S):
                return
        if await self._send(pool, "Warning", problem.reason, message):
            self._warned[problem.reason] = message, now_s

    async def acted(self, pool: Object, reason: str, message: str) -> None:
        """Send an Event about an action."""
        await self._send(pool, "Normal", reason, message)

    async def _send(self, pool: Object, kind: str, reason: str, message: str) -> bool:
        try:
            await self._kubernetes.create_event(event_of(pool, kind, reason, message))
        except Exception as error:
            # An Event is a copy of what the log and the status show: a turn does not fail with it.
            if repr(error) != self._failed:
                log.warning("an Event cannot be written", error=repr(error))
            self._failed = repr(error)
            return False
        self._failed = ""
        return True


def event_of(pool: Object, kind: str, reason: str, message: str) -> dict[str, Any]:
    """Return an Event about the pool."""
    metadata = pool["metadata"]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": kind,
        "reason": str(reason),
        "message": message[:MAX_MESSAGE],
        "source": {"component": "laps-sd-operator"},
        "reportingComponent": f"{GROUP}/operator",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
