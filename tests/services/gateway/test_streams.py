"""The registry of streams without a link: for any order of deliveries, each token comes out
once, in order.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.links.streams import ASK_AGAIN_S, LONGEST_MS, Streams
from laps_sd.errors import Unavailable
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2

LENGTH = 40
BUFFER = 7
TOKENS = [1000 + n for n in range(LENGTH)]


def in_columns(*deliveries: tuple[str, int, list[int]]) -> link_pb2.PlainDeliveries:
    """Return a message with these deliveries: attachment, position of the first token, token ids."""
    plain = link_pb2.PlainDeliveries()
    for attachment_id, first_token, token_ids in deliveries:
        plain.attachment_ids.append(attachment_id)
        plain.first_tokens.append(first_token)
        plain.token_counts.append(len(token_ids))
        plain.token_ids.extend(token_ids)
    return plain


class AnyDelivery(RuleBasedStateMachine):
    """A scheduler that repeats, skips, overlaps, omits answers and closes, and a client that reads at any
    time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.streams = Streams(buffer_tokens=BUFFER, restore_s=5)
        submit = link_pb2.Submit(
            request_id="s0.a", tenant="t", specification=link_pb2.Specification(prompt_ids=[1])
        )
        self.stream, message = self.streams.submit(submit, attachment_id="g/1", deadline=None, now=0)
        self.questions = [message]
        self.read: list[int] = []
        self.ended = False
        self._answer_submit(message.submit)

    def _answer_submit(self, submit: link_pb2.Submit) -> None:
        reply = link_pb2.SubmitReply(submission_id=submit.submission_id)
        reply.accepted.request_id = submit.request_id
        self.streams.on_submit_reply(reply, self.now)

    def _deliver(self, first: int, count: int, *, columns: bool = False) -> None:
        last = min(LENGTH, first + count)
        if columns and last < LENGTH:
            plain = in_columns(("g/0", 3, [5]), ("g/1", first, TOKENS[first:last]))
            self.questions += self.streams.on_plain_deliveries(plain, self.now)
            return
        delivery = link_pb2.Delivery(attachment_id="g/1", first_token=first, token_ids=TOKENS[first:last])
        if last == LENGTH:
            delivery.end.kind = link_pb2.RequestEnd.KIND_LENGTH
        self.questions += self.streams.on_delivery(delivery, self.now)

    @rule(first=st.integers(0, LENGTH), count=st.integers(0, 12), columns=st.booleans())
    def something_is_delivered(self, first: int, count: int, columns: bool) -> None:
        self._deliver(first, count, columns=columns)

    @rule(count=st.integers(1, 12), columns=st.booleans())
    def the_next_is_delivered(self, count: int, columns: bool) -> None:
        self._deliver(self.stream.next_token, count, columns=columns)

    @rule(wrong=st.sampled_from(["attachment_ids", "first_tokens", "token_counts", "token_ids"]))
    def columns_that_do_not_fit_together_are_delivered(self, wrong: str) -> None:
        first = self.stream.next_token
        plain = in_columns(("g/0", 3, [5]), ("g/1", first, TOKENS[first : first + 2]))
        del getattr(plain, wrong)[0]
        self.questions += self.streams.on_plain_deliveries(plain, self.now)

    @rule()
    def the_client_reads(self) -> None:
        batch, messages = self.streams.take(self.stream, self.now)
        self.questions += messages
        assert batch.first_token == len(self.read)
        self.read += batch.token_ids
        self.ended = self.ended or batch.end is not None

    @rule()
    def the_link_is_new(self) -> None:
        self.questions = self.streams.reconnected(self.now)

    @rule(passed=st.floats(0.1, 10))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.questions += self.streams.tick(self.now)

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def an_attach_is_answered(self, data: Any) -> None:
        question = self.questions.pop(data.draw(st.integers(0, len(self.questions) - 1)))
        if question.WhichOneof("message") == "attach":
            result = data.draw(
                st.sampled_from(
                    [link_pb2.AttachReply.RESULT_ATTACHED, link_pb2.AttachReply.RESULT_UNAVAILABLE]
                )
            )
            reply = link_pb2.AttachReply(attach_id=question.attach.attach_id, result=result)
            self.questions += self.streams.on_attach_reply(reply, self.now)
            if result == link_pb2.AttachReply.RESULT_ATTACHED:
                self._deliver(question.attach.from_token, data.draw(st.integers(0, LENGTH)))

    @invariant()
    def what_was_read_is_the_beginning_of_the_output(self) -> None:
        assert self.read == TOKENS[: len(self.read)]
        assert len(self.stream.waiting.token_ids) <= BUFFER
        assert self.stream.next_token == len(self.read) + len(self.stream.waiting.token_ids)
        assert not self.ended or len(self.read) == LENGTH

    def teardown(self) -> None:
        """A correct scheduler and a reading client reach the end from every state."""
        for _ in range(LENGTH + 10):
            self.the_link_is_new()
            for question in self.questions:
                if question.WhichOneof("message") == "attach":
                    reply = link_pb2.AttachReply(
                        attach_id=question.attach.attach_id, result=link_pb2.AttachReply.RESULT_ATTACHED
                    )
                    self.streams.on_attach_reply(reply, self.now)
                    self._deliver(question.attach.from_token, LENGTH)
            self.questions = []
            self.the_client_reads()
        assert self.read == TOKENS
        assert self.ended
        assert self.streams.close(self.stream) == []
        assert len(self.streams) == 0
        assert not self.streams._submissions
        assert not self.streams._attaches
        assert not self.streams._retries


TestAnyDelivery = AnyDelivery.TestCase
TestAnyDelivery.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def accepted_streams(**changes: Any) -> tuple[Streams, Any]:
    streams = Streams(buffer_tokens=10, restore_s=5, **changes)
    submit = link_pb2.Submit(
        request_id="s0.a",
        tenant="t",
        specification=link_pb2.Specification(sampling=inference_pb2.SamplingParams(seed=3)),
    )
    stream, message = streams.submit(submit, attachment_id="g/1", deadline=None, now=0)
    reply = link_pb2.SubmitReply(submission_id=message.submit.submission_id)
    reply.accepted.request_id = "s0.a"
    streams.on_submit_reply(reply, 0)
    return streams, stream


def test_an_attach_that_is_never_answered_is_sent_again() -> None:
    streams, stream = accepted_streams()
    (message,) = streams.reconnected(1.0)

    assert streams.tick(1.0 + ASK_AGAIN_S / 2) == []
    (again,) = streams.tick(1.0 + ASK_AGAIN_S)
    assert again.attach.attach_id != message.attach.attach_id
    assert again.attach.from_token == stream.next_token


def test_only_the_newest_attach_of_a_stream_counts() -> None:
    streams, stream = accepted_streams()
    (old,) = streams.reconnected(1.0)
    (new,) = streams.reconnected(2.0)
    not_found = link_pb2.AttachReply(
        attach_id=old.attach.attach_id, result=link_pb2.AttachReply.RESULT_NOT_FOUND
    )

    assert streams.on_attach_reply(not_found, 2.0) == []
    assert not stream.restoring
    assert stream.attach_id == new.attach.attach_id


def test_a_stream_that_is_over_asks_for_nothing() -> None:
    streams, stream = accepted_streams()
    end = link_pb2.RequestEnd(kind=link_pb2.RequestEnd.KIND_STOP)
    streams.on_delivery(link_pb2.Delivery(attachment_id="g/1", end=end), 1.0)

    assert streams.reconnected(2.0) == []
    assert streams.close(stream) == []


def test_a_paused_stream_is_attached_again_and_still_reads_at_its_own_pace() -> None:
    """A leader ends requests that no client is attached to, also if the client is only slow."""
    streams, stream = accepted_streams()
    streams.on_delivery(link_pb2.Delivery(attachment_id="g/1", token_ids=TOKENS), 1.0)

    (attach,) = streams.reconnected(2.0)
    assert (attach.attach.attachment_id, attach.attach.from_token) == ("g/1", 10)
    (again,) = streams.tick(2.0 + ASK_AGAIN_S)
    answer = link_pb2.AttachReply(
        attach_id=again.attach.attach_id, result=link_pb2.AttachReply.RESULT_ATTACHED
    )
    assert streams.on_attach_reply(answer, 8.0) == []
    rest = link_pb2.Delivery(attachment_id="g/1", first_token=10, token_ids=TOKENS[10:])
    assert streams.on_delivery(rest, 8.0) == []
    assert stream.paused
    batch, (attach,) = streams.take(stream, 9.0)

    assert (batch.token_ids, attach.attach.from_token) == (TOKENS[:10], 10)


def test_log_probabilities_stay_with_their_tokens_in_deliveries_that_overlap() -> None:
    streams, stream = accepted_streams()
    for first, last in ((0, 3), (1, 6), (4, 20)):  # the last one overflows the buffer
        logprobs = [inference_pb2.TokenLogprobs(logprob=-n) for n in range(first, last)]
        streams.on_delivery(
            link_pb2.Delivery(
                attachment_id="g/1", first_token=first, token_ids=TOKENS[first:last], logprobs=logprobs
            ),
            1.0,
        )
    batch, _ = streams.take(stream, 2.0)

    assert batch.token_ids == TOKENS[:10]
    assert [one.logprob for one in batch.logprobs] == [-n for n in range(10)]


def test_an_end_comes_with_tokens_that_fill_the_buffer_to_the_last_place() -> None:
    streams, stream = accepted_streams()
    end = link_pb2.RequestEnd(kind=link_pb2.RequestEnd.KIND_LENGTH)
    streams.on_delivery(link_pb2.Delivery(attachment_id="g/1", token_ids=TOKENS[:10], end=end), 1.0)
    batch, messages = streams.take(stream, 2.0)

    assert (batch.token_ids, batch.end, messages) == (TOKENS[:10], end, [])


def test_closing_twice_is_closing_once() -> None:
    streams, stream = accepted_streams()

    assert len(streams.close(stream)) == 1
    assert streams.close(stream) == []


def test_the_deadline_that_is_left_travels_with_every_submission() -> None:
    streams = Streams(buffer_tokens=10, restore_s=5)
    _, message = streams.submit(
        link_pb2.Submit(request_id="s0.a"), attachment_id="g/1", deadline=10.0, now=4.0
    )
    (again,) = streams.reconnected(7.0)
    (late,) = streams.reconnected(12.0)

    assert message.submit.deadline_in_ms == 6000
    assert again.submit.deadline_in_ms == 3000
    assert late.submit.deadline_in_ms == 1


def test_the_time_limit_of_a_restored_request_counts_from_its_first_acceptance() -> None:
    streams = Streams(buffer_tokens=10, restore_s=5)
    submit = link_pb2.Submit(request_id="s0.a", time_limit_ms=10_000)
    stream, message = streams.submit(submit, attachment_id="g/1", deadline=None, now=0)
    (before_acceptance,) = streams.reconnected(3.0)
    assert before_acceptance.submit.time_limit_ms == 10_000

    left = []
    for now in (4.0, 7.0, 60.0):
        answer = link_pb2.SubmitReply(submission_id=message.submit.submission_id)
        answer.accepted.request_id = "s0.a"
        streams.on_submit_reply(answer, now)
        (attach,) = streams.reconnected(now + 1.0)
        lost = link_pb2.AttachReply(
            attach_id=attach.attach.attach_id, result=link_pb2.AttachReply.RESULT_NOT_FOUND
        )
        (again,) = streams.on_attach_reply(lost, now + 2.0)
        left.append(again.submit.time_limit_ms)

    assert left == [8000, 5000, 1]
    assert stream.failure is None


def test_a_request_that_may_still_be_brought_back_is_submitted_again_by_who_holds_it_and_awaited_by_others() -> (
    None
):
    streams, holding = accepted_streams()
    resuming, _ = streams.attach("s0.b", tenant="t", attachment_id="g/2", now=0)
    (attach, _) = streams.reconnected(1.0)
    yet = link_pb2.AttachReply(result=link_pb2.AttachReply.RESULT_NOT_FOUND_YET)

    yet.attach_id = attach.attach.attach_id
    (again,) = streams.on_attach_reply(yet, 1.0)
    yet.attach_id = resuming.attach_id
    assert streams.on_attach_reply(yet, 1.0) == []

    assert again.submit.restores
    assert holding.restoring
    assert resuming.failure is None
    (retried,) = streams.tick(2.0)
    assert retried.attach.request_id == "s0.b"


def test_a_request_that_is_lost_a_second_time_is_awaited_as_long_as_at_the_first() -> None:
    streams = Streams(buffer_tokens=10, restore_s=5)
    stream, _ = streams.attach("s0.b", tenant="t", attachment_id="g/2", now=0)

    def is_found(found: bool, now: float) -> None:
        results = link_pb2.AttachReply.RESULT_NOT_FOUND, link_pb2.AttachReply.RESULT_ATTACHED
        reply = link_pb2.AttachReply(attach_id=stream.attach_id, result=results[found])
        assert streams.on_attach_reply(reply, now) == []

    is_found(True, 0.0)
    for lost_at in (10.0, 100.0):
        streams.reconnected(lost_at)
        is_found(False, lost_at)
        streams.tick(lost_at + 4.0)
        is_found(False, lost_at + 4.0)
        assert stream.failure is None
        streams.tick(lost_at + 4.5)
        is_found(True, lost_at + 4.5)


def test_a_stream_that_was_resumed_here_can_be_restored_here() -> None:
    streams = Streams(buffer_tokens=10, restore_s=5)
    stream, message = streams.attach("s0.b", tenant="t", attachment_id="g/2", now=0)
    assert message.attach.wants_submission
    reply = link_pb2.AttachReply(
        attach_id=message.attach.attach_id, result=link_pb2.AttachReply.RESULT_ATTACHED, seed=3
    )
    reply.submission.request_id = "s0.b"
    reply.submission.deadline_in_ms = 9000
    reply.submission.time_limit_ms = 8000
    reply.submission.length_features.extend([3, 300])
    reply.submission.prompt_blocks = b"a block!"
    reply.submission.specification.cache_salt = "acme"
    reply.submission.specification.prompt_ids.extend([1, 2])
    streams.on_attach_reply(reply, 1.0)
    streams.on_delivery(link_pb2.Delivery(attachment_id="g/2", first_token=0, token_ids=[7, 8]), 1.0)
    (attach,) = streams.reconnected(2.0)
    assert not attach.attach.wants_submission
    lost = link_pb2.AttachReply(
        attach_id=attach.attach.attach_id, result=link_pb2.AttachReply.RESULT_NOT_FOUND
    )

    (again,) = streams.on_attach_reply(lost, 4.0)

    submit = again.submit
    assert (submit.request_id, submit.attachment_id, submit.restores) == ("s0.b", "g/2", True)
    assert (list(submit.specification.prompt_ids), list(submit.shown_ids)) == ([1, 2], [7, 8])
    assert list(submit.length_features) == [3, 300]
    assert (submit.prompt_blocks, submit.specification.cache_salt) == (b"a block!", "acme")
    assert submit.specification.sampling.seed == 3
    assert (submit.deadline_in_ms, submit.time_limit_ms) == (6000, 5000)
    answer = link_pb2.SubmitReply(submission_id=submit.submission_id)
    answer.accepted.request_id = "s0.b"
    streams.on_submit_reply(answer, 4.0)
    assert not stream.restoring
    assert stream.failure is None


def test_what_a_scheduler_says_of_a_resumed_request_is_within_bounds() -> None:
    """A deadline is limited to the largest value of a message, and empty stop strings are left out."""
    streams = Streams(buffer_tokens=10, restore_s=5)
    stream, message = streams.attach("s0.b", tenant="t", attachment_id="g/2", now=0)
    reply = link_pb2.AttachReply(
        attach_id=message.attach.attach_id, result=link_pb2.AttachReply.RESULT_ATTACHED, stop=["", "x"]
    )
    reply.submission.request_id = "s0.b"
    reply.submission.deadline_in_ms = 2**64 - 1
    streams.on_attach_reply(reply, 1.0)
    (attach,) = streams.reconnected(2.0)
    lost = link_pb2.AttachReply(
        attach_id=attach.attach.attach_id, result=link_pb2.AttachReply.RESULT_NOT_FOUND
    )

    (again,) = streams.on_attach_reply(lost, 4.0)

    assert again.submit.deadline_in_ms == LONGEST_MS - 3000
    assert stream.acceptance is not None
    assert stream.acceptance.stop == ("x",)


def test_a_restored_request_whose_key_leads_elsewhere_is_lost_after_the_tokens_that_came() -> None:
    streams, stream = accepted_streams()
    streams.on_delivery(link_pb2.Delivery(attachment_id="g/1", token_ids=TOKENS[:2]), 1.0)
    (attach,) = streams.reconnected(1.0)
    not_found = link_pb2.AttachReply(
        attach_id=attach.attach.attach_id, result=link_pb2.AttachReply.RESULT_NOT_FOUND
    )
    (again,) = streams.on_attach_reply(not_found, 1.0)
    reply = link_pb2.SubmitReply(submission_id=again.submit.submission_id)
    reply.accepted.request_id = "s0.other"
    reply.accepted.attached_to_existing = True
    streams.on_submit_reply(reply, 1.0)

    batch, _ = streams.take(stream, 2.0)
    assert batch.token_ids == TOKENS[:2]
    assert stream.has_news, "its reader would wait for ever"
    with pytest.raises(Unavailable, match=r"'s0\.a' was lost"):
        streams.take(stream, 2.0)


class TestAClientThatLeavesBeforeTheAnswer:
    """The scheduler may get the Detach before there is an attachment, so the gateway sends it again."""

    def test_is_detached_from_the_request_that_its_key_led_to(self) -> None:
        streams = Streams(buffer_tokens=10, restore_s=5)
        stream, _ = streams.submit(
            link_pb2.Submit(request_id="s0.a"), attachment_id="g/1", deadline=None, now=0
        )
        (first,) = streams.close(stream)
        reply = link_pb2.SubmitReply(submission_id=1)
        reply.accepted.request_id = "s0.earlier"
        (second,) = streams.on_submit_reply(reply, 1.0)

        assert first.detach == link_pb2.Detach(request_id="s0.a", attachment_id="g/1")
        assert second.detach == link_pb2.Detach(request_id="s0.earlier", attachment_id="g/1")
        assert streams.on_submit_reply(reply, 1.0) == []

    def test_is_detached_once_its_attachment_was_made(self) -> None:
        streams = Streams(buffer_tokens=10, restore_s=5)
        stream, message = streams.attach("s0.a", tenant="t", attachment_id="g/1", now=0)
        streams.close(stream)
        reply = link_pb2.AttachReply(
            attach_id=message.attach.attach_id, result=link_pb2.AttachReply.RESULT_ATTACHED
        )
        (again,) = streams.on_attach_reply(reply, 1.0)

        assert again.detach == link_pb2.Detach(request_id="s0.a", attachment_id="g/1")

    def test_is_forgotten_when_nothing_was_made(self) -> None:
        streams = Streams(buffer_tokens=10, restore_s=5)
        submitting, _ = streams.submit(
            link_pb2.Submit(request_id="s0.a"), attachment_id="g/1", deadline=None, now=0
        )
        attaching, message = streams.attach("s0.b", tenant="t", attachment_id="g/2", now=0)
        streams.close(submitting)
        streams.close(attaching)
        refused = link_pb2.SubmitReply(submission_id=1, refused=link_pb2.SubmitRefused())
        not_found = link_pb2.AttachReply(
            attach_id=message.attach.attach_id, result=link_pb2.AttachReply.RESULT_NOT_FOUND
        )

        assert streams.on_submit_reply(refused, 1.0) == []
        assert streams.on_attach_reply(not_found, 1.0) == []
        assert not streams._left

    def test_a_new_link_knows_nothing_of_it(self) -> None:
        streams = Streams(buffer_tokens=10, restore_s=5)
        stream, _ = streams.submit(
            link_pb2.Submit(request_id="s0.a"), attachment_id="g/1", deadline=None, now=0
        )
        streams.close(stream)

        assert streams.reconnected(1.0) == []
        assert not streams._left
