"""A gateway reports that it is ready exactly while a new request would be accepted, for any reason; and it
stays alive all the time.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import redis

from laps_sd.client import Client
from laps_sd.errors import LapsSdError, ResourceExhausted, Unavailable
from laps_sd.stack.local import LocalStack
from laps_sd.stack.readiness import is_serving
from tests.helpers import wait_until

LIMIT = 3
READY_NAMES = ("readiness", "", "laps_sd.v1.Inference")


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """Start a stack without a worker: accepted requests wait, and fill the queue."""
    environment = {
        "LAPS_SD_MAX_REQUESTS": str(LIMIT),
        "LAPS_SD_SCHEDULER_WAIT_S": "1",
        "LAPS_SD_LEASE_S": "1",
    }
    with LocalStack(workers=0, engine="fake", environment=environment) as running:
        yield running


def asked(stack: LocalStack, path: str) -> tuple[int, dict[str, object]]:
    """Return status and body of the gateway's HTTP server."""
    try:
        with urllib.request.urlopen(stack.http_url.removesuffix("/v1") + path, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def readiness(stack: LocalStack) -> set[bool]:
    """Return the readiness at HTTP and at each health name for it: one value where they agree."""
    by_grpc = {is_serving(stack.gateway_address, name) for name in READY_NAMES}
    return by_grpc | {asked(stack, "/health")[0] == 200}


def submit(stack: LocalStack) -> str:
    """Submit a request that stays, and return its id. Raises its refusal."""
    with Client(stack.gateway_address, retry_s=0) as client:
        events = client.stream("Once", seed=1, max_tokens=8, keep=True)
        return next(events).request_id


@contextlib.contextmanager
def queue_full(stack: LocalStack) -> Iterator[str]:
    accepted = [submit(stack) for _ in range(LIMIT)]
    yield "the queue of shard s0 is full"
    with Client(stack.gateway_address) as client:
        assert all(client.cancel(request_id) for request_id in accepted)


@contextlib.contextmanager
def record_frozen(stack: LocalStack) -> Iterator[str]:
    stack.pause("valkey")
    yield "the record of shard s0 cannot be written (slow)"
    stack.resume("valkey")


@contextlib.contextmanager
def record_full(stack: LocalStack) -> Iterator[str]:
    with redis.Redis.from_url(stack.redis_url) as server:
        server.config_set("maxmemory", "1")
        yield "the record of shard s0 cannot be written (full)"
        server.config_set("maxmemory", "0")


@contextlib.contextmanager
def nobody_leads(stack: LocalStack) -> Iterator[str]:
    stack.kill("scheduler")
    yield "no scheduler leads shard s0, or it cannot be reached"
    stack.restart("scheduler")


FAULTS: dict[Callable[[LocalStack], AbstractContextManager[str]], type[LapsSdError]] = {
    queue_full: ResourceExhausted,
    record_frozen: Unavailable,
    record_full: Unavailable,
    nobody_leads: Unavailable,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_ready_only_while_a_request_would_be_accepted(
    stack: LocalStack, fault: Callable[[LocalStack], AbstractContextManager[str]]
) -> None:
    wait_until(lambda: readiness(stack) == {True}, description="it is ready")
    with Client(stack.gateway_address) as client:
        client.cancel(submit(stack))  # and the report is true
    with fault(stack) as reason:
        wait_until(lambda: readiness(stack) == {False}, description="it is not ready")
        assert asked(stack, "/health") == (503, {"status": "not ready", "reason": reason})
        with pytest.raises(FAULTS[fault]):
            submit(stack)
        # Neither is a reason to kill the gateway, nor to refuse clients that resume, cancel or can be given a
        # time to retry.
        assert asked(stack, "/live") == (200, {"status": "live"})
        assert is_serving(stack.gateway_address, "liveness")
        assert is_serving(stack.gateway_address, "traffic")
    wait_until(lambda: readiness(stack) == {True}, description="it is ready again")
    with Client(stack.gateway_address, retry_s=20) as client:
        client.cancel(submit(stack))


def test_without_a_worker_it_is_ready_because_a_request_is_accepted_and_waits(stack: LocalStack) -> None:
    """A scaler that starts from zero counts waiting requests, so the request must be accepted."""
    wait_until(lambda: readiness(stack) == {True}, description="it is ready")
    assert asked(stack, "/health") == (200, {"status": "ready", "workers": 0})
    with Client(stack.gateway_address) as client:
        assert client.cancel(submit(stack))
