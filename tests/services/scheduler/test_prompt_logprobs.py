"""Log probabilities of a prompt: a worker reports them with the first token, and every client that reads from there
gets them with it, once, whatever happens to workers and leaders.
"""

from __future__ import annotations

from typing import Any

import pytest

from laps_sd.contract.limits import RECORDED_LOGPROBS, RECORDED_PROMPT_LOGPROBS
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import PromptLogprobs
from scheduler_svc.leader.live import from_submission
from scheduler_svc.wire.requests import accepted
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import (
    GatewayPeer,
    SchedulerUnderTest,
    WorkerPeer,
    all_deliveries,
    gateway,
    worker,
)
from tests.store.kit import a_request

STOP = gateway_pb.RequestEnd.KIND_STOP
FOUND = PromptLogprobs(
    logprobs=[-1.5, -0.25],
    ranks=[7, 1],
    alternatives=1,
    alternative_ids=[9, 3],
    alternative_logprobs=[-0.5, -0.25],
)
"""Of a prompt of three tokens."""


def report(
    gpu: WorkerPeer, epoch: int, tokens: list[int], found: PromptLogprobs = FOUND, **more: Any
) -> worker_pb.RoundReport:
    made = gpu.report("r1", epoch, 0, tokens, **more)
    made.progress[0].prompt_logprobs.CopyFrom(found)
    return made


async def begin(client: GatewayPeer, gpu: WorkerPeer, top: int | None = 1) -> int:
    """Submit a request, and return the lease epoch under which the worker has it."""
    await client.submit("r1", prompt_logprobs=top)
    leased = (await gpu.assigned("r1"))["r1"]
    assert leased.specification.HasField("prompt_logprobs") == (top is not None)
    return leased.lease_epoch


async def deliveries(client: GatewayPeer, attachment_id: str = "r1-client") -> list[gateway_pb.Delivery]:
    """Return the next deliveries to an attachment."""
    message = await client.wait_for(
        lambda m: (
            m.WhichOneof("message") == "deliveries"
            and any(one.attachment_id == attachment_id for one in all_deliveries(m))
        ),
        f"deliveries to {attachment_id}",
    )
    return [one for one in all_deliveries(message) if one.attachment_id == attachment_id]


def found_in(delivery: gateway_pb.Delivery) -> PromptLogprobs | None:
    return delivery.prompt_logprobs if delivery.HasField("prompt_logprobs") else None


async def test_they_come_with_the_first_token_and_with_no_other(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        epoch = await begin(client, gpu)
        await gpu.send_reports(report(gpu, epoch, [10, 11]))
        [first] = await deliveries(client)
        await gpu.run_round("r1", epoch, 2, [12], end=STOP)
        [last] = await deliveries(client)

        assert (list(first.token_ids), found_in(first)) == ([10, 11], FOUND)
        assert (list(last.token_ids), found_in(last)) == ([12], None)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_request_may_end_with_its_first_token(scheduler: SchedulerUnderTest, version: int) -> None:
    async with (
        gateway(scheduler.address, protocol_versions=[version]) as client,
        worker(scheduler.address, protocol_versions=[version]) as gpu,
    ):
        epoch = await begin(client, gpu)
        await gpu.send_reports(report(gpu, epoch, [10], end=STOP))
        [only] = await deliveries(client)

        assert (list(only.token_ids), only.end.kind, found_in(only)) == ([10], STOP, FOUND)


async def test_a_report_that_is_offered_twice_brings_them_once(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        epoch = await begin(client, gpu)
        once = report(gpu, epoch, [10])
        await gpu.send_reports(once, once)
        await gpu.acknowledged(once.number)
        await gpu.run_round("r1", epoch, 1, [11], end=STOP)
        received = await deliveries(client)
        while not received[-1].HasField("end"):
            received += await deliveries(client)

        assert [found_in(one) for one in received if found_in(one) is not None] == [FOUND]
        assert found_in(received[0]) == FOUND


@pytest.mark.parametrize("ended", [False, True], ids=["unfinished", "ended"])
async def test_the_next_leader_has_them_from_the_record(start: StartScheduler, ended: bool) -> None:
    first = await start()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        epoch = await begin(client, gpu)
        made = report(gpu, epoch, [10, 11], end=STOP if ended else None)
        await gpu.send_reports(made)
        await gpu.acknowledged(made.number)
        await first.crash()
    second = await start()
    async with gateway(second.address) as client:
        await client.attach("r1", attachment_id="again")
        [whole] = await deliveries(client, "again")
        assert (list(whole.token_ids), found_in(whole)) == ([10, 11], FOUND)
        await client.attach("r1", from_token=1, attachment_id="later")
        [rest] = await deliveries(client, "later")
        assert (list(rest.token_ids), found_in(rest)) == ([11], None), "its client has them"


async def test_a_leader_that_is_lost_before_the_report_gets_it_again(start: StartScheduler) -> None:
    first = await start()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        epoch = await begin(client, gpu)
        await first.crash()
    second = await start()
    held = worker_pb.HeldRequest(request_id="r1", lease_epoch=epoch, emitted=1)
    async with gateway(second.address) as client, worker(second.address, held=[held]) as gpu:
        await client.attach("r1", attachment_id="again")
        await gpu.send_reports(report(gpu, epoch, [10]))
        [first_delivery] = await deliveries(client, "again")
        assert found_in(first_delivery) == FOUND


async def test_a_worker_that_takes_over_before_the_first_token_reports_them_itself(
    start: StartScheduler,
) -> None:
    scheduler = await start(worker_grace_s=0.1)
    async with gateway(scheduler.address) as client:
        async with worker(scheduler.address, "w1") as lost:
            old_epoch = await begin(client, lost)
        async with worker(scheduler.address, "w2") as gpu:
            epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
            stale = PromptLogprobs()
            stale.CopyFrom(FOUND)
            stale.ranks[0] = 99
            await gpu.send_reports(report(gpu, old_epoch, [66], stale), report(gpu, epoch, [10]))
            [first] = await deliveries(client)

    assert (list(first.token_ids), found_in(first)) == ([10], FOUND)


WRONG: dict[str, dict[str, Any]] = {
    "a row too few": {"logprobs": [-1.5]},
    "a rank too many": {"ranks": [1, 2, 3]},
    "more alternatives than wanted": {"alternatives": 2, "alternative_ids": [1, 2, 3, 4]},
    "alternatives that are missing": {"alternative_logprobs": []},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
async def test_what_does_not_fit_the_prompt_is_dropped_and_the_tokens_count(
    scheduler: SchedulerUnderTest, changes: dict[str, Any]
) -> None:
    """Their gateway ends the call with an error."""
    wrong = PromptLogprobs()
    wrong.CopyFrom(FOUND)
    for name, value in changes.items():
        wrong.ClearField(name)  # type: ignore[arg-type]
        wrong.MergeFrom(PromptLogprobs(**{name: value}))
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        epoch = await begin(client, gpu)
        await gpu.send_reports(report(gpu, epoch, [10], wrong, end=STOP))
        [only] = await deliveries(client)

        assert (list(only.token_ids), found_in(only)) == ([10], None)


async def test_a_worker_that_does_not_have_the_field_is_served_as_ever(scheduler: SchedulerUnderTest) -> None:
    """One of an earlier release. Its gateway ends the call with an error."""
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        epoch = await begin(client, gpu)
        await gpu.send_reports(gpu.report("r1", epoch, 0, [10], columns=True))
        await gpu.run_round("r1", epoch, 1, [11], end=STOP)
        tokens, end = await client.read("r1-client")

    assert (tokens, end.kind) == ([10, 11], STOP)


async def test_what_nobody_wanted_is_dropped(scheduler: SchedulerUnderTest) -> None:
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        epoch = await begin(client, gpu, top=None)
        await gpu.send_reports(report(gpu, epoch, [10], end=STOP))
        [only] = await deliveries(client)

        assert found_in(only) is None


@pytest.mark.parametrize(
    ("prompt", "top", "problem"),
    [
        ((1, 2), RECORDED_LOGPROBS + 1, f"must be at most {RECORDED_LOGPROBS}"),
        (
            (1,) * 5000,
            RECORDED_LOGPROBS,
            f"must make at most {RECORDED_PROMPT_LOGPROBS} log probabilities, got ",
        ),
    ],
    ids=["alternatives", "in all"],
)
async def test_more_than_the_record_keeps_is_refused(
    scheduler: SchedulerUnderTest, prompt: tuple[int, ...], top: int, problem: str
) -> None:
    async with gateway(scheduler.address) as client:
        reply = await client.submit("r1", prompt=prompt, prompt_logprobs=top)

    assert reply.refused.reason == gateway_pb.SubmitRefused.REASON_INVALID
    assert problem in reply.refused.detail


def test_they_are_written_again_under_another_lease_until_a_token_is_on_the_record() -> None:
    settings = gateway_pb.Specification(request_id="r1", prompt_logprobs=1)
    new = a_request("r1", prompt_ids=(5, 6, 7), submission=settings.SerializeToString())
    live = from_submission(new, accepted(new, 1))
    live.lease(1, "w1", now_s=1.0)
    assert live.record_prompt_logprobs(FOUND) == FOUND.SerializeToString()
    assert live.record_prompt_logprobs(FOUND) == b""

    live.lease(2, "w2", now_s=2.0)
    assert live.record_prompt_logprobs(FOUND) == FOUND.SerializeToString()
    live.append(0, (10,), now_s=3.0)
    live.lease(3, "w3", now_s=4.0)
    assert live.record_prompt_logprobs(FOUND) == b""
