"""The worker on the wire: a real stream, a real thread, a scheduler that sends the test's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import structlog
import uvloop

from laps_sd.contract.choose import Residency
from laps_sd.contract.length_probe import LearntProbe, ProbeKind
from laps_sd.contract.prompt_blocks import NAME_BYTES, name_blocks
from laps_sd.errors import StartupError
from laps_sd.service import wire
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as pb
from laps_sd.v1.inference_pb2 import SamplingParams
from tests.helpers import wait_until_async
from tests.services.worker.harness import LEADER, Gated, Stream, scheduler, spec, worker
from worker_svc.engine.interface import DeviceFailed, FormatKind, OutputFormat, RoundResult
from worker_svc.fake.engine import FakeEngine
from worker_svc.link import missing, outbox
from worker_svc.link.link import EngineFailed
from worker_svc.link.wire import held_requests, specification
from worker_svc.runner import thread
from worker_svc.runner.messages import Assigned, HeldRequest, Message
from worker_svc.runner.runner import Runner


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Return the policy of the service's own loop."""
    return uvloop.EventLoopPolicy()


def rounds(count: int) -> tuple[Callable[[Stream], bool], str]:
    return (lambda s: len(s.reports) >= count), f"{count} reports"


async def test_hello_says_who_and_what_the_worker_is() -> None:
    async with (
        scheduler() as s,
        worker(s.address, engine=FakeEngine(slots=3, max_draft_len=5), pool="p") as w,
    ):
        hello = (await s.accept()).hello

        assert (hello.worker_id, hello.worker_name, hello.pool) == (w.link.worker_id, "w", "p")
        assert hello.worker_id.startswith("w-")
        assert list(hello.protocol_versions) == [2, 1]
        assert (hello.slots, hello.target_blocks, hello.block_size, hello.max_draft_tokens) == (
            3,
            1024,
            16,
            5,
        )
        assert (hello.fingerprint, hello.device, hello.vocab_size) == ("fake", "fake", 1024)
        assert (list(hello.held), hello.last_report, hello.draining) == ([], 0, False)


async def test_a_request_runs_to_its_end_without_any_acknowledgement() -> None:
    engine = FakeEngine(slots=2)
    one = spec("a", max_tokens=100)
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet()
        await stream.lease(one)
        await stream.assign("a")
        await stream.until_ended("a")

        assert stream.tokens("a") == engine.expected(one)[0]
        assert [report.number for report in stream.reports] == list(range(1, len(stream.reports) + 1))
        last = stream.progress()[-1]
        assert (last.end, last.lease_epoch) == (gateway_pb.RequestEnd.KIND_LENGTH, 1)


async def test_reports_that_are_ready_travel_together() -> None:
    """While the scheduler is away reports pile up; they come in few messages, not in one each."""
    async with scheduler() as s, worker(s.address, engine=FakeEngine(slots=2)) as w:
        first = await s.greet()
        await first.lease(spec("a", max_tokens=200))
        await first.assign("a")
        await first.until_ended("a")
        first.close.set()
        again = await s.greet()
        await again.until(*rounds(len(first.reports)))

        assert again.messages == [len(first.reports)]
        assert w.link.connected


async def test_a_new_assignment_preempts_and_the_next_takes_the_place_of_one_that_ends() -> None:
    engine = Gated(slots=1)
    async with scheduler() as s, worker(s.address, engine=engine) as w:
        stream = await s.greet()
        await stream.lease(spec("long", max_tokens=300), spec("short", max_tokens=1))
        await stream.assign("long")
        engine.allow(2)
        await stream.until(*rounds(2))
        runner_put, put = w.link.runner.put, []

        def record(*messages: Message) -> None:
            runner_put(*messages)
            put.extend(messages)

        w.link.runner.put = record  # type: ignore[method-assign]
        await stream.assign("short", "long")
        # The engine waits at its gate: new messages wait in the inbox, unless one came just before the third
        # round.
        await wait_until_async(
            lambda: any(isinstance(message, Assigned) for message in put),
            description="the assignment has reached the runner",
        )
        engine.allow(4)
        await stream.until(*rounds(6))

        names = [progress.request_id for progress in stream.progress()]
        # The third round had begun before the assignment came.
        assert names in (["long"] * 3 + ["short"] + ["long"] * 2, ["long"] * 2 + ["short"] + ["long"] * 3)


async def test_unacknowledged_reports_are_offered_again_in_order_after_a_break() -> None:
    engine = FakeEngine(slots=2)
    one = spec("a", max_tokens=100)
    async with scheduler() as s, worker(s.address, engine=engine, max_unacknowledged_reports=5) as w:
        first = await s.greet()
        await first.lease(one, lease_epoch=3)
        await first.assign("a", lease_epoch=3)
        await first.until(*rounds(5))
        await first.acknowledge(2)
        first.close.set()
        second = await s.accept()
        hello = second.hello
        await second.greet("2:second")
        await second.until(*rounds(5))  # 3 to 7: the acknowledgement of two made room for two
        while not second.progress()[-1].end:
            heard = len(second.reports)
            await second.acknowledge(second.reports[-1].number)
            await second.until(*rounds(heard + 1))

        assert hello.worker_id == w.link.worker_id
        (held,) = hello.held
        assert (held.request_id, held.lease_epoch) == ("a", 3)
        assert held.residency == pb.HeldRequest.RESIDENCY_DEVICE
        assert 5 <= hello.last_report <= 7
        # Together, the acknowledged outputs and the reports contain everything once.
        committed = [token for p in first.progress()[:2] for token in p.token_ids]
        assert list(held.specification.committed_ids) == committed
        assert [report.number for report in second.reports] == list(range(3, 3 + len(second.reports)))
        everything = committed + [token for p in second.progress() for token in p.token_ids]
        assert len(committed) < held.emitted <= len(everything)
        assert tuple(everything) == engine.expected(one)[0]


async def test_reports_that_are_offered_again_come_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scheduler() as s, worker(s.address, engine=FakeEngine(slots=2)):
        first = await s.greet()
        await first.lease(spec("a", max_tokens=200))
        await first.assign("a")
        await first.until_ended("a")
        monkeypatch.setattr(outbox, "BYTES_PER_MESSAGE", 3 * first.reports[-2].ByteSize())
        first.close.set()
        again = await s.greet()
        await again.until(*rounds(len(first.reports)))

        assert again.reports == first.reports
        assert max(again.messages) <= 4


async def test_what_has_nothing_but_tokens_is_reported_in_columns() -> None:
    one, engine = spec("a"), FakeEngine(slots=2)
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet(version=2)
        await stream.lease(one)
        await stream.assign("a")
        await stream.until_ended("a")

        assert stream.tokens("a") == engine.expected(one)[0]
        assert [list(report.plain.request_ids) for report in stream.reports[1:-1]] == [["a"]] * (
            len(stream.reports) - 2
        )
        left = [progress for report in stream.reports for progress in report.progress]
        assert all(progress.prefilled or progress.end for progress in left)


async def test_a_scheduler_of_version_1_gets_no_columns_and_all_tokens() -> None:
    one, engine = spec("a"), FakeEngine(slots=2)
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet(version=1)
        await stream.lease(one)
        await stream.assign("a")
        await stream.until_ended("a")

        assert stream.tokens("a") == engine.expected(one)[0]
        assert not any(report.HasField("plain") for report in stream.reports)


async def test_reports_are_offered_again_as_the_version_of_the_new_stream_has_them() -> None:
    """During a rolling upgrade the next leader may have another version."""
    one, engine = spec("a"), FakeEngine(slots=2)
    async with scheduler() as s, worker(s.address, engine=engine):
        heard = []
        for version in (2, 1, 2):
            stream = await s.greet(version=version)
            if not heard:
                await stream.lease(one)
                await stream.assign("a")
            await stream.until_ended("a")
            heard.append(stream)
            stream.close.set()
        newest, oldest, again = heard

        assert [stream.tokens("a") for stream in heard] == [engine.expected(one)[0]] * 3
        assert any(report.HasField("plain") for report in newest.reports)
        assert not any(report.HasField("plain") for report in oldest.reports)
        assert again.reports == newest.reports


def test_a_hello_tells_of_all_that_is_held_and_is_no_larger_than_a_scheduler_takes() -> None:
    """The size of the requested outputs compared with the prompts does not matter."""
    grammar = OutputFormat(FormatKind.GRAMMAR, 'start: "' + "x" * 60_000 + '"')
    held = [
        HeldRequest(replace(spec(f"r{number}"), format=grammar), 1, Residency.NONE, (1, 2), 1)
        for number in range(400)
    ]
    told = held_requests(held)

    assert [one.request_id for one in told] == [f"r{number}" for number in range(400)]
    assert 0 < sum(one.HasField("specification") for one in told) < 400
    assert sum(one.ByteSize() for one in told) < wire.MAX_MESSAGE_BYTES / 2


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with another message"])
async def test_acknowledged_reports_are_forgotten(alone: bool) -> None:
    engine = FakeEngine(slots=2)
    async with scheduler() as s, worker(s.address, engine=engine):
        first = await s.greet()
        await first.lease(spec("a"))
        await first.assign("a")
        await first.until_ended("a")
        await first.acknowledge(len(first.reports), alone=alone)
        first.close.set()
        second = await s.greet()
        await second.lease(spec("b"))
        await second.assign("b")
        await second.until_ended("b")

        assert {progress.request_id for progress in second.progress()} == {"b"}
        assert second.reports[0].number == len(first.reports) + 1
        assert list(second.hello.held) == []
        assert not engine.known() - {"b"}


async def test_the_bound_of_unacknowledged_tokens_pauses_one_request() -> None:
    async with scheduler() as s, worker(s.address, engine=FakeEngine(slots=1), max_unacknowledged_tokens=30):
        stream = await s.greet()
        await stream.lease(spec("a", max_tokens=200), spec("b", max_tokens=20))
        await stream.assign("a", "b")
        await stream.until_ended("b")  # it had to wait for the only slot
        paused = len(stream.tokens("a"))
        assert 30 <= paused < 30 + 9
        await stream.acknowledge(stream.reports[-1].number)
        await stream.until(lambda s: len(s.tokens("a")) > paused, "it goes on")


async def test_a_stale_leader_is_ignored() -> None:
    async with scheduler() as s, worker(s.address):
        stream = await s.greet("2:new")
        await stream.lease(spec("a"), spec("b"))
        await stream.assign("a", leader_epoch="1:old")
        await stream.assign("b")
        await stream.until_ended("b")
        await stream.acknowledge(1000, leader_epoch="1:old")
        stream.close.set()
        again = await s.greet("2:new")
        await again.until_ended("b")

        assert {progress.request_id for progress in stream.progress()} == {"b"}


async def test_the_leader_that_a_standby_names_is_followed() -> None:
    async with scheduler() as standby, scheduler() as leader:
        standby.refer_to = leader.address
        async with worker(standby.address):
            stream = await leader.greet()
            await stream.lease(spec("a"))
            await stream.assign("a")
            await stream.until_ended("a")

            assert standby.hellos == 1


async def test_a_standby_that_knows_no_leader_is_asked_again() -> None:
    async with scheduler() as s:
        s.refer_to = ""
        async with worker(s.address):
            await wait_until_async(lambda: s.hellos >= 3, description="the worker asks three times")
            s.refer_to = None
            await s.greet()


async def test_seeds_are_tried_until_one_leads() -> None:
    async with scheduler() as gone:
        address = gone.address
    async with scheduler() as s, worker(address, s.address):
        await s.greet()


async def test_a_refusal_ends_the_worker_with_its_sentence() -> None:
    async with scheduler() as s:
        s.refused = pb.WorkerRefused(
            reason=pb.WorkerRefused.REASON_FINGERPRINT, detail="the pool serves another pair"
        )
        async with worker(s.address) as w:
            with pytest.raises(StartupError, match="the pool serves another pair"):
                await w.left()


async def test_a_protocol_version_that_it_does_not_have_ends_the_worker_before_it_is_ready() -> None:
    with structlog.testing.capture_logs() as logs:
        async with scheduler() as s, worker(s.address) as w:
            await s.greet(version=99)
            with pytest.raises(StartupError, match="chose protocol version 99; this worker supports 2, 1"):
                await w.left()

    assert "greeted" not in [line["event"] for line in logs]


async def test_a_worker_that_is_refused_for_now_dials_until_it_is_accepted() -> None:
    async with scheduler() as s:
        s.refused = pb.WorkerRefused(
            reason=pb.WorkerRefused.REASON_FINGERPRINT, detail="3 requests must end first", temporary=True
        )
        with structlog.testing.capture_logs() as logs:
            async with worker(s.address):
                await wait_until_async(lambda: s.hellos >= 3, description="it has dialled again")
                s.refused = None
                await s.greet()

        details = [line["detail"] for line in logs if "refuses this worker for now" in line["event"]]
        assert details == ["3 requests must end first"], "the reason is logged once"


async def test_a_refusal_after_a_greeting_is_logged_again() -> None:
    refusal = pb.WorkerRefused(
        reason=pb.WorkerRefused.REASON_FINGERPRINT, detail="3 requests must end first", temporary=True
    )
    async with scheduler() as s:
        s.refused = refusal
        with structlog.testing.capture_logs() as logs:
            async with worker(s.address):
                await wait_until_async(lambda: s.hellos >= 2, description="it has dialled again")
                s.refused = None
                stream = await s.greet()
                dialled, s.refused = s.hellos, refusal
                stream.close.set()
                await wait_until_async(lambda: s.hellos >= dialled + 2, description="it is refused again")

        assert len([line for line in logs if "refuses this worker for now" in line["event"]]) == 2


async def test_a_worker_that_is_refused_for_now_can_be_stopped() -> None:
    async with scheduler() as s:
        s.refused = pb.WorkerRefused(reason=pb.WorkerRefused.REASON_FINGERPRINT, temporary=True)
        async with worker(s.address) as w:
            await wait_until_async(lambda: s.hellos, description="it was refused")
            await w.link.drain()
            await w.left()


async def test_a_missing_specification_is_asked_for() -> None:
    async with scheduler() as s, worker(s.address):
        stream = await s.greet()
        await stream.assign("a")
        await stream.until(lambda s: s.missing == ["a"], "a is asked for")
        await stream.lease(spec("a"))
        await stream.assign("a")
        await stream.until_ended("a")

        assert stream.missing == ["a"]


async def test_what_did_not_come_on_one_stream_is_asked_for_at_once_on_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(missing, "MISSING_AGAIN_S", 3600.0)
    async with scheduler() as s, worker(s.address):
        first = await s.greet()
        await first.assign("a")
        await first.until(lambda s: s.missing == ["a"], "a is asked for")
        first.close.set()
        second = await s.greet()
        await second.assign("a")
        await second.until(lambda s: s.missing == ["a"], "a is asked for again")


async def test_a_drop_obeys_the_lease_epoch() -> None:
    engine = Gated(2)
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet()
        await stream.lease(spec("a", max_tokens=500), spec("b"), lease_epoch=2)
        await stream.assign("a", "b", lease_epoch=2)
        await stream.until(*rounds(2))
        drop = [pb.DropRequest(request_id="a", lease_epoch=2), pb.DropRequest(request_id="b", lease_epoch=1)]
        await stream.send(drop=pb.DropRequests(requests=drop))
        await stream.send(specifications=pb.Specifications())
        engine.allow(1000)
        await stream.until_ended("b")
        stream.close.set()
        again = await s.accept()

        assert [held.request_id for held in again.hello.held] == ["b"]
        assert not any(progress.request_id == "a" and progress.end for progress in stream.progress())


async def test_an_error_in_one_request_does_not_hurt_the_others() -> None:
    async with scheduler() as s, worker(s.address):
        stream = await s.greet()
        await stream.lease(spec("bad", max_tokens=100_000), spec("good"))
        await stream.assign("bad", "good")
        await stream.until_ended("good")
        await stream.until_ended("bad")

        (error,) = [progress for progress in stream.progress() if progress.request_id == "bad"]
        assert error.end == gateway_pb.RequestEnd.KIND_ERROR
        assert "max_tokens" in error.error


class Broken(FakeEngine):
    def round(self, run: Sequence[str]) -> RoundResult:
        raise DeviceFailed("the device is gone")


async def test_a_broken_engine_ends_the_worker() -> None:
    async with scheduler() as s, worker(s.address, engine=Broken()) as w:
        stream = await s.greet()
        await stream.lease(spec("a"))
        await stream.assign("a")
        with pytest.raises(EngineFailed, match="the device is gone") as caught:
            await w.left()

        assert isinstance(caught.value.__cause__, DeviceFailed)


async def test_an_engine_that_hangs_ends_the_worker_once_its_scheduler_has_given_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "STOP_S", 0.1)
    engine = Gated()
    async with scheduler() as s, worker(s.address, engine=engine, engine_silence_s=1.0, silence_s=1.5) as w:
        stream = await s.greet()
        await stream.lease(spec("a"))
        await stream.assign("a")
        await wait_until_async(lambda: engine.inside, description="the engine is in a round that never ends")
        stream.close.set()  # as a scheduler's watchdog does
        with pytest.raises(EngineFailed, match="no round has ended for 1 s"):
            await w.left()

        assert s.streams.empty(), "it said hello although nobody could know what it holds"


async def test_heartbeats_go_up() -> None:
    async with scheduler() as s, worker(s.address):
        stream = await s.greet()
        await stream.until(lambda s: s.heartbeats >= 3, "three heartbeats")


async def test_a_silent_scheduler_is_given_up_and_a_heard_one_is_not() -> None:
    async with scheduler() as s, worker(s.address, silence_s=1.5):
        silent = await s.greet()
        heard = await s.accept()  # the silent one was given up
        await heard.greet()
        for _ in range(20):
            await heard.send(heartbeat=gateway_pb.Heartbeat())
            await asyncio.sleep(0.15)  # twice the silence in all

        assert silent.ended.is_set()
        assert not heard.ended.is_set()


async def test_draining_goes_on_working_until_the_scheduler_says_so() -> None:
    engine = Gated(1)
    async with scheduler() as s, worker(s.address, engine=engine) as w:
        stream = await s.greet()
        await stream.lease(spec("a"))
        await stream.assign("a")
        await stream.until(*rounds(1))
        draining = asyncio.create_task(w.link.drain())
        await stream.until(lambda s: s.drains == 1, "the wish to leave")
        engine.allow(1000)
        await stream.until_ended("a")
        assert not w.running.done()
        await stream.acknowledge(len(stream.reports))
        await stream.send(drained=pb.Drained())
        await w.left()
        await draining


async def test_a_wish_to_leave_survives_a_broken_stream() -> None:
    engine = Gated(1)
    async with scheduler() as s, worker(s.address, engine=engine) as w:
        first = await s.greet()
        await first.lease(spec("a"))
        await first.assign("a")
        await first.until(*rounds(1))
        draining = asyncio.create_task(w.link.drain())
        await first.until(lambda s: s.drains == 1, "the wish to leave")
        first.close.set()
        engine.allow(1000)
        second = await s.greet()
        await second.until(lambda s: s.drains == 1, "the wish to leave, again")
        await second.send(drained=pb.Drained())
        await draining

        assert second.hello.draining


async def test_a_worker_that_holds_nothing_leaves_without_a_scheduler() -> None:
    async with scheduler() as gone:
        address = gone.address
    async with worker(address) as w:
        await w.link.drain()
        await w.left()


async def test_an_operators_drain_is_carried_out() -> None:
    async with scheduler() as s, worker(s.address) as w:
        ordered = asyncio.Event()
        w.link._on_drain_ordered = ordered.set
        stream = await s.greet()
        await stream.send(drain=pb.Drain())
        await stream.until(lambda s: s.drains == 1, "the answer")
        assert ordered.is_set()


async def test_many_requests_end_with_their_own_tokens() -> None:
    engine = FakeEngine(slots=4)
    wanted = [spec(f"r{i}", prompt=3 + i, max_tokens=5 + 7 * i, seed=i) for i in range(20)]
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet()
        await stream.lease(*wanted)
        names = [one.request_id for one in wanted]
        for start in range(len(names)):
            await stream.assign(*names[start:], *names[:start])
        for name in names:
            await stream.until_ended(name)

        assert {one.request_id: stream.tokens(one.request_id) for one in wanted} == {
            one.request_id: engine.expected(one)[0] for one in wanted
        }


def test_a_stream_knows_its_leader() -> None:
    assert Stream(None, pb.WorkerHello()).leader_epoch == LEADER


@pytest.mark.parametrize(("temperature", "engine_gets"), [(1e-38, 0.0), (9e-6, 0.0), (0.5, 0.5)])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float, engine_gets: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    wire_spec = gateway_pb.Specification(request_id="r", prompt_ids=[1], sampling=sampling)
    assert specification(wire_spec).sampling.temperature == engine_gets


class Foretelling(FakeEngine):
    """An engine that predicts how many tokens remain, every second round."""

    def round(self, run: Sequence[str]) -> RoundResult:
        result = super().round(run)
        return replace(
            result,
            requests=tuple(
                one._replace(predicted_remaining_tokens=100.5 - one.position)
                if one.position % 2 == 0
                else one
                for one in result.requests
            ),
        )


async def test_predictions_of_the_engine_reach_the_scheduler_with_their_round() -> None:
    async with scheduler() as s, worker(s.address, engine=Foretelling(slots=2, draft_len=0)):
        stream = await s.greet()
        await stream.lease(spec("a", max_tokens=6))
        await stream.assign("a")
        await stream.until_ended("a")
    for progress in stream.progress():
        assert progress.HasField("predicted_remaining_tokens") == (progress.position % 2 == 0)
        if progress.HasField("predicted_remaining_tokens"):
            assert progress.predicted_remaining_tokens == 100.5 - progress.position
    assert len(stream.progress()) >= 6


KIND = ProbeKind("ab12", 3, 1, 128)
ON_WIRE = pb.ProbeKind(model="ab12", layer=3, seed=1, dims=128)


class Learning(FakeEngine):
    """An engine with a probe that learns from every round."""

    class Probe:
        kind = KIND

        def __init__(self) -> None:
            self.requests = 0
            self.adopted: list[LearntProbe] = []

        def learnt(self) -> LearntProbe:
            return LearntProbe(KIND, self.requests, b"\0<")

        def adopt(self, learnt: LearntProbe) -> bool:
            self.adopted.append(learnt)
            return True

    def __init__(self) -> None:
        super().__init__(slots=2)
        self.length_probe: Learning.Probe = self.Probe()

    def round(self, run: Sequence[str]) -> RoundResult:
        self.length_probe.requests += 1
        return super().round(run)


async def test_the_probe_is_told_in_the_hello_and_continues_what_the_answer_holds() -> None:
    engine = Learning()
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet()
        assert stream.hello.length_probe == ON_WIRE
        await stream.send(learnt_probe=pb.LearntProbe(kind=ON_WIRE, requests=9, numbers=b"\0<\0"))  # damaged
        await stream.send(learnt_probe=pb.LearntProbe(kind=ON_WIRE, requests=8, numbers=b"\0<"))
        await wait_until_async(lambda: engine.length_probe.adopted, description="the probe is taught")
    assert engine.length_probe.adopted == [LearntProbe(KIND, 8, b"\0<")]


async def test_what_the_probe_has_learnt_goes_to_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Runner.__init__.__kwdefaults__, "share_s", 0.0)
    async with scheduler() as s, worker(s.address, engine=Learning()):
        stream = await s.greet()
        await stream.lease(spec("a", max_tokens=20))
        await stream.assign("a")
        await stream.until(lambda heard: bool(heard.learnt), "what was learnt")
    learnt = stream.learnt[0]
    assert (learnt.kind, learnt.numbers) == (ON_WIRE, b"\0<")
    assert learnt.requests > 0


async def test_a_worker_without_a_probe_says_nothing_of_one() -> None:
    async with scheduler() as s, worker(s.address):
        assert not (await s.accept()).hello.HasField("length_probe")


def cached_after(reports: Sequence[pb.RoundReport], before: bytes = b"") -> set[bytes]:
    """Return the prompt blocks that a cache holds, by the reports of its worker."""
    cached = {*names_in(before)}
    for report in reports:
        cached = (cached | {*names_in(report.cached_blocks)}) - {*names_in(report.evicted_blocks)}
    return cached


def names_in(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


async def test_what_is_cached_comes_with_the_rounds_and_whole_in_a_hello() -> None:
    """In little room, so that blocks come and go. A new scheduler learns the same from a hello and the reports that
    are offered again."""
    engine = FakeEngine(slots=1, target_blocks=40, prefix_reuse_tokens=16)
    requests = [
        replace(spec(name, prompt=300, max_tokens=30), cache_salt=salt)
        for name, salt in (("a", ""), ("z", "acme"), ("zz", ""))
    ]
    async with scheduler() as s, worker(s.address, engine=engine):
        first = await s.greet()
        for one in requests:
            await first.lease(one)
            await first.assign(one.request_id)
            await first.until_ended(one.request_id)
        first.close.set()
        second = await s.greet()
        await second.until(*rounds(len(first.reports)))

    last = requests[-1]
    context = [*last.prompt_ids, *engine.expected(last)[0]]
    assert first.hello.cached_blocks == b""
    assert any(report.evicted_blocks for report in first.reports)
    held = {*names_in(engine.cached_blocks())}
    assert held >= {*names_in(name_blocks(context[:-1], last.cache_salt))}
    assert cached_after(first.reports) == held
    assert second.hello.cached_blocks == engine.cached_blocks()
    assert second.reports == first.reports
    assert cached_after(second.reports, second.hello.cached_blocks) == held


async def test_salt_and_adapter_reach_the_engine_and_come_back() -> None:
    engine = FakeEngine(slots=1, prefix_reuse_tokens=16, adapters=["sql"])
    one = replace(spec("a", prompt=70), cache_salt="acme", adapter="sql")
    async with scheduler() as s, worker(s.address, engine=engine):
        stream = await s.greet()
        await stream.lease(one)
        await stream.assign("a")
        await stream.until_ended("a")
        assert names_in(name_blocks(one.prompt_ids, "acme")) == names_in(stream.reports[0].cached_blocks)
        stream.close.set()
        [held] = (await s.greet()).hello.held

    assert (held.specification.cache_salt, held.specification.adapter) == ("acme", "sql")
    again = specification(held.specification)
    assert (again.cache_salt, again.adapter) == ("acme", "sql")
