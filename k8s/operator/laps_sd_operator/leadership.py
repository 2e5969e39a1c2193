"""Which operator acts: the one that holds the Lease `laps-sd-operator` of its namespace, as Kubernetes' own controllers decide it.

    leadership = Leadership(api, "models", "laps-sd-operator-7c9f-x2x")
    await leadership.run(operator.lead)    # `lead()` runs while the Lease is held, and is cancelled when it is lost
    await leadership.release()             # the next one need not wait until it expires

The holder renews every RETRY_S and stops RENEW_S after the last renewal that succeeded; others take over when they have seen it unchanged
for LEASE_S. So the one has stopped before the other begins, whatever their clocks say. A process that stood still meanwhile does not know
yet that it lost: `held()` does, and is asked before every action.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd.log import get_logger
from laps_sd_operator.answers import CONFLICT, if_there

LEASE = "laps-sd-operator"
LEASES = ("coordination.k8s.io", "v1")
LEASE_S, RENEW_S, RETRY_S = 15.0, 10.0, 2.0
"""As Kubernetes' controllers have them."""
NEVER = float("-inf")

log = get_logger("operator.leadership")


class Leadership:
    """One candidate. `identity` is its pod's name: a container that is started again in the same pod goes on at once."""

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
        # Objects as they are: the client's own class for a Lease writes a time of a whole second without its fraction, which the
        # API server then refuses, and drops fields that are newer than the client.
        self._objects = client.CustomObjectsApi(api)
        self._leases = (*LEASES, namespace, "leases")
        self._identity = identity
        self._lease_s, self._renew_s, self._retry_s = lease_s, renew_s, retry_s
        self._renewed_s = NEVER
        """When the last renewal that succeeded was sent."""
        self._seen: tuple[str, float] = "", NEVER
        """The Lease's version, and since when it is that."""
        self._failed = ""

    def held(self) -> bool:
        """Whether the Lease is held for certain: the last renewal is not too long ago."""
        return _now_s() < self._renewed_s + self._renew_s

    async def run(self, lead: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stands for election for ever; runs `lead()` each time it wins, until it loses or `lead()` raises."""
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
        """Leaves the Lease without a holder, if it is held. To be called when nothing acts any more."""
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
        """Takes the Lease or renews it, if it may."""
        sent_s = _now_s()
        # Half of what a term lasts leaves time for a second try; who leads must not wait beyond its term.
        left_s = self._renewed_s + self._renew_s - sent_s if self.held() else self._renew_s
        try:
            async with asyncio.timeout(min(self._renew_s / 2, left_s)):
                won = await self._take()
        except Exception as error:  # whatever it is: a candidate that ended here would never stand again, and nobody would see it
            if isinstance(error, ApiException) and error.status == CONFLICT:
                return  # somebody else was faster
            failed = f"{error.status} {error.body!r}" if isinstance(error, ApiException) else repr(error)
            if failed != self._failed:  # said once: an API server may be away for long
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
        # With the version that was read: of two that try, one gets a conflict.
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
    """Goes on while a process stands still."""
    return asyncio.get_running_loop().time()
