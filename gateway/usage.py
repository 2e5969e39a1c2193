"""The usage of a call with several outputs."""

from __future__ import annotations

from collections.abc import Sequence

from laps_sd.v1 import inference_pb2

__all__ = ["cached_tokens"]


def cached_tokens(ends: Sequence[inference_pb2.Ended | None], outputs_per_prompt: int) -> int:
    """Return the prompt tokens of a call that were found in a cache: a part of its prompt tokens, in which
    each prompt counts once. `ends`: of each output; None if it has not ended.

    Of the outputs of one prompt the one with the fewest counts (our choice): it found what was cached before
    the call, and others find what that one computed. vLLM takes one of them, as it comes.
    """
    return sum(
        min(
            (end.usage.cached_prompt_tokens for end in ends[first : first + outputs_per_prompt] if end),
            default=0,
        )
        for first in range(0, len(ends), outputs_per_prompt)
    )
