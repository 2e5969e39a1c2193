"""The messages that a session has not yet sent to its peer, and the state that it releases."""

from __future__ import annotations

import pytest

from laps_sd.contract.ends import End
from laps_sd.service import wire
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import PromptLogprobs, TokenLogprob, TokenLogprobs
from scheduler_svc.leader.live import Attachment, Live, from_submission
from scheduler_svc.leader.sessions import MAX_ANSWERS, GatewaySession, WorkerSession
from scheduler_svc.wire.requests import accepted
from tests.services.scheduler.peers import all_deliveries
from tests.store.kit import a_request


def attached(session: GatewaySession, **settings: int) -> Live:
    specification = gateway_pb.Specification(request_id="r1", **settings)
    request = a_request("r1", body_hash="", submission=specification.SerializeToString())
    live = from_submission(request, accepted(request, 1))
    attachment = Attachment("a1", session, live, 0)
    live.attachments["a1"] = session.attachments["a1"] = attachment
    return live


def test_a_delivered_end_leaves_nothing_that_holds_the_request() -> None:
    """Request and attachment name each other: together they would live until Python looks for cycles."""
    session = GatewaySession("g1")
    live = attached(session)
    live.append(0, (10, 11), now_s=1.0)
    live.finish(End.STOP, "", 0, now_s=2.0)
    session.mark_dirty(live.attachments["a1"])

    [reply] = session.take()
    [delivery] = all_deliveries(reply)

    assert (list(delivery.token_ids), delivery.end.kind) == ([10, 11], gateway_pb.RequestEnd.KIND_STOP)
    assert (live.attachments, session.attachments) == ({}, {})


def test_tokens_without_an_end_keep_the_attachment() -> None:
    session = GatewaySession("g1")
    live = attached(session)
    for position, tokens in ((0, (10, 11)), (2, (12,))):
        live.append(position, tokens, now_s=1.0)
        session.mark_dirty(live.attachments["a1"])

        [reply] = session.take()
        [delivery] = all_deliveries(reply)

        assert (delivery.first_token, tuple(delivery.token_ids)) == (position, tokens)
        assert not delivery.HasField("end")
    assert session.take() == []
    assert list(session.attachments) == ["a1"]


@pytest.mark.parametrize(("version", "columns"), [(1, 0), (2, 1)])
def test_what_has_nothing_but_tokens_goes_in_columns_to_gateways_that_read_them(
    version: int, columns: int
) -> None:
    session = GatewaySession("g1", protocol_version=version)
    live = attached(session)
    live.append(0, (10, 11), now_s=1.0)
    session.mark_dirty(live.attachments["a1"])
    [tokens] = session.take()
    live.append(2, (12,), now_s=2.0)
    live.finish(End.STOP, "", 0, now_s=2.0)
    session.mark_dirty(live.attachments["a1"])
    [end] = session.take()

    assert len(tokens.deliveries.plain.attachment_ids) == columns
    assert len(tokens.deliveries.deliveries) == 1 - columns
    assert not end.deliveries.HasField("plain")
    told = [(d.attachment_id, d.first_token, list(d.token_ids)) for d in map(only, (tokens, end))]
    assert told == [("a1", 0, [10, 11]), ("a1", 2, [12])]


def only(reply: gateway_pb.GatewayLinkReply) -> gateway_pb.Delivery:
    [delivery] = all_deliveries(reply)
    return delivery


def test_a_peer_that_asks_and_does_not_listen_is_read_no_further_until_it_does() -> None:
    gateway, worker = GatewaySession("g1"), WorkerSession("w1", "w", "cpu")
    for number in range(MAX_ANSWERS):
        assert gateway.room.is_set() and worker.room.is_set()
        gateway.reply(gateway_pb.GatewayLinkReply())
        worker.drop(((f"r{number}", 1),))
    assert not gateway.room.is_set() and not worker.room.is_set()

    assert len(gateway.take()) == MAX_ANSWERS
    assert len(worker.take()[0].drop.requests) == MAX_ANSWERS
    assert gateway.room.is_set() and worker.room.is_set()


def test_deliveries_with_many_probabilities_are_cut_into_messages_that_a_gateway_takes() -> None:
    session = GatewaySession("g1")
    settings = gateway_pb.Specification(request_id="r1", logprobs=64)
    request = a_request("r1", max_tokens=20_000, submission=settings.SerializeToString())
    live = from_submission(request, accepted(request, 1))
    told = TokenLogprobs(
        logprob=-1.0, top=[TokenLogprob(token_id=100_000 + n, logprob=-n) for n in range(64)]
    )
    live.append(0, tuple(range(20_000)), now_s=1.0)
    live.record_logprobs(0, [told] * 20_000)
    live.finish(End.LENGTH, "", 0, now_s=2.0)
    attachment = Attachment("a1", session, live, 0)
    live.attachments["a1"] = session.attachments["a1"] = attachment
    session.mark_dirty(attachment)

    tokens: list[int] = []
    ends = 0
    while session.wake.is_set():
        for reply in session.take():
            assert reply.ByteSize() < wire.MAX_MESSAGE_BYTES / 4
            for delivery in all_deliveries(reply):
                assert (delivery.first_token, len(delivery.logprobs)) == (
                    len(tokens),
                    len(delivery.token_ids),
                )
                tokens += delivery.token_ids
                ends += delivery.HasField("end")
    assert (tokens, ends) == (list(range(20_000)), 1)


def test_kept_logprobs_are_no_part_of_the_message_of_the_worker() -> None:
    """That message may have the reports of a hundred other requests. A part of it would keep all of it in memory."""
    session = GatewaySession("g1")
    live = attached(session, logprobs=1, prompt_logprobs=0)
    report = worker_pb.RequestProgress(
        logprobs=[TokenLogprobs(logprob=-1.0, top=[TokenLogprob(token_id=7, logprob=-1.0)])],
        prompt_logprobs=PromptLogprobs(logprobs=[-2.0, -2.5], ranks=[3, 4]),
    )
    live.record_logprobs(0, report.logprobs)
    live.record_prompt_logprobs(report.prompt_logprobs)
    report.logprobs[0].logprob = -9.0
    report.prompt_logprobs.ranks[0] = 9
    live.append(0, (10, 11), now_s=1.0)
    session.mark_dirty(live.attachments["a1"])

    [reply] = session.take()
    [delivery] = all_deliveries(reply)

    kept = TokenLogprobs(logprob=-1.0, top=[TokenLogprob(token_id=7, logprob=-1.0)])
    assert list(delivery.logprobs) == [kept, TokenLogprobs(unknown=True)]
    assert delivery.prompt_logprobs == PromptLogprobs(logprobs=[-2.0, -2.5], ranks=[3, 4])


def test_an_order_to_drop_an_older_lease_leaves_the_newer_one() -> None:
    session = WorkerSession("w1", "w1", "none")
    session.specify(attached(GatewaySession("g1")), 2, now_s=1.0, incarnation="")
    session.drop((("r1", 1),))

    _, specified = session.take()
    assert [leased.lease_epoch for leased in specified.specifications.specifications] == [2]
    assert session.known == {"r1": 2}
    session.drop((("r1", 2),))
    session.drop((("r1", 1),))
    assert session.known == {}
    [dropped] = session.take()
    assert [(one.request_id, one.lease_epoch) for one in dropped.drop.requests] == [("r1", 2)]
