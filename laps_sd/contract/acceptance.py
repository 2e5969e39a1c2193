"""How much speculation gained, as vLLM counts it."""

from __future__ import annotations


def mean_acceptance_length(accepted: int, drafts: int) -> float:
    """Return the tokens that a round with a draft brought on average: the accepted draft tokens, and the one
    that the target adds itself.

    `drafts` counts the rounds that had draft tokens, `accepted` their accepted draft tokens. Without drafts
    the result is 1: the target's token alone.
    """
    return 1.0 + accepted / drafts if drafts else 1.0
