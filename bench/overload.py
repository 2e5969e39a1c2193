"""What becomes of a system that is asked for ten times what it can do? `laps-sd bench overload`

Gateway, scheduler, workers (FakeEngine) and Valkey as processes. First as many requests at once as there are slots, for the rate that the
system sustains; then arrivals at ten times that rate, one by one whether or not earlier ones were taken, for a minute. The run fails unless

  * everything that is refused is refused with RESOURCE_EXHAUSTED and says when to come again (RetryInfo);
  * everything that was accepted ends successfully, and no later than a full queue takes to be worked off at the rate of this very run:
    --bound times that for the 99th percentile;
  * tokens per second do not fall below --keep of the sustained rate;
  * no process dies, and none grows on and on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench._memory import GROWTH_MIB, Memory
from bench.report import finish, progress, table
from laps_sd.client import AsyncClient
from laps_sd.errors import LapsSdError, ResourceExhausted
from laps_sd.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb

FACTOR = 10
TOKENS = (20, 180)
MEAN_TOKENS = sum(TOKENS) / 2


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench overload", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default 60)")
    parser.add_argument("--workers", type=int, default=2, help="(default 2)")
    parser.add_argument("--slots", type=int, default=4, help="of each worker (default 4)")
    parser.add_argument("--queue", type=int, default=64, help="unfinished requests at most (default 64)")
    parser.add_argument(
        "--round-s", type=float, default=0.1, help="of a round of the fake engine (default 0.1)"
    )
    parser.add_argument("--bound", type=float, default=3.0, help="times the time of a full queue (default 3)")
    parser.add_argument("--keep", type=float, default=0.5, help="of the sustained rate (default 0.5)")
    parser.add_argument("--policy", default="laps-sd", help="the scheduler's policy (default laps-sd)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default 1)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args(given)


@dataclass
class Tally:
    """What clients saw."""

    latencies_s: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    wrong: Counter[str] = field(default_factory=Counter)


async def one(client: AsyncClient, number: int, rng: random.Random, tally: Tally) -> None:
    began = time.monotonic()
    try:
        response = await client.generate(
            f"Story {number}", seed=number, max_tokens=rng.randint(*TOKENS), ignore_eos=True
        )
    except ResourceExhausted as error:
        tally.refused += 1
        if not error.retry_after_s:
            tally.wrong["refused without RetryInfo"] += 1
    except LapsSdError as error:
        tally.wrong[f"{type(error).__name__}: {error}"] += 1
    else:
        if response.end.finish_reason == pb.FINISH_REASON_LENGTH:
            tally.latencies_s.append(time.monotonic() - began)
            tally.tokens += len(response.token_ids)
        else:
            tally.wrong[f"ended with {pb.FinishReason.Name(response.end.finish_reason)}"] += 1


async def sustained(client: AsyncClient, options: argparse.Namespace) -> float:
    """Tokens per second with all slots taken and none waiting."""
    rng = random.Random(options.seed)
    slots = options.workers * options.slots
    tally = Tally()

    async def lane(first: int) -> None:
        for number in range(first, first + 4):
            await one(client, number, rng, tally)

    began = time.monotonic()
    await asyncio.gather(*(lane(4 * at) for at in range(slots)))
    if tally.refused or tally.wrong:
        raise SystemExit(f"without overload something was refused or failed: {tally}")
    return tally.tokens / (time.monotonic() - began)


async def overload(
    client: AsyncClient, options: argparse.Namespace, rate_per_s: float
) -> tuple[Tally, float, int]:
    """All that arrived, tokens per second until the last of them had ended, and how many arrived."""
    rng = random.Random(options.seed + 1)
    tally = Tally()
    running: set[asyncio.Task[None]] = set()
    began = said = time.monotonic()
    number, due = 1000, began
    while time.monotonic() - began < options.seconds:
        due += rng.expovariate(rate_per_s)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(one(client, number, rng, tally))
        running.add(task)
        task.add_done_callback(running.discard)
        number += 1
        if time.monotonic() - said > 10.0:
            said = time.monotonic()
            progress(
                f"{said - began:4.0f} s  {number - 1000} arrived, {len(tally.latencies_s)} completed, "
                f"{tally.refused} refused, {len(running)} open"
            )
    await asyncio.gather(*running)
    return tally, tally.tokens / (time.monotonic() - began), number - 1000


async def run(options: argparse.Namespace, stack: LocalStack) -> int:
    memory = Memory(stack, warm_s=min(20.0, options.seconds / 3))
    watching = asyncio.create_task(memory.watch())
    async with AsyncClient(stack.gateway_address) as client:
        calm_per_s = await sustained(client, options)
        progress(f"sustained: {calm_per_s:.0f} tokens/s; now {FACTOR} times that for {options.seconds:g} s")
        tally, tokens_per_s, arrived = await overload(client, options, FACTOR * calm_per_s / MEAN_TOKENS)
    watching.cancel()
    memory.sample()
    await asyncio.to_thread(stack.check)
    full_queue_s = options.queue * MEAN_TOKENS / max(tokens_per_s, 1e-9)
    ordered = sorted(tally.latencies_s)
    p99_s = ordered[int(0.99 * (len(ordered) - 1))] if ordered else float("inf")
    growth_mib = max(memory.growth().values(), default=0.0)
    rows = [
        {
            "config": f"{options.workers} x {options.slots} slots, queue {options.queue}",
            "policy": options.policy,
            "arrived": arrived,
            "completed": len(ordered),
            "refused": tally.refused,
            "sustained_tokens_per_s": calm_per_s,
            "tokens_per_s": tokens_per_s,
            "mean_s": statistics.fmean(ordered) if ordered else float("inf"),
            "p99_s": p99_s,
            "full_queue_s": full_queue_s,
            "p99_ratio_full_queue": p99_s / full_queue_s,
            "growth_mib": growth_mib,
            "wrong": sum(tally.wrong.values()),
        }
    ]
    table(f"Overload, {FACTOR} times the sustained rate", rows, width=160)
    missed = []
    if tally.wrong:
        missed.append(f"wrong answers: {dict(tally.wrong.most_common(5))}")
    if not tally.refused:
        missed.append("nothing was refused: this was no overload")
    if p99_s > options.bound * full_queue_s:
        missed.append(f"99 % within {p99_s:.1f} s, allowed are {options.bound:g} x {full_queue_s:.1f} s")
    if tokens_per_s < options.keep * calm_per_s:
        missed.append(f"{tokens_per_s:.0f} tokens per s, {calm_per_s:.0f} without overload")
    if growth_mib > GROWTH_MIB:
        missed.append(f"a process grew by {growth_mib:.0f} MiB")
    return finish(
        rows,
        json_file=options.json,
        summary="; ".join(missed)
        or f"{tally.refused} of {arrived} refused with advice, the rest within {p99_s / full_queue_s:.2f} times "
        f"a full queue (99 %), at {tokens_per_s / calm_per_s:.0%} of the sustained rate",
        met=not missed,
    )


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    environment = {
        "LAPS_SD_FAKE_TIME_SCALE": "1",
        "LAPS_SD_FAKE_ROUND_S": str(options.round_s),
        "LAPS_SD_MAX_REQUESTS": str(options.queue),
    }
    with LocalStack(
        engine="fake",
        workers=options.workers,
        slots=options.slots,
        policy=options.policy,
        environment=environment,
    ) as stack:
        return asyncio.run(run(options, stack))


if __name__ == "__main__":
    sys.exit(main())
