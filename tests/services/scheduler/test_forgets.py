"""A leader's memory grows with the requests that it leads, not with ended requests, of any kind and with any
end.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from laps_sd.service.config import load
from laps_sd.service.tracing import QUIET
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc import metrics
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.leader.loop import Loop
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.probes import Probes
from scheduler_svc.leader.sessions import GatewaySession, WorkerSession
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import FromGateway, FromWorker, Item, Timers, Turn, WorkerOpened
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.store import Store
from tests.services.scheduler.peers import worker_hello

DAY_MS = 86_400_000
TOGETHER = 250
SLOTS = 256
CONTAINERS = (dict, list, set, frozenset, deque)
NOT_OF_THE_LEADER = ("asyncio", "redis", "prometheus_client", "logging", "grpc", "ssl", "socket")


class Leader:
    """A leader's loop over a real record, with the clock set by the test, one gateway and one worker."""

    def __init__(self, store: Store, settings: SchedulerSettings) -> None:
        core_settings = CoreSettings(tenant_fairness=True)
        self.now_s = 1_700_000_000.0
        self.loop = Loop(
            probes=Probes(),
            settings=settings,
            core=Scheduler(policy_named("laps-sd", core_settings), core_settings, Priors()),
            store=store,
            clock=lambda: self.now_s,
            outage=Outage(),
            traces=RequestTraces(QUIET, shard=settings.shard, policy="laps-sd"),
        )
        self.gateway = GatewaySession("g")
        self.worker = WorkerSession("w", "w", "cpu")
        self._leases: dict[str, int] = {}
        self._reports = 0
        self._submitted = 0

    async def turn(self, *items: Item) -> None:
        """Run one turn and the next, which carries out what the first has decided; read the messages that they
        sent.
        """
        await self.loop._turn(items)
        await self.loop._turn(())
        while self.gateway.take():
            pass
        for reply in self.worker.take():
            for leased in reply.specifications.specifications:
                self._leases[leased.specification.request_id] = leased.lease_epoch
            for dropped in reply.drop.requests:
                self._leases.pop(dropped.request_id, None)

    async def seconds_pass(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            await self.turn()

    def heard(self, **message: Any) -> FromGateway:
        return FromGateway(self.gateway, gateway_pb.GatewayMessage(**message))

    async def run_requests(self, count: int) -> None:
        """Run requests with far deadlines that end at once, each in one of five ways."""
        for _ in range(count // TOGETHER):
            ids = [f"r{number}" for number in range(self._submitted, self._submitted + TOGETHER)]
            self._submitted += TOGETHER
            await self.turn(*(self.heard(submit=a_submission(request_id)) for request_id in ids))
            gone = [gateway_pb.Detach(attachment_id=f"{i}-client") for i in ids[0::5] + ids[1::5]]
            await self.turn(*(self.heard(detach=detach) for detach in gone))
            back = [gateway_pb.Attach(request_id=i, tenant=i, attachment_id=f"{i}-again") for i in ids[0::5]]
            await self.turn(*(self.heard(attach=attach) for attach in back))
            cancels = [gateway_pb.CancelRequested(request_id=i, tenant=i) for i in ids[1::5] + ids[2::5]]
            await self.turn(*(self.heard(cancel=cancel) for cancel in cancels))
            while self.loop.working_copy.live:
                assert self._leases, "what is unfinished is on the worker's list"
                await self.turn(FromWorker(self.worker, self._report_ends()))
            await self.seconds_pass(1)

    def _report_ends(self) -> worker_pb.WorkerMessage:
        self._reports += 1
        report = worker_pb.RoundReport(number=self._reports, verify_s=0.01, total_s=0.01)
        for request_id, lease_epoch in self._leases.items():
            report.progress.add(
                request_id=request_id,
                lease_epoch=lease_epoch,
                token_ids=[1, 2],
                drafted=4,
                accepted=1,
                end=gateway_pb.RequestEnd.KIND_STOP,
            )
        self._leases.clear()
        return worker_pb.WorkerMessage(reports=worker_pb.RoundReports(reports=[report]))


def a_submission(request_id: str) -> gateway_pb.Submit:
    return gateway_pb.Submit(
        submission_id=1,
        request_id=request_id,
        tenant=request_id,
        idempotency_key=request_id,
        workload_class=request_id,
        specification=gateway_pb.Specification(
            request_id=request_id, prompt_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=8, top_p=1.0)
        ),
        deadline_in_ms=DAY_MS,
        time_limit_ms=DAY_MS,
        grace_ms=DAY_MS,
        attachment_id=f"{request_id}-client",
        model="m",
    )


def entries_by_path(roots: dict[str, object]) -> Counter[str]:
    """Count the entries of all containers that can be reached from the roots, by the names on the path to
    them.
    """
    entries: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque(roots.items())
    while waiting:
        path, thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        if type(thing).__module__.partition(".")[0] in NOT_OF_THE_LEADER:
            continue
        entries[path] += 1
        if isinstance(thing, CONTAINERS):
            entries[path] += len(thing)
        waiting.extend((path + name, part) for name, part in _parts(thing))
    return entries


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    match thing:
        case dict():
            for key, value in thing.items():
                yield "[key]", key
                yield "[]", value
        case list() | tuple() | set() | frozenset() | deque():
            for value in thing:
                yield "[]", value
        case FunctionType():
            for cell in thing.__closure__ or ():
                yield "()", cell.cell_contents
        case MethodType():
            yield "", thing.__self__
        case _ if gc.is_tracked(thing):
            named = dict(getattr(thing, "__dict__", {}))
            for cls in type(thing).__mro__:
                slots = cls.__dict__.get("__slots__", ())
                for slot in (slots,) if isinstance(slots, str) else slots:
                    if hasattr(thing, slot):
                        named[slot] = getattr(thing, slot)
            if named:
                yield from ((f".{name}", part) for name, part in named.items())
            else:
                yield from (("*", part) for part in gc.get_referents(thing))


@pytest.fixture
async def leader(valkey: EmbeddedServer, shard: str) -> AsyncIterator[Leader]:
    settings = load(SchedulerSettings, {"redis_url": valkey.url, "shard": shard}, environ={})
    store = Store(valkey.url, shard, finished_ttl_s=1.0)
    assert await store.acquire_leadership(owner="here", lease_s=600.0)
    leader = Leader(store, settings)
    await leader.loop.recover()
    hello = worker_hello("w", slots=SLOTS, target_blocks=4 * SLOTS, draft_blocks=4 * SLOTS)
    await leader.turn(WorkerOpened(leader.worker, hello))
    yield leader
    await store.close()


async def test_nothing_of_a_leader_grows_with_requests_that_ended(leader: Leader) -> None:
    roots = {
        "loop": leader.loop,
        "gateway": leader.gateway,
        "worker": leader.worker,
        "metrics": vars(metrics),
    }
    await leader.run_requests(5_000)
    await leader.seconds_pass(15)
    before = entries_by_path(roots)
    assert before["loop.working_copy.live"] == 1, "the walk finds the table of requests, and it is empty"

    await leader.run_requests(5_000)
    await leader.seconds_pass(15)
    grown = {path: count - before[path] for path, count in entries_by_path(roots).items()}

    assert {path: more for path, more in grown.items() if more > TOGETHER} == {}


def test_a_cancelled_timer_never_runs_and_leaves_nothing() -> None:
    timers, ran = Timers(), []
    far = [timers.at(100.0 + at, lambda _: ran.append("far")) for at in range(1_000)]
    timers.at(5.0, lambda _: ran.append("near"))
    timers.at(200.0, lambda _: ran.append("last"))
    for timer in far:
        timer.cancel()
        timer.cancel()

    assert len(timers._heap) <= 4
    assert timers.next_s == 5.0
    timers.run_due(Turn(50.0))
    assert ran == ["near"]
    timers.run_due(Turn(200.0))
    assert ran == ["near", "last"]
    assert timers.next_s is None


def test_what_is_cancelled_between_others_is_passed_over_when_it_is_due() -> None:
    timers, ran = Timers(), []
    kept = [timers.at(at, lambda _, at=at: ran.append(at)) for at in (1.0, 2.0, 3.0, 4.0)]
    kept[1].cancel()
    timers.run_due(Turn(3.0))
    kept[0].cancel()  # it has run
    timers.run_due(Turn(4.0))

    assert ran == [1.0, 3.0, 4.0]
