"""Does the device ever wait for the scheduler? `laps-sd bench loop`

Tokens per second of a worker with 64 requests waiting at batch 8, under the real scheduler (gateway,
scheduler, Valkey and worker as separate processes, over gRPC), divided by the bare engine loop on the same
requests: the same engine in a process of its own, the next request taking the place of one that ended,
without any reports. Runs are interleaved, so that both sides meet the same noise, and the figure is the
median of the pairs. Counted until fewer requests than slots are left, because a batch that runs empty at the
end would distort the ratio. Another column is the share of the worker's time in which its device was idle
between two rounds.

On a machine whose cores share their execution units, the other processes of the stack slow the engine's core
down although it never waits for them: the ratio holds that too, the idle share does not.

Goal: at least 0.95.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc.aio

from bench._metrics import MetricsPage
from bench.report import columns, command_line, finish, median_interval, progress, table
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from worker_svc.engine.interface import Engine, Sampling, Specification
from worker_svc.settings import WorkerSettings

GOAL = 0.95
POLICY = "laps-sd"
REQUESTS, SLOTS, TOKENS = 64, 8, 96
"""Requests that wait at once, the batch size of the worker, and the output tokens of each request."""


def arguments() -> argparse.Namespace:
    parser = command_line("loop", __doc__)
    parser.add_argument(
        "--repetitions", type=int, default=12, help="pairs of runs after one to warm up (default 12)"
    )
    return parser.parse_args()


def prompts(count: int) -> list[str]:
    from demo.prompts import demo_prompts

    return [prompt.text for prompt in demo_prompts(None, count, seed=3)]


# -- the bare loop, in its own process ----------------------------------------------------------------------------------


def bare(pipe: Connection) -> None:
    """Run the loop once for each message, and answer with tokens per second."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    from tokenizers import Tokenizer

    from laps_sd.service.config import load
    from worker_svc.demo import TARGET_DIR
    from worker_svc.loading import load as load_engine

    engine = load_engine(load(WorkerSettings, {"engine": "demo", "slots": SLOTS, "threads": 1}, environ={}))
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    prompt_ids = [tuple(tokenizer.encode(text).ids) for text in prompts(REQUESTS)]
    while pipe.recv():
        names = [f"r{number}" for number in range(len(prompt_ids))]
        for number, (name, ids) in enumerate(zip(names, prompt_ids, strict=True)):
            sampling = Sampling(temperature=0.8, top_p=1.0, top_k=0, seed=number)
            engine.add(Specification(name, ids, (), sampling, TOKENS, ignore_eos=True))
        pipe.send(full_batch_rate(engine, names))
        for name in engine.known():
            engine.drop(name)


def full_batch_rate(engine: Engine, waiting: list[str]) -> float:
    """Run these requests, and return tokens per second of the time in which all slots are taken."""
    running, waiting = waiting[:SLOTS], waiting[SLOTS:]
    tokens = 0
    started_s = time.perf_counter()
    while len(running) == SLOTS:
        for step in engine.round(running).requests:
            tokens += len(step.tokens)
            if step.finish is None:
                continue
            engine.drop(step.request_id)
            running.remove(step.request_id)
            if waiting:
                running.append(waiting.pop(0))
    return tokens / (time.perf_counter() - started_s)


def rate_of(loop: Connection) -> float:
    """Let the bare loop run once."""
    loop.send(True)
    return float(loop.recv())


# -- the stack ----------------------------------------------------------------------------------------------------------


PHASES = ("draft", "verify", "prefill", "swap", "other", "idle")
"""Phases of the worker's time while it has something to run; `waiting`, with nothing to run, is left out."""


@dataclass(frozen=True)
class Reading:
    """Counters of the worker at one moment."""

    tokens: float
    seconds: float
    idle_s: float


def read_worker(stack: LocalStack) -> Reading:
    page = MetricsPage(stack.metrics_url("worker-0"))
    by_phase = {phase: page.total("laps_sd_worker_seconds_total", phase=phase) for phase in PHASES}
    return Reading(page.total("laps_sd_worker_tokens_total"), sum(by_phase.values()), by_phase["idle"])


async def through_the_stack(stack: LocalStack) -> tuple[float, float]:
    """Send all requests at once through the public API. Return the worker's tokens per second while its batch
    is full, and the share of that time in which its device was idle.
    """
    full = asyncio.Event()
    ended = 0

    async def one(stub: inference_pb2_grpc.InferenceStub, number: int, text: str) -> None:
        nonlocal ended
        sampling = pb.SamplingParams(max_tokens=TOKENS, temperature=0.8, seed=number, ignore_eos=True)
        await stub.Generate(pb.GenerateRequest(text=text, sampling=sampling))  # type: ignore[misc]  # generated for blocking channels
        ended += 1
        if ended > REQUESTS - SLOTS:
            full.set()  # fewer than `SLOTS` are left from here on

    before = read_worker(stack)
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        texts = prompts(REQUESTS)
        running = [asyncio.create_task(one(stub, number, text)) for number, text in enumerate(texts)]
        await full.wait()
        after = await asyncio.to_thread(read_worker, stack)
        await asyncio.gather(*running)
    seconds = after.seconds - before.seconds
    return (after.tokens - before.tokens) / seconds, (after.idle_s - before.idle_s) / seconds


@dataclass(frozen=True)
class Pair:
    """One run on each side: tokens per second, and the share of time in which the worker's device was idle."""

    bare: float
    stack: float
    idle: float

    @property
    def ratio(self) -> float:
        return self.stack / self.bare


def run_pair(loop: Connection, stack: LocalStack, *, stack_first: bool) -> Pair:
    if stack_first:
        rate, idle = asyncio.run(through_the_stack(stack))
        return Pair(rate_of(loop), rate, idle)
    bare_rate = rate_of(loop)
    return Pair(bare_rate, *asyncio.run(through_the_stack(stack)))


def main() -> int:
    options = arguments()
    if options.repetitions < 2:
        raise SystemExit("--repetitions must be at least 2")
    progress("starting the bare loop and the stack")
    spawn = multiprocessing.get_context("spawn")
    loop, theirs = spawn.Pipe()
    child = spawn.Process(target=bare, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    pairs: list[Pair] = []
    with LocalStack(engine="demo", slots=SLOTS, policy=POLICY) as stack:
        for repetition in range(options.repetitions + 1):
            # Every other pair in reverse order, so that neither side always runs on the warmer machine.
            pair = run_pair(loop, stack, stack_first=repetition % 2 == 0)
            note = " (warm-up, not counted)" if repetition == 0 else ""
            progress(
                f"{repetition}/{options.repetitions}  bare {pair.bare:.0f} tokens/s, "
                f"stack {pair.stack:.0f} tokens/s, ratio {pair.ratio:.3f}, device idle {pair.idle:.1%}{note}"
            )
            if repetition:
                pairs.append(pair)
    loop.send(False)
    child.join()
    found = median_interval([pair.ratio for pair in pairs])
    rows = [
        {
            "config": f"batch {SLOTS}, {REQUESTS} requests of {TOKENS} tokens",
            "policy": POLICY,
            "bare_tokens_per_s": median_interval([pair.bare for pair in pairs]).middle,
            "stack_tokens_per_s": median_interval([pair.stack for pair in pairs]).middle,
            **columns("ratio_bare", found),
            "idle_share": median_interval([pair.idle for pair in pairs]).middle,
            "repetitions": len(pairs),
        }
    ]
    table("Worker under the real scheduler against the bare engine loop", rows)
    return finish(
        rows,
        json_file=options.json,
        summary=f"the worker runs at {found} of the bare loop's rate (goal: at least {GOAL})",
        met=found.middle >= GOAL,
    )


if __name__ == "__main__":
    sys.exit(main())
