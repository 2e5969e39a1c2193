"""Election of the acting operator: the holder of the Lease `laps-sd-operator` in its namespace, by the method
of Kubernetes' own controllers.

    leadership = Leadership(api, "models", "laps-sd-operator-7c9f-x2x")
    # `lead()` runs while the Lease is held, and is cancelled when it is lost.
    await leadership.run(operator.lead)
    # The next holder need not wait until the Lease expires.
    await leadership.release()

The holder renews every RETRY_S and stops RENEW_S after the last successful renewal; a candidate takes over
when the Lease was unchanged for LEASE_S. So the old holder stops before the new one begins, even if their
clocks differ. A suspended process cannot notice at once that it lost the Lease: `held()` compares times, and
is called before every action.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd.service.log import get_logger
from laps_sd_operator.answers import CONFLICT, if_there

LEASE = "laps-sd-operator"
LEASES = ("coordination.k8s.io", "v1")
LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0
"""Seconds: length of the Lease, limit of renewal, interval of tries; values of Kubernetes' controllers."""
NEVER = float("-inf")

log = get_logger("operator.leadership")


class Leadership:
    """One candidate. `identity` is the name of its pod: a container that restarts in the same pod continues
    at once.
    """

    def __init__(
        self,
        api: client.ApiClient,
        namespace: str,
        identity: str,
        *,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
        retry_s: float = RETRY_S,
    ) -> None:
        # Plain objects: the client's own class for a Lease writes a time of a whole second without its
        # fraction, which the API server refuses, and drops fields that are newer than the client.
        self._objects = client.CustomObjectsApi(api)
        self._leases = (*LEASES, namespace, "leases")
        self._identity = identity
        self._lease_s, self._renew_s, self._retry_s = lease_s, renew_s, retry_s
        self._renewed_s = NEVER
        """Time at which the last successful renewal was sent."""
        self._seen: tuple[str, float] = "", NEVER
        """Version of the Lease, and the time at which it was first read."""
        self._failed = ""

    def held(self) -> bool:
        """Return whether the Lease is certainly held: the last renewal is less than `renew_s` old."""
        return _now_s() < self._renewed_s + self._renew_s

    async def run(self, lead: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Take part in the election without end; run `lead()` after each win, until the Lease is lost or
        `lead()` raises.
        """
        logger = log.bind(lease=LEASE, identity=self._identity)
        logger.info("stands for election")
        while True:
            await self._try()
            if self.held():
                logger.info("leads")
                async with asyncio.TaskGroup() as tasks:
                    leading = tasks.create_task(lead())
                    while self.held():
                        await asyncio.sleep(self._retry_s)
                        await self._try()
                    leading.cancel()
                logger.warning("leads no more")
            await asyncio.sleep(self._retry_s)

    async def release(self) -> None:
        """Remove the holder from the Lease, if this candidate holds it. Call it after the last action."""
        if not self.held():
            return
        self._renewed_s = NEVER
        try:
            async with asyncio.timeout(self._renew_s / 2):
                lease = await self._read()
                if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"] |= {"holderIdentity": None, "leaseDurationSeconds": 1}
                    await self._objects.replace_namespaced_custom_object(*self._leases, LEASE, lease)
        except Exception as error:
            log.info("the lease could not be given up and runs out", lease=LEASE, error=repr(error))

    async def _try(self) -> None:
        """Take or renew the Lease, if this is allowed."""
        sent_s = _now_s()
        # Half of the term leaves time for a second try; the leader must not wait beyond its term.
        left_s = self._renewed_s + self._renew_s - sent_s if self.held() else self._renew_s
        try:
            async with asyncio.timeout(min(self._renew_s / 2, left_s)):
                won = await self._take()
        except Exception as error:
            # Every error is caught: a candidate that ended here would silently never try again.
            if isinstance(error, ApiException) and error.status == CONFLICT:
                return  # another candidate was faster
            failed = f"{error.status} {error.body!r}" if isinstance(error, ApiException) else repr(error)
            # Logged once: an API server may be unreachable for long.
            if failed != self._failed:
                log.warning("the lease cannot be had or renewed", lease=LEASE, error=failed)
            self._failed = failed
            return
        self._failed = ""
        self._renewed_s = sent_s if won else NEVER

    async def _take(self) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = await self._read()
        if lease is None:
            kind = {"apiVersion": "/".join(LEASES), "kind": "Lease"}
            made = kind | {"metadata": {"name": LEASE}, "spec": self._spec(now, acquired=now, changes=0)}
            await self._objects.create_namespaced_custom_object(*self._leases, made)
            return True
        spec = lease.get("spec") or {}
        holder, version = spec.get("holderIdentity") or "", lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = version, _now_s()
        if holder == self._identity:
            lease["spec"] = spec | {"renewTime": now}
        elif not holder or _now_s() >= self._seen[1] + spec.get("leaseDurationSeconds", self._lease_s):
            lease["spec"] = self._spec(now, acquired=now, changes=spec.get("leaseTransitions", 0) + 1)
        else:
            return False
        # The write carries the version that was read: of two candidates, one gets a conflict.
        await self._objects.replace_namespaced_custom_object(*self._leases, LEASE, lease)
        return True

    def _spec(self, now: str, *, acquired: str, changes: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._lease_s),
            "acquireTime": acquired,
            "renewTime": now,
            "leaseTransitions": changes,
        }

    async def _read(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await if_there(
            self._objects.get_namespaced_custom_object(*self._leases, LEASE)
        )
        return found


def _now_s() -> float:
    """Return the loop's time in seconds, which also advances while the process is suspended."""
    return asyncio.get_running_loop().time()
