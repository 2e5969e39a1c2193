"""The view of clients when schedulers die, move, fall silent or lose state: a pause, and no other effect."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from gateway.links.link import ShardLink
from laps_sd.contract.length_features import key_digest
from laps_sd.service import metrics
from laps_sd.service.config import ConfigError
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import (
    CancelRequest,
    ExplainRequest,
    FinishReason,
    GenerateRequest,
    ResumeRequest,
    SamplingParams,
)
from tests.helpers import free_port, wait_until_async
from tests.services.gateway.conftest import Running, StartGateway, fast_settings
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind, Record, Reply
from tests.services.gateway.reading import has_retry_info, ids_of, read_tokens, rest

HELLO = GenerateRequest(text="the quick")
Result = link_pb2.AttachReply.Result


def tokens(first: int, last: int) -> list[int]:
    """Return distinct ids, so that a lost or doubled one shows."""
    return [40 + n for n in range(first, last)]


def delivery(attachment_id: str, first: int, ids: list[int], **fields: Any) -> Reply:
    one = link_pb2.Delivery(attachment_id=attachment_id, first_token=first, token_ids=ids, **fields)
    return Reply(deliveries=link_pb2.Deliveries(deliveries=[one]))


class TestAfterTheSchedulerDied:
    async def test_a_stream_goes_on_with_the_next_leader(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 5))
        events = await read_tokens(call, 5)
        await scheduler.kill()
        # Committed by the dead leader, never delivered.
        scheduler.commit(request_id, tokens(5, 8), deliver=False)
        successor: FakeScheduler = await start_scheduler(scheduler.record, port=scheduler.port, epoch="2-b")
        attach = await successor.wait_heard("attach")
        successor.commit(request_id, tokens(8, 10), Kind.KIND_LENGTH)
        events += await rest(call)

        assert attach.from_token == 5
        assert attach.attachment_id == scheduler.all_heard("submit")[0].attachment_id
        assert ids_of(events) == tokens(0, 10)
        assert events[-1].end.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert successor.all_heard("submit") == []
        assert len(running.link.streams) == 0

    async def test_a_stream_that_its_client_reads_slowly_is_attached_before_the_client_has_read(
        self, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        link = ShardLink(fast_settings((scheduler.address,), stream_buffer_tokens=4), "s0")
        run = asyncio.create_task(link.run())
        stream = link.submit(link_pb2.Submit(request_id="s0.a", tenant="t"), deadline=None)
        await link.accepted(stream, wait_s=10)
        scheduler.commit("s0.a", tokens(0, 10))
        await wait_until_async(lambda: stream.paused, description="a full buffer", every_s=0.005)
        await scheduler.kill()
        successor: FakeScheduler = await start_scheduler(scheduler.record, port=scheduler.port, epoch="2-b")
        attach = await successor.wait_heard("attach")
        read = link.take(stream, 0.0).token_ids
        successor.commit("s0.a", (), Kind.KIND_LENGTH)
        while stream.end is None or stream.waiting.token_ids:
            await wait_until_async(lambda: stream.has_news, description="the rest", every_s=0.005)
            read += link.take(stream, 0.0).token_ids
        run.cancel()
        await asyncio.wait([run])

        assert (attach.request_id, attach.from_token) == ("s0.a", 4)
        assert read == tokens(0, 10)

    async def test_many_streams_go_on_through_many_deaths(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        running: Running = await start_gateway(scheduler.address)
        calls = [running.stub.GenerateStream(HELLO) for _ in range(8)]
        await scheduler.submitted(8)
        requests = list(scheduler.record.requests)
        reading = [asyncio.create_task(rest(call)) for call in calls]
        leader = scheduler
        for life in range(4):
            for request_id in requests:
                leader.commit(request_id, tokens(life * 10, life * 10 + 10))
            await leader.kill()
            leader = await start_scheduler(scheduler.record, port=scheduler.port, epoch=f"{life + 2}-x")
            await leader.connected()
        for request_id in requests:
            leader.commit(request_id, (), Kind.KIND_LENGTH)

        for task in reading:
            assert ids_of(await task) == tokens(0, 40)
        assert len(running.link.streams) == 0

    async def test_an_unanswered_submission_is_sent_again(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        scheduler.answers_submits = False
        call = running.stub.GenerateStream(HELLO, timeout=20)
        first = await scheduler.wait_heard("submit")
        await scheduler.kill()
        successor: FakeScheduler = await start_scheduler(port=scheduler.port, epoch="2-b")
        again = await successor.wait_heard("submit")
        successor.commit(again.request_id, tokens(0, 3), Kind.KIND_LENGTH)

        assert ids_of(await rest(call)) == tokens(0, 3)
        assert (again.request_id, again.attachment_id, again.submission_id) == (
            first.request_id,
            first.attachment_id,
            first.submission_id,
        )
        assert again.specification == first.specification
        assert again.deadline_in_ms < first.deadline_in_ms
        assert successor.all_heard("attach") == []

    async def test_an_unanswered_cancel_is_sent_again(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        await call.read()
        await scheduler.kill()
        cancelling = running.stub.Cancel(CancelRequest(request_id=request_id))
        await start_scheduler(scheduler.record, port=scheduler.port, epoch="2-b")

        assert (await cancelling).cancelled
        assert (await rest(call))[-1].end.finish_reason == FinishReason.FINISH_REASON_CANCELLED

    async def test_explain_asks_the_next_leader(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        await scheduler.kill()
        explaining = running.stub.Explain(ExplainRequest(request_id=request_id))
        await start_scheduler(scheduler.record, port=scheduler.port, epoch="2-b")

        assert (await explaining).explanation.request_id == request_id
        call.cancel()

    async def test_a_client_that_leaves_meanwhile_is_not_attached_again(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        leaving, staying = running.stub.GenerateStream(HELLO), running.stub.GenerateStream(HELLO)
        await scheduler.submitted(2)
        await leaving.read()
        gone = (await staying.read()).accepted.request_id
        await scheduler.kill()
        leaving.cancel()
        await wait_until_async(
            lambda: len(running.link.streams) == 1, description="one stream", every_s=0.005
        )
        successor: FakeScheduler = await start_scheduler(scheduler.record, port=scheduler.port, epoch="2-b")
        await successor.wait_heard("attach")

        assert [attach.request_id for attach in successor.all_heard("attach")] == [gone]
        assert successor.all_heard("detach") == []
        staying.cancel()


async def test_a_request_that_ends_without_a_token_together_with_its_acceptance_has_news() -> None:
    link = ShardLink(fast_settings(("127.0.0.1:1",)), "s0")
    stream = link.submit(link_pb2.Submit(request_id="s0.a", tenant="t"), deadline=None)
    accepting = asyncio.create_task(link.accepted(stream, wait_s=10))
    await asyncio.sleep(0)  # it waits
    (submission,) = link.streams.reconnected(0.0)
    reply = link_pb2.SubmitReply(submission_id=submission.submit.submission_id)
    reply.accepted.request_id = "s0.a"
    link.streams.on_submit_reply(reply, 0.0)
    end = link_pb2.RequestEnd(kind=Kind.KIND_CANCELLED)
    link.streams.on_delivery(link_pb2.Delivery(attachment_id=stream.attachment_id, end=end), 0.0)
    await accepting

    assert stream.has_news, "its reader would wait for ever"


async def test_workers_with_another_tokenizer_are_warned_of_once(start_scheduler: StartGateway) -> None:
    scheduler: FakeScheduler = await start_scheduler()
    scheduler.load = link_pb2.ShardLoad(workers=1, vocabulary=b"theirs")
    link = ShardLink(fast_settings((scheduler.address,)), "s0", vocabulary=b"ours")
    with structlog.testing.capture_logs() as lines:
        run = asyncio.create_task(link.run())
        for count, vocabulary in enumerate((b"theirs", b"ours", b"theirs", b""), start=1):
            scheduler.load.vocabulary = vocabulary
            await wait_until_async(
                lambda vocabulary=vocabulary: link.load is not None and link.load.vocabulary == vocabulary,
                description=f"load {count} is there",
            )
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)

    warned = [line for line in lines if "another tokenizer" in line["event"]]
    assert [line["shard"] for line in warned] == ["s0"]


async def warnings_of_greeting(
    scheduler: FakeScheduler, variable: str, **settings: Any
) -> list[MutableMapping[str, Any]]:
    """Return the warnings about a variable by a gateway that connects to a scheduler."""
    link = ShardLink(fast_settings((scheduler.address,), **settings), "s0")
    with structlog.testing.capture_logs() as lines:
        run = asyncio.create_task(link.run())
        await link.greeted.wait()
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    return [line for line in lines if line["log_level"] == "warning" and variable in line["event"]]


async def test_a_gateway_whose_calls_wait_shorter_than_a_takeover_warns_of_that(
    start_scheduler: StartGateway,
) -> None:
    scheduler: FakeScheduler = await start_scheduler()
    scheduler.lease_s = 6.0

    async def warned_of(wait_s: float) -> list[MutableMapping[str, Any]]:
        return await warnings_of_greeting(scheduler, "LAPS_SD_SCHEDULER_WAIT_S", scheduler_wait_s=wait_s)

    (warned,) = await warned_of(10.0)
    assert (warned["scheduler_wait_s"], warned["lease_s"]) == (10.0, 6.0)
    assert not await warned_of(11.0)
    scheduler.lease_s = 0.0
    assert not await warned_of(0.1), "the scheduler is of an older release"


async def test_a_gateway_that_hashes_words_under_another_key_warns_of_that(
    start_scheduler: StartGateway,
) -> None:
    scheduler: FakeScheduler = await start_scheduler()

    async def warned_of(digest: bytes, **settings: Any) -> list[MutableMapping[str, Any]]:
        scheduler.length_key_digest = digest
        return await warnings_of_greeting(scheduler, "LAPS_SD_LENGTH_KEY", **settings)

    (warned,) = await warned_of(key_digest("theirs"), length_key="ours")
    assert warned["scheduler"] == scheduler.address
    assert "ours" not in str(warned)
    assert len(await warned_of(key_digest(""), length_key="ours")) == 1, "a scheduler without a key"
    assert len(await warned_of(key_digest("theirs"))) == 1, "a gateway without a key"
    assert not await warned_of(key_digest("ours"), length_key="ours")
    assert not await warned_of(b"", length_key="ours"), (
        "it does not read the words, or is of an older release"
    )
    assert not await warned_of(key_digest("theirs"), predict_lengths=False)


async def test_a_second_answer_to_one_cancel_changes_nothing() -> None:
    """Its call may not have taken the first one yet. The link must not break."""
    link = ShardLink(fast_settings(("127.0.0.1:1",)), "s0")
    cancelling = asyncio.create_task(link.cancel("s0.a", tenant="t", wait_s=10))
    await asyncio.sleep(0)  # it waits
    (cancel_id,) = link._cancels
    for cancelled in (True, False):
        reply = link_pb2.CancelReply(cancel_id=cancel_id, found=True, cancelled=cancelled)
        link._on_reply(Reply(cancel_reply=reply), "cancel_reply")

    assert await cancelling
    link._on_reply(Reply(cancel_reply=reply), "cancel_reply")  # to a cancel that is over
    assert not link._cancels


class TestWhileNoSchedulerIsThere:
    async def test_a_submission_waits(
        self, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        port = free_port()
        running: Running = await start_gateway(f"127.0.0.1:{port}")
        call = running.stub.Generate(HELLO)
        await wait_until_async(lambda: len(running.link.streams) == 1, description="a stream", every_s=0.005)
        late: FakeScheduler = await start_scheduler(port=port)
        late.commit(await late.submitted(), tokens(0, 2), Kind.KIND_LENGTH)

        assert list((await call).token_ids) == tokens(0, 2)

    async def test_it_waits_no_longer_than_the_setting(self, start_gateway: StartGateway) -> None:
        running: Running = await start_gateway(f"127.0.0.1:{free_port()}", scheduler_wait_s=0.1)

        for call in (
            running.stub.Generate(HELLO),
            running.stub.Cancel(CancelRequest(request_id="s0.a")),
            running.stub.Explain(ExplainRequest(request_id="s0.a")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "could not be reached within 0.1 s" in (error.value.details() or "")
            assert has_retry_info(error.value)
        assert len(running.link.streams) == 0

    def test_a_wait_in_which_no_scheduler_could_answer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"LAPS_SD_SCHEDULER_WAIT_S must be at least 0.05 s, got 0"):
            fast_settings(("127.0.0.1:1",), scheduler_wait_s=0)

    async def test_it_waits_no_longer_than_the_clients_deadline(self, start_gateway: StartGateway) -> None:
        running: Running = await start_gateway(f"127.0.0.1:{free_port()}")

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(HELLO, timeout=0.1)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_until_async(lambda: len(running.link.streams) == 0, description="no stream", every_s=0.005)


class TestFindingTheLeader:
    async def test_not_leader_is_followed(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        standby: FakeScheduler = await start_scheduler()
        standby.leader = scheduler.address
        running: Running = await start_gateway(standby.address)
        call = running.stub.Generate(HELLO)
        scheduler.commit(await scheduler.submitted(), tokens(0, 1), Kind.KIND_LENGTH)

        assert list((await call).token_ids) == tokens(0, 1)
        assert standby.all_heard("submit") == []

    async def test_a_standby_that_knows_no_leader_is_passed_over(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        standby: FakeScheduler = await start_scheduler()
        standby.leader = ""
        running: Running = await start_gateway(standby.address, f"127.0.0.1:{free_port()}", scheduler.address)

        await asyncio.wait_for(running.link.greeted.wait(), 10)
        assert running.link.connected

    async def test_two_standbys_that_name_each_other_do_not_catch_it(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        one: FakeScheduler = await start_scheduler()
        two: FakeScheduler = await start_scheduler()
        one.leader, two.leader = two.address, one.address
        running: Running = await start_gateway(one.address, two.address, scheduler.address)

        await asyncio.wait_for(running.link.greeted.wait(), 10)

    async def test_a_leader_that_steps_down_is_left_for_the_one_it_names(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 2))
        events = await read_tokens(call, 2)
        successor: FakeScheduler = await start_scheduler(scheduler.record, epoch="2-b")
        scheduler.leader = successor.address
        scheduler.say(Reply(not_leader=link_pb2.NotLeader(leader_address=successor.address)), epoch="")
        await successor.wait_heard("attach")
        successor.commit(request_id, tokens(2, 4), Kind.KIND_LENGTH)

        assert ids_of(events + await rest(call)) == tokens(0, 4)

    @pytest.mark.parametrize("versions", [(1, 2), (2, 1)], ids=["upgrade", "back"])
    async def test_leaders_of_this_release_and_the_one_before_deliver_the_same(
        self, start_gateway: StartGateway, start_scheduler: StartGateway, versions: tuple[int, int]
    ) -> None:
        scheduler: FakeScheduler = await start_scheduler(version=versions[0])
        running: Running = await start_gateway(scheduler.address)
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 2))
        events = await read_tokens(call, 2)
        successor: FakeScheduler = await start_scheduler(scheduler.record, epoch="2-b", version=versions[1])
        scheduler.leader = successor.address
        await scheduler.kill()
        await scheduler.start(scheduler.port)
        await successor.wait_heard("attach")
        successor.commit(request_id, tokens(2, 4))
        successor.commit(request_id, tokens(4, 6), Kind.KIND_LENGTH)

        assert ids_of(events + await rest(call)) == tokens(0, 6)

    @pytest.mark.parametrize("wrong", [{"shard": "s7"}, {"epoch": ""}])
    async def test_a_scheduler_that_cannot_be_ours_is_not_used(
        self, start_gateway: StartGateway, start_scheduler: StartGateway, wrong: dict[str, str]
    ) -> None:
        stranger: FakeScheduler = await start_scheduler(**wrong)
        running: Running = await start_gateway(stranger.address)
        await stranger.wait_heard("hello", 2)

        assert not running.link.greeted.is_set()

    async def test_the_hello_says_who_speaks_which_protocol(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        hello = scheduler.all_heard("hello")[0]

        assert list(hello.protocol_versions) == [2, 1]
        assert hello.gateway_id == running.link.gateway_id
        assert metrics.value("laps_sd_gateway_link_up", {"shard": "s0"}) == 1


class TestTheLeaderEpoch:
    async def test_messages_of_another_one_are_refused(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        attachment_id = scheduler.all_heard("submit")[0].attachment_id
        await call.read()
        stale = metrics.value("laps_sd_gateway_link_stale_messages_total", {"shard": "s0"})
        scheduler.say(delivery(attachment_id, 0, [99, 98]), epoch="0-old")
        scheduler.commit(request_id, tokens(0, 3), Kind.KIND_LENGTH)

        assert ids_of(await rest(call)) == tokens(0, 3)
        assert metrics.value("laps_sd_gateway_link_stale_messages_total", {"shard": "s0"}) == stale + 1

    async def test_a_new_greeting_brings_a_new_one_and_everything_is_attached_again(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 2))
        events = await read_tokens(call, 2)
        hello = link_pb2.SchedulerHello(shard="s0", protocol_version=1)
        scheduler.epoch = "2-b"
        scheduler.say(Reply(hello=hello))
        attach = await scheduler.wait_heard("attach")
        scheduler.commit(request_id, tokens(2, 4), Kind.KIND_LENGTH)

        assert attach.from_token == 2
        assert ids_of(events + await rest(call)) == tokens(0, 4)


class TestDeliveries:
    async def test_what_was_seen_is_dropped_and_what_is_new_is_taken(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        await scheduler.submitted()
        attachment_id = scheduler.all_heard("submit")[0].attachment_id
        await call.read()
        scheduler.say(delivery(attachment_id, 0, tokens(0, 3)))
        scheduler.say(delivery(attachment_id, 0, tokens(0, 2)))
        scheduler.say(delivery(attachment_id, 1, tokens(1, 5)))
        scheduler.say(delivery(attachment_id, 5, [], end=link_pb2.RequestEnd(kind=Kind.KIND_STOP)))

        assert ids_of(await rest(call)) == tokens(0, 5)

    async def test_a_gap_is_read_again(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 2))
        events = await read_tokens(call, 2)
        scheduler.commit(request_id, tokens(2, 5), deliver=False)
        scheduler.commit(request_id, tokens(5, 7), Kind.KIND_LENGTH)
        attach = await scheduler.wait_heard("attach")

        assert attach.from_token == 2
        assert ids_of(events + await rest(call)) == tokens(0, 7)

    async def test_of_attachments_that_nobody_waits_for_are_ignored(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        scheduler.say(delivery("unknown", 0, [70]))
        call = running.stub.Generate(HELLO)
        scheduler.commit(await scheduler.submitted(), tokens(0, 1), Kind.KIND_LENGTH)

        assert list((await call).token_ids) == tokens(0, 1)

    async def test_an_attachment_that_cannot_be_made_now_is_tried_again(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 3), Kind.KIND_LENGTH)
        await rest(call)
        scheduler.attach_results = [Result.RESULT_UNAVAILABLE, Result.RESULT_UNAVAILABLE]
        resumed = await rest(running.stub.Resume(ResumeRequest(request_id=request_id)))

        assert ids_of(resumed) == tokens(0, 3)
        assert len(scheduler.all_heard("attach")) == 3


class TestSilence:
    async def test_a_silent_leader_is_given_up(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running: Running = await start_gateway(scheduler.address, silence_s=1.5)
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 2))
        events = await read_tokens(call, 2)
        scheduler.heartbeats = False
        await scheduler.wait_heard("hello", 2)
        scheduler.heartbeats = True
        await scheduler.wait_heard("attach")
        scheduler.commit(request_id, tokens(2, 4), Kind.KIND_LENGTH)

        assert ids_of(events + await rest(call)) == tokens(0, 4)

    async def test_the_gateway_itself_is_never_silent(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        one = await scheduler.wait_heard("heartbeat", 1)
        two = await scheduler.wait_heard("heartbeat", 2)

        assert two.sent_ms > one.sent_ms


async def test_the_link_ends_when_it_is_told_to_even_while_it_breaks(start_scheduler: StartGateway) -> None:
    for turns in range(60):
        scheduler: FakeScheduler = await start_scheduler()
        link = ShardLink(fast_settings((scheduler.address,)), "s0")
        run = asyncio.create_task(link.run())
        await asyncio.wait_for(link.greeted.wait(), 10)
        killing = asyncio.create_task(scheduler.kill())
        for _ in range(turns):
            await asyncio.sleep(0)
        run.cancel()
        done, _ = await asyncio.wait([run], timeout=5)
        await killing

        assert done, f"still running, {turns} turns of the loop after the scheduler died"


class TestARecordThatForgot:
    async def test_gets_the_request_again_with_the_tokens_that_were_shown(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        call = running.stub.GenerateStream(GenerateRequest(text="x", sampling=SamplingParams(max_tokens=9)))
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 4))
        events = await read_tokens(call, 4)
        await scheduler.kill()
        empty: FakeScheduler = await start_scheduler(Record(), port=scheduler.port, epoch="2-b")
        again = await empty.wait_heard("submit")
        empty.commit(request_id, tokens(4, 6), Kind.KIND_LENGTH)
        events += await rest(call)

        assert again.request_id == request_id
        assert list(again.shown_ids) == tokens(0, 4)
        assert again.specification.sampling.seed == events[0].accepted.seed
        assert ids_of(events) == tokens(0, 6)

    async def test_a_full_queue_lets_it_wait(
        self, running: Running, scheduler: FakeScheduler, start_scheduler: StartGateway
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, tokens(0, 2))
        events = await read_tokens(call, 2)
        await scheduler.kill()
        empty: FakeScheduler = FakeScheduler(Record(), epoch="2-b")
        empty.refuse = link_pb2.SubmitRefused(reason=link_pb2.SubmitRefused.REASON_QUEUE_FULL)
        try:
            await empty.start(scheduler.port)
            await empty.wait_heard("submit")
            empty.refuse = None
            await empty.submitted()
            empty.commit(request_id, tokens(2, 3), Kind.KIND_LENGTH)

            assert ids_of(events + await rest(call)) == tokens(0, 3)
        finally:
            await empty.kill()

    async def test_ends_a_resumed_stream_that_nobody_can_restore(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        submitting: Running = await start_gateway(scheduler.address)
        resuming: Running = await start_gateway(scheduler.address, restore_s=0.1)
        call = submitting.stub.GenerateStream(GenerateRequest(text="x", idempotency_key="k"))
        request_id = await scheduler.submitted()
        resumed = resuming.stub.Resume(ResumeRequest(request_id=request_id))
        await resumed.read()
        call.cancel()
        await scheduler.wait_heard("detach")
        await scheduler.kill()
        await start_scheduler(Record(), port=scheduler.port, epoch="2-b")

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(resumed)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "was lost" in (error.value.details() or "")
