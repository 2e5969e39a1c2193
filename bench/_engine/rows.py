"""Rows of results: the speeds of each configuration, and its ratios to its rivals."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from typing import Any

from bench._engine.cells import BOTH, MIXED, TEMPERATURES
from bench._engine.configs import PLAIN, Config
from bench._engine.outcomes import Outcome, means, paired
from bench.report import Interval, columns, ratio_interval

RIVALS: dict[str, tuple[str, ...]] = {
    "plain": (PLAIN,),
    "assisted": ("assisted",),
    "peer_batch": ("padded batch", "generate_batch"),
    "vllm": ("vllm",),
    "openvino": ("openvino",),
}
"""Prefixes of the rivals' names, by label; the best of them is the rival."""


def rows_of(configs: Sequence[Config], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each configuration, mix, batch size, and temperature or both, with its ratios to its
    rivals there.
    """
    keys = {key for config in configs for key in config.outcomes}
    order = [
        (kind, temperatures, batch)
        for kind, batch in sorted({(kind, batch) for kind, _, batch in keys}, key=lambda one: (one[0] != MIXED, one))
        for temperatures in (TEMPERATURES, *((one,) for one in TEMPERATURES))
    ]  # fmt: skip
    rows = []
    for kind, temperatures, batch in order:
        here = [(config, found) for config in configs if (found := config.series(kind, temperatures, batch))]
        reference = next((found for config, found in here if config.name == PLAIN), None)
        for config, found in here:
            row: dict[str, Any] = {
                "config": config.name,
                "kind": kind,
                "temperature": BOTH if len(temperatures) > 1 else temperatures[0],
                "batch": batch,
                "tokens_per_cpu_s": statistics.median(_speed(one) for one in found),
                "tokens_per_s": statistics.median(one.tokens / one.wall_s for one in found),
                "decode_ms": None,
                "identical": None,
            }
            if found[0].decode_s is not None:
                row["decode_ms"] = 1000 * statistics.median(one.decode_s or math.nan for one in found)
            if reference is not None and (temperatures == (0.0,) or config.name.startswith("ours")):
                row["identical"] = identical(found[0].outputs, reference[0].outputs)
            for label, rivals in RIVALS.items():
                ratio = None
                others = [(other, series) for other, series in here if other.name.startswith(rivals)]
                if config.name.startswith("ours") and others and not config.name.startswith(rivals):
                    _, best = max(others, key=lambda one: statistics.median(_speed(turn) for turn in one[1]))
                    ratio = ratio_interval(
                        [(_speed(one), _speed(other)) for one, other in paired(found, best)]
                    )
                row |= columns(f"ratio_{label}", ratio)
            row |= columns("forward", _forward(config, found, here))
            rows.append({**row, **means([one.told for one in found]), "seeds": options.turns})
    return rows


def _speed(outcome: Outcome) -> float:
    return outcome.tokens / outcome.cpu_s


def _forward(
    config: Config, found: Sequence[Outcome], here: Sequence[tuple[Config, list[Outcome]]]
) -> Interval | None:
    """Return the ratio of a plain decoding round of ours to vLLM's shortest."""
    others = [
        series
        for other, series in here
        if other.name.startswith("vllm") and other.name.endswith("plain") and series[0].decode_s is not None
    ]
    if config.name != PLAIN or not others or any(one.decode_s is None for one in found):
        return None
    best = min(others, key=lambda series: statistics.median(one.decode_s or math.inf for one in series))
    return ratio_interval(
        [(one.decode_s or math.nan, other.decode_s or math.nan) for one, other in paired(found, best)]
    )


def identical(outputs: Sequence[list[int]], reference: Sequence[list[int]]) -> float:
    """Return the share of the requests whose output tokens are the same."""
    return statistics.fmean(one == other for one, other in zip(outputs, reference, strict=True))
