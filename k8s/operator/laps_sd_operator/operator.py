"""The pools of a namespace: three watches, an election, and turns for each pool while this operator leads.

A pool has a turn when its spec, its Deployment or one of its pods changed, and else every TURN_S, because a scheduler
cannot be watched. After a failed turn the next one sees all that it needs, so the operator may be killed at any
moment. It leaves no finalizer on a pool: Kubernetes' garbage collector deletes the Deployment with the pool, and a
pool can be deleted after its operator (as `helm uninstall` does). Of several operators, the holder of the Lease
(`leadership`) has turns; the others keep their watches and wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import NoReturn

from laps_sd.service.log import get_logger
from laps_sd.service.wire import Tls
from laps_sd_operator import metrics
from laps_sd_operator.api import Api
from laps_sd_operator.kubernetes import Found, Kubernetes, deployments_path, pods_path, pools_path
from laps_sd_operator.leadership import Leadership
from laps_sd_operator.objects import POOL_LABEL, Object
from laps_sd_operator.turn import Turns, failure_of
from laps_sd_operator.watching import Watched

TURN_S = 2.0
"""Seconds between two looks at a pool's scheduler."""
LEAST_S = 0.2
"""Least seconds between two turns of a pool, however often its objects change."""
TURN_LIMIT_S = 60.0
"""Seconds after which a turn is cancelled."""
HEALTHY_S = 180.0
"""Seconds without a sign of a watch, or without the end of a turn, after which the operator is not healthy."""

log = get_logger("operator")


class Operator:
    """Watches of one namespace, and the turns of its pools."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        tls: Tls | None,
        leadership: Leadership,
        *,
        turn_s: float = TURN_S,
        turn_limit_s: float = TURN_LIMIT_S,
    ) -> None:
        self._api, self._namespace, self._tls = api, namespace, tls
        self._leadership = leadership
        self._turn_s, self._turn_limit_s = turn_s, turn_limit_s
        self._pools = Watched(api, pools_path(namespace), changed=self._pool_changed)
        self._deployments = Watched(
            api, deployments_path(namespace), changed=self._object_changed, labelSelector=POOL_LABEL
        )
        self._pods = Watched(
            api, pods_path(namespace), changed=self._object_changed, labelSelector=POOL_LABEL
        )
        self._watched = (self._pools, self._deployments, self._pods)
        self._leads = False
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Task of every pool, while this operator leads."""
        self._wake: dict[str, asyncio.Event] = {}
        """Set when an object of the pool changed."""
        self._turned_s: dict[str, float] = {}
        """Time at which the last turn of the pool ended, or its turns began."""

    async def run(self) -> NoReturn:
        """Watch, take part in the election and lead, until cancelled. Raises NotDefined in an ExceptionGroup.

        The Lease is not taken before all objects are listed: an operator that cannot watch must not keep another
        one from it.
        """
        async with asyncio.TaskGroup() as tasks:
            for each in self._watched:
                metrics.watches(each)
                tasks.create_task(each.run())
            for each in self._watched:
                await each.listed.wait()
            await self._leadership.run(self._lead)
        raise AssertionError("the election does not end")

    def ages_s(self) -> dict[str, float | None]:
        """Return the seconds since each watch showed a sign; None: its objects were never listed."""
        return {each.kind: each.age_s() if each.listed.is_set() else None for each in self._watched}

    def turn_ages_s(self) -> dict[str, float]:
        """Return the seconds since the end of the last turn of each pool that this operator leads."""
        now_s = time.monotonic()
        return {name: now_s - turned_s for name, turned_s in self._turned_s.items()}

    @property
    def leads(self) -> bool:
        """True while this operator acts."""
        return self._leads

    async def _lead(self) -> None:
        self._leads = True
        metrics.LEADING.set(1)
        try:
            for name in self._pools.objects:
                self._begin(name)
            await asyncio.Event().wait()
        finally:
            self._leads = False
            metrics.LEADING.set(0)
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for name in list(self._tasks):  # a task that was cancelled before it began removes nothing
                self._forget(name)

    def _begin(self, name: str) -> None:
        self._turned_s[name] = time.monotonic()
        self._wake[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._turns(name))

    def _pool_changed(self, before: Object | None, after: Object | None) -> None:
        name = (after or before or {})["metadata"]["name"]
        if name in self._tasks:
            # A change of the status alone is the operator's own.
            if _without_status(before) != _without_status(after):
                self._wake[name].set()
        elif after is not None and self._leads:
            self._begin(name)

    def _object_changed(self, before: Object | None, after: Object | None) -> None:
        for one in (before, after):
            name = ((one or {}).get("metadata") or {}).get("labels", {}).get(POOL_LABEL)
            if name in self._wake:
                self._wake[name].set()

    def _found(self, name: str) -> Found:
        pods = (
            pod for pod in self._pods.objects.values() if pod["metadata"]["labels"].get(POOL_LABEL) == name
        )
        return Found(self._pools.objects.get(name), self._deployments.objects.get(name), tuple(pods))

    async def _turns(self, name: str) -> None:
        logger = log.bind(pool=f"{self._namespace}/{name}")
        kubernetes = Kubernetes(self._api, self._namespace, name, lambda: self._found(name))
        turns = Turns(kubernetes, self._tls, logger, self._leadership.held)
        failed = ""
        try:
            # A pool that the watch still has may be gone already: then the watch shows it soon.
            while name in self._pools.objects:
                self._wake[name].clear()
                try:
                    async with asyncio.timeout(self._turn_limit_s):
                        ended = await turns.turn()
                    if ended is not None:
                        metrics.turned(name, ended.problem, ended.counts)
                    if failed:
                        logger.info("a turn succeeded again")
                    failed = ""
                except Exception as error:
                    # Logged once: an API server may be unreachable for long.
                    if repr(error) != failed:
                        logger.exception("a turn failed; the next one begins anew")
                    failed = repr(error)
                    await self._report(name, turns, error)
                self._turned_s[name] = time.monotonic()
                await asyncio.sleep(LEAST_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._turn_s):
                        await self._wake[name].wait()
        finally:
            self._forget(name)

    def _forget(self, name: str) -> None:
        for found in (self._tasks, self._wake, self._turned_s):
            found.pop(name, None)
        metrics.forget(name)

    async def _report(self, name: str, turns: Turns, error: Exception) -> None:
        problem = failure_of(error)
        metrics.turned(name, problem, None)
        try:
            async with asyncio.timeout(self._turn_limit_s):
                await turns.report_failure(problem)
        except Exception as unreported:
            log.info("the failed turn cannot be reported yet", pool=name, error=repr(unreported))


def _without_status(pool: Object | None) -> tuple[object, ...]:
    """Return what of a pool is not its status."""
    metadata = (pool or {}).get("metadata", {})
    return metadata.get("uid"), metadata.get("generation"), metadata.get("deletionTimestamp")
