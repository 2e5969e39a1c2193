"""The server that all services share: errors, unreadable bytes, health, reflection, two-stage stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import uvloop
from google.rpc import error_details_pb2, status_pb2
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench._proxy import BOTH, Proxy
from laps_sd import errors
from laps_sd.service import interceptor, wire
from laps_sd.service.serving import ServiceApp, StartupError, TaskFailed
from laps_sd.service.serving_settings import ServingSettings
from laps_sd.service.wire import Tls, channel_options, make_channel
from laps_sd.stack.readiness import is_serving
from laps_sd.v1 import gateway_link_pb2, gateway_link_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.certificates import write_certificates
from tests.helpers import wait_until_async


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Return that of the loop that the services run on."""
    return uvloop.EventLoopPolicy()


class Beside:
    """Object with the lifetime of a handler's frame, and so of the request, which allows no weak
    reference."""


class Scripted(inference_pb2_grpc.InferenceServicer):
    """Servicer that acts as the model name demands."""

    def __init__(self) -> None:
        self.cleaned_up = asyncio.Event()
        self.calls: list[weakref.ref[Beside]] = []

    async def Generate(self, request, context):
        beside = Beside()
        self.calls.append(weakref.ref(beside))
        match request.model:
            case "invalid":
                raise errors.InvalidArgument("sampling.max_tokens", "must be at most 4096, got 9000")
            case "full":
                raise errors.ResourceExhausted("the queue is full", retry_after_s=2.5)
            case "bug":
                raise ZeroDivisionError("secret text of a prompt")
            case "own abort":
                await context.abort(grpc.StatusCode.DATA_LOSS, "the handler's own words")
            case "slow":
                await asyncio.sleep(0.5)
        return inference_pb2.GenerateResponse(text="done")

    async def GenerateStream(self, request, context):
        yield inference_pb2.GenerateEvent(delta=inference_pb2.Delta(text="a"))
        match request.model:
            case "missing":
                raise errors.NotFound("request s0.x is unknown")
            case "bug":
                raise ZeroDivisionError
            case "endless":
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cleaned_up.set()

    async def Resume(self, request, context):
        """Stream in the other style: a coroutine that writes."""
        await context.write(inference_pb2.GenerateEvent(delta=inference_pb2.Delta(text="b")))
        if request.request_id == "gone":
            raise cygrpc.ExecuteBatchError("execute_batch")
        raise errors.NotFound("request s0.y is unknown")


class Echo(gateway_link_pb2_grpc.GatewayLinkServicer):
    """Servicer that returns each heartbeat unchanged."""

    async def Connect(self, request_iterator, context):
        async for message in request_iterator:
            yield gateway_link_pb2.GatewayLinkReply(leader_epoch="1", heartbeat=message.heartbeat)


def settings(**overrides) -> ServingSettings:
    return ServingSettings(
        **{"grpc_host": "127.0.0.1", "grpc_port": 0, "metrics_port": None, "drain_s": 1.0} | overrides
    )


@contextlib.asynccontextmanager
async def running(
    authorize=None, **overrides
) -> AsyncIterator[tuple[ServiceApp, Scripted, grpc.aio.Channel]]:
    app = ServiceApp("test", settings(**overrides), authorize=authorize)
    scripted = Scripted()
    inference_pb2_grpc.add_InferenceServicer_to_server(scripted, app.server)
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(Echo(), app.server)
    app.names += ["laps_sd.v1.Inference", "laps_sd.v1.GatewayLink"]
    await app.start()
    try:
        async with make_channel(f"127.0.0.1:{app.port}") as channel:
            yield app, scripted, channel
    finally:
        await app.stop()


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")


@needs_ipv6
async def test_every_address_is_one_of_ipv6_and_of_ipv4():
    async with running(grpc_host="::", metrics_port=0, health_port=0) as (app, _, _):
        for host in ("127.0.0.1", "[::1]"):
            for port in (app.port, app.health_port):
                async with make_channel(f"{host}:{port}") as channel:
                    await health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(service="liveness")
                    )
            url = f"http://{host}:{app.metrics.port}/metrics"
            assert "python_info" in await asyncio.to_thread(
                lambda url=url: urllib.request.urlopen(url).read().decode()
            )


async def test_this_machine_is_dialled_directly_whatever_proxy_the_environment_names(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with running() as (app, _, channel):
        app.set_ready(True)
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert await asyncio.to_thread(is_serving, f"127.0.0.1:{app.port}", "liveness")
    for address in ("localhost:1", "127.8.8.8:1", "[::1]:1"):
        assert ("grpc.enable_http_proxy", 0) in channel_options(address)
    for address in ("models.example.com:443", "10.0.0.1:50051", "[fd00::1]:50051"):
        assert "grpc.enable_http_proxy" not in dict(channel_options(address))


async def test_without_ipv6_every_address_is_one_of_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    async with running(grpc_host="::", metrics_port=0) as (_, _, channel):
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))

    assert settings(grpc_host="::").listen_host == "0.0.0.0"
    assert settings(grpc_host="::1").listen_host == "::1"


async def test_a_stream_whose_peer_fell_silent_is_told_so(monkeypatch):
    """A call fails within the timeout of a ping, from either side. gRPC's own pings by default wait a minute
    for their reply, and by then a request has lost its client.
    """
    assert wire.KEEPALIVE_MS + wire.KEEPALIVE_TIMEOUT_MS <= 30_000
    monkeypatch.setattr(wire, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(wire, "KEEPALIVE_TIMEOUT_MS", 200)
    async with running() as (app, _, _):
        proxy = Proxy(f"127.0.0.1:{app.port}")
        await proxy.serve()
        async with make_channel(proxy.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(
                inference_pb2.GenerateRequest(model="endless")
            )
            assert await call.read() is not grpc.aio.EOF
            proxy.hold(os.getpid(), BOTH)
            async with asyncio.timeout(45):
                status = await call.code()
        await proxy.close()

    assert status is grpc.StatusCode.UNAVAILABLE


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_an_error_of_ours_becomes_its_status_with_details():
    async with running() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)

        error = await failure(stub.Generate(inference_pb2.GenerateRequest(model="invalid")))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "sampling.max_tokens must be at most 4096, got 9000"
        packed = status_pb2.Status.FromString(dict(error.trailing_metadata())[errors.DETAILS_KEY]).details[0]
        detail = error_details_pb2.BadRequest()
        assert packed.Unpack(detail)
        assert [v.field for v in detail.field_violations] == ["sampling.max_tokens"]


async def test_a_full_queue_says_when_to_come_again():
    async with running() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)

        error = await failure(stub.Generate(inference_pb2.GenerateRequest(model="full")))

        assert errors.retry_after_s(error) == 2.5
        assert errors.describe(error) == "RESOURCE_EXHAUSTED: the queue is full (try again in 2.5 s)"


async def test_a_bug_is_internal_and_tells_nothing_of_its_cause():
    async with running() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)

        error = await failure(stub.Generate(inference_pb2.GenerateRequest(model="bug")))

        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()


async def test_a_write_to_a_call_that_has_just_ended_is_no_error_of_the_server(capfd):
    """A race in gRPC: the write fails before the handler is notified that its client has gone."""
    async with running() as (_, _, channel):
        call = inference_pb2_grpc.InferenceStub(channel).Resume(
            inference_pb2.ResumeRequest(request_id="gone")
        )

        assert (await call.read()).delta.text == "b"
        error = await failure(call.read())

        assert error.code() is grpc.StatusCode.CANCELLED
    printed = capfd.readouterr()
    assert "call failed" not in printed.out + printed.err


async def test_an_error_told_to_a_call_that_has_just_ended_is_no_error_of_the_server():
    """The same race, where the handler's error meets the client's deadline."""

    class Gone:
        async def abort(self, code, details="", trailing_metadata=()):
            raise cygrpc.ExecuteBatchError("execute_batch")

    with pytest.raises(asyncio.CancelledError):
        await interceptor._abort(
            Gone(), interceptor._failure_of(errors.DeadlineExceeded("the client's deadline passed"), "M")
        )


@pytest.mark.parametrize(
    ("error", "told"), [(cygrpc.ExecuteBatchError("execute_batch"), False), (ZeroDivisionError(), True)]
)
async def test_a_reply_to_a_call_that_has_just_ended_is_no_error_of_the_server(error, told, caplog):
    """The same race, after the handler has returned: gRPC sends the reply itself, and logs the error."""
    async with running():
        cygrpc._LOGGER.error("raised in core by servicer method", exc_info=error)

    assert bool(caplog.records) is told


async def test_a_handlers_own_abort_passes():
    async with running() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)

        error = await failure(stub.Generate(inference_pb2.GenerateRequest(model="own abort")))

        assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "the handler's own words")


@pytest.mark.parametrize(
    ("method", "model", "code"),
    [
        ("GenerateStream", "missing", grpc.StatusCode.NOT_FOUND),
        ("GenerateStream", "bug", grpc.StatusCode.INTERNAL),
        ("Resume", "", grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_a_stream_delivers_what_it_had_and_then_its_error(method, model, code):
    async with running() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = (
            inference_pb2.ResumeRequest()
            if method == "Resume"
            else inference_pb2.GenerateRequest(model=model)
        )
        received = []

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in getattr(stub, method)(request):
                received.append(event)

        assert len(received) == 1
        assert caught.value.code() is code


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(kind):
    method = {
        "unary_unary": "/laps_sd.v1.Inference/Generate",
        "unary_stream": "/laps_sd.v1.Inference/GenerateStream",
        "stream_stream": "/laps_sd.v1.GatewayLink/Connect",
    }[kind]
    async with running() as (_, _, channel):
        raw = getattr(channel, kind)(method)  # no serializer: bytes go out as they are

        async def garbage():
            yield b"\xff\xff\xff"

        call = raw(garbage() if kind == "stream_stream" else b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if kind == "unary_unary":
                await call
            else:
                async for _ in call:
                    pass

        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented():
    async with running() as (_, _, channel):
        error = await failure(channel.unary_unary("/laps_sd.v1.Inference/Nonsense")(b""))

        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def known_only(method, context):
    if ("key", "right") not in context.invocation_metadata():
        raise errors.Unauthenticated("a key is needed")


async def test_only_health_is_answered_without_identity():
    async with running(authorize=known_only) as (_, _, channel):
        assert await check(channel, "liveness") == health_pb2.HealthCheckResponse.SERVING
        # Without a request: a client that writes while it is refused may see INTERNAL instead.
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        assert (await failure(call.read())).code() is grpc.StatusCode.UNAUTHENTICATED
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([listing]), metadata=(("key", "right"),)
        )
        assert (await call.read()).list_services_response.service


async def test_what_is_asked_without_identity_is_small():
    async with running(authorize=known_only) as (_, _, channel):
        name = "s" * interceptor.MAX_OPEN_MESSAGE_BYTES

        error = await failure(check(channel, name))

        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"message must be at most {len(name)} bytes" in error.details()


async def test_few_messages_without_identity_are_received_at_once():
    """Calls that send no message keep no other from its reply."""
    most = interceptor.MAX_OPEN_READS
    async with running(authorize=known_only) as (app, _, channel):
        silent = []
        for _ in range(most):
            silent.append(channel.stream_unary("/grpc.health.v1.Health/Check")())
            await wait_until_async(
                lambda: len(app.guard._open_reads) == len(silent), description="the call waits for a message"
            )

        assert await check(channel, "liveness") == health_pb2.HealthCheckResponse.SERVING
        error = await failure(silent[0])
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert errors.retry_after_s(error) == 1.0
        await wait_until_async(lambda: len(app.guard._open_reads) == most - 1, description="the others wait")
        assert not any(call.done() for call in silent[1:])

        more = [channel.stream_unary("/grpc.health.v1.Health/Check")() for _ in range(2 * most)]
        await asyncio.gather(*(call.code() for call in silent[1:]))
        await wait_until_async(lambda: len(app.guard._open_reads) == most, description="no more wait")
        for call in more:
            call.cancel()
        await wait_until_async(lambda: not app.guard._open_reads, description="all have gone")


async def test_a_request_that_was_refused_is_not_kept():
    """gRPC's objects of an aborted call are freed by Python's collector only, which runs rarely."""
    async with running() as (_, scripted, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        gc.collect()
        gc.disable()
        try:
            for model in ("invalid", "full", "invalid"):
                await failure(stub.Generate(inference_pb2.GenerateRequest(model=model)))
            await wait_until_async(
                lambda: [call() for call in scripted.calls] == [None] * 3,
                description="no request is left",
            )
        finally:
            gc.enable()


async def test_a_client_that_leaves_runs_the_handlers_clean_up():
    async with running() as (app, scripted, channel):
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(
            inference_pb2.GenerateRequest(model="endless")
        )
        await call.read()
        assert app.guard.active == 1

        call.cancel()

        await asyncio.wait_for(scripted.cleaned_up.wait(), 5)
        await asyncio.wait_for(app.guard.wait_idle(), 5)


async def test_calls_that_come_together_are_all_served():
    async with running() as (_, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(inference_pb2.GenerateRequest(model="ok")) for _ in range(4000)]
        replies = await asyncio.gather(*calls)
        assert {reply.text for reply in replies} == {"done"}


async def test_a_bidirectional_stream_flows():
    async with running() as (_, _, channel):
        call = gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect()
        for number in (1, 2):
            await call.write(
                gateway_link_pb2.GatewayMessage(heartbeat=gateway_link_pb2.Heartbeat(sent_ms=number))
            )
            assert (await call.read()).heartbeat.sent_ms == number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def check(channel, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_health_follows_readiness_and_liveness_does_not():
    async with running() as (app, _, channel):
        names = ["", "readiness", "laps_sd.v1.Inference"]
        assert [await check(channel, name) for name in names] == [
            health_pb2.HealthCheckResponse.NOT_SERVING
        ] * 3
        assert await check(channel, "liveness") == health_pb2.HealthCheckResponse.SERVING

        app.set_ready(True)

        for name in names:
            await wait_until_async(
                lambda name=name: _is_serving(channel, name), description=f"health of {name!r} is SERVING"
            )


async def _is_serving(channel, name):
    return await check(channel, name) == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services():
    async with running() as (_, _, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        call.cancel()

        names = {service.name for service in reply.list_services_response.service}
        assert {"laps_sd.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_a_stop_lets_calls_end():
    async with running(drain_s=5.0) as (app, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(model="slow"))
        await wait_until_async(lambda: app.guard.active == 1, description="the call is in progress")

        await app.stop()

        assert (await call).text == "done"


async def test_a_stop_cuts_off_what_does_not_end_and_is_not_held_up_by_a_health_watch():
    async with running(drain_s=0.3) as (app, scripted, channel):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(
            inference_pb2.GenerateRequest(model="endless")
        )
        await call.read()

        await app.stop()

        assert scripted.cleaned_up.is_set()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call.read()


async def test_watches_of_health_are_limited_in_number_and_checks_are_not(monkeypatch):
    monkeypatch.setitem(interceptor.ENDLESS, "/grpc.health.v1.Health/Watch", 3)
    async with running() as (_, _, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "3 calls of this method" in refused.value.details()
        assert await check(channel, "liveness") == health_pb2.HealthCheckResponse.SERVING

        watches[0].cancel()

        async def watched() -> bool:
            try:
                return bool(await stub.Watch(health_pb2.HealthCheckRequest()).read())
            except grpc.aio.AioRpcError:
                return False

        await wait_until_async(watched, description="a watch in place of the one that ended")


async def test_few_calls_of_reflection_are_open_at_once():
    """150 of them, with messages of 4 MiB without their last byte, took 610 MiB."""
    most = interceptor.ENDLESS["/grpc.reflection."]
    async with running() as (app, _, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        held = [stub.ServerReflectionInfo() for _ in range(most)]
        await wait_until_async(
            lambda: app.guard._endless["/grpc.reflection."] == most, description="all have begun"
        )
        assert await stub.ServerReflectionInfo().code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check(channel, "liveness") == health_pb2.HealthCheckResponse.SERVING

        await held[0].done_writing()
        assert await held[0].code() is grpc.StatusCode.OK
        another = stub.ServerReflectionInfo()
        await another.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await another.read()).list_services_response.service


async def test_the_drain_of_a_service_runs_while_calls_are_still_taken():
    async with running(drain_s=5.0) as (app, _, channel):
        stub = inference_pb2_grpc.InferenceStub(channel)
        seen = []

        async def drain():
            assert await check(channel, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            seen.append((await stub.Generate(inference_pb2.GenerateRequest())).text)

        await app.stop(drain)

        assert seen == ["done"]


async def test_a_task_that_fails_ends_the_service():
    async with running() as (app, _, _):

        async def breaks():
            raise ValueError("broken")

        app.spawn(breaks(), name="pump")

        with pytest.raises(TaskFailed, match="The task 'pump' ended: ValueError"):
            await app.run()


async def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = ServiceApp("test", settings(grpc_port=port))

        with pytest.raises(StartupError, match=f"The gRPC port {port} on 127.0.0.1 cannot be opened"):
            await app.start()
        await app.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    return write_certificates(tmp_path_factory.mktemp("tls"))


async def test_with_a_client_ca_only_callers_with_a_certificate_get_in(certificates):
    ca, cert, key = (certificates / name for name in ("ca.pem", "cert.pem", "key.pem"))
    async with running(tls_cert=cert, tls_key=key, tls_client_ca=ca) as (app, _, _):
        address = f"127.0.0.1:{app.port}"
        async with make_channel(address, Tls(ca=ca, cert=cert, key=key)) as known:
            assert (
                await inference_pb2_grpc.InferenceStub(known).Generate(inference_pb2.GenerateRequest())
            ).text == "done"
        async with make_channel(address, Tls(ca=ca)) as stranger:
            error = await failure(
                inference_pb2_grpc.InferenceStub(stranger).Generate(inference_pb2.GenerateRequest())
            )
            assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_that_sends_nothing_is_ended(certificates, monkeypatch, tls):
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_MS", 200)
    files = {"tls_cert": certificates / "cert.pem", "tls_key": certificates / "key.pem"} if tls else {}
    async with running(**files) as (app, _, _), asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        await reader.read()
        writer.close()


async def test_health_alone_is_answered_in_plain_text_beside_tls(certificates):
    """Kubernetes' gRPC probes speak no TLS and show no certificate."""
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    async with running(tls_cert=cert, tls_key=key, tls_client_ca=certificates / "ca.pem", health_port=0) as (
        app,
        _,
        _,
    ):
        assert app.health_port not in (0, app.port)
        async with make_channel(f"127.0.0.1:{app.health_port}") as probe:
            assert await check(probe, "liveness") == health_pb2.HealthCheckResponse.SERVING
            assert await check(probe, "readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
            error = await failure(
                inference_pb2_grpc.InferenceStub(probe).Generate(inference_pb2.GenerateRequest())
            )
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_health_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = ServiceApp("test", settings(health_port=port))

        with pytest.raises(StartupError, match=f"The health port {port} .* LAPS_SD_HEALTH_PORT"):
            await app.start()
        await app.stop()


async def test_a_tls_file_that_is_missing_is_one_sentence(tmp_path):
    app = ServiceApp("test", settings(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"))

    with pytest.raises(
        StartupError, match=r"The TLS files .*cert.pem and .*key.pem cannot be used: .*cert.pem: No such file"
    ):
        await app.start()
    await app.stop()


PROGRAM = """
import asyncio
from laps_sd.service.serving import *
from laps_sd.service.serving_settings import ServingSettings

async def serve(settings):
    app = ServiceApp("test", settings)
    await app.start()
    print(app.port, flush=True)
    async def drain():
        print("draining", flush=True)
        await asyncio.sleep(30 if settings.drain_s > 5 else 0)
    app.set_ready(True)
    await app.run(drain)

main("test", ServingSettings, serve)
"""


def start(**variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "LAPS_SD_GRPC_HOST": "127.0.0.1",
        "LAPS_SD_GRPC_PORT": "0",
        "LAPS_SD_METRICS_PORT": "",
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_and_the_process_ends_well(number):
    with start(LAPS_SD_DRAIN_S="1") as process:
        assert process.stdout.readline().strip().isdigit()
        process.send_signal(number)
        assert process.stdout.readline() == "draining\n"
        assert process.wait(10) == 0


def run_with(folder: Path, *command: str) -> tuple[int, str, str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, [folder, root, root / "k8s/operator"]))
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "program", ["gateway", "scheduler_svc", "scheduler_svc.dump", "worker_svc", "laps_sd_operator"]
)
def test_ctrl_c_while_a_program_imports_is_no_traceback(tmp_path, program):
    (tmp_path / "asyncio.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")

    assert run_with(tmp_path, program) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_a_child_imports_is_left_to_its_parent(tmp_path):
    (tmp_path / "child.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    )

    assert run_with(tmp_path, "laps_sd.stack.child", str(os.getpid()), "child") == (0, "goes on\n", "")


def test_a_variable_that_nothing_reads_is_one_warning_at_the_start():
    mistyped = {"LAPS_SD_DRAINS": "1", "LAPS_SD_METRIC_PORT": "hunter2"}
    with start(LAPS_SD_LOG_STYLE="json", LAPS_SD_DRAIN_S="1", LAPS_SD_SLOTS="2", **mistyped) as process:
        assert process.stdout.readline().strip().isdigit()
        process.send_signal(signal.SIGTERM)
        _, written = process.communicate(timeout=60)

    warnings = [line for line in map(json.loads, written.splitlines()) if line["level"] == "warning"]
    assert [line["nearest_known"] for line in warnings] == [
        {"LAPS_SD_DRAINS": "LAPS_SD_DRAIN_S", "LAPS_SD_METRIC_PORT": "LAPS_SD_METRICS_PORT"}
    ]
    assert "hunter2" not in written


def test_the_second_signal_leaves_at_once():
    with start(LAPS_SD_DRAIN_S="30") as process:
        assert process.stdout.readline().strip().isdigit()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM


def test_a_signal_is_heard_when_nobody_reads_the_log_any_more():
    with start(LAPS_SD_DRAIN_S="1") as process:
        assert process.stdout.readline().strip().isdigit()
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        assert process.wait(10) == 0


def test_wrong_settings_are_sentences_and_exit_code_2():
    with start(LAPS_SD_DRAIN_S="-3", LAPS_SD_GRPC_PORT="many") as process:
        assert process.wait(20) == 2
        assert process.stderr.read().splitlines() == [
            "laps-sd test: LAPS_SD_GRPC_PORT must be a whole number, got 'many'.",
            "laps-sd test: LAPS_SD_DRAIN_S must be at least 0.0 s, got -3.0.",
        ]


def test_a_port_in_use_is_exit_code_1_and_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with start(LAPS_SD_GRPC_PORT=str(port)) as process:
            assert process.wait(20) == 1
            lines = process.stderr.read().splitlines()

    sentence = f"The gRPC port {port} on 127.0.0.1 cannot be opened: Address already in use; "
    assert lines == [f"laps-sd test: {sentence}choose another with LAPS_SD_GRPC_PORT."]


GENERATE = "/laps_sd.v1.Inference/Generate"


@pytest.mark.parametrize("method", [GENERATE, "/laps_sd.v1.Inference/GenerateStream"])
async def test_a_call_that_sends_no_message_is_ended(monkeypatch, method):
    monkeypatch.setattr(interceptor, "FIRST_MESSAGE_S", 0.1)
    async with running() as (_, scripted, channel):
        code, details = await ended_without_a_message(channel, method)

    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "no message came within 0.1 s of the call's beginning"
    assert not scripted.calls


async def test_a_stop_does_not_wait_for_a_call_that_sends_no_message(monkeypatch):
    monkeypatch.setattr(interceptor, "FIRST_MESSAGE_S", 3600)
    reads = asyncio.Event()
    first = interceptor._read_first

    async def observed(context):
        reads.set()
        return await first(context)

    monkeypatch.setattr(interceptor, "_read_first", observed)
    async with running(drain_s=3600.0) as (app, _, channel):
        waiting = asyncio.create_task(ended_without_a_message(channel, GENERATE))
        await reads.wait()
        assert app.guard.active == 0
        await app.stop()
        code, _ = await waiting

    assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def ended_without_a_message(channel, method):
    """Open a call, send its metadata alone, and return its status."""
    call = channel.stream_unary(method)()
    return await call.code(), await call.details()
