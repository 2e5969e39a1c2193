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
import collections
import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc.aio
import redis.asyncio as redis_client

from bench import _faults
from bench._clients import Load, Outcome, Piece
from bench._faults import FaultInjector, InjectedFault
from bench._memory import GROWTH_MIB, Memory
from bench._metrics import metric
from bench._proxy import Proxy
from bench.report import finish, progress, table
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc

SUCCESS_GOAL = 0.995
CARRYING_GOAL = 0.8
STUCK_S = 60.0
"""Seconds without a message to any client, with every process up, after which open requests count as
stuck."""
SETTLE_S = 60.0
TELL_S = 5.0
FINISHED_TTL_S = 300.0
DEADLY_SEED = 2**32
"""Seed of the deadly request. No other request has it: theirs have 32 bits."""
RECORD_BYTES_PER_REQUEST = 2_000
RECORD_BYTES_PER_TOKEN = 9
"""Bounds of docs/guarantees.md."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="laps-sd bench chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=100, help="faults in all (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and of the requests (default 1)")
    parser.add_argument(
        "--engine", choices=("fake", "demo"), default="fake", help="scripted tokens, or the shipped pair"
    )
    parser.add_argument("--workers", type=int, help="at the start (default: fake 6, demo 2)")
    parser.add_argument("--slots", type=int, help="of each worker (default 8)", default=8)
    parser.add_argument("--requests", type=int, help="open at once (default: fake 200, demo 24)")
    parser.add_argument("--pieces", type=int, help="distinct requests (default: fake 120, demo 24)")
    parser.add_argument("--every-s", type=float, help="mean time between faults (default: fake 1, demo 10)")
    parser.add_argument(
        "--round-s", type=float, default=0.1, help="of a round of the fake engine (default 0.1)"
    )
    parser.add_argument(
        "--cancel-share", type=float, default=0.03, help="of the requests that are cancelled (default 0.03)"
    )
    parser.add_argument(
        "--kinds", help=f"only these kinds of faults, separated by commas, of: {', '.join(_faults.KINDS)}"
    )
    parser.add_argument("--floor", type=int, help="requests completed at least (default: as many as faults)")
    parser.add_argument(
        "--logs", type=Path, help="keep the processes' logs in this folder (violations keep them anyway)"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(given)
    fake = options.engine == "fake"
    for name, of_fake, of_demo in (
        ("workers", 6, 2),
        ("requests", 200, 24),
        ("pieces", 120, 24),
        ("every_s", 1.0, 10.0),
    ):
        if getattr(options, name) is None:
            setattr(options, name, of_fake if fake else of_demo)
    if options.floor is None:
        options.floor = options.faults
    kinds = tuple(kind.strip() for kind in options.kinds.split(",")) if options.kinds else _faults.KINDS
    unknown = set(kinds) - set(_faults.KINDS)
    if unknown:
        parser.error(f"no such kind of fault: {', '.join(sorted(unknown))}")
    if not fake:  # a real engine has no request that is known to end it
        kinds = tuple(kind for kind in kinds if kind != "deadly request")
    options.kinds = kinds
    if options.workers < 2 or options.faults < 1:
        parser.error("--workers must be at least 2, --faults at least 1")
    return options


def pieces(options: argparse.Namespace) -> list[Piece]:
    rng = random.Random(options.seed)
    if options.engine == "demo":
        from demo.prompts import demo_prompts

        prompts = [prompt.text for prompt in demo_prompts(None, options.pieces, seed=options.seed)]
        shortest, longest = 32, 160
    else:
        prompts = [
            f"Story {number}, told " + "again " * rng.randrange(20) for number in range(options.pieces)
        ]
        shortest, longest = 20, 240
    return [
        Piece(prompt, rng.getrandbits(32), rng.randint(shortest, longest), rng.choice((0.0, 0.8)))
        for prompt in prompts
    ]


# -- afterwards -----------------------------------------------------------------------------------------------------------


async def holders(stack: LocalStack, injector: FaultInjector) -> list[str]:
    """Return the components that still hold something although everything has ended."""
    found: list[str] = []
    await injector.look()
    if not injector.state.leader:
        return ["nobody leads"]
    try:
        async with grpc.aio.insecure_channel(stack.address(injector.state.leader)) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            queue = await admin.ListQueue(admin_pb2.ListQueueRequest(limit=10), timeout=5.0)
            workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5.0)
    except grpc.aio.AioRpcError as error:
        return [f"{injector.state.leader} does not answer: {error.code().name}"]
    if queue.total:
        found.append(f"the queue: {queue.total} requests, {[entry.request_id for entry in queue.entries]}")
    found += [
        f"{worker.worker_name}: {worker.listed} listed, {worker.running} slots taken"
        for worker in workers.workers
        if worker.listed or worker.running
    ]
    known = {worker.worker_name for worker in workers.workers if worker.connected}
    found += [f"{name}: not connected" for name in injector.processes.workers() if name not in known]
    for name in injector.processes.workers():
        used = await asyncio.to_thread(metric, stack, name, "laps_sd_worker_slots_used")
        waiting = await asyncio.to_thread(metric, stack, name, "laps_sd_worker_unacknowledged_reports")
        if used or waiting:
            found.append(f"{name}: {used:g} slots used, {waiting:g} reports not acknowledged")
    blocks = {
        worker.worker_name: (worker.free_target_blocks, worker.target_blocks) for worker in workers.workers
    }
    found += [
        f"{name}: {free} of {all_} KV blocks free" for name, (free, all_) in blocks.items() if free != all_
    ]
    for name in injector.processes.gateways():
        streams = await asyncio.to_thread(metric, stack, name, "laps_sd_gateway_streams")
        if streams:
            found.append(f"{name}: {streams:g} streams open")
    return found


async def record_problems(
    stack: LocalStack, outcomes: list[Outcome], injector: FaultInjector, tokens: int
) -> list[str]:
    """Return the differences between the record and the outcomes at the clients."""
    found: list[str] = []
    loses = [(done.at_s, done.over_s or done.at_s) for done in injector.injected if done.loses]
    by_id = {outcome.request_id: outcome for outcome in outcomes if outcome.request_id}
    by_key: dict[str, list[str]] = collections.defaultdict(list)
    async with redis_client.Redis.from_url(
        stack.redis_url, decode_responses=True, encoding_errors="replace"
    ) as record:
        keys = sorted([key async for key in record.scan_iter(match="laps-sd:*", count=1000)])
        lasting = [key for key in keys if await record.ttl(key) == -1]
        if lasting:
            found.append(f"{len(lasting)} keys that never expire: {lasting[:10]}")
        requests = [key for key in keys if re.search(r":request:[^:]+$", key)]
        for key in requests:
            fields = await record.hgetall(key)
            if not fields:
                continue  # it ended so long ago that its key has expired since the scan
            request_id = key.rpartition(":")[2]
            outcome = by_id.get(request_id)
            if fields.get("state") != "ended":
                found.append(f"{request_id} has not ended in the record: {fields.get('state')}")
                continue
            if fields.get("idempotency_key"):
                by_key[fields["idempotency_key"]].append(request_id)
            if outcome is None or outcome.end is None or outcome.error:
                continue
            if int(fields["committed"]) != len(outcome.tokens):
                found.append(
                    f"{request_id}: {fields['committed']} tokens committed, {len(outcome.tokens)} shown"
                )
        for key, ids in by_key.items():
            if len(ids) > 1 and not loses:
                found.append(f"{len(ids)} requests ran under the idempotency key {key}: {ids}")
        info = await record.info("memory")
        allowed = 4 * 2**20 + len(requests) * RECORD_BYTES_PER_REQUEST + tokens * RECORD_BYTES_PER_TOKEN
        used = int(info["used_memory_dataset"])
        if used > allowed:
            found.append(f"the record holds {used} bytes of data, at most {allowed} were expected")
    return found


def log_problems(stack: LocalStack) -> list[str]:
    """Return the exceptions in the logs."""
    found = []
    for name in sorted(stack.children):
        text = stack.log(name)
        for match in re.finditer(r"Traceback \(most recent call last\)", text):
            excerpt = text[max(0, match.start() - 300) : match.start() + 1800]
            found.append(f"{name} logged an exception:\n{excerpt}")
            break
    return found


def processes_of(groups: set[int]) -> list[str]:
    """Return the remaining processes of these process groups."""
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(stat[2]) in groups and stat[0] != "Z":
                left.append(f"{entry.name}: {(entry / 'cmdline').read_text()[:200]}")
    return left


# -- the run --------------------------------------------------------------------------------------------------------------


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
        environment = {
            "LAPS_SD_FAKE_TIME_SCALE": "1",
            "LAPS_SD_FAKE_ROUND_S": str(options.round_s),
            "LAPS_SD_FINISHED_TTL_S": str(FINISHED_TTL_S),
            "LAPS_SD_FAKE_DEADLY_SEED": str(DEADLY_SEED),
        }
        stack = LocalStack(
            engine=options.engine, workers=options.workers, gateways=2, schedulers=2, slots=options.slots,
            log_style="console", environment=environment, front=self.front,
        )  # fmt: skip
        progress(
            f"starting 2 gateways, 2 schedulers, {options.workers} workers ({options.engine}) and the record"
        )
        # Named faults end their victims; the terminal's Ctrl-C must find the others.
        starting = asyncio.create_task(asyncio.to_thread(stack.start))
        for proxy in await self._fronted(starting):
            await proxy.serve()
        await starting
        groups = {child.pid for child in stack.children.values() if child.pid}
        try:
            await self._on(stack, groups)
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
            if left := processes_of({group for group in groups if group}):
                self.violations.append(f"processes are left: {left}")

    async def _fronted(self, starting: asyncio.Task[Any]) -> list[Proxy]:
        """Return the proxies as soon as the plan of the stack has requested all of them."""
        while len(self.proxies) < 5 and not starting.done():  # noqa: ASYNC110  a thread fills it
            await asyncio.sleep(0.005)
        if starting.done():
            await starting
        return list(self.proxies.values())

    async def _on(self, stack: LocalStack, groups: set[int]) -> None:
        options = self.options
        addresses = [self.proxies[name].address for name in ("gateway-0", "gateway-1")]
        load = Load(
            addresses,
            pieces(options),
            seed=options.seed,
            cancel_share=options.cancel_share,
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
        memory = Memory(stack, loaded=lambda: bool(injector.state.leader))
        watching = [
            asyncio.create_task(injector.watch(groups)),
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
        self.violations += log_problems(stack)
        self.violations += injector.problems
        self._judge(completed, tokens, injector, memory, broken_s)

    async def _inject_faults(self, injector: FaultInjector) -> None:
        options = self.options
        for fault in _faults.plan(options.seed, options.faults, every_s=options.every_s, kinds=options.kinds):
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

    def _judge(
        self, outcomes: list[Outcome], tokens: int, injector: FaultInjector, memory: Memory, broken_s: float
    ) -> None:
        options = self.options
        loses = [done for done in injector.injected if done.loses]
        allowed = 0
        for outcome in outcomes:
            who = f"request {outcome.number}, {outcome.request_id or outcome.key} ({outcome.began_s:.1f} to {outcome.over_s:.1f} s)"
            self.violations += [f"{who}: {problem}" for problem in outcome.problems]
            if outcome.error:
                under = [done for done in loses if outcome.began_s <= done.at_s <= outcome.over_s]
                if under:
                    allowed += 1
                    progress(f"allowed: {who}: {outcome.error}")
                else:
                    self.violations.append(f"{who}: {outcome.error}")
        requests = [
            outcome for outcome in outcomes if outcome.number >= 0
        ]  # without second calls for the same
        successful = sum(outcome.end is not None and not outcome.error for outcome in requests)
        share = successful / max(1, len(requests))
        carried = sum(done.carried for done in injector.injected) / max(1, len(injector.injected))
        growth = memory.growth()
        if share < SUCCESS_GOAL:
            self.violations.append(f"{share:.2%} ended successfully, the goal is {SUCCESS_GOAL:.1%}")
        if carried < CARRYING_GOAL:
            self.violations.append(f"{carried:.0%} of the faults hit a component that had requests")
        if successful < options.floor:
            self.violations.append(f"{successful} requests completed, the floor is {options.floor}")
        self.violations += [
            f"a {kind} grew by {mib:.0f} MiB, allowed are {GROWTH_MIB:.0f}"
            for kind, mib in growth.items()
            if mib > GROWTH_MIB
        ]
        by_kind = collections.Counter(done.fault.kind for done in injector.injected)
        self.rows = [
            {
                "config": f"{options.engine}, {options.workers} workers, seed {options.seed}",
                "faults": len(injector.injected),
                "carried_ratio": carried,
                "requests": len(requests),
                "second_calls": len(outcomes) - len(requests),
                "successful": successful,
                "tokens": tokens,
                "explicit_errors": allowed,
                "violations": len(self.violations),
                "refused_calls": sum(outcome.refused for outcome in outcomes),
                "longest_without_leader_s": injector.state.longest_leaderless_s,
                "growth_mib": max(growth.values(), default=0.0),
                "seconds": broken_s,
            }
        ]
        table("Faults", [{"kind": kind, "faults": count} for kind, count in sorted(by_kind.items())])
        table("Chaos", self.rows, width=160)
        self.summary = (
            f"{len(injector.injected)} faults, {carried:.0%} on what had requests; {successful} of {len(requests)} requests and {tokens} "
            f"tokens completed (floor {options.floor} requests), {allowed} ended with an explicit error where that is allowed, "
            f"{len(self.violations)} violations"
        )


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
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
