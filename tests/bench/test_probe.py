"""`laps-sd bench probe`: its figures by hand, and the driver at a small size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bench.probe import (
    Judge,
    arguments,
    cost,
    judged_engine,
    main,
    rms,
    rows_of,
    side_by_side,
    specs_of,
)
from worker_svc.engine.length_probe.probe import Look


def test_errors_are_root_mean_squares() -> None:
    assert rms([1.0, 2.0], [4.0, -2.0]) == pytest.approx(math.sqrt((9 + 16) / 2))


def look(output_tokens: int, predicted: float | None) -> Look:
    return Look(20, output_tokens, np.zeros(1, np.float32), predicted)


def test_a_look_is_compared_with_what_was_known_before_its_end() -> None:
    judge = Judge()
    judge.judge([look(0, None)], 100, 600, bool, first=1)
    judge.judge([look(0, 3.0), look(64, 2.0)], 80, 600, lambda stage: stage == 0, first=1)
    (first,) = judge.looks  # of the other stage no mean is known
    assert first.truth == pytest.approx(math.log(80))
    assert (first.probe, first.constant, first.sent) == (3.0, pytest.approx(math.log(100)), True)
    assert rows_of(judge) == [], "too few looks for a row"


def test_the_driver_prints_a_row_for_each_stage_with_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "rows.json"
    main(["--prompts", "16", "--turns", "0", "--first", "10", "--tokens", "300", "--json", str(found)])
    rows = json.loads(found.read_text())["rows"]
    assert rows[0]["stage"] == "after the prompt"
    assert rows[0]["looks"] >= 20
    assert "ended by themselves" in capsys.readouterr().out


def test_of_two_equal_sets_of_requests_one_is_looked_at_and_the_probe_stays_on() -> None:
    options = arguments(["--prompts", "2", "--tokens", "20", "--batch", "4"])
    engine, specs = judged_engine(options), specs_of(options)
    probe = engine.length_probe
    side_by_side(engine, specs, options.batch)
    assert engine.length_probe is probe
    assert probe.requests == len(specs)


def test_the_cost_is_a_ratio_of_the_same_rounds() -> None:
    options = arguments(["--prompts", "2", "--turns", "2", "--tokens", "20", "--batch", "4"])
    ratio = cost(options)
    assert ratio is not None
    assert ratio.low <= ratio.middle <= ratio.high
