"""How many tokens to draft for each request in the next round: as many as pay for themselves. No torch.

Proposal j of request i is worth a_i ** j tokens (all before it must be accepted too), a_i being the request's chance that one proposal is
accepted. It costs a row of the verification and a row of draft step j; the first request to reach step j also pays for the step. The
lengths maximise

    goodput = sum_i (1 + a_i + ... + a_i ** g_i)  /  (round(rows) + sum_j step(rows of draft step j))

over "everybody up to g" and "everybody up to g, but nobody beyond the point where a proposal is worth less than it costs at that goodput".
Drafts of equal length are verified a little faster than others. Zero is an answer like any other. `round` is all that a round takes but for
its draft steps: the forward of the target, and around it what buys nothing and argues for fewer and longer rounds. What rides along for others
(`other_rows`) does not count: it has to be done anyway, and would make any number of proposals look cheap. Measured within a request,
acceptance is close to geometric; between requests it differs a lot.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

PRIOR_STRENGTH = 8.0  # proposals that the shared prior counts for
PRIOR_FORGETS = 0.98  # per round and request: the shared prior follows the traffic
REQUEST_FORGETS = 0.98  # per tested proposal: acceptance drifts within a request
HYSTERESIS = 0.03  # another length must promise this much more goodput
ADVANTAGE = (
    0.05  # any draft must promise this much more than none: what it costs is known less well. Our choice
)
UNEVEN = 0.06  # where attention has no kernel of its own, a verification of unequally long drafts takes so much longer than its rows tell
# What a draft reads of a context must be earned back so many times: one or two proposals are made for every two tokens that are to come,
# estimates that look best are too high, and a request may end sooner. Our choice.
EARNS = 3.0
FALLING = (
    2  # depths one after the other that promise less than the one before: still deeper ones are not looked at
)
FEW_IN = 4  # one request that came or went in so many does not change the choice. Our choice, like the next
FEW_WHILE_NONE_IN = (
    2  # while nobody drafts: for those who come there is no other evidence than for those who were there
)
# Rounds for which a choice holds: what a proposal is worth and costs changes slowly, and to choose takes as long as a row. At first the
# former; each time that the next choice says the same, twice as many, up to the latter. Our choice.
HELD_AT_FIRST, HELD_AT_MOST = 4, 32
# Weight of one measurement for the points of a cost table next to it, and for all of them. A machine has slower and faster minutes, which
# all points share: a table that follows them only where it is measured takes whatever was not tried of late for slow.
STEP_NEAR, STEP_ALL = 0.04, 0.06
FARTHEST = 0.25  # a measurement is taken to be off its prediction by so much of that at most: what is far off, most often above, is an accident
# Drafts that promise less than so many times what is had without them pause for a round every so often: else nobody would know any more
# what that is. Our choice.
NEAR, PLAIN_AFTER = 1.5, 32
PROBE_AFTER = (
    64  # rounds without a proposal after which a request gets one, so that its estimate can move again
)
FIRST_STEP_ROWS = 2  # tokens of a request that the first draft step reads: the last one, and the one before it that the draft may lack
EXPLORED_SHARE = 0.005  # of the time goes into probing: newcomers and silent requests show whether the traffic has changed. Our choice
SURPRISE = 0.1  # who is probed is found to accept so much more than the others, or to be refused half as often: then others are probed at once. Our choice
PROBE_LEARNS = 1 / 8  # weight of the newest round with a probe in what it takes longer
PROBE_WITHIN = 2.0  # times what is expected or one so many times it: what such a round may be found to take longer. Our choice
PROBE_MISSES = 2  # proposals refused after which a request is probed no more: what costs is that the draft reads its context
MOST_PROBES = 16  # proposals after which it is not either
TOKENS_TO_COME = (
    128  # of a request, before any has ended: what a draft's reading of its context must pay for. Our choice
)
ENDED_KEPT = 64  # requests that ended of late, whose lengths tell how much the others will say


class OutputLengths:
    """How much a request is yet to say, from how much those said that ended of late."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=ENDED_KEPT)
        self._ascending: list[int] = [TOKENS_TO_COME]
        self._sums: list[int] = [TOKENS_TO_COME, 0]  # [i]: of `_ascending` from i on

    def observe(self, tokens: int) -> None:
        """A request ended after so many."""
        self._ended.append(tokens)
        self._ascending = sorted(self._ended)
        self._sums = [*accumulate(reversed(self._ascending), initial=0)][::-1]

    def to_come(self, said: int) -> float:
        """Expected tokens of one that said so many: what those who said more said on average from there on; as many again if nobody did."""
        longer = bisect.bisect_right(self._ascending, said)
        if longer == len(self._ascending):
            return float(said)
        return self._sums[longer] / (len(self._ascending) - longer) - said


class Outlook(NamedTuple):
    """What lies ahead of a request."""

    to_come: float = math.inf  # tokens that it is expected to say
    lacks: int = 0  # tokens of its context that the draft must read before it can propose

    @property
    def late(self) -> float:
        """Tokens that the draft must read first, for each token that is to come."""
        return self.lacks / max(1.0, self.to_come)


Outlooks = Callable[[int], Outlook]  # of the request at a place, asked only where it matters


@dataclass(slots=True)
class Prior:
    """What is known of all requests together whose proposals come from one source."""

    accepted: float = 6.0
    tested: float = 10.0

    @property
    def rate(self) -> float:
        """Accepted among tested proposals."""
        return self.accepted / self.tested

    def observe(self, accepted: int, tested: int) -> None:
        """Take in one round of one request; old evidence fades."""
        self.accepted = self.accepted * PRIOR_FORGETS + accepted
        self.tested = self.tested * PRIOR_FORGETS + tested


@dataclass(slots=True)
class Acceptance:
    """One request's evidence, with old evidence fading."""

    accepted: float = 0.0
    tested: float = 0.0
    silent_rounds: int = 0  # since a proposal was last tested
    misses_left: int = 0  # gets a proposal, whatever it is worth, until so many were refused
    probes_left: int = 0  # or so many were tested
    met: bool = False  # lengths were chosen for it before
    prior: Prior | None = None  # None: that of the draft model
    free: bool = False  # its proposals cost no draft step

    def observe(self, accepted: int, tested: int) -> None:
        """Take in one round: `tested` proposals were compared, the first `accepted` kept."""
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
        """Whether it gets a proposal whatever that is worth."""
        return self.misses_left > 0 and self.probes_left > 0

    def probe(self) -> None:
        """Begin to give it proposals: as long as they are accepted, within limits."""
        self.misses_left, self.probes_left = PROBE_MISSES, MOST_PROBES


@dataclass(slots=True)
class CostTable:
    """Seconds as a function of a count: linear between points, which follow what is measured; and so much for each key of attention."""

    counts: list[int]
    seconds: list[float]  # at each point; like `key_s`, but for what they all have drifted since
    key_s: float = 0.0
    _slopes: list[float] = field(init=False, repr=False)  # from each point on to the next
    _drifted: float = field(default=1.0, init=False, repr=False)  # times

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
        """One more that says the same."""
        return CostTable(
            [*self.counts], [second * self._drifted for second in self.seconds], self.key_s * self._drifted
        )

    def __call__(self, count: int, keys: float = 0.0) -> float:
        """Expected seconds for `count`, in contexts of so many tokens together."""
        counts = self.counts
        at = min(bisect.bisect_left(counts, count), len(counts) - 1)
        at -= at > 0
        beyond = count - counts[at]
        return self._drifted * (
            self.seconds[at] + keys * self.key_s + (self._slopes[at] * beyond if beyond > 0 else 0.0)
        )

    def _slope(self, at: int) -> None:
        """More rows never cost less, and one more never costs more than the mean of those before it."""
        counts, seconds = self.counts, self.seconds
        slope = (seconds[at + 1] - seconds[at]) / (counts[at + 1] - counts[at])
        self._slopes[at] = min(max(0.0, slope), seconds[at] / counts[at])

    def drift(self, factor: float) -> None:
        """The machine was found so much slower (1: twice as slow) where another table holds: move a little."""
        self._drifted *= 1.0 + factor * STEP_ALL

    def observe(self, count: int, seconds: float, keys: float = 0.0) -> float:
        """Move the points towards one measurement: those next to it by much, all of them by a little. Returns how much more it was
        than expected: 1 is twice as much, and the most."""
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
        # Where more rows were found to cost less, both points tell what either costs: else one of them would drift off unnoticed.
        for at in range(below, min(above + 2, len(points))):
            if at and points[at] < points[at - 1]:
                points[at - 1 : at + 1] = [(points[at] + points[at - 1]) / 2] * 2
        for at in range(max(0, below - 2), min(above + 2, len(points) - 1)):
            self._slope(at)
        return factor


def default_costs() -> tuple[CostTable, CostTable]:
    """(round by rows, draft step by rows) before anything was measured: a draft step costs a fifth, rows are nearly free."""
    return CostTable([1, 65], [1e-2, 2e-2]), CostTable([1, 65], [2e-3, 4e-3])


class _Choice(NamedTuple):
    """Everybody up to `depth`, but no proposal that is not worth so many tokens."""

    goodput: float
    depth: int
    least: float  # of a proposal that takes a draft step
    least_found: float  # of one that was found in the context


class _Worth:
    """What draft lengths bring, of requests whose proposals cost the same: sums by threshold, without asking each request again.

    A request drafts its k-th token if a ** k exceeds the threshold. So by falling a, those who draft k tokens are a prefix of those who may.
    """

    def __init__(self, rates: Sequence[float], caps: Sequence[int]) -> None:
        self._rates, self._caps = rates, caps
        self._order = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)
        self._worths: list[list[float]] = []  # [k - 1]: -(a ** k) of those whose cap is k or more, ascending
        self._sums: list[list[float]] = []  # [k - 1][n]: a ** k of the first n of them together

    def at(self, depth: int, threshold: float) -> tuple[list[int], float]:
        """(requests that draft a k-th token for each k up to `depth`, expected tokens of all their proposals)."""
        for k in range(len(self._worths) + 1, depth + 1):
            self._order = [i for i in self._order if self._caps[i] >= k]
            worths = [self._rates[i] ** k for i in self._order]
            self._worths.append([-worth for worth in worths])
            self._sums.append([0.0, *accumulate(worths)])
        counts = [bisect.bisect_left(worths, -threshold) for worths in self._worths[:depth]]
        return counts, sum([sums[count] for sums, count in zip(self._sums, counts, strict=False)])


class _WorthOfOne:
    """The same of a single request."""

    def __init__(self, rate: float, cap: int) -> None:
        self._worths = [rate**k for k in range(1, cap + 1)]

    def at(self, depth: int, threshold: float) -> tuple[list[int], float]:
        """As `_Worth.at`."""
        tokens, length = 0.0, 0
        for worth in self._worths[:depth]:
            if worth <= threshold:
                break
            tokens, length = tokens + worth, length + 1
        return [1] * length, tokens


class _Costs:
    """What rounds of the same requests take, by what they propose. A table is asked once for each count."""

    def __init__(self, lengths: DraftLengths, count: int, drafting: int, other_rows: int, keys: int) -> None:
        """`drafting` of so many take draft steps."""
        self._count, self._drafting, self._rows, self._keys = count, drafting, count + other_rows, keys
        self._round = lengths.drafted if drafting else lengths.plain
        self._step, self._uneven = lengths.step, lengths.uneven
        # What rides along for others has to be done in any case.
        self._rode_s = self._round(self._rows, keys) - self._round(count, keys) if other_rows else 0.0
        self._rounds: dict[int, float] = {}
        self._steps: dict[tuple[int, int], float] = {}
        self.plain_goodput = count / lengths.plain(count, keys)  # tokens per second without drafts

    def _round_s(self, proposed: int) -> float:
        """Without its draft steps."""
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
        """Of one proposal, where everybody drafts so many."""
        return (self._round_s(self._count * depth) - self._round_s(0)) / (self._count * depth)

    @property
    def another_s(self) -> float:
        """Of one request more in a draft step."""
        many = self._drafting
        return (self._step_s(many) - self._step_s(1)) / (many - 1) if many > 1 else 0.0

    def least_s(self, deepest: int) -> float:
        """What a proposal costs at least: in the smallest round or the largest, in the fullest step."""
        row_s = min(self.row_s(1), self.row_s(deepest))
        return row_s + (self._step_s(self._count) / self._count if self._drafting == self._count else 0.0)

    def seconds(self, counts: Sequence[int], found: int, depth: int) -> float:
        """A round with draft steps of so many requests each, and so many proposals that took none, up to `depth` of a request."""
        proposed = sum(counts) + found
        seconds = self._round_s(proposed) + sum([self._step_s(going) for going in counts[1:] if going])
        if counts and counts[0]:
            seconds += self._step_s(counts[0], FIRST_STEP_ROWS)
        if self._uneven and 0 < proposed < self._count * depth:
            seconds += self._uneven * self._round(self._rows + proposed, self._keys)
        return seconds


@dataclass
class DraftLengths:
    """Chooses draft lengths and learns from what came of them."""

    max_draft_len: int
    fixed: int | None = None  # always this length, where the request allows it; None = by goodput
    plain: CostTable = field(
        default_factory=lambda: default_costs()[0]
    )  # a round without draft steps, by rows
    step: CostTable = field(default_factory=lambda: default_costs()[1])  # a draft step, by rows
    uneven: float = UNEVEN  # of the time of a round, if drafts are unequally long
    drafted: CostTable = field(
        init=False
    )  # a round but for its draft steps, which leave other things in the caches
    prior: Prior = field(default_factory=Prior)
    _depth: int | None = None  # the longest draft of the last choice
    _until_probe: float = 0.0  # rounds
    _probed_at_once: int = 1  # requests, the last time
    _surprised: bool = False  # since then
    _probe_s: float = 0.0  # what a round takes longer in which only those who are probed draft
    _is_near: bool = False  # whether the last choice promised less than NEAR times what is had without drafts
    _since_plain: int = 0  # rounds since the last one in which nobody drafted
    _drafts: bool = False  # whether it had anybody draft
    _least: float = 0.0  # what a proposal had to be worth in the last choice
    _row_costs: float = 0.0  # tokens that a row of verification was worth in it
    _reading_costs: float = 0.0  # and a token of a context that the draft reads
    _until_asked: int = 0  # rounds of the same requests in which the last choice holds
    _held: int = HELD_AT_FIRST  # rounds in which it holds in all
    _count: int = 0  # requests of the last choice

    def __post_init__(self) -> None:
        self.set_plain(self.plain)

    def set_plain(self, plain: CostTable) -> None:
        """What a round takes, as measured without a draft."""
        self.plain, self.drafted = plain, plain.copy()

    @property
    def _only_probes(self) -> bool:
        """Whether the last choice had only those draft who are probed."""
        return self._drafts and not self._depth

    def rate(self, acceptance: Acceptance) -> float:
        """Estimated chance that a proposal of this request is accepted: its evidence, shrunk towards all requests' mean."""
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
        """Tokens to draft for each request, at most its cap; `other_rows` ride along in the verification; `keys`: tokens of all
        contexts together.

        `outlooks` tells of each request what lies ahead, and is asked only when that matters. A draft that would not earn what it must
        read does not begin.
        """
        if self._drafts and self._is_near and self._since_plain >= PLAIN_AFTER and not self._until_asked:
            self._since_plain = 0
            return [0] * len(caps)
        due = not self._drafts and self._until_probe <= 0 and any(_is_new(request) for request in requests)
        if self._until_asked and not due and self._knows(requests):
            # To find the answer takes as long as many a row. Without proposals nothing is learnt that could change it soon.
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
        """What `lengths` says when the last choice does not hold any more."""
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
        """The lengths of the greatest goodput. Arguments as in `lengths`, somebody's cap above 0."""
        count = len(caps)
        rates = self._rates(requests)
        free = [request.free for request in requests]
        costs = _Costs(self, count, count - sum(free), other_rows, keys)
        best = _Choice((1 + ADVANTAGE) * costs.plain_goodput, 0, 0.0, 0.0)
        if max(rates) <= best.goodput * costs.least_s(max(caps)):
            # Not even the likeliest proposal is worth it: the usual answer under load, without asking everybody.
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
        """The choice of the greatest goodput, at each depth with a price for proposals and without; `none`: to draft nothing."""
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
            # Rising depth: the goodput of the shallower choice prices the proposals of the deeper one.
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
        """Whether a draft that lacks so many tokens, for each one that is to come, earns what it must read."""
        return not late or rate > self._row_costs + self._reading_costs * (1.0 + EARNS * late)

    def _as_before(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        outlooks: Outlooks | None,
    ) -> list[int]:
        """Lengths by the last choice: who drafts goes on, and of the others only who came meanwhile begins."""
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
        """Whether they are those of the last choice, as far as that matters: some of many may have come or gone. What is found in the
        context differs from round to round.
        """
        if any(request.free for request in requests):
            return False
        if not self._drafts:
            # Of those who come and of whom nothing is known the same is expected as of those who were there.
            came = sum([not request.met and request.tested > 0 for request in requests])
            return came + abs(len(requests) - self._count) <= self._count // FEW_WHILE_NONE_IN
        came = sum([not request.met for request in requests])
        gone = abs(len(requests) - came - self._count)
        return max(came, gone) <= self._count // FEW_IN

    def _settle(
        self, requests: Sequence[Acceptance], caps: Sequence[int], lengths: Sequence[int]
    ) -> list[int]:
        """Remember the choice, and give who is probed its proposal."""
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
        """What the draft takes for one token more of a context that it reads: as between a row for each request and as many as the first step may read."""
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
        """When it is time: of those who draft nothing and came just now, or did not for long, probe the one whose draft has least to read. After a
        surprise twice as many as before, whenever they came."""
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
        """What verification said of one request's proposals: `tested` were compared, the first `accepted` kept."""
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
        """What a round cost: `rows` verified, one draft step for each entry of `steps`, with that many requests, and `round_s` for all but
        them; `keys`: tokens of all its contexts together; `read`: rows of the first draft step; `uneven`: requests had different numbers
        of rows.
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
        # How the time was divided is not known: the first step and the others are taken to be as much off as all together.
        times = draft_s / sum(told)
        self.step.observe(read, told[0] * times, keys)
        if later:
            mean = round(sum(later) / len(later))
            context = keys * mean / first
            self.step.observe(mean, self.step(mean, context) * times, context)

    def _observe_probe(self, rows: int, took_s: float, proposed: int, draft_s: float, keys: int) -> None:
        """A round in which only those draft who are probed: how much longer it took. Most of what it took is not the probe's, and goes up and down
        by more than a probe takes: what is not near to what tables tell is an accident."""
        without_s = self.plain(rows - proposed, keys)
        expected_s = draft_s + max(0.0, self.drafted(rows, keys) - without_s)
        longer_s = min(max(took_s - without_s, expected_s / PROBE_WITHIN), expected_s * PROBE_WITHIN)
        self._probe_s += (PROBE_LEARNS if self._probe_s else 1.0) * (longer_s - self._probe_s)


def _is_new(request: Acceptance) -> bool:
    """Whether it came just now, and nothing is known of it."""
    return not (request.met or request.tested or request.free)


def _length(rate: float, most: int, least: float) -> int:
    """Proposals of one request that are worth more than `least`."""
    length, worth = 0, rate
    while length < most and worth > least:
        length += 1
        worth *= rate
    return length
