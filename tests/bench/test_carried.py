"""The synthetic workers of `laps-sd bench control` report like real ones, and each latency belongs to its report."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench._control.latency import Arrivals, Latencies, Sample, is_sampled, join
from bench._control.synthetic_worker import DRAFTED, Held, round_report, scripts
from scheduler_svc.core.events import End, RoundReported
from scheduler_svc.wire.reports import round_reported

ROOT = Path(__file__).parents[2]
SAMPLED, OTHER = "s0.10", "s0.11"
SCRIPT = scripts(random.Random(1))[0]


def held(request_id: str, *, end: int) -> Held:
    """Return a request with a prompt of 20 tokens that was just leased."""
    return Held(
        request_id=request_id,
        lease_epoch=3,
        position=0,
        end=end,
        script=SCRIPT,
        rounds=0,
        to_prefill=20,
        sampled=is_sampled(request_id),
    )


def reported(number: int, run: list[Held]) -> RoundReported:
    """Return what the core of a scheduler receives."""
    return round_reported("w", round_report(number, run, 0.05))


def test_reports_of_a_request_are_those_of_a_real_worker():
    """It prefills first, continues where the round before has ended, and ends at its length."""
    request = held(SAMPLED, end=200)
    position = 0
    for number in range(1, 200):
        report = reported(number, [request])
        (progress,) = report.progress

        assert (progress.request_id, progress.lease_epoch, progress.position) == (SAMPLED, 3, position)
        assert progress.prefilled == (20 if number == 1 else 0)
        assert len(progress.tokens) == progress.accepted + 1
        assert report.draft_s + report.verify_s + report.prefill_s == pytest.approx(0.05)
        position += len(progress.tokens)
        if progress.end:
            break

    assert progress.end is End.STOP
    assert 200 <= position <= 200 + DRAFTED
    assert request.over


def test_a_report_contains_each_request_once_in_the_order_of_the_round():
    run = [held(f"s0.{number}", end=200) for number in range(64)]

    report = reported(1, run)

    assert [progress.request_id for progress in report.progress] == [request.request_id for request in run]


def test_rows_with_nothing_but_tokens_are_columns():
    """From the round after the prefill to the one before the end."""
    run = [held(f"s0.{number}", end=9) for number in range(8)]
    forms = []
    while run:
        report = round_report(1, run, 0.05)
        forms.append((bool(report.progress), len(report.plain.request_ids)))
        assert len(report.progress) + len(report.plain.request_ids) == len(run)
        run = [one for one in run if not one.over]

    assert forms[:2] == [(True, 0), (False, 8)]
    assert forms[-1][0]


def test_a_delivery_of_several_rounds_is_the_arrival_of_each():
    arrivals = Arrivals()
    arrivals.note(10.5, [(SAMPLED, 3), (OTHER, 3)])
    arrivals.note(12.0, [(SAMPLED, 8)])
    samples = [Sample(SAMPLED, 0, 10.0), Sample(SAMPLED, 3, 11.0), Sample(SAMPLED, 6, 11.75)]

    assert join(samples, arrivals, until_s=20.0) == Latencies([250.0, 500.0, 1000.0], not_arrived=0)


def test_tokens_that_have_not_arrived_count_with_the_time_that_they_have_waited():
    arrivals = Arrivals()
    arrivals.note(10.5, [(SAMPLED, 3)])
    samples = [Sample(SAMPLED, 0, 10.0), Sample(SAMPLED, 3, 11.0)]

    assert join(samples, arrivals, until_s=20.0) == Latencies([500.0, 9000.0], not_arrived=1)


def test_a_small_run_processes_the_reports_and_joins_the_samples(tmp_path):
    rows_file = tmp_path / "rows.json"
    core = ["--queued", "200", "--workers", "2", "--reports", "20", "--fake-workers", "0"]

    done = subprocess.run(
        [
            sys.executable,
            "bench/control.py",
            *core,
            *("--slots", "32", "--carried", "2", "--seconds", "1.5", "--output-tokens", "30"),
            *("--round-spread", "0.1", "--json", str(rows_file)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode in (0, 1), done.stderr  # the goals are those of the core
    _, row = json.loads(rows_file.read_text())["rows"]
    assert row["config"] == "carried, 2 workers"
    assert row["asked_per_s"] == 40
    assert row["carried_per_s"] > 0
    assert 1 < row["requests_per_report"] <= 32, "a busy machine may not keep the lists full"
    assert 2 < row["tokens_per_request"] < 4
    assert row["samples"] > row["not_arrived"] >= 0
    assert 0 < row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"]
    for process in ("scheduler", "record", "workers", "client"):
        assert row[f"{process}_cpu_ms"] > 0
