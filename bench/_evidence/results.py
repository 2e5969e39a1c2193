"""Results that `laps-sd bench policy` wrote, for queries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench._policy.regime import OURS

RESULTS = Path(__file__).parents[1] / "results"
LENGTH_ONLY = ("srpt-length", "sjf-length")
"""Policies that know predicted lengths and nothing about acceptance: the rivals that matter."""


Row = Mapping[str, Any]


class Results:
    """Results of one run of `laps-sd bench policy`, for queries."""

    def __init__(self, path: Path) -> None:
        self.all: dict[str, Any] = json.loads(path.read_bytes())
        self.about: dict[str, Any] = self.all["about"]
        self.regimes: dict[str, dict[str, Any]] = self.about["regimes"]
        self.name = path.name
        self.source = source_of(path)
        self.reduced = not all(regime["goals"] for regime in self.regimes.values())
        """True if options changed the regimes, so that their goals do not hold for them."""
        rows = self.all["rows"]
        self.verdicts: list[Row] = [row for row in rows if row["kind"] == "verdict"]
        self.swept = list(dict.fromkeys(row["regime"] for row in rows if row["kind"] == "sweep"))
        self._rows = {(row["regime"], row["policy"]): row for row in rows if row["kind"] == "policy"}

    def row(self, regime: str, policy: str) -> Row | None:
        """Return the row of the policy in the regime, if it ran."""
        return self._rows.get((regime, policy))

    def rows_of(self, regime: str) -> list[Row]:
        """Return the rows of all policies that ran in the regime."""
        return [row for (of, _), row in self._rows.items() if of == regime]

    def ours(self, regime: str) -> Row:
        """Return the row of `laps-sd`."""
        found: Row = self._rows[regime, OURS]
        return found

    def ratio(self, regime: str, rival: str) -> tuple[float, float, float] | None:
        """Return the mean latency of `laps-sd` over that of a rival, with its interval; None if the rival did
        not run there.
        """
        found = self.ours(regime)["ratios"].get(rival)
        return None if found is None else tuple(found)

    def strongest_length_only(self, regime: str) -> str | None:
        """Return the policy with the least mean latency of those that ran there."""
        ran = [name for name in LENGTH_ONLY if self.row(regime, name)]
        return min(ran, key=lambda name: self._rows[regime, name]["mean_s"], default=None)

    def figures(self) -> list[str]:
        """Return the regimes that have a figure of their own."""
        return [name for name in self.regimes if name in self.swept or name == "mixture"]


def source_of(path: Path) -> str:
    """Return the source that every figure names, so that a figure of other results is found."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def newest(benchmark: str) -> Path | None:
    """Return the newest results of the benchmark, by name, which begins with the date. Return None if there
    are none.
    """
    return max(RESULTS.glob(f"*-{benchmark}.json"), default=None)


def read_rows(path: Path) -> tuple[list[Row], str, Row]:
    """Return the rows, their source, and the facts of the run."""
    found = json.loads(path.read_text())
    about = found["about"]
    source = (
        f"`{about['command']}`, {about['date']} ([results](../../bench/results/{path.name}), "
        "[how it is measured](../../bench/README.md))"
    )
    return found["rows"], source, about
