"""`laps-sd bench overload` for a quarter of a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_ten_times_what_can_be_done_is_refused_with_advice_and_the_rest_is_done(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    sizes = ("--seconds", "15", "--queue", "32", "--round-s", "0.05")
    done = subprocess.run(
        [sys.executable, "bench/overload.py", *sizes, "--json", str(rows_file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    [row] = json.loads(rows_file.read_text())["rows"]
    assert row["completed"] + row["refused"] == row["arrived"]
    assert row["wrong"] == 0
