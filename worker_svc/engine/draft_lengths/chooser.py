"""The choice of how many tokens to draft for each request in the next round: as many as pay for themselves.

No torch. Draft token j of request i is worth a_i ** j tokens, since all before it must be accepted too; a_i
is the request's chance that one draft token is accepted. It costs a row of the verification and a row of
draft step j; the first request to reach step j also pays for the step. The lengths maximise

    goodput = sum_i (1 + a_i + ... + a_i ** g_i)  /  (round(rows) + sum_j step(rows of draft step j))

over the choices "each request drafts up to g, but no token that is worth less than it costs at the goodput
of a smaller g". Zero is a valid answer. `round` is the time of a round without its draft steps: the target's
forward, and the work around it, which gains no tokens and favours fewer and longer rounds. Rows that ride
along for other requests (`other_rows`) do not count: they must be computed in any case, and would make any
number of draft tokens look cheap. Measured within a request, acceptance is close to geometric; between
requests it differs a lot.

A small share of the time (EXPLORED_SHARE) is spent on knowing what is not chosen: while drafts pay, a round
without drafts; while they do not, a draft token for a new request or the one that was silent for longest.

The choices of this module, and what was tried instead: docs/decisions/0027-draft-lengths-by-ten-constants.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker_svc.engine.draft_lengths.acceptance import Acceptance, Prior
from worker_svc.engine.draft_lengths.cost_table import CostTable, default_costs
from worker_svc.engine.draft_lengths.found import FoundLengths
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS, Choice, RoundCosts, Worth, WorthOfOne
from worker_svc.engine.draft_lengths.outlook import Outlooks
from worker_svc.engine.proposers.lookup import Found

MARGIN = 0.05
"""Another length must promise this much more goodput than the last one, and any draft than none, whose cost
is known better. Tried 0 to 0.1."""
READING_MARGIN = 3.0
"""Required ratio of a draft's expected gain to the cost of reading its context: one or two draft tokens are
made for every two tokens to come, the estimates that look best are too high, and a request may end sooner.
Tried 1 to 6."""
HOLD_ROUNDS = 16
"""Rounds for which a choice holds, since choosing takes as long as a row; fewer as requests come and leave.
Tried 4 to 64."""
EXPLORED_SHARE = 0.005
"""Share of the time that is spent on exploring. Tried 0.001 to 0.02."""
LONGEST_STEPS = 2.0
"""Draft steps of a probe cost at most this many times what is expected of them: a larger time is an accident,
and would put the next probe off by as much."""


@dataclass
class DraftLengths:
    """A chooser of draft lengths that learns from the outcomes."""

    max_draft_len: int
    fixed: int | None = None
    """Always this length, where the request allows it; None: by goodput."""
    plain: CostTable = field(default_factory=lambda: default_costs()[0])
    """Seconds of a round without drafts, by rows."""
    step: CostTable = field(default_factory=lambda: default_costs()[1])
    """Seconds of a draft step, by rows."""
    drafted: CostTable = field(init=False)
    """Seconds of a round with drafts, without its draft steps, which leave other data in the caches."""
    prior: Prior = field(default_factory=Prior)
    found: FoundLengths = field(default_factory=FoundLengths)
    """Choice of the number of draft tokens that were found in the context."""
    _depth: int | None = None
    """Longest draft of the last choice."""
    _least: float = 0.0
    """Least worth of a draft token in the last choice, in tokens."""
    _count: int = 0
    """Requests of the last choice."""
    _rounds_left: float = 0.0
    """Rounds for which the last choice still holds."""
    _row_costs: float = 0.0
    """Cost of a row of verification in the last choice, in tokens."""
    _reading_costs: float = 0.0
    """Cost of a context token that the draft reads, in tokens."""
    _gain: float = 1.0 + MARGIN
    """Goodput of the last choice, as a multiple of that without drafts, `MARGIN` included."""
    _step_price: float = 0.0
    """Cost of a draft step for one request in the last choice, in tokens."""
    _until_explored: float = 0.0
    """Rounds until exploring is due: a probe, or a round without drafts."""
    _probed_at_once: int = 1
    """Requests that the last probe probed; the next one probes twice as many if this one paid."""
    _probe_gain: float = 0.0
    """Worth of the accepted tokens of the last probe, less the extra time of its rounds, in rounds."""

    def __post_init__(self) -> None:
        self.set_plain(self.plain)

    def set_plain(self, plain: CostTable) -> None:
        """Set the cost of a round, as measured without a draft."""
        self.plain, self.drafted = plain, plain.copy()

    def rate(self, acceptance: Acceptance) -> float:
        """Return the request's estimated acceptance rate."""
        return acceptance.rate(self.prior)

    # -- the lengths of a round --------------------------------------------------------------------------------

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
        caps = [min(cap, self.max_draft_len) for cap in caps]
        if self.fixed is not None:
            return [min(self.fixed, cap) for cap in caps]
        if not any(caps):
            return caps
        self._until_explored -= 1
        if not self._depth:
            self.prior.fade()
        if self._holds(requests):
            return self._by_the_last_choice(requests, caps, outlooks)
        if self._depth and self._until_explored <= 0:
            # At least until there is another choice: one that gains next to nothing would let every round pass.
            self._until_explored = max(HOLD_ROUNDS, (1 - 1 / self._gain) / EXPLORED_SHARE)
            return [0] * len(caps)
        return self._by_a_new_choice(requests, caps, other_rows, outlooks, keys)

    def _holds(self, requests: Sequence[Acceptance]) -> bool:
        """Age the last choice by this round, and by its whole age if all requests were new; return True if it
        still holds."""
        if not self._depth and self._until_explored <= 0 and any(not request.tested for request in requests):
            return False
        came = sum([not request.met for request in requests])
        left = max(0, self._count + came - len(requests))
        changed = max(came, left) / max(1, self._count)
        self._rounds_left -= 1 + HOLD_ROUNDS * changed
        self._count = len(requests)
        return self._rounds_left > 0

    def _by_the_last_choice(
        self, requests: Sequence[Acceptance], caps: Sequence[int], outlooks: Outlooks | None
    ) -> list[int]:
        """Return the lengths by the last choice.

        Drafting requests continue; of the others only those that came since then begin.
        """
        depth, lengths = self._depth or 0, []
        if not depth:  # the usual case under load
            for request in requests:
                request.met = True
            return [
                int(request.probes_left > 0 and cap > 0) for request, cap in zip(requests, caps, strict=True)
            ]
        for i, (request, cap) in enumerate(zip(requests, caps, strict=True)):
            length = 0
            if not request.silent_rounds:
                rate = request.rate(self.prior)
                length = _length(rate, min(cap, depth), self._least)
                if length and not request.met and outlooks is not None:
                    length *= self._pays_for_reading(rate, outlooks(i).lag)
            request.met = request.met or cap > 0
            lengths.append(max(length, min(cap, int(request.probed))))
        return lengths

    def _by_a_new_choice(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        other_rows: int,
        outlooks: Outlooks | None,
        keys: int,
    ) -> list[int]:
        lengths = self._choose(requests, caps, other_rows, outlooks, keys)
        if not self._depth and any(lengths):
            self._until_explored = (1 - 1 / self._gain) / EXPLORED_SHARE
        elif self._depth and not any(lengths) and self._probe_gain > 0:
            self._until_explored = 0.0  # the last probe paid: the next request may be like that one
        self._depth, self._count, self._rounds_left = max(lengths), len(lengths), float(HOLD_ROUNDS)
        if not self._depth and self._until_explored <= 0:
            self._probe(requests, caps, outlooks)
        for i, (request, cap) in enumerate(zip(requests, caps, strict=True)):
            request.met = request.met or cap > 0
            if request.probed:
                lengths[i] = max(lengths[i], min(cap, 1))
        return lengths

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
        rates = [request.rate(self.prior) for request in requests]
        costs = RoundCosts(self.drafted, self.step, self.plain, count=count, other_rows=other_rows, keys=keys)
        none = Choice((1 + MARGIN) * costs.plain_goodput, 0, 0.0)
        self._gain = 1 + MARGIN
        if max(rates) <= none.goodput * costs.least_s(max(caps)):
            # Not even the likeliest draft token pays: the usual case under load, decided without computing
            # the outlook of each request.
            return [0] * count
        self._row_costs = costs.plain_goodput * costs.row_s(1)
        self._reading_costs = costs.plain_goodput * self.read_s()
        if outlooks is not None:
            caps = [
                cap if self._pays_for_reading(rates[i], outlooks(i).lag) else 0 for i, cap in enumerate(caps)
            ]
        best = self._best(none, costs, rates, caps)
        self._least, self._gain = best.least, best.goodput / costs.plain_goodput
        self._step_price = best.goodput * costs.step_s
        return [
            _length(rate, min(cap, best.depth), best.least) for rate, cap in zip(rates, caps, strict=True)
        ]

    def _best(self, none: Choice, costs: RoundCosts, rates: Sequence[float], caps: Sequence[int]) -> Choice:
        """Return the choice of the greatest goodput, over all depths.

        `none` is the choice to draft nothing.
        """
        count, highest, least_s = len(caps), max(rates), costs.least_s(max(caps)) if any(caps) else 0.0
        drafted = WorthOfOne(rates[0], caps[0]) if count == 1 else Worth(rates, caps)
        best, kept = none, none if self._depth == 0 else None
        for depth in range(1, max(caps) + 1):
            # Rising depth: the goodput of the shallower choice prices the draft tokens of the deeper one.
            price = best.goodput
            if highest**depth <= price * least_s and depth > (self._depth or 0):
                break
            least = price * (costs.row_s(depth) + costs.another_s)
            counts, tokens = drafted.at(depth, least)
            choice = Choice((count + tokens) / costs.seconds(counts), depth, least)
            if depth == self._depth:
                kept = choice
            if choice.goodput > best.goodput:
                best = choice
        return kept if kept is not None and best.goodput < kept.goodput * (1 + MARGIN) else best

    def _pays_for_reading(self, rate: float, lag: float) -> bool:
        """Return True if a draft pays for the context it must read: `lag` tokens for each token to come."""
        return not lag or rate > self._row_costs + self._reading_costs * (1.0 + READING_MARGIN * lag)

    def read_s(self) -> float:
        """Return the draft's seconds for one more token of a context that it reads.

        It is the slope between one row for each request and as many rows as the first step may read.
        """
        most = self.step.counts[-1]
        one_each = max(1, most // FIRST_STEP_ROWS)
        return (self.step(most) - self.step(one_each)) / (most - one_each) if most > 1 else 0.0

    def _probe(self, requests: Sequence[Acceptance], caps: Sequence[int], outlooks: Outlooks | None) -> None:
        """Begin to probe requests that draft nothing: untested ones first, the youngest of them, since the
        newest traffic may differ; then the one that was silent for longest (for the rounds of a choice at
        least). Of equal ones it is that whose draft has least to read."""
        idle = [
            i
            for i, request in enumerate(requests)
            if caps[i] and not request.probed and (request.untested or request.silent_rounds >= HOLD_ROUNDS)
        ]
        if not idle:
            return
        self._probed_at_once = 2 * self._probed_at_once if self._probe_gain > 0 else 1

        def order(i: int) -> tuple[bool, int, float]:
            silent = requests[i].silent_rounds
            lag = 0.0 if outlooks is None else outlooks(i).lag
            return (False, silent, lag) if requests[i].untested else (True, -silent, lag)

        idle.sort(key=order)
        for i in idle[: self._probed_at_once]:
            requests[i].probe()
        self._until_explored, self._probe_gain = 1.0, 0.0

    def round_s(self, rows: int, keys: int, *, drafts: bool) -> float:
        """Return the expected seconds of a round of `rows` without its draft steps.

        `keys`: tokens of its contexts together; `drafts`: it has draft steps.
        """
        return (self.drafted if drafts else self.plain)(rows, keys)

    def steps_s(self, lengths: Sequence[int], keys: int) -> float:
        """Return the expected seconds of the draft steps of drafts of these lengths."""
        steps = [sum([length > j for length in lengths]) for j in range(max(lengths, default=0))]
        return sum([self.step(going, keys * going / len(lengths)) for going in steps])

    # -- what is found in the context --------------------------------------------------------------------------

    def row_price(self, count: int, keys: int = 0) -> float:
        """Return the tokens that another verified row must be worth in a round of `count` requests.

        It is what the requests generate in its time. `keys`: tokens of all contexts together. 0 where the
        length of drafts is fixed.
        """
        if self.fixed is not None:
            return 0.0
        return self._gain * (self.plain(2 * count, keys) / self.plain(count, keys) - 1)

    def found_length(
        self, evidence: Acceptance, found: Found, row_price: float, model: Acceptance, drafted: int
    ) -> int:
        """Return the number of found tokens of a request to verify in place of `drafted` ones of the model.

        0: the model's are worth more, or a row is. `evidence` about what is found for the request, and that of
        the `model`.
        """
        if drafted and (model.probed or self.fixed is not None):
            return 0
        if self.fixed is not None:
            return min(self.fixed, len(found.tokens))
        rival, worth, rate = 0.0, 1.0, model.rate(self.prior) if drafted else 0.0
        for _ in range(drafted):
            worth *= rate
            rival += worth - row_price - self._step_price
        return self.found.length(evidence, found, row_price, rival)

    # -- learning from outcomes --------------------------------------------------------------------------------

    def observe_acceptance(self, acceptance: Acceptance, accepted: int, tested: int) -> None:
        """Take in the verification of one request.

        `tested` draft tokens were compared, the first `accepted` kept.
        """
        probed = tested > 0 and acceptance.probed
        acceptance.observe(accepted, tested)
        if tested:
            self.prior.observe(accepted, tested)
        if probed and not self._depth:
            self._count_probe(accepted / self._count)

    def _count_probe(self, gain: float) -> None:
        """Take in what a probe gained, in rounds: the next one is due when this one is a small share of the
        time since then, and at once if it gained more than it cost, as when the traffic has changed."""
        self._probe_gain += gain
        if self._probe_gain > 0:
            self._rounds_left = 0.0
        self._until_explored -= gain / EXPLORED_SHARE

    def observe_costs(
        self,
        rows: int,
        round_s: float,
        steps: Sequence[int],
        draft_s: float,
        keys: int = 0,
        read: int = 0,
    ) -> None:
        """Take in the cost of a round that verified `rows`.

        It had one draft step for each entry of `steps`, with that many requests, in `draft_s` together, and
        took `round_s` without them; `keys`: tokens of all its contexts together; `read`: rows of the first
        draft step.
        """
        own, other = (self.drafted, self.plain) if steps else (self.plain, self.drafted)
        slower = own.observe(rows, round_s, keys)
        other.drift(slower)
        if not steps:
            self.step.drift(slower)
            return
        first, later = steps[0], steps[1:]
        first_s = self.step(read, keys)
        later_s = sum([self.step(going, keys * going / first) for going in later])
        if read > self.step.counts[-1] or draft_s <= 0:
            # A prompt, whose reading takes another time than the table continues with; or a clock that stood
            # still.
            self.step.drift(slower)
        else:
            # The division of the time is not known. Of the deviation each part takes its share of the time:
            # with equal parts, an expectation that is too long for the first step and too short for the others
            # would stay so.
            deviation, share = draft_s / (first_s + later_s) - 1.0, first_s / (first_s + later_s)
            deviation /= share**2 + (1.0 - share) ** 2
            self.step.observe(read, first_s * (1.0 + deviation * share), keys)
            if later:
                mean = round(sum(later) / len(later))
                context = keys * mean / first
                expected_s = self.step(mean, context)
                self.step.observe(mean, expected_s * (1.0 + deviation * (1.0 - share)), context)
        if not self._depth:
            # Only probes drafted.
            plain_s = self.plain(rows - sum(steps), keys)
            draft_s = min(draft_s, LONGEST_STEPS * (first_s + later_s))
            extra_s = draft_s + max(0.0, self.drafted(rows, keys) - plain_s)
            self._count_probe(-extra_s / plain_s)


def _length(rate: float, most: int, least: float) -> int:
    """Return the number of draft tokens of one request that are worth more than `least`."""
    length, worth = 0, rate
    while length < most and worth > least:
        length += 1
        worth *= rate
    return length
