"""The cost of a report in the pure core: one process for each queue size."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench._control.lengths import WORDS
from bench.report import progress
from scheduler_svc.core import COMPILED

WARM_UP_ROUNDS = 20
"""Rounds of each worker that are not measured. In the first five, what the first reports show of costs moves
most requests on and off the lists, with up to 190 leases and 120 releases a report."""
BLOCK = 50
"""Reports before the next queue size has its turn."""


def core_process(pipe: Connection, queued: int, workers: int, slots: int, policy: str) -> None:
    """Build a shard, send its bytes per request that was added to fill the queue, then time as many reports as a message requests."""
    from bench._shard import VirtualShard
    from scheduler_svc.__main__ import look_for_cycles_seldom

    look_for_cycles_seldom()
    shard = VirtualShard(queued=queued, workers=workers, slots=slots, policy=policy)
    shard.start()
    arrived, before = shard.arrivals, _resident_bytes()
    shard.fill()
    gc.collect()
    # Lists grow while the queue is filled, so not all of these are in it.
    pipe.send((_resident_bytes() - before) / max(1, shard.arrivals - arrived))
    turn = list(shard.workers.values())
    rng = random.Random(0)
    for _ in range(WARM_UP_ROUNDS):
        for worker in turn:
            shard.step(shard.next_events(worker))
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
                "prompt_words": WORDS,
                "median_ms": statistics.median(times),
                "mean_ms": statistics.fmean(times),
                "p99_ms": cuts[98],
                "ratio_shortest": statistics.median(times) / shortest,
                "memory_per_queued_bytes": memory[queued],
                "reports": len(times),
            }
        )
    return rows
