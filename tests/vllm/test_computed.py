"""`laps-sd bench vllm --parts computed`: vLLM's real schedulers on a virtual clock, with step times by a formula."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from bench._vllm import on_shape
from bench._vllm.computed_driver import ComputedRuns
from bench._vllm.hidden_lengths import drawn_answers
from bench._vllm.modes import FCFS, GUESS, PRIORITY, SHORTEST
from bench._vllm.on_shape import ON_SHAPE, Plan, measure

pytestmark = pytest.mark.timeout(900)

SLOTS = 8
TOKENS = 100


class InThisProcess:
    """The driver without its process; questions and answers pass through JSON, as in a process."""

    def __init__(self, runs: ComputedRuns) -> None:
        self._runs = runs

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        asked = json.loads(json.dumps(question))
        answer: dict[str, Any] = json.loads(json.dumps(getattr(self._runs, asked["task"])(asked)))
        return answer


def rows_of(folder: Path, *, ahead: bool = True, **times: float) -> dict[str, dict[str, Any]]:
    """Return the row of a burst of 48 requests by mode."""
    setup = {
        "folder": str(folder),
        "shape": "tiny-64",
        "words": {},
        "slots": SLOTS,
        "residents": 4 * SLOTS,
        "tokens": TOKENS,
        "max_length": 1024,
        "budget": 512,
        "kv_tokens": 64_000,
        "step_times": {"decode_ms": 7.0, "decode_row_ms": 0.0, "mixed_ms": 8.0, "mixed_token_ms": 0.0}
        | times,
    }
    plan = Plan(
        count=48,
        seeds=[1],
        tokens=TOKENS,
        load=1.2,
        slots=SLOTS,
        until_s=float("inf"),
        within_s=0.5,
        measured="computed",
    )
    peer: Any = InThisProcess(ComputedRuns(setup))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_shape, "LEARN_COUNT", 24)
        found = list(measure(peer, drawn_answers(vocab=2048, most_prompt=100), plan, [ahead], folder))
    assert all(row["right_lengths"] == row["requests"] for row in found)
    return {row["mode"]: row for row in found if row["setting"].startswith("burst of 48")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return rows_of(tmp_path_factory.mktemp("computed"))


def test_all_modes_serve_the_same_tokens_and_all_time_is_in_steps(rows: dict[str, dict[str, Any]]) -> None:
    assert rows.keys() == {mode.name for mode in ON_SHAPE}
    assert len({row["tokens"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["decode_step_ms"] == 7.0
        assert row["decode_s"] + row["mixed_s"] == pytest.approx(row["lasted_s"], rel=0.01)
        assert row["decode_steps"] + row["mixed_steps"] == row["steps"]


def test_an_order_by_length_gains_where_many_wait(rows: dict[str, dict[str, Any]]) -> None:
    fcfs = rows[FCFS]["mean"]

    assert rows[SHORTEST]["mean"] < 0.9 * fcfs
    assert rows[PRIORITY]["mean"] < 0.95 * fcfs
    assert rows[GUESS]["mean"] < 0.95 * fcfs


def test_equal_questions_have_equal_answers_and_slow_steps_with_prompts_last(
    rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    again = rows_of(tmp_path)
    slow = rows_of(tmp_path, mixed_ms=30.0)

    assert again == rows
    for name, row in slow.items():
        assert 26 < row["mixed_step_ms"] < 34, "30 is the formula, and a step with one beside it waits too"
        assert 7 < rows[name]["mixed_step_ms"] < 9
        assert row["lasted_s"] > rows[name]["lasted_s"]


def test_without_async_scheduling_the_scheduler_takes_its_time_before_each_step(
    rows: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    alone = rows_of(tmp_path, ahead=False)

    assert alone[FCFS]["decode_step_ms"] == pytest.approx(7.7)
    assert alone[GUESS]["decode_step_ms"] == pytest.approx(8.5)
    assert alone[GUESS]["mean"] > rows[GUESS]["mean"]
