"""How does a system behave under ten times the load that it can sustain? `laps-sd bench overload`

Gateway, scheduler, workers (FakeEngine) and Valkey as processes. First as many requests at once as there are
slots, for the rate that the system sustains; then arrivals at ten times that rate, one by one whether or not
earlier ones were taken, for a minute. The run fails unless

  * every refusal is RESOURCE_EXHAUSTED with the time to retry (RetryInfo);
  * everything that was accepted ends successfully, and no later than the reserved share allows
    (docs/policies.md): the rounds of all older requests that were unfinished then, divided by the reserved
    slots of all workers, and its own rounds, at the pace of this very run;
  * tokens per second do not fall below half of the sustained rate;
  * no process dies, and the memory of none keeps growing.
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

from bench._memory import GROWTH_MIB, Memory
from bench._metrics import metric
from bench.report import command_line, finish, progress, quantile, table
from laps_sd.client import Accepted, AsyncClient, Delta, Ended
from laps_sd.contract.choose import reserved_slots
from laps_sd.errors import LapsSdError, ResourceExhausted
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb

FACTOR = 10
WORKERS, SLOTS = 2, 4
KEPT = 0.5
"""Least share of the sustained rate under overload."""
SEED = 1
TOKENS = (20, 180)
MEAN_TOKENS = sum(TOKENS) / 2
HANDOVER_ROUNDS = 2
"""Rounds from the end of one request to the first round of the next in its place: its report and the new list
travel in that time."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = command_line("overload", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default 60)")
    parser.add_argument("--queue", type=int, default=64, help="unfinished requests at most (default 64)")
    parser.add_argument(
        "--round-s", type=float, default=0.1, help="of a round of the fake engine (default 0.1)"
    )
    return parser.parse_args(given)


@dataclass(frozen=True, slots=True)
class Served:
    """An accepted request that ended normally. Times of the client's clock."""

    sent_s: float
    accepted_s: float
    ended_s: float
    rounds: int

    @property
    def latency_s(self) -> float:
        """Return the seconds from the call to the end."""
        return self.ended_s - self.sent_s


@dataclass
class Tally:
    """Observations of the clients."""

    served: list[Served] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    wrong: Counter[str] = field(default_factory=Counter)


async def one(client: AsyncClient, number: int, rng: random.Random, tally: Tally) -> None:
    sent_s, accepted_s = time.monotonic(), 0.0
    tokens = 0
    end: Ended | None = None
    try:
        async for event in client.stream(
            f"Story {number}", seed=number, max_tokens=rng.randint(*TOKENS), ignore_eos=True
        ):
            match event:
                case Accepted():
                    accepted_s = time.monotonic()
                case Delta():
                    tokens += len(event.token_ids)
                case Ended():
                    end = event
    except ResourceExhausted as error:
        tally.refused += 1
        if not error.retry_after_s:
            tally.wrong["refused without RetryInfo"] += 1
    except LapsSdError as error:
        tally.wrong[f"{type(error).__name__}: {error}"] += 1
    else:
        if end is not None and end.finish_reason == pb.FINISH_REASON_LENGTH:
            tally.served.append(Served(sent_s, accepted_s, time.monotonic(), end.speculation.rounds))
            tally.tokens += tokens
        else:
            tally.wrong[f"ended with {pb.FinishReason.Name(end.finish_reason) if end else 'nothing'}"] += 1


def allowed_rounds(tally: Tally, reserved: int) -> list[tuple[Served, float]]:
    """Return each request with the rounds within which it must have ended, by docs/policies.md. They follow
    from the older and unfinished requests, as far as clients can see: sent before this one was accepted,
    ended after it was sent. So none is missing; the few superfluous ones belong to requests that came within
    the same milliseconds.
    """
    ages = sorted(tally.served, key=lambda served: served.sent_s)
    found = []
    for served in ages:
        older = [
            other.rounds + HANDOVER_ROUNDS
            for other in ages
            if other is not served and other.sent_s < served.accepted_s and other.ended_s > served.sent_s
        ]
        found.append((served, sum(older) / reserved + served.rounds + HANDOVER_ROUNDS))
    return found


def rounds_run(stack: LocalStack) -> dict[str, float]:
    """Return the rounds run so far, by worker."""
    return {
        name: metric(stack, name, "laps_sd_worker_rounds_total")
        for name in stack.children
        if name.startswith("worker-")
    }


async def sustained(client: AsyncClient) -> float:
    """Return the tokens per second with all slots taken and no request waiting."""
    rng = random.Random(SEED)
    slots = WORKERS * SLOTS
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
    client: AsyncClient, options: argparse.Namespace, rate_per_s: float, stack: LocalStack
) -> tuple[Tally, float, int, float]:
    """Return the tally of all that arrived, the tokens per second until the last of them had ended, the
    number of arrivals, and the seconds of a round on the slowest worker while all slots were taken.
    """
    rng = random.Random(SEED + 1)
    tally = Tally()
    running: set[asyncio.Task[None]] = set()
    before = await asyncio.to_thread(rounds_run, stack)
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
                f"{said - began:4.0f} s  {number - 1000} arrived, {len(tally.served)} completed, "
                f"{tally.refused} refused, {len(running)} open"
            )
    after, lasted_s = await asyncio.to_thread(rounds_run, stack), time.monotonic() - began
    round_s = lasted_s / min(after[name] - before[name] for name in before)
    await asyncio.gather(*running)
    return tally, tally.tokens / (time.monotonic() - began), number - 1000, round_s


async def run(options: argparse.Namespace, stack: LocalStack) -> int:
    memory = Memory(stack, warm_s=min(20.0, options.seconds / 3))
    watching = asyncio.create_task(memory.watch())
    async with AsyncClient(stack.gateway_address) as client:
        calm_per_s = await sustained(client)
        progress(f"sustained: {calm_per_s:.0f} tokens/s; now {FACTOR} times that for {options.seconds:g} s")
        tally, tokens_per_s, arrived, round_s = await overload(
            client, options, FACTOR * calm_per_s / MEAN_TOKENS, stack
        )
    watching.cancel()
    memory.sample()
    await asyncio.to_thread(stack.check)
    full_queue_s = options.queue * MEAN_TOKENS / max(tokens_per_s, 1e-9)
    ordered = sorted(served.latency_s for served in tally.served)
    p99_s = quantile(ordered, 0.99) if ordered else float("inf")
    reserved = WORKERS * reserved_slots(SLOTS)
    shares = [
        (served.ended_s - served.accepted_s) / (rounds * round_s)
        for served, rounds in allowed_rounds(tally, reserved)
    ]
    late = sum(share > 1 for share in shares)
    growth_mib = max(memory.growth().values(), default=0.0)
    rows = [
        {
            "config": f"{WORKERS} x {SLOTS} slots, queue {options.queue}",
            "arrived": arrived,
            "completed": len(ordered),
            "refused": tally.refused,
            "sustained_tokens_per_s": calm_per_s,
            "tokens_per_s": tokens_per_s,
            "mean_s": statistics.fmean(ordered) if ordered else float("inf"),
            "p99_s": p99_s,
            "full_queue_s": full_queue_s,
            "p99_ratio_full_queue": p99_s / full_queue_s,
            "longest_ratio_full_queue": max(ordered, default=float("inf")) / full_queue_s,
            "round_s": round_s,
            "most_ratio_bound": max(shares, default=float("inf")),
            "late": late,
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
    if late:
        missed.append(f"{late} took longer than the reserved share allows, one {max(shares):.2f} times that")
    if tokens_per_s < KEPT * calm_per_s:
        missed.append(f"{tokens_per_s:.0f} tokens per s, {calm_per_s:.0f} without overload")
    if growth_mib > GROWTH_MIB:
        missed.append(f"a process grew by {growth_mib:.0f} MiB")
    return finish(
        rows,
        json_file=options.json,
        summary="; ".join(missed)
        or f"{tally.refused} of {arrived} refused with advice, the other {len(ordered)} all within their bound (at most {max(shares):.0%} of it; "
        f"99 % within {p99_s / full_queue_s:.2f} times a full queue), at {tokens_per_s / calm_per_s:.0%} of the sustained rate",
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
        workers=WORKERS,
        slots=SLOTS,
        environment=environment,
    ) as stack:
        return asyncio.run(run(options, stack))


if __name__ == "__main__":
    sys.exit(main())
