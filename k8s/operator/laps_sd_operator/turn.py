"""One turn of one pool: look, decide, act, report.

The watches show whether there is anything to do. If there is, the turn reads the objects again and decides by what
it read: the watches may not yet show the last write, and an operator that does not see its own mark would drain a
second worker.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd.service.wire import Tls
from laps_sd_operator import checks, objects, scheduler
from laps_sd_operator.answers import body_of, refusal_of
from laps_sd_operator.drift import Drift
from laps_sd_operator.events import Events
from laps_sd_operator.kubernetes import Found, Kubernetes
from laps_sd_operator.objects import Object, Shard
from laps_sd_operator.problems import Problem, Reason
from laps_sd_operator.reconcile import (
    Action,
    Adopt,
    Create,
    Drain,
    Mark,
    Release,
    Scale,
    Seen,
    Spare,
    Update,
    reconcile,
)
from laps_sd_operator.status import Counts, counts_of, failed_status, status_of

MANY_CONFLICTS = 5
"""Turns in a row that lose to another writer, after which that is a problem."""

FIGURES, FIGURES_S = {"queued", "backlogSeconds", "acceptance", "tokensPerSecond"}, 10.0
"""Fields of the status that always change, and the least seconds between two writes of nothing but them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """Result of a turn of an existing pool."""

    problem: Problem | None = None
    counts: Counts | None = None


class Turns:
    """Turns of one pool, and what one turn leaves for the next. `may_act` returns whether this operator leads."""

    def __init__(
        self, kubernetes: Kubernetes, tls: Tls | None, logger: Any, may_act: Callable[[], bool] = lambda: True
    ) -> None:
        self.events = Events(kubernetes)
        self.drift = Drift()
        self._kubernetes = kubernetes
        self._tls = tls
        self._logger = logger
        self._may_act = may_act
        self._conflicts = 0
        self._reported_s = -FIGURES_S
        """Time at which the status was last written."""

    async def turn(self) -> Ended | None:
        """Run one turn; return None if the pool no longer exists. It ends early when the operator may not act.

        Raises every error of Kubernetes' API that is not an answer to an action.
        """
        found = await self._kubernetes.watched()
        shard, problem, works = None, None, False
        if found.pool is not None and _lives(found.pool):
            shard, problem = await self._ask(found.pool)
            works = self._has_work(found, shard)
        if works:
            # Read after the scheduler: a worker that drains there was marked before, so the mark is seen here
            # and no second worker is chosen.
            found = await self._kubernetes.read()
        if found.pool is None:
            return None
        if not _lives(found.pool):
            return Ended()  # its objects are deleted with it
        pool, deployment = found.pool, found.deployment
        seen = objects.seen_of(pool, deployment, found.pods, shard, time.time())
        not_owned = checks.not_owned(pool, deployment)
        problem = not_owned or checks.no_pods(deployment) or checks.paused(deployment) or problem
        if not_owned is None and works:
            try:
                seen = await self._act(pool, deployment, seen)
            except ApiException as error:
                problem = self._refused(error) or problem
            except scheduler.NoScheduler as error:
                problem = unreachable(error)
            else:
                self._conflicts = 0
        if not_owned is None:
            problem = problem or self.drift.problem()
        if self._may_act():
            status = status_of(pool, seen, shard, problem, deployment, found.pods)
            await self._report(pool, status, problem)
        return Ended(problem, counts_of(seen))

    async def report_failure(self, problem: Problem) -> None:
        """Report a turn that ended by an error. Raises errors of Kubernetes' API."""
        pool = (await self._kubernetes.watched()).pool
        if pool is not None and self._may_act():
            await self._report(pool, failed_status(pool, problem, time.time()), problem)

    async def _ask(self, pool: Object) -> tuple[Shard | None, Problem | None]:
        try:
            shard = await scheduler.shard(pool["spec"]["scheduler"], self._tls)
        except scheduler.NoScheduler as error:
            return None, unreachable(error)
        return shard, checks.unequal_ranks(pool) or checks.other_policy(pool, shard)

    def _has_work(self, found: Found, shard: Shard | None) -> bool:
        assert found.pool is not None
        seen = objects.seen_of(found.pool, found.deployment, found.pods, shard, time.time())
        return bool(reconcile(seen)) or not self.drift.is_compared(found.pool, found.deployment)

    async def _act(self, pool: Object, deployment: Object | None, seen: Seen) -> Seen:
        """Execute the next actions; return what was seen, a change by others included.

        A template that Kubernetes refuses does not stop the other actions, which do not depend on it: it is
        raised after them.
        """
        changed = ""
        refused: ApiException | None = None
        if deployment is not None and seen.up_to_date and self._may_act():
            changed = await self.drift.find(self._kubernetes, pool, deployment)
            seen = dataclasses.replace(seen, up_to_date=not changed)
        for action in reconcile(seen):
            if not self._may_act():
                break
            self._logger.info("acts", action=str(action), **({"because": changed} if changed else {}))
            try:
                await carry_out(action, pool, deployment, self._kubernetes, self._tls)
            except ApiException as error:
                if not isinstance(action, Update) or not refusal_of(error):
                    raise
                refused = error
                continue
            if changed and isinstance(action, Update):
                self.drift.mended()
                await self.events.acted(pool, "Mended", f"{changed}; the pool's template is back")
            else:
                await self.events.acted(pool, *described_action(action))
        if refused is not None:
            raise refused
        return seen

    def _refused(self, error: ApiException) -> Problem | None:
        message = refusal_of(error)
        if message:
            return Problem(Reason.REFUSED, message)
        self._conflicts += 1
        if self._conflicts < MANY_CONFLICTS:
            return None
        return Problem(
            Reason.REFUSED,
            f"{self._conflicts} turns in a row: {error.status} {error.reason}: {body_of(error)}",
        )

    async def _report(self, pool: Object, status: dict[str, Any], problem: Problem | None) -> None:
        told = pool.get("status") or {}
        if problem is not None and str(problem) != told.get("problem"):
            self._logger.warning("cannot do all it should", reason=problem.reason, problem=str(problem))
        await self.events.warn(pool, problem)  # first: it arrives even if the API server refuses the status
        differs = {key for key, value in status.items() if told.get(key) != value}
        if differs and (differs - FIGURES or time.monotonic() >= self._reported_s + FIGURES_S):
            await self._kubernetes.patch_status(status)
            self._reported_s = time.monotonic()


def _lives(pool: Object | None) -> bool:
    return pool is not None and not pool["metadata"].get("deletionTimestamp")


def unreachable(error: scheduler.NoScheduler) -> Problem:
    """Return the problem that no scheduler answers."""
    return Problem(Reason.NO_SCHEDULER, f"no scheduler answers: {error}")


def failure_of(error: BaseException) -> Problem:
    """Return the problem that a turn ended by an error."""
    if isinstance(error, ApiException):
        line = refusal_of(error) or f"Kubernetes answers {error.status}: {error.reason}"
    elif isinstance(error, TimeoutError):
        line = "no answer in time"
    else:
        line = f"{type(error).__name__}: {error}"
    return Problem(Reason.TURN_FAILED, f"a turn of the operator failed: {line}")


async def carry_out(
    action: Action, pool: Object, deployment: Object | None, kubernetes: Kubernetes, tls: Tls | None
) -> None:
    """Execute one action. Raises ApiException and NoScheduler."""
    if isinstance(action, Create):
        await kubernetes.create(objects.deployment_of(pool, action.replicas))
        return
    assert deployment is not None, "without a Deployment it is created"
    match action:
        case Update():
            await kubernetes.patch_deployment(objects.template_patch(pool, deployment))
        case Scale(replicas):
            await kubernetes.patch_deployment(objects.scale_patch(deployment, replicas))
        case Adopt(replicas):
            await kubernetes.patch_pool({"spec": {"replicas": replicas}})
            await kubernetes.patch_deployment(
                objects.annotation_patch(deployment, objects.LAST_SET, str(replicas))
            )
        case Mark(pod, since_s):
            await kubernetes.patch_pod(pod, objects.mark_patch(since_s))
        case Release(pod):
            await kubernetes.patch_pod(pod, objects.release_patch())
        case Spare(pod):
            await kubernetes.patch_pod(pod, objects.spare_patch())
        case Drain(worker):
            await scheduler.drain(pool["spec"]["scheduler"], tls, worker)


def described_action(action: Action) -> tuple[str, str]:
    """Return reason and message of the Event about an action."""
    match action:
        case Create(replicas):
            return "Created", f"created the Deployment with {replicas} workers"
        case Update():
            return "Updated", "gave the Deployment the pool's template"
        case Scale(replicas):
            return "Scaled", f"set the Deployment to {replicas} workers"
        case Adopt(replicas):
            return "Adopted", f"took {replicas} workers from the Deployment, which was scaled directly"
        case Mark(pod, _):
            return "Chosen", f"marked {pod} for removal"
        case Release(pod):
            return "Released", f"{pod} may go: it has no requests, is not ready, or its drain time is over"
        case Spare(pod):
            return "Spared", f"removed the mark of {pod}"
        case Drain(worker):
            return "Draining", f"the scheduler drains {worker}"
