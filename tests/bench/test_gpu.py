"""`laps-sd bench gpu`: the roofline's arithmetic, the goal, and the driver at a small shape; on a GPU where
there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench._gpu.limits import DEVICES, Limits, least_s, limits_of
from bench._gpu.options import GOAL_OTHER, arguments, verdict
from bench._shapes import PAIRS, Shape
from bench.gpu import main

SMALL = Shape(layers=1, hidden=4, heads=2, kv_heads=1, head_size=2, inner=8, vocab=10)


def test_shapes_have_the_sizes_they_are_named_for():
    def weights(shape: Shape) -> int:
        return shape.multiplied + (0 if shape.tied else shape.hidden * shape.vocab)

    assert weights(PAIRS["8b"][0]) / 1e9 == pytest.approx(8.03, abs=0.01)
    assert weights(PAIRS["8b"][1]) / 1e9 == pytest.approx(0.47, abs=0.01)
    assert weights(PAIRS["memory-bound"][0]) / 1e6 == pytest.approx(287, abs=1)


def test_a_forward_takes_its_bytes_or_its_operations_whichever_take_longer():
    weights = 4 * 2 * (2 * 2 + 2 * 1) + 3 * 4 * 8 + 4 * 10
    assert SMALL.multiplied == weights
    kv = 2 * 1 * 2 * 2  # of one token, two bytes a number
    slow_memory, slow_products = Limits(1.0, 1e9), Limits(1e9, 1.0)
    given: dict[str, Any] = {"item_bytes": 2, "rows": 6, "kv_tokens": 30, "batch": 3}
    assert least_s(SMALL, slow_memory, **given) == 2 * weights + 36 * kv
    # 2 rows of each sequence, 10 keys each; 2 heads of 2, a product with the key and one with the value
    assert least_s(SMALL, slow_products, **given) == 2 * weights * 6 + 3 * 2 * 10 * (2 * 2 * 2 * 2)


def test_a_device_is_known_by_the_longest_part_of_its_name():
    options = arguments([], "")
    assert limits_of("NVIDIA L40S", options) == Limits(*DEVICES["L40S"])
    assert limits_of("NVIDIA H100 80GB HBM3", options) == Limits(*DEVICES["H100 80GB HBM3"])
    assert limits_of("something else", options) is None
    assert limits_of("NVIDIA L4", arguments(["--bandwidth", "100", "--peak", "2"], "")) == Limits(1e11, 2e12)


def row(batch: int, other: float, skipped: str | None = None) -> dict[str, Any]:
    return {"batch": batch, "context": 1024, "other_share": other, "skipped": skipped}


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([row(32, GOAL_OTHER), row(1, 0.9)], True),
        ([row(32, GOAL_OTHER), row(32, GOAL_OTHER + 0.01)], False),
        ([row(1, 0.0)], False),
        ([row(32, 0.0, "no memory")], False),
    ],
)
def test_the_goal_can_be_missed_and_is_not_met_unmeasured(rows: list[dict[str, Any]], met: bool):
    assert verdict(rows)[0] is met


def run(device: str, file: Path, *more: str) -> dict[tuple[int, int], dict[str, Any]]:
    main(["--device", device, "--shape", "tiny", "--batch", "1,3", "--context", "20,40", "--rounds", "4",
          "--prefill-chunk", "32", "--json", str(file), *more])  # fmt: skip
    return {(row["batch"], row["context"]): row for row in json.loads(file.read_text())["rows"]}


def check(rows: dict[tuple[int, int], dict[str, Any]]) -> None:
    assert set(rows) == {(1, 20), (3, 20), (1, 40), (3, 40)}
    for row in rows.values():
        assert row["skipped"] is None
        assert row["draft_len"] == 4
        assert 1 <= row["tokens_per_round"] <= 5
        assert row["kernels_ms"] > 0
        assert 0 < row["draft_ms"] + row["verify_ms"] <= row["round_ms"]
        assert row["of_roofline"] == pytest.approx(row["round_ms"] / row["roofline_ms"])
        assert row["transformers_tokens_per_s"] > 0
        assert row["swap_out_gb_s"] > 0 < row["swap_in_gb_s"]


LIMITS = ("--bandwidth", "10", "--peak", "0.1", "--draft-len", "4")


def test_the_driver_runs_at_a_small_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check(run("cpu", tmp_path / "rows.json", "--dtype", "float32", *LIMITS))
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("GOAL MISSED: no round of batch 32")


def test_what_does_not_fit_is_left_out_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from bench._gpu.pair import Bench

    monkeypatch.setattr(Bench, "_room", lambda bench: bench.blocks_for(1, 40) * bench._block_bytes())
    rows = run("cpu", tmp_path / "rows.json", "--no-peers", "--dtype", "float32", *LIMITS)
    assert [key for key, row in rows.items() if row["skipped"]] == [(3, 20), (3, 40)]
    assert "blocks" in rows[3, 40]["skipped"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_runs_on_a_gpu(tmp_path: Path):
    rows = run("cuda", tmp_path / "rows.json", *LIMITS)
    check(rows)
    assert all(row["kernels_ms"] <= row["all_kernels_ms"] for row in rows.values())
