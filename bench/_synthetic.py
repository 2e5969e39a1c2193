"""Synthetic acceptance: draft tokens are kept with a given chance, whatever the target chooses.

It lets random weights be timed as if their draft model were good. The text means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.round.choices import Choices
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.round.verify import OnDevice, Verification
from worker_svc.engine.sampling import counter
from worker_svc.engine.sequence import Sequence


def synthetic(engine: SpeculativeEngine, acceptance: float | None) -> SpeculativeEngine:
    """Return `engine`, whose draft tokens are kept with the chance `acceptance`; None: unchanged.

    Raises ValueError unless it is from 0 to 1.
    """
    if acceptance is None:
        return engine
    if not 0 <= acceptance <= 1:
        raise ValueError(f"synthetic acceptance must be from 0 to 1, not {acceptance}")
    engine.rounds.verification = _ByCoin(engine.rounds.verification, acceptance)
    engine.fingerprint = f"{engine.fingerprint}-synthetic-{acceptance}"
    return engine


class _ByCoin(Verification):
    """A verification in which a coin accepts draft tokens, and the target chooses the token after them."""

    def __init__(self, replaced: Verification, acceptance: float) -> None:
        super().__init__(replaced.pair, replaced.hidden_layer)
        self._limit = int(acceptance * 2**64)

    def verify(self, requests: SequenceOf[RoundRequest], choices: Choices, on_device: OnDevice) -> None:
        """Verify, and then replace the choices at the draft tokens."""
        super().verify(requests, choices, on_device)
        for request in requests:
            kept = self._kept(request.sequence, min(len(request.draft_tokens), len(request.chosen)))
            # The context consists of the tokens that were fed, and the target's choice there comes next.
            request.chosen = [*request.draft_tokens[:kept], *request.chosen[kept : kept + 1]]

    def _kept(self, sequence: Sequence, proposed: int) -> int:
        """Return the number of leading draft tokens that are kept if each has the same chance.

        It is a function of (seed, position), like the noise.
        """
        for kept in range(proposed):
            position = sequence.output_length + kept
            if counter.mix64((~sequence.seed_key + position * counter.GOLDEN) & counter.M64) >= self._limit:
                return kept
        return proposed
