"""`laps-sd bench engine`: ratios against the right rivals, and goals that can be missed."""

from __future__ import annotations

import argparse

import pytest

from bench.engine import (
    GOAL_ASSISTED,
    GOAL_BATCH,
    GOAL_PLAIN,
    GOAL_PLAIN_AT_ONE,
    Config,
    Prompted,
    rows_of,
    verdict,
)


def config(name: str, batch: int, *speeds: float) -> Config:
    return Config(name, batch, len, [], tokens_per_s=list(speeds))


CONFIGS = [
    config("ours, plain", 1, 100.0, 110.0),
    config("ours, speculative", 1, 200.0, 220.0),
    config("ours, speculative", 16, 900.0, 990.0),
    config("assisted, 4", 1, 80.0, 88.0),
    config("assisted", 1, 50.0, 55.0),
    config("padded batch", 16, 300.0, 330.0),
    config("generate_batch", 16, 600.0, 660.0),
]


def test_ratios_are_against_the_best_rival_of_that_batch_size():
    rows = {(row["config"], row["batch"]): row for row in rows_of(CONFIGS, argparse.Namespace(turns=2))}
    ours = rows["ours, speculative", 1]
    assert ours["ratio_plain"] == pytest.approx(2.0)
    assert ours["ratio_plain_low"] == pytest.approx(2.0)
    assert ours["ratio_assisted"] == pytest.approx(2.5)
    assert ours["ratio_peer_batch"] is None
    assert rows["ours, speculative", 16]["ratio_peer_batch"] == pytest.approx(1.5)
    assert rows["assisted", 1]["ratio_plain"] is None


def row(batch: int, **ratios: float) -> dict[str, object]:
    names = ("ratio_plain", "ratio_assisted", "ratio_peer_batch")
    return {"config": "ours, speculative", "batch": batch, **dict.fromkeys(names), **ratios}


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        ([row(1, ratio_plain=GOAL_PLAIN_AT_ONE, ratio_assisted=GOAL_ASSISTED), row(64, ratio_plain=GOAL_PLAIN)], True),
        ([row(1, ratio_plain=GOAL_PLAIN_AT_ONE - 0.01)], False),
        ([row(1, ratio_assisted=GOAL_ASSISTED - 0.01)], False),
        ([row(64, ratio_plain=GOAL_PLAIN - 0.01)], False),
        ([row(16, ratio_peer_batch=GOAL_BATCH - 0.01)], False),
        ([row(16, ratio_peer_batch=GOAL_BATCH, ratio_plain=1.0)], True),
    ],
)  # fmt: skip
def test_each_goal_can_be_missed(rows, met):
    assert verdict(rows)[0] is met


def test_a_turn_counts_tokens_of_both_temperatures():
    def slow(requests: list[Prompted]) -> int:
        sum(range(300_000))
        return len(requests)

    one = Config("x", 1, slow, [Prompted((1,), temperature, 0) for temperature in (0.0, 0.8, 0.8)])
    one.turn()
    assert len(one.tokens_per_s) == 1
    assert one.tokens_per_s[0] > 0
