"""`laps-sd bench chaos` with workers over vLLM: what kills, stops and isolates these workers loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("LAPS_SD_TEST_VLLM_PYTHON", "")
"""The interpreter of the workers."""
KINDS = "kill worker,pause worker,drain worker,kill engine,pause engine,half-open worker,kill leader"
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="part of `make test-vllm`"),
    pytest.mark.timeout(1800),
]


def test_ten_faults_of_workers_over_vllm_lose_nothing(tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    sizes = ("--faults", "10", "--every-s", "5", "--seed", "6", "--kinds", KINDS)
    done = subprocess.run(
        [
            sys.executable,
            "bench/chaos.py",
            "--engine",
            "vllm",
            "--vllm",
            PYTHON,
            *sizes,
            "--logs",
            str(tmp_path / "logs"),
            "--json",
            str(rows_file),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1700,
    )

    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-8000:]
    [row] = json.loads(rows_file.read_text())["rows"]
    assert (row["faults"], row["violations"]) == (10, 0)
