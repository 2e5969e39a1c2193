"""Restrictions of an output, and the form of its text, survive the loss of a worker and of a gateway."""

from __future__ import annotations

from typing import Any

import pytest

from laps_sd.client import Accepted, Client, Delta, Ended
from laps_sd.errors import Unavailable
from laps_sd.stack.local import LocalStack
from laps_sd.v1.inference_pb2 import GenerateResponse
from tests.conftest import StackMaker

PROMPT = "A long story"


@pytest.fixture
def options(fake_stack: LocalStack) -> dict[str, Any]:
    """Return options that change the output of the fake engine in several places."""
    with Client(fake_stack.gateway_address) as client:
        plain = client.generate(PROMPT, seed=1, max_tokens=120).token_ids
    return {
        "seed": 1,
        "max_tokens": 120,
        "min_tokens": 90,
        "stop_token_ids": [plain[1], plain[30], plain[95]],
        "bad_words_ids": [[plain[20]], list(plain[40:42]), list(plain[60:63])],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


@pytest.fixture
def expected(fake_stack: LocalStack, options: dict[str, Any]) -> GenerateResponse:
    """Return the output where nothing goes wrong."""
    with Client(fake_stack.gateway_address) as client:
        answer = client.generate(PROMPT, **options)
    ids = list(answer.token_ids)
    assert len(ids) > 90
    assert not set(ids[:90]) & set(options["stop_token_ids"])
    assert options["bad_words_ids"][0][0] not in ids
    return answer


def test_another_worker_goes_on_under_the_same_restrictions(
    make_stack: StackMaker, options: dict[str, Any], expected: GenerateResponse
) -> None:
    stack = make_stack(workers=2, environment={"LAPS_SD_WORKER_GRACE_S": "0.3"})
    request_id, text, tokens, dead = "", "", [], ""
    with Client(stack.gateway_address) as client:
        for event in client.stream(PROMPT, **options):
            if isinstance(event, Accepted):
                request_id = event.request_id
            elif isinstance(event, Delta):
                text += event.text
                tokens += event.token_ids
                if not dead:
                    dead = client.explain(request_id).worker_id
                    stack.kill(dead.rpartition("-")[0])
        assert client.explain(request_id).worker_id != dead
    assert (tokens, text) == (list(expected.token_ids), expected.text)


def test_another_gateway_makes_the_same_text(
    make_stack: StackMaker, options: dict[str, Any], expected: GenerateResponse
) -> None:
    """It gets the parameters that decide how tokens become text from the scheduler."""
    stack = make_stack(workers=1, gateways=2)
    first, second = stack.gateway_addresses
    request_id = ""
    with Client(first, reconnect_s=0) as client, pytest.raises(Unavailable):
        for event in client.stream(PROMPT, **options, idempotency_key="story"):
            if isinstance(event, Accepted):
                request_id = event.request_id
            elif isinstance(event, Delta):
                stack.kill("gateway-0")
    with Client(second) as client:
        events = list(client.resume(request_id))
    assert "".join(event.text for event in events if isinstance(event, Delta)) == expected.text
    assert isinstance(events[-1], Ended)
    assert events[-1].finish_reason == expected.end.finish_reason
