"""The input of strangers and clients costs a gateway little memory, and the memory is released."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from laps_sd.service.keys import digest_of
from laps_sd.stack.local import LocalStack
from tests.helpers import wait_until_async
from tests.system import hostile
from tests.system.hostile import many_fields, path, rss_mib

KEY = "laps-sd-" + "k" * 43
AT_ONCE = 12
MOST_MIB = 400.0
"""Limit of a gateway's memory. The messages took 90 MiB each when decoded; as received they take 4."""
KEPT_MIB = 60.0
"""Limit of the memory left after a flood. Without the release it was 900."""

Code = grpc.StatusCode


@pytest.fixture(scope="module")
def keyed_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    file = tmp_path_factory.mktemp("keys") / "tenants.toml"
    file.write_text(f'[tenants.a]\nkeys = ["{digest_of(KEY)}"]\n')
    with LocalStack(engine="fake", environment={"LAPS_SD_API_KEYS_FILE": str(file)}) as stack:
        yield stack


@pytest.fixture
def gateway_pid(keyed_stack: LocalStack) -> int:
    """Return the process of a gateway that has just started: memory that it kept would hide growth."""
    keyed_stack.restart("gateway-0")
    pid = keyed_stack.children["gateway-0"].pid
    assert pid is not None
    return pid


def peak_mib(pid: int) -> float:
    """Return the most resident memory since `forget_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@pytest.mark.parametrize(
    ("metadata", "method", "code"),
    [
        ((), path("Generate"), Code.UNAUTHENTICATED),
        ((), path("GenerateStream"), Code.UNAUTHENTICATED),
        ((), "/inference.GRPCInferenceService/ModelInfer", Code.UNAUTHENTICATED),
        ((), "/grpc.health.v1.Health/Check", Code.INVALID_ARGUMENT),
        ((("authorization", f"Bearer {KEY}"),), path("Generate"), Code.INVALID_ARGUMENT),
    ],
)
async def test_messages_of_many_fields_cost_their_bytes_and_no_more(
    keyed_stack: LocalStack, gateway_pid: int, metadata: Any, method: str, code: Code
) -> None:
    pid = gateway_pid
    before = rss_mib(pid)
    forget_peak(pid)
    bombs = many_fields(4_180_000)
    (channel,) = hostile.channels(keyed_stack.gateway_address, 1)
    async with channel:
        call = channel.unary_unary(method)
        calls = [call(bomb, metadata=metadata, timeout=60) for bomb in bombs * (AT_ONCE // len(bombs))]
        codes = await asyncio.gather(*(ended.code() for ended in calls))

    assert set(codes) == {code}
    assert peak_mib(pid) < before + MOST_MIB
    await wait_until_async(lambda: rss_mib(pid) < before + KEPT_MIB, description="the memory is given back")
