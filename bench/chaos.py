"""Is anything lost when everything breaks? `laps-sd bench chaos`

Two gateways, a leading and a standing-by scheduler, workers and a Valkey, each a process of its own; hundreds
of seeded requests through resuming clients; and at seeded moments a fault: SIGKILL, SIGTERM, SIGSTOP until
SIGCONT, a connection reset, a network that is silent in one direction or both or slow, a peer that disappears
without closing, a record that is paused, restarted, killed or emptied, that lost its newest writes, its
scripts, its disk space or its memory, a drained worker, a smaller and a larger pool, a request that ends each
worker that runs it, a pair or everything at once. At the end the run fails unless

  * every accepted request ended exactly once, with no token missing, repeated or out of order, on the
    client's side and in the record;
  * at least 99.5 % ended successfully, the rest with an explicit error under a fault that may lose something
    (docs/guarantees.md);
  * tokens and text of each equal those of an undisturbed run of the same request;
  * no request ran twice under one idempotency key;
  * no process died by itself or logged an exception, none is left, and no key, slot, KV block or stream is
    still held;
  * the memory of no process kept growing;
  * enough was done: at least 80 % of the faults hit a component that had requests, and as many requests as
    there were faults were completed, at least.

--seed decides what happens when, as far as a plan can; it does not decide how processes interleave. A
violation prints how to run its plan again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from bench._chaos.checks import holders, log_problems, processes_with, record_problems
from bench._chaos.judge import judge
from bench._chaos.options import arguments
from bench._chaos.pieces import pieces
from bench._clients import Load
from bench._faults.injector import FaultInjector
from bench._faults.plans import InjectedFault, plan
from bench._memory import WARM_S, Memory
from bench._proxy import Proxy
from bench.report import finish, progress
from laps_sd.stack.local import LocalStack

STUCK_S = 60.0
"""Seconds without a message to any client, with every process up, after which open requests count as
stuck."""
SETTLE_S = 60.0
TELL_S = 5.0
FINISHED_TTL_S = 300.0
VLLM_ENVIRONMENT = {
    # Compiling would take most of each start.
    "LAPS_SD_VLLM_ARGS": '{"enforce_eager": true}',
    # Of 32 tokens: too few for the eight requests that a worker has, so that some lose their KV (28 times in 20 s
    # without faults). vLLM refuses to start without room for the longest context.
    "LAPS_SD_KV_BLOCKS": "17",
    "LAPS_SD_CONTEXT_TOKENS": "512",
}
VLLM_WARM_S = 120.0
"""Seconds under load until the memory of a worker over vLLM has settled: without faults it does in 75 to 120 s."""
CANCEL_SHARE = 0.03
DEADLY_SEED = 2**32
"""Seed of the deadly request. No other request has it: theirs have 32 bits."""


class Run:
    """One chaos run; `violations` are its findings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.violations: list[str] = []
        self.proxies: dict[str, Proxy] = {}
        self.rows: list[dict[str, Any]] = []
        self.summary = ""
        self.faults: list[InjectedFault] = []

    def front(self, name: str, address: str) -> str:
        """Put a proxy before a component that others dial, and return its address."""
        self.proxies[name] = Proxy(address)
        return self.proxies[name].address

    async def run(self) -> None:
        options = self.options
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        mark = uuid.uuid4().hex
        environment = {
            "CHAOS_RUN": mark,
            "LAPS_SD_FAKE_TIME_SCALE": "1",
            "LAPS_SD_FAKE_ROUND_S": str(options.round_s),
            "LAPS_SD_FINISHED_TTL_S": str(FINISHED_TTL_S),
            "LAPS_SD_FAKE_DEADLY_SEED": str(DEADLY_SEED),
        }
        if options.engine == "vllm":
            environment |= VLLM_ENVIRONMENT
        stack = LocalStack(
            engine=options.engine, worker_python=options.vllm, workers=options.workers, gateways=2, schedulers=2, slots=options.slots,
            environment=environment, front=self.front,
        )  # fmt: skip
        progress(
            f"starting 2 gateways, 2 schedulers, {options.workers} workers ({options.engine}) and the record"
        )
        # Named faults end their victims; the terminal's Ctrl-C must find the others.
        starting = asyncio.create_task(asyncio.to_thread(stack.start))
        for proxy in await self._fronted(starting):
            await proxy.serve()
        await starting
        try:
            await self._on(stack)
        finally:
            if self.violations or options.logs:
                folder = options.logs or Path(f"chaos-{options.engine}-{options.seed}-logs")
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                for log in stack.dir.glob("*.log"):
                    shutil.copy(log, folder)
                progress(f"logs: {folder}")
            await asyncio.to_thread(stack.stop)
            for proxy in self.proxies.values():
                await proxy.close()
            if left := processes_with(mark):
                self.violations.append(f"processes are left: {left}")

    async def _fronted(self, starting: asyncio.Task[Any]) -> list[Proxy]:
        """Return the proxies as soon as the plan of the stack has requested all of them."""
        while len(self.proxies) < 5 and not starting.done():  # noqa: ASYNC110  a thread fills it
            await asyncio.sleep(0.005)
        if starting.done():
            await starting
        return list(self.proxies.values())

    async def _on(self, stack: LocalStack) -> None:
        options = self.options
        addresses = [self.proxies[name].address for name in ("gateway-0", "gateway-1")]
        load = Load(
            addresses,
            pieces(options),
            seed=options.seed,
            cancel_share=CANCEL_SHARE,
            deadly_seed=DEADLY_SEED,
        )
        progress(f"{options.pieces} requests undisturbed, for their tokens")
        began = time.monotonic()
        await load.reference()
        progress(
            f"  in {time.monotonic() - began:.0f} s; now {options.requests} at once, and {options.faults} faults"
        )
        injector = FaultInjector(
            stack,
            self.proxies,
            now=load.now,
            workers=options.workers,
            own_pid=os.getpid(),
            deadly=load.deadly,
            kinds=options.kinds,
        )
        self.faults = injector.injected
        warm_s = VLLM_WARM_S if options.engine == "vllm" else WARM_S
        memory = Memory(stack, warm_s=warm_s, loaded=injector.state.loads)
        watching = [
            asyncio.create_task(injector.watch()),
            asyncio.create_task(memory.watch()),
            asyncio.create_task(self._report_progress(load, injector, load.now())),
        ]
        load.start(options.requests)
        started_s = load.now()
        try:
            breaking = asyncio.create_task(self._inject_faults(injector))
            done, _ = await asyncio.wait({breaking, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await injector.all_over()
            broken_s = load.now() - started_s
            progress("all faults are over; waiting for what is open")
            stuck = await load.finish(stuck_s=STUCK_S)
            for outcome in stuck:
                self.violations.append(
                    f"{outcome.request_id or outcome.key} never ended: {len(outcome.tokens)} tokens, "
                    f"open since {outcome.began_s:.0f} s"
                )
            completed, tokens = list(load.done), load.tokens
            # A last wave shows that the system works, and makes every worker report again.
            await self._wave(load)
            await self._settle(stack, injector)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await load.close()
        memory.sample()
        self.violations += await record_problems(stack, completed, injector, load.tokens)
        self.violations += log_problems(stack, injector)
        self.violations += injector.problems
        self.rows, self.summary = judge(
            options,
            self.violations,
            outcomes=completed,
            tokens=tokens,
            injector=injector,
            memory=memory,
            broken_s=broken_s,
        )

    async def _inject_faults(self, injector: FaultInjector) -> None:
        options = self.options
        for fault in plan(options.seed, options.faults, every_s=options.every_s, kinds=options.kinds):
            await asyncio.sleep(fault.after_s)
            await injector.inject(fault)

    async def _report_progress(self, load: Load, injector: FaultInjector, started_s: float) -> None:
        """Print the progress until cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            under_way = [
                f"{done.fault.kind} {' '.join(done.victims)}"
                for done in injector.injected
                if done.over_s is None
            ]
            bad = sum(bool(outcome.error or outcome.problems) for outcome in load.done)
            progress(
                f"{load.now() - started_s:5.0f} s  {len(injector.injected)}/{self.options.faults} faults, "
                f"leader {injector.state.leader or 'none'}, {len(load.open)} open, {len(load.done)} completed, "
                f"{load.tokens} tokens, {bad} failed; now: {', '.join(under_way) or 'nothing broken'}"
            )

    async def _wave(self, load: Load) -> None:
        outcomes = await load.wave(self.options.workers * self.options.slots)
        self.violations += [
            f"after all faults a request failed: {outcome.error or outcome.problems}"
            for outcome in outcomes
            if outcome.error or outcome.problems
        ]

    async def _settle(self, stack: LocalStack, injector: FaultInjector) -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            try:
                found = await holders(stack, injector)
            except OSError as error:
                found = [f"a process does not answer: {error}"]
            if not found:
                return
            if time.monotonic() > deadline:
                self.violations += [f"still held after everything ended: {one}" for one in found]
                return
            await asyncio.sleep(0.5)


def main(given: list[str] | None = None) -> int:
    options = arguments(given, __doc__)
    run = Run(options)
    asyncio.run(run.run())
    for violation in run.violations:
        print(f"VIOLATION (seed {options.seed}): {violation}")
    if run.violations:
        print(
            f"the same plan again: laps-sd bench chaos {' '.join(sys.argv[1:] if given is None else given)}"
        )
        print(f"  its seed is {options.seed}; what was broken when, in seconds of the run:")
        for done in run.faults:
            print(
                f"  {done.at_s:7.1f} to {done.over_s or 0:7.1f}  {done.fault.number:4}  {done.fault.kind}: {' '.join(done.victims)}"
            )
    return finish(run.rows, json_file=options.json, summary=run.summary, met=not run.violations)


if __name__ == "__main__":
    sys.exit(main())
