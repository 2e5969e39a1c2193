"""What the queue of a shard has room for, and when a request that it refused may come again."""

from __future__ import annotations

from laps_sd.service.retry_times import RetryTimes
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.roster import Roster
from scheduler_svc.leader.working_copy import WorkingCopy
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire import replies
from scheduler_svc.wire.replies import Refusal, SubmitRefused

MOST_TENANT_RETRIES = 1024
"""Number of tenants at their limit whose refused requests are remembered, to spread their retries."""
RETRY_STORE_MS = 1000
"""Milliseconds after which what the record did not answer to is tried again, by gateways and here."""


class QueueLimits:
    """Refusals of new requests by the limits of one shard."""

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        core: Scheduler,
        roster: Roster,
        working_copy: WorkingCopy,
        outage: Outage,
    ) -> None:
        self.workers_come_until_s = 0.0
        """Time until which workers of the leader before may dial this one, larger ones than those that have."""
        self._settings = settings
        self._core = core
        self._roster = roster
        self._working_copy = working_copy
        self._outage = outage
        self._retries = RetryTimes()
        """Retry times of the requests that the full queue refused."""
        self._tenant_retries: dict[str, RetryTimes] = {}
        """Retry times by tenant, of the requests that were refused because their tenant has too many."""

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of a new request. Without a worker every request within the settings waits;
        with workers, one that none of them could hold would never run.
        """
        limit = self._settings.max_context_tokens
        return min(limit, self._core.capacity_tokens or limit)

    def admitted_tokens(self, now_s: float) -> int:
        """Return the most tokens of a new request that is not refused now."""
        return self._settings.max_context_tokens if now_s < self.workers_come_until_s else self.most_tokens

    def refusal_of_any(self) -> SubmitRefused | None:
        """Return the reason for which any new request would be refused now; None where one within the limits
        would be accepted.

        Without a worker requests are accepted all the same: they wait for one.
        """
        outage = self._outage.report()
        if outage is not None:
            detail = f"the record of shard {self._settings.shard} cannot be written ({outage.fault})"
            return replies.refused(Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)
        if (
            len(self._working_copy.live) >= self._settings.max_requests
            or self._working_copy.prompt_tokens >= self._settings.max_queued_tokens
        ):
            return self._queue_full(self._each_s())
        return None

    def queue_full(self, now_s: float) -> SubmitRefused:
        """Refuse a request for which the queue has no room."""
        each_s = self._each_s()
        return self._queue_full(self._retries.next_s(now_s, each_s, each_s))

    def tenant_full(self, tenant: str, now_s: float) -> SubmitRefused:
        """Refuse a request of a tenant at its limit. It gets room as fast as if its requests ended as often as
        those of others.
        """
        limit = self._settings.max_requests_per_tenant
        if len(self._tenant_retries) >= MOST_TENANT_RETRIES:
            self._tenant_retries.clear()
        each_s = self._each_s() * len(self._working_copy.live) / limit
        wait_s = self._tenant_retries.setdefault(tenant, RetryTimes()).next_s(now_s, each_s, each_s)
        detail = f"the tenant has {limit} unfinished requests, which is its limit"
        return replies.refused(Refusal.TENANT_FULL, detail, round(wait_s * 1000))

    def _each_s(self) -> float:
        """Return the seconds until a full queue may have room: the estimated time of one request, bounded to
        0.1 to 30 s.
        """
        workers = max(1, len(self._roster.workers))
        each_s = self._core.totals().backlog_s / max(1, len(self._working_copy.live)) / workers
        return min(30.0, max(0.1, each_s))

    def _queue_full(self, retry_after_s: float) -> SubmitRefused:
        detail = f"the queue of shard {self._settings.shard} is full"
        return replies.refused(Refusal.QUEUE_FULL, detail, round(retry_after_s * 1000))
