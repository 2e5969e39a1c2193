"""Remaining tokens by a guess: Bayes' rule, computed bin by bin, at and between the edges of everything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.calibration import Calibration
from scheduler_svc.core.estimates.guesses import (
    CELLS_PER_SPREAD,
    LEAST_MASS,
    MOST_CELLS,
    REACH,
    GuessedLengths,
    rounded_spread,
)
from scheduler_svc.core.estimates.lengths import (
    BINS,
    CREDIBLE,
    EDGES,
    LOG_BIN,
    LengthTable,
    TokensLeft,
    bounded,
    chance_above,
)

ERROR = 0.3
SPREAD = rounded_spread(ERROR)
CELLS = math.ceil(CELLS_PER_SPREAD * LOG_BIN / SPREAD)
"""Cells per bin: 3."""
CELL = LOG_BIN / CELLS
IN_REACH = math.ceil(REACH * SPREAD / CELL) + CELLS
"""Cells from a guess to the farthest ones in reach: whole bins inside count."""
LINE = Calibration(1.0, 0.0, ERROR**2)
UNLIMITED = 10**12
HEAVY = 1e9
"""Requests of one length: however far from the guess in reach, it is the likeliest."""


def table_of(counts: dict[int, float]) -> LengthTable:
    """Return a table with this many requests in these bins."""
    table = LengthTable()
    table.restore([counts.get(i, 0.0) for i in range(BINS)], [0.0] * BINS)
    table.rebuild(None)
    return table


@dataclass
class Bayes:
    """The density of ln(length): a histogram, flat in each bin, times a normal one around cell `cell`.

    Bin i ends at i · LOG_BIN. Bins outside the reach of the guess do not count; what lies beyond the last one
    in reach is as likely as that one.
    """

    table: LengthTable
    cell: int

    def __post_init__(self) -> None:
        masses = self.table.masses
        inside = [
            i
            for i in range(BINS)
            if (i - 1) * CELLS >= self.cell - IN_REACH and i * CELLS <= self.cell + IN_REACH
        ]
        self.pieces = [((i - 1) * LOG_BIN, i * LOG_BIN, masses[i] + LEAST_MASS) for i in inside]
        low, _, mass = self.pieces[-1]
        self.pieces[-1] = (low, math.inf, mass)
        self.centre = self.cell * CELL

    def beyond(self, log_length: float) -> tuple[float, float]:
        """Return the share that is longer, and share × length over it."""
        share = moment = 0.0
        for low, high, mass in reversed(self.pieces):
            if high > log_length:
                z = (max(low, log_length) - self.centre) / SPREAD
                z_end = (high - self.centre) / SPREAD
                share += mass * (chance_above(z) - chance_above(z_end))
                moment += mass * (chance_above(z - SPREAD) - chance_above(z_end - SPREAD))
        return share, moment * math.exp(self.centre + SPREAD * SPREAD / 2)

    def exceeded_by(self, share: float) -> float:
        """Return the length that this share exceeds."""
        low, high = -1.0, 60.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.beyond(middle)[0] > share else (low, middle)
        return math.exp(low)

    def left(self, emitted: int, most: int) -> TokensLeft:
        share, moment = self.beyond(math.log(emitted) if emitted else -math.inf)
        cut, cut_moment = self.beyond(math.log(most))
        mean = (moment - cut_moment + most * cut) / share - emitted
        low, high = (self.exceeded_by(share * (1 - quantile)) - emitted for quantile in CREDIBLE)
        return bounded(mean, low, high, most - emitted, Basis.CLASS)


def check(table: LengthTable, cell: int, emitted: int, most: int = UNLIMITED) -> TokensLeft:
    """Compare the estimate for a guess in this cell with the definition; return it."""
    found = GuessedLengths(table).left(LINE, math.exp(cell * CELL), emitted, most, Basis.CLIENT)
    expected = Bayes(table, cell).left(emitted, most)
    assert found.mean == pytest.approx(expected.mean, rel=1e-5, abs=1e-6 * (1 + emitted))
    for end, exactly in ((found.low, expected.low), (found.high, expected.high)):
        assert math.log(emitted + end) == pytest.approx(math.log(emitted + exactly), abs=SPREAD / 1000)
    return found


def longest(cell: int) -> float:
    """Return the length from which on another formula holds; a limit there is not taken into account: hardly any
    length comes that far.
    """
    return math.exp(cell * CELL + REACH * SPREAD)


def first_in_reach(cell: int) -> int:
    return math.ceil((cell - IN_REACH) / CELLS) + 1


def last_in_reach(cell: int) -> int:
    return min(BINS - 1, (cell + IN_REACH) // CELLS)


@given(
    heavy=st.dictionaries(st.integers(0, BINS - 1), st.floats(1.0, 1e6), max_size=5),
    cell=st.integers(0, BINS * CELLS),
    emitted=st.integers(0, 5000),
    more=st.integers(1, 5000) | st.just(UNLIMITED),
)
@settings(max_examples=100, deadline=None)
def test_it_is_bayes_rule(heavy: dict[int, float], cell: int, emitted: int, more: int) -> None:
    assume(emitted < longest(cell))
    check(table_of(heavy), cell, emitted, emitted + more if emitted + more < longest(cell) else UNLIMITED)


class TestTheEdgesOfTheReach:
    @pytest.mark.parametrize("cell", [149, 150, 151])
    def test_the_first_and_the_last_bin_inside_count(self, cell: int) -> None:
        first, last = first_in_reach(cell), last_in_reach(cell)
        for bin_ in (first, first + 1, last - 1, last):
            table = table_of({bin_: HEAVY})
            assert EDGES[bin_] < check(table, cell, 0).mean <= EDGES[bin_ + 1] * 1.1
            check(table, cell, 1)
            check(table, cell, min(math.ceil(EDGES[bin_]), int(longest(cell))))

    @pytest.mark.parametrize("cell", [149, 150, 151])
    def test_the_next_ones_do_not(self, cell: int) -> None:
        for bin_ in (first_in_reach(cell) - 1, last_in_reach(cell) + 1):
            for emitted in (0, 1, math.ceil(EDGES[bin_]), math.ceil(EDGES[bin_] * 1.05)):
                if emitted < longest(cell):
                    check(table_of({bin_: HEAVY}), cell, emitted)


class TestTheEdgesOfTheTable:
    @pytest.mark.parametrize("heavy", [0, 1, 2, 3])
    @pytest.mark.parametrize("cell", [0, 1, CELLS, 8])
    def test_guesses_of_one_token_and_a_little_more(self, heavy: int, cell: int) -> None:
        for emitted in (0, 1, 2, 3):
            check(table_of({heavy: HEAVY}), cell, emitted)

    @pytest.mark.parametrize("heavy", [BINS - 3, BINS - 2, BINS - 1])
    @pytest.mark.parametrize("cell", [BINS * CELLS - CELLS, BINS * CELLS - 1, BINS * CELLS])
    def test_lengths_beyond_the_last_bin_are_as_likely_as_those_in_it(self, heavy: int, cell: int) -> None:
        table = table_of({heavy: HEAVY})
        end = round(EDGES[BINS])
        for emitted in (0, round(EDGES[heavy]), end - 1, end + 1, 2 * end):
            check(table, cell, emitted)
            check(table, cell, emitted, 3 * end)

    def test_one_token_is_not_taken_for_more(self) -> None:
        table = LengthTable()
        means = [
            GuessedLengths(table).left(LINE, math.exp(cell * CELL), 0, UNLIMITED, Basis.CLIENT).mean
            for cell in range(3)
        ]
        assert means[0] < means[1] < means[2]


class TestKeptDistributions:
    def test_they_are_kept_up_to_a_bound(self) -> None:
        guessed, kept = GuessedLengths(LengthTable()), []
        for cell in range(2 * MOST_CELLS):
            guessed.left(LINE, math.exp(cell * CELL), 0, UNLIMITED, Basis.CLIENT)
            kept.append(len(guessed._likely))
        assert kept == [*range(1, MOST_CELLS + 1)] * 2

    def test_guesses_are_not_told_apart_finer_than_a_bin_where_their_error_is_wide(self) -> None:
        guessed, line = GuessedLengths(LengthTable()), Calibration(1.0, 0.0, 1.0)
        for off in (-0.4, 0.0, 0.4):
            guessed.left(line, math.exp((30 + off) * LOG_BIN), 0, UNLIMITED, Basis.CLIENT)
        assert len(guessed._likely) == 1
        guessed.left(line, math.exp(30.6 * LOG_BIN), 0, UNLIMITED, Basis.CLIENT)
        assert len(guessed._likely) == 2
