"""What do decisions cost? `laps-sd bench control`

Core: CPU time (of the process) of one step of the pure core for one report, in steady state: workers of 64 slots run what
they were assigned, requests end and others arrive, ranks change at every round, KV is evicted at times. One process for each
queue size; they take turns, a block of reports each, so that all sizes meet the same noise. Memory is what the
resident set grows by while the queue is filled, divided by the requests queued; the core holds no tokens.

Scheduler: CPU time of the whole scheduler process (decoding, core, Redis commits, sending tokens and lists) per report, with
FakeEngine workers on real links and a client that takes the tokens off the gateway link; and from it how many workers one
core carries. Workers and client have the other cores: only the scheduler's CPU time counts, not wall-clock time.

The deployed form of the core is compiled: `make compiled`, then run this in `build/compiled` with PYTHONPATH set to it. The rows name
the form.

Goals: a median of at most 1 ms per report of 64 requests; from the shortest to the longest queue at most twice as much;
less than 2 KiB for each queued request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import os
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.report import about, finish, numbers, progress, table
from scheduler_svc.core import COMPILED

GOAL_MS = 1.0
GOAL_GROWTH = 2.0
GOAL_BYTES = 2048
STEADY_ARRIVALS = 4
"""Arrivals for each report once the lists have reached their size: they replace ended requests, and a report
ends one or two."""
MOST_WARM_UP_ROUNDS = 20
BLOCK = 50
"""Reports before the next queue size has its turn."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench control", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--queued", type=numbers, default=[1_000, 10_000, 100_000, 1_000_000], help="queue sizes"
    )
    parser.add_argument("--workers", type=numbers, default=[1, 10, 100, 1_000], help="numbers of workers")
    parser.add_argument("--slots", type=int, default=64, help="requests in one report (default 64)")
    parser.add_argument(
        "--reports", type=int, default=1_000, help="reports timed at each size (default 1000)"
    )
    parser.add_argument("--policy", default="laps-sd", help="the scheduler's policy (default laps-sd)")
    parser.add_argument(
        "--fake-workers", type=int, default=100, help="workers of the whole scheduler; 0 leaves it out"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the scheduler is watched")
    parser.add_argument(
        "--fake-round-s", type=float, default=0.8, help="round time of the fake workers (default 0.8)"
    )
    parser.add_argument(
        "--round-s",
        type=float,
        default=0.05,
        help="round time of the worker for which workers per shard are given (default 0.05)",
    )
    parser.add_argument("--backlog", type=int, default=5_000, help="queued requests of the whole scheduler")
    parser.add_argument("--goal-ms", type=float, default=GOAL_MS, help=argparse.SUPPRESS)
    parser.add_argument("--figure", type=Path, help="draw the cost of the core into this .png or .svg")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


# -- the core ---------------------------------------------------------------------------------------------------


def core_process(pipe: Connection, queued: int, workers: int, slots: int, policy: str) -> None:
    """Build a shard, send its bytes per queued request, then time as many reports as a message requests."""
    from bench._shard import VirtualShard
    from scheduler_svc.__main__ import look_for_cycles_seldom

    look_for_cycles_seldom()
    shard = VirtualShard(queued=queued, workers=workers, slots=slots, policy=policy)
    shard.start()
    waiting = shard.core.totals().queued
    before = _resident_bytes()
    shard.fill()
    gc.collect()
    pipe.send((_resident_bytes() - before) / max(1, queued - waiting))
    turn = list(shard.workers.values())
    rng = random.Random(0)
    for _ in range(MOST_WARM_UP_ROUNDS):
        # Rounds in which all workers start, or lists still fill with better requests, are not part of the
        # measurement.
        arrived = shard.arrivals
        for worker in turn:
            shard.step(shard.next_events(worker))
        if shard.arrivals - arrived <= STEADY_ARRIVALS * len(turn):
            break
    while count := pipe.recv():
        times_ms = []
        for _ in range(count):
            events = shard.next_events(rng.choice(turn))
            began_ns = time.process_time_ns()
            commands = shard.core.step(shard.now_s, events)
            times_ms.append((time.process_time_ns() - began_ns) / 1e6)
            shard.carry_out(commands)
        pipe.send(times_ms)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_core(options: argparse.Namespace, workers: int) -> list[dict[str, Any]]:
    """Return one row for each queue size."""
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[int, Any] = {}
    children = []
    memory: dict[int, float] = {}
    for queued in options.queued:
        pipes[queued], theirs = spawn.Pipe()
        arguments = (theirs, queued, workers, options.slots, options.policy)
        child = spawn.Process(target=core_process, args=arguments, daemon=True)
        child.start()
        theirs.close()
        children.append(child)
        memory[queued] = pipes[queued].recv()
        progress(f"core, {workers} workers, {queued} queued: {memory[queued]:.0f} bytes each")
    times_ms: dict[int, list[float]] = {queued: [] for queued in options.queued}
    for _ in range(max(1, options.reports // BLOCK)):
        for queued, pipe in pipes.items():
            pipe.send(min(BLOCK, options.reports))
            times_ms[queued] += pipe.recv()
    for pipe, child in zip(pipes.values(), children, strict=True):
        pipe.send(0)
        child.join()
    shortest = statistics.median(times_ms[options.queued[0]])
    rows = []
    for queued, times in times_ms.items():
        cuts = statistics.quantiles(times, n=100)
        rows.append(
            {
                "config": f"core, {workers} workers, {queued} queued",
                "policy": options.policy,
                "compiled": COMPILED,
                "workers": workers,
                "queued": queued,
                "slots": options.slots,
                "median_ms": statistics.median(times),
                "mean_ms": statistics.fmean(times),
                "p99_ms": cuts[98],
                "ratio_shortest": statistics.median(times) / shortest,
                "memory_per_queued_bytes": memory[queued],
                "reports": len(times),
            }
        )
    return rows


# -- the whole scheduler ------------------------------------------------------------------------------------------


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
            }
            settings = load(WorkerSettings, given, environ={})
            links.append(SchedulerLink(settings, EngineThread(load_engine(settings), settings)))
        await asyncio.gather(*(link.run() for link in links))

    asyncio.run(run())


@dataclass(frozen=True)
class Reading:
    """Counters of the scheduler at one moment."""

    at_s: float
    cpu_s: float
    rounds: float
    resident_bytes: float


def read_scheduler(url: str) -> Reading:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    found = {sample.name: sample.value for f in text_string_to_metric_families(text) for sample in f.samples}
    return Reading(
        time.monotonic(),
        found["process_cpu_seconds_total"],
        found["laps_sd_scheduler_rounds_total"],
        found["process_resident_memory_bytes"],
    )


class Client:
    """Gateway link that keeps a constant number of requests unfinished, and receives the tokens."""

    def __init__(self, shard: str) -> None:
        self.unfinished = 0
        self.wanted = 0
        self.accepted = 0
        self._shard = shard
        self._number = 0
        self._rng = random.Random(1)
        self._news = asyncio.Event()

    def want(self, count: int) -> None:
        self.wanted = count
        self._news.set()

    async def messages(self) -> AsyncIterator[Any]:
        from laps_sd.v1 import gateway_link_pb2 as pb

        yield pb.GatewayMessage(hello=pb.GatewayHello(gateway_id="bench", protocol_versions=[1]))
        while True:
            while self.unfinished < self.wanted:
                self.unfinished += 1
                self._number += 1
                yield pb.GatewayMessage(submit=self._submit())
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._news.wait()
            yield pb.GatewayMessage(heartbeat=pb.Heartbeat(sent_ms=time.monotonic_ns() // 1_000_000))

    def _submit(self) -> Any:
        from laps_sd.v1 import gateway_link_pb2 as pb
        from laps_sd.v1.inference_pb2 import SamplingParams

        rng = self._rng
        request_id = f"{self._shard}.{self._number:026d}"
        specification = pb.Specification(
            request_id=request_id,
            prompt_ids=[rng.randrange(1, 1000) for _ in range(rng.randint(16, 64))],
            sampling=SamplingParams(
                max_tokens=rng.randint(16, 192),
                temperature=1.0,
                top_p=1.0,
                seed=self._number,
                ignore_eos=True,
            ),
        )
        return pb.Submit(
            submission_id=self._number,
            request_id=request_id,
            tenant="bench",
            specification=specification,
            attachment_id=request_id,
            model="laps-sd-demo",
        )

    async def listen(self, call: Any) -> None:
        async for message in call:
            kind = message.WhichOneof("message")
            if kind == "deliveries":
                ended = sum(delivery.HasField("end") for delivery in message.deliveries.deliveries)
                if ended:
                    self.unfinished -= ended
                    self._news.set()
            elif kind == "submit_reply":
                if message.submit_reply.HasField("refused"):
                    raise RuntimeError(f"a submission was refused: {message.submit_reply.refused.detail}")
                self.accepted += 1


async def watch(options: argparse.Namespace, address: str, metrics_url: str, shard: str) -> dict[str, Any]:
    """Fill the lists, queue the backlog, watch the scheduler for a while."""
    import grpc.aio

    from laps_sd.v1.gateway_link_pb2_grpc import GatewayLinkStub

    async def read() -> Reading:
        return await asyncio.to_thread(read_scheduler, metrics_url)

    async def pause(seconds: float) -> None:
        ended, _ = await asyncio.wait({listening}, timeout=seconds)
        if ended:
            listening.result()
            raise RuntimeError("the scheduler ended the stream")

    async def reach(count: int) -> None:
        client.want(count)
        while client.accepted < count:
            await pause(0.1)

    client = Client(shard)
    async with grpc.aio.insecure_channel(address) as channel:
        listening = asyncio.create_task(client.listen(GatewayLinkStub(channel).Connect(client.messages())))
        listed = options.fake_workers * options.slots * 2
        await reach(listed)
        full = await read()
        await reach(listed + options.backlog)
        queued = await read()
        progress("scheduler: lists full and the backlog queued")
        while (await read()).rounds < queued.rounds + 2 * options.fake_workers:
            await pause(0.5)
        before = await read()
        await pause(options.seconds)
        after = await read()
        listening.cancel()
    reports = after.rounds - before.rounds
    cpu_ms = (after.cpu_s - before.cpu_s) / reports * 1e3
    per_s = reports / (after.at_s - before.at_s)
    return {
        "config": f"scheduler, {options.fake_workers} workers, {options.backlog} queued",
        "policy": options.policy,
        "compiled": COMPILED,
        "slots": options.slots,
        "cpu_ms_per_report": cpu_ms,
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
    from laps_sd.stack.local import LocalStack

    progress("starting a scheduler and its record")
    spawn = multiprocessing.get_context("spawn")
    with LocalStack(workers=0, gateways=0, policy=options.policy, log_level="warning") as stack:
        address = stack.scheduler_address
        given = (address, options.fake_workers, options.slots, options.fake_round_s)
        workers = spawn.Process(target=worker_process, args=given, daemon=True)
        workers.start()
        try:
            url = stack.metrics_url("scheduler-0")
            return asyncio.run(watch(options, address, url, stack.options.shard))
        finally:
            workers.kill()
            workers.join()


# -- the verdict --------------------------------------------------------------------------------------------------


def verdict(rows: list[dict[str, Any]], goal_ms: float = GOAL_MS) -> tuple[bool, str]:
    """Return whether the rows of the core meet the goals, and the sentence for the summary line."""
    slowest = max(row["median_ms"] for row in rows)
    growth = max(row["ratio_shortest"] for row in rows)
    # Lists grow a little while the queue is filled; per request of a short queue this would weigh too much.
    longest = max(row["queued"] for row in rows)
    memory = max(row["memory_per_queued_bytes"] for row in rows if row["queued"] == longest)
    met = slowest <= goal_ms and growth <= GOAL_GROWTH and memory < GOAL_BYTES
    return met, (
        f"at most {slowest:.2f} ms per report in the median (goal {goal_ms:g}), {growth:.2f} times as much with the "
        f"longest queue (goal {GOAL_GROWTH:g}), {memory:.0f} bytes per queued request (goal {GOAL_BYTES})"
    )


def main() -> int:
    options = arguments()
    if options.reports < 2 or not options.queued or not options.workers:
        raise SystemExit("--reports must be at least 2, and --queued and --workers name one size each")
    core: list[dict[str, Any]] = []
    for workers in options.workers:
        core += measure_core(options, workers)
    told_by_title = ("config", "policy", "compiled", "slots", "reports")
    which = "compiled core" if COMPILED else "core as it stands, not compiled"
    table(
        f"One report of {options.slots} requests through the {which} ({options.policy}, {options.reports} reports)",
        [{name: value for name, value in row.items() if name not in told_by_title} for row in core],
    )
    rows = list(core)
    if options.fake_workers:
        whole = measure_scheduler(options)
        table(
            "The whole scheduler process", [{"what": name, "value": value} for name, value in whole.items()]
        )
        rows.append(whole)
    if options.figure is not None:
        from bench.figures import lines

        series = {
            f"{workers} workers": [
                (row["queued"], row["median_ms"]) for row in core if row["workers"] == workers
            ]
            for workers in options.workers
        }
        lines(
            options.figure,
            series,
            title=f"One report of {options.slots} requests through the core",
            x="queued requests",
            y="CPU time per report, median, ms",
            log_x=True,
            goal=options.goal_ms,
        )
    met, summary = verdict(core, options.goal_ms)
    return finish(
        rows, json_file=options.json, summary=summary, met=met, about=about("control", sys.argv[1:])
    )


if __name__ == "__main__":
    sys.exit(main())
