"""Shared helpers of the worker's tests: a runner driven by hand, and a scheduler that sends the test's
messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as pb
from laps_sd.v1.inference_pb2 import SamplingParams
from laps_sd.v1.worker_link_pb2_grpc import WorkerLinkServicer, add_WorkerLinkServicer_to_server
from worker_svc.engine.interface import Engine, RoundResult, Sampling, Specification
from worker_svc.fake.engine import FakeEngine
from worker_svc.link.link import SchedulerLink
from worker_svc.link.wire import without_columns
from worker_svc.runner.messages import Assigned, Listed, Message, Outcome, Round, Specified
from worker_svc.runner.runner import Runner
from worker_svc.runner.thread import EngineThread, QueueInbox
from worker_svc.settings import WorkerSettings

LEADER = "1:first"
PATIENCE_S = 60.0


def spec(
    name: str, *, max_tokens: int = 40, prompt: int = 5, committed: Iterable[int] = (), seed: int = 7
) -> Specification:
    return Specification(
        request_id=name,
        prompt_ids=tuple(1 + (sum(name.encode()) + i) % 1000 for i in range(prompt)),
        committed_ids=tuple(committed),
        sampling=Sampling(temperature=1.0, seed=seed),
        max_tokens=max_tokens,
    )


def entry(name: str, index_s: float = 1.0, *, lease_epoch: int = 1, resume_cost_s: float = 0.0) -> Listed:
    return Listed(name, lease_epoch, 0, index_s, resume_cost_s, False, False)


class Desk:
    """A runner without a thread, and everything it delivered."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine = engine
        self.outcomes: list[Outcome] = []
        self.inbox = QueueInbox()
        self.runner = Runner(engine, self.inbox, self.outcomes.append, **options)

    def put(self, *messages: Message) -> None:
        self.inbox.put(*messages)

    def give(self, *specs: Specification, lease_epoch: int = 1) -> None:
        self.put(*[Specified(one, lease_epoch) for one in specs])

    def assign(self, *entries: Listed) -> None:
        self.put(Assigned(entries))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.runner.turn()

    def turn_until_idle(self) -> None:
        while self.runner.turn():
            pass

    @property
    def rounds(self) -> list[Round]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Round)]

    def who(self) -> list[tuple[str, ...]]:
        """Return the requests of each round."""
        return [tuple(step.request_id for step in one.result.requests) for one in self.rounds]

    def tokens(self, name: str) -> tuple[int, ...]:
        """Return the reported tokens of a request; assert that nothing is missing or twice."""
        return collect(
            [
                (step.position, step.tokens)
                for one in self.rounds
                for _, step in one.progress
                if step.request_id == name
            ]
        )


def collect(steps: Iterable[tuple[int, Iterable[int]]]) -> tuple[int, ...]:
    output: list[int] = []
    for position, tokens in steps:
        assert position == len(output)
        output.extend(tokens)
    return tuple(output)


class Gated(FakeEngine):
    """An engine that runs as many rounds as the test allows."""

    def __init__(self, rounds: int = 0, **options: object) -> None:
        super().__init__(**{"slots": 2, **options})  # type: ignore[arg-type]
        self._permits = threading.Semaphore(rounds)
        self.inside = False
        """A round was begun and may not end yet."""

    def allow(self, rounds: int) -> None:
        self._permits.release(rounds)

    def round(self, run: Sequence[str]) -> RoundResult:
        self.inside = True
        assert self._permits.acquire(timeout=20), "the test never allowed this round"
        self.inside = False
        return super().round(run)


# -- a scheduler that sends the test's messages ------------------------------------------------------------


class Stream:
    """One connection of a worker, from the scheduler's side."""

    def __init__(self, context: Any, hello: pb.WorkerHello) -> None:
        self.hello = hello
        self.leader_epoch = LEADER
        self.reports: list[pb.RoundReport] = []
        self.messages: list[int] = []
        """Reports in each RoundReports message."""
        self.heartbeats = 0
        self.missing: list[str] = []
        self.learnt: list[pb.LearntProbe] = []
        self.drains = 0
        self.ended = asyncio.Event()
        self.close = asyncio.Event()
        self._context = context
        self._heard = asyncio.Event()

    async def send(self, *, leader_epoch: str | None = None, **message: Any) -> None:
        await self._context.write(
            pb.WorkerLinkReply(
                leader_epoch=self.leader_epoch if leader_epoch is None else leader_epoch, **message
            )
        )

    async def greet(self, leader_epoch: str = LEADER, *, version: int = PROTOCOL_VERSIONS[0]) -> None:
        self.leader_epoch = leader_epoch
        await self.send(hello=gateway_pb.SchedulerHello(shard="s0", protocol_version=version, pool="demo"))

    async def lease(self, *specs: Specification, lease_epoch: int = 1) -> None:
        leased = [
            pb.LeasedSpecification(specification=on_wire(one), lease_epoch=lease_epoch) for one in specs
        ]
        await self.send(specifications=pb.Specifications(specifications=leased))

    async def assign(self, *names: str, lease_epoch: int = 1, leader_epoch: str | None = None) -> None:
        entries = [
            pb.AssignmentEntry(request_id=name, lease_epoch=lease_epoch, index_s=float(i + 1))
            for i, name in enumerate(names)
        ]
        await self.send(assignment=pb.Assignment(number=1, entries=entries), leader_epoch=leader_epoch)

    async def acknowledge(self, number: int, leader_epoch: str | None = None, *, alone: bool = True) -> None:
        if alone:
            await self.send(acknowledged=pb.ReportsAcknowledged(number=number), leader_epoch=leader_epoch)
        else:
            await self.send(
                heartbeat=gateway_pb.Heartbeat(), acknowledged_number=number, leader_epoch=leader_epoch
            )

    async def until(self, condition: Callable[[Stream], bool], description: str) -> None:
        """Wait until the messages received so far satisfy the condition."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition(self):
                    self._heard.clear()
                    await self._heard.wait()
        except TimeoutError:
            raise AssertionError(
                f"did not happen: {description}; reports heard: {len(self.reports)}"
            ) from None

    async def until_ended(self, name: str) -> None:
        await self.until(lambda s: any(p.request_id == name and p.end for p in s.progress()), f"{name} ends")

    def progress(self) -> list[pb.RequestProgress]:
        """Return the progress in all reports, also that in columns."""
        return [progress for report in self.reports for progress in without_columns(report).progress]

    def tokens(self, name: str) -> tuple[int, ...]:
        return collect([(p.position, p.token_ids) for p in self.progress() if p.request_id == name])

    def hear(self, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "heartbeat":
                self.heartbeats += 1
            case "reports":
                self.messages.append(len(message.reports.reports))
                self.reports.extend(message.reports.reports)
            case "missing":
                self.missing.extend(message.missing.request_ids)
            case "drain":
                self.drains += 1
            case "learnt_probe":
                self.learnt.append(message.learnt_probe)
        self._heard.set()


class Scheduler(WorkerLinkServicer):
    """Accepts workers and hands their streams to the test."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.address = ""
        self.refer_to: str | None = None
        """Answer NotLeader and name this one."""
        self.refused: pb.WorkerRefused | None = None
        self.hellos = 0

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        self.hellos += 1
        if self.refer_to is not None:
            await context.write(
                pb.WorkerLinkReply(not_leader=gateway_pb.NotLeader(leader_address=self.refer_to))
            )
            return
        if self.refused is not None:
            await context.write(pb.WorkerLinkReply(leader_epoch=LEADER, refused=self.refused))
            return
        stream = Stream(context, first.hello)
        self.streams.put_nowait(stream)
        closing = asyncio.create_task(stream.close.wait())
        try:
            reading = asyncio.create_task(self._read(stream, context))
            try:
                await asyncio.wait({closing, reading}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            stream.ended.set()

    async def _read(self, stream: Stream, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            stream.hear(message)

    async def accept(self) -> Stream:
        async with asyncio.timeout(PATIENCE_S):
            return await self.streams.get()

    async def greet(self, leader_epoch: str = LEADER, *, version: int = PROTOCOL_VERSIONS[0]) -> Stream:
        stream = await self.accept()
        await stream.greet(leader_epoch, version=version)
        return stream


@asynccontextmanager
async def scheduler() -> AsyncIterator[Scheduler]:
    servicer = Scheduler()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_WorkerLinkServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)


class Worker:
    """A link with its runner in a thread; `running` ends when the worker leaves."""

    def __init__(self, link: SchedulerLink, running: asyncio.Task[None]) -> None:
        self.link = link
        self.running = running

    async def left(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.running)


@asynccontextmanager
async def worker(*seeds: str, engine: Engine | None = None, **settings: Any) -> AsyncIterator[Worker]:
    values: dict[str, Any] = {"heartbeat_s": 0.02, "silence_s": 10.0, "worker_name": "w", **settings}
    given = WorkerSettings(scheduler_seeds=seeds, **values)
    link = SchedulerLink(given, EngineThread(engine or FakeEngine(slots=2), given))
    running = asyncio.create_task(link.run())
    try:
        yield Worker(link, running)
    finally:
        if isinstance(engine, Gated):
            engine.allow(10_000)  # the thread ends after its round
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def on_wire(one: Specification) -> gateway_pb.Specification:
    return gateway_pb.Specification(
        request_id=one.request_id,
        prompt_ids=one.prompt_ids,
        committed_ids=one.committed_ids,
        sampling=SamplingParams(
            max_tokens=one.max_tokens,
            temperature=one.sampling.temperature,
            top_p=one.sampling.top_p,
            top_k=one.sampling.top_k,
            seed=one.sampling.seed,
            stop=one.stop,
            ignore_eos=one.ignore_eos,
        ),
        max_draft_tokens=one.max_draft_len,
        cache_salt=one.cache_salt,
        adapter=one.adapter,
    )
