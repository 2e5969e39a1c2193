"""The guarantees of a scheduler to its gateways and workers, over the real links and a real record."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc.aio
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from laps_sd.contract.ends import End
from laps_sd.contract.length_features import key_digest
from laps_sd.service.metrics import serve_metrics, value
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import admin_pb2_grpc
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc.__main__ import steady_unix_clock
from scheduler_svc.leader.loop import MAX_TURN, Loop
from scheduler_svc.leader.sessions import GatewaySession, WorkerSession
from scheduler_svc.leader.turn import FromGateway, FromWorker
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.records import NewRequest, StoredRequest, SubmitResult
from scheduler_svc.store.store import Store
from tests.helpers import wait_until_async
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, gateway, worker

STOP = gateway_pb.RequestEnd.KIND_STOP
Refused = gateway_pb.SubmitRefused


async def test_a_request_is_accepted_only_once_it_is_on_the_record(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        reply = await client.submit("r1")

        assert reply.accepted.request_id == "r1"
        stored = await scheduler.store.read("r1")
        assert stored is not None
        assert list(stored.prompt_ids) == [1, 2, 3]


async def test_committed_tokens_reach_the_client_in_order_and_with_one_end(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        listed = await gpu.assigned("r1")
        epoch = listed["r1"].lease_epoch
        assert list(listed["r1"].specification.prompt_ids) == [1, 2, 3]

        await gpu.run_round("r1", epoch, 0, [10, 11])
        await gpu.run_round("r1", epoch, 2, [12], end=STOP)
        tokens, end = await client.read("r1-client")

        assert tokens == [10, 11, 12]
        assert end.kind == STOP
        assert end.speculation.rounds == 2
        stored = await scheduler.store.read("r1")
        assert stored is not None
        assert (stored.end, stored.committed_ids) == (End.STOP, (10, 11, 12))


async def test_log_probabilities_go_with_their_tokens_and_are_unknown_from_the_record(
    start: StartScheduler,
) -> None:
    def told(*values: float) -> list[pb.TokenLogprobs]:
        return [
            pb.TokenLogprobs(logprob=value, top=[pb.TokenLogprob(token_id=1, logprob=-0.5)])
            for value in values
        ]

    first = await start()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1", logprobs=1)
        leased = (await gpu.assigned("r1"))["r1"]
        epoch = leased.lease_epoch
        assert leased.specification.logprobs == 1
        report = gpu.report("r1", epoch, 0, [10, 11])
        report.progress[0].logprobs.extend(told(-1.0, -2.0))
        await gpu.send_reports(report)
        message = await client.wait_for(lambda m: m.WhichOneof("message") == "deliveries", "tokens")
        (delivery,) = message.deliveries.deliveries
        assert (list(delivery.token_ids), list(delivery.logprobs)) == ([10, 11], told(-1.0, -2.0))
        await gpu.acknowledged(report.number)
        await first.crash()
    second = await start()
    held = worker_pb.HeldRequest(request_id="r1", lease_epoch=epoch, emitted=2)
    async with gateway(second.address) as client, worker(second.address, held=[held]) as gpu:
        await client.attach("r1", from_token=0, attachment_id="r1-client")
        message = await client.wait_for(
            lambda m: m.WhichOneof("message") == "deliveries", "tokens of the record"
        )
        (delivery,) = message.deliveries.deliveries
        assert list(delivery.logprobs) == [pb.TokenLogprobs(unknown=True)] * 2


async def test_what_a_request_finds_of_its_own_does_not_count_as_cached(
    scheduler: SchedulerUnderTest,
) -> None:
    """A request that has lost its KV finds in the cache what it has computed itself."""
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        for position, cached in enumerate((1, 0, 3)):
            report = gpu.report("r1", epoch, position, [10 + position], end=STOP if position == 2 else None)
            report.progress[0].cached = cached
            await gpu.send_reports(report)
            await gpu.acknowledged(report.number)

        _, end = await client.read("r1-client")

        assert end.cached_prompt_tokens == 1, "of its 3 prompt tokens, before it first ran"


async def test_a_report_without_a_round_does_not_count_as_a_round(scheduler: SchedulerUnderTest) -> None:
    before = value("laps_sd_scheduler_rounds_total")
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10])
        gpu.number += 1
        refused = worker_pb.RequestProgress(
            request_id="r1",
            lease_epoch=epoch,
            position=1,
            end=gateway_pb.RequestEnd.KIND_ERROR,
            error="no room",
        )
        await gpu.send_reports(worker_pb.RoundReport(number=gpu.number, progress=[refused]))
        _, end = await client.read("r1-client")

    assert end.kind == gateway_pb.RequestEnd.KIND_ERROR
    assert value("laps_sd_scheduler_rounds_total") == before + 1


async def test_an_acknowledged_report_is_on_the_record(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10, 11])

        stored = await scheduler.store.read("r1")
        assert stored is not None
        assert stored.committed_ids == (10, 11)


async def test_a_report_offered_twice_is_committed_once(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        report = gpu.report("r1", epoch, 0, [10, 11])
        await gpu.send_reports(report, report)
        await gpu.acknowledged(1)
        await gpu.run_round("r1", epoch, 2, [12], end=STOP)

        tokens, _ = await client.read("r1-client")
        assert tokens == [10, 11, 12]


async def test_a_stale_lease_epoch_changes_nothing_and_is_told_to_drop(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.send_reports(gpu.report("r1", epoch - 1, 0, [99]))

        drop = await gpu.next("drop")
        assert [entry.request_id for entry in drop.requests] == ["r1"]
        stored = await scheduler.store.read("r1")
        assert stored is not None
        assert stored.committed_ids == ()


async def test_the_list_is_longer_than_the_batch(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        for number in range(4):
            await client.submit(f"r{number}", submission_id=number + 1)
        async with worker(scheduler.address, slots=1) as gpu:
            message = await gpu.next("assignment")

            assert len(message.entries) >= 2


async def test_the_requests_of_a_lost_worker_go_on_elsewhere_from_their_committed_tokens(
    start: StartScheduler,
) -> None:
    scheduler = await start(worker_grace_s=0.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, "w1") as first:
        await client.submit("r1")
        epoch = (await first.assigned("r1"))["r1"].lease_epoch
        await first.run_round("r1", epoch, 0, [10, 11])
        async with worker(scheduler.address, "w2") as second:
            await first.close()
            again = await second.assigned("r1")

            assert again["r1"].tokens == [10, 11]
            assert again["r1"].lease_epoch == epoch + 1
            await second.run_round("r1", again["r1"].lease_epoch, 2, [12], end=STOP)
            tokens, _ = await client.read("r1-client")
            assert tokens == [10, 11, 12]


async def test_the_requests_of_a_worker_that_is_connected_and_reports_nothing_go_on_elsewhere(
    start: StartScheduler,
) -> None:
    scheduler = await start(watchdog_s=1.0, silence_s=600.0, worker_grace_s=600.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, "hung") as hung:
        await client.submit("r1")
        epoch = (await hung.assigned("r1"))["r1"].lease_epoch
        await hung.run_round("r1", epoch, 0, [10, 11])
        async with worker(scheduler.address, "w2") as second:
            again = (await second.assigned("r1"))["r1"]
            await hung.wait_ended()
            async with worker(scheduler.address, "hung") as dials_again:
                await dials_again.next("hello")
                stored = await scheduler.store.read("r1")
                assert stored is not None and stored.deaths == 1, "that it dials proves nothing"

            assert (again.tokens, again.lease_epoch) == ([10, 11], epoch + 1)
            await second.run_round("r1", again.lease_epoch, 2, [12], end=STOP)
            assert (await client.read("r1-client"))[0] == [10, 11, 12]


async def test_a_worker_whose_requests_have_ended_is_not_taken_for_one_that_hangs(
    start: StartScheduler,
) -> None:
    scheduler = await start(watchdog_s=1.0, silence_s=600.0, worker_grace_s=600.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, "idle") as idle:
        await client.submit("r1")
        epoch = (await idle.assigned("r1"))["r1"].lease_epoch
        await idle.run_round("r1", epoch, 0, [10], end=STOP)
        # It is too small for r2, of which two workers hang one after the other: its own watchdog runs out meanwhile.
        async with worker(scheduler.address, "hangs", max_length=2048) as hung:
            await hung.next("hello")
            await client.submit("r2", prompt=(1,) * 1100)
            await hung.wait_ended()
        async with worker(scheduler.address, "hangs-too", max_length=2048) as hung:
            await hung.assigned("r2")
            await hung.wait_ended()
        await client.submit("r3")
        epoch = (await idle.assigned("r3"))["r3"].lease_epoch
        await idle.run_round("r3", epoch, 0, [11], end=STOP)
        assert (await client.read("r3-client"))[0] == [11]


async def test_a_request_that_workers_die_of_is_ended_also_when_the_leader_changes(
    start: StartScheduler,
) -> None:
    leader = await start(worker_grace_s=0.0)
    given_up = value("laps_sd_scheduler_requests_with_dead_workers_total", {"then": "given_up"})
    async with gateway(leader.address) as client:
        await client.submit("r1", keep=True)
        await workers_die(leader, 0, 1)
    await leader.crash()
    leader = await start(worker_grace_s=0.0)
    async with gateway(leader.address) as client, grpc.aio.insecure_channel(leader.address) as channel:
        await client.attach("r1", attachment_id="r1-again")
        asked = admin_pb.AdminExplainRequest(request_id="r1", tenant="anonymous")
        admin = admin_pb2_grpc.AdminStub(channel)
        assert (
            await admin.ExplainRequest(asked)
        ).explanation.waits_for == "a worker of its own: 2 workers died with it"
        await workers_die(leader, 2, 3, 4)
        tokens, end = await client.read("r1-again")
        story = [line.what for line in (await admin.ExplainRequest(asked)).explanation.story]

    assert (tokens, end.kind) == ([], gateway_pb.RequestEnd.KIND_ERROR)
    assert end.detail.startswith("5 workers died in a row while they ran this request")
    assert story[-2:] == ["given up", "ended"]
    assert value("laps_sd_scheduler_requests_with_dead_workers_total", {"then": "given_up"}) == given_up + 1


async def workers_die(leader: SchedulerUnderTest, *numbers: int) -> None:
    """Stop each worker as soon as r1 is on its list."""
    for number in numbers:
        async with worker(leader.address, f"w{number}") as dies:
            await dies.assigned("r1")

        async def counted(deaths: int = number + 1) -> bool:
            stored = await leader.store.read("r1")
            return stored is not None and stored.deaths == deaths

        await wait_until_async(counted, description="the record has the death")


async def test_what_is_too_long_to_be_the_name_of_anything_is_not_found(
    scheduler: SchedulerUnderTest,
) -> None:
    """Such an id is neither looked up in the record nor kept."""
    too_long = "x" * 257
    async with gateway(scheduler.address) as client:
        await client.submit("r1")
        for request_id, attachment_id in ((too_long, "a"), ("r1", too_long), ("r1", "")):
            reply = await client.attach(request_id, attachment_id=attachment_id)
            assert reply.result == gateway_pb.AttachReply.RESULT_NOT_FOUND
        cancel = gateway_pb.CancelRequested(cancel_id=1, request_id=too_long, tenant="anonymous")
        await client.send(gateway_pb.GatewayMessage(cancel=cancel))

        assert not (await client.next("cancel_reply")).found


async def test_a_worker_that_comes_back_in_time_keeps_its_requests(start: StartScheduler) -> None:
    scheduler = await start(worker_grace_s=60.0)
    async with gateway(scheduler.address) as client:
        await client.submit("r1")
        async with worker(scheduler.address, "w1") as gpu:
            epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
            await gpu.run_round("r1", epoch, 0, [10])
        held = worker_pb.HeldRequest(
            request_id="r1", lease_epoch=epoch, residency=worker_pb.HeldRequest.RESIDENCY_DEVICE, emitted=1
        )
        async with worker(scheduler.address, "w1", held=[held]) as gpu:
            listed = await gpu.next("assignment")

            assert [(e.request_id, e.lease_epoch) for e in listed.entries] == [("r1", epoch)]
            assert not any(heard.HasField("specifications") for heard in gpu.heard), "it has the prompt"
            gpu.number = 1
            await gpu.run_round("r1", epoch, 1, [11], end=STOP)
            assert (await client.read("r1-client"))[0] == [10, 11]


async def test_a_worker_whose_stream_ended_gets_no_request_during_its_grace(start: StartScheduler) -> None:
    scheduler = await start(worker_grace_s=600.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, "w1") as first:
        await client.submit("r1")
        await first.assigned("r1")
        await first.close()
        await workers_are(scheduler, [False])
        async with worker(scheduler.address, "w2") as second:
            await client.submit("r2")
            await client.submit("r3")

            await second.assigned("r2", "r3")


async def test_of_workers_that_fall_silent_together_none_gets_the_requests_of_another(
    start: StartScheduler,
) -> None:
    """So it is with a machine that dies: no connection of its workers is closed. They do not get the grace of a
    worker whose stream ended.
    """
    scheduler = await start(silence_s=1.5, worker_grace_s=600.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, "w1") as first:
        await client.submit("r1", keep=True)
        epoch = (await first.assigned("r1"))["r1"].lease_epoch
        await asyncio.sleep(0.3)  # they sent their last messages at different times
        async with worker(scheduler.address, "w2") as second:
            await first.wait_ended()
            await second.wait_ended()
        await workers_are(scheduler, [])
        async with worker(scheduler.address, "w3") as third:
            again = (await third.assigned("r1"))["r1"]
            stored = await scheduler.store.read("r1")

    assert again.lease_epoch == epoch + 1
    assert stored is not None and stored.deaths == 1


async def workers_are(scheduler: SchedulerUnderTest, connected: list[bool]) -> None:
    """Wait until the scheduler knows these workers: whether each is connected."""
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)

        async def as_wanted() -> bool:
            listed = await admin.ListWorkers(admin_pb.ListWorkersRequest())
            return [one.connected for one in listed.workers] == connected

        await wait_until_async(as_wanted, description=f"workers are connected: {connected}")


async def test_a_worker_whose_stream_broke_is_listed_by_its_name(start: StartScheduler) -> None:
    """By the name of its pod the operator finds that it still has requests."""
    scheduler = await start()
    async with gateway(scheduler.address) as client:
        async with worker(scheduler.address, "w1") as gpu:
            await client.submit("r1")
            await gpu.assigned("r1")
            (before,) = (await listed(scheduler)).workers
        await workers_are(scheduler, [False])
        (after,) = (await listed(scheduler)).workers

    assert before.worker_name
    assert (after.worker_name, after.listed) == (before.worker_name, 1)


async def listed(scheduler: SchedulerUnderTest) -> admin_pb.ListWorkersResponse:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        return await admin_pb2_grpc.AdminStub(channel).ListWorkers(admin_pb.ListWorkersRequest())


async def test_a_new_leader_goes_on_from_the_record_and_takes_what_the_worker_offers_again(
    start: StartScheduler,
) -> None:
    first = await start()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10, 11])
        await first.crash()
    second = await start()
    held = worker_pb.HeldRequest(request_id="r1", lease_epoch=epoch, emitted=4)
    async with gateway(second.address) as client, worker(second.address, held=[held]) as gpu:
        # The first report was acknowledged by the dead leader, the second was not.
        await gpu.send_reports(
            gpu.report("r1", epoch, 0, [10, 11], number=1), gpu.report("r1", epoch, 2, [12, 13], number=2)
        )
        await gpu.acknowledged(2)
        reply = await client.attach("r1", from_token=1, attachment_id="r1-client")

        assert reply.result == gateway_pb.AttachReply.RESULT_ATTACHED
        gpu.number = 2
        await gpu.run_round("r1", epoch, 4, [14], end=STOP)
        tokens, end = await client.read("r1-client")
        assert tokens == [11, 12, 13, 14]
        assert end.kind == STOP


async def test_a_new_leader_enters_requests_into_its_core_while_it_reads_them(
    start: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two chunks the lease is renewed. With all of many requests at the end, it would run out."""
    first = await start()
    async with gateway(first.address) as client:
        for number in range(5):
            await client.submit(f"r{number}", submission_id=number, keep=True)
    await first.crash()

    loops: list[Loop] = []
    entered: list[int] = []
    recover, load_unfinished = Loop.recover, Store.load_unfinished

    async def recover_it(loop: Loop) -> None:
        loops.append(loop)
        await recover(loop)

    async def load_them(store: Store) -> AsyncIterator[list[StoredRequest]]:
        async for chunk in load_unfinished(store):
            yield chunk
            entered.append(loops[-1].core.totals().queued)

    monkeypatch.setattr("scheduler_svc.store.reading.READ_CHUNK", 2)
    monkeypatch.setattr(Loop, "recover", recover_it)
    monkeypatch.setattr(Store, "load_unfinished", load_them)
    second = await start()

    assert entered == [2, 4, 5]
    async with worker(second.address, slots=5) as gpu:
        await gpu.assigned(*(f"r{number}" for number in range(5)))


async def test_what_a_leader_has_recovered_can_go_when_it_no_longer_leads(start: StartScheduler) -> None:
    """While it leads, no search for cycles looks at it."""
    scheduler = await start()
    assert gc.get_freeze_count() > 0

    await scheduler.leadership.resign()
    assert gc.get_freeze_count() == 0


async def test_a_standby_names_the_leader_and_takes_over_when_it_is_gone(start: StartScheduler) -> None:
    leader = await start()
    standby = await start(lead=False)
    await wait_until_async(
        lambda: standby.leadership.leader_address, description="the standby has read who leads"
    )
    async with gateway(standby.address) as client:
        assert (await client.next("not_leader")).leader_address == leader.address

    epoch = leader.leadership.epoch
    await leader.crash()
    await standby.wait_leading()

    assert standby.leadership.epoch != epoch
    async with gateway(standby.address) as client:
        message = await client.wait_for(lambda m: m.WhichOneof("message") == "hello", "a hello")
        assert message.leader_epoch == standby.leadership.epoch


async def test_a_leader_that_was_replaced_ends_its_streams(start: StartScheduler) -> None:
    leader = await start()
    async with gateway(leader.address) as client:
        await client.next("hello")
        # As if it was paused, its lease ran out and another scheduler took over.
        await leader.store.transport.client.set(leader.store.keys.leader(), "99:other 127.0.0.1:1", px=60_000)
        await client.wait_ended()

        assert leader.leadership.loop is None


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("pool", "other", worker_pb.WorkerRefused.REASON_POOL),
        ("protocol_versions", [99], worker_pb.WorkerRefused.REASON_PROTOCOL),
        ("slots", 0, worker_pb.WorkerRefused.REASON_CAPACITY),
        ("vocabulary", bytes(65), worker_pb.WorkerRefused.REASON_CAPACITY),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_with_a_reason(
    scheduler: SchedulerUnderTest, field: str, value: object, reason: int
) -> None:
    async with worker(scheduler.address, **{field: value}) as gpu:
        refused = await gpu.next("refused")

        assert refused.reason == reason
        assert refused.detail


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_blocks": 1}, "target_blocks must hold at least 8 tokens, max_draft_tokens (6) and 2"),
        ({"draft_blocks": 1}, "draft_blocks must hold at least 8 tokens, max_draft_tokens (6) and 2"),
        ({"max_length": 1}, "max_length must be at least 2"),
    ],
    ids=["target", "draft", "length"],
)
async def test_a_worker_that_could_hold_no_request_is_refused_and_gateways_keep_their_streams(
    scheduler: SchedulerUnderTest, fields: dict[str, int], said: str
) -> None:
    async with gateway(scheduler.address) as client:
        async with worker(scheduler.address, block_size=4, max_draft_tokens=6, **fields) as gpu:
            refused = await gpu.next("refused")
            assert refused.reason == worker_pb.WorkerRefused.REASON_CAPACITY
            assert said in refused.detail
        assert (await client.submit("r1")).HasField("accepted")

    async with worker(scheduler.address, block_size=4, max_draft_tokens=6, target_blocks=2) as gpu:
        await gpu.next("hello")


def ended(lines: Sequence[Mapping[str, object]], gateways: int) -> bool:
    return [line["event"] for line in lines].count("gateway stream ended") == gateways


async def test_a_fault_of_the_scheduler_that_ends_a_stream_is_an_error_in_the_log(
    scheduler: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise ValueError("Value out of range: -2")

    with structlog.testing.capture_logs() as lines:
        async with gateway(scheduler.address, "leaves by itself") as client:
            await client.next("hello")
        await wait_until_async(lambda: ended(lines, 1), description="the stream ends")
        monkeypatch.setattr(scheduler.leadership.loop, "load", broken)
        async with gateway(scheduler.address, "is cut") as client:
            await client.wait_ended()
        await wait_until_async(lambda: ended(lines, 2), description="the other stream ends")

    [error] = [line for line in lines if line["log_level"] == "error"]
    assert error["event"] == "stream broken by a fault of this scheduler"
    assert "Value out of range: -2" in error["reason"]


async def test_two_model_pairs_in_one_pool_are_refused(scheduler: SchedulerUnderTest) -> None:
    async with worker(scheduler.address, "w1") as gpu:
        await gpu.next("hello")
        async with worker(scheduler.address, "w2", fingerprint="other pair") as intruder:
            assert (await intruder.next("refused")).reason == worker_pb.WorkerRefused.REASON_FINGERPRINT


async def test_two_model_pairs_that_dial_before_the_leader_has_taken_in_either_are_refused_too(
    scheduler: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert scheduler.leadership.loop is not None
    monkeypatch.setattr(scheduler.leadership.loop, "put", list[object]().append)
    async with worker(scheduler.address, "w1") as gpu:
        await gpu.next("hello")
        async with worker(scheduler.address, "w2", fingerprint="other pair") as intruder:
            assert (await intruder.next("refused")).reason == worker_pb.WorkerRefused.REASON_FINGERPRINT


async def test_an_older_stream_of_a_gateway_that_closes_late_leaves_its_clients_to_the_newer_one(
    scheduler: SchedulerUnderTest,
) -> None:
    assert scheduler.leadership.loop is not None
    live = scheduler.leadership.loop.working_copy.live
    async with gateway(scheduler.address) as newer:
        async with gateway(scheduler.address) as older:
            await older.submit("r1", attachment_id="a", submission_id=1)
            await older.submit("r2", attachment_id="b", submission_id=2)
            assert (
                await newer.attach("r1", attachment_id="a")
            ).result == gateway_pb.AttachReply.RESULT_ATTACHED
        await wait_until_async(lambda: not live["r2"].attachments, description="the older stream is closed")

        assert list(live["r1"].attachments) == ["a"]
        cancel = gateway_pb.CancelRequested(cancel_id=5, request_id="r1", tenant="anonymous")
        await newer.send(gateway_pb.GatewayMessage(cancel=cancel))
        _, end = await newer.read("a")
        assert end.kind == gateway_pb.RequestEnd.KIND_CANCELLED


async def test_a_message_of_an_older_stream_of_a_worker_does_not_count_for_the_newer_one(
    scheduler: SchedulerUnderTest,
) -> None:
    """It was received before the worker dialled again, and is handled afterwards: an order to drain is over then."""
    loop = scheduler.leadership.loop
    assert loop is not None
    workers = loop.roster.workers
    async with worker(scheduler.address, "w1") as older, gateway(scheduler.address) as client:
        await older.next("hello")
        await wait_until_async(lambda: "w1" in workers, description="the worker is known")
        late = workers["w1"].session
        assert late is not None
        async with worker(scheduler.address, "w1") as newer:
            await wait_until_async(lambda: workers["w1"].session is not late, description="it dialled again")
            loop.put(FromWorker(late, worker_pb.WorkerMessage(drain=worker_pb.DrainRequested())))
            await client.submit("r1")
            await newer.assigned("r1")


async def test_a_request_outlives_the_stream_of_its_gateway_for_the_grace_of_reattaching(
    start: StartScheduler,
) -> None:
    """Its client may have none: it did not leave, its gateway died."""
    scheduler = await start(reattach_grace_s=600.0)
    assert scheduler.leadership.loop is not None
    live = scheduler.leadership.loop.working_copy.live
    async with gateway(scheduler.address, "g1") as first:
        await first.submit("r1", grace_ms=0)
    await wait_until_async(lambda: not live["r1"].attachments, description="the stream is closed")
    async with gateway(scheduler.address, "g2") as second:
        assert (await second.attach("r1")).result == gateway_pb.AttachReply.RESULT_ATTACHED
        assert await scheduler.store.unfinished_ids() == ["r1"]


async def test_cancel_ends_a_running_request_and_frees_its_worker(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        await gpu.assigned("r1")
        cancel = gateway_pb.CancelRequested(cancel_id=5, request_id="r1", tenant="anonymous")
        await client.send(gateway_pb.GatewayMessage(cancel=cancel))

        assert (await client.next("cancel_reply")).cancelled
        _, end = await client.read("r1-client")
        assert end.kind == gateway_pb.RequestEnd.KIND_CANCELLED
        assert [entry.request_id for entry in (await gpu.next("drop")).requests] == ["r1"]

        await client.send(gateway_pb.GatewayMessage(cancel=cancel))
        again = await client.next("cancel_reply")
        assert (again.found, again.cancelled) == (True, False)
        stranger = gateway_pb.CancelRequested(cancel_id=6, request_id="r1", tenant="somebody else")
        await client.send(gateway_pb.GatewayMessage(cancel=stranger))
        assert not (await client.next("cancel_reply")).found


async def test_a_cancel_that_comes_together_with_the_end_is_told_that_it_came_too_late(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        lease_epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        loop = scheduler.leadership.loop
        assert loop is not None
        session_of = {type(session): session for session in scheduler.leadership.sessions}
        report = worker_pb.RoundReports(reports=[gpu.report("r1", lease_epoch, 0, [10], end=STOP)])
        cancel = gateway_pb.CancelRequested(cancel_id=5, request_id="r1", tenant="anonymous")
        # Without an await in between: one turn.
        loop.put(FromWorker(session_of[WorkerSession], worker_pb.WorkerMessage(reports=report)))
        loop.put(FromGateway(session_of[GatewaySession], gateway_pb.GatewayMessage(cancel=cancel)))

        reply = await client.next("cancel_reply")
        _, end = await client.read("r1-client")

        assert (reply.found, reply.cancelled) == (True, False)
        assert end.kind == STOP


async def test_a_loop_that_is_behind_catches_up_in_turns_of_bounded_size(
    scheduler: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes of one turn must be on the record within the store's timeout, however many there are."""
    loop = scheduler.leadership.loop
    assert loop is not None
    session = GatewaySession("g1")
    submitted: list[int] = []
    submit_all = scheduler.store.submit

    async def counted(requests: Sequence[NewRequest], *args: Any) -> list[SubmitResult]:
        results = await submit_all(requests, *args)
        submitted.append(
            len(requests)
        )  # not before: on a slow machine the lease may have to be renewed first
        return results

    monkeypatch.setattr(scheduler.store, "submit", counted)
    for number in range(2 * MAX_TURN + 1):  # without an await in between
        specification = gateway_pb.Specification(
            prompt_ids=[1], sampling=SamplingParams(max_tokens=1, top_p=1.0)
        )
        submit = gateway_pb.Submit(
            submission_id=number,
            request_id=f"r{number}",
            tenant="anonymous",
            specification=specification,
            attachment_id=f"a{number}",
        )
        loop.put(FromGateway(session, gateway_pb.GatewayMessage(submit=submit)))
    replies: list[gateway_pb.GatewayLinkReply] = []
    while len(replies) < 2 * MAX_TURN + 1:
        async with asyncio.timeout(15):
            await session.wake.wait()
        replies += [reply for reply in session.take() if reply.HasField("submit_reply")]

    accepted = [reply.submit_reply.accepted.request_id for reply in replies]
    assert accepted == [f"r{number}" for number in range(2 * MAX_TURN + 1)]
    assert submitted == [MAX_TURN, MAX_TURN, 1]


async def test_a_peer_that_a_busy_loop_does_not_read_does_not_count_as_silent(
    start: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = await start(silence_s=1.5)
    async with gateway(scheduler.address) as client, worker(scheduler.address, "held back") as held_back:
        await client.submit("r1", keep=True)
        lease = (await held_back.assigned("r1"))["r1"].lease_epoch
        monkeypatch.setattr("scheduler_svc.leader.loop.MAX_INBOX", -1)  # so that it is behind all the time
        await held_back.run_round("r1", lease, 0, [10])
        async with worker(scheduler.address, "silent") as silent:  # since a later time
            await silent.wait_ended()
        assert not held_back.ended

        monkeypatch.undo()
        await held_back.run_round("r1", lease, 1, [11], end=STOP)


async def test_a_request_without_a_client_is_cancelled_after_its_grace(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        await client.submit("r1", grace_ms=0)
        await client.detach("r1", "r1-client")

        await wait_until_async(lambda: _ended(scheduler, "r1"), description="r1 has ended")
        stored = await scheduler.store.read("r1")
        assert stored is not None
        assert stored.end is End.CANCELLED


async def test_a_detach_that_comes_together_with_its_submit_counts(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        for number in range(5):
            request_id = f"r{number}"
            submit = gateway_pb.Submit(
                submission_id=number,
                request_id=request_id,
                tenant="anonymous",
                specification=gateway_pb.Specification(
                    prompt_ids=[1], sampling=SamplingParams(max_tokens=8, top_p=1.0)
                ),
                attachment_id=f"{request_id}-client",
            )
            await client.send(gateway_pb.GatewayMessage(submit=submit))
            await client.detach(request_id, f"{request_id}-client")

        for number in range(5):
            await wait_until_async(
                lambda number=number: _ended(scheduler, f"r{number}"), description=f"r{number} has ended"
            )


async def test_a_gateway_that_leaves_right_after_submitting_leaves_nothing_behind(
    start: StartScheduler,
) -> None:
    scheduler = await start(reattach_grace_s=0.0)
    async with gateway(scheduler.address) as client:
        await client.submit("r1")
    await wait_until_async(lambda: _ended(scheduler, "r1"), description="r1 has ended")


async def test_a_kept_request_lives_without_a_client(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1", keep=True)
        await client.detach("r1", "r1-client")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10], end=STOP)

        assert (await client.attach("r1")).result == gateway_pb.AttachReply.RESULT_ATTACHED
        assert (await client.read("late"))[0] == [10]


async def test_a_late_detach_does_not_cut_off_a_client_that_resumed_elsewhere(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address, "g1") as old, gateway(scheduler.address, "g2") as new:
        await old.submit("r1", grace_ms=0)
        await new.attach("r1", attachment_id="resumed")
        await old.detach("r1", "r1-client")
        async with worker(scheduler.address) as gpu:
            epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
            await gpu.run_round("r1", epoch, 0, [10], end=STOP)

        tokens, end = await new.read("resumed")
        assert (tokens, end.kind) == ([10], STOP)


async def test_the_hard_deadline_ends_a_waiting_request(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        await client.submit("r1", deadline_in_ms=1)

        _, end = await client.read("r1-client")
        assert end.kind == gateway_pb.RequestEnd.KIND_DEADLINE


async def test_the_hard_deadline_ends_a_running_request_and_frees_its_worker(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1", deadline_in_ms=1500)
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10, 11])
        tokens, end = await client.read("r1-client")

        assert (tokens, end.kind) == ([10, 11], gateway_pb.RequestEnd.KIND_DEADLINE)
        dropped = await gpu.next("drop")
        assert [(one.request_id, one.lease_epoch) for one in dropped.requests] == [("r1", epoch)]


async def test_a_retry_with_the_key_of_a_request_that_its_deadline_ended_is_a_new_request(
    scheduler: SchedulerUnderTest,
) -> None:
    key = {"idempotency_key": "let go", "body_hash": b"a"}
    async with gateway(scheduler.address) as client:
        await client.submit("r1", deadline_in_ms=1, **key)
        assert (await client.read("r1-client"))[1].kind == gateway_pb.RequestEnd.KIND_DEADLINE
        retry = await client.submit("r2", submission_id=2, deadline_in_ms=60_000, **key)
        another = await client.submit("r3", submission_id=3, **key)

        assert (retry.accepted.request_id, retry.accepted.attached_to_existing) == ("r2", False)
        assert (another.accepted.request_id, another.accepted.attached_to_existing) == ("r2", True)


async def deadline_of(scheduler: SchedulerUnderTest, request_id: str) -> int | None:
    stored = await scheduler.store.read(request_id)
    assert stored is not None
    return stored.deadline_unix_ms


async def test_a_retry_that_attaches_brings_its_time_with_it_and_takes_none_away(
    start: StartScheduler,
) -> None:
    key = {"idempotency_key": "more time", "body_hash": b"a"}
    leader = await start()
    async with gateway(leader.address) as client:
        await client.submit("r1", deadline_in_ms=1_000, keep=True, **key)
        first = await deadline_of(leader, "r1")
        await client.submit("r2", submission_id=2, deadline_in_ms=600_000, **key)
        second = await deadline_of(leader, "r1")
        await client.submit("r3", submission_id=3, deadline_in_ms=100, **key)
        assert await deadline_of(leader, "r1") == second
        assert first is not None and second is not None and second > first + 500_000

        ends = value("laps_sd_scheduler_requests_ended_total", {"end": "deadline"})
        await client.submit("r4", submission_id=4, deadline_in_ms=1_001)
        assert (await client.read("r4-client"))[1].kind == gateway_pb.RequestEnd.KIND_DEADLINE
        assert value("laps_sd_scheduler_requests_ended_total", {"end": "deadline"}) == ends + 1, "r4 alone"

        await client.submit("r5", submission_id=5, **key)
        assert await deadline_of(leader, "r1") is None
        await client.submit("r6", submission_id=6, deadline_in_ms=1, **key)
        assert await deadline_of(leader, "r1") is None


@pytest.mark.parametrize("skew_s", [90.0, -90.0])
async def test_a_scheduler_with_a_wrong_clock_ends_nothing_earlier_or_later_when_it_takes_over(
    start: StartScheduler, skew_s: float
) -> None:
    leader = await start()
    async with gateway(leader.address) as client:
        await client.submit("later", deadline_in_ms=60_000, keep=True)
        await client.submit("soon", submission_id=2, deadline_in_ms=2_000, keep=True)
    await leader.crash()
    leader = await start(clock=lambda: steady_unix_clock() + skew_s)
    async with gateway(leader.address) as client:
        await client.attach("soon", attachment_id="soon")
        assert (await client.read("soon"))[1].kind == gateway_pb.RequestEnd.KIND_DEADLINE
        async with worker(leader.address) as gpu:
            epoch = (await gpu.assigned("later"))["later"].lease_epoch
            await gpu.run_round("later", epoch, 0, [10], end=STOP)

        stored = await leader.store.read("later")
        assert stored is not None
        assert (stored.end, stored.committed_ids) == (End.STOP, (10,))
        assert (stored.ended_unix_ms or 0) - stored.arrival_unix_ms < 60_000


async def test_a_deadline_that_has_passed_is_refused(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        reply = await client.submit("r1", deadline_in_ms=0)

        assert reply.refused.reason == Refused.REASON_EXPIRED


async def test_the_soft_limit_ends_with_what_exists(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1", time_limit_ms=300)
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10, 11])

        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([10, 11], gateway_pb.RequestEnd.KIND_TIME_LIMIT)


async def test_the_same_idempotency_key_attaches_and_another_body_is_refused(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address) as client:
        await client.submit("r1", idempotency_key="k", body_hash=b"a")
        same = await client.submit("r2", submission_id=2, idempotency_key="k", body_hash=b"a")
        other = await client.submit("r3", submission_id=3, idempotency_key="k", body_hash=b"b")

        assert (same.accepted.request_id, same.accepted.attached_to_existing) == ("r1", True)
        assert other.refused.reason == Refused.REASON_KEY_CONFLICT


@pytest.mark.parametrize(
    "limits", [{"max_requests": 1}, {"max_queued_tokens": 3}, {"max_requests_per_tenant": 1}]
)
async def test_a_known_idempotency_key_attaches_while_there_is_no_room(
    start: StartScheduler, limits: dict[str, int]
) -> None:
    scheduler = await start(**limits)
    key = str(limits)  # other tests' shards have claimed simpler ones
    async with gateway(scheduler.address) as client:
        await client.submit("r1", idempotency_key=key, body_hash=b"a")
        same = await client.submit("r2", submission_id=2, idempotency_key=key, body_hash=b"a")
        new = await client.submit("r3", submission_id=3, idempotency_key=f"new {key}", body_hash=b"a")

        assert (same.accepted.request_id, same.accepted.attached_to_existing) == ("r1", True)
        assert new.refused.reason in (Refused.REASON_QUEUE_FULL, Refused.REASON_TENANT_FULL)


async def test_a_submit_sent_twice_is_one_request(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        first = await client.submit("r1")
        second = await client.submit("r1", submission_id=2)

        assert first.accepted.request_id == second.accepted.request_id == "r1"
        assert len(scheduler.leadership.loop.working_copy.live) == 1  # type: ignore[union-attr]


async def test_an_ended_request_is_replayed_and_another_tenant_does_not_find_it(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10, 11], end=STOP)
        await client.read("r1-client")

        reply = await client.attach("r1", from_token=1, attachment_id="again", wants_submission=True)
        assert not reply.HasField("submission"), "nothing is to be restored"
        tokens, end = await client.read("again")
        assert (tokens, end.kind) == ([11], STOP)
        other = await client.attach("r1", tenant="somebody else", attachment_id="thief")
        assert other.result == gateway_pb.AttachReply.RESULT_NOT_FOUND


async def test_an_invalid_submission_is_refused_by_name(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client:
        reply = await client.submit("r1", max_tokens=0)

        assert reply.refused.reason == Refused.REASON_INVALID
        assert reply.refused.field == "specification.sampling.max_tokens"


async def test_what_no_worker_of_the_pool_could_hold_is_refused_and_does_not_wait_for_ever(
    start: StartScheduler,
) -> None:
    scheduler = await start(worker_grace_s=0.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, max_length=64) as gpu:
        await gpu.next("assignment")  # the core knows the worker
        too_long = await client.submit("r1", max_tokens=62)
        fitting = await client.submit("r2", submission_id=2, max_tokens=50)

        assert too_long.refused.reason == Refused.REASON_INVALID
        assert too_long.refused.detail == (
            "specification.sampling.max_tokens must be at most 61 after a prompt of 3 tokens in this shard, got 62"
        )
        assert fitting.accepted.request_id == "r2"

        too_long = await client.submit("r3", submission_id=3, prompt=range(64), max_tokens=1)
        assert too_long.refused.detail == (
            "specification.prompt_ids must have at most 63 tokens in this shard, got 64"
        )


async def test_a_new_leader_refuses_nothing_that_a_worker_can_hold_which_dials_it_later(
    start: StartScheduler,
) -> None:
    first = await start()
    async with gateway(first.address) as client, worker(first.address, "large", max_length=200) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await first.crash()
    second = await start(worker_grace_s=600.0)
    async with gateway(second.address) as client, worker(second.address, "small", max_length=64) as small:
        await small.next("assignment")  # the core knows the worker
        long = await client.submit("r2", prompt=(1,) * 100)
        assert long.accepted.request_id == "r2"
        held = worker_pb.HeldRequest(request_id="r1", lease_epoch=epoch)
        async with worker(second.address, "large", max_length=200, held=[held]) as gpu:
            assert "r2" in await gpu.assigned("r2")


async def test_a_known_idempotency_key_attaches_to_a_request_that_no_worker_could_hold_any_more(
    start: StartScheduler,
) -> None:
    scheduler = await start(worker_grace_s=0.0)
    loop = scheduler.leadership.loop
    assert loop is not None
    long: dict[str, Any] = {"prompt": (1,) * 100, "body_hash": b"a"}
    async with gateway(scheduler.address) as client:
        async with worker(scheduler.address, "large", max_length=200) as gpu:
            await gpu.next("assignment")  # the core knows the worker
            await client.submit("r1", idempotency_key="before it left", **long)
            epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
            await gpu.run_round("r1", epoch, 0, [10], end=STOP)
            await client.read("r1-client")
        async with worker(scheduler.address, "small", max_length=64):
            await wait_until_async(
                lambda: loop.core.capacity_tokens == 64, description="the large one has gone"
            )
            same = await client.submit("r2", submission_id=2, idempotency_key="before it left", **long)
            new = await client.submit("r3", submission_id=3, idempotency_key="after it left", **long)

        assert (same.accepted.request_id, (await client.read("r2-client"))[0]) == ("r1", [10])
        assert new.refused.reason == Refused.REASON_INVALID
        assert new.refused.field == "specification.prompt_ids"


async def test_with_each_heartbeat_gateways_learn_the_room_for_a_new_request(start: StartScheduler) -> None:
    scheduler = await start(max_context_tokens=100)
    await scheduler.wait_leading()
    loop = scheduler.leadership.loop
    assert loop is not None
    assert loop.load(gateways=1).capacity_tokens == 100, "any within the settings waits for a worker"
    for max_length, room in ((64, 64), (200, 100)):
        async with worker(scheduler.address, f"w{max_length}", max_length=max_length) as gpu:
            await gpu.next("assignment")  # the core knows the worker
            assert loop.load(gateways=1).capacity_tokens == room


async def test_with_each_heartbeat_gateways_learn_the_vocabulary_of_the_workers(
    scheduler: SchedulerUnderTest,
) -> None:
    loop = scheduler.leadership.loop
    assert loop is not None
    assert loop.load(gateways=1).vocabulary == b""
    async with worker(scheduler.address, vocabulary=b"12345678") as gpu:
        await gpu.next("assignment")  # the core knows the worker
        assert loop.load(gateways=1).vocabulary == b"12345678"


async def test_gateways_learn_how_long_the_lease_of_a_leader_lasts(start: StartScheduler) -> None:
    scheduler = await start(lease_s=0.75)
    async with gateway(scheduler.address) as client:
        assert (await client.next("hello")).lease_s == 0.75


async def test_gateways_learn_under_which_key_the_words_of_prompts_are_read(start: StartScheduler) -> None:
    digests: list[bytes] = []
    given: tuple[dict[str, Any], ...] = (
        {},
        {"length_key": "a secret"},
        {"length_key": "a secret", "predict_lengths": False},
    )
    for settings in given:
        scheduler = await start(**settings)
        async with gateway(scheduler.address) as client:
            digests.append((await client.next("hello")).length_key_digest)
        await scheduler.crash()

    assert digests == [key_digest(""), key_digest("a secret"), b""]


async def test_a_missing_specification_is_sent_again(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        await gpu.assigned("r1")
        gpu.heard.clear()
        missing = worker_pb.SpecificationsMissing(request_ids=["r1"])
        await gpu.send(worker_pb.WorkerMessage(missing=missing))

        again = await gpu.next("specifications")
        assert again.specifications[0].specification.request_id == "r1"


async def test_specifications_of_any_size_reach_a_worker(scheduler: SchedulerUnderTest) -> None:
    """Few tokens, but output formats that together are larger than any message may be."""
    grammar = 'start: "' + "x" * 60_000 + '"'
    names = [f"r{number}" for number in range(160)]
    async with gateway(scheduler.address) as client:
        for number, name in enumerate(names):
            specification = gateway_pb.Specification(
                request_id=name,
                prompt_ids=(1, 2),
                sampling=SamplingParams(max_tokens=8, top_p=1.0),
                output_format={"grammar": grammar},
            )
            submit = gateway_pb.Submit(
                submission_id=number,
                request_id=name,
                tenant="anonymous",
                specification=specification,
                attachment_id=name,
            )
            await client.send(gateway_pb.GatewayMessage(submit=submit))
        async with worker(scheduler.address, slots=len(names), target_blocks=10_000) as gpu:
            specifications = await gpu.assigned(*names)

            assert {one.specification.output_format.grammar for one in specifications.values()} == {grammar}


async def test_a_draining_worker_gets_no_new_work_and_is_told_when_it_may_leave(
    scheduler: SchedulerUnderTest,
) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await gpu.next("hello")
        await gpu.send(worker_pb.WorkerMessage(drain=worker_pb.DrainRequested()))
        await gpu.next("drained")
        await client.submit("r1")

        async with worker(scheduler.address, "w2") as other:
            await other.assigned("r1")
        assert not any(m.WhichOneof("message") == "assignment" and m.assignment.entries for m in gpu.heard)


@pytest.mark.parametrize(
    ("drains", "logged"),
    [(True, ["drained worker left"]), (False, ["worker stream ended", "worker lost"])],
    ids=["drained", "lost"],
)
async def test_a_worker_that_leaves_after_it_was_drained_is_logged_as_such(
    start: StartScheduler, drains: bool, logged: list[str]
) -> None:
    scheduler = await start(worker_grace_s=0.1)
    loop = scheduler.leadership.loop
    assert loop is not None
    with structlog.testing.capture_logs() as lines:
        async with worker(scheduler.address, draining=drains) as gpu:
            await gpu.next("drained" if drains else "assignment")
        await wait_until_async(lambda: not loop.roster.workers, description="its grace is over")

    assert [line["event"] for line in lines if line.get("worker_id")][1:] == logged, "after it came up"


async def test_a_worker_whose_stream_is_broken_is_ordered_to_leave_when_it_comes_back(
    scheduler: SchedulerUnderTest,
) -> None:
    assert scheduler.leadership.loop is not None
    async with worker(scheduler.address) as gpu:
        await gpu.next("assignment")  # the leader has taken it in
    session = scheduler.leadership.loop.roster.session
    await wait_until_async(lambda: session("w1") is None, description="the stream has ended")
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        await admin_pb2_grpc.AdminStub(channel).DrainWorker(admin_pb.DrainWorkerRequest(worker="w1"))

    async with worker(scheduler.address) as gpu:
        await gpu.next("drain")
    async with worker(scheduler.address, draining=True) as gpu:
        await gpu.next("drained")
        assert not any(message.WhichOneof("message") == "drain" for message in gpu.heard)


async def test_while_the_record_is_away_nothing_is_shown_and_afterwards_everything_goes_on(
    start: StartScheduler, valkey: EmbeddedServer
) -> None:
    scheduler = await start(lease_s=30.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        assert valkey.pid is not None
        os.kill(valkey.pid, signal.SIGSTOP)
        try:
            report = gpu.report("r1", epoch, 0, [10], end=STOP)
            await gpu.send_reports(report)
            loop = scheduler.leadership.loop
            assert loop is not None
            await wait_until_async(lambda: loop.outage.stuck, description="the scheduler has noticed")
            counted = value("laps_sd_scheduler_submissions_total", {"outcome": "refused"})
            refused = await client.submit("r2", submission_id=2)

            assert refused.refused.reason == Refused.REASON_STORE_UNAVAILABLE
            assert value("laps_sd_scheduler_submissions_total", {"outcome": "refused"}) == counted + 1
            assert not any(m.WhichOneof("message") == "deliveries" for m in client.heard)
        finally:
            os.kill(valkey.pid, signal.SIGCONT)
        tokens, _ = await client.read("r1-client")
        assert tokens == [10]


async def test_explain_tells_the_story_while_it_runs_and_after(scheduler: SchedulerUnderTest) -> None:
    async with (
        grpc.aio.insecure_channel(scheduler.address) as channel,
        gateway(scheduler.address) as client,
        worker(scheduler.address) as gpu,
    ):
        admin = admin_pb2_grpc.AdminStub(channel)
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10])
        running = await admin.ExplainRequest(
            admin_pb.AdminExplainRequest(request_id="r1", tenant="anonymous")
        )
        await gpu.run_round("r1", epoch, 1, [11], end=STOP)
        ended = await admin.ExplainRequest(admin_pb.AdminExplainRequest(request_id="r1", tenant="anonymous"))

        assert running.explanation.state == pb.Explanation.STATE_RUNNING
        assert running.explanation.ordered_by == "its turn in the order of arrival"
        assert not running.explanation.HasField("level")
        assert not running.explanation.HasField("perceptible")
        assert ended.explanation.state == pb.Explanation.STATE_ENDED
        assert ended.explanation.finish_reason == pb.FINISH_REASON_STOP
        assert ended.explanation.story[0].what == "arrived"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await admin.ExplainRequest(admin_pb.AdminExplainRequest(request_id="r1", tenant="other"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_queue_names_the_policy_and_what_each_place_rests_on(scheduler: SchedulerUnderTest) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel, gateway(scheduler.address) as client:
        await client.submit("r1")
        reply = await admin_pb2_grpc.AdminStub(channel).ListQueue(admin_pb.ListQueueRequest())

    (entry,) = reply.entries
    assert (reply.total, reply.policy) == (1, "fcfs")
    assert entry.ordered_by == "its turn in the order of arrival"
    assert not entry.HasField("level")
    assert not entry.HasField("perceptible")


async def test_an_operator_cancels_a_request_of_any_tenant(scheduler: SchedulerUnderTest) -> None:
    async with (
        grpc.aio.insecure_channel(scheduler.address) as channel,
        gateway(scheduler.address) as client,
        worker(scheduler.address) as gpu,
    ):
        admin = admin_pb2_grpc.AdminStub(channel)
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10])

        first = await admin.CancelRequest(admin_pb.CancelRequestRequest(request_id="r1"))
        tokens, end = await client.read("r1-client")
        again = await admin.CancelRequest(admin_pb.CancelRequestRequest(request_id="r1"))
        asked = admin_pb.AdminExplainRequest(request_id="r1")
        told = (await admin.ExplainRequest(asked)).explanation

    assert (tokens, end.kind) == ([10], gateway_pb.RequestEnd.KIND_CANCELLED)
    assert (first.already_ended, again.already_ended) == (False, True)
    assert told.finish_reason == pb.FINISH_REASON_CANCELLED
    assert told.basis == "cancelled by an operator"


@pytest.mark.parametrize(
    ("request_id", "code"),
    [
        ("unknown", grpc.StatusCode.NOT_FOUND),
        ("", grpc.StatusCode.INVALID_ARGUMENT),
        ("x" * 1000, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_request_that_is_not_there_cannot_be_cancelled(
    scheduler: SchedulerUnderTest, request_id: str, code: grpc.StatusCode
) -> None:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await admin.CancelRequest(admin_pb.CancelRequestRequest(request_id=request_id))

    assert error.value.code() is code


async def test_nothing_is_left_when_all_is_done(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", epoch, 0, [10], end=STOP)
        await client.read("r1-client")
        loop = scheduler.leadership.loop
        assert loop is not None
        assert not loop.working_copy.live
    await wait_until_async(
        lambda: not scheduler.leadership.sessions, description="the streams have been taken off the books"
    )
    await asyncio.sleep(0)
    keys = [
        key
        async for key in scheduler.store.transport.client.scan_iter(
            match=f"laps-sd:{{{scheduler.settings.shard}}}:*"
        )
    ]
    assert keys
    for key in keys:
        assert await scheduler.store.transport.client.pttl(key) > 0, f"{key} has no expiry"


async def _ended(scheduler: SchedulerUnderTest, request_id: str) -> bool:
    stored = await scheduler.store.read(request_id)
    return stored is not None and stored.end is not None


async def test_how_wrong_an_estimate_was_is_told_once_on_the_metrics_endpoint(
    scheduler: SchedulerUnderTest,
) -> None:
    """The request took 22 ms of its worker; the prediction at its arrival is in Explain."""
    counted = {"when": "arrival", "basis": "client"}

    def told() -> tuple[float, float, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        samples = {
            (s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples
        }
        count, total, covered = (
            samples.get((f"laps_sd_scheduler_{each}", frozenset(counted.items())), 0)
            for each in (
                "estimate_error_ratio_count",
                "estimate_error_ratio_sum",
                "estimates_covered_total",
            )
        )
        return count, total, covered

    endpoint = serve_metrics(0)
    try:
        count, total, covered = told()
        async with (
            gateway(scheduler.address) as client,
            worker(scheduler.address) as gpu,
            grpc.aio.insecure_channel(scheduler.address) as channel,
        ):
            await client.submit("r1", expected_output_tokens=3)
            epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
            asked = admin_pb.AdminExplainRequest(request_id="r1", tenant="anonymous")
            said = await admin_pb2_grpc.AdminStub(channel).ExplainRequest(asked)
            await gpu.run_round("r1", epoch, 0, [10, 11])
            await gpu.run_round("r1", epoch, 2, [12], end=STOP)
            shard = await admin_pb2_grpc.AdminStub(channel).GetShard(admin_pb.GetShardRequest())
        after, total_after, covered_after = told()
    finally:
        endpoint.close()
    assert after - count == 1
    assert total_after - total == pytest.approx(0.022 / said.explanation.remaining_s)
    explanation = said.explanation
    is_covered = explanation.remaining_low_s <= 0.022 <= explanation.remaining_high_s
    assert covered_after - covered == is_covered
    errors = {each.moment: each for each in shard.estimate_errors}
    assert (errors["arrival"].count, errors["arrival"].coverage) == (1, is_covered)
    # To the middle of one of 8 bins an octave.
    assert errors["arrival"].median_ratio == pytest.approx(0.022 / explanation.remaining_s, rel=0.05)
    assert errors["arrival"].p90_ratio == errors["arrival"].median_ratio
    assert "round_32" not in errors


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_queued_tokens": 6}])
async def test_with_each_heartbeat_gateways_learn_whether_a_new_request_would_be_accepted(
    start: StartScheduler, limits: dict[str, int]
) -> None:
    """Each prompt has 3 tokens. A new leader counts those that it finds."""
    scheduler = await start(**limits)

    def refuses() -> int | None:
        loop = scheduler.leadership.loop
        assert loop is not None
        load = loop.load(gateways=1)
        return load.refuses.reason if load.HasField("refuses") else None

    async with gateway(scheduler.address) as client:
        await client.submit("r1", submission_id=1, keep=True)
        assert refuses() is None
        await client.submit("r2", submission_id=2, keep=True)
        assert refuses() == Refused.REASON_QUEUE_FULL
        refused = await client.submit("r3", submission_id=3)
        assert refused.refused.reason == Refused.REASON_QUEUE_FULL
    await scheduler.crash()
    scheduler = await start(**limits)
    await scheduler.wait_leading()
    assert refuses() == Refused.REASON_QUEUE_FULL
    async with gateway(scheduler.address) as client:
        cancel = gateway_pb.CancelRequested(cancel_id=1, request_id="r1", tenant="anonymous")
        await client.send(gateway_pb.GatewayMessage(cancel=cancel))
        await client.wait_for(lambda m: m.WhichOneof("message") == "cancel_reply", "the answer")
        assert refuses() is None
        assert (await client.submit("r3", submission_id=4)).accepted.request_id == "r3"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_requests": 1}, Refused.REASON_QUEUE_FULL),
        ({"max_requests_per_tenant": 1}, Refused.REASON_TENANT_FULL),
    ],
)
async def test_requests_that_are_refused_together_are_advised_times_one_after_the_other(
    start: StartScheduler, limits: dict[str, int], reason: gateway_pb.SubmitRefused.Reason
) -> None:
    leader = await start(**limits)
    async with gateway(leader.address) as client:
        await client.submit("r0")
        refused = [
            (await client.submit(f"r{number}", submission_id=number)).refused for number in range(1, 40)
        ]

    assert {each.reason for each in refused} == {reason}
    advice_ms = [each.retry_after_ms for each in refused]
    assert advice_ms == sorted(advice_ms)
    assert advice_ms[-1] > 10 * advice_ms[0] > 0
    assert max(advice_ms) <= 60_000
