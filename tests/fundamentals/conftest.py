"""A stack to break, and the same request on one where nothing goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack
from laps_sd.v1.inference_pb2 import GenerateResponse


@pytest.fixture(scope="session")
def mended_stack() -> Iterator[LocalStack]:
    # The grace is that of a worker whose stream broke: 2 s by default.
    environment = {"LAPS_SD_WORKER_GRACE_S": "0.3"}
    with LocalStack(engine="fake", workers=2, gateways=2, drain_s=20.0, environment=environment) as stack:
        yield stack


@pytest.fixture
def stack(mended_stack: LocalStack) -> Iterator[LocalStack]:
    """Return a stack: one scheduler, two workers, two gateways. A test may kill any process: it is started
    again after the test."""
    yield mended_stack
    for name, child in mended_stack.children.items():
        if not child.alive:
            mended_stack.restart(name)


@pytest.fixture
def calm(fake_stack: LocalStack) -> Iterator[Callable[..., GenerateResponse]]:
    """Return `calm(prompt, **options)`: the text without faults. The fake engine gives the same one on every
    stack."""
    with Client(fake_stack.gateway_address) as client:
        yield client.generate
