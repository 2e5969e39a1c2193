"""Runs on the clock: real servers with vLLM's OpenAI API, one for each mode, that take turns on the same requests.

All servers stay up, and one at a time has requests. A server of LAPS-SD keeps what it has learnt from the runs
before, as in use. So no prompt comes twice: at temperature 0 its answer would be known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench._peers import PeerFailed, environment, last_lines, wait_or_kill
from bench._vllm.figures import figures
from bench._vllm.in_core import draft_model
from bench._vllm.modes import FCFS, Mode
from bench._vllm.workload import Workload, distinct_workloads, guessed, poisson_arrivals, requests_of
from bench.report import progress
from laps_sd.stack.ports import free_port

WITHIN_S = 0.3
"""Seconds over which a burst arrives: some 40 steps, as in steps. Within 2 s a fast machine served a burst of 100 as it came."""
FIRST_SEED = 100
START_S = 1200.0
"""Longest start of a server."""
SCHEDULER = "laps_vllm.scheduler.LapsScheduler"


class Server:
    """One OpenAI server of vLLM."""

    def __init__(self, python: str, mode: Mode, setup: dict[str, Any], root: Path, folder: Path) -> None:
        self.mode = mode
        self.port = free_port()
        self._log = folder / f"server-{self.port}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "vllm.entrypoints.openai.api_server", *_arguments(mode, setup, self.port)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
                env=os.environ | environment(setup["threads"]) | mode.environment
                | {"PYTHONPATH": str(root), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        wait_or_kill(self._process, 30)

    def wait(self) -> None:
        """Wait until it answers. Raise PeerFailed if it ends, or takes too long."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5.0).close()
                return
            time.sleep(0.5)
        raise PeerFailed(f"the server of {self.mode.name} did not start:{last_lines(self._log)}")


def _arguments(mode: Mode, setup: dict[str, Any], port: int) -> list[str]:
    speculative = draft_model(setup["draft"], setup["draft_len"])
    ours = mode.scheduler == "laps"
    # vLLM's own "auto" is half precision for weights in float32.
    dtype = "float32" if setup["dtype"] == "auto" else setup["dtype"]
    return [
        *("--model", setup["target"], "--served-model-name", "demo", "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", dtype, "--max-model-len", str(setup["max_length"])),
        *("--max-num-batched-tokens", str(setup["budget"]), "--speculative-config", json.dumps(speculative)),
        *("--max-num-seqs", str(setup["residents"] if ours else setup["slots"])),
        *("--max-num-active-seqs", str(setup["slots"]), "--disable-uvicorn-access-log"),
        *(("--scheduler-cls", SCHEDULER) if ours else ("--scheduling-policy", mode.scheduler)),
    ]


def measure(
    servers: Sequence[Server], count: int, runs: int, load: float, setup: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each run: `runs` bursts, and as many times arrivals at `load` of what the burst before
    showed that the first mode serves. A burst before the first of them is in no row: what a server does for the
    first time takes longer, and LAPS-SD has learnt nothing yet.
    """
    for server in servers:
        server.wait()
        progress(f"the server of {server.mode.name} is ready")
    warm, *workloads = distinct_workloads(1 + 2 * runs, count, FIRST_SEED)
    arrivals = [number * WITHIN_S / count for number in range(count)]
    _in_turn(servers, "before the first", warm, arrivals, setup)
    for burst, loaded in zip(workloads[::2], workloads[1::2], strict=True):
        rows, lasted_s = _in_turn(servers, f"burst of {count}", burst, arrivals, setup)
        yield from rows
        at_load = poisson_arrivals(count, lasted_s / count / load, loaded.seed)
        yield from _in_turn(servers, f"load {load:g}", loaded, at_load, setup)[0]


def _in_turn(
    servers: Sequence[Server],
    setting: str,
    workload: Workload,
    arrivals: Sequence[float],
    setup: dict[str, Any],
) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each mode, and the seconds that the first one took. The first is first, since it shows
    the lengths; the order of the others is another one in each run.
    """
    others = list(servers[1:])
    random.Random(f"{setting}/{workload.seed}").shuffle(others)
    lengths: list[int] = [0] * len(workload)
    guesses, rows, first_s, first_mean = lengths, [], 0.0, 0.0
    for server in (servers[0], *others):
        found = _run(server, workload, arrivals, lengths, guesses, setup)
        if server is servers[0]:
            lengths, first_s = found["lengths"], found["lasted_s"]
            guesses, first_mean = guessed(lengths, workload.seed), figures(found["latencies"])["mean"]
        row = {
            "measured": "clock",
            "setting": setting,
            "requests": len(workload),
            "seed": workload.seed,
            "mode": server.mode.name,
            **{name: round(value, 4) for name, value in figures(found["latencies"]).items()},
            "lasted_s": round(found["lasted_s"], 3),
            "tokens": sum(found["lengths"]),
            "same_lengths": sum(a == b for a, b in zip(found["lengths"], lengths, strict=True)),
        }
        rows.append(row)
        ratio = row["mean"] / first_mean
        progress(
            f"clock, {setting}, seed {workload.seed}: {server.mode.name}, {row['mean']:.2f} s, {ratio:.2f} of {FCFS}"
        )
    return rows, first_s


def _run(
    server: Server,
    workload: Workload,
    arrivals: Sequence[float],
    lengths: Sequence[int],
    guesses: Sequence[int],
    setup: dict[str, Any],
) -> dict[str, Any]:
    requests = requests_of(workload, server.mode, arrivals, lengths, guesses)
    return asyncio.run(_send(f"http://127.0.0.1:{server.port}/v1/completions", server.mode, requests, setup))


async def _send(
    url: str, mode: Mode, requests: Sequence[dict[str, Any]], setup: dict[str, Any]
) -> dict[str, Any]:
    """Send requests at their times, whether or not others were answered; a latency counts from the time that
    was due.
    """
    import aiohttp

    unlimited = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=unlimited, connector=connector) as session:
        began_s = time.monotonic() + 0.05

        async def one(request: dict[str, Any]) -> tuple[float, int]:
            due_s = began_s + request["arrival"]
            await asyncio.sleep(due_s - time.monotonic())
            async with session.post(url, json=body_of(request, mode, setup)) as answer:
                told = await answer.json()
                if answer.status != 200:
                    raise PeerFailed(f"{mode.name} answered {answer.status}: {told}")
            return time.monotonic() - due_s, told["usage"]["completion_tokens"]

        done = await asyncio.gather(*(one(request) for request in requests))
        return {
            "latencies": [latency for latency, _ in done],
            "lengths": [length for _, length in done],
            "lasted_s": time.monotonic() - began_s,
        }


def body_of(request: dict[str, Any], mode: Mode, setup: dict[str, Any]) -> dict[str, Any]:
    """Return a request as the OpenAI API takes it."""
    body = {"model": "demo", "prompt": request["ids"], "max_tokens": setup["tokens"], "temperature": 0}
    if mode.scheduler == "priority":
        body["priority"] = request["priority"]
    if request["hints"]:
        body["vllm_xargs"] = request["hints"]
    return body
