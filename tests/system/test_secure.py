"""The whole stack with mutual TLS on every link, and a record with TLS, client certificate, user and password
file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from laps_sd.cli.leader import Leader
from laps_sd.cli.top.source import Source
from laps_sd.keda import externalscaler_pb2, externalscaler_pb2_grpc
from laps_sd.service.serving import main
from laps_sd.service.wire import Tls
from laps_sd.stack.local import LocalStack
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
from scheduler_svc.__main__ import serve
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.embedded import EmbeddedServer
from tests.certificates import behind_tls, certificate, write_certificates
from tests.helpers import wait_until
from tests.store.test_rights import documented_rule
from tests.system.calls import seeded, stream

PASSWORD = "s3cret-of-the-record"
PROMPT = "A prompt that nobody may log"
ROLES = "gateway=gateway.test,worker=*.worker.test,operator=spiffe://test/oncall,operator=ops.test"
NAMES = {
    "gateway": ("DNS:gateway.test",),
    "worker": ("DNS:w1.worker.test", "IP:127.0.0.1"),
    "operator": ("URI:spiffe://test/oncall",),
    "nobody": ("DNS:worker.test", "DNS:a.w1.worker.test", "URI:spiffe://test/oncall/x"),
    "gateway.test": (),  # a common name is no name
}


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = write_certificates(tmp_path_factory.mktemp("tls"))
    return Tls(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


@pytest.fixture(scope="module")
def certificates(tls: Tls) -> dict[str, Tls]:
    """Return certificates of the same CA, with other names."""
    assert tls.ca is not None
    return {holder: certificate(tls.ca.parent, holder, *names) for holder, names in NAMES.items()}


@pytest.fixture(scope="module")
def secure_stack(
    tls: Tls, certificates: dict[str, Tls], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
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
            link_tls={kind: certificates[kind] for kind in ("gateway", "worker")},
            log_level="debug",
            environment={
                "LAPS_SD_CLIENT_ROLES": ROLES,
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
    """Allow only the documented user."""
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
        assert await ended_with(channel, peer) is grpc.StatusCode.UNAVAILABLE


async def ended_with(channel: grpc.aio.Channel, peer: str) -> grpc.StatusCode:
    """Return the status of a call that only this kind of peer makes; the links are read until the server
    sends a message.
    """
    link: Any
    match peer:
        case "gateway":
            link = gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect(timeout=20)
            hello: Any = link_pb2.GatewayMessage(hello=link_pb2.GatewayHello(gateway_id="g"))
        case "worker":
            link = worker_link_pb2_grpc.WorkerLinkStub(channel).Connect(timeout=20)
            hello = worker_link_pb2.WorkerMessage(hello=worker_link_pb2.WorkerHello())
        case _:
            return await _answer(channel, peer)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await link.write(hello)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if await link.read() is not grpc.aio.EOF:
            link.cancel()
            return grpc.StatusCode.OK
    code: grpc.StatusCode = await link.code()
    if code is grpc.StatusCode.INTERNAL and "incident" not in str(await link.details()):
        # Not the server's status: grpc.aio uses it when a call has ended before its client had begun it.
        return await ended_with(channel, peer)
    return code


async def _answer(channel: grpc.aio.Channel, peer: str) -> grpc.StatusCode:
    admin = admin_pb2_grpc.AdminStub(channel)
    scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)
    calls: dict[str, tuple[Any, Any]] = {
        "client": (inference_pb2_grpc.InferenceStub(channel).ListModels, pb.ListModelsRequest()),
        "operator": (admin.GetShard, admin_pb2.GetShardRequest()),
        "an operator that drains": (admin.DrainWorker, admin_pb2.DrainWorkerRequest(worker="none")),
        "an operator that cancels": (
            admin.CancelRequest,
            admin_pb2.CancelRequestRequest(request_id="s0.none"),
        ),
        "who lists": (admin.ListQueue, admin_pb2.ListQueueRequest()),
        "who explains": (admin.ExplainRequest, admin_pb2.AdminExplainRequest(request_id="s0.none")),
        "an autoscaler": (scaler.GetMetricSpec, externalscaler_pb2.ScaledObjectRef()),
    }
    method, request = calls[peer]
    try:
        await method(request, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


MAY = {
    "gateway": {"gateway", "who lists", "who explains"},
    "worker": {"worker"},
    "operator": {
        "operator",
        "an operator that drains",
        "an operator that cancels",
        "who lists",
        "who explains",
    },
}


@pytest.mark.parametrize("holder", NAMES)
@pytest.mark.parametrize(
    "acts_as",
    [
        "gateway",
        "worker",
        "operator",
        "an operator that drains",
        "an operator that cancels",
        "who lists",
        "who explains",
    ],
)
async def test_a_certificate_may_act_in_its_role_and_in_no_other(
    secure_stack: LocalStack, certificates: dict[str, Tls], holder: str, acts_as: str
) -> None:
    credentials = certificates[holder].channel_credentials()
    async with grpc.aio.secure_channel(secure_stack.scheduler_address, credentials) as channel:
        code = await ended_with(channel, acts_as)

    assert (code is not grpc.StatusCode.PERMISSION_DENIED) == (acts_as in MAY.get(holder, set()))


async def test_an_autoscaler_needs_a_certificate_and_no_role(
    secure_stack: LocalStack, certificates: dict[str, Tls]
) -> None:
    credentials = certificates["nobody"].channel_credentials()
    async with grpc.aio.secure_channel(secure_stack.scheduler_address, credentials) as channel:
        assert await ended_with(channel, "an autoscaler") is grpc.StatusCode.OK


def test_a_worker_without_the_role_of_one_says_why_it_gets_no_work(
    secure_stack: LocalStack, certificates: dict[str, Tls]
) -> None:
    shown = certificates["gateway"]
    settings = {"link_tls_cert": shown.cert, "link_tls_key": shown.key}
    secure_stack.restart("worker", wait=False, **settings)
    try:
        sentence = "this certificate may not act as worker"
        wait_until(
            lambda: sentence in secure_stack.log("worker"), description="the worker's log has the reason"
        )
        assert "call denied" in secure_stack.log("scheduler")
    finally:
        own = certificates["worker"]
        secure_stack.restart("worker", link_tls_cert=own.cert, link_tls_key=own.key)


async def test_gateway_and_worker_find_a_new_leader_while_their_files_are_replaced(
    secure_stack: LocalStack, certificates: dict[str, Tls], tls: Tls
) -> None:
    """Between the moments at which a renewal removes the old files and writes the new ones."""
    files = [shown for kind in ("gateway", "worker") if (shown := certificates[kind].cert) is not None]
    for file in files:
        file.rename(file.with_suffix(".away"))
    try:
        await asyncio.to_thread(secure_stack.restart, "scheduler")

        async with grpc.aio.secure_channel(
            secure_stack.gateway_address, tls.channel_credentials()
        ) as channel:
            request = seeded(PROMPT, seed=1, max_tokens=16, ignore_eos=True)
            outcome = await stream(inference_pb2_grpc.InferenceStub(channel), request)
    finally:
        for file in files:
            file.with_suffix(".away").rename(file)

    assert len(outcome.tokens) == 16


def test_an_operator_with_a_certificate_sees_the_worker(
    secure_stack: LocalStack, certificates: dict[str, Tls]
) -> None:
    shown_by = certificates["operator"]
    options = ["--tls-ca", str(shown_by.ca), "--tls-cert", str(shown_by.cert), "--tls-key", str(shown_by.key)]
    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "laps_sd",
            "workers",
            "--json",
            "--scheduler",
            secure_stack.scheduler_address,
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert "worker-0" in shown.stdout, shown.stderr


@pytest.mark.parametrize("command", ["workers", "queue"])
def test_the_variables_of_a_gateway_are_enough_to_look_at_its_shard(
    secure_stack: LocalStack, certificates: dict[str, Tls], command: str
) -> None:
    """As in a gateway's pod: docs/kubernetes.md, Look inside."""
    own = certificates["gateway"]
    variables = {
        "LAPS_SD_LINK_TLS_CA": own.ca,
        "LAPS_SD_LINK_TLS_CERT": own.cert,
        "LAPS_SD_LINK_TLS_KEY": own.key,
    }
    shown = subprocess.run(
        [sys.executable, "-m", "laps_sd", command, "--scheduler", secure_stack.scheduler_address],
        capture_output=True,
        text=True,
        env=os.environ | {name: str(path) for name, path in variables.items()},
        timeout=120,
    )

    assert shown.returncode == 0, shown.stderr
    assert "worker-0" in shown.stdout or "0 requests" in shown.stdout


def test_the_commands_of_a_client_show_a_certificate(secure_stack: LocalStack, tls: Tls) -> None:
    where = ["--url", f"grpcs://{secure_stack.gateway_address}"]
    where += ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]

    def laps_sd(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "laps_sd", *arguments, *where],
            capture_output=True,
            text=True,
            input=text,
            timeout=120,
        )

    generated = laps_sd("generate", "Once", "--max-tokens", "4")
    [request_id] = re.findall(r"\[(s0\.\w+)\]", generated.stderr)
    assert laps_sd("explain", request_id).stdout.startswith(request_id)
    assert laps_sd("chat", "--max-tokens", "4", text="Once\n").stdout.strip()


def test_the_operators_terminal_reads_and_cancels_with_a_certificate(
    secure_stack: LocalStack, certificates: dict[str, Tls]
) -> None:
    with contextlib.closing(
        Source(Leader(secure_stack.scheduler_address, certificates["operator"]), limit=10)
    ) as source:
        assert [worker.worker_name for worker in source.read().workers.workers] == ["worker-0"]
        with pytest.raises(grpc.RpcError, match="no request s0"):
            source.cancel("s0.none")


def test_nothing_secret_is_logged(secure_stack: LocalStack, tls: Tls) -> None:
    assert tls.key is not None
    key = tls.key.read_text().splitlines()[1]
    for name in secure_stack.children:
        text = secure_stack.log(name)
        assert text
        for secret in (PASSWORD, key, PROMPT):
            assert secret not in text, f"{secret} in the log of {name}"


@pytest.mark.parametrize("option", ["--help", "--show-settings"])
def test_nothing_secret_is_shown(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scheduler_svc", option])
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    for variables in (
        {"LAPS_SD_REDIS_URL": f"redis://u:{PASSWORD}@h:1/0"},
        {"LAPS_SD_REDIS_URL": f"redis://h:1,i:2/0?password={PASSWORD}"},
        {"LAPS_SD_REDIS_URL": f"redis://u:{PASSWORD}@h:x/0"},  # refused, with a sentence
        {"LAPS_SD_REDIS_URL": "redis://u@h:1/0", "LAPS_SD_REDIS_PASSWORD_FILE": str(file)},
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit):
                main("scheduler", SchedulerSettings, serve)
        shown = "".join(capsys.readouterr())
        assert "LAPS_SD_REDIS_URL" in shown
        assert PASSWORD not in shown
