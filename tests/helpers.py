"""Small things that many tests need."""

from __future__ import annotations

import asyncio
import inspect
import shutil
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


class NotYetError(AssertionError):
    """What a test waited for did not happen."""


def wait_until(
    predicate: Callable[[], T], *, description: str, timeout_s: float = 20.0, every_s: float = 0.02
) -> T:
    """Calls `predicate` until it answers something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise NotYetError(f"not within {timeout_s} s: {description} (last answer: {answer!r})")
        time.sleep(every_s)


async def wait_until_async(
    predicate: Callable[[], T | Awaitable[T]],
    *,
    description: str,
    timeout_s: float = 20.0,
    every_s: float = 0.02,
) -> T:
    """As `wait_until`, without blocking the loop; `predicate` may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = predicate()
        answer: T = await found if inspect.isawaitable(found) else found
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise NotYetError(f"not within {timeout_s} s: {description} (last answer: {answer!r})")
        await asyncio.sleep(every_s)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_certificates(folder: Path) -> Path:
    """A CA (ca.pem), and a certificate of it for 127.0.0.1 (cert.pem, key.pem) that serves both ends; skips without openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca", "-days", "2")
    run("req", *key, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=test")
    (folder / "extra").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
    run("x509", "-req", "-in", "request.pem", *signed, "-out", "cert.pem")
    return folder
