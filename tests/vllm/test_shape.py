"""A model of a shape without weights in vLLM's engine core, as `laps-sd bench vllm --parts shape` measures it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from bench._vllm.hidden_lengths import drawn_answers
from bench._vllm.modes import OURS
from bench._vllm.on_shape import ON_SHAPE, Plan, measure
from bench._vllm.shape_driver import ShapeRuns
from tests.vllm.one_core import ENVIRONMENT

pytestmark = pytest.mark.timeout(900)


class InThisProcess:
    """The driver without its process; questions and answers pass through JSON, as in a process."""

    def __init__(self, runs: ShapeRuns) -> None:
        self._runs = runs

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        asked = json.loads(json.dumps(question))
        answer: dict[str, Any] = json.loads(json.dumps(getattr(self._runs, asked["task"])(asked)))
        return answer


def test_every_mode_serves_all_requests_to_their_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    runs = ShapeRuns(
        {
            "folder": str(tmp_path),
            "shape": "tiny-64",
            "words": {},
            "slots": 4,
            "residents": 16,
            "tokens": 40,
            "max_length": 256,
            "budget": 512,
            "little_memory": True,
            "dtype": "auto",
            "eager": True,
            "quick_start": False,
        }
    )
    peer: Any = InThisProcess(runs)
    ahead = [True, False] if peer.ask({"task": "about"})["async"] else [False]
    plan = Plan(count=24, seeds=[1], tokens=40, load=0.9, slots=4, until_s=float("inf"), within_s=0.01)
    rows = list(measure(peer, drawn_answers(vocab=2048, most_prompt=100), plan, ahead, tmp_path))

    assert all(row["right_lengths"] == row["requests"] for row in rows)
    measured = [row for row in rows if row["measured"] == "shape"]
    assert len(measured) == len(ahead) * 2 * len(ON_SHAPE)
    assert sum(row["pauses"] for row in measured if row["mode"] == OURS[2].name) > 0
    bursts = [row for row in measured if row["setting"].startswith("burst")]
    assert all(row["full_tokens_per_s"] > 0 and row["scheduler_ms"] > 0 for row in bursts)
    assert all(row["mixed_steps"] > 0 and row["decode_steps"] > row["mixed_steps"] for row in measured)
    assert all(row["mixed_steps"] + row["decode_steps"] == row["steps"] for row in measured)
    assert all(row["mixed_launch_ms"] > 0 and row["decode_launch_ms"] > 0 for row in bursts)
    assert [row["run"] for row in measured] == list(range(1, 1 + len(measured)))
