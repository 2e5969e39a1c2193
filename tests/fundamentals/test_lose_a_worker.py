"""The worker dies, and its requests continue elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from laps_sd.client import Accepted, Client, Delta, Ended
from laps_sd.stack.local import LocalStack
from laps_sd.v1.inference_pb2 import GenerateResponse
from tests.conftest import StackMaker


def test_requests_of_a_dead_worker_go_on_at_another_one(
    stack: LocalStack, calm: Callable[..., GenerateResponse]
) -> None:
    """The tokens that a client has received are on the record; the next worker starts from there. The client
    need not do anything.

    A worker whose connection broke may come back, so its requests wait for it a moment
    (`LAPS_SD_WORKER_GRACE_S`).
    """
    request_id, text, dead = "", "", ""
    with Client(stack.gateway_address) as client:
        for event in client.stream("A long story", seed=1, max_tokens=120):
            if isinstance(event, Accepted):
                request_id = event.request_id
            elif isinstance(event, Delta):
                text += event.text
                if not dead:
                    dead = client.explain(request_id).worker_id  # such as worker-1-0cccf3f9
                    stack.kill(dead.rpartition("-")[0])
        told = client.explain(request_id)

    assert text == calm("A long story", seed=1, max_tokens=120).text
    assert told.worker_id != dead
    assert [line.what for line in told.story].count("leased") == 2


def test_without_any_worker_requests_wait_for_one(make_stack: StackMaker) -> None:
    """A pool may be scaled to zero: requests are accepted and wait, as long as their deadline allows."""
    stack = make_stack(workers=0)
    with Client(stack.gateway_address) as client:
        events = client.stream("Once", max_tokens=8)
        assert isinstance(next(events), Accepted)

        stack.add_worker()
        *_, end = events

    assert isinstance(end, Ended)
    assert end.usage.completion_tokens == 8
