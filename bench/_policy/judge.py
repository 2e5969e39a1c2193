"""Verdicts on the expectations of regimes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench._policy.regime import OURS, Regime
from bench._policy.rows import ratio
from bench._policy.run import Runs
from bench.report import Interval, columns

LEVELS_AT_WORK = 3
"""Levels of `laps-sd` that carry work in every goal regime: with fewer it would be no more than an index."""
WORK_SHARE = 0.01
"""Share of the machine's time below which a level carries no work. Our choice."""


def levels_at_work(level_s: Mapping[str, float]) -> int:
    """Return the number of levels that carry work."""
    return sum(seconds >= WORK_SHARE * sum(level_s.values()) for seconds in level_s.values())


def judged(regime: Regime, runs: Runs) -> list[dict[str, Any]]:
    """Return each expectation with its result."""
    verdicts = []
    for expected in regime.expectations:
        of_regime = expected.of_regime or regime.name
        if (regime.name, expected.policy) not in runs or (of_regime, expected.of) not in runs:
            continue
        found = ratio(
            runs,
            regime.name,
            expected.policy,
            expected.of,
            expected.figure,
            expected.of_figure,
            expected.of_regime,
        )
        verdicts.append(
            {
                "regime": regime.name,
                "policy": expected.policy,
                "figure": expected.figure,
                "of": " ".join(
                    part
                    for part in (
                        expected.of,
                        expected.of_figure,
                        f"in {expected.of_regime}" if expected.of_regime else "",
                    )
                    if part
                ),
                **columns("found", found),
                "at_least": expected.at_least,
                "at_most": expected.at_most if expected.at_most < math.inf else None,
                "met": expected.at_least <= found.middle <= expected.at_most,
            }
        )
    if regime.expect and not regime.yardstick and (regime.name, OURS) in runs:
        counts = [levels_at_work(run["level_s"]) for run in runs[regime.name, OURS]]
        verdicts.append(
            {
                "regime": regime.name,
                "policy": OURS,
                "figure": "levels_at_work",
                "of": "",
                **columns("found", Interval(min(counts), min(counts), max(counts))),
                "at_least": LEVELS_AT_WORK,
                "at_most": None,
                "met": min(counts) >= LEVELS_AT_WORK,
            }
        )
    return verdicts
