"""The whole stack with mutual TLS on every link, and a record behind TLS, client certificate, user and password file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import redis

from laps_sd.local import LocalStack
from laps_sd.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gateway_link_pb2_grpc,
    inference_pb2_grpc,
    worker_link_pb2,
    worker_link_pb2_grpc,
)
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.wire import Tls
from scheduler_svc.store.embedded import EmbeddedServer
from tests.certificates import write_certificates
from tests.store.test_rights import documented_rule
from tests.system.calls import seeded, stream

PASSWORD = "s3cret-of-the-record"
PROMPT = "A prompt that nobody may log"


@contextlib.contextmanager
def behind_tls(port: int, tls: Tls) -> Iterator[int]:
    """A port that wants a client certificate, in front of a server that speaks plain text (the packaged one has no TLS)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tls.ca)
    assert tls.cert is not None
    context.load_cert_chain(tls.cert, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED
    loop = asyncio.new_event_loop()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while octets := await reader.read(65536):
                writer.write(octets)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = loop.run_until_complete(asyncio.start_server(forward, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:

        async def end() -> None:
            server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = write_certificates(tmp_path_factory.mktemp("tls"))
    return Tls(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


@pytest.fixture(scope="module")
def secure_stack(tls: Tls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("record")
    password_file = folder / "password"
    password_file.write_text(PASSWORD)
    with (
        _guarded(EmbeddedServer(folder / "data")) as record,
        behind_tls(record.port or 0, tls) as port,
        LocalStack(
            engine="fake",
            redis_url=f"rediss://laps-sd@127.0.0.1:{port}/0",
            tls=tls,
            log_level="debug",
            environment={
                "LAPS_SD_REDIS_PASSWORD_FILE": str(password_file),
                "LAPS_SD_REDIS_TLS_CA": str(tls.ca),
                "LAPS_SD_REDIS_TLS_CERT": str(tls.cert),
                "LAPS_SD_REDIS_TLS_KEY": str(tls.key),
            },
        ) as stack,
    ):
        yield stack


@contextlib.contextmanager
def _guarded(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Nobody but the documented user gets in."""
    with server.start():
        with redis.Redis.from_url(server.url) as operator:
            operator.execute_command("ACL", "SETUSER", "laps-sd", *documented_rule(PASSWORD))
            operator.execute_command("ACL", "SETUSER", "default", "off")
        yield server


async def test_a_request_goes_through_every_link(secure_stack: LocalStack, tls: Tls) -> None:
    async with grpc.aio.secure_channel(secure_stack.gateway_address, tls.channel_credentials()) as channel:
        outcome = await stream(
            inference_pb2_grpc.InferenceStub(channel),
            seeded(PROMPT, seed=1, max_tokens=16, ignore_eos=True, idempotency_key="k"),
        )

    assert len(outcome.tokens) == 16


@pytest.mark.parametrize("certificate", ["none", "plain text", "another CA's"])
@pytest.mark.parametrize("peer", ["client", "gateway", "worker", "operator"])
async def test_who_has_no_certificate_of_the_ca_gets_in_nowhere(
    secure_stack: LocalStack, tls: Tls, tmp_path: Path, peer: str, certificate: str
) -> None:
    address = secure_stack.gateway_address if peer == "client" else secure_stack.scheduler_address
    if certificate == "plain text":
        channel = grpc.aio.insecure_channel(address)
    elif certificate == "none":
        channel = grpc.aio.secure_channel(address, Tls(ca=tls.ca).channel_credentials())
    else:
        other = write_certificates(tmp_path)
        stranger = Tls(ca=tls.ca, cert=other / "cert.pem", key=other / "key.pem")
        channel = grpc.aio.secure_channel(address, stranger.channel_credentials())
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            match peer:
                case "client":
                    await inference_pb2_grpc.InferenceStub(channel).ListModels(
                        pb.ListModelsRequest(), timeout=20
                    )
                case "operator":
                    await admin_pb2_grpc.AdminStub(channel).GetShard(admin_pb2.GetShardRequest(), timeout=20)
                case "gateway":
                    call = gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect(timeout=20)
                    await call.write(link_pb2.GatewayMessage(hello=link_pb2.GatewayHello(gateway_id="g")))
                    await call.read()
                    raise await _status(call)
                case "worker":
                    work = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect(timeout=20)
                    await work.write(worker_link_pb2.WorkerMessage(hello=worker_link_pb2.WorkerHello()))
                    await work.read()
                    raise await _status(work)

    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def _status(call: grpc.aio.StreamStreamCall) -> grpc.aio.AioRpcError:
    """A stream that was read to its end, as the error it ended with."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def test_an_operator_with_a_certificate_sees_the_worker(secure_stack: LocalStack, tls: Tls) -> None:
    certificate = ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "laps_sd",
            "workers",
            "--json",
            "--scheduler",
            secure_stack.scheduler_address,
            *certificate,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert "worker-0" in shown.stdout, shown.stderr


def test_nothing_secret_is_logged(secure_stack: LocalStack, tls: Tls) -> None:
    assert tls.key is not None
    key = tls.key.read_text().splitlines()[1]
    for name in secure_stack.children:
        text = secure_stack.log(name)
        assert text
        for secret in (PASSWORD, key, PROMPT):
            assert secret not in text, f"{secret} in the log of {name}"


@pytest.mark.parametrize("option", ["--help", "--show-settings"])
def test_nothing_secret_is_shown(option: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    for variables in (
        {"LAPS_SD_REDIS_URL": f"redis://u:{PASSWORD}@h:1/0"},
        {"LAPS_SD_REDIS_URL": f"redis://h:1,i:2/0?password={PASSWORD}"},
        {"LAPS_SD_REDIS_URL": f"redis://u:{PASSWORD}@h:x/0"},  # refused, with a sentence
        {"LAPS_SD_REDIS_URL": "redis://u@h:1/0", "LAPS_SD_REDIS_PASSWORD_FILE": str(file)},
    ):
        done = subprocess.run(
            [sys.executable, "-m", "scheduler_svc", option],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout + done.stderr
        assert PASSWORD not in done.stdout + done.stderr
