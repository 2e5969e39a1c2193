"""How long does a new leader read the record before it leads? `laps-sd bench recovery`

The record of an embedded Valkey gets the unfinished requests of a dead leader, with the words of their prompts: some on
workers, with outputs in their own keys and in the log, the others waiting. A new leader takes over: it reads them, builds its
working copy, and its core ranks them. Measured from the moment when it has the lead until the loop would run its
first turn, in a process that runs nothing else; the record works on another core.

Columns: seconds of the clock, and of CPU in the leader's process (core `compiled` or not) and in the
record's; the longest time between two renewals of the lease, which a leader renews three times per period.

Goal: less than 5 s for 100,000 requests, and no two renewals further apart than the lease lasts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis.asyncio as redis_client
import uvloop

from bench._control.lengths import prompt_features
from bench.report import about, command_line, finish, progress, table
from laps_sd.contract.length_features import packed
from laps_sd.service.config import load
from laps_sd.service.tracing import QUIET
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc.__main__ import YOUNG_CONTAINERS
from scheduler_svc.core import COMPILED
from scheduler_svc.core.commands import Commit, Lease
from scheduler_svc.leader.leadership import Leadership
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.records import NewRequest, standing_at_arrival
from scheduler_svc.store.store import Store

GOAL_S = 5.0
GOAL_REQUESTS = 100_000
LEASE_S = 3.0
"""The default of a scheduler."""
SHARD = "main"
WORKERS, SLOTS = 50, 64
OUTPUT_TOKENS = 100
"""Of each request on a worker."""
PROMPT_TOKENS = 64
MEDIAN_TOKENS = 250
FILL_TOGETHER = 512
"""Requests that the dead leader writes together."""


def arguments() -> argparse.Namespace:
    parser = command_line("recovery", __doc__)
    parser.add_argument(
        "--requests", type=int, default=GOAL_REQUESTS, help=f"unfinished requests (default {GOAL_REQUESTS})"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="recoveries (default 3)")
    return parser.parse_args()


def a_request(number: int, prompt_tokens: int, rng: random.Random) -> NewRequest:
    request_id = f"{SHARD}.{number:026d}"
    prompt_ids = tuple(rng.randrange(32_000) for _ in range(prompt_tokens))
    sampling = SamplingParams(max_tokens=1024, temperature=1.0, top_p=1.0, seed=number)
    specification = gateway_pb.Specification(request_id=request_id, sampling=sampling)
    return NewRequest(
        request_id=request_id,
        tenant=f"tenant-{number % 20}",
        model="model",
        priority=0,
        workload_class="chat",
        arrival_unix_ms=round(time.time() * 1000),
        prompt_ids=prompt_ids,
        max_tokens=sampling.max_tokens,
        expected_output_tokens=None,
        deadline_unix_ms=None,
        time_limit_ms=None,
        keep=False,
        grace_ms=30_000,
        idempotency_key=f"key-{number}" if number % 4 == 0 else "",
        body_hash=f"{rng.getrandbits(256):064x}",
        seed=number,
        submission=specification.SerializeToString(),
        length_features=packed(prompt_features(request_id, MEDIAN_TOKENS)),
        prompt_blocks=b"",
    )


async def fill(url: str, options: argparse.Namespace) -> None:
    """Write the requests as a leader that dies."""
    rng = random.Random(1)
    store = Store(url, SHARD, timeout_s=60)
    assert await store.acquire_leadership(owner="dead:1", lease_s=3600)
    for first in range(0, options.requests, FILL_TOGETHER):
        count = min(FILL_TOGETHER, options.requests - first)
        await store.submit([a_request(first + at, PROMPT_TOKENS, rng) for at in range(count)])
        if first % (64 * FILL_TOGETHER) == 0:
            progress(f"filling: {first + count} of {options.requests}")
    running = [f"{SHARD}.{number:026d}" for number in range(min(options.requests, WORKERS * SLOTS))]
    batch = Batch(store)
    batch.lease([Lease(name, f"worker-{at // SLOTS}", 1) for at, name in enumerate(running)])
    await batch.execute()
    half = OUTPUT_TOKENS // 2
    for position, count in ((0, half), (half, OUTPUT_TOKENS - half)):
        batch = Batch(store)
        batch.commit(
            [
                Commit(
                    request_id,
                    lease_epoch=1,
                    position=position,
                    tokens=tuple(rng.randrange(32_000) for _ in range(count)),
                    standing=standing_at_arrival(at + 1),
                    end=None,
                    cut_characters=0,
                    detail="",
                    story=(),
                )
                for at, request_id in enumerate(running)
            ]
        )
        await batch.execute()
    await store.resign()
    await store.close()


class Renewals:
    """Renewals of the lease while a leader recovers."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._task = asyncio.create_task(self._renew())
        self._last_s = time.perf_counter()
        self.longest_gap_s = 0.0

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            assert await self._store.renew_leadership()
            self._renewed()

    def _renewed(self) -> None:
        now_s = time.perf_counter()
        self.longest_gap_s, self._last_s = max(self.longest_gap_s, now_s - self._last_s), now_s

    async def stop(self) -> None:
        """Stop them; what has passed since the last one counts too."""
        self._renewed()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def recover(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Lead, recover, and give the lead up."""
    settings = load(SchedulerSettings, {"redis_url": url, "shard": SHARD}, environ={})
    store = Store(url, SHARD, timeout_s=60)
    leadership = Leadership(settings, store, on_lead=lambda _: None, tracing=QUIET)
    async with redis_client.Redis.from_url(url) as record:

        async def record_cpu_s() -> float:
            used = await record.info("cpu")
            return float(used["used_cpu_user"] + used["used_cpu_sys"])

        assert await store.acquire_leadership(owner="new:1", lease_s=LEASE_S)
        gc.collect()
        gc.freeze()
        renewals = Renewals(store)
        cpu_s, began_record_s, began_s = time.process_time(), await record_cpu_s(), time.perf_counter()
        loop = await leadership._recovered_loop()
        seconds = time.perf_counter() - began_s
        await renewals.stop()
        row = {
            "requests": len(loop.working_copy.live),
            "seconds": seconds,
            "longest_without_renewal_s": renewals.longest_gap_s,
            "leader_cpu_s": time.process_time() - cpu_s,
            "record_cpu_s": await record_cpu_s() - began_record_s,
            "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "compiled": COMPILED,
        }
    assert row["requests"] == options.requests, row
    await store.resign()
    await store.close()
    return row


def main() -> int:
    options = arguments()
    gc.set_threshold(YOUNG_CONTAINERS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)).start() as server:
        uvloop.run(fill(server.url, options))
        rows += [uvloop.run(recover(server.url, options)) for _ in range(options.repetitions)]
    table(f"A new leader reads {options.requests} unfinished requests", rows)
    slowest_s = max(row["seconds"] for row in rows)
    gap_s = max(row["longest_without_renewal_s"] for row in rows)
    return finish(
        rows,
        json_file=options.json,
        summary=f"{slowest_s:.2f} s for {options.requests} requests, the slowest of {len(rows)} (goal {GOAL_S:g} s); "
        f"at most {gap_s:.2f} s between two renewals of the lease (goal {LEASE_S:g} s)",
        met=slowest_s < GOAL_S and gap_s < LEASE_S,
        about=about("recovery"),
    )


if __name__ == "__main__":
    sys.exit(main())
