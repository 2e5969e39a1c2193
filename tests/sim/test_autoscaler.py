"""Kubernetes' scaling formula, and virtual workers that come and go with it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bench.autoscale import (
    GOALS,
    OURS,
    chosen_target,
    comparisons,
    devices_for,
    disjoint,
    frontier,
    main,
    verdict,
)
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.rpc.autoscaling import DEFAULT_TARGET_LOAD, DEFAULT_TARGET_S
from simulator.autoscaler import Autoscaler, Look, Pods, Scaling, desired_by_average, desired_by_utilisation
from simulator.cluster import Cluster
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.outcome import Outcome

BACKLOG = Scaling(signal="backlog", target=30.0)
BUSY = Scaling(signal="utilisation", target=0.6)
ROOT = Path(__file__).parents[2]
MACHINE = Machine(slots=2)


def rush(requests: int, gap_s: float, rounds: int = 40) -> list[Job]:
    return [
        Job(f"r{number:04d}", number * gap_s, 20, bytes([3] * rounds), 3 * rounds)
        for number in range(requests)
    ]


def run(jobs: list[Job], scaling: Scaling, first: int = 1, check: bool = False) -> tuple[Outcome, Pods]:
    cluster = Cluster(
        jobs, MACHINE, 0, lambda _, settings: policy_named("laps-sd", settings), CoreSettings(), check=check
    )
    pods = Pods(cluster, MACHINE, scaling, first)
    return cluster.run(), pods


# -- the formula ----------------------------------------------------------------------------------------------------------


def test_a_metric_of_the_pool_asks_for_its_value_over_the_target_rounded_up():
    assert desired_by_average(BACKLOG, Look(wanted=2, ready=2, value=100.0)) == 4
    assert desired_by_average(BACKLOG, Look(wanted=5, ready=5, value=61.0)) == 3
    assert desired_by_average(BACKLOG, Look(wanted=5, ready=5, value=0.0)) == 0


@pytest.mark.parametrize("value", [54.5, 60.0, 65.5])
def test_within_ten_per_cent_of_the_target_nothing_changes(value):
    assert desired_by_average(BACKLOG, Look(wanted=2, ready=2, value=value)) == 2


def test_utilisation_asks_for_as_many_as_would_bring_it_to_the_target():
    assert desired_by_utilisation(BUSY, Look(wanted=3, ready=3, value=0.9)) == 5
    assert desired_by_utilisation(BUSY, Look(wanted=6, ready=6, value=0.2)) == 2
    assert desired_by_utilisation(BUSY, Look(wanted=6, ready=6, value=0.63)) == 6


def test_pods_that_start_count_as_idle_where_utilisation_asks_for_more():
    assert desired_by_utilisation(BUSY, Look(wanted=2, ready=2, value=0.9)) == 3
    assert desired_by_utilisation(BUSY, Look(wanted=3, ready=2, value=0.9)) == 3, "one is on its way already"
    assert desired_by_utilisation(BUSY, Look(wanted=3, ready=0, value=0.0)) == 3, "nobody to be measured"


def test_the_highest_wish_of_the_window_counts_before_pods_are_taken_away():
    autoscaler = Autoscaler(replace(BACKLOG, down_window_s=60.0))
    seen = []
    wanted = 4
    for now_s, value in ((0, 120.0), (15, 20.0), (30, 80.0), (45, 20.0), (60, 20.0), (75, 20.0), (90, 20.0)):
        wanted = autoscaler.pods(now_s, Look(wanted, wanted, value))
        seen.append(wanted)

    assert seen == [4, 4, 4, 4, 3, 3, 1]


def test_pods_are_added_four_at_a_time_or_twice_as_many():
    autoscaler = Autoscaler(replace(BACKLOG, most=100))

    assert autoscaler.pods(0, Look(1, 1, 3000.0)) == 5
    assert autoscaler.pods(15, Look(5, 5, 3000.0)) == 10
    assert autoscaler.pods(30, Look(60, 60, 30_000.0)) == 100, "and never more than the most"


def test_a_scaling_that_makes_no_sense_is_refused():
    for wrong in (
        {"signal": "noise"},
        {"target": 0.0},
        {"backlog_target_s": 0.0},
        {"least": 0},
        {"least": 5, "most": 2},
    ):
        with pytest.raises(ValueError, match="must be"):
            replace(BACKLOG, **wrong)


# -- pods -----------------------------------------------------------------------------------------------------------------


def test_a_fixed_number_is_the_cluster_with_so_many_workers():
    jobs = rush(60, 0.2)

    elastic, pods = run(jobs, Scaling(signal="fixed", target=2.0), first=2)
    plain = Cluster(
        jobs, MACHINE, 2, lambda _, settings: policy_named("laps-sd", settings), CoreSettings()
    ).run()

    assert [fate.finished_s for fate in elastic.fates] == [fate.finished_s for fate in plain.fates]
    assert pods.device_s(elastic.end_s) == pytest.approx(2 * elastic.end_s)


def test_workers_come_after_their_start_and_their_devices_count_from_the_decision():
    jobs = rush(400, 0.1, rounds=15)
    scaling = Scaling(signal="requests", target=5.0, most=3, start_s=60.0)

    outcome, pods = run(jobs, scaling)

    assert pods.changes[:2] == [(0.0, 1), (15.0, 3)]
    alone, _ = run(jobs, Scaling(signal="fixed", target=1.0))
    before = [fate.finished_s for fate in outcome.fates if fate.finished_s < 75.0]
    assert before == [fate.finished_s for fate in alone.fates if fate.finished_s < 75.0]
    assert outcome.end_s < alone.end_s
    assert pods.device_s(75.0) == pytest.approx(75.0 + 2 * 60.0)


def test_workers_that_are_taken_away_are_drained_and_no_request_is_lost():
    """A rush, then a trickle: the rush's workers go while requests run on them."""
    jobs = rush(120, 0.05) + [
        replace(job, request_id=f"t{job.request_id}", arrival_s=60.0 + job.arrival_s)
        for job in rush(100, 1.0)
    ]
    scaling = Scaling(signal="backlog", target=2.0, most=6, start_s=5.0, down_window_s=30.0)

    outcome, pods = run(jobs, scaling, check=True)

    assert max(count for _, count in pods.changes) > 2
    assert pods.changes[-1][1] == 1
    assert all(fate.finished_s > fate.job.arrival_s for fate in outcome.fates)
    assert pods.device_s(outcome.end_s) < 3 * outcome.end_s


def test_one_that_has_not_started_goes_first_and_never_works():
    jobs = rush(60, 0.01) + [
        replace(job, request_id=f"t{job.request_id}", arrival_s=100.0 + job.arrival_s)
        for job in rush(40, 5.0)
    ]
    scaling = Scaling(signal="requests", target=4.0, most=8, start_s=120.0, down_window_s=15.0)

    outcome, pods = run(jobs, scaling)

    alone, _ = run(jobs, Scaling(signal="fixed", target=1.0))
    assert max(count for _, count in pods.changes) > 1
    assert [fate.finished_s for fate in outcome.fates] == [fate.finished_s for fate in alone.fates]


def test_the_load_keeps_the_workers_that_the_arrivals_need_while_no_queue_is_there():
    """Work for two workers arrives, evenly: backlog and load both see it, and only the load before it waits."""
    jobs = rush(600, 1.0, rounds=15)
    scaling = Scaling(signal="load", target=0.8, most=8, start_s=5.0, down_window_s=30.0)

    outcome, pods = run(jobs, scaling, first=4, check=True)

    need = sum(MACHINE.service_s(job) for job in jobs) / jobs[-1].arrival_s
    late = [count for when_s, count in pods.changes if when_s > 120.0] or [pods.changes[-1][1]]
    assert all(need <= count <= need / 0.8 + 2.0 for count in late)
    assert all(fate.finished_s > fate.job.arrival_s for fate in outcome.fates)


def test_of_load_and_backlog_the_one_counts_that_asks_for_more():
    scaling = Scaling(signal="load", target=0.5, backlog_target_s=10.0, most=100)

    assert desired_by_average(scaling, Look(2, 2, value=2.0, backlog_s=5.0)) == 4
    assert desired_by_average(scaling, Look(2, 2, value=0.5, backlog_s=65.0)) == 7


# -- the benchmark --------------------------------------------------------------------------------------------------------


def test_a_curve_is_what_no_other_point_beats_and_is_read_between_its_points():
    curve = frontier([(4.0, 10.0), (2.0, 40.0), (3.0, 50.0), (8.0, 10.0)])

    assert curve == [(2.0, 40.0), (4.0, 10.0)]
    assert devices_for(curve, 40.0) == pytest.approx(2.0)
    assert devices_for(curve, 20.0) == pytest.approx(8**0.5)
    assert devices_for(curve, 5.0) is None


def runs_of(**curves):
    """Return runs with these (devices, latency) of each signal."""
    return {
        (name, float(target)): [{"devices": devices, "mean_s": latency_s, "p99_s": latency_s}]
        for name, curve in curves.items()
        for target, (devices, latency_s) in enumerate(curve)
    }


def test_signals_without_a_latency_in_common_are_not_judged_and_the_run_fails():
    runs = runs_of(
        **{OURS: [(4.0, 10.0), (6.0, 5.0)], "requests": [(4.0, 100.0), (6.0, 50.0)], "backlog": [(8.0, 8.0)]}
    )

    said, met = verdict(runs, comparisons(runs))

    assert said.startswith(f"requests not judged, no latency in common with {OURS}, ")
    assert not met


def test_signals_with_latencies_in_common_are_judged_by_the_goals():
    good = runs_of(**{OURS: [(4.0, 10.0), (6.0, 5.0)], "backlog": [(8.0, 8.0)], "fixed": [(1.0, 900.0)]})
    bad = runs_of(**{OURS: [(4.0, 10.0), (6.0, 5.0)], "backlog": [(2.0, 8.0)]})
    without = runs_of(backlog=[(2.0, 8.0)])

    assert verdict(good, comparisons(good))[1]
    assert not verdict(bad, comparisons(bad))[1]
    assert verdict(without, comparisons(without)) == ("nothing to compare", True)


def test_windows_that_overlap_are_counted_once():
    assert disjoint([(0.0, 20.0), (15.0, 35.0), (25.0, 45.0), (30.0, 50.0)]) == 2
    assert disjoint([(0.0, 50.0), (0.0, 10.0), (20.0, 30.0), (40.0, 50.0)]) == 3


def test_the_benchmark_says_what_each_signal_costs_and_gives(tmp_path, capsys):
    trace = tmp_path / "trace.csv.gz"
    lines = [f"{number * 0.9:.3f},200,{30 + number % 50}" for number in range(120)]
    trace.write_bytes(gzip.compress("\n".join(["arrival_s,input_tokens,output_tokens", *lines]).encode()))
    out = tmp_path / "rows.json"
    targets = ("--targets", "backlog:1,4", "--targets", "fixed:1,2")

    code = main(
        [
            "--trace",
            str(trace),
            *targets,
            "--seeds",
            "2",
            "--every",
            "1",
            "--requests",
            "60",
            "--processes",
            "1",
            "--json",
            str(out),
        ]
    )

    said = capsys.readouterr().out
    assert code == 0, said
    assert "2 windows, 1 without overlap" in said, "each has half of the trace or more"
    found = json.loads(out.read_text())
    assert found["about"]["disjoint_windows"] == 1
    points = [row for row in found["rows"] if row["kind"] == "point"]
    assert [(row["config"], row["target"]) for row in points] == [
        ("backlog", 1.0), ("backlog", 4.0), ("fixed", 1.0), ("fixed", 2.0),
    ]  # fmt: skip
    for row in points:
        assert row["seeds"] == 2
        assert row["devices_low"] <= row["devices"] <= row["devices_high"]
        assert row["mean_s"] <= row["p99_s"]
    one, two = points[2:]
    assert (one["devices"], two["devices"]) == (1.0, 2.0)
    assert one["mean_s"] >= two["mean_s"]
    assert found["about"]["scaling"]["start_s"] == 180.0


def test_the_default_targets_are_those_that_the_benchmark_chose():
    newest = max((ROOT / "bench" / "results").glob("*-autoscale.json"))
    about = json.loads(newest.read_text(encoding="utf-8"))["about"]
    values = yaml.safe_load((ROOT / "k8s" / "chart" / "values.yaml").read_text(encoding="utf-8"))
    chart = values["poolDefaults"]["workers"]["autoscaling"]

    assert chart["targetLoad"] == DEFAULT_TARGET_LOAD == about["chosen_target"]
    assert chart["targetBacklogSeconds"] == DEFAULT_TARGET_S == about["scaling"]["backlog_target_s"]
    rows = json.loads(newest.read_text(encoding="utf-8"))["rows"]
    assert chosen_target(rows) == about["chosen_target"]
    [ratio] = [
        row["ratio_devices"]
        for row in rows
        if row["kind"] == "comparison" and (row["config"], row["figure"]) == ("requests", "p99_s")
    ]
    assert ratio <= GOALS["requests"]


def test_a_signal_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--targets", "noise:1"])

    assert "noise" in capsys.readouterr().err
