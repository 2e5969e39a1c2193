"""Sampling parameters that decide how tokens become text."""

from __future__ import annotations

from laps_sd.v1.inference_pb2 import SamplingParams

__all__ = ["skips_special_tokens", "text_parameters"]


def skips_special_tokens(sampling: SamplingParams) -> bool:
    """Return whether special tokens have no text: by default they have none."""
    return sampling.skip_special_tokens or not sampling.HasField("skip_special_tokens")


def text_parameters(sampling: SamplingParams) -> SamplingParams:
    """Return those of the parameters that decide how tokens become text, besides `stop`."""
    return SamplingParams(
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=skips_special_tokens(sampling),
    )
