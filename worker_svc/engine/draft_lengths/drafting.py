"""The choice of how many tokens to draft for each request in the next round: as many as pay for themselves.

No torch. Draft token j of request i (also called its proposal j) is worth a_i ** j tokens, since all before
it must be accepted too; a_i is the request's chance that one draft token is accepted. It costs a row of the
verification and a row of draft step j; the first request to reach step j also pays for the step. The lengths
maximise

    goodput = sum_i (1 + a_i + ... + a_i ** g_i)  /  (round(rows) + sum_j step(rows of draft step j))

over two kinds of choice: "each request drafts up to g", and "each request drafts up to g, but no token that
is worth less than it costs at that goodput". Drafts of equal length are verified a little faster than others.
Zero is a valid answer. `round` is the time of a round without its draft steps: the target's forward, and the
work around it, which gains no tokens and favours fewer and longer rounds. Rows that ride along for other
requests (`other_rows`) do not count: they must be computed in any case, and would make any number of draft
tokens look cheap. Measured within a request, acceptance is close to geometric; between requests it differs a
lot.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

PRIOR_STRENGTH = 8.0  # weight of the shared prior, in draft tokens
PRIOR_FORGETS = 0.98  # per round and request: the shared prior follows the traffic
REQUEST_FORGETS = 0.98  # per tested draft token: acceptance drifts within a request
HYSTERESIS = 0.03  # another length must promise this much more goodput
# Any draft must promise this much more goodput than no draft: its cost is known less well. Our choice.
ADVANTAGE = 0.05
# Extra time of verifying drafts of unequal length, as a fraction of the time of their rows, where attention
# has no kernel of its own.
UNEVEN = 0.06
# Required ratio of a draft's expected gain to the cost of reading its context: one or two draft tokens are
# made for every two tokens to come, the estimates that look best are too high, and a request may end sooner.
# Our choice.
EARNS = 3.0
# Consecutive depths, each promising less than the one before, after which deeper ones are not tried.
FALLING = 2
# If at most one request in this many has come or gone, the choice is kept. Our choice, like the next.
FEW_IN = 4
# The same while no request drafts: there is no other evidence about new requests than about the earlier ones.
FEW_WHILE_NONE_IN = 2
# Rounds for which a choice holds: worth and cost of a draft token change slowly, and choosing takes as long
# as a row. HELD_AT_FIRST at first; twice as many each time that the next choice is the same, up to
# HELD_AT_MOST. Our choice.
HELD_AT_FIRST, HELD_AT_MOST = 4, 32
# Weight of one measurement for the neighbouring points of a cost table, and for all its points. A machine has
# slower and faster minutes, which affect all points alike: a table that followed them only at the measured
# points would take every size that was not tried recently for slow.
STEP_NEAR, STEP_ALL = 0.04, 0.06
# Bound of a measurement's deviation, as a fraction of its prediction: a larger one, most often upwards, is an
# accident.
FARTHEST = 0.25
# Drafts that promise less than NEAR times the goodput without drafts pause for one round every PLAIN_AFTER
# rounds: otherwise the goodput without drafts would not be measured any more. Our choice.
NEAR, PLAIN_AFTER = 1.5, 32
# Rounds without a draft token after which a request gets one, so that its estimate can move again.
PROBE_AFTER = 64
# Tokens of a request that the first draft step reads: the last one, and the one before it, which the draft
# may lack.
FIRST_STEP_ROWS = 2
# Share of the time that is spent on probing: new and silent requests show whether the traffic has changed.
# Our choice.
EXPLORED_SHARE = 0.005
# If the acceptance rate of a probed request exceeds that of the others by this much, or if it is rejected
# half as often, other requests are probed at once. Our choice.
SURPRISE = 0.1
PROBE_LEARNS = 1 / 8  # weight of the newest round with a probe in the estimate of its extra time
# The measured extra time of a round with a probe is clamped to [expected / 2, 2 * expected]. Our choice.
PROBE_WITHIN = 2.0
# Rejected draft tokens after which a request is not probed any more: the cost is that the draft reads its
# context.
PROBE_MISSES = 2
MOST_PROBES = 16  # draft tokens after which a request is not probed any more, accepted or not
# Tokens to come of a request before any has ended, which must pay for the draft's reading of its context. Our
# choice.
TOKENS_TO_COME = 128
ENDED_KEPT = 64  # recently ended requests that are kept for the estimate of output lengths


class OutputLengths:
    """Expected remaining output length of a request, from the lengths of recently ended requests."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=ENDED_KEPT)
        self._ascending: list[int] = [TOKENS_TO_COME]
        self._sums: list[int] = [TOKENS_TO_COME, 0]  # [i]: of `_ascending` from i on

    def observe(self, tokens: int) -> None:
        """Take in the output length of a request that ended, in tokens."""
        self._ended.append(tokens)
        self._ascending = sorted(self._ended)
        self._sums = [*accumulate(reversed(self._ascending), initial=0)][::-1]

    def to_come(self, said: int) -> float:
        """Return the expected remaining output after `said` tokens.

        It is the mean residual life of the recent lengths; `said` again if none was longer.
        """
        longer = bisect.bisect_right(self._ascending, said)
        if longer == len(self._ascending):
            return float(said)
        return self._sums[longer] / (len(self._ascending) - longer) - said


class Outlook(NamedTuple):
    """Expected remaining output of a request, and the context that its draft lacks."""

    to_come: float = math.inf  # tokens that it is expected to generate
    lacks: int = 0  # tokens of its context that the draft must read before it can propose

    @property
    def late(self) -> float:
        """Tokens that the draft must read first, for each token that is to come."""
        return self.lacks / max(1.0, self.to_come)


Outlooks = Callable[[int], Outlook]  # outlook by index of the request, computed only where it matters


@dataclass(slots=True)
class Prior:
    """Acceptance of all requests together whose draft tokens come from one source."""

    accepted: float = 6.0
    tested: float = 10.0

    @property
    def rate(self) -> float:
        """Fraction of the tested draft tokens that were accepted."""
        return self.accepted / self.tested

    def observe(self, accepted: int, tested: int) -> None:
        """Take in one round of one request; old evidence fades."""
        self.accepted = self.accepted * PRIOR_FORGETS + accepted
        self.tested = self.tested * PRIOR_FORGETS + tested


@dataclass(slots=True)
class Acceptance:
    """Acceptance evidence of one request; old evidence fades."""

    accepted: float = 0.0
    tested: float = 0.0
    silent_rounds: int = 0  # rounds since a draft token was last tested
    misses_left: int = 0  # it drafts a token, whatever that is worth, until `misses_left` were rejected
    probes_left: int = 0  # or `probes_left` were tested
    met: bool = False  # lengths were chosen for it before
    prior: Prior | None = None  # None: that of the draft model
    free: bool = False  # its draft tokens cost no draft step

    def observe(self, accepted: int, tested: int) -> None:
        """Take in one round: `tested` draft tokens were compared, the first `accepted` kept."""
        if tested == 0:
            self.silent_rounds += 1
            return
        keep = REQUEST_FORGETS**tested
        self.accepted = self.accepted * keep + accepted
        self.tested = self.tested * keep + tested
        self.silent_rounds = 0
        self.misses_left -= accepted == 0
        self.probes_left -= 1

    @property
    def probed(self) -> bool:
        """True while the request drafts a token whatever that is worth."""
        return self.misses_left > 0 and self.probes_left > 0

    def probe(self) -> None:
        """Begin to draft for it: as long as its draft tokens are accepted, within limits."""
        self.misses_left, self.probes_left = PROBE_MISSES, MOST_PROBES


@dataclass(slots=True)
class CostTable:
    """Seconds as a function of a count, linear between points that follow the measurements.

    Each key of attention adds `key_s`.
    """

    counts: list[int]
    seconds: list[float]  # at each point; like `key_s`, without the common drift since then
    key_s: float = 0.0
    _slopes: list[float] = field(init=False, repr=False)  # from each point to the next
    _drifted: float = field(default=1.0, init=False, repr=False)  # factor of all points and of `key_s`

    def __post_init__(self) -> None:
        if (
            not self.counts
            or len(self.counts) != len(self.seconds)
            or self.counts != sorted(set(self.counts))
        ):
            raise ValueError("a cost table needs ascending counts with one time each")
        self._slopes = [0.0] * max(1, len(self.counts) - 1)
        for at in range(len(self.counts) - 1):
            self._slope(at)

    def copy(self) -> CostTable:
        """Return an independent copy."""
        return CostTable(
            [*self.counts], [second * self._drifted for second in self.seconds], self.key_s * self._drifted
        )

    def __call__(self, count: int, keys: float = 0.0) -> float:
        """Return the expected seconds for `count`, in contexts of `keys` tokens together."""
        counts = self.counts
        at = min(bisect.bisect_left(counts, count), len(counts) - 1)
        at -= at > 0
        beyond = count - counts[at]
        return self._drifted * (
            self.seconds[at] + keys * self.key_s + (self._slopes[at] * beyond if beyond > 0 else 0.0)
        )

    def _slope(self, at: int) -> None:
        """Set a slope: more rows never cost less, and one more never costs more than the mean before it."""
        counts, seconds = self.counts, self.seconds
        slope = (seconds[at + 1] - seconds[at]) / (counts[at + 1] - counts[at])
        self._slopes[at] = min(max(0.0, slope), seconds[at] / counts[at])

    def drift(self, factor: float) -> None:
        """Move all points by a fraction of the slowdown (1: twice as slow) that another table observed."""
        self._drifted *= 1.0 + factor * STEP_ALL

    def observe(self, count: int, seconds: float, keys: float = 0.0) -> float:
        """Move the points towards one measurement: those next to it by much, all of them by a little.

        Returns its deviation as a fraction of the expectation (1: twice as much), clamped to FARTHEST.
        """
        expected = self(count, keys)
        if seconds <= 0:
            return 0.0
        factor = min(max(seconds / expected - 1.0, -FARTHEST), FARTHEST)
        self.drift(factor)
        counts, points = self.counts, self.seconds
        above = min(bisect.bisect_left(counts, count), len(counts) - 1)
        below = max(above - 1, 0)
        for at in {below, above}:
            near = 1.0 - min(1.0, abs(counts[at] - count) / max(1, counts[above] - counts[below]))
            points[at] *= 1.0 + factor * STEP_NEAR * near
        # Where more rows were measured to cost less, both points get their mean: otherwise one of them would
        # drift away unnoticed.
        for at in range(below, min(above + 2, len(points))):
            if at and points[at] < points[at - 1]:
                points[at - 1 : at + 1] = [(points[at] + points[at - 1]) / 2] * 2
        for at in range(max(0, below - 2), min(above + 2, len(points) - 1)):
            self._slope(at)
        return factor


def default_costs() -> tuple[CostTable, CostTable]:
    """Return (round by rows, draft step by rows) before any measurement.

    A draft step costs a fifth of a round, rows are nearly free.
    """
    return CostTable([1, 65], [1e-2, 2e-2]), CostTable([1, 65], [2e-3, 4e-3])


class _Choice(NamedTuple):
    """Drafts up to `depth` for every request, without draft tokens that are worth less than the least."""

    goodput: float
    depth: int
    least: float  # worth, in tokens, of a draft token that takes a draft step
    least_found: float  # worth of one that was found in the context


class _Worth:
    """Expected tokens by draft length, for requests whose draft tokens cost the same.

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


class _WorthOfOne:
    """The same for a single request."""

    def __init__(self, rate: float, cap: int) -> None:
        self._worths = [rate**k for k in range(1, cap + 1)]

    def at(self, depth: int, threshold: float) -> tuple[list[int], float]:
        """Return what `_Worth.at` returns."""
        tokens, length = 0.0, 0
        for worth in self._worths[:depth]:
            if worth <= threshold:
                break
            tokens, length = tokens + worth, length + 1
        return [1] * length, tokens


class _Costs:
    """Seconds of rounds of the same requests, by their draft tokens.

    A table is evaluated once for each count.
    """

    def __init__(self, lengths: DraftLengths, count: int, drafting: int, other_rows: int, keys: int) -> None:
        """Prepare the costs of `count` requests, of which `drafting` take draft steps."""
        self._count, self._drafting, self._rows, self._keys = count, drafting, count + other_rows, keys
        self._round = lengths.drafted if drafting else lengths.plain
        self._step, self._uneven = lengths.step, lengths.uneven
        # Rows that ride along for other requests must be computed in any case.
        self._rode_s = self._round(self._rows, keys) - self._round(count, keys) if other_rows else 0.0
        self._rounds: dict[int, float] = {}
        self._steps: dict[tuple[int, int], float] = {}
        self.plain_goodput = count / lengths.plain(count, keys)  # tokens per second without drafts

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
        many = self._drafting
        return (self._step_s(many) - self._step_s(1)) / (many - 1) if many > 1 else 0.0

    def least_s(self, deepest: int) -> float:
        """Return the least seconds of a draft token: smallest or largest round, fullest draft step."""
        row_s = min(self.row_s(1), self.row_s(deepest))
        return row_s + (self._step_s(self._count) / self._count if self._drafting == self._count else 0.0)

    def seconds(self, counts: Sequence[int], found: int, depth: int) -> float:
        """Return the seconds of a round with draft steps of `counts` requests each.

        `found` draft tokens took no draft step; a request has at most `depth` of them.
        """
        proposed = sum(counts) + found
        seconds = self._round_s(proposed) + sum([self._step_s(going) for going in counts[1:] if going])
        if counts and counts[0]:
            seconds += self._step_s(counts[0], FIRST_STEP_ROWS)
        if self._uneven and 0 < proposed < self._count * depth:
            seconds += self._uneven * self._round(self._rows + proposed, self._keys)
        return seconds


@dataclass
class DraftLengths:
    """A chooser of draft lengths that learns from the outcomes."""

    max_draft_len: int
    fixed: int | None = None  # always this length, where the request allows it; None = by goodput
    plain: CostTable = field(
        default_factory=lambda: default_costs()[0]
    )  # a round without draft steps, by rows
    step: CostTable = field(default_factory=lambda: default_costs()[1])  # a draft step, by rows
    uneven: float = UNEVEN  # extra fraction of a round's time if drafts have unequal lengths
    # Rounds with drafts, without the time of their draft steps, which leave other data in the caches.
    drafted: CostTable = field(init=False)
    prior: Prior = field(default_factory=Prior)
    _depth: int | None = None  # the longest draft of the last choice
    _until_probe: float = 0.0  # rounds until the next probe
    _probed_at_once: int = 1  # requests probed by the last probe
    _surprised: bool = False  # a probe has found a surprise since then
    _probe_s: float = 0.0  # extra time of a round in which only probed requests draft
    _is_near: bool = False  # the last choice promised less than NEAR times the goodput without drafts
    _since_plain: int = 0  # rounds since the last one without drafts
    _drafts: bool = False  # at least one request drafts by the last choice
    _least: float = 0.0  # least worth of a draft token in the last choice
    _row_costs: float = 0.0  # cost of a row of verification in the last choice, in tokens
    _reading_costs: float = 0.0  # cost of a context token that the draft reads, in tokens
    _until_asked: int = 0  # rounds of the same requests for which the last choice still holds
    _held: int = HELD_AT_FIRST  # rounds for which it holds in total
    _count: int = 0  # requests of the last choice

    def __post_init__(self) -> None:
        self.set_plain(self.plain)

    def set_plain(self, plain: CostTable) -> None:
        """Set the cost of a round, as measured without a draft."""
        self.plain, self.drafted = plain, plain.copy()

    @property
    def _only_probes(self) -> bool:
        """True if only probed requests drafted in the last choice."""
        return self._drafts and not self._depth

    def rate(self, acceptance: Acceptance) -> float:
        """Return the request's estimated acceptance rate: its evidence, shrunk towards the shared mean."""
        return self._rates([acceptance])[0]

    def _rates(self, requests: Sequence[Acceptance]) -> list[float]:
        expected = PRIOR_STRENGTH * self.prior.rate
        return [
            min(
                max(
                    ((expected if one.prior is None else PRIOR_STRENGTH * one.prior.rate) + one.accepted)
                    / (PRIOR_STRENGTH + one.tested),
                    0.01,
                ),
                0.99,
            )
            for one in requests
        ]

    def lengths(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        other_rows: int = 0,
        outlooks: Outlooks | None = None,
        keys: int = 0,
    ) -> list[int]:
        """Return the number of tokens to draft for each request, at most its cap.

        `other_rows` ride along in the verification; `keys`: tokens of all contexts together. `outlooks`
        returns the outlook of a request, and is called only when that matters. A draft that would not pay for
        the context it must read does not begin.
        """
        if self._drafts and self._is_near and self._since_plain >= PLAIN_AFTER and not self._until_asked:
            self._since_plain = 0
            return [0] * len(caps)
        due = not self._drafts and self._until_probe <= 0 and any(_is_new(request) for request in requests)
        if self._until_asked and not due and self._knows(requests):
            # Choosing takes as long as many a row. Without draft tokens no new evidence could change the
            # choice soon.
            self._until_asked -= 1
            lengths = self._as_before(requests, caps, outlooks)
        else:
            lengths = self._anew(requests, caps, other_rows, outlooks, keys)
        self._since_plain = self._since_plain + 1 if any(lengths) else 0
        self._until_probe -= 1
        if self._only_probes and any(lengths):
            count = len(lengths)
            self._until_probe += self._probe_s / (EXPLORED_SHARE * self.plain(count, keys))
        return lengths

    def _anew(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        other_rows: int,
        outlooks: Outlooks | None,
        keys: int,
    ) -> list[int]:
        """Return the lengths when the last choice does not hold any more."""
        caps = [max(0, min(cap, self.max_draft_len)) for cap in caps]
        if self.fixed is not None:
            return [min(self.fixed, cap) for cap in caps]
        if not any(caps):
            return list(caps)
        chosen = self._choose(requests, caps, other_rows, outlooks, keys)
        self._choose_probe(requests, caps, chosen, outlooks)
        return self._settle(requests, caps, chosen)

    def _choose(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        other_rows: int,
        outlooks: Outlooks | None,
        keys: int,
    ) -> list[int]:
        """Return the lengths of the greatest goodput.

        Arguments as in `lengths`; at least one cap is above 0.
        """
        count = len(caps)
        rates = self._rates(requests)
        free = [request.free for request in requests]
        costs = _Costs(self, count, count - sum(free), other_rows, keys)
        best = _Choice((1 + ADVANTAGE) * costs.plain_goodput, 0, 0.0, 0.0)
        if max(rates) <= best.goodput * costs.least_s(max(caps)):
            # Not even the likeliest draft token pays: the usual case under load, decided without computing
            # the outlook of each request.
            return [0] * count
        self._row_costs = costs.plain_goodput * costs.row_s(1)
        self._reading_costs = costs.plain_goodput * self._read_s()
        if outlooks is not None:
            caps = [
                cap if free[i] or self._earns(rates[i], outlooks(i).late) else 0 for i, cap in enumerate(caps)
            ]
        best = self._best(best, costs, rates, caps, free)
        self._least = best.least
        self._is_near = best.goodput < NEAR * costs.plain_goodput
        return [
            _length(rate, min(cap, best.depth), best.least_found if no_step else best.least)
            for rate, cap, no_step in zip(rates, caps, free, strict=True)
        ]

    def _best(
        self,
        none: _Choice,
        costs: _Costs,
        rates: Sequence[float],
        caps: Sequence[int],
        free: Sequence[bool],
    ) -> _Choice:
        """Return the choice of the greatest goodput, at each depth with a price for draft tokens and without.

        `none` is the choice to draft nothing.
        """
        count = len(caps)
        drafted: _Worth | _WorthOfOne
        found: _Worth | None = None
        if count == 1 and not free[0]:
            drafted = _WorthOfOne(rates[0], caps[0])
        elif any(free):
            own, given = (
                [cap if no_step is kind else 0 for cap, no_step in zip(caps, free, strict=True)]
                for kind in (False, True)
            )
            drafted, found = _Worth(rates, own), _Worth(rates, given)
        else:
            drafted = _Worth(rates, caps)
        best, kept = none, none if self._depth == 0 else None
        before, falling = 0.0, 0  # goodput at the depth before, and for how many depths it has not risen
        for depth in range(1, max(caps) + 1):
            # Rising depth: the goodput of the shallower choice prices the draft tokens of the deeper one.
            row_s, price, here = costs.row_s(depth), best.goodput, 0.0
            for least, least_found in ((price * (row_s + costs.another_s), price * row_s), (0.0, 0.0)):
                counts, tokens = drafted.at(depth, least)
                more = 0
                if found is not None:
                    found_counts, worth = found.at(depth, least_found)
                    more, tokens = sum(found_counts), tokens + worth
                choice = _Choice(
                    (count + tokens) / costs.seconds(counts, more, depth), depth, least, least_found
                )
                here = max(here, choice.goodput)
                if depth == self._depth and (kept is None or choice.goodput > kept.goodput):
                    kept = choice
                if choice.goodput > best.goodput:
                    best = choice
            falling = falling + 1 if here <= before else 0
            before = here
            if falling == FALLING and depth >= (self._depth or 0):
                break
        return kept if kept is not None and best.goodput < kept.goodput * (1 + HYSTERESIS) else best

    def _earns(self, rate: float, late: float) -> bool:
        """Return True if a draft pays for the context it must read.

        `late`: lacking tokens for each token to come.
        """
        return not late or rate > self._row_costs + self._reading_costs * (1.0 + EARNS * late)

    def _as_before(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        outlooks: Outlooks | None,
    ) -> list[int]:
        """Return the lengths by the last choice.

        Drafting requests continue; of the others only those that came since then begin.
        """
        if not self._drafts:
            return [0] * len(caps)
        depth, lengths = self._depth or 0, []
        for i, (request, cap, rate) in enumerate(zip(requests, caps, self._rates(requests), strict=True)):
            length = 0
            if not request.silent_rounds:
                length = _length(rate, min(cap, depth), self._least)
                if length and not request.met:
                    request.met = outlooks is None or self._earns(rate, outlooks(i).late)
                    length *= request.met
            lengths.append(max(length, min(cap, int(request.probed))))
        return lengths

    def _knows(self, requests: Sequence[Acceptance]) -> bool:
        """Return True if these are the requests of the last choice; some of many may have come or gone.

        False with prompt lookup: the tokens found in the context differ from round to round.
        """
        if any(request.free for request in requests):
            return False
        if not self._drafts:
            # New requests without evidence are expected to behave like the earlier ones.
            came = sum([not request.met and request.tested > 0 for request in requests])
            return came + abs(len(requests) - self._count) <= self._count // FEW_WHILE_NONE_IN
        came = sum([not request.met for request in requests])
        gone = abs(len(requests) - came - self._count)
        return max(came, gone) <= self._count // FEW_IN

    def _settle(
        self, requests: Sequence[Acceptance], caps: Sequence[int], lengths: Sequence[int]
    ) -> list[int]:
        """Remember the choice, and let each probed request draft at least one token."""
        same, self._depth, self._count = max(lengths) == self._depth, max(lengths), len(lengths)
        for request, cap in zip(requests, caps, strict=True):
            request.met = request.met or cap > 0
        probed = [
            max(length, min(cap, 1)) if request.probed else length
            for length, cap, request in zip(lengths, caps, requests, strict=True)
        ]
        self._drafts = any(probed)
        self._held = min(2 * self._held, HELD_AT_MOST) if same and probed == lengths else HELD_AT_FIRST
        self._until_asked = self._held - 1
        return probed

    def _read_s(self) -> float:
        """Return the draft's seconds for one more token of a context that it reads.

        It is the slope between one row for each request and as many rows as the first step may read.
        """
        many = self.step.counts[-1]
        one_each = max(1, many // FIRST_STEP_ROWS)
        return (self.step(many) - self.step(one_each)) / (many - one_each) if many > 1 else 0.0

    def _choose_probe(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        lengths: Sequence[int],
        outlooks: Outlooks | None,
    ) -> None:
        """Probe, when it is time, a request that drafts nothing and is new or has been silent for long.

        It is the one whose draft has least to read. After a surprise twice as many as before are probed, new
        or not.
        """
        if self._until_probe > 0:
            return
        surprised, self._surprised = self._surprised, False
        self._probed_at_once = 2 * self._probed_at_once if surprised else 1
        idle = [
            i
            for i, request in enumerate(requests)
            if caps[i]
            and not lengths[i]
            and (
                request.silent_rounds >= PROBE_AFTER
                or _is_new(request)
                or (surprised and not request.tested and not request.free)
            )
        ]
        if not idle:
            return
        idle.sort(key=lambda i: (0.0 if outlooks is None else outlooks(i).late, -requests[i].silent_rounds))
        for i in idle[: self._probed_at_once]:
            requests[i].probe()
        self._until_probe = 1.0

    def observe_acceptance(self, acceptance: Acceptance, accepted: int, tested: int) -> None:
        """Take in the verification of one request.

        `tested` draft tokens were compared, the first `accepted` kept.
        """
        probed = tested and acceptance.probed
        acceptance.observe(accepted, tested)
        if tested:
            others = (acceptance.prior or self.prior).rate
            if probed and self.rate(acceptance) > others + min(SURPRISE, (1 - others) / 2):
                self._until_probe, self._until_asked, self._surprised = 0.0, 0, True
            (acceptance.prior or self.prior).observe(accepted, tested)

    def observe_costs(
        self,
        rows: int,
        round_s: float,
        steps: Sequence[int],
        draft_s: float,
        keys: int = 0,
        read: int = 0,
        uneven: bool = False,
    ) -> None:
        """Take in the cost of a round that verified `rows`.

        It had one draft step for each entry of `steps`, with that many requests, in `draft_s` together, and
        took `round_s` without them; `keys`: tokens of all its contexts together; `read`: rows of the first
        draft step; `uneven`: requests had different numbers of rows.
        """
        told: list[float] = []
        if steps:
            first, later = steps[0], steps[1:]
            told = [self.step(read, keys), *(self.step(going, keys * going / first) for going in later)]
            if self._only_probes:
                self._observe_probe(rows, round_s + draft_s, sum(steps), sum(told), keys)
        own, other = (self.drafted, self.plain) if steps else (self.plain, self.drafted)
        slower = own.observe(rows, round_s / (1 + self.uneven if uneven else 1), keys)
        other.drift(slower)
        if not steps:
            self.step.drift(slower)
            return
        # The division of the time is not known: the first step and the others are assumed to deviate by the
        # same factor as all together.
        times = draft_s / sum(told)
        self.step.observe(read, told[0] * times, keys)
        if later:
            mean = round(sum(later) / len(later))
            context = keys * mean / first
            self.step.observe(mean, self.step(mean, context) * times, context)

    def _observe_probe(self, rows: int, took_s: float, proposed: int, draft_s: float, keys: int) -> None:
        """Take in the extra time of a round in which only probed requests drafted.

        Most of the round's time is not the probe's, and varies by more than a probe takes: a value far from
        that of the tables is an accident.
        """
        without_s = self.plain(rows - proposed, keys)
        expected_s = draft_s + max(0.0, self.drafted(rows, keys) - without_s)
        longer_s = min(max(took_s - without_s, expected_s / PROBE_WITHIN), expected_s * PROBE_WITHIN)
        self._probe_s += (PROBE_LEARNS if self._probe_s else 1.0) * (longer_s - self._probe_s)


def _is_new(request: Acceptance) -> bool:
    """Return True if the request is new and there is no evidence about it."""
    return not (request.met or request.tested or request.free)


def _length(rate: float, most: int, least: float) -> int:
    """Return the number of draft tokens of one request that are worth more than `least`."""
    length, worth = 0, rate
    while length < most and worth > least:
        length += 1
        worth *= rate
    return length
