"""Evidence about the acceptance of draft tokens, of one request and of all together; old evidence fades."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_STRENGTH = 8.0
"""Weight of the shared prior in the estimate of a request, in draft tokens. Tried 4 to 16."""
KEPT = 0.98
"""Share of the evidence that is left after another draft token of a request, and of the prior after another
round of a request. Tried 0.95 to 0.99."""
MOST_CERTAIN = 0.99
"""Largest acceptance rate that is believed."""


@dataclass(slots=True)
class Prior:
    """Acceptance of all requests together of draft tokens of one kind."""

    accepted: float = 6.0
    tested: float = 10.0

    @property
    def rate(self) -> float:
        """Fraction of the tested draft tokens that were accepted."""
        return self.accepted / self.tested

    def observe(self, accepted: int, tested: int) -> None:
        """Take in one round of one request."""
        self.accepted = self.accepted * KEPT + accepted
        self.tested = self.tested * KEPT + tested

    def fade(self) -> None:
        """Let a round without draft tokens pass: the evidence becomes old, but weighs `PRIOR_STRENGTH` at
        least."""
        keep = max(KEPT, min(1.0, PRIOR_STRENGTH / self.tested))
        self.accepted, self.tested = self.accepted * keep, self.tested * keep


@dataclass(slots=True)
class Acceptance:
    """Acceptance evidence of one request."""

    accepted: float = 0.0
    tested: float = 0.0
    silent_rounds: int = 0
    """Rounds since a draft token was last tested."""
    probes_left: int = 0
    """Draft tokens that it drafts whatever they are worth, one each round, until one is rejected."""
    met: bool = False
    """True if lengths were chosen for it before."""

    def observe(self, accepted: int, tested: int) -> None:
        """Take in one round: `tested` draft tokens were compared, the first `accepted` kept."""
        if tested == 0:
            self.silent_rounds += 1
            return
        keep = KEPT**tested
        self.accepted = self.accepted * keep + accepted
        self.tested = self.tested * keep + tested
        self.silent_rounds = 0
        self.probes_left = max(0, self.probes_left - 1) if accepted else 0

    @property
    def probed(self) -> bool:
        """True while the request drafts a token whatever that is worth."""
        return self.probes_left > 0

    @property
    def untested(self) -> bool:
        """True if there is no evidence about draft tokens for this request."""
        return not self.tested

    def probe(self) -> None:
        """Begin to draft, until a token is rejected or the evidence weighs as much as the prior."""
        self.probes_left = round(PRIOR_STRENGTH)

    def rate(self, prior: Prior) -> float:
        """Return the estimated acceptance rate: the evidence, shrunk towards the prior."""
        expected = PRIOR_STRENGTH * prior.rate
        return min(max((expected + self.accepted) / (PRIOR_STRENGTH + self.tested), 0.01), MOST_CERTAIN)
