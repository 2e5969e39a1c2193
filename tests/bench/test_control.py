"""`laps-sd bench control` at small sizes: its output, and the exit code for a missed goal."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from bench._control.lengths import output_length, prompt_features
from bench._control.options import GOAL_BYTES, GOAL_MS, verdict
from bench._shard import VirtualShard
from laps_sd.contract.length_features import problem_of
from scheduler_svc.core.handlers.learning import OUTLIVED_UNTIL

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "bench/control.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


SMALL = ("--queued", "200", "--workers", "2", "--slots", "4", "--reports", "20", "--carried", "")


def test_rows_of_the_core_and_of_the_whole_scheduler_are_written(tmp_path):
    rows_file = tmp_path / "rows.json"

    done = run(
        *SMALL, "--goal-ms", "1000", "--fake-workers", "2", "--fake-round-s", "0.05", "--seconds", "1",
        "--backlog", "20", "--json", str(rows_file),
    )  # fmt: skip

    core, whole = json.loads(rows_file.read_text())["rows"]
    assert done.stdout.splitlines()[-1].startswith(("goal met:", "GOAL MISSED:"))
    assert (core["queued"], core["workers"], core["reports"]) == (200, 2, 20)
    assert 0 < core["median_ms"] <= core["p99_ms"]
    assert whole["cpu_ms_per_report"] > 0
    assert whole["reports_per_s"] > 0


def test_a_goal_that_nothing_could_meet_is_missed_by_exit_code():
    done = run(*SMALL, "--goal-ms", "0", "--fake-workers", "0")

    assert done.returncode == 1
    assert "GOAL MISSED" in done.stdout


def test_prompts_of_the_synthetic_requests_show_something_of_their_lengths():
    ids = [f"main.{number:026d}" for number in range(300)]
    prompts = [prompt_features(request_id, 250) for request_id in ids]
    lengths = [output_length(random.Random(request_id), 250) for request_id in ids]

    assert not any(map(problem_of, prompts))
    shown = statistics.correlation(
        [prompt[-1] for prompt in prompts], [math.log(length) for length in lengths]
    )
    assert 0.8 < shown < 0.9


GOOD = {"median_ms": GOAL_MS, "ratio_shortest": 1.0, "memory_per_queued_bytes": 1000.0, "queued": 10}


@pytest.mark.parametrize(
    ("bad", "met"),
    [
        ({}, True),
        ({"median_ms": GOAL_MS * 1.01}, False),
        ({"ratio_shortest": 2.01}, False),
        ({"memory_per_queued_bytes": float(GOAL_BYTES)}, False),
    ],
)
def test_each_goal_can_be_missed(bad, met):
    assert verdict([GOOD, GOOD | bad])[0] is met


def test_the_core_predicts_lengths_from_the_words_of_all_requests_that_it_is_measured_with():
    shard = VirtualShard(queued=20, workers=2, slots=4, policy="laps-sd")
    shard.start()
    shard.fill()

    assert shard.core.priors.prompts.learned > OUTLIVED_UNTIL, "it has learned as much as in a long run"
    explained = [shard.core.explain(f"shard0-{number + 1:026d}", 0.0) for number in range(shard.arrivals)]
    assert all(one and "from the words of its prompt" in one.basis for one in explained)


def test_the_virtual_shard_stays_in_steady_state():
    shard = VirtualShard(queued=100, workers=2, slots=4, policy="laps-sd")
    shard.start()
    shard.fill()
    ended = 0
    for _ in range(200):
        for worker in shard.workers.values():
            events = shard.next_events(worker)
            ended += sum(one.end is not None for one in events[0].progress)
            assert len(events[0].progress) == 4, "no slot is idle"
            shard.step(events)
            shard.core.check()
    assert ended > 0, "requests come and go"
    assert 90 <= shard.core.totals().queued <= 120
