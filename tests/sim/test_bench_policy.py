"""`laps-sd bench policy`: it says what it found, and fails when an expectation fails."""

from __future__ import annotations

import json

import pytest

from bench.policy import REGIMES, Regime, main, read_regime, settings_of
from scheduler_svc.core.policies import POLICIES

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


@pytest.mark.parametrize("path", sorted(REGIMES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_regime_of_the_repository_can_be_read_and_judges_policies_that_exist(path):
    regime = read_regime(path)

    assert isinstance(regime, Regime)
    assert regime.expect, "a regime that expects nothing proves nothing"
    assert {spec.partition(":")[0] for spec in regime.runs} <= {*POLICIES, "oracle"}
    for spec in regime.runs:
        settings_of(spec, regime.settings)
