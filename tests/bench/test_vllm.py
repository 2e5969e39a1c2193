"""`laps-sd bench vllm`: what each mode sends, replays, ratios of pairs, and goals that can be missed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench._vllm.figures import BURSTS, compared, figures, ratio
from bench._vllm.goals import (
    GOAL_DECISION_MS,
    GOAL_GUESS,
    GOAL_NO_HINT,
    GOAL_PRIORITY,
    GOAL_PRIORITY_P99,
    GOAL_SPEED,
    GOAL_WORKER,
    goals,
    verdict,
)
from bench._vllm.modes import CLASS, FCFS, GUESS, MODES, NO_HINT, PRIORITY, SHORTEST
from bench._vllm.on_clock import body_of
from bench._vllm.options import arguments
from bench._vllm.replay import Recorded, next_tokens
from bench._vllm.workers import COUPLED, PLAIN
from bench._vllm.workload import (
    Workload,
    burst_arrivals,
    demo_workload,
    distinct_workloads,
    guessed,
    load_arrivals,
    requests_of,
)
from demo.prompts import KINDS

BY_NAME = {mode.name: mode for mode in MODES}
TWO = Workload(1, [[5, 6], [7]], ["code", "chat"])


def sent(name: str) -> list[dict[str, Any]]:
    return requests_of(TWO, BY_NAME[name], [0, 3], [40, 9], [50, 8])


@pytest.mark.parametrize(
    ("name", "hints", "priority"),
    [
        (FCFS, {}, 0),
        (PRIORITY, {}, 50),
        (SHORTEST, {}, 40),
        (NO_HINT, {}, 0),
        (CLASS, {"workload_class": "code"}, 0),
        (GUESS, {"workload_class": "code", "expected_output_tokens": 50}, 0),
    ],
)
def test_a_mode_sends_its_hints_and_no_other(name: str, hints: dict[str, Any], priority: int):
    first, second = sent(name)
    assert first == {"ids": [5, 6], "arrival": 0, "hints": hints, "priority": priority}
    assert second["arrival"] == 3


def test_modes_that_start_with_what_was_learnt_send_the_same_as_those_that_do_not():
    pairs = [(mode, BY_NAME[mode.name.removesuffix(", learnt before")]) for mode in MODES if mode.learnt]
    assert len(pairs) == 4
    assert all(sent(warm.name) == sent(cold.name) for warm, cold in pairs)
    assert all(warm.environment == cold.environment for warm, cold in pairs)
    assert len({warm.file_name for warm, _ in pairs}) == 4


def test_the_api_gets_a_priority_or_hints_only_where_they_have_a_meaning():
    setup = {"tokens": 30}
    bodies = {name: body_of(sent(name)[0], BY_NAME[name], setup) for name in (FCFS, PRIORITY, GUESS)}
    assert bodies[FCFS] == {
        "model": "demo",
        "prompt": [5, 6],
        "max_tokens": 30,
        "temperature": 0,
    }
    assert bodies[PRIORITY]["priority"] == 50
    assert bodies[GUESS]["vllm_xargs"] == {"workload_class": "code", "expected_output_tokens": 50}
    assert "priority" not in bodies[GUESS]


def test_equal_seeds_give_equal_requests_and_guesses():
    assert demo_workload(13, 4) == demo_workload(13, 4)
    assert demo_workload(13, 4) != demo_workload(13, 5)
    lengths = [10, 100, 1] * 200
    assert guessed(lengths, 1) == guessed(lengths, 1) != guessed(lengths, 2)
    assert min(guessed(lengths, 1)) == 1
    assert sum(guess > length for guess, length in zip(guessed(lengths, 1), lengths, strict=True)) > 200


def test_no_prompt_comes_twice_in_distinct_workloads_of_all_kinds():
    workloads = distinct_workloads(16, 100, 1)

    prompts = [tuple(ids) for workload in workloads for ids in workload.ids]
    assert len(set(prompts)) == len(prompts) == 16 * 100
    for workload in workloads:
        of_kind = Counter(workload.kinds)
        assert set(of_kind) == set(KINDS)
        assert max(of_kind.values()) <= 10
    assert distinct_workloads(3, 10, 1) == distinct_workloads(3, 10, 1) != distinct_workloads(3, 10, 2)


def test_a_burst_arrives_evenly_and_a_load_at_its_rate():
    assert burst_arrivals(4, 40) == [0, 10, 20, 30]
    service = [20] * 4000
    arrivals = load_arrivals(service, 8, 0.5, 1)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(4000 * 20 / 8 / 0.5, rel=0.05)


def test_a_replay_emits_the_recorded_groups_and_joins_them_again_after_an_eviction():
    recorded = Recorded((1, 2, 3, 4, 5, 6, 7), (1, 4, 2))
    ends = [1, 5, 7]
    assert next_tokens(recorded, ends, 0, 0) == [1]
    assert next_tokens(recorded, ends, 1, 4) == [2, 3, 4, 5]
    assert next_tokens(recorded, ends, 5, 4) == [6, 7]
    assert next_tokens(recorded, ends, 1, 0) == [2]
    assert next_tokens(recorded, ends, 2, 4) == [3, 4, 5]
    assert next_tokens(recorded, ends, 2, 1) == [3, 4], "no more than the drafts and one"


def row(mode: str, seed: int, mean: float, p99: float = 10.0, setting: str = "burst of 80", **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "measured": "steps",
        "setting": setting,
        "seed": seed,
        "mode": mode,
        "mean": mean,
        "p99": p99,
    } | more


def test_figures_of_latencies():
    assert figures([4.0, 1.0, 2.0, 3.0]) == {
        "mean": 2.5, "p50": 2.0, "p90": 4.0, "p99": 4.0, "worst": 4.0,
    }  # fmt: skip


def test_ratios_are_paired_by_setting_and_seed():
    rows = [row(FCFS, 1, 10.0), row(FCFS, 2, 100.0), row(NO_HINT, 2, 50.0), row(NO_HINT, 1, 5.0)]
    found = ratio(rows, NO_HINT, FCFS, "mean")
    assert found is not None
    assert (found.low, found.middle, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert ratio(rows[:3], NO_HINT, FCFS, "mean") is None, "one pair has no interval"


def test_bursts_of_all_sizes_are_pooled_and_the_load_is_not():
    rows = [
        row(mode, seed, mean, setting=setting)
        for mode, mean in ((FCFS, 10.0), (NO_HINT, 6.0))
        for seed in (1, 2)
        for setting in ("burst of 80", "burst of 140", "load 0.9")
    ]
    runs = {each["setting"]: each["runs"] for each in compared(rows) if each["mode"] == NO_HINT}
    assert runs == {BURSTS: 4, "burst of 80": 2, "burst of 140": 2, "load 0.9": 2}


def test_bursts_of_one_seed_are_one_pair():
    """The smaller bursts of a seed are parts of its larger ones: they add no independent sample."""
    rows = [
        row(mode, seed, mean, setting=f"burst of {count}")
        for count in (80, 140)
        for seed, of_seed in ((1, 5.0), (2, 8.0))
        for mode, mean in ((FCFS, 10.0), (NO_HINT, of_seed))
    ]
    assert ratio(rows, NO_HINT, FCFS, "mean") == ratio(rows[:4], NO_HINT, FCFS, "mean")
    assert ratio([each for each in rows if each["seed"] == 1], NO_HINT, FCFS, "mean") is None


def bursts(mode: str, mean: float, p99: float = 10.0) -> list[dict[str, Any]]:
    """Return two runs in which FCFS has a mean of 1 and vLLM's priority one of 0.4, with a p99 of 10."""
    return [
        row(name, seed, m, p)
        for seed in (1, 2)
        for name, m, p in ((FCFS, 1.0, 10.0), (PRIORITY, 0.4, 10.0), (mode, mean, p99))
    ]


def speed(ours: float, by_parts: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"measured": "speed", "setting": "s", "seed": seed, "mode": mode, "full_speed": found}
        | {"full_speed_by_parts": found * by_parts if mode == NO_HINT else found}
        for seed in (1, 2)
        for mode, found in ((FCFS, 1.0), (NO_HINT, ours))
    ]


def worker(ours: float) -> list[dict[str, Any]]:
    return [
        {"measured": "worker", "setting": "s", "seed": seed, "mode": mode, "worker_speed": found}
        for seed in (1, 2)
        for mode, found in ((PLAIN, 1.0), (COUPLED, ours))
    ]


def cost(core: str, *found: float) -> list[dict[str, Any]]:
    return [
        {"measured": "cost", "setting": "s", "seed": seed, "mode": GUESS, "core": core, "decision_ms": each}
        for seed, each in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        (bursts(NO_HINT, GOAL_NO_HINT - 0.01), True),
        (bursts(NO_HINT, GOAL_NO_HINT + 0.01), False),
        (bursts(GUESS, 0.4 * GOAL_PRIORITY - 0.001), True),
        (bursts(GUESS, 0.4 * GOAL_PRIORITY + 0.001), False),
        (bursts(GUESS, GOAL_GUESS + 0.01), False),
        (bursts(GUESS, 0.4, 10 * GOAL_PRIORITY_P99 - 0.01), True),
        (bursts(GUESS, 0.4, 10 * GOAL_PRIORITY_P99 + 0.01), False),
        (speed(GOAL_SPEED + 0.001), True),
        (speed(GOAL_SPEED - 0.001), False),
        (speed(1.0, GOAL_SPEED - 0.001), False),
        (worker(GOAL_WORKER + 0.001), True),
        (worker(GOAL_WORKER - 0.001), False),
        (cost("compiled", GOAL_DECISION_MS + 1, GOAL_DECISION_MS), True),
        (cost("compiled", GOAL_DECISION_MS + 0.01), False),
        (cost("interpreted", GOAL_DECISION_MS / 2), False),
        (bursts(CLASS, 0.3), False),
    ],
)
def test_each_goal_can_be_missed_and_nothing_measured_meets_none(rows: list[dict[str, Any]], met: bool):
    assert verdict(goals(rows))[0] is met


def test_a_goal_is_met_by_the_unfavourable_end_of_its_interval():
    wide = [row(FCFS, 1, 1.0), row(FCFS, 2, 1.0), row(NO_HINT, 1, 0.5), row(NO_HINT, 2, 0.6)]
    assert verdict(goals(wide))[0] is False


def test_the_load_is_compared_with_priority_and_not_with_the_goals_of_bursts():
    rows = [each | {"setting": "load 0.9"} for each in bursts(GUESS, 0.9)]
    assert [goal.met for goal in goals(rows)] == [False, True]


def test_a_path_to_the_interpreter_holds_in_every_folder_and_a_name_is_looked_up():
    assert Path(arguments(["--vllm", ".venv/vllm/bin/python"], "").vllm).is_absolute()
    assert arguments(["--vllm", "python3"], "").vllm == "python3"


@pytest.mark.parametrize("wrong", [["--parts", "steps,more"], ["--seeds", "1"], ["--shape-load", "0"]])
def test_wrong_options_are_refused(wrong: list[str]):
    with pytest.raises(SystemExit):
        arguments(["--vllm", "python", *wrong], "")
