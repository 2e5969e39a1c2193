"""The sampling parameters of a request as the engine applies them, each with its default and its bounds.

A field here has the name of its field in the message `SamplingParams` of the public API. Everything else is
derived from the two: the translation between message and engine, the checks of gateway and engine, and the
fields of HTTP bodies. A new parameter is a field here, a field of the message, and the code that applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, get_args, get_type_hints

from laps_sd.contract.limits import (
    MAX_MIN_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
)

__all__ = ["BOUNDS", "LEAST_TEMPERATURE", "Bounds", "Sampling"]

LEAST_TEMPERATURE = 1e-5
"""Least temperature that is not 0, as in vLLM. Logits divided by less overflow float32, and long before that
every choice is the greedy one."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Annotates a number with its bounds."""

    least: float
    most: float
    above: bool = False
    """True if `least` itself is out of bounds."""

    def __contains__(self, value: float) -> bool:
        """Return whether the value is in bounds. NaN is not."""
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        """Return the rule, as it follows the name of the field: "must be from 0 to 1"."""
        if self.above:
            return f"must be above {_text(self.least)} and at most {_text(self.most)}"
        return f"must be from {_text(self.least)} to {_text(self.most)}"


def _text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the target's choice of a token.

    They apply in this order: tokens that the output format excludes are removed, then those that
    allowed_token_ids, min_tokens and bad_words_ids exclude, each of these only where tokens remain; logit_bias
    is added; repetition, frequency and presence penalty; temperature; top_k; of the rest the tokens that both
    top_p and min_p keep; argmax(log p + noise).
    """

    # 0 = greedy: the largest, lowest id on a tie; top_k, top_p, min_p and seed are then without effect.
    temperature: Annotated[float, Bounds(0, MAX_TEMPERATURE)] = 0.0
    # Keep the smallest set of most probable tokens that reaches this probability; 1.0 = off.
    top_p: Annotated[float, Bounds(0, 1, above=True)] = 1.0
    # Keep the k most probable tokens; 0 = off.
    top_k: Annotated[int, Bounds(0, MAX_TOP_K)] = 0
    # Unsigned, 64 bits.
    seed: Annotated[int, Bounds(0, MAX_SEED)] = 0
    # Keep tokens at least this probable in relation to the most probable one; 0.0 = off.
    min_p: Annotated[float, Bounds(0, 1)] = 0.0
    # Logits of tokens in the prompt or output are divided by it (negative ones multiplied); 1.0 = off.
    repetition_penalty: Annotated[float, Bounds(0, MAX_REPETITION_PENALTY, above=True)] = 1.0
    # Subtracted from the logits of tokens in the output; 0.0 = off.
    presence_penalty: Annotated[float, Bounds(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    # Subtracted once for each time that a token is in the output; 0.0 = off.
    frequency_penalty: Annotated[float, Bounds(-MAX_PENALTY, MAX_PENALTY)] = 0.0
    # (token id, what is added to its logit).
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Output tokens before which no token is chosen that would end the output; 0 = off.
    min_tokens: Annotated[int, Bounds(0, MAX_MIN_TOKENS)] = 0
    # Token sequences that the output may not contain. The prompt does not count.
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    # The only tokens that are chosen; () = all.
    allowed_token_ids: tuple[int, ...] = ()

    @property
    def penalises(self) -> bool:
        """True if logits depend on how often a token has occurred."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


BOUNDS: Mapping[str, Bounds] = {
    name: part
    for name, hint in get_type_hints(Sampling, include_extras=True).items()
    for part in get_args(hint)
    if isinstance(part, Bounds)
}
"""The bounds of all numbers in `Sampling`, by the name of the field."""
