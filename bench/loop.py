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
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import grpc.aio

from bench._metrics import MetricsPage
from bench.report import columns, command_line, finish, median_interval, progress, table
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from worker_svc.engine.interface import Engine, Sampling, Specification
from worker_svc.settings import WorkerSettings

GOAL = 0.95


def arguments() -> argparse.Namespace:
    parser = command_line("loop", __doc__)
    parser.add_argument("--requests", type=int, default=64, help="requests waiting at once (default 64)")
    parser.add_argument("--slots", type=int, default=8, help="batch size of the worker (default 8)")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each request (default 96)")
    parser.add_argument(
        "--repetitions", type=int, default=12, help="pairs of runs after one to warm up (default 12)"
    )
    parser.add_argument("--policy", default="laps-sd", help="the scheduler's policy (default laps-sd)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def prompts(count: int) -> list[str]:
    from demo.prompts import demo_prompts

    return [prompt.text for prompt in demo_prompts(None, count, seed=3)]


# -- the bare loop, in its own process ----------------------------------------------------------------------------------


def bare(options: argparse.Namespace) -> None:
    """Run the loop once per line on stdin; print tokens per second."""
    from tokenizers import Tokenizer

    from laps_sd.service.config import load
    from worker_svc.demo import TARGET_DIR
    from worker_svc.loading import load as load_engine

    settings = load(
        WorkerSettings,
        {"engine": "demo", "slots": options.slots, "device": options.device, "threads": 1},
        environ={},
    )
    engine = load_engine(settings)
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    prompt_ids = [tuple(tokenizer.encode(text).ids) for text in prompts(options.requests)]
    print("ready", flush=True)
    for _ in sys.stdin:
        names = [f"r{number}" for number in range(len(prompt_ids))]
        for number, (name, ids) in enumerate(zip(names, prompt_ids, strict=True)):
            sampling = Sampling(temperature=0.8, top_p=1.0, top_k=0, seed=number)
            engine.add(Specification(name, ids, (), sampling, options.tokens, ignore_eos=True))
        print(full_batch_rate(engine, names, options.slots), flush=True)
        for name in engine.known():
            engine.drop(name)


def full_batch_rate(engine: Engine, waiting: list[str], slots: int) -> float:
    """Run these requests, and return tokens per second of the time in which all slots are taken."""
    running, waiting = waiting[:slots], waiting[slots:]
    tokens = 0
    started_s = time.perf_counter()
    while len(running) == slots:
        for step in engine.round(running).requests:
            tokens += len(step.tokens)
            if step.finish is None:
                continue
            engine.drop(step.request_id)
            running.remove(step.request_id)
            if waiting:
                running.append(waiting.pop(0))
    return tokens / (time.perf_counter() - started_s)


class BareLoop:
    """Child process that runs the bare loop on request."""

    def __init__(self, options: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "bench.loop", "--bare", *sys.argv[1:]]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def _read(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("the bare loop ended unexpectedly; its error is above")
        return line

    def run(self) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


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


async def through_the_stack(stack: LocalStack, options: argparse.Namespace) -> tuple[float, float]:
    """Send all requests at once through the public API. Return the worker's tokens per second while its batch
    is full, and the share of that time in which its device was idle.
    """
    full = asyncio.Event()
    ended = 0

    async def one(stub: inference_pb2_grpc.InferenceStub, number: int, text: str) -> None:
        nonlocal ended
        sampling = pb.SamplingParams(max_tokens=options.tokens, temperature=0.8, seed=number, ignore_eos=True)
        await stub.Generate(pb.GenerateRequest(text=text, sampling=sampling))  # type: ignore[misc]  # generated for blocking channels
        ended += 1
        if ended > options.requests - options.slots:
            full.set()  # fewer than `slots` are left from here on

    before = read_worker(stack)
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        texts = prompts(options.requests)
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


def run_pair(loop: BareLoop, stack: LocalStack, options: argparse.Namespace, *, stack_first: bool) -> Pair:
    if stack_first:
        rate, idle = asyncio.run(through_the_stack(stack, options))
        return Pair(loop.run(), rate, idle)
    bare_rate = loop.run()
    return Pair(bare_rate, *asyncio.run(through_the_stack(stack, options)))


def main() -> int:
    options = arguments()
    if options.bare:
        bare(options)
        return 0
    if options.repetitions < 2 or options.requests <= options.slots:
        raise SystemExit("--repetitions must be at least 2, and --requests more than --slots")
    progress("starting the bare loop and the stack")
    loop = BareLoop(options)
    pairs: list[Pair] = []
    with LocalStack(
        engine="demo", slots=options.slots, policy=options.policy, device=options.device
    ) as stack:
        for repetition in range(options.repetitions + 1):
            # Every other pair in reverse order, so that neither side always runs on the warmer machine.
            pair = run_pair(loop, stack, options, stack_first=repetition % 2 == 0)
            note = " (warm-up, not counted)" if repetition == 0 else ""
            progress(
                f"{repetition}/{options.repetitions}  bare {pair.bare:.0f} tokens/s, "
                f"stack {pair.stack:.0f} tokens/s, ratio {pair.ratio:.3f}, device idle {pair.idle:.1%}{note}"
            )
            if repetition:
                pairs.append(pair)
    loop.close()
    found = median_interval([pair.ratio for pair in pairs])
    rows = [
        {
            "config": f"batch {options.slots}, {options.requests} requests of {options.tokens} tokens",
            "policy": options.policy,
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
