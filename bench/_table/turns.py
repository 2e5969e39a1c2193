"""One session: its engines are loaded together, and take turns over each task."""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._peers import DRIVER, Peer, PeerFailed
from bench._table import models
from bench._table.homes import interpreter
from bench._table.plan import MAX_LENGTH, OURS, PREFILL, QUANTIZED, Entry, Session, threads_in_words
from bench.report import progress

SETTLE_S = 0.3
"""Pause before each measurement on several threads: those of the engine before it spin for a while."""
SPARE_TOKENS = 16
"""Output tokens beyond those that are measured: requests whose prompts are computed first get some more."""


@dataclass
class Measured:
    """The speeds of one engine in a session."""

    speeds: dict[int | str, list[float]] = field(default_factory=dict)  # tokens per second, by task and turn
    version: str | None = None
    not_run: str | None = None  # why there is nothing, or no more


def run(session: Session, options: argparse.Namespace, scratch: Path) -> dict[Entry, Measured]:
    """Measure a session. An engine that does not run is reported and left out."""
    found = {entry: Measured() for entry in session.entries}
    with ExitStack() as stack:
        running: dict[Entry, Peer] = {}
        for entry, measured in found.items():
            try:
                python, setup = _setup(session, entry, options)
                name = f"{entry}, {threads_in_words(entry.threads)}"
                running[entry] = stack.enter_context(Peer([python, str(DRIVER)], setup, scratch, name))
            except (PeerFailed, OSError) as error:
                _leave_out(entry, measured, error)
        for entry, peer in list(running.items()):
            try:
                found[entry].version = peer.ready()
            except PeerFailed as error:
                _leave_out(entry, found[entry], error)
                del running[entry]
        for task in session.tasks:
            _Turns(session, options, running, found).take(task)
    return found


@dataclass
class _Turns:
    session: Session
    options: argparse.Namespace
    running: dict[Entry, Peer]
    found: dict[Entry, Measured]

    def take(self, task: int | str) -> None:
        """Measure one task in turns, after a turn that does not count."""
        began, model = time.monotonic(), self.session.model
        turns = model.prefills(self.options.turns) if task == PREFILL else self.options.turns
        tokens = 2 + model.generated_tokens(turns) + SPARE_TOKENS
        start = {"do": "start", "batch": task, "tokens": tokens}
        rng = random.Random(0)
        for turn in range(turns + 1):
            for entry in rng.sample(list(self.running), len(self.running)):
                if task == PREFILL:
                    self._measure(entry, task, {"do": "prefill"}, counts=turn > 0)
                    continue
                if model.restarts or turn == 0:
                    self._ask(entry, start)
                self._measure(entry, task, {"do": "decode", "steps": model.steps}, counts=turn > 0)
                if model.restarts or turn == turns:
                    self._ask(entry, {"do": "finish"})
        words = "prompt of 1,000 tokens" if task == PREFILL else f"batch {task}"
        progress(f"  {words}: {turns} turns in {time.monotonic() - began:.0f} s")

    def _measure(self, entry: Entry, task: int | str, question: dict[str, Any], *, counts: bool) -> None:
        if self.session.by_wall_clock:
            time.sleep(SETTLE_S)
        answer = self._ask(entry, question)
        if counts and answer is not None:
            seconds = answer["wall_s" if self.session.by_wall_clock else "cpu_s"]
            self.found[entry].speeds.setdefault(task, []).append(answer["tokens"] / seconds)

    def _ask(self, entry: Entry, question: dict[str, Any]) -> dict[str, Any] | None:
        if entry not in self.running:
            return None
        try:
            return self.running[entry].ask(question)
        except PeerFailed as error:
            _leave_out(entry, self.found[entry], error)
            del self.running[entry]
            return None


def prepare(session: Session, options: argparse.Namespace) -> None:
    """Make what the engines of a session need and is made once; what fails is reported when it is used."""
    for entry in session.entries:
        with suppress(PeerFailed, OSError):
            _setup(session, entry, options)


def _setup(session: Session, entry: Entry, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the interpreter of an engine, and its setup."""
    source = models.directory(session.model, options.cache)
    python, place = sys.executable, None
    if entry.engine != OURS:
        python = interpreter(entry.engine, getattr(options, entry.engine), options.cache)
        place = models.converted(source, session.model, entry, python, options.cache)
    quantized = entry.precision in QUANTIZED
    slots = max((task for task in session.tasks if isinstance(task, int)), default=1)
    short, long = models.prompts(session.model, source, slots)
    return python, {
        "task": "steps",
        "engine": entry.engine,
        "target": str(source),
        "converted_target": None if place is None else str(place),
        "quantization": entry.precision if quantized else "none",
        "dtype": "bfloat16" if quantized else entry.precision,
        "threads": entry.threads,
        "max_length": MAX_LENGTH,
        "slots": slots,
        "draft_len": 0,
        "compiled": True,
        "ends": [],
        "prompts": short,
        "long_prompt": long,
    }


def _leave_out(entry: Entry, measured: Measured, error: Exception) -> None:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    measured.not_run = lines[0] if len(lines) == 1 else f"{lines[0].rstrip(':')}: {lines[-1]}"
    progress(f"  {entry} does not run here: {error}")
