"""The record returns to an older state. While both schedulers live, no accepted request is lost; while none runs, what
gateways do not bring back is as in the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest

from bench._metrics import metric
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from scheduler_svc.store.embedded import EmbeddedServer
from tests.helpers import wait_until_async
from tests.store.servers import ask, in_step, primary_and_replica, promote
from tests.system.calls import Outcome, seeded, stream

LEADER = "laps-sd:{s0}:leader"
ROUNDS = 2


class CutFile:
    """One server whose append-only file loses its end, as by power loss before the last sync."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedServer(folder / "record").start()
        self.url = self.server.url
        self._size = 0

    async def lags_from_now_on(self) -> None:
        async def written() -> bool:
            state = await ask(self.server, "INFO", "persistence")
            return bool(state["aof_buffer_length"] == 0 and state["aof_pending_bio_fsync"] == 0)

        await wait_until_async(written, description="the append-only file is written")
        self._size = self._file.stat().st_size

    async def dies(self) -> float:
        expires_s = await lease_over_unix_s(self.server)
        self.server.kill()
        os.truncate(self._file, self._size)
        return expires_s

    async def comes_back(self) -> None:
        self.server.start()

    @property
    def _file(self) -> Path:
        return next(self.server.data_dir.glob("appendonlydir/*.incr.aof"))

    def stop(self) -> None:
        self.server.stop()


class Promoted:
    """A primary that dies, and a replica that lagged and is promoted in its place."""

    def __init__(self, folder: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.primary, self.replica = self._stack.enter_context(primary_and_replica(folder))
        self.url = (
            "redis://" + ",".join(f"127.0.0.1:{one.port}" for one in (self.primary, self.replica)) + "/0"
        )

    async def lags_from_now_on(self) -> None:
        await in_step(self.replica)
        await ask(self.replica, "REPLICAOF", "127.0.0.1", "1")

    async def dies(self) -> float:
        expires_s = await lease_over_unix_s(self.primary)
        self.primary.kill()
        return expires_s

    async def comes_back(self) -> None:
        await promote(self.replica)
        self.primary, self.replica = self.replica, self.primary
        self.replica.start()
        await ask(self.replica, "REPLICAOF", "127.0.0.1", self.primary.port)

    def stop(self) -> None:
        self._stack.close()
        for server in (self.primary, self.replica):
            server.stop()


async def lease_over_unix_s(server: EmbeddedServer) -> float:
    return int(await ask(server, "PEXPIRETIME", LEADER)) / 1000


async def resumed(stub: inference_pb2_grpc.InferenceStub, request_id: str) -> Outcome:
    outcome = Outcome()
    async for event in stub.Resume(pb.ResumeRequest(request_id=request_id), timeout=60, wait_for_ready=True):
        if event.HasField("delta"):
            outcome.tokens += event.delta.token_ids
        if event.HasField("end"):
            outcome.end = event.end
    return outcome


@contextlib.asynccontextmanager
async def calls(stack: LocalStack) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


@pytest.mark.parametrize("make_record", [CutFile, Promoted])
async def test_a_living_leader_brings_everything_back_before_a_standby_leads(
    make_record: Callable[[Path], CutFile | Promoted], tmp_path: Path
) -> None:
    record = make_record(tmp_path)
    try:
        with LocalStack(
            engine="fake", schedulers=2, redis_url=record.url, environment={"LAPS_SD_LEASE_S": "1"}
        ) as stack:
            for number in range(ROUNDS):
                await one_round(stack, record, number)
    finally:
        record.stop()


async def one_round(stack: LocalStack, record: CutFile | Promoted, number: int) -> None:
    kept_request = seeded(
        "kept", seed=1, max_tokens=200, ignore_eos=True, keep=True, idempotency_key=f"kept {number}"
    )
    short = seeded("short", seed=2, max_tokens=4, ignore_eos=True, idempotency_key=f"short {number}")
    async with calls(stack) as stub:
        await record.lags_from_now_on()
        ended = await stream(stub, short)
        keeping = stub.GenerateStream(kept_request)
        kept_id = (await keeping.read()).accepted.request_id
        keeping.cancel()
        lease_over_s = await record.dies()
        for name in stack.schedulers:
            await wait_until_async(
                lambda name=name: metric(stack, name, "laps_sd_scheduler_record_unavailable") == 1,
                description=f"{name} has noticed",
            )
        await wait_until_async(lambda: time.time() > lease_over_s, description="the lease has run out")
        await record.comes_back()

        async def is_served() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stream(stub, seeded("next", seed=3, max_tokens=1))
                return True
            return False

        await wait_until_async(is_served, description="requests are served again")
        again = await stream(stub, short)
        assert (again.request_id, again.tokens) == (ended.request_id, ended.tokens), "the key ran once"
        assert (await resumed(stub, ended.request_id)).tokens == ended.tokens
        kept = await resumed(stub, kept_id)
        assert kept.end is not None
        assert (kept.end.finish_reason, len(kept.tokens)) == (pb.FINISH_REASON_LENGTH, 200)


async def test_a_copy_that_is_restored_while_no_scheduler_runs_is_led_as_it_is(tmp_path: Path) -> None:
    folder, copy = tmp_path / "record", tmp_path / "copy"
    server = EmbeddedServer(folder).start()
    try:
        with LocalStack(engine="fake", redis_url=server.url) as stack:
            async with calls(stack) as stub:
                in_copy = seeded("in the copy", seed=1, max_tokens=300, ignore_eos=True, keep=True)
                keeping = stub.GenerateStream(in_copy)
                kept_id = (await keeping.read()).accepted.request_id
                keeping.cancel()
                shutil.copytree(folder, copy)
                short = seeded("short", seed=2, max_tokens=4, ignore_eos=True, idempotency_key="later")
                ended = await stream(stub, short)
                long = seeded("open stream", seed=3, max_tokens=600, ignore_eos=True)
                has_begun = asyncio.Event()
                open_stream = asyncio.create_task(stream(stub, long, on_tokens=lambda _: has_begun.set()))
                await has_begun.wait()

                stack.kill("scheduler")
                server.stop()
                shutil.rmtree(folder)
                shutil.copytree(copy, folder)
                server.start()
                await asyncio.to_thread(stack.restart, "scheduler")

                assert len((await open_stream).tokens) == 600, "its gateway has submitted it again"
                assert len((await resumed(stub, kept_id)).tokens) == 300
                with pytest.raises(grpc.aio.AioRpcError, match="there is no request"):
                    await resumed(stub, ended.request_id)
                again = await stream(stub, short)
                assert again.request_id != ended.request_id, "its key is free"
                assert again.tokens == ended.tokens
    finally:
        server.stop()
