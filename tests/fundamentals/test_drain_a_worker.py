"""A worker leaves in good order: tokens keep flowing, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from laps_sd.client import Accepted, Client, Delta, Ended
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from laps_sd.v1.inference_pb2 import GenerateResponse
from tests.helpers import wait_until


def order_by_an_operator(stack: LocalStack, worker: str) -> None:
    """Drain the worker as `laps-sd drain` does."""
    with grpc.insecure_channel(stack.scheduler_address) as channel:
        admin_pb2_grpc.AdminStub(channel).DrainWorker(admin_pb2.DrainWorkerRequest(worker=worker))


def signal_of_the_system(stack: LocalStack, worker: str) -> None:
    """Send SIGTERM, as Kubernetes does to a pod that it scales away."""
    stack.terminate(worker)


@pytest.mark.parametrize("drain", [order_by_an_operator, signal_of_the_system])
def test_the_requests_of_a_draining_worker_move_while_they_run(
    stack: LocalStack, calm: Callable[..., GenerateResponse], drain: Callable[[LocalStack, str], None]
) -> None:
    """The worker takes no new work, hands its requests over between two rounds, and exits with code 0."""
    request_id, text, left = "", "", ""
    with Client(stack.gateway_address) as client:
        for event in client.stream("A long story", seed=1, max_tokens=120):
            match event:
                case Accepted():
                    request_id = event.request_id
                case Delta():
                    text += event.text
                    if not left:
                        left = client.explain(request_id).worker_id.rpartition("-")[0]  # worker-0 or worker-1
                        drain(stack, left)
                case Ended():
                    assert event.usage.completion_tokens == 120
        told = client.explain(request_id)

    assert text == calm("A long story", seed=1, max_tokens=120).text
    assert "requeued" in [line.what for line in told.story], "it was handed over, not brought to its end"
    assert not told.worker_id.startswith(left)
    wait_until(lambda: not stack.children[left].alive, description="the worker's process has ended")
    assert stack.children[left].returncode == 0
