"""`laps-sd bench engine`: cells, ratios against the right rivals, and goals that can be missed."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Generator

import pytest

from bench._engine import measure
from bench._engine.cells import BOTH, MAX_LENGTH, MIXED, RAMP, TEMPERATURES, Cell, Prompted, cells_for
from bench._engine.configs import SPECULATIVE, Config
from bench._engine.engines import ramp_told
from bench._engine.goals import (
    FORWARD_BATCHES,
    GOAL_ASSISTED,
    GOAL_BATCH,
    GOAL_FORWARD,
    GOAL_PLAIN,
    GOAL_PLAIN_AT_ONE,
    GOAL_VLLM,
    goals,
    verdict,
)
from bench._engine.held_out import HELD_OUT, held_out_prompts
from bench._engine.options import arguments
from bench._engine.outcomes import Outcome, counted, in_turn
from bench._engine.rows import identical, rows_of
from bench.engine import main
from worker_svc.loading import DEMO

OPTIONS = argparse.Namespace(turns=2)


def outcome(speed: float, decode_s: float | None = None, text: int = 1) -> Outcome:
    return Outcome([[text]], 100, 100 / speed, 1.0, decode_s)


def nobody(_: Cell) -> Outcome:
    raise AssertionError("nothing is to be generated here")


def takes_all(_: Cell) -> bool:
    return True


def config(name: str, batch: int, *speeds: float, kind: str = MIXED, decode_s: float | None = None) -> Config:
    """Return a configuration with the same outcomes at both temperatures."""
    outcomes = {
        (kind, temperature, batch): [outcome(s, decode_s) for s in speeds] for temperature in TEMPERATURES
    }
    return Config(name, nobody, takes_all, outcomes)


CONFIGS = [
    config("ours, plain", 1, 100.0, 110.0, decode_s=0.011),
    config("ours, speculative", 1, 200.0, 220.0),
    config("ours, speculative", 16, 900.0, 990.0),
    config("assisted, 4", 1, 80.0, 88.0),
    config("assisted", 1, 50.0, 55.0),
    config("padded batch", 16, 300.0, 330.0),
    config("generate_batch", 16, 600.0, 660.0),
    config("vllm, eager, draft 4", 1, 125.0, 137.5, decode_s=0.001),
    config("vllm, compiled, plain", 1, 100.0, 110.0, decode_s=0.010),
]


def row_of(
    configs: list[Config], name: str, batch: int, temperature: float | str = BOTH
) -> dict[str, object]:
    rows = {(row["config"], row["batch"], row["temperature"]): row for row in rows_of(configs, OPTIONS)}
    return rows[name, batch, temperature]


def test_ratios_are_against_the_best_rival_of_that_batch_size():
    ours = row_of(CONFIGS, "ours, speculative", 1)
    assert ours["ratio_plain"] == pytest.approx(2.0)
    assert ours["ratio_plain_low"] == pytest.approx(2.0)
    assert ours["ratio_assisted"] == pytest.approx(2.5)
    assert ours["ratio_peer_batch"] is None
    assert ours["ratio_vllm"] == pytest.approx(1.6)
    assert row_of(CONFIGS, "ours, speculative", 16)["ratio_peer_batch"] == pytest.approx(1.5)
    assert row_of(CONFIGS, "assisted", 1)["ratio_plain"] is None


def test_a_forward_is_compared_with_the_shortest_that_decodes_without_a_draft():
    assert row_of(CONFIGS, "ours, plain", 1, 0.0)["forward"] == pytest.approx(1.1)
    assert row_of(CONFIGS, "ours, speculative", 1, 0.0)["forward"] is None


def test_a_row_of_both_temperatures_adds_tokens_and_seconds():
    one = Config("ours, plain", nobody, takes_all)
    one.outcomes = {
        (MIXED, 0.0, 4): [Outcome([[1]], 10, 1.0, 2.0)] * 2,
        (MIXED, 0.8, 4): [Outcome([[1]], 30, 3.0, 2.0)] * 2,
    }
    row = row_of([one], "ours, plain", 4)
    assert row["tokens_per_cpu_s"] == pytest.approx(10.0)
    assert row["tokens_per_s"] == pytest.approx(10.0)


def row(batch: int, kind: str = MIXED, temperature: float | str = BOTH, name: str = "ours, speculative", **given: float):  # fmt: skip
    names = ("ratio_plain", "ratio_assisted", "ratio_peer_batch", "ratio_vllm", "forward")
    bounds = {f"{key}_{end}": value for key, value in given.items() for end in ("low", "high")}
    return {
        "config": name, "kind": kind, "temperature": temperature, "batch": batch, "identical": None,
        **dict.fromkeys(names), **bounds, **given,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([row(1, ratio_plain=GOAL_PLAIN_AT_ONE, ratio_assisted=GOAL_ASSISTED), row(64, ratio_plain=GOAL_PLAIN)], True),
        ([row(1, ratio_plain=GOAL_PLAIN_AT_ONE - 0.01)], False),
        ([row(1, ratio_assisted=GOAL_ASSISTED - 0.01)], False),
        ([row(64, ratio_plain=GOAL_PLAIN - 0.01)], False),
        ([row(1, kind="code", ratio_plain=GOAL_PLAIN)], True),
        ([row(4, kind="code", temperature=0.8, ratio_plain=GOAL_PLAIN - 0.01)], False),
        ([row(16, ratio_peer_batch=GOAL_BATCH - 0.01)], False),
        ([row(16, ratio_peer_batch=GOAL_BATCH, ratio_plain=1.0)], True),
        *(([row(batch, temperature=0.0, ratio_vllm=goal)], True) for batch, goal in GOAL_VLLM.items()),
        *(([row(batch, temperature=0.0, ratio_vllm=goal - 0.01)], False) for batch, goal in GOAL_VLLM.items()),
        ([], False),
    ],
)  # fmt: skip
def test_each_goal_can_be_missed(rows, met):
    assert verdict(goals(rows))[0] is met


def test_the_lower_end_of_the_interval_meets_a_goal_or_does_not():
    wide = row(64, ratio_plain=1.0) | {"ratio_plain_low": GOAL_PLAIN - 0.01}
    assert verdict(goals([wide]))[0] is False


@pytest.mark.parametrize("batch", FORWARD_BATCHES)
@pytest.mark.parametrize(("ratio", "met"), [(GOAL_FORWARD, True), (GOAL_FORWARD + 0.01, False)])
def test_the_memory_bound_shape_judges_forwards(batch: int, ratio: float, met: bool):
    rows = [row(batch, temperature=0.0, name="ours, plain", forward=ratio)]
    assert verdict(goals(rows, memory_bound=True))[0] is met
    assert not goals(rows)


def test_in_single_precision_speculation_must_change_no_text():
    same, other = (row(4, temperature=0.8) | {"identical": share} for share in (1.0, 0.99))
    assert verdict(goals([same], exact=True))[0] is True
    assert verdict(goals([other], exact=True))[0] is False
    assert not goals([other])
    assert identical([[1, 2], [3]], [[1, 2], [4]]) == 0.5


def test_tokens_are_counted_alike_whether_the_end_token_is_told_or_not():
    told = counted([[5, 6, 2], [5, 6, 7]], 3, frozenset({2}), 1.0, 1.0)
    left_out = counted([[5, 6], [5, 6, 7]], 3, frozenset({2}), 1.0, 1.0)
    behind = counted([[5, 6, 2, 0, 0], [5, 6, 7]], 3, frozenset({2}), 1.0, 1.0)
    assert told.tokens == left_out.tokens == behind.tokens == 6
    assert told.outputs == left_out.outputs == [[5, 6], [5, 6, 7]]
    assert counted([[5, 6, 2]], 3, frozenset(), 1.0, 1.0).tokens == 3


def test_engines_go_on_in_turn_each_until_it_is_done():
    log = []

    def run(name: str, slices: int) -> Generator[None, None, Outcome]:
        for _ in range(slices):
            log.append(name)
            yield
        log.append(name)
        return outcome(float(slices + 1))

    found = in_turn([run("a", 3), run("b", 1), run("c", 0)])
    assert log == ["a", "b", "c", "a", "b", "a", "a"]
    assert [one.tokens / one.cpu_s for one in found] == pytest.approx([4.0, 2.0, 1.0])


def test_the_ramp_rises_to_the_batch_and_falls_again():
    cell = Cell(RAMP, 0.0, 8, tuple(Prompted((1,), 0.0, number) for number in range(32)))
    allowed = [cell.at_once(served) for served in range(33)]
    assert allowed[0] == allowed[32] == 1
    assert allowed[16] == 8
    assert allowed[:17] == sorted(allowed[:17])
    assert allowed[16:] == sorted(allowed[16:], reverse=True)


def test_draft_lengths_of_the_ramp_are_told_for_its_three_parts():
    drafting = [(1, 5), (2, 8), (10, 10), (10, 0), (6, 6), (2, 6), (1, 3)]
    assert ramp_told(drafting) == pytest.approx(
        {"draft_len_rising": 13 / 3, "draft_len_top": 0.5, "draft_len_falling": 3.0}
    )


def test_the_mix_has_equal_parts_of_each_kind_at_both_temperatures():
    options = arguments(["--batch", "1,4", "--no-peers", "--kinds", "code,log"], "")
    options.target = DEMO / "target"
    cells = {cell.key: cell for cell in cells_for(options)}
    kinds = (MIXED, "code", "log")
    assert set(cells) == {(k, t, b) for k in kinds for t in TEMPERATURES for b in (1, 4)} | {
        (RAMP, t, 4) for t in TEMPERATURES
    }
    cold, warm = (cells[MIXED, temperature, 4].requests for temperature in TEMPERATURES)
    assert [one.ids for one in cold] == [one.ids for one in warm]


def test_held_out_prompts_are_a_kind_with_a_goal_of_its_own() -> None:
    options = arguments(["--batch", "4", "--no-peers"], "")
    options.target = DEMO / "target"
    (cell,) = (one for one in cells_for(options) if one.kind == HELD_OUT and one.temperature == 0)
    lengths = [len(one.ids) for one in cell.requests]
    assert 150 < statistics.fmean(lengths) < 180 and max(lengths) < MAX_LENGTH - options.tokens
    assert held_out_prompts(8) == held_out_prompts(64)[:8] != held_out_prompts(8, seed=1)
    assert len(set(held_out_prompts(64))) == 64

    def met(kind: str) -> bool:
        row = {"config": SPECULATIVE, "kind": kind, "temperature": 0.0, "batch": 4, "identical": None}
        row |= {"ratio_plain": 1.0, "ratio_plain_low": 0.975, "ratio_plain_high": 1.1}
        return goals([row])[0].met

    assert met("code") and not met(HELD_OUT)


def test_a_random_pair_runs_through(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "CELL_S", 0.0)  # the fewest passes: no figure is looked at
    file = tmp_path / "rows.json"
    main(
        [
            "--shape",
            "tiny",
            "--batch",
            "1,3",
            "--tokens",
            "6",
            "--turns",
            "2",
            "--no-peers",
            "--json",
            str(file),
        ]
    )
    told = json.loads(file.read_text())
    assert told["about"]["acceptance"] == 0.7
    assert told["about"]["prompt_tokens"] == {MIXED: [64, 64, 64]}
    assert told["about"]["models"]["target"]["bytes"] == 4 * told["about"]["models"]["target"]["parameters"]
    rows = {(row["config"], row["kind"], row["temperature"], row["batch"]): row for row in told["rows"]}
    assert {kind for _, kind, _, _ in rows} == {MIXED, RAMP}
    assert rows["ours, plain", MIXED, 0.0, 3]["draft_len"] == 0
    assert all(row["tokens_per_cpu_s"] > 0 for row in rows.values())
    assert rows["ours, speculative", MIXED, BOTH, 3]["ratio_plain"] is not None
    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first.startswith("models: target 0.1 M weights (0.4 MB in float32), draft 0.0 M weights")
    assert last.startswith(("goal met: ", "GOAL MISSED: "))
