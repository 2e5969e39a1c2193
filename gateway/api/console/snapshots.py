"""The state of all shards once a second, shared by all viewers.

    snapshots = Snapshots(shards)
    snapshot = await snapshots.after(None)           # then: await snapshots.after(snapshot)
    text = snapshot.json_for(tenant, sees_all=False)

While no viewer waits for a snapshot, no scheduler is called.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable

from gateway.api.openai.body import Json
from gateway.links.link import ShardLink, Survey
from gateway.links.shards import Shards
from laps_sd.errors import LapsSdError
from laps_sd.v1 import admin_pb2, inference_pb2

__all__ = ["COLUMNS", "MAX_REQUESTS", "Snapshot", "Snapshots"]

EVERY_S = 1.0
"""Interval between two snapshots, in seconds."""
WAIT_S = 2.0
"""How long a shard's leader may take to answer; then the snapshot is made without that shard."""
MAX_REQUESTS = 1000
"""Requests of a shard in a snapshot, those of the best rank. Listing them takes the leader 6 ms."""
MAX_WORKERS = 1000
COLUMNS = (
    "id",
    "tenant",
    "priority",
    "state",
    "level",
    "perceptible",
    "age_s",
    "attained_s",
    "tokens",
    "worker",
)
"""Names of the values in the row of one request."""
STATES = {
    inference_pb2.Explanation.STATE_QUEUED: "queued",
    inference_pb2.Explanation.STATE_LISTED: "listed",
    inference_pb2.Explanation.STATE_RUNNING: "running",
}


class Snapshot:
    """The shards at one time, and the JSON of it for each kind of viewer."""

    def __init__(self, taken_s: float, surveys: dict[str, Survey | LapsSdError]) -> None:
        """`taken_s`: in the loop's time. A survey that failed is its error."""
        self.taken_s = taken_s
        self._surveys = surveys
        self._texts: dict[str | None, bytes] = {}

    def json_for(self, tenant: str, *, sees_all: bool) -> bytes:
        """Return what a tenant may see, JSON without line breaks: its own requests, with `sees_all` those of
        all tenants and the workers."""
        key = None if sees_all else tenant
        text = self._texts.get(key)
        if text is None:
            shards = [_shard_json(shard, survey, key) for shard, survey in sorted(self._surveys.items())]
            body = {"sees_all": sees_all, "columns": COLUMNS, "shards": shards}
            text = self._texts[key] = json.dumps(body, separators=(",", ":")).encode()
        return text


class Snapshots:
    """The newest snapshot; `after` may be called from any task of one loop."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._newest: Snapshot | None = None
        self._taking = asyncio.Lock()

    async def after(self, seen: Snapshot | None) -> Snapshot:
        """Return a snapshot that is at most EVERY_S old and is not `seen`; wait for it if need be."""
        now = asyncio.get_running_loop().time
        if seen is not None:
            await asyncio.sleep(max(0.0, seen.taken_s + EVERY_S - now()))
        async with self._taking:  # the first caller takes it for all
            newest = self._newest
            if newest is None or newest.taken_s + EVERY_S <= now():
                newest = self._newest = await self._take(now())
        return newest

    async def _take(self, taken_s: float) -> Snapshot:
        links = dict(self._shards.links)
        surveys = await asyncio.gather(*map(_survey, links.values()))
        return Snapshot(taken_s, dict(zip(links, surveys, strict=True)))


async def _survey(link: ShardLink) -> Survey | LapsSdError:
    try:
        return await link.survey(most=MAX_REQUESTS, wait_s=WAIT_S)
    except LapsSdError as error:
        return error


def _shard_json(shard: str, survey: Survey | LapsSdError, tenant: str | None) -> Json:
    """Return a shard's state; `tenant`: only of this tenant's requests."""
    if isinstance(survey, LapsSdError):
        return {"shard": shard, "problem": survey.message, "requests": []}
    queue = survey.queue
    entries = queue.entries[:MAX_REQUESTS]
    found: Json = {
        "shard": shard,
        "policy": queue.policy,
        "complete": len(queue.entries) < MAX_REQUESTS,
        "requests": [_row(entry) for entry in entries if tenant in (None, entry.tenant)],
    }
    if queue.HasField("record_outage"):
        found["problem"] = "The record cannot be written now: no request is admitted until it can be."
    if tenant is None:
        found |= {"total": queue.total, "workers": _workers(survey.workers.workers[:MAX_WORKERS])}
    return found


def _row(entry: admin_pb2.QueueEntry) -> list[str | int | float | bool | None]:
    """Return the values of one request, in the order of COLUMNS."""
    return [
        entry.request_id,
        entry.tenant,
        entry.priority,
        STATES.get(entry.state, "queued"),
        entry.level if entry.HasField("level") else None,
        entry.perceptible if entry.HasField("perceptible") else None,
        _number(entry.waiting_s),
        _number(entry.attained_s),
        entry.emitted_tokens,
        entry.worker_id,
    ]


def _workers(workers: Iterable[admin_pb2.WorkerStatus]) -> list[Json]:
    return [
        {
            "id": worker.worker_id,
            "name": worker.worker_name,
            "device": worker.device,
            "connected": worker.connected,
            "draining": worker.draining,
            "slots": worker.slots,
            "running": worker.running,
            "listed": worker.listed,
            "blocks": worker.target_blocks,
            "free_blocks": worker.free_target_blocks,
            "rounds": worker.rounds,
            "tokens": worker.tokens,
            "acceptance": _number(worker.acceptance),
            "tokens_per_s": _number(worker.tokens_per_s),
        }
        for worker in workers
    ]


def _number(value: float) -> float:
    """Return a value to three decimals; JSON has no NaN and no infinity."""
    return round(value, 3) if math.isfinite(value) else 0.0
