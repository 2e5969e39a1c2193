"""Stop a request that is no longer needed."""

from __future__ import annotations

from laps_sd.client import Accepted, Client, Ended
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from tests.helpers import wait_until


def test_a_cancelled_request_ends_at_once_and_keeps_what_it_has(fake_stack: LocalStack) -> None:
    """The stream ends like any other, with a last message. Any client that knows the id may cancel: here
    another client."""
    with Client(fake_stack.gateway_address) as reader, Client(fake_stack.gateway_address) as other:
        events = reader.stream("Once", max_tokens=1900, ignore_eos=True)
        accepted = next(events)
        assert isinstance(accepted, Accepted)
        next(events)  # the first tokens

        assert other.cancel(accepted.request_id)
        *_, end = events

    assert isinstance(end, Ended)
    assert end.finish_reason == pb.FINISH_REASON_CANCELLED
    assert 0 < end.usage.completion_tokens < 1900


def test_cancelling_twice_changes_nothing(fake_stack: LocalStack) -> None:
    """A request has exactly one end; the reply shows whether this call was the one that ended it."""
    with Client(fake_stack.gateway_address) as client:
        request_id = client.generate("Once", max_tokens=4).accepted.request_id

        assert not client.cancel(request_id)


def test_a_stream_that_is_left_is_cancelled(fake_stack: LocalStack) -> None:
    """A client that stops reading need not cancel: the worker's slot is free again at the next round."""
    with Client(fake_stack.gateway_address) as client:
        request_id = ""
        for event in client.stream("Once", max_tokens=1900, ignore_eos=True):
            if isinstance(event, Accepted):
                request_id = event.request_id
            else:
                break

        ended = wait_until(
            lambda: (told := client.explain(request_id)).state == pb.Explanation.STATE_ENDED and told,
            description="the request has ended",
        )
    assert ended.finish_reason == pb.FINISH_REASON_CANCELLED
