"""The gateway dies during a stream, and the client continues at another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from laps_sd.client import Accepted, Client, Cursor, Delta, Ended
from laps_sd.errors import Unavailable
from laps_sd.stack.local import LocalStack
from laps_sd.v1.inference_pb2 import GenerateResponse


def test_a_client_that_knows_two_gateways_notices_only_a_pause(
    stack: LocalStack, calm: Callable[..., GenerateResponse]
) -> None:
    """The client attaches again at the next address, from the cursor of the last event it has seen."""
    text, killed = "", False
    with Client(stack.gateway_addresses) as client:
        for event in client.stream("A long story", seed=1, max_tokens=120):
            if isinstance(event, Delta):
                text += event.text
                if not killed:
                    stack.kill("gateway-0")
                    killed = True

    assert killed
    assert text == calm("A long story", seed=1, max_tokens=120).text


def test_any_gateway_goes_on_from_a_request_id_and_a_cursor(
    stack: LocalStack, calm: Callable[..., GenerateResponse]
) -> None:
    """These two values are all that a program has to keep to continue reading later, even from another
    machine.

    With an idempotency key of its own, the request waits for its client (30 s unless set otherwise).
    """
    first_gateway, second_gateway = stack.gateway_addresses
    request_id, cursor, tokens = "", Cursor(), []
    with Client(first_gateway, reconnect_s=0) as client, pytest.raises(Unavailable):
        for event in client.stream("A long story", seed=1, max_tokens=120, idempotency_key="story-1"):
            if isinstance(event, Accepted):
                request_id = event.request_id
            elif isinstance(event, Delta):
                tokens += event.token_ids
                cursor = event.cursor
                stack.kill("gateway-0")

    with Client(second_gateway) as client:
        *rest, end = client.resume(request_id, cursor)

    assert isinstance(end, Ended)
    tokens += [token for event in rest if isinstance(event, Delta) for token in event.token_ids]
    expected = calm("A long story", seed=1, max_tokens=120).token_ids
    assert tokens == expected, "nothing is missing and nothing came twice"
