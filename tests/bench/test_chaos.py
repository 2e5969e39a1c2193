"""`laps-sd bench chaos`: its faults lose nothing, and its judgement can fail."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench._chaos.checks import processes_with
from bench._chaos.options import arguments
from bench._chaos.pieces import MORE, pieces
from bench._clients import Load, Outcome, Piece
from bench._faults import plans
from bench._faults.processes import Processes
from bench._faults.state import StackState
from laps_sd.v1 import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
LENGTH, CANCELLED = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_CANCELLED


def row_of_a_run(tmp_path: Path, *given: str) -> dict[str, Any]:
    """Run the benchmark; it must meet its goals."""
    rows_file = tmp_path / "rows.json"
    done = subprocess.run(
        [
            sys.executable,
            "bench/chaos.py",
            *given,
            "--logs",
            str(tmp_path / "logs"),
            "--json",
            str(rows_file),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=800,
    )

    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-8000:]
    [row] = json.loads(rows_file.read_text())["rows"]
    return dict(row)


def test_a_process_that_is_left_is_known_by_its_environment() -> None:
    """Not by its number, which another program may get in a long run."""
    own = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {"CHAOS_RUN": "run-7f3a"}
    )
    try:
        [left] = processes_with("run-7f3a")
        assert left.startswith(f"{own.pid}: ")
        assert processes_with("run-7f3b") == []
    finally:
        own.communicate(b"\n")
    assert processes_with("run-7f3a") == []


@pytest.mark.long
def test_forty_faults_lose_nothing(tmp_path: Path) -> None:
    row = row_of_a_run(tmp_path, "--faults", "40", "--workers", "4", "--requests", "80", "--pieces", "40")

    assert (row["faults"], row["violations"]) == (40, 0)


@pytest.mark.long
def test_faults_of_the_engines_processes_alone_lose_nothing(tmp_path: Path) -> None:
    row = row_of_a_run(
        tmp_path, "--engine", "demo", "--faults", "8", "--every-s", "5", "--kinds", "kill engine,pause engine"
    )

    assert (row["faults"], row["violations"]) == (8, 0)


def test_an_engine_has_the_kinds_of_faults_that_can_hit_it() -> None:
    every = set(plans.KINDS)

    assert every - set(arguments([], "").kinds) == {"kill engine", "pause engine"}
    assert every - set(arguments(["--engine", "demo"], "").kinds) == {"deadly request"}


@pytest.mark.parametrize("given", [["--engine", "vllm"], ["--vllm", "python"]])
def test_the_engine_vllm_and_its_interpreter_are_named_together(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(given, "")

    assert "--engine vllm and --vllm PYTHON go together" in capsys.readouterr().err


def test_a_real_engine_gets_requests_with_every_kind_of_setting() -> None:
    options = [piece.more for piece in pieces(arguments(["--engine", "demo"], ""))]

    assert all(more in options for more in MORE)


def test_a_plan_is_the_same_for_the_same_seed_and_has_every_kind_of_fault() -> None:
    faults = plans.plan(7, 1000, every_s=1.0)

    assert faults == plans.plan(7, 1000, every_s=1.0)
    assert faults != plans.plan(8, 1000, every_s=1.0)
    assert {fault.kind for fault in faults} == set(plans.KINDS)
    assert collections.Counter(fault.kind for fault in faults)["empty record and kill leader"] < 30
    assert all(0 <= fault.lasts_s <= plans.LONGEST_S for fault in faults)


class Scaled:
    """A stack whose worker is scaled down while it is started again."""

    def __init__(self) -> None:
        self.children = {"worker-1": SimpleNamespace(alive=False)}
        self.starts = 0
        self.processes = Processes(cast(Any, self), StackState(), [])

    def restart(self, name: str, *, wait: bool) -> None:
        self.starts += 1
        self.processes.retired.add(name)
        self.processes.expected_ends.add(name)


async def test_a_worker_that_was_scaled_down_is_not_started_and_may_end() -> None:
    stack = Scaled()

    await stack.processes.start("worker-1")
    await stack.processes.start("worker-1")

    assert stack.starts == 1
    assert "worker-1" in stack.processes.expected_ends, "its end is no violation"


def load_that_expects(tokens: list[int]) -> Load:
    load = Load(["127.0.0.1:1"], [Piece("x", 1, len(tokens), 0.0)], seed=1, cancel_share=0.0, deadly_seed=2)
    load.expected = [outcome(tokens, LENGTH)]
    return load


def outcome(tokens: list[int], reason: pb.FinishReason) -> Outcome:
    return Outcome(0, 0, "k", 0.0, tokens=list(tokens), text=["text"], end=pb.Ended(finish_reason=reason))


@pytest.mark.parametrize(
    ("tokens", "reason", "asked", "wrong"),
    [
        ([1, 2, 3], LENGTH, False, ""),
        ([1, 2, 4], LENGTH, False, "different from token 2 on"),
        ([1, 2], LENGTH, False, "different from token 2 on"),
        ([1, 2, 3], pb.FINISH_REASON_STOP, False, "not what the undisturbed run brought"),
        ([1, 2], CANCELLED, True, ""),
        ([2], CANCELLED, True, "its tokens are not the first"),
        ([1, 2], CANCELLED, False, "nobody had cancelled it"),
    ],
)
async def test_whatever_differs_from_the_undisturbed_run_is_a_problem(
    tokens: list[int], reason: pb.FinishReason, asked: bool, wrong: str
) -> None:
    load = load_that_expects([1, 2, 3])
    found = outcome(tokens, reason)
    found.cancel_asked = found.cancelled = asked
    load._check(found)
    await load.close()

    said = " ".join([*found.problems, found.error])
    assert wrong in said
    assert bool(wrong) == bool(said.strip())
