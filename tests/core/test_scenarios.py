"""Plays tests/core/scenarios/*.txt and compares what came out with what is recorded there.

`REWRITE_SCENARIOS=1 pytest tests/core/test_scenarios.py` records. Commit only what you can explain.
"""

import os
from pathlib import Path

import pytest

from tests.core.script import play

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    recorded = path.read_text()
    now = play(recorded)
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(now)
        return
    assert now == recorded


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 12
