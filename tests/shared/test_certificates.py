"""Certificates that are renewed while a service runs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import pty
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from laps_sd.errors import StartupError
from laps_sd.service.certificates import EXPIRY, ServedCertificate, expires_at, expose_expiry
from laps_sd.service.serving import ServiceApp
from laps_sd.service.serving_settings import ServingSettings
from laps_sd.service.wire import Tls, make_channel
from tests.certificates import certificate, openssl, write_certificates

CHECK = health_pb2.HealthCheckRequest(service="liveness")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_certificates(tmp_path / "pki")


def served(folder: Path) -> Tls:
    return Tls(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


def renew(folder: Path) -> str:
    """Replace the certificate and its key; returns the new one as PEM."""
    new = certificate(folder, "renewed", "IP:127.0.0.1")
    assert new.cert is not None and new.key is not None
    text = new.cert.read_text()
    new.key.replace(folder / "key.pem")
    new.cert.replace(folder / "cert.pem")
    return text


def begin_renewal(file: Path, *, removed: bool) -> None:
    """Remove or empty a file, which a renewal writes next."""
    if removed:
        file.unlink()
    else:
        file.write_bytes(b"")


def replace_ca(folder: Path) -> Path:
    """Make another CA in a folder of its own, and have it in the place of the first one."""
    other = write_certificates(folder / "other")
    for name in ("ca.pem", "cert.pem", "key.pem"):
        shutil.copy(other / name, folder / f"{name}.new")
        (folder / f"{name}.new").replace(folder / name)
    return other


@pytest.fixture
async def app(folder: Path) -> AsyncIterator[ServiceApp]:
    tls = served(folder)
    settings = ServingSettings(
        grpc_port=0, metrics_port=None, tls_cert=tls.cert, tls_key=tls.key, tls_client_ca=tls.ca
    )
    app = ServiceApp("test", settings)
    await app.start()
    yield app
    app.stop_soon()
    await app.run()


async def seen_by_a_client(port: int, tls: Tls) -> str:
    """Return the certificate that a listener presents to a new connection, as PEM."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(str(tls.cert), str(tls.key))
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(found)


async def test_a_renewed_certificate_is_presented_to_the_next_connection_and_the_others_stay(
    app: ServiceApp, folder: Path
) -> None:
    before = (folder / "cert.pem").read_text()
    mine = certificate(folder, "mine")
    async with make_channel(f"127.0.0.1:{app.port}", mine) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(CHECK)
        assert await seen_by_a_client(app.port, mine) == before

        renewed = renew(folder)

        assert await seen_by_a_client(app.port, mine) == renewed != before
        await stub.Check(CHECK)


async def test_a_new_ca_decides_who_may_connect_from_then_on(app: ServiceApp, folder: Path) -> None:
    old = certificate(folder, "mine")
    first = folder / "first-ca.pem"
    shutil.copy(folder / "ca.pem", first)
    other = replace_ca(folder)

    stranger = Tls(ca=other / "ca.pem", cert=old.cert, key=old.key)
    async with make_channel(f"127.0.0.1:{app.port}", stranger) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health_pb2_grpc.HealthStub(channel).Check(CHECK)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    async with make_channel(f"127.0.0.1:{app.port}", certificate(other, "known")) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(CHECK)


@pytest.fixture
async def https(folder: Path) -> AsyncIterator[int]:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"in")
        writer.close()

    server = await asyncio.start_server(
        end, "127.0.0.1", 0, ssl=ServedCertificate(served(folder)).ssl_context()
    )
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_the_http_port_presents_a_renewed_certificate_too(https: int, folder: Path) -> None:
    mine = certificate(folder, "mine")
    before = await seen_by_a_client(https, mine)

    renewed = renew(folder)

    assert before != await seen_by_a_client(https, mine) == renewed


async def test_the_http_port_takes_clients_of_the_new_ca_alone(https: int, folder: Path) -> None:
    old = certificate(folder, "mine")
    other = replace_ca(folder)

    assert await seen_by_a_client(https, certificate(other, "known")) == (folder / "cert.pem").read_text()
    assert await read_all(https, ca=other / "ca.pem", mine=certificate(other, "known")) == b"in"
    assert await read_all(https, ca=other / "ca.pem", mine=old) == b""


async def read_all(port: int, *, ca: Path, mine: Tls) -> bytes:
    """Return what a listener sends; nothing if it refuses the certificate (in TLS 1.3 after the client's last word)."""
    context = ssl.create_default_context(cafile=str(ca))
    context.load_cert_chain(str(mine.cert), str(mine.key))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await reader.read()
    except ssl.SSLError:
        return b""
    finally:
        writer.close()


async def test_a_half_written_renewal_changes_nothing(folder: Path) -> None:
    listener = ServedCertificate(served(folder))
    before = listener.files()
    new = certificate(folder, "renewed", "IP:127.0.0.1")
    assert new.cert is not None and new.key is not None

    new.cert.replace(folder / "cert.pem")
    assert listener.files() is before
    (folder / "key.pem").unlink()
    assert listener.files() is before
    new.key.replace(folder / "key.pem")

    assert listener.files().cert == (folder / "cert.pem").read_bytes() != before.cert


def test_files_that_cannot_be_used_stop_the_start(folder: Path) -> None:
    other = write_certificates(folder / "other")

    with pytest.raises(StartupError, match=r"The TLS files .*cert\.pem and .*key\.pem cannot be used"):
        ServedCertificate(Tls(cert=folder / "cert.pem", key=other / "key.pem"))
    with pytest.raises(StartupError, match=r"none\.pem: No such file"):
        ServedCertificate(Tls(cert=folder / "none.pem", key=folder / "key.pem"))
    with pytest.raises(StartupError, match=r"none\.pem: No such file"):
        ServedCertificate(dataclasses.replace(served(folder), ca=folder / "none.pem"))
    with pytest.raises(StartupError, match=r"key\.pem: .*no certificate"):
        ServedCertificate(dataclasses.replace(served(folder), ca=folder / "key.pem"))


def test_an_encrypted_key_is_refused_without_a_question_at_the_terminal(folder: Path) -> None:
    """OpenSSL would ask for the passphrase, and the start would wait for an answer."""
    openssl(folder, "pkey", "-in", "key.pem", "-aes128", "-passout", "pass:secret", "-out", "encrypted.pem")
    program = "import sys; from pathlib import Path; from laps_sd.service.wire import Tls\n"
    program += "from laps_sd.service.certificates import ServedCertificate\n"
    program += "ServedCertificate(Tls(cert=Path('cert.pem'), key=Path('encrypted.pem')))"
    ours, terminal = pty.openpty()

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        timeout=60,
    )

    assert "cannot be used: the key is encrypted" in done.stderr
    os.close(terminal)
    with contextlib.suppress(OSError):  # Linux: the other side is closed, and nothing was written
        assert os.read(ours, 1024) == b""
    os.close(ours)


@pytest.mark.parametrize("name", ["cert", "key"])
@pytest.mark.parametrize("what", ["cannot be read", "is empty"])
async def test_a_dialler_keeps_what_it_has_read_while_a_renewal_replaces_its_files(
    app: ServiceApp, folder: Path, name: str, what: str
) -> None:
    mine = certificate(folder, "mine")
    mine.channel_credentials()
    file: Path = getattr(mine, name)
    begin_renewal(file, removed=what == "cannot be read")

    with capture_logs() as logged:
        for _ in range(2):
            async with make_channel(f"127.0.0.1:{app.port}", mine) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(CHECK)

    [line] = logged
    assert f"{file} {what}" in line["error"]
    with pytest.raises(StartupError, match=what):
        Tls(ca=mine.ca, cert=mine.cert, key=mine.key).channel_credentials()


def self_signed(folder: Path, name: str, days: str) -> None:
    files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, "-subj", "/CN=x", "-days", days)


@pytest.mark.parametrize("days", ["2", "3000", "20000"])
def test_the_expiry_is_the_one_in_the_certificate(folder: Path, days: str) -> None:
    """Beyond 2049 it is written in another form."""
    self_signed(folder, "long", days)
    printed = openssl(folder, "x509", "-in", "long.pem", "-noout", "-enddate").strip()
    moment = datetime.strptime(printed, "notAfter=%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)

    assert expires_at((folder / "long.pem").read_bytes()) == moment.timestamp()


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_has_no_expiry(text: bytes) -> None:
    with pytest.raises(ValueError, match="certificate"):
        expires_at(text)


def exposed() -> float:
    [family] = EXPIRY.collect()
    [value] = [sample.value for sample in family.samples if sample.labels == {"use": "test"}]
    return value


def test_the_metric_follows_the_file(folder: Path) -> None:
    path = folder / "cert.pem"
    expose_expiry("test", path)
    try:
        before = exposed()
        self_signed(folder, "cert", "90")
        after = exposed()
        path.unlink()
        gone = exposed()
    finally:
        EXPIRY.remove("test")

    assert after - before > 80 * 86400
    assert math.isnan(gone)
