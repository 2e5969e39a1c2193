"""`laps-sd bench policy`: it prints its findings, and fails when an expectation fails."""

from __future__ import annotations

import json

import pytest

from bench._policy.judge import levels_at_work
from bench._policy.regime import REGIMES, Regime, read_regime, settings_of
from bench._policy.rows import pooled_estimates
from bench._policy.run import taught
from bench.policy import main
from scheduler_svc.core.policies import POLICIES
from simulator.jobs import Job

SMALL = """
title = "A few short requests"
[workload]
requests = 40
[[workload.kinds]]
output = { median = 20, most = 60 }
[[expect]]
of = "fcfs"
at_most = AT_MOST
"""


@pytest.fixture
def regime(tmp_path):
    def write(at_most: str, more: str = "") -> str:
        path = tmp_path / "small.toml"
        path.write_text(SMALL.replace("AT_MOST", at_most) + more)
        return str(path)

    return write


def run(*arguments: str) -> int:
    return main([*arguments, "--processes", "1"])


def test_an_expectation_that_holds_is_told_and_the_exit_code_is_0(regime, capsys, tmp_path):
    code = run("--regime", regime("1.5"), "--seeds", "2", "--json", str(tmp_path / "rows.json"))

    out = capsys.readouterr().out
    assert code == 0
    assert "goal met: 3 of 3 expectations hold in 1 regimes, 2 seeds each" in out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    (ours,) = [row for row in rows if row["kind"] == "policy" and row["policy"] == "laps-sd"]
    assert ours["regime"] == "small"
    assert ours["seeds"] == 2
    assert ours["ratio_fcfs_low"] <= ours["ratio_fcfs"] <= ours["ratio_fcfs_high"]
    assert ours["p50_s"] <= ours["p90_s"] <= ours["p99_s"]
    (fcfs,) = [row for row in rows if row["kind"] == "policy" and row["policy"] == "fcfs"]
    assert (fcfs["ratio_fcfs"], fcfs["ratio_fcfs_low"]) == (1.0, 1.0)
    assert ours["ratios"]["fcfs"] == [ours[f"ratio_fcfs{end}"] for end in ("", "_low", "_high")]
    assert sorted(ours["latencies_s"]) == ours["latencies_s"]
    levels = [row for row in rows if row["kind"] == "verdict" and row["figure"] == "levels_at_work"]
    assert [(row["at_least"], row["at_most"], row["met"]) for row in levels] == [(3, None, True)]
    assert levels_at_work(ours["level_s"]) >= 3


def test_a_level_with_next_to_nothing_in_it_carries_no_work():
    assert levels_at_work({"0": 0.9, "1": 50.0, "2": 49.1}) == 2


def test_rows_have_perceptibility_and_errors_of_the_estimates(regime, tmp_path):
    """With a prediction, lengths are known from the client; without one, from earlier requests of the
    class."""
    bases = {}
    for predictor in ("0.3", "none"):
        file = tmp_path / f"{predictor}.json"
        arguments = ("--seeds", "2", "--policy", "laps-sd", "--predictor", predictor)
        assert run("--regime", regime("1.5"), *arguments, "--json", str(file)) == 0
        (row,) = [row for row in json.loads(file.read_text())["rows"] if row["kind"] == "policy"]
        bases[predictor] = {found["basis"] for found in row["estimates"]}
        arrival, first = (
            found for found in row["estimates"] if found["moment"] in ("arrival", "first_round")
        )
        assert arrival["requests"] == 2 * 40, "each request is judged at arrival"
        assert first["requests"] < arrival["requests"], "some end with their first round"
        assert arrival["ratio_p10"] <= arrival["ratio_p50"] <= arrival["ratio_p90"]
        assert 0 <= row["perceptible_at_arrival_share"] <= row["perceptible_share"] <= 1

    assert bases == {"0.3": {"client"}, "none": {"class"}}


def test_errors_of_several_seeds_are_those_of_all_their_requests():
    one = {
        "moment": "arrival",
        "basis": "class",
        "requests": 1,
        "predicted_s": 2.0,
        "actual_s": 1.0,
        "log_rms": 1.0,
    }
    three = one | {"requests": 3, "predicted_s": 5.0, "actual_s": 9.0, "log_rms": 0.0}
    quantiles = {"ratio_p10": 1.0, "ratio_p50": 1.0, "ratio_p90": 1.0}

    (pooled,) = pooled_estimates([[one | quantiles], [three | quantiles | {"ratio_p50": 2.0}]])

    assert (pooled["requests"], pooled["predicted_s"], pooled["actual_s"]) == (4, 7.0, 10.0)
    assert pooled["log_rms"] == 0.5
    assert pooled["ratio_p50"] == 1.75


def test_a_regime_is_run_at_other_loads_too(regime, capsys, tmp_path):
    file = tmp_path / "rows.json"
    arguments = ("--seeds", "1", "--policy", "fcfs", "--loads", "small:0.9,0.3", "--json", str(file))

    assert run("--regime", regime("1.5"), *arguments) == 0

    found = json.loads(file.read_text())
    light, heavy = [row for row in found["rows"] if row["kind"] == "sweep"]
    assert [light["load"], heavy["load"]] == [0.3, 0.9]
    assert light["requests"] == 13, "a third of the regime's"
    assert light["mean_s"] < heavy["mean_s"]
    assert found["about"]["command"].endswith("--seeds 1 --policy fcfs --loads small:0.9,0.3")
    assert found["about"]["regimes"]["small"]["workload"]["arrivals"]["load"] == 0.8


@pytest.mark.parametrize(
    ("loads", "more", "what"),
    [
        ("chat:0.5", "", "--loads: chat does not run"),
        ("0.5", '\n[workload.arrivals]\nprocess = "burst"\n', "small is a burst and has no load"),
    ],
)
def test_loads_that_cannot_be_run_are_refused(regime, capsys, loads, more, what):
    assert run("--regime", regime("1.5", more), "--seeds", "1", "--loads", loads) == 2

    assert what in capsys.readouterr().err


def test_loads_that_cannot_be_read_are_refused(capsys):
    with pytest.raises(SystemExit):
        run("--loads", "0.5,0")

    assert "--loads must be" in capsys.readouterr().err


def test_an_expectation_may_compare_with_another_regime_which_then_runs_too(regime, capsys):
    other = """
[[expect]]
figure = "mean_s"
of = "laps-sd"
of_figure = "p50_s"
of_regime = "burst"
at_most = 0.5
"""
    assert run("--regime", regime("1.5", other), "--seeds", "1") == 0

    out = capsys.readouterr().out
    assert "laps-sd mean_s / laps-sd p50_s in burst ≤ 0.50" in out
    assert "in 2 regimes" in out


def test_an_expectation_that_fails_is_told_and_the_exit_code_is_1(regime, capsys):
    code = run("--regime", regime("0.01"), "--seeds", "1")

    out = capsys.readouterr().out
    assert code == 1
    assert "MISSED" in out
    assert "GOAL MISSED: 2 of 3 expectations hold" in out


def test_what_is_changed_by_options_has_no_expectations_of_the_file(regime, capsys):
    code = run("--regime", regime("0.01"), "--seeds", "1", "--load", "0.5", "--batch", "2", "--workers", "2")

    assert code == 0
    assert "0.010" not in capsys.readouterr().out


def test_a_trace_of_ones_own_is_replayed(regime, capsys, tmp_path):
    trace = tmp_path / "day.csv"
    rows = "".join(f"{n / 3},{50 + n},{5 + n % 20}\n" for n in range(60))
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + rows)

    code = run(
        "--regime", regime("9"), "--trace", str(trace), "--predictor", "none", "--seeds", "1", "--policy", "fcfs",
        "--policy", "laps-sd",
    )  # fmt: skip

    assert code == 0
    assert "fcfs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ("\n[machin]\n", "there is no 'machin'"),
        ("\n[machine]\nslots = 0\n", "slots, block_size and prefill_chunk must be at least 1"),
        ('\n[workload.predictor]\nkind = "recorded"\nfile = "nowhere.csv"\n', "nowhere.csv"),
    ],
)
def test_what_is_wrong_with_a_regime_is_one_sentence(regime, capsys, more, what):
    assert run("--regime", regime("1", more), "--seeds", "1", "--data", "/nowhere") == 2

    error = capsys.readouterr().err
    assert what in error
    assert "Traceback" not in error


def test_a_policy_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        run("--policy", "fastest")

    assert "there is no 'fastest'; there are: " in capsys.readouterr().err


def test_settings_of_one_policy_can_be_given():
    assert settings_of("laps-sd:reserved_share=false,level_base_s=0.5", {}).level_base_s == 0.5
    with pytest.raises(ValueError, match="there is no 'levels'"):
        settings_of("laps-sd:levels=3", {})


def test_a_worker_that_is_twice_as_slow_is_half_a_worker():
    assert Regime(title="", workers=3, slowness=(2.0,)).capacity == 2.5
    assert Regime(title="", workers=1, slowness=(2.0, 4.0)).capacity == 0.5, "--workers may leave some out"


@pytest.mark.parametrize("path", sorted(REGIMES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_regime_of_the_repository_can_be_read_and_judges_policies_that_exist(path):
    regime = read_regime(path)

    assert isinstance(regime, Regime)
    assert regime.expect, "a regime that expects nothing proves nothing"
    assert {spec.partition(":")[0] for spec in regime.runs} <= {*POLICIES, "oracle"}
    for spec in regime.runs:
        settings_of(spec, regime.settings)


def test_a_warm_up_learns_from_a_cut_request_as_the_scheduler_does():
    """Its length is unknown: recorded outputs that ended at their limit would have gone on."""
    learnt = taught(
        [Job("own", 0.0, 9, bytes([1] * 10), 80), Job("cut", 0.0, 9, bytes([2] * 40), 80)]
    ).to_dict()

    assert learnt["all"]["length_counts"] and learnt["all"]["length_cuts"]
