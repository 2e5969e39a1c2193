"""Expected tokens and seconds of a round, by its draft lengths."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from worker_svc.engine.draft_lengths.cost_table import CostTable

FIRST_STEP_ROWS = 2
"""Tokens of a request that the first draft step reads: the last one, and the one before it, which the draft
may lack."""


class Choice(NamedTuple):
    """Drafts up to `depth` for every request, without draft tokens that are worth less than the least."""

    goodput: float
    depth: int
    least: float  # worth, in tokens, of a draft token


class Worth:
    """Expected tokens by draft length.

    The sums are kept by threshold, so that a choice does not visit each request again. A request drafts its
    k-th token if a ** k exceeds the threshold. So, sorted by falling a, the requests that draft k tokens are
    a prefix of those that may.
    """

    def __init__(self, rates: Sequence[float], caps: Sequence[int]) -> None:
        self._rates, self._caps = rates, caps
        self._order = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)
        self._worths: list[list[float]] = []  # [k - 1]: -(a ** k) where the cap is at least k, ascending
        self._sums: list[list[float]] = []  # [k - 1][n]: a ** k of the first n of them together

    def at(self, depth: int, threshold: float) -> tuple[list[int], float]:
        """Return (requests that draft a k-th token, for each k up to `depth`; expected tokens of all)."""
        for k in range(len(self._worths) + 1, depth + 1):
            self._order = [i for i in self._order if self._caps[i] >= k]
            worths = [self._rates[i] ** k for i in self._order]
            self._worths.append([-worth for worth in worths])
            self._sums.append([0.0, *accumulate(worths)])
        counts = [bisect.bisect_left(worths, -threshold) for worths in self._worths[:depth]]
        return counts, sum([sums[count] for sums, count in zip(self._sums, counts, strict=False)])


class WorthOfOne:
    """The same for a single request."""

    def __init__(self, rate: float, cap: int) -> None:
        self._worths = [rate**k for k in range(1, cap + 1)]

    def at(self, depth: int, threshold: float) -> tuple[list[int], float]:
        """Return what `Worth.at` returns."""
        tokens, length = 0.0, 0
        for worth in self._worths[:depth]:
            if worth <= threshold:
                break
            tokens, length = tokens + worth, length + 1
        return [1] * length, tokens


class RoundCosts:
    """Seconds of rounds of the same requests, by their draft tokens.

    A table is evaluated once for each count.
    """

    def __init__(
        self,
        round_: CostTable,
        step: CostTable,
        plain: CostTable,
        *,
        count: int,
        other_rows: int,
        keys: int,
    ) -> None:
        """Prepare the costs of `count` requests.

        `round_` and `plain` are the seconds of a round with and without drafts, without its draft steps,
        `step` those of a draft step, each by rows; `other_rows` and `keys` as in `DraftLengths`.
        """
        self._count, self._rows, self._keys = count, count + other_rows, keys
        self._round, self._step = round_, step
        # Rows that ride along for other requests must be computed in any case.
        self._rode_s = self._round(self._rows, keys) - self._round(count, keys) if other_rows else 0.0
        self._rounds: dict[int, float] = {}
        self._steps: dict[tuple[int, int], float] = {}
        self.plain_goodput = count / plain(count, keys)  # tokens per second without drafts

    def _round_s(self, proposed: int) -> float:
        """Return the seconds of a round without its draft steps."""
        found = self._rounds.get(proposed)
        if found is None:
            found = self._rounds[proposed] = self._round(self._rows + proposed, self._keys) - self._rode_s
        return found

    def _step_s(self, going: int, each: int = 1) -> float:
        found = self._steps.get((going, each))
        if found is None:
            context = self._keys * going / self._count
            found = self._steps[going, each] = self._step(going * each, context)
        return found

    def row_s(self, depth: int) -> float:
        """Return the seconds of one draft token's row when each request drafts `depth` tokens."""
        return (self._round_s(self._count * depth) - self._round_s(0)) / (self._count * depth)

    @property
    def another_s(self) -> float:
        """Seconds of one more request in a draft step."""
        many = self._count
        return (self._step_s(many) - self._step_s(1)) / (many - 1) if many > 1 else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a request's share in a draft step of all."""
        return self._step_s(self._count) / self._count

    def least_s(self, deepest: int) -> float:
        """Return the least seconds of a draft token: smallest or largest round, fullest draft step."""
        return min(self.row_s(1), self.row_s(deepest)) + self.step_s

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the seconds of a round with draft steps of `counts` requests each."""
        seconds = self._round_s(sum(counts)) + sum([self._step_s(going) for going in counts[1:] if going])
        if counts and counts[0]:
            seconds += self._step_s(counts[0], FIRST_STEP_ROWS)
        return seconds
