"""Measurements before the first request: every size that rounds have, within the contexts that a model
allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.worker.pairs import load_pair
from worker_svc.engine import calibration
from worker_svc.engine.calibration import (
    STEPS_IN_A_CALL,
    TURNS,
    measure_draft_steps,
    measure_prefill,
    measure_rounds,
)
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.plan import Piece, Plan

pytestmark = pytest.mark.usefixtures("by_kernels_and_by_torch")

SLOTS, DEEPEST, MAX_LENGTH = 6, 5, 64


def models(pair: tuple[Path, Path], device: str, **options: Any) -> tuple[PackedModel, PackedModel]:
    """Return target and draft with their pools."""
    engine = load_pair(
        *pair, device=device, slots=SLOTS, max_draft_len=DEEPEST - 1, draft_len=0, **{"max_length": MAX_LENGTH, **options}
    )  # fmt: skip
    assert engine._pair.draft is not None
    return engine._pair.target, engine._pair.draft


def seconds_by_reading(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return arguments with which each measurement takes one second, and there is time for all turns."""
    readings = count()
    monkeypatch.setattr(calibration.time, "monotonic", lambda: 0.0)
    return {"slots": SLOTS, "max_length": MAX_LENGTH, "clock": lambda: float(next(readings)), "deadline": 1.0}


def test_rounds_are_measured_up_to_the_deepest_drafts_of_all(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = models(pair, device)
    rounds = measure_rounds(target, deepest=DEEPEST, **seconds_by_reading(monkeypatch))
    assert rounds.counts == [1, 2, 4, SLOTS, 8, 18, SLOTS * DEEPEST]
    assert rounds.key_s == 0.0
    assert rounds(4) == pytest.approx(1 + calibration.AROUND_S + 4 * calibration.AROUND_ROW_S)


def test_draft_steps_that_are_one_call_are_measured_together(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other steps are measured one by one, and the first step, which reads more, always is."""
    _, draft = models(pair, device)
    steps = measure_draft_steps(draft, **seconds_by_reading(monkeypatch))
    assert steps.counts == [1, 2, 4, SLOTS, 8, 2 * SLOTS]
    assert steps(4) == pytest.approx(1 / STEPS_IN_A_CALL if draft.proposes else 1.0)
    assert steps(2 * SLOTS) == pytest.approx(1.0)


@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 9])
def test_no_measurement_leaves_the_contexts_that_there_can_be(
    pair: tuple[Path, Path], device: str, max_length: int
) -> None:
    engine = load_pair(*pair, device=device, slots=SLOTS, max_length=max_length, max_draft_len=2)
    assert engine.lengths.plain(1) > 0 and engine.lengths.step(1) > 0
    engine.check()


@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 9, MAX_LENGTH])
def test_no_row_is_measured_beyond_the_longest_context(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    """Drafts may be as long as the longest context."""
    target, draft = models(pair, device, max_length=max_length)
    ends: list[int] = []
    for model in (target, draft):

        def plan(pieces: Sequence[Piece], planned: Callable[..., Plan] = model.planner.plan) -> Plan:
            ends.extend(piece.start + piece.tokens for piece in pieces)
            return planned(pieces)

        monkeypatch.setattr(model.planner, "plan", plan)
    arguments = seconds_by_reading(monkeypatch) | {"max_length": max_length}
    rounds = measure_rounds(target, deepest=1 + max_length, **arguments)
    steps = measure_draft_steps(draft, **arguments)
    assert max(ends) == max_length
    assert rounds.counts[-1] == SLOTS * max_length
    assert steps.counts[-1] == SLOTS * min(FIRST_STEP_ROWS, max_length)


def test_where_time_is_over_each_size_was_measured_twice(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run includes the one-time work of a device; the number of further runs depends
    on the time.
    """
    measured: list[float] = []
    arguments = seconds_by_reading(monkeypatch)
    readings = arguments["clock"]

    def clock() -> float:
        measured.append(readings())
        return measured[-1]

    _, draft = models(pair, device)
    measure_draft_steps(draft, **{**arguments, "clock": clock, "deadline": -1.0})
    hurried = len(measured)
    measured.clear()
    measure_draft_steps(draft, **{**arguments, "clock": clock})
    assert len(measured) == TURNS / 2 * hurried


def test_context_tokens_are_measured_at_two_places_of_a_context(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each forward takes a second here, so that a token costs as much anywhere."""
    target, _ = models(pair, device)
    arguments = seconds_by_reading(monkeypatch)
    del arguments["slots"]
    costs = measure_prefill(target, 0.5, **arguments)
    tokens = min(calibration.CHUNK, MAX_LENGTH // 2)
    assert costs(1) == pytest.approx(0.5 / tokens)
    assert costs(MAX_LENGTH) == pytest.approx(0.5 / tokens)


@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 9])
def test_context_tokens_of_short_contexts_have_a_cost_too(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    target, _ = models(pair, device, max_length=max_length)
    arguments = seconds_by_reading(monkeypatch)
    del arguments["slots"]
    costs = measure_prefill(target, 0.5, **arguments | {"max_length": max_length})
    assert costs(1) > 0 and costs(max_length) > 0
