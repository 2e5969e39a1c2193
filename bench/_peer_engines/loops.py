"""The loops that measure an engine: whole cells, or single steps of a full batch."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench._peer_engines.engine import PeerEngine

_numbers = itertools.count()
"""Numbers of requests, which are never used again."""


def generate(engine: PeerEngine, prompts: list[list[int]], batch: int, tokens: int) -> dict[str, Any]:
    """Generate from all prompts, first come, first served, at most `batch` together."""
    numbers = list(itertools.islice(_numbers, len(prompts)))
    waiting = list(zip(numbers, prompts, strict=True))[::-1]
    running = 0
    outputs: dict[int, list[int]] = {number: [] for number in numbers}
    decode: list[float] = []
    wall, cpu = time.monotonic(), time.process_time()
    while waiting or running:
        fresh = bool(waiting) and running < batch
        while waiting and running < batch:
            engine.add(*waiting.pop(), tokens)
            running += 1
        whole, began = running == batch and not fresh, time.process_time()
        done = engine.step()
        if whole:
            decode.append(time.process_time() - began)
        for number, new, ended in done:
            outputs[number] += new
            running -= ended
    return {
        "outputs": list(outputs.values()),
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.monotonic() - wall,
        "decode_s": statistics.median(decode) if decode else None,
    }


class Steps:
    """Measures single steps of a batch that stays full, and prompts alone."""

    def __init__(self, engine: PeerEngine, prompts: list[list[int]], long_prompt: list[int]) -> None:
        self._engine = engine
        self._prompts = prompts
        self._long = long_prompt
        self._running: dict[int, int] = {}  # output tokens, by number

    def start(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Begin `batch` requests of `tokens` output tokens each, up to the second token of all."""
        for ids in self._prompts[: asked["batch"]]:
            self._add(ids, asked["tokens"])
        while any(count < 2 for count in self._running.values()):
            self._step()
        return {}

    def decode(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Measure `steps` steps of the requests that run. Raise RuntimeError if one of them gets no token."""
        expected = len(self._running) * asked["steps"]
        found = self._timed(lambda: sum(self._step() for _ in range(asked["steps"])))
        if found["tokens"] != expected:
            raise RuntimeError(f"{found['tokens']} tokens in place of {expected}: the batch was not full")
        return found

    def finish(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Let all requests end."""
        while self._running:
            self._step()
        return {}

    def prefill(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Measure the long prompt up to its first output token."""
        self._add(self._long, 1)

        def until_it_ends() -> int:
            while self._running:
                self._step()
            return len(self._long)

        return self._timed(until_it_ends)

    def _add(self, ids: list[int], tokens: int) -> None:
        number = next(_numbers)
        self._engine.add(number, ids, tokens)
        self._running[number] = 0

    def _step(self) -> int:
        new_tokens = 0
        for number, new, ended in self._engine.step():
            new_tokens += len(new)
            self._running[number] += len(new)
            if ended:
                del self._running[number]
        return new_tokens

    def _timed(self, run: Callable[[], int]) -> dict[str, Any]:
        wall, cpu = time.monotonic(), time.process_time()
        tokens = run()
        return {
            "tokens": tokens,
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.monotonic() - wall,
        }


def serve(engine: PeerEngine, setup: dict[str, Any], channel: Any) -> None:
    """Answer questions until stdin ends: about steps if that is the setup's task, else about cells."""
    if setup["task"] == "steps":
        steps = Steps(engine, setup["prompts"], setup["long_prompt"])
        actions = {one.__name__: one for one in (steps.start, steps.decode, steps.finish, steps.prefill)}
        answer_all(channel, engine.version, lambda asked: actions[asked["do"]](asked))
    else:
        answer_all(
            channel,
            engine.version,
            lambda asked: generate(engine, setup["prompts"][asked["cell"]], asked["batch"], setup["tokens"]),
        )


def open_channel() -> Any:
    """Return the channel of the answers: the original stdout, while all output of libraries goes to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def answer_all(channel: Any, version: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Send the version, since all is loaded, and answer each line of stdin with one line until it ends."""
    send(channel, {"ready": version})
    for line in sys.stdin:
        send(channel, answer(json.loads(line)))


def send(channel: Any, answer: dict[str, Any]) -> None:
    """Write one line."""
    print(json.dumps(answer), file=channel, flush=True)
