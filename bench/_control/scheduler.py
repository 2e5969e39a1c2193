"""The cost of a report in the whole scheduler process, with workers and a gateway link."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

import redis as redis_client

from bench._control.client import Client
from bench._metrics import MetricsPage
from bench.report import progress
from laps_sd.stack.local import LocalStack
from scheduler_svc.core import COMPILED

MEDIAN_TOKENS = 75
"""Outputs end by themselves, since the lengths of others are learnt: about 100 tokens on average."""
MAX_TOKENS = 1024


def worker_process(address: str, count: int, slots: int, round_s: float) -> None:
    """Run `count` real workers without a model, each with its own link and its own thread, until killed."""
    from laps_sd.service import log
    from laps_sd.service.config import load
    from worker_svc.link.link import SchedulerLink
    from worker_svc.loading import load as load_engine
    from worker_svc.runner.thread import EngineThread
    from worker_svc.settings import WorkerSettings

    log.configure("bench-workers", level="warning")

    async def run() -> None:
        links = []
        for number in range(count):
            given = {
                "engine": "fake",
                "worker_name": f"bench-{number}",
                "scheduler_seeds": address,
                "slots": slots,
                "fake_time_scale": 1.0,
                "fake_round_s": round_s,
                "fake_output_tokens": MEDIAN_TOKENS,
            }
            settings = load(WorkerSettings, given, environ={})
            links.append(SchedulerLink(settings, EngineThread(load_engine(settings), settings)))
        await asyncio.gather(*(link.run() for link in links))

    asyncio.run(run())


@dataclass(frozen=True)
class Reading:
    """Counters of the scheduler and its record at one moment."""

    at_s: float
    cpu_s: float
    record_cpu_s: float
    rounds: float
    resident_bytes: float


def read_scheduler(url: str, record: redis_client.Redis) -> Reading:
    page = MetricsPage(url)
    used: dict[str, float] = record.info("cpu")  # type: ignore[assignment]  # not the asyncio client
    return Reading(
        time.monotonic(),
        page.total("process_cpu_seconds_total"),
        used["used_cpu_user"] + used["used_cpu_sys"],
        page.total("laps_sd_scheduler_rounds_total"),
        page.total("process_resident_memory_bytes"),
    )


async def watch(
    options: argparse.Namespace, address: str, metrics_url: str, shard: str, record: redis_client.Redis
) -> dict[str, Any]:
    """Fill the lists, queue the backlog, watch the scheduler for a while."""

    async def read() -> Reading:
        return await asyncio.to_thread(read_scheduler, metrics_url, record)

    client = Client(shard, max_tokens=MAX_TOKENS, output_tokens=MEDIAN_TOKENS)
    async with client.connected(address):
        listed = options.fake_workers * options.slots * 2
        await client.reach(listed)
        full = await read()
        await client.reach(listed + options.backlog)
        queued = await read()
        progress("scheduler: lists full and the backlog queued")
        while (await read()).rounds < queued.rounds + 2 * options.fake_workers:
            await client.pause(0.5)
        before = await read()
        await client.pause(options.seconds)
        after = await read()
    reports = after.rounds - before.rounds
    cpu_ms = (after.cpu_s - before.cpu_s) / reports * 1e3
    per_s = reports / (after.at_s - before.at_s)
    return {
        "config": f"scheduler, {options.fake_workers} workers, {options.backlog} queued",
        "policy": options.policy,
        "compiled": COMPILED,
        "slots": options.slots,
        "cpu_ms_per_report": cpu_ms,
        "record_cpu_ms_per_report": (after.record_cpu_s - before.record_cpu_s) / reports * 1e3,
        "reports_per_s": per_s,
        "worker_round_s": options.fake_workers / per_s,
        "core_share": (after.cpu_s - before.cpu_s) / (after.at_s - before.at_s),
        "reports_per_core_s": 1e3 / cpu_ms,
        "workers_per_shard": int(1e3 / cpu_ms * options.round_s),
        "at_round_s": options.round_s,
        "resident_bytes": after.resident_bytes,
        "memory_per_queued_bytes": (queued.resident_bytes - full.resident_bytes) / max(1, options.backlog),
    }


def measure_scheduler(options: argparse.Namespace) -> dict[str, Any]:
    progress("starting a scheduler and its record")
    spawn = multiprocessing.get_context("spawn")
    with LocalStack(workers=0, gateways=0, policy=options.policy, log_level="warning") as stack:
        address = stack.scheduler_address
        given = (address, options.fake_workers, options.slots, options.fake_round_s)
        workers = spawn.Process(target=worker_process, args=given, daemon=True)
        workers.start()
        try:
            url = stack.metrics_url("scheduler-0")
            with redis_client.Redis.from_url(stack.redis_url) as record:
                return asyncio.run(watch(options, address, url, stack.options.shard, record))
        finally:
            workers.kill()
            workers.join()
