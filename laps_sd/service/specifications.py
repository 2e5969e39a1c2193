"""The sampling parameters in a specification, which two releases write in two forms."""

from __future__ import annotations

from laps_sd.v1.gateway_link_pb2 import Specification
from laps_sd.v1.inference_pb2 import SamplingParams

__all__ = ["sampling_of", "set_sampling", "skips_special_tokens", "text_parameters"]

FLAT = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
"""The parameters that `Specification` also has as fields of its own. It gets no new ones."""
FILLED_IN = ("max_tokens", "temperature", "top_p", "seed")
"""Those that gateways always set. Of the others 0 is off there, as it is to leave them out."""


def set_sampling(specification: Specification, sampling: SamplingParams) -> None:
    """Set the sampling parameters of a specification.

    They are written in both forms, since the release before this one reads the fields of the specification.
    Once the release before reads the message, `FLAT` goes, here and in `sampling_of`.
    """
    specification.sampling.CopyFrom(sampling)
    for name in FLAT:
        specification.ClearField(name)  # type: ignore[arg-type]
    specification.MergeFrom(Specification(**{name: getattr(sampling, name) for name in FLAT}))


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


def sampling_of(specification: Specification) -> SamplingParams:
    """Return the sampling parameters of a specification: its message; without one its own fields, which the
    release before this one writes."""
    if specification.HasField("sampling"):
        return specification.sampling
    flat = {name: getattr(specification, name) for name in FLAT}
    return SamplingParams(**{name: value for name, value in flat.items() if value or name in FILLED_IN})
