"""The goals of the policy, at a size that can run on every change; `laps-sd bench policy --regime all` is the
whole.

Fewer requests and seeds than the regimes have, so every bound is `SLACK` wider. The lists of policies are the
regimes' own.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from bench._policy.judge import judged
from bench._policy.regime import REGIMES, Regime, read_regime
from bench._policy.run import simulate

SLACK = 0.10
SEEDS = (1, 2)
REDUCED = {"chat": 250, "equal-lengths": 500, "kv-tight": 500, "burst": 100, "anti": 400}
"""Regimes without recorded data, and how many requests."""


def reduced(name: str) -> Regime:
    regime = read_regime(REGIMES / f"{name}.toml")
    workload = dataclasses.replace(regime.workload, requests=REDUCED[name])
    expect = tuple(
        dataclasses.replace(e, at_most=e.at_most * (1 + SLACK), at_least=e.at_least * (1 - SLACK))
        for e in regime.expect
        if e.figure == "mean_s"
    )
    return dataclasses.replace(regime, workload=workload, expect=expect)


@functools.cache
def simulated(name: str, spec: str, seed: int) -> dict:
    """Return the figures of a run; they do not depend on what a regime expects of them."""
    return simulate(reduced(name), spec, seed, None)


def missed(regime: Regime) -> list[dict]:
    needed = {spec for e in regime.expectations for spec in (e.policy, e.of)}
    runs = {
        (regime.name, spec): [simulated(regime.name, spec, seed) for seed in SEEDS] for spec in sorted(needed)
    }
    return [verdict for verdict in judged(regime, runs) if not verdict["met"]]


@pytest.mark.parametrize(
    "name", [name if name == "burst" else pytest.param(name, marks=pytest.mark.long) for name in REDUCED]
)
def test_laps_sd_reaches_its_goals(name):
    assert missed(reduced(name)) == []


def test_identical_requests_are_served_like_those_of_fcfs():
    """The whole regime: with fewer requests no queue forms."""
    regime = read_regime(REGIMES / "identical.toml")
    runs = {(regime.name, spec): [simulate(regime, spec, 1, None)] for spec in ("fcfs", "laps-sd")}

    found = {(v["figure"], v["of"]): v["found"] for v in judged(regime, runs)}
    assert found["p99_s", "fcfs"] <= 1.05
    assert found["longest_wait_s", "fcfs"] <= 1.05
    assert found["mean_s", "fcfs"] <= 1.01


def test_a_policy_that_does_nothing_does_not_reach_them():
    regime = reduced("burst")
    lazy = tuple(dataclasses.replace(e, policy="fcfs") for e in regime.expect)

    verdicts = missed(dataclasses.replace(regime, expect=lazy))

    assert {verdict["of"] for verdict in verdicts if verdict["policy"] == "fcfs"} == {"fcfs", "oracle"}
