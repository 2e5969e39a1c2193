"""The reports of workers in single turns of a leader, over a real record."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from laps_sd.contract.ends import End
from laps_sd.service.config import load
from laps_sd.service.tracing import QUIET
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.leader.clients import CANCEL_AGAIN_S, Clients
from scheduler_svc.leader.loop import MAX_TURN, OBSERVE_S, Loop
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.probes import Probes
from scheduler_svc.leader.queue_limits import RETRY_STORE_MS
from scheduler_svc.leader.repair import WRITE_BACK_TOGETHER
from scheduler_svc.leader.roster import MOST_ORDERED, TOGETHER_S
from scheduler_svc.leader.sessions import GatewaySession, WorkerSession
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import (
    DrainOrdered,
    FromGateway,
    FromWorker,
    GatewayClosed,
    Item,
    LeadInDoubt,
    WorkerClosed,
    WorkerOpened,
)
from scheduler_svc.metrics import REFUSED
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store import scripts
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import Fenced, StoreUnavailable
from scheduler_svc.store.records import Limits, NewRequest, SubmitResult
from scheduler_svc.store.scripts import MAX_PROMPTS, Call
from scheduler_svc.store.store import Store
from tests.services.scheduler.peers import all_deliveries, worker_hello
from tests.store.kit import keys_of, losing_answers

STOP = gateway_pb.RequestEnd.KIND_STOP


class Worker:
    """One connected worker, whose reports the test makes."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.session = WorkerSession(worker_id, worker_id, "cpu")
        self.specifications: dict[str, worker_pb.LeasedSpecification] = {}
        self.listed: list[str] = []
        self.dropped: list[str] = []
        self.acknowledged = 0
        self._reports = 0

    def opens(self, **hello: Any) -> WorkerOpened:
        return WorkerOpened(self.session, worker_hello(self.worker_id, **hello))

    def reports(self, *progress: worker_pb.RequestProgress) -> FromWorker:
        """Return the message with the next report: one round of these requests."""
        self._reports += 1
        report = worker_pb.RoundReport(number=self._reports, progress=progress, verify_s=0.01, total_s=0.01)
        return FromWorker(
            self.session, worker_pb.WorkerMessage(reports=worker_pb.RoundReports(reports=[report]))
        )

    def progress(
        self, request_id: str, position: int, *tokens: int, **more: Any
    ) -> worker_pb.RequestProgress:
        lease_epoch = self.specifications[request_id].lease_epoch
        return worker_pb.RequestProgress(
            request_id=request_id, lease_epoch=lease_epoch, position=position, token_ids=tokens, **more
        )

    def read(self) -> None:
        """Read the messages that wait for it."""
        self.session._acknowledge_alone()
        for reply in self.session.take():
            for leased in reply.specifications.specifications:
                self.specifications[leased.specification.request_id] = leased
            if reply.HasField("assignment"):
                self.listed = [entry.request_id for entry in reply.assignment.entries]
            self.dropped += [dropped.request_id for dropped in reply.drop.requests]
            self.acknowledged = max(self.acknowledged, reply.acknowledged_number, reply.acknowledged.number)


class Leader:
    """A leader's loop, one gateway and workers; the test runs each turn."""

    def __init__(self, store: Store, settings: SchedulerSettings) -> None:
        core_settings = CoreSettings()
        self.store = store
        self.now_s = 1_700_000_000.0
        self.core = Scheduler(policy_named("laps-sd", core_settings), core_settings, Priors())
        self.loop = Loop(
            probes=Probes(),
            settings=settings,
            core=self.core,
            store=store,
            clock=lambda: self.now_s,
            outage=Outage(),
            traces=RequestTraces(QUIET, shard=settings.shard, policy="laps-sd"),
        )
        self.workers = [Worker("w1"), Worker("w2")]
        self.tokens: dict[str, list[int]] = {}
        """Tokens that clients have, by request."""
        self.ends: dict[str, int] = {}
        self.answers: list[Any] = []
        """Answers that the gateway has, in their order."""
        self.gateway = GatewaySession("g")

    async def turn(self, *items: Item) -> None:
        """Run one turn, and read what it sent."""
        await self.loop._turn(items)
        while replies := self.gateway.take():
            for reply in replies:
                kind = reply.WhichOneof("message")
                if kind is not None and kind != "deliveries":
                    self.answers.append(getattr(reply, kind))
                for delivery in all_deliveries(reply):
                    request_id = delivery.attachment_id.removesuffix("-client")
                    self.tokens.setdefault(request_id, []).extend(delivery.token_ids)
                    if delivery.HasField("end"):
                        self.ends[request_id] = delivery.end.kind
        for worker in self.workers:
            worker.read()

    async def submit(self, request_id: str, **more: Any) -> None:
        """Submit a request, and run the turns in which it is put on a list."""
        await self.turn(self.submits(request_id, **more))
        await self.turn()

    def submits(self, request_id: str, *, prompt: Sequence[int] = (1, 2, 3), **more: Any) -> FromGateway:
        submit = gateway_pb.Submit(
            submission_id=1,
            request_id=request_id,
            tenant="t",
            specification=gateway_pb.Specification(
                request_id=request_id, prompt_ids=prompt, sampling=SamplingParams(max_tokens=64, top_p=1.0)
            ),
            attachment_id=f"{request_id}-client",
            model="m",
            **more,
        )
        return FromGateway(self.gateway, gateway_pb.GatewayMessage(submit=submit))

    def loses_its_gateway(self) -> GatewayClosed:
        """Return the end of the gateway's stream; another one follows."""
        closed, self.gateway = GatewayClosed(self.gateway), GatewaySession("g")
        return closed

    async def cancel(self, request_id: str) -> None:
        """Cancel a request, and run the turn in which its end is written."""
        await self.turn(self.cancels(request_id))
        await self.turn()

    def cancels(self, request_id: str) -> FromGateway:
        cancel = gateway_pb.CancelRequested(cancel_id=1, request_id=request_id, tenant="t")
        return FromGateway(self.gateway, gateway_pb.GatewayMessage(cancel=cancel))

    def attaches(self, request_id: str, attachment_id: str = "") -> FromGateway:
        attach = gateway_pb.Attach(
            attach_id=1,
            request_id=request_id,
            tenant="t",
            attachment_id=attachment_id or f"{request_id}-client",
        )
        return FromGateway(self.gateway, gateway_pb.GatewayMessage(attach=attach))

    def counted(self, request_id: str) -> int:
        """Return the output tokens that the core has counted."""
        explanation = self.core.explain(request_id, self.now_s)
        assert explanation is not None
        return explanation.emitted

    async def recorded(self, request_id: str) -> tuple[int, ...]:
        stored = await self.store.read(request_id)
        assert stored is not None
        return stored.committed_ids


@pytest.fixture
async def leader(valkey: EmbeddedServer, shard: str) -> AsyncIterator[Leader]:
    settings = load(SchedulerSettings, {"redis_url": valkey.url, "shard": shard}, environ={})
    store = Store(valkey.url, shard)
    assert await store.acquire_leadership(owner="here", lease_s=600.0)
    leader = Leader(store, settings)
    await leader.loop.recover()
    yield leader
    await store.close()


@pytest.mark.parametrize("collects", [True, False])
async def test_recovery_leaves_the_garbage_collector_as_it_was(leader: Leader, collects: bool) -> None:
    if not collects:
        gc.disable()
    try:
        await leader.loop.recover()
        assert gc.isenabled() is collects
    finally:
        gc.enable()


async def test_a_new_leader_lets_other_tasks_run_while_it_starts_graces(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is renewed in between, however many requests it leads."""
    for number in range(4):
        await leader.submit(f"r{number}")
    done: list[str] = []
    start_grace = Clients.start_grace

    def start_it(clients: Clients, *args: Any) -> None:
        done.append("grace")
        start_grace(clients, *args)

    async def renew() -> None:
        while True:
            done.append("renewal")
            await asyncio.sleep(0)

    monkeypatch.setattr("scheduler_svc.leader.loop.GRACES_TOGETHER", 2)
    monkeypatch.setattr(Clients, "start_grace", start_it)
    renewing = asyncio.create_task(renew())
    await Leader(leader.store, leader.loop.settings).loop.recover()
    renewing.cancel()

    first = done.index("grace")
    assert done[first : first + 6] == ["grace", "grace", "renewal", "grace", "grace", "renewal"]


async def test_what_a_new_leader_recovers_is_not_searched_for_cycles(leader: Leader) -> None:
    await leader.submit("r")
    gc.unfreeze()
    second = Leader(leader.store, leader.loop.settings)
    await second.loop.recover()
    frozen = gc.get_freeze_count()
    gc.unfreeze()

    assert frozen > 0


async def test_submissions_that_are_half_written_when_the_lead_is_confirmed_are_not_ended(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease runs out between two calls of one exchange, and the server is started again before the confirmation."""
    submit = leader.store.submit

    async def half(new: Sequence[NewRequest], *others: Any) -> list[SubmitResult]:
        monkeypatch.undo()
        await submit(new[:1], *others)
        leader.store.distrust()
        raise Fenced("the lease has run out")

    monkeypatch.setattr(leader.store, "submit", half)
    await leader.turn(leader.submits("r1"), leader.submits("r2"))
    await leader.turn()

    assert leader.ends == {}
    assert await leader.store.unfinished_ids() == ["r1", "r2"]
    assert list(leader.loop.working_copy.live) == ["r1", "r2"]


async def test_tokens_are_shown_and_acknowledged_in_the_turn_that_takes_them(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")

    await leader.turn(worker.reports(worker.progress("r", 0, 7, 8)))

    assert leader.tokens["r"] == [7, 8]
    assert worker.acknowledged == 1
    assert leader.counted("r") == 2
    assert await leader.recorded("r") == (7, 8)


async def test_two_reports_in_one_turn_continue_each_other(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")

    await leader.turn(
        worker.reports(worker.progress("r", 0, 7, 8)), worker.reports(worker.progress("r", 2, 9))
    )

    assert leader.tokens["r"] == [7, 8, 9]
    assert worker.acknowledged == 2
    assert await leader.recorded("r") == (7, 8, 9)


class TestReportsThatWaitForTheCore:
    """The clock stands still, so that no interval ever ends: only the first report of a worker is due by itself."""

    async def test_their_tokens_are_shown_all_the_same(self, leader: Leader) -> None:
        [worker, _] = leader.workers
        await leader.turn(worker.opens())
        await leader.submit("r")
        await leader.turn(worker.reports(worker.progress("r", 0, 7)))

        await leader.turn(worker.reports(worker.progress("r", 1, 8)))
        await leader.turn(worker.reports(worker.progress("r", 2, 9)))

        assert leader.tokens["r"] == [7, 8, 9]
        assert worker.acknowledged == 3
        assert leader.counted("r") == 1

    async def test_an_end_brings_them_with_it(self, leader: Leader) -> None:
        [worker, _] = leader.workers
        await leader.turn(worker.opens())
        await leader.submit("r")
        await leader.submit("other")
        for position in range(3):
            await leader.turn(
                worker.reports(worker.progress("r", position, 7), worker.progress("other", position, 8))
            )

        await leader.turn(
            worker.reports(worker.progress("r", 3, 7, end=STOP), worker.progress("other", 3, 8))
        )
        await leader.turn()

        assert leader.tokens == {"r": [7] * 4, "other": [8] * 4}
        assert leader.counted("other") == 4
        assert await leader.recorded("r") == (7, 7, 7, 7)
        ended = await leader.store.read("r")
        assert ended is not None
        assert ended.standing.rounds == 4

    async def test_a_cancel_comes_after_them(self, leader: Leader) -> None:
        [worker, _] = leader.workers
        await leader.turn(worker.opens())
        await leader.submit("r")
        for position in range(3):
            await leader.turn(worker.reports(worker.progress("r", position, 7)))

        await leader.cancel("r")

        ended = await leader.store.read("r")
        assert ended is not None
        assert (ended.end, ended.standing.rounds, len(ended.committed_ids)) == (End.CANCELLED, 3, 3)

    async def test_the_loss_of_their_worker_comes_after_them(self, leader: Leader) -> None:
        [lost, next_] = leader.workers
        await leader.turn(lost.opens())
        await leader.submit("r")
        for position in range(3):
            await leader.turn(lost.reports(lost.progress("r", position, 7)))

        await leader.turn(next_.opens(), WorkerClosed(lost.session, silent=True))
        leader.now_s += TOGETHER_S
        await leader.turn()
        await leader.turn()

        assert leader.counted("r") == 3
        assert list(next_.specifications["r"].specification.committed_ids) == [7, 7, 7]
        await leader.turn(next_.reports(next_.progress("r", 3, 8)))
        assert leader.tokens["r"] == [7, 7, 7, 8]
        assert next_.dropped == []

    async def test_the_core_has_them_before_another_worker_continues(self, leader: Leader) -> None:
        """For the core `b` still waits for its first round when a second worker comes up and gets it."""
        [first, second] = leader.workers
        await leader.turn(first.opens(slots=1))
        await leader.submit("a")
        await leader.submit("b")
        await leader.turn(first.reports(first.progress("a", 0, 7)))
        await leader.turn(first.reports(first.progress("b", 0, 8, 9)))
        assert leader.counted("b") == 0

        await leader.turn(second.opens(slots=1))
        await leader.turn()
        assert second.listed == ["b"]
        assert list(second.specifications["b"].specification.committed_ids) == [8, 9]
        assert leader.counted("b") == 2

        await leader.turn(second.reports(second.progress("b", 2, 10)))
        assert leader.tokens["b"] == [8, 9, 10]
        assert second.dropped == []


async def test_an_end_is_shown_and_acknowledged_in_the_turn_after(leader: Leader) -> None:
    """The others of its round do not wait for it."""
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("short")
    await leader.submit("long")

    await leader.turn(
        worker.reports(worker.progress("short", 0, 7, end=STOP), worker.progress("long", 0, 8, 9))
    )
    assert leader.tokens == {"long": [8, 9]}
    assert worker.acknowledged == 0, "a worker that is lost now must send the end again"

    await leader.turn()
    assert leader.tokens == {"long": [8, 9], "short": [7]}
    assert leader.ends == {"short": STOP}
    assert worker.acknowledged == 1


async def test_a_submission_that_comes_again_after_the_end_gets_the_same_answer_and_runs_nothing(
    leader: Leader,
) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    await leader.turn(worker.reports(worker.progress("r", 0, 7, 8, end=STOP)))
    await leader.turn()
    leader.tokens, leader.ends = {}, {}

    await leader.submit("r")
    assert (leader.tokens, leader.ends) == ({"r": [7, 8]}, {"r": STOP})
    assert leader.loop.working_copy.live == {}


async def test_what_follows_an_end_in_the_same_turn_is_not_shown(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")

    await leader.turn(worker.reports(worker.progress("r", 0, 7, end=STOP)))
    await leader.turn(worker.reports(worker.progress("r", 1, 8)))
    await leader.turn()

    assert leader.tokens["r"] == [7]
    assert leader.ends == {"r": STOP}
    assert worker.acknowledged == 2


async def test_a_repeated_report_adds_nothing_and_is_acknowledged(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    await leader.turn(worker.reports(worker.progress("r", 0, 7, 8)))

    await leader.turn(worker.reports(worker.progress("r", 0, 7, 8)))

    assert leader.tokens["r"] == [7, 8]
    assert leader.counted("r") == 2
    assert worker.acknowledged == 2


async def test_tokens_after_a_gap_are_dropped_with_the_request(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")

    await leader.turn(worker.reports(worker.progress("r", 5, 7)))
    await leader.turn()

    assert leader.tokens == {}
    assert worker.dropped == ["r"]
    assert await leader.recorded("r") == ()


async def test_tokens_beyond_the_limit_of_the_output_end_the_request_there(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")

    await leader.turn(worker.reports(worker.progress("r", 0, *range(10, 73))))
    await leader.turn(worker.reports(worker.progress("r", 63, 73, 74, 75)))
    await leader.turn(worker.reports(worker.progress("r", 66, 76)))
    await leader.turn()

    assert leader.tokens["r"] == [*range(10, 74)]
    assert leader.ends == {"r": gateway_pb.RequestEnd.KIND_LENGTH}
    assert worker.dropped[0] == "r"
    assert await leader.recorded("r") == (*range(10, 74),)


async def test_tokens_of_another_worker_s_request_are_not_taken(leader: Leader) -> None:
    [holder, other] = leader.workers
    await leader.turn(holder.opens())
    await leader.submit("r")
    await leader.turn(other.opens())
    other.specifications = holder.specifications

    await leader.turn(other.reports(other.progress("r", 0, 7)))
    await leader.turn()

    assert leader.tokens == {}
    assert other.dropped == ["r"]
    assert leader.counted("r") == 0


async def test_a_worker_of_the_same_name_takes_over_only_what_no_connected_one_runs(leader: Leader) -> None:
    """A name survives a restart; two processes with one name are a mistake in their settings."""
    [first, second] = leader.workers
    await leader.turn(first.opens(worker_name="gpu"))
    await leader.submit("r")
    await leader.turn(second.opens(worker_name="gpu"))
    await leader.turn(first.reports(first.progress("r", 0, 7)))
    assert leader.tokens == {"r": [7]}

    await leader.turn(WorkerClosed(first.session, silent=False))
    await leader.turn()
    assert second.listed == [], "the first one may come back"
    await leader.turn(second.opens(worker_name="gpu"))
    await leader.turn()
    assert second.listed == ["r"]


async def test_tokens_count_where_the_request_leaves_its_worker_in_the_same_turn(leader: Leader) -> None:
    """The worker drains, so that the core moves the request, which did not run yet, before it has the report
    with its first tokens. The record has them: the next worker continues after them.
    """
    [leaving, staying] = leader.workers
    await leader.turn(leaving.opens())
    await leader.submit("r")
    await leader.turn(staying.opens())

    await leader.turn(DrainOrdered("w1"), leaving.reports(leaving.progress("r", 0, 7, 8)))
    await leader.turn()
    assert leader.tokens["r"] == [7, 8]
    assert staying.listed == ["r"]
    assert list(staying.specifications["r"].specification.committed_ids) == [7, 8]
    assert leader.counted("r") == 2

    await leader.turn(staying.reports(staying.progress("r", 2, 9)))
    assert leader.tokens["r"] == [7, 8, 9]
    assert staying.dropped == []


async def test_tokens_count_where_the_end_of_the_request_follows_in_the_turn_in_which_it_leaves(
    leader: Leader,
) -> None:
    """The record has the tokens, but not those of the report with the end: the next worker generates them."""
    [leaving, staying] = leader.workers
    await leader.turn(leaving.opens())
    await leader.submit("r")
    await leader.turn(staying.opens())

    await leader.turn(
        DrainOrdered("w1"),
        leaving.reports(leaving.progress("r", 0, 7)),
        leaving.reports(leaving.progress("r", 1, 8)),
        leaving.reports(leaving.progress("r", 2, 9, end=STOP)),
    )
    await leader.turn()
    assert list(staying.specifications["r"].specification.committed_ids) == [7, 8]
    assert leader.counted("r") == 2
    await leader.turn(staying.reports(staying.progress("r", 2, 9, end=STOP)))
    await leader.turn()

    assert leader.tokens["r"] == [7, 8, 9]
    assert leader.ends == {"r": STOP}


async def test_no_tokens_are_taken_while_a_decision_is_not_on_the_record(leader: Leader) -> None:
    """Between the turn that decides to move a request and the next one, which writes it, its first worker
    reports again: the tokens go with the lease.
    """
    [leaving, staying] = leader.workers
    await leader.turn(leaving.opens())
    await leader.submit("r")
    await leader.turn(staying.opens())

    await leader.turn(DrainOrdered("w1"))
    await leader.turn(leaving.reports(leaving.progress("r", 0, 7, 8)))
    await leader.turn()

    assert leader.tokens == {}
    assert leaving.dropped == ["r"]
    assert staying.listed == ["r"]
    assert leader.counted("r") == 0
    assert await leader.recorded("r") == ()
    explanation = leader.core.explain("r", 1_700_000_000.0)
    assert explanation is not None
    assert "recovered" not in [line.what for line in explanation.story], "the record had nothing to refuse"


async def test_no_tokens_are_taken_while_a_second_decision_waits_for_the_record(leader: Leader) -> None:
    """The request is cancelled in the turn that writes its move. Its next worker, which has it by then, reports in
    the turn that writes its end.
    """
    [leaving, staying] = leader.workers
    await leader.turn(leaving.opens())
    await leader.submit("r")
    await leader.turn(staying.opens())
    await leader.turn(DrainOrdered("w1"))
    refused = refusals()

    await leader.turn(leader.cancels("r"))
    assert staying.listed == ["r"]
    await leader.turn(staying.reports(staying.progress("r", 0, 7)))
    await leader.turn()

    assert leader.tokens["r"] == []
    assert await leader.recorded("r") == ()
    assert refusals() == refused, "the record had nothing to refuse"


async def test_a_cancel_holds_though_the_record_refuses_what_was_decided_before(leader: Leader) -> None:
    await leader.turn(leader.workers[0].opens())
    await leader.turn(leader.submits("r"))
    await refuse_what_is_next(leader, "r")
    refused = refusals()

    await leader.turn(leader.cancels("r"))
    assert refusals() == refused + 1
    await leader.turn()
    await leader.turn()

    assert leader.ends == {"r": gateway_pb.RequestEnd.KIND_CANCELLED}


async def test_an_end_holds_though_the_record_has_lost_the_request(leader: Leader) -> None:
    """It is found when the end is written: the request is written back, and ended then."""
    await leader.submit("cancelled")
    await leader.submit("late", deadline_in_ms=1_000)
    names = leader.store.keys
    await leader.store.transport.client.delete(names.request("cancelled"), names.request("late"))
    leader.answers.clear()

    leader.now_s += 1.0
    await leader.turn(leader.cancels("cancelled"))
    for _ in range(3):
        await leader.turn()

    kinds = gateway_pb.RequestEnd
    assert leader.ends == {"cancelled": kinds.KIND_CANCELLED, "late": kinds.KIND_DEADLINE}
    assert [(answer.found, answer.cancelled) for answer in leader.answers] == [(True, True)]


async def test_a_request_that_is_found_lost_while_its_end_is_decided_is_led_until_the_record_has_its_end(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are to be folded in the same turn, in which nothing else is written."""
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    await leader.turn(worker.reports(worker.progress("r", 0, 7)))
    await leader.store.transport.client.delete(leader.store.keys.request("r"))

    monkeypatch.setattr("scheduler_svc.store.batch.FOLD_AFTER_MS", -1000)
    leader.now_s += OBSERVE_S
    await leader.turn(worker.reports(worker.progress("r", 1, 8, end=STOP)))
    for _ in range(2):
        await leader.turn()
    assert list(leader.loop.working_copy.live) == ["r"], "the record did not have it when its end was written"
    assert leader.counted("r") == 1
    await leader.turn(worker.reports(worker.progress("r", 1, 8, end=STOP)))
    await leader.turn()

    assert leader.ends == {"r": STOP}
    assert leader.tokens == {"r": [7, 8]}
    assert leader.core.explain("r", leader.now_s) is None


async def test_a_request_is_on_no_list_before_the_record_has_its_lease(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.turn(leader.submits("r"))
    await refuse_what_is_next(leader, "r")

    await leader.turn()
    assert (worker.listed, worker.specifications) == ([], {})
    await leader.turn()
    await leader.turn()

    assert worker.listed == ["r"]
    stored = await leader.store.read("r")
    assert stored is not None
    assert worker.specifications["r"].lease_epoch == stored.lease_epoch


async def test_many_long_prompts_are_built_one_message_at_a_time_before_the_list_that_needs_them(
    leader: Leader,
) -> None:
    """All at once take longer than the lease lasts: the leader stands still meanwhile, and is deposed."""
    names = [f"r{number}" for number in range(20)]
    prompt = range(8_000)
    await leader.turn(*(leader.submits(name, prompt=prompt) for name in names))
    one = leader.workers[0]
    await leader.loop._turn(
        [one.opens(slots=len(names), target_blocks=50_000, draft_blocks=50_000, max_length=8_192)]
    )
    await leader.loop._turn(())

    sent: list[list[str]] = []
    while one.session.wake.is_set():
        kinds = []
        for reply in one.session.take():
            kinds.append(reply.WhichOneof("message"))
            specifications = [leased.specification for leased in reply.specifications.specifications]
            assert sum(len(specification.prompt_ids) for specification in specifications) <= 65_536
            if specifications:
                sent.append([specification.request_id for specification in specifications])
        assert kinds.count("specifications") <= 1
        assert ("assignment" in kinds) == (sum(map(len, sent)) == len(names))
    assert [len(together) for together in sent] == [8, 8, 4]
    assert sorted(name for together in sent for name in together) == sorted(names)


async def test_a_specification_has_what_is_committed_when_it_is_sent(leader: Leader) -> None:
    """A worker that lacks it after a reconnection may have reported tokens that are on the record since."""
    one = leader.workers[0]
    await leader.turn(one.opens())
    await leader.submit("r1")
    missing = worker_pb.WorkerMessage(missing=worker_pb.SpecificationsMissing(request_ids=["r1"]))
    await leader.loop._turn([FromWorker(one.session, missing)])
    await leader.turn(one.reports(one.progress("r1", 0, 10, 11)))

    assert list(one.specifications["r1"].specification.committed_ids) == [10, 11]


async def test_tokens_that_the_record_refused_are_taken_when_they_are_generated_again(
    leader: Leader,
) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    await leader.turn(worker.reports(worker.progress("r", 0, 7)))
    await refuse_what_is_next(leader, "r")

    await leader.turn(worker.reports(worker.progress("r", 1, 8, 9, end=STOP)))
    for _ in range(3):
        await leader.turn()
    again = worker.specifications["r"]
    assert (again.lease_epoch, list(again.specification.committed_ids)) == (5, [7])
    await leader.turn(worker.reports(worker.progress("r", 1, 8, 9, end=STOP)))
    await leader.turn()

    assert leader.tokens == {"r": [7, 8, 9]}
    assert leader.ends == {"r": STOP}
    assert await leader.recorded("r") == (7, 8, 9)


async def refuse_what_is_next(leader: Leader, request_id: str) -> None:
    """Make the record refuse the next transition of a request, as if it had another lease."""
    await leader.store.transport.client.hset(leader.store.keys.request(request_id), "lease_epoch", 5)


def refusals() -> float:
    """Return how many transitions the record has refused."""
    return sum(
        sample.value
        for metric in REFUSED.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


async def test_the_grace_of_a_request_ends_with_an_attach_and_begins_again_with_the_next_loss(
    leader: Leader,
) -> None:
    grace_s = leader.loop.settings.reattach_grace_s
    await leader.submit("r")
    for _ in range(2):
        await leader.turn(leader.loses_its_gateway())
        leader.now_s += grace_s - 1.0
        await leader.turn()
        await leader.turn(leader.attaches("r"))
    leader.now_s += 10 * grace_s
    await leader.turn()
    await leader.turn()
    assert leader.ends == {}

    await leader.turn(leader.loses_its_gateway())
    leader.now_s += grace_s + 1.0
    await leader.turn()
    await leader.turn()
    stored = await leader.store.read("r")
    assert stored is not None
    assert stored.end is End.CANCELLED


async def test_no_grace_ends_while_other_clients_still_come_back(leader: Leader) -> None:
    """To attach all clients of a lost gateway, or of a leader, may take longer than the grace."""
    grace_s = leader.loop.settings.reattach_grace_s
    ids = ["first", "second", "gone"]
    await leader.turn(*(leader.submits(request_id) for request_id in ids))
    await leader.turn(leader.loses_its_gateway())

    leader.now_s += grace_s
    await leader.turn(leader.attaches("first"))
    leader.now_s += grace_s - 0.1
    await leader.turn(leader.attaches("second"))
    assert leader.ends == {}

    for _ in range(2):
        leader.now_s += grace_s
        await leader.turn()
    await leader.turn()
    assert list(leader.loop.working_copy.live) == ["first", "second"]


async def test_a_grace_does_not_end_because_the_record_was_away(leader: Leader) -> None:
    """The client is back by then, and its message waits behind those of others."""
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    run = leader.store.run

    async def away(calls: Sequence[Call], *, leading: bool = False) -> list[Any]:
        leader.now_s += 10 * leader.loop.settings.reattach_grace_s
        leader.store.run = run  # type: ignore[method-assign]
        raise StoreUnavailable("no answer")

    leader.store.run = away  # type: ignore[method-assign]
    await leader.turn(leader.loses_its_gateway(), worker.reports(worker.progress("r", 0, 7)))
    await leader.turn()
    await leader.turn(leader.attaches("r"))
    await leader.turn()

    assert leader.ends == {}
    assert leader.tokens["r"] == [7]


async def test_a_turn_takes_no_more_prompts_than_it_handles_in_time(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it checks or sends them, the lease is not renewed. The prompts here have three tokens."""
    monkeypatch.setattr("scheduler_svc.leader.loop.MAX_TURN_TOKENS", 4)
    await leader.submit("r")
    for number in range(3):
        leader.loop.put(leader.submits(f"r{number}"))
    for number in range(3):
        attach = leader.attaches("r", f"a{number}")
        attach.message.attach.wants_submission = True
        leader.loop.put(attach)
    for number in range(3):
        leader.loop.put(leader.attaches("r", f"b{number}"))

    assert [len(leader.loop._next_items()) for _ in range(5)] == [2, 2, 2, 3, 0]


async def test_long_prompts_that_wait_for_a_turn_hold_streams_back(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many items take gigabytes if each has a long prompt. The prompts here have three tokens."""
    monkeypatch.setattr("scheduler_svc.leader.loop.MAX_INBOX_TOKENS", 6)
    loop = leader.loop
    running = asyncio.create_task(loop.run())  # its first turn is later
    for number in range(2):
        loop.put(leader.submits(f"r{number}"))
    loop.put(leader.attaches("r0"))
    assert loop.room.is_set()
    loop.put(leader.submits("r2"))
    assert not loop.room.is_set()

    await loop.room.wait()
    assert not loop._inbox
    assert loop._inbox_tokens == 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_no_worker_is_taken_for_hanging_because_the_leader_stood_still(leader: Leader) -> None:
    """It was stopped, as by `docker pause`: what the worker has sent meanwhile is not read when it continues."""
    worker, watchdog_s = leader.workers[0], leader.loop.settings.watchdog_s
    await leader.turn(worker.opens())
    await leader.submit("r")

    leader.now_s += 10 * watchdog_s
    await leader.turn()
    assert not worker.session.closed

    leader.now_s += watchdog_s / 2
    await leader.turn()
    assert worker.session.closed, "it has not reported for the watchdog's time while the leader ran"


async def test_requests_with_one_deadline_end_over_several_turns(leader: Leader) -> None:
    """One batch with all of them could outlast the timeout of the store, and then the lease."""
    ids = [f"r{number}" for number in range(2 * MAX_TURN + 1)]
    await leader.turn(*(leader.submits(request_id, deadline_in_ms=1000) for request_id in ids))
    await leader.turn()

    leader.now_s += 1.0
    ended = []
    while leader.loop.working_copy.live:
        await leader.turn()
        ended.append(len(leader.ends))

    assert ended == [0, MAX_TURN, 2 * MAX_TURN, len(ids)]
    assert set(leader.ends.values()) == {gateway_pb.RequestEnd.KIND_DEADLINE}


async def test_other_timers_do_not_wait_for_requests_that_end_together(leader: Leader) -> None:
    ids = [f"r{number}" for number in range(2 * MAX_TURN)]
    await leader.turn(*(leader.submits(request_id, deadline_in_ms=1000) for request_id in ids))
    leader.now_s += 2.0
    ran: list[int] = []
    leader.loop.timers.at(leader.now_s, lambda turn: ran.append(len(turn.events)))

    await leader.turn()

    assert len(ran) == 1
    assert leader.loop.working_copy.live


async def test_a_request_that_a_gateway_restores_survives_a_write_back_before_it_is_answered(
    leader: Leader,
) -> None:
    restored = leader.submits("r", restores=True, shown_ids=[7, 8])
    with losing_answers(leader.store):
        await leader.turn(restored)
    assert await leader.recorded("r") == (7, 8), "it is on the record, and the leader does not know it"

    leader.store.distrust()
    await leader.turn(LeadInDoubt())
    await leader.turn(restored)
    await leader.turn()

    assert "r" not in leader.ends
    stored = await leader.store.read("r")
    assert stored is not None
    assert stored.end is None
    assert leader.counted("r") == 2


@pytest.mark.parametrize("lengths", [(1, 3), (3, 1)])
async def test_of_two_streams_that_bring_a_request_back_in_one_turn_the_one_that_was_shown_more_counts(
    leader: Leader, lengths: tuple[int, int]
) -> None:
    both = [leader.submits("r", restores=True, shown_ids=[7, 8, 9][:length]) for length in lengths]
    both[1].message.submit.attachment_id = "other-client"

    await leader.turn(*both)

    assert await leader.recorded("r") == (7, 8, 9)
    assert {name: len(tokens) for name, tokens in leader.tokens.items() if tokens} == {
        name: 2 for name, length in zip(("r", "other"), lengths, strict=True) if length == 1
    }


async def test_a_retry_takes_no_key_from_a_request_that_is_being_restored(leader: Leader) -> None:
    """Its gateway has brought it back, and the record has it: only the answer was lost."""
    key = {"idempotency_key": leader.store.keys.shard, "body_hash": b"b"}
    with losing_answers(leader.store):
        await leader.turn(leader.submits("r", restores=True, shown_ids=[7], **key))
    for number in range(2):
        await leader.turn(leader.submits(f"retry{number}", **key))
    leader.answers.clear()
    await leader.turn(leader.submits("r", restores=True, shown_ids=[7], **key))

    assert [answer.accepted.request_id for answer in leader.answers] == ["r"]
    assert list(leader.loop.working_copy.live) == ["r"]


async def test_an_order_to_leave_outlives_the_grace_of_a_worker_that_is_away(leader: Leader) -> None:
    first, again = leader.workers[0], Worker("w1")
    await leader.turn(first.opens())
    await leader.turn(WorkerClosed(first.session, silent=False))
    await leader.turn(DrainOrdered("w1"))
    leader.now_s += leader.loop.settings.worker_grace_s
    await leader.turn()
    assert "w1" not in leader.loop.roster.workers, "its grace is over"

    leader.workers[0] = again
    await leader.loop._turn([again.opens()])

    assert any(reply.HasField("drain") for reply in again.session.take())


async def test_the_orders_to_leave_that_are_kept_have_a_bound(leader: Leader) -> None:
    for number in range(MOST_ORDERED + 10):
        gone = Worker(f"gone {number}")
        await leader.loop._turn(
            [gone.opens(), DrainOrdered(gone.worker_id), WorkerClosed(gone.session, silent=False)]
        )
    assert len(leader.loop.roster._ordered_to_leave) == MOST_ORDERED


async def test_what_workers_bring_back_waits_for_room(leader: Leader) -> None:
    """The record and its leader are gone, and new requests have come before the worker dialled."""
    leader.store._limits = Limits(max_requests=1)
    await leader.turn(leader.submits("new"))
    held = [held_by_a_worker(request_id, [7], "an earlier record") for request_id in ("r1", "r2")]
    await leader.turn(leader.workers[0].opens(held=held))
    assert list(leader.loop.working_copy.live) == ["new"]

    for ending, led in (("new", "r1"), ("r1", "r2")):
        await leader.cancel(ending)
        leader.now_s += RETRY_STORE_MS / 1000
        await leader.turn()
        assert list(leader.loop.working_copy.live) == [led]
        assert await leader.recorded(led) == (7,)


@pytest.mark.parametrize(
    "limit", [{"max_requests": 1}, {"max_requests_per_tenant": 1}], ids=["queue", "tenant"]
)
async def test_what_a_worker_brings_back_waits_for_room_though_its_gateway_tries_in_vain_too(
    leader: Leader, limit: dict[str, int]
) -> None:
    """The client goes away before there is room: then only the worker's copy is left."""
    leader.store._limits = Limits(**limit)
    await leader.turn(leader.submits("new"))
    await leader.turn(leader.workers[0].opens(held=[held_by_a_worker("r", [7], "an earlier record")]))
    leader.answers.clear()
    await leader.turn(leader.submits("r", restores=True, shown_ids=[7]))
    assert [answer.WhichOneof("result") for answer in leader.answers] == ["refused"]

    await leader.cancel("new")
    leader.now_s += RETRY_STORE_MS / 1000
    await leader.turn()

    assert await leader.recorded("r") == (7,)
    assert list(leader.loop.working_copy.live) == ["r"]


async def test_a_record_that_does_not_answer_is_tried_once_a_turn_for_what_workers_bring_back(
    leader: Leader,
) -> None:
    """An attempt for each would hold up the turn for as many timeouts."""
    count = 2 * MAX_PROMPTS
    held = [held_by_a_worker(f"r{number}", [], "an earlier record") for number in range(count)]
    with losing_answers(leader.store) as sent:
        await leader.turn(leader.workers[0].opens(held=held, slots=count))
        assert len(sent) == 1

    leader.now_s += RETRY_STORE_MS / 1000
    await leader.turn()
    assert len(leader.loop.working_copy.live) == count


def held_by_a_worker(request_id: str, tokens: Sequence[int], incarnation: str) -> worker_pb.HeldRequest:
    """Return the entry of a worker's hello for a kept request of a record with this incarnation."""
    origin = gateway_pb.Origin(
        submit=gateway_pb.Submit(request_id=request_id, tenant="t", model="m", keep=True),
        written_unix_ms=1_700_000_000_000,
        incarnation=incarnation,
    )
    specification = gateway_pb.Specification(
        request_id=request_id,
        prompt_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=64, top_p=1.0),
        committed_ids=tokens,
        origin=origin.SerializeToString(),
    )
    return worker_pb.HeldRequest(
        request_id=request_id, lease_epoch=1, emitted=len(tokens), specification=specification
    )


async def test_a_request_that_is_being_restored_is_not_said_to_be_unknown(leader: Leader) -> None:
    """Its gateway has brought it back, the record did not answer, and the time for all others is over."""
    leader.loop.clients.brought_back_until_s = 0.0
    with losing_answers(leader.store):
        await leader.turn(leader.submits("r", restores=True, shown_ids=[7]))
    leader.answers.clear()

    await leader.turn(leader.attaches("r", "other"))

    [answer] = leader.answers
    assert answer.result == gateway_pb.AttachReply.RESULT_NOT_FOUND_YET


async def test_a_cancel_waits_for_a_request_that_may_still_be_brought_back(leader: Leader) -> None:
    clients = leader.loop.clients
    clients.brought_back_until_s = leader.now_s + 1.0
    await leader.turn(leader.cancels("r"), leader.cancels("other"))
    assert leader.answers == []

    await leader.turn(leader.submits("r", restores=True, shown_ids=[7]))
    leader.answers.clear()
    leader.now_s += CANCEL_AGAIN_S
    for _ in range(2):
        await leader.turn()
    assert leader.ends == {"r": gateway_pb.RequestEnd.KIND_CANCELLED}
    assert [(answer.found, answer.cancelled) for answer in leader.answers] == [(True, True)]

    leader.now_s += 1.0
    await leader.turn()
    assert [answer.found for answer in leader.answers] == [True, False]


async def test_a_request_is_restored_though_no_worker_that_has_come_could_hold_it(leader: Leader) -> None:
    """Of a pool of small and large workers a small one dials first; a new request of this size is refused, once the
    large ones had time to dial."""
    await leader.turn(leader.workers[0].opens(max_length=16))
    leader.now_s += leader.loop.settings.worker_grace_s

    await leader.turn(leader.submits("new"), leader.submits("r", restores=True, shown_ids=[7]))

    assert list(leader.loop.working_copy.live) == ["r"]
    assert await leader.recorded("r") == (7,)


@pytest.mark.parametrize("turns_later", [0, 1])
async def test_a_retry_that_comes_as_the_deadline_passes_is_a_new_request(
    leader: Leader, turns_later: int
) -> None:
    """The end of the first attempt is due, or decided, and the record does not have it."""
    await leader.submit("early", idempotency_key=leader.store.keys.shard, deadline_in_ms=1_000)
    leader.now_s += 1.0
    for _ in range(turns_later):
        await leader.turn()

    await leader.turn(leader.submits("retry", idempotency_key=leader.store.keys.shard, deadline_in_ms=9_000))
    for _ in range(3):
        await leader.turn()

    assert leader.ends == {"early": gateway_pb.RequestEnd.KIND_DEADLINE}
    assert list(leader.loop.working_copy.live) == ["retry"]
    assert [answer.accepted.request_id for answer in leader.answers] == ["early", "retry"]


async def test_a_retry_whose_gateway_leaves_as_the_deadline_passes_leaves_no_request(leader: Leader) -> None:
    await leader.submit("early", idempotency_key=leader.store.keys.shard, deadline_in_ms=1_000)
    leader.now_s += 1.0
    await leader.turn(leader.submits("retry", idempotency_key=leader.store.keys.shard, deadline_in_ms=9_000))
    await leader.turn(leader.loses_its_gateway())
    for _ in range(3):
        await leader.turn()

    assert leader.loop.working_copy.live == {}


async def test_a_request_survives_a_write_back_while_another_one_gets_more_time(leader: Leader) -> None:
    """The server restarts between the arrivals of a turn and the new deadline of an earlier one."""
    await leader.submit("early", idempotency_key="key", deadline_in_ms=1_000)
    extend = leader.store.extend

    async def after_a_restart(request_id: str, deadline_unix_ms: int | None) -> bool:
        if not restarts:
            restarts.append(request_id)
            leader.store.distrust()
        return await extend(request_id, deadline_unix_ms)

    restarts: list[str] = []
    with patch.object(leader.store, "extend", after_a_restart):
        retry = leader.submits("retry", idempotency_key="key", deadline_in_ms=9_000)
        await leader.turn(retry, leader.submits("new"))
    await leader.turn()

    assert restarts == ["early"]
    stored = await leader.store.read("new")
    assert stored is not None
    assert stored.end is None


async def test_ends_are_written_back_together(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("stopped", idempotency_key="stopped")
    await leader.turn(worker.reports(worker.progress("stopped", 0, 7, 8, end=STOP)))
    await leader.turn()
    cancelled = [f"r{number}" for number in range(WRITE_BACK_TOGETHER)]
    await leader.turn(*(leader.submits(request_id) for request_id in cancelled))
    await leader.turn(*(leader.cancels(request_id) for request_id in cancelled))
    await leader.turn()
    ids = ["stopped", *cancelled]
    before = await leader.store.read_all(ids)
    client = leader.store.transport.client
    await client.delete(*await keys_of(client, leader.store.keys.prefix))

    with patch.object(leader.store, "run", wraps=leader.store.run) as run:
        leader.store.distrust()
        await leader.turn(LeadInDoubt())

    restored = [exchange for exchange in run.call_args_list if scripts.RESTORE in scripts_of(exchange)]
    assert len(restored) == 2
    assert [request.end for request in before.values()] == [End.STOP] + [End.CANCELLED] * len(cancelled)
    after = await leader.store.read_all(ids)
    assert {i: (a.end, a.committed_ids, a.detail, a.story) for i, a in after.items()} == {
        i: (b.end, b.committed_ids, b.detail, b.story) for i, b in before.items()
    }
    for key in await keys_of(client, leader.store.keys.request("")):
        assert await client.pttl(key) > 0
    assert await leader.store.count_unfinished() == 0


async def test_what_one_client_has_seen_beyond_the_record_is_taken_from_the_worker_and_shown_to_the_others(
    leader: Leader,
) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    await leader.turn(worker.reports(worker.progress("r", 0, 7)))
    restored = leader.submits("r", restores=True, shown_ids=[7, 8, 9])
    restored.message.submit.attachment_id = "other-client"

    await leader.turn(restored)
    assert leader.tokens["r"] == [7, 8, 9]
    stored = await leader.store.read("r")
    assert stored is not None
    assert (stored.committed_ids, stored.lease_epoch, stored.worker_id) == ((7, 8, 9), 2, None)
    await leader.turn(worker.reports(worker.progress("r", 1, 8, 9, 10)))
    await leader.turn()
    again = worker.specifications["r"]
    assert (again.lease_epoch, list(again.specification.committed_ids)) == (3, [7, 8, 9])
    await leader.turn(worker.reports(worker.progress("r", 3, 10, end=STOP)))
    await leader.turn()

    assert leader.tokens == {"r": [7, 8, 9, 10], "other": [10]}
    assert leader.ends == {"r": STOP, "other": STOP}


async def test_a_write_back_that_the_record_does_not_answer_begins_again(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leader.submit("r")
    client = leader.store.transport.client
    await client.delete(*await keys_of(client, leader.store.keys.prefix))

    async def no_answer(request_ids: Sequence[str]) -> Any:
        monkeypatch.undo()
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(leader.store, "reached", no_answer)
    leader.store.distrust()
    await leader.turn(LeadInDoubt())

    assert await leader.store.unfinished_ids() == ["r"]


async def test_a_lease_that_the_record_lost_is_written_back(leader: Leader) -> None:
    [worker, _] = leader.workers
    await leader.turn(worker.opens())
    await leader.submit("r")
    await leader.store.transport.client.hset(leader.store.keys.request("r"), "lease_epoch", 0)

    leader.store.distrust()
    await leader.turn(LeadInDoubt())
    stored = await leader.store.read("r")
    assert stored is not None
    assert (stored.lease_epoch, stored.worker_id) == (1, "w1")


async def test_the_deaths_of_its_workers_are_written_back_with_a_request(leader: Leader) -> None:
    """Otherwise one that workers die of would run beside others again."""
    [dies, _] = leader.workers
    await leader.turn(dies.opens())
    await leader.submit("r")
    await leader.turn(dies.reports(dies.progress("r", 0, 7)))
    await leader.turn(WorkerClosed(dies.session, silent=True))
    leader.now_s += TOGETHER_S
    await leader.turn()
    await leader.turn()
    before = await leader.store.read("r")
    client = leader.store.transport.client
    await client.delete(*await keys_of(client, leader.store.keys.prefix))

    leader.store.distrust()
    await leader.turn(LeadInDoubt())

    after = await leader.store.read("r")
    assert before is not None and after is not None
    assert (before.deaths, before.death_round) == (after.deaths, after.death_round) == (1, 1)


def scripts_of(exchange: Any) -> list[scripts.Script]:
    return [call.script for call in exchange.args[0]]
