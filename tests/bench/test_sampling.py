"""`laps-sd bench sampling`: the driver at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.sampling import CHIEF, GOAL, NONE, arguments, main


def test_one_turn_has_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--turns", "1"])
    assert "--turns must be 2 at least" in capsys.readouterr().err


def test_each_restriction_is_compared_with_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    code = main(["--shape", "demo", "--batch", "2", "--rounds", "1", "--turns", "2", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert {row["engine"] for row in rows} == {"demo, drafts", "demo, plain"}
    assert all(row["ratio"] == 1.0 for row in rows if row["restriction"] == NONE)
    worst = min(row["ratio"] for row in rows if row["restriction"] == CHIEF)
    assert code == (worst < GOAL)
