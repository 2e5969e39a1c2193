"""How many tokens to draft for each request in the next round: as many as pay for themselves. No torch.

Proposal j of request i is worth a_i ** j tokens (all before it must be accepted too), a_i being the request's chance that one proposal is
accepted. It costs a row of the verification and a row of draft step j; the first request to reach step j also pays for the step. The
lengths maximise

    goodput = sum_i (1 + a_i + ... + a_i ** g_i)  /  (verify(rows) + sum_j step(requests still drafting at j))

over "everybody up to g, but nobody beyond the point where a proposal is worth less than it costs at that goodput". Zero is an
answer like any other. Measured within a request, acceptance is close to geometric; between requests it differs a lot.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_STRENGTH = 8.0  # proposals that the shared prior counts for
PRIOR_FORGETS = 0.995  # per round and request: the shared prior follows the traffic
REQUEST_FORGETS = 0.98  # per tested proposal: acceptance drifts within a request
HYSTERESIS = 0.03  # another length must promise this much more goodput
STEP_NEAR, STEP_ALL = (
    0.08,
    0.01,
)  # weight of one measurement for the points of a cost table next to it, and for all of them
CLIP = (
    2.0  # a measurement this many times off its prediction may be an accident of the machine, and is clipped
)
PROBE_AFTER = (
    64  # rounds without a proposal after which a request gets one, so that its estimate can move again
)


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


@dataclass(slots=True)
class CostTable:
    """Seconds as a function of a count: linear between points, which follow what is measured."""

    counts: list[int]
    seconds: list[float]

    def __post_init__(self) -> None:
        if (
            not self.counts
            or len(self.counts) != len(self.seconds)
            or self.counts != sorted(set(self.counts))
        ):
            raise ValueError("a cost table needs ascending counts with one time each")

    def __call__(self, count: int) -> float:
        """Expected seconds for `count`."""
        if len(self.counts) == 1:
            return self.seconds[0]
        at = min(max(bisect.bisect_left(self.counts, count), 1), len(self.counts) - 1)
        low, high = self.counts[at - 1], self.counts[at]
        # More rows never cost less, and one more never costs more than the mean of those before it.
        slope = (self.seconds[at] - self.seconds[at - 1]) / (high - low)
        slope = min(max(0.0, slope), self.seconds[at - 1] / low)
        return max(1e-9, self.seconds[at - 1] + slope * max(0, count - low))

    def observe(self, count: int, seconds: float) -> None:
        """Move the points towards one measurement: those next to it by much, all of them by a little."""
        expected = self(count)
        if seconds <= 0:
            return
        factor = min(max(seconds / expected, 1 / CLIP), CLIP) - 1.0
        for at, point in enumerate(self.counts):
            near = 1.0 - min(1.0, abs(point - count) / max(1, self._spacing(at, count)))
            self.seconds[at] *= 1.0 + factor * (STEP_ALL + STEP_NEAR * near)

    def _spacing(self, at: int, count: int) -> int:
        """Distance from a point to its neighbour on the side of `count`."""
        other = at + 1 if count > self.counts[at] else at - 1
        return abs(self.counts[min(max(other, 0), len(self.counts) - 1)] - self.counts[at])


def default_costs() -> tuple[CostTable, CostTable]:
    """(verify by rows, draft step by requests) before anything was measured: a draft step costs a fifth, rows are nearly free."""
    return CostTable([1, 65], [1e-2, 2e-2]), CostTable([1, 65], [2e-3, 4e-3])


@dataclass
class DraftLengths:
    """Chooses draft lengths and learns from what came of them."""

    max_draft_len: int
    fixed: int | None = None  # always this length, where the request allows it; None = by goodput
    verify: CostTable = field(default_factory=lambda: default_costs()[0])
    step: CostTable = field(default_factory=lambda: default_costs()[1])
    prior: Prior = field(default_factory=Prior)
    _depth: int | None = None  # the longest draft of the last choice

    def rate(self, acceptance: Acceptance) -> float:
        """Estimated chance that a proposal of this request is accepted: its evidence, shrunk towards all requests' mean."""
        prior = (acceptance.prior or self.prior).rate
        rate = (PRIOR_STRENGTH * prior + acceptance.accepted) / (PRIOR_STRENGTH + acceptance.tested)
        return min(max(rate, 0.01), 0.99)

    def lengths(self, requests: Sequence[Acceptance], caps: Sequence[int], other_rows: int = 0) -> list[int]:
        """Tokens to draft for each request, at most its cap; `other_rows` ride along in the verification (prefill)."""
        caps = [max(0, min(cap, self.max_draft_len)) for cap in caps]
        if self.fixed is not None:
            return [min(self.fixed, cap) for cap in caps]
        deepest = max(caps, default=0)
        if deepest == 0:
            return list(caps)
        rates = [self.rate(request) for request in requests]
        free = [request.free for request in requests]
        best, best_lengths = -1.0, [0] * len(caps)
        kept, kept_lengths = -1.0, best_lengths
        # Rising depth: the goodput of the shallower choice prices the proposals of the deeper one.
        price = len(caps) / self.verify(len(caps) + other_rows)
        for depth in range(deepest + 1):
            lengths = self._lengths_at(depth, rates, caps, free, price, other_rows)
            goodput = self._goodput(lengths, rates, free, other_rows)
            price = max(price, goodput)
            if depth == self._depth:
                kept, kept_lengths = goodput, lengths
            if goodput > best:
                best, best_lengths = goodput, lengths
        if kept > 0 and best < kept * (1 + HYSTERESIS):
            best_lengths = kept_lengths
        self._depth = max(best_lengths)
        return [
            max(length, min(cap, 1)) if request.silent_rounds >= PROBE_AFTER else length
            for length, cap, request in zip(best_lengths, caps, requests, strict=True)
        ]

    def observe_acceptance(self, acceptance: Acceptance, accepted: int, tested: int) -> None:
        """What verification said of one request's proposals: `tested` were compared, the first `accepted` kept."""
        acceptance.observe(accepted, tested)
        if tested:
            (acceptance.prior or self.prior).observe(accepted, tested)

    def observe_costs(self, rows: int, verify_s: float, steps: Sequence[int], draft_s: float) -> None:
        """What a round without prefill cost: `rows` verified, and one draft step for each entry of `steps`, with that many requests."""
        self.verify.observe(rows, verify_s)
        if steps:
            mean = sum(steps) / len(steps)
            self.step.observe(round(mean), draft_s / len(steps))

    def _lengths_at(
        self,
        depth: int,
        rates: Sequence[float],
        caps: Sequence[int],
        free: Sequence[bool],
        price: float,
        other_rows: int,
    ) -> list[int]:
        """Everybody up to `depth`, except where a proposal is worth less than its two rows at `price` tokens per second."""
        if depth == 0:
            return [0] * len(caps)
        rows = len(caps) + other_rows
        row_s = (self.verify(rows + len(caps) * depth) - self.verify(rows)) / (len(caps) * depth)
        drafting = len(caps) - sum(free)
        step_s = (self.step(drafting) - self.step(1)) / max(1, drafting - 1)
        lengths = []
        for rate, cap, no_step in zip(rates, caps, free, strict=True):
            threshold = price * (row_s if no_step else row_s + step_s)
            length, worth = 0, rate
            while length < depth and length < cap and worth > threshold:
                length += 1
                worth *= rate
            lengths.append(length)
        return lengths

    def _goodput(
        self, lengths: Sequence[int], rates: Sequence[float], free: Sequence[bool], other_rows: int
    ) -> float:
        """Expected tokens per second of a round with these lengths."""
        tokens = sum(
            (1 - rate ** (length + 1)) / (1 - rate) for rate, length in zip(rates, lengths, strict=True)
        )
        seconds = self.verify(sum(lengths) + len(lengths) + other_rows)
        drafted = [length for length, no_step in zip(lengths, free, strict=True) if not no_step]
        for depth in range(1, max(drafted, default=0) + 1):
            seconds += self.step(sum(length >= depth for length in drafted))
        return tokens / seconds
