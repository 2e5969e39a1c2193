"""Specifications as vLLM's sampling parameters, by who chooses tokens."""

from __future__ import annotations

import enum
from typing import Any

from vllm import SamplingParams

from worker_svc.engine.interface import Specification
from worker_svc.engine.sampling.stopping import ends_of
from worker_svc.engine.vllm.grammars import structured_outputs

__all__ = ["Rules", "TokenChooser"]

_MOST_WORDS = 128
_MOST_WORD_TOKENS = 1024


class TokenChooser(enum.Enum):
    """The part that chooses the tokens of requests."""

    # `coupling` in place of the sampler of vLLM's first model runner: on a CPU.
    REPLACED = "replaced"
    # vLLM's second model runner takes the largest score, and `coupled_noise` adds the noise.
    PROCESSOR = "processor"
    # vLLM's own sampler.
    VLLM = "vllm"


class Rules:
    """Checks of specifications, and their form as vLLM's parameters."""

    def __init__(
        self,
        chooser: TokenChooser,
        *,
        second_runner: bool,
        speculates: bool,
        on_cpu: bool,
        version: str,
        eos_ids: list[int],
    ) -> None:
        self.chooser = chooser
        self.second_runner = second_runner
        """vLLM's second model runner takes committed tokens as output; to the first they are prompt."""
        self.speculates = speculates
        self._on_cpu = on_cpu
        self._wrong_with_drafts = on_cpu and speculates and version.startswith("0.32.")
        self.eos_ids = eos_ids

    def check(self, spec: Specification) -> None:
        """Raise ValueError for what vLLM's own sampler would do wrong."""
        sampling = spec.sampling
        words = sampling.bad_words_ids
        if self.second_runner and (len(words) > _MOST_WORDS or sum(map(len, words)) > _MOST_WORD_TOKENS):
            raise ValueError(
                f"sampling.bad_words_ids must be at most {_MOST_WORDS} lists of {_MOST_WORD_TOKENS} token ids"
                " in all on this worker: vLLM's second model runner takes no more"
            )
        if self.chooser is not TokenChooser.VLLM:
            return
        advice = "set LAPS_SD_VLLM_SAMPLING=coupled on the worker"
        if self._wrong_with_drafts and sampling.temperature > 0:
            raise ValueError(
                "sampling.temperature must be 0 on this worker: vLLM 0.32 on a CPU samples wrong tokens with"
                f" speculation; {advice}"
            )
        if self.second_runner:
            return
        if self.speculates and (sampling.min_p or sampling.logit_bias):
            raise ValueError(
                "sampling.min_p and sampling.logit_bias cannot be used on this worker: vLLM's first model runner"
                f" ignores them with speculation; {advice}"
            )
        if spec.committed_ids and any(len(word) > 1 for word in sampling.bad_words_ids):
            raise ValueError(
                "sampling.bad_words_ids of several tokens cannot continue on this worker: vLLM's first model runner does"
                f" not compare output tokens of another worker; {advice}"
            )
        if spec.committed_ids and (sampling.presence_penalty or sampling.frequency_penalty):
            raise ValueError(
                "sampling.presence_penalty and sampling.frequency_penalty cannot continue on this worker: vLLM's"
                f" first model runner does not count output tokens of another worker; {advice}"
            )

    def parameters(self, spec: Specification) -> SamplingParams:
        """Return vLLM's parameters of a request."""
        sampling = spec.sampling
        committed = 0 if self.second_runner else len(spec.committed_ids)
        common: dict[str, Any] = {
            "max_tokens": spec.max_tokens - committed,
            "stop_token_ids": sorted(ends_of(spec, self.eos_ids)) or None,
            "ignore_eos": spec.ignore_eos,
            "detokenize": False,
            "structured_outputs": structured_outputs(spec.format),
            "prompt_logprobs": None if spec.committed_ids else spec.prompt_logprobs,
        }
        if self.chooser is TokenChooser.REPLACED:
            return SamplingParams(temperature=0.0, **common)
        common |= {
            "logprobs": spec.logprobs,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "logit_bias": dict(sampling.logit_bias) or None,
            "min_tokens": max(0, sampling.min_tokens - committed),
            "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        }
        if self.chooser is TokenChooser.PROCESSOR:
            ours = [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed]
            return _with_bad_words(
                spec,
                SamplingParams(
                    temperature=0.0, extra_args={"laps_sd": [*ours, len(spec.prompt_ids)]}, **common
                ),
            )
        chosen_by_vllm = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            # On a CPU vLLM cannot set a seeded generator back, which a prompt of several steps needs.
            seed=None if self._on_cpu else (sampling.seed + 2**63) % 2**64 - 2**63,
            **common,
        )
        return _with_bad_words(spec, chosen_by_vllm)


def _with_bad_words(spec: Specification, parameters: SamplingParams) -> SamplingParams:
    """Return the parameters with the bad words. vLLM makes token ids of texts before its engine core, and has no
    other way to give them."""
    words = spec.sampling.bad_words_ids
    if words:
        parameters._bad_words_token_ids = [list(word) for word in words]
    return parameters
