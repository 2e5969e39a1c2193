"""How many draft tokens are accepted, and how much speculation gained, as vLLM counts it."""

from __future__ import annotations

from collections.abc import Sequence


def mean_acceptance_length(accepted: int, drafts: int) -> float:
    """Return the tokens that a round with a draft brought on average: the accepted draft tokens, and the one
    that the target adds itself.

    `drafts` counts the rounds that had draft tokens, `accepted` their accepted draft tokens. Without drafts
    the result is 1: the target's token alone.
    """
    return 1.0 + accepted / drafts if drafts else 1.0


def accepted_of(draft_tokens: Sequence[int], chosen: Sequence[int]) -> int:
    """Return the number of leading draft tokens that the target chose too.

    It is less than the number of choices, of which the one after the accepted tokens becomes output too.
    """
    limit = min(len(draft_tokens), len(chosen) - 1)
    accepted = 0
    while accepted < limit and draft_tokens[accepted] == chosen[accepted]:
        accepted += 1
    return accepted


def tested_of(accepted: int, drafted: int) -> int:
    """Return how many of `drafted` draft tokens were compared: those up to the first that is not accepted."""
    return min(accepted + 1, drafted)
