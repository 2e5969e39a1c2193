"""The worker as a process: its signals, its exit codes, its health."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.request import urlopen

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laps_sd.v1 import worker_link_pb2 as pb
from tests.helpers import wait_until_async
from tests.services.worker.harness import PATIENCE_S, scheduler, spec


class Process:
    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.child.stderr is not None
        async for line in self.child.stderr:
            self.lines.append(line.decode().rstrip())

    async def event(self, name: str) -> dict[str, object]:
        """Return the first log line of this event."""

        def found() -> dict[str, object] | None:
            parsed = [json.loads(line) for line in self.lines if line.startswith("{")]
            return next((line for line in parsed if line.get("event") == name), None)

        line = await wait_until_async(found, description=f"log line {name!r} in {self.lines}")
        assert line is not None
        return line

    async def exit_code(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.child.wait()


@asynccontextmanager
async def process(**settings: str) -> AsyncIterator[Process]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LAPS_SD_")}
    given = {
        "engine": "fake",
        "fake_time_scale": "0.01",
        "metrics_port": "",
        "grpc_host": "127.0.0.1",
        **settings,
    }
    environ = inherited | {f"LAPS_SD_{name.upper()}": value for name, value in given.items()}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "worker_svc", env=environ, stderr=asyncio.subprocess.PIPE
    )
    running = Process(child)
    reading = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        await reading


@asynccontextmanager
async def health_of(worker: Process) -> AsyncIterator[Callable[[str], Awaitable[bool]]]:
    """Return a function that reads whether one of the names of the worker's health is serving."""
    port = (await worker.event("listening"))["port"]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def serving(name: str) -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        yield serving


async def test_sigterm_drains_and_the_worker_leaves_with_success() -> None:
    async with scheduler() as s, process(scheduler_seeds=s.address) as worker:
        stream = await s.greet()
        await worker.event("ready")
        async with health_of(worker) as serving:
            await wait_until_async(
                lambda: serving("readiness"), description="readiness once a scheduler has greeted the worker"
            )
        await stream.lease(spec("a", max_tokens=100))
        await stream.assign("a")
        await stream.until(lambda s: len(s.reports) > 0, "it works")
        worker.child.send_signal(signal.SIGTERM)
        await stream.until(lambda s: s.drains == 1, "the wish to leave")
        await stream.until_ended("a")
        await stream.send(drained=pb.Drained())

        assert await worker.exit_code() == 0


async def test_a_drain_that_was_ordered_goes_on_when_the_pod_is_deleted() -> None:
    """A worker that drains is not ready, so that Kubernetes removes its pod first."""
    async with scheduler() as s, process(scheduler_seeds=s.address) as worker:
        stream = await s.greet()
        await worker.event("ready")
        await stream.lease(spec("a", max_tokens=100))
        await stream.assign("a")
        await stream.until(lambda s: len(s.reports) > 0, "it works")
        await stream.send(drain=pb.Drain())
        await stream.until(lambda s: s.drains == 1, "the wish to leave")
        worker.child.send_signal(signal.SIGTERM)
        await worker.event("stopping")
        await stream.until_ended("a")
        await stream.send(drained=pb.Drained())

        assert await worker.exit_code() == 0


async def test_health_tells_a_loaded_engine_from_a_greeted_worker() -> None:
    """A start-up probe that waits for a scheduler would kill workers during the scheduler's outage."""
    async with process(scheduler_seeds="127.0.0.1:1") as worker, health_of(worker) as serving:
        await worker.event("engine ready")

        await wait_until_async(lambda: serving("engine"), description="health of the engine")
        assert not await serving("readiness")


async def test_all_blocks_are_free_before_the_first_round() -> None:
    async with process(scheduler_seeds="127.0.0.1:1", kv_blocks="77", metrics_port="0") as worker:
        port = (await worker.event("listening"))["metrics_port"]
        await worker.event("engine ready")

        async def free() -> bool:
            body = await asyncio.to_thread(read_url, f"http://127.0.0.1:{port}/metrics")
            return all(
                f'laps_sd_worker_free_blocks{{model="{each}"}} 77.0' in body for each in ("target", "draft")
            )

        await wait_until_async(free, description="free blocks among the metrics")


def read_url(url: str) -> str:
    with urlopen(url, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


async def test_a_worker_that_still_loads_its_model_is_alive_and_ends_at_sigterm(tmp_path: Path) -> None:
    """A pipe in place of a file of the model: its reader waits until somebody writes."""
    os.mkfifo(tmp_path / "config.json")
    async with process(engine="auto", target=str(tmp_path)) as worker:

        def opened() -> int | None:
            try:
                return os.open(tmp_path / "config.json", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # it has no reader
                return None

        # torch is imported before, which takes long on a busy machine.
        writing = await wait_until_async(opened, description="the engine's process reads its model")
        assert writing is not None
        try:
            async with health_of(worker) as serving:
                assert await serving("liveness")
                assert not await serving("engine")
            worker.child.send_signal(signal.SIGTERM)

            assert await worker.exit_code() == 0
        finally:
            os.close(writing)


async def test_a_drain_has_a_bound() -> None:
    async with scheduler() as s, process(scheduler_seeds=s.address, drain_s="0.1") as worker:
        stream = await s.greet()
        await stream.lease(spec("a", max_tokens=900))
        await stream.assign("a")
        await stream.until(lambda s: len(s.reports) > 0, "it works")
        worker.child.send_signal(signal.SIGTERM)

        assert await worker.exit_code() == 0
        assert stream.drains == 1


async def test_the_second_signal_exits_at_once() -> None:
    async with scheduler() as s, process(scheduler_seeds=s.address) as worker:
        stream = await s.greet()
        await worker.event("ready")
        worker.child.send_signal(signal.SIGTERM)
        await stream.until(lambda s: s.drains == 1, "the wish to leave")
        worker.child.send_signal(signal.SIGTERM)

        assert await worker.exit_code() == 128 + signal.SIGTERM


async def test_an_operators_drain_ends_the_process() -> None:
    async with scheduler() as s, process(scheduler_seeds=s.address) as worker:
        stream = await s.greet()
        await stream.send(drain=pb.Drain())
        await stream.until(lambda s: s.drains == 1, "the wish to leave")
        await stream.send(drained=pb.Drained())

        assert await worker.exit_code() == 0


async def test_a_refused_worker_says_why_in_one_sentence() -> None:
    async with scheduler() as s:
        s.refused = pb.WorkerRefused(reason=pb.WorkerRefused.REASON_POOL, detail="this shard serves pool 'x'")
        async with process(scheduler_seeds=s.address) as worker:
            assert await worker.exit_code() == 1
        assert worker.lines[-1] == (
            "laps-sd worker: The scheduler of pool 'demo' refuses this worker: this shard serves pool 'x'"
        )


async def test_a_missing_model_directory_is_one_sentence(tmp_path: Path) -> None:
    async with process(engine="auto", target=str(tmp_path / "nowhere")) as worker:
        assert await worker.exit_code() == 1
    assert worker.lines[-1] == (
        f"laps-sd worker: There is no directory {tmp_path / 'nowhere'}: "
        "LAPS_SD_TARGET and LAPS_SD_DRAFT must name model directories or models of the Hugging Face hub."
    )
    assert not any("Traceback" in line for line in worker.lines)


async def test_wrong_settings_are_told_before_anything_starts() -> None:
    async with process(scheduler_seeds="nonsense", draft="somewhere") as worker:
        assert await worker.exit_code() == 2
    assert len(worker.lines) == 2
