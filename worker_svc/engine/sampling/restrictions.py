"""Tokens that a request may not get at a position: before `min_tokens` those that end it, the last token of a
bad word, and all but the allowed ones. A function of its output alone. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from worker_svc.engine.interface import Specification
from worker_svc.engine.sampling.stopping import ends_of

__all__ = ["Restrictions", "restrictions_of"]


@dataclass(frozen=True, slots=True)
class Restrictions:
    """The restrictions of one request. Each holds only where it leaves a token to choose."""

    # The only tokens that may be chosen; empty: all.
    allowed: tuple[int, ...]
    # Tokens that end the output, which must not come at a position before `min_tokens`.
    ends: tuple[int, ...]
    min_tokens: int
    # Bad words of one token, and longer ones.
    single: tuple[int, ...]
    longer: tuple[tuple[int, ...], ...]

    @property
    def reach(self) -> int:
        """Number of output tokens before a position that matter there."""
        return max(map(len, self.longer), default=1) - 1

    def applies(self, position: int) -> bool:
        """Return whether any token may be excluded at this position of the output, or after it."""
        return bool(self.allowed or self.single or self.longer) or position < self.min_tokens

    def early_ends(self, position: int) -> tuple[int, ...]:
        """Return the tokens that would end the output too early at this position."""
        return self.ends if position < self.min_tokens else ()

    def completing(self, tail: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that would complete a bad word after the output tokens `tail`, `reach` of them or
        as many as there are."""
        if not self.longer:
            return self.single
        return self.single + tuple(
            word[-1]
            for word in self.longer
            if len(word) - 1 <= len(tail) and tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]
        )

    def allows(self, token: int, position: int, tail: Sequence[int]) -> bool:
        """Return whether no restriction excludes a token."""
        return (
            (not self.allowed or token in self.allowed)
            and token not in self.early_ends(position)
            and token not in self.completing(tail)
        )


def restrictions_of(spec: Specification, eos_ids: Collection[int]) -> Restrictions | None:
    """Return the restrictions of a request; None: it has none."""
    sampling = spec.sampling
    ends = tuple(sorted(ends_of(spec, eos_ids))) if sampling.min_tokens else ()
    if not (ends or sampling.bad_words_ids or sampling.allowed_token_ids):
        return None
    words = sampling.bad_words_ids
    return Restrictions(
        allowed=sampling.allowed_token_ids,
        ends=ends,
        min_tokens=sampling.min_tokens,
        single=tuple(word[0] for word in words if len(word) == 1),
        longer=tuple(word for word in words if len(word) > 1),
    )
