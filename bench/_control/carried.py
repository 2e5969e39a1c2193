"""The number of workers that one shard carries: throughput and latency with synthetic workers.

Each number of workers is a run with a new scheduler and a new record. The workers (`synthetic_worker.py`)
report a round of `slots` requests every `round_s` seconds on a fixed schedule. A client on the gateway link
keeps twice as many requests unfinished as the workers have slots, which fills their lists, and a backlog. Its
requests bring the words of prompts, as a gateway sends them, and the scheduler predicts lengths from these.

* Reports per second: by the workers' schedule (asked), and processed by the scheduler (carried).
* Latency: from the moment when a worker hands a report to its stream until the client has read the delivery
  that covers the report's tokens, for up to two requests of nearly every report. It contains decoding,
  decision, commit, publication, both streams, and the waiting in between; no gateway process. Tokens that do
  not arrive within `ARRIVE_S` after the run count with the time that they have waited.
* CPU per report: of the scheduler's process, of the record's, of the workers and of the client.

Conditions: scheduler, record, workers and client share the machine's cores, so that with few cores the
latencies are upper bounds; the row names the cores that other processes had meanwhile. The workers' rounds
begin at even distances and drift apart by chance (`--round-spread`; without it reports would hardly ever wait
for each other). Late rounds are those that the workers have skipped, because their process had no
core or because the stream took no more; many of them mean that the machine or the scheduler is full.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import redis as redis_client
import uvloop

from bench._control.client import Client
from bench._control.latency import Arrivals, Latencies, Sample, join
from bench._control.lengths import WORDS
from bench._control.scheduler import Reading, read_scheduler
from bench._control.synthetic_worker import Counters, Fleet, worker_process
from bench.report import progress, quantile
from laps_sd.stack.local import LocalStack
from scheduler_svc.core import COMPILED

GOAL_SHARE = 0.98
"""Least share of the reports that are processed."""
GOAL_P99_MS = 20.0
BACKLOG = 500
"""Requests beyond those that fill the workers' lists."""
LONGEST = 4
"""Limit of an output, in medians."""
SETTLE_S = 5.0
"""Time with all workers before the measurement; less for a shorter one."""
ARRIVE_S = 2.0
IDLE = slice(3, 5)
"""Columns of the first line of /proc/stat without work: idle, and waiting for a disk."""
WORKERS_PER_PROCESS = 50
IN_TABLE = (
    "asked_per_s",
    "carried_per_s",
    "late_rounds",
    "p50_ms",
    "p90_ms",
    "p99_ms",
    "max_ms",
    "scheduler_cpu_ms",
    "record_cpu_ms",
    "workers_cpu_ms",
    "client_cpu_ms",
    "other_cores",
    "carried",
)
"""Columns of the table; CPU is per report."""


class Fleets:
    """The processes of the synthetic workers."""

    def __init__(self, fleets: list[Fleet]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        for fleet in fleets:
            pipe, theirs = spawn.Pipe()
            process = spawn.Process(target=worker_process, args=(theirs, fleet), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, pipe))

    def check(self) -> None:
        """Raise RuntimeError if a process has ended."""
        if not all(process.is_alive() for process, _ in self._processes):
            raise RuntimeError("a process of synthetic workers has ended")

    def read(self, *, samples: bool) -> tuple[Counters, list[Sample]]:
        """Return the counters of all workers, and the samples since the last call if they are wanted."""
        for _, pipe in self._processes:
            pipe.send(samples)
        counters, sampled = zip(*[pipe.recv() for _, pipe in self._processes], strict=True)
        totals: list[Any] = [sum(column) for column in zip(*counters, strict=True)]
        return Counters(*totals), [sample for some in sampled for sample in some]

    def kill(self) -> None:
        """End all processes."""
        for process, _ in self._processes:
            process.kill()
            process.join()


def machine_cpu_s() -> float:
    """Return the CPU time of all processes of the machine since it was started."""
    total = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(column) for column in total.split()[1:9]]  # the last two, guests, are part of the others
    return (sum(ticks) - sum(ticks[IDLE])) / os.sysconf("SC_CLK_TCK")


class Moment(NamedTuple):
    """Readings of all processes at one moment."""

    scheduler: Reading
    workers: Counters
    client_cpu_s: float
    machine_cpu_s: float


async def watch(
    options: argparse.Namespace,
    workers: int,
    address: str,
    shard: str,
    read: Callable[[], Reading],
    start_fleets: Callable[[], Fleets],
) -> dict[str, Any]:
    """Fill the queue, start the workers, watch them for a while, and return the row."""
    arrivals = Arrivals()
    client = Client(
        shard,
        max_tokens=LONGEST * options.output_tokens,
        output_tokens=options.output_tokens,
        arrivals=arrivals,
    )
    fleets: Fleets | None = None

    async def pause(seconds: float) -> None:
        await client.pause(seconds)
        if fleets is not None:
            fleets.check()

    async def read_all(*, samples: bool) -> tuple[Moment, list[Sample]]:
        reading = await asyncio.to_thread(read)
        assert fleets is not None
        counters, found = await asyncio.to_thread(fleets.read, samples=samples)
        return Moment(reading, counters, time.process_time(), machine_cpu_s()), found

    async with client.connected(address):
        try:
            wanted = workers * options.slots * 2 + BACKLOG
            await client.reach(wanted)
            progress(f"carried, {workers} workers: {wanted} requests queued")
            fleets = await asyncio.to_thread(start_fleets)
            while (await asyncio.to_thread(read)).rounds < 2 * workers:
                await pause(0.2)
            await pause(min(SETTLE_S, options.seconds))
            gc.collect()
            gc.disable()  # a pause of the client would count as latency
            before, _ = await read_all(samples=False)
            await pause(options.seconds)
            after, samples = await read_all(samples=True)
            await pause(ARRIVE_S)
        finally:
            gc.enable()
            if fleets is not None:
                fleets.kill()
    if not samples:
        raise RuntimeError("no report contained a sampled request")
    latencies = join(samples, arrivals, time.monotonic())
    return row(options, workers, before, after, latencies)


def row(
    options: argparse.Namespace, workers: int, before: Moment, after: Moment, latencies: Latencies
) -> dict[str, Any]:
    """Return the row of one number of workers."""
    seconds = after.scheduler.at_s - before.scheduler.at_s
    reports = after.scheduler.rounds - before.scheduler.rounds
    differences: list[Any] = [now - then for now, then in zip(after.workers, before.workers, strict=True)]
    done = Counters(*differences)
    scheduler_cpu_s = after.scheduler.cpu_s - before.scheduler.cpu_s
    record_cpu_s = after.scheduler.record_cpu_s - before.scheduler.record_cpu_s
    client_cpu_s = after.client_cpu_s - before.client_cpu_s
    own_cpu_s = scheduler_cpu_s + record_cpu_s + done.cpu_s + client_cpu_s
    asked_per_s = workers / options.round_s
    share = reports / seconds / asked_per_s
    p99_ms = quantile(latencies.ms, 0.99)
    return {
        "config": f"carried, {workers} workers",
        "policy": options.policy,
        "compiled": COMPILED,
        "workers": workers,
        "slots": options.slots,
        "round_s": options.round_s,
        "round_spread": options.round_spread,
        "output_tokens": options.output_tokens,
        "prompt_words": WORDS,
        "seconds": seconds,
        "asked_per_s": asked_per_s,
        "sent_per_s": done.reports / seconds,
        "carried_per_s": reports / seconds,
        "carried_share": share,
        "late_rounds": done.late_rounds,
        "requests_per_report": done.requests / done.reports,
        "tokens_per_request": done.tokens / done.requests,
        "samples": len(latencies.ms),
        "not_arrived": latencies.not_arrived,
        "p50_ms": quantile(latencies.ms, 0.5),
        "p90_ms": quantile(latencies.ms, 0.9),
        "p99_ms": p99_ms,
        "max_ms": latencies.ms[-1],
        "scheduler_cpu_ms": scheduler_cpu_s / reports * 1e3,
        "record_cpu_ms": record_cpu_s / reports * 1e3,
        "workers_cpu_ms": done.cpu_s / done.reports * 1e3,
        "client_cpu_ms": client_cpu_s / reports * 1e3,
        "scheduler_core_share": scheduler_cpu_s / seconds,
        "record_core_share": record_cpu_s / seconds,
        "other_cores": (after.machine_cpu_s - before.machine_cpu_s - own_cpu_s) / seconds,
        "resident_bytes": after.scheduler.resident_bytes,
        "carried": share >= GOAL_SHARE and p99_ms < GOAL_P99_MS,
    }


def measure_carried(options: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Return the row of one number of workers."""
    progress(f"carried, {workers} workers: starting a scheduler and its record")
    with (
        LocalStack(workers=0, gateways=0, policy=options.policy, log_level="warning") as stack,
        redis_client.Redis.from_url(stack.redis_url) as record,
    ):
        address = stack.scheduler_address
        url = stack.metrics_url("scheduler-0")

        def start_fleets() -> Fleets:
            return Fleets(
                [
                    Fleet(
                        address=address,
                        pool=stack.options.pool,
                        first=first,
                        count=min(WORKERS_PER_PROCESS, workers - first),
                        of=workers,
                        slots=options.slots,
                        round_s=options.round_s,
                        round_spread=options.round_spread,
                        output_tokens=options.output_tokens,
                    )
                    for first in range(0, workers, WORKERS_PER_PROCESS)
                ]
            )

        return uvloop.run(
            watch(
                options,
                workers,
                address,
                stack.options.shard,
                lambda: read_scheduler(url, record),
                start_fleets,
            )
        )
