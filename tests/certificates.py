"""A CA, and a certificate of it for 127.0.0.1 that serves both ends: ca.pem, cert.pem and key.pem. And others
with names.

And TLS in front of a server that has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from laps_sd.service.wire import Tls


def write_certificates(folder: Path) -> Path:
    """Write certificates. Skip the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    openssl(
        folder,
        "req",
        "-x509",
        *_KEY,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=test ca",
        "-days",
        "2",
    )
    shown = certificate(folder, "test", "IP:127.0.0.1")
    assert shown.cert is not None and shown.key is not None
    shown.cert.rename(folder / "cert.pem")
    shown.key.rename(folder / "key.pem")
    return folder


def certificate(folder: Path, common_name: str, *alternatives: str) -> Tls:
    """Create one more certificate of the CA in this folder, with these subject alternative names
    ("DNS:x.test", "URI:…", "IP:…").
    """
    name = common_name.replace(" ", "-")
    request = ("-keyout", f"{name}.key", "-out", f"{name}.request", "-subj", f"/CN={common_name}")
    openssl(folder, "req", *_KEY, *request)
    (folder / "extra").write_text(f"subjectAltName={','.join(alternatives)}" if alternatives else "")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
    openssl(folder, "x509", "-req", "-in", f"{name}.request", *signed, "-out", f"{name}.pem")
    return Tls(ca=folder / "ca.pem", cert=folder / f"{name}.pem", key=folder / f"{name}.key")


@contextlib.contextmanager
def behind_tls(port: int, tls: Tls) -> Iterator[int]:
    """Open a port that requires a client certificate, in front of a server without TLS (the packaged one has
    none).
    """
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

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
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


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(folder: Path, *arguments: str) -> str:
    """Run openssl in a folder; returns what it prints."""
    done = subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout
