"""The scheduler dies, and the client sees a pause."""

from __future__ import annotations

from collections.abc import Callable

from laps_sd.client import Client, Delta
from laps_sd.stack.local import LocalStack
from laps_sd.stack.readiness import is_serving
from laps_sd.v1.inference_pb2 import GenerateResponse
from tests.conftest import StackMaker


def test_a_scheduler_that_comes_back_finds_everything_on_the_record(
    stack: LocalStack, calm: Callable[..., GenerateResponse]
) -> None:
    """During the pause the worker continues with the requests it has, and the gateway keeps the client's call
    open."""
    text, killed = "", False
    with Client(stack.gateway_address) as client:
        for event in client.stream("A long story", seed=1, max_tokens=120):
            if isinstance(event, Delta):
                text += event.text
                if not killed:
                    stack.kill("scheduler-0")
                    stack.restart("scheduler-0")
                    killed = True

    assert killed
    assert text == calm("A long story", seed=1, max_tokens=120).text


def test_a_standby_takes_over(make_stack: StackMaker, calm: Callable[..., GenerateResponse]) -> None:
    """One of the two schedulers of a shard leads and is ready; the other takes over when the leader's lease
    has expired."""
    stack = make_stack(schedulers=2, environment={"LAPS_SD_LEASE_S": "1"})
    [leader] = [name for name in ("scheduler-0", "scheduler-1") if is_serving(stack.address(name))]
    text, killed = "", False
    with Client(stack.gateway_address) as client:
        for event in client.stream("A long story", seed=1, max_tokens=120):
            if isinstance(event, Delta):
                text += event.text
                if not killed:
                    stack.kill(leader)
                    killed = True

    assert killed
    assert text == calm("A long story", seed=1, max_tokens=120).text
