"""The end of a stream before its greeting: at a server that refuses the certificate, and at another one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc
import pytest

from laps_sd.service import wire
from laps_sd.service.leader_stream import STREAM_ERRORS, denial, next_reply
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import gateway_link_pb2_grpc

HELLO = link_pb2.GatewayMessage(hello=link_pb2.GatewayHello(gateway_id="g"))
REFUSAL = "this certificate may not act as gateway"
REFUSAL_TAKES_S = 0.05
"""More than a refusal needs on one machine."""
Connect: TypeAlias = Callable[[], Any]


class Refusing(gateway_link_pb2_grpc.GatewayLinkServicer):
    """Refuses before it reads."""

    def Connect(self, request_iterator: Iterator[Any], context: Any) -> None:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, REFUSAL)


class Failing(gateway_link_pb2_grpc.GatewayLinkServicer):
    """Fails after it has read."""

    def Connect(self, request_iterator: Iterator[Any], context: Any) -> None:
        next(request_iterator)
        context.abort(grpc.StatusCode.INTERNAL, "a fault of the server")


@pytest.fixture
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Begin streams to a server that has threads of its own."""
    server = grpc.server(ThreadPoolExecutor(4), options=wire.server_options())
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(request.param(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    async with wire.make_channel(f"127.0.0.1:{port}") as channel:
        assert await wire.reach(channel)
        yield gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect
    server.stop(None).wait()


async def ended(connect: Connect, *, busy_s: float) -> Any:
    """Return a stream that has ended before its greeting; the loop is busy for `busy_s` before it writes."""
    call = connect()
    with pytest.raises(STREAM_ERRORS):
        await call.wait_for_connection()
        time.sleep(busy_s)  # noqa: ASYNC251  the loop must not read the answer
        await call.write(HELLO)
        await next_reply(call)
    return call


@pytest.mark.parametrize("connect", [Refusing], indirect=True)
@pytest.mark.parametrize(("busy_s", "meets"), [(REFUSAL_TAKES_S, True), (0.0, False)])
async def test_a_refusal_is_found_whether_or_not_a_write_meets_it(
    connect: Connect, busy_s: float, meets: bool
) -> None:
    calls = []
    met = False
    # On a busy machine some refusals come later than the write.
    while len(calls) < (10 if meets else 100) or (meets and not met and len(calls) < 200):
        calls.append(await ended(connect, busy_s=busy_s))
        met = met or await calls[-1].code() is grpc.StatusCode.INTERNAL

    assert {await denial(call, connect) for call in calls} == {REFUSAL}
    assert met or not meets


@pytest.mark.parametrize("connect", [Failing], indirect=True)
async def test_another_failure_is_no_refusal(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stream waits for the server, and the server for a hello."""
    monkeypatch.setattr("laps_sd.service.leader_stream.REFUSAL_S", 0.05)
    call = await ended(connect, busy_s=0.0)
    assert await call.code() is grpc.StatusCode.INTERNAL
    assert await denial(call, connect) == ""
