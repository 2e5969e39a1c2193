"""Time limits of a request, and the errors for limits that are too large."""

from __future__ import annotations

import pytest

from laps_sd.client import Client
from laps_sd.errors import DeadlineExceeded, InvalidArgument
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb


def test_the_soft_limit_ends_a_request_with_what_exists_by_then(fake_stack: LocalStack) -> None:
    """`time_limit_s` is for clients that want the best answer available in that time."""
    with Client(fake_stack.gateway_address) as client:
        answer = client.generate("Once", max_tokens=1900, ignore_eos=True, time_limit_s=0.3)

    assert answer.end.finish_reason == pb.FINISH_REASON_TIME_LIMIT
    assert len(answer.token_ids) == answer.end.usage.completion_tokens < 1900


def test_the_hard_deadline_is_an_error_and_stops_the_work(fake_stack: LocalStack) -> None:
    """`timeout_s` is the deadline of the gRPC call: afterwards the answer is no longer wanted."""
    with Client(fake_stack.gateway_address) as client, pytest.raises(DeadlineExceeded):
        client.generate("Once", max_tokens=1900, ignore_eos=True, timeout_s=0.3)


def test_a_refusal_names_the_field_and_its_limit(fake_stack: LocalStack) -> None:
    """Nothing was accepted then, and the error names the change to make."""
    with Client(fake_stack.gateway_address) as client, pytest.raises(InvalidArgument) as refused:
        client.generate("Once", temperature=-1)

    [(field, sentence)] = refused.value.violations
    assert field == "sampling.temperature"
    assert "got -1" in sentence
