"""The table of GPUs and models in the documentation follows from the formula above it."""

from __future__ import annotations

import re

from tests.k8s.helm import ROOT

RESERVED_GB = 2.0
UTILIZATION = 0.9
LEAST_THOUSANDS = 4


def test_the_table_is_the_formula() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    section = text.partition("## Which GPUs for which model")[2].partition("\n## ")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    machines = [tuple(map(int, re.findall(r"\d+", cell))) for cell in header[3:]]
    assert len(machines) == 9 and len(rows) == 6

    for _, weights_gb, token_bytes, *cells in rows:
        for (gpus, memory_gb), cell in zip(machines, cells, strict=True):
            free_gb = gpus * (UTILIZATION * memory_gb - RESERVED_GB) - float(weights_gb)
            thousands = int(free_gb * 1e9 // int(token_bytes.replace(",", "")) // 1000)
            expected = f"{thousands:,}" if thousands >= LEAST_THOUSANDS else "–"
            assert cell == expected, (weights_gb, gpus, memory_gb)
