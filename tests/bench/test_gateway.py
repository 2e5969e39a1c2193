"""The gateway's benchmark measures what it claims: every delivery arrives, and the rows have the columns of
the figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_small_run_counts_every_delivery(protocol: str, tmp_path: Path) -> None:
    rows_file = tmp_path / "rows.json"
    size = ["--streams", "4", "--rate", "100", "--seconds", "1"]
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "bench" / "gateway.py"),
            *size,
            "--protocol",
            protocol,
            "--json",
            str(rows_file),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode in (0, 1), done.stderr  # the goal is for a machine without other load
    (row,) = json.loads(rows_file.read_text())["rows"]

    assert row["config"] == f"{protocol}, 4 streams"
    assert row["tokens_per_message"] >= 3
    assert 0 < row["delay_p50_s"] <= row["delay_p99_s"]
    assert row["deliveries_per_cpu_s"] > 0
