"""Same seed, same text, on vLLM's second model runner: a logits processor that its own interface takes.

vLLM has temperature 0: it takes the argmax of a row, and accepts a draft token exactly if it is that argmax.
The rows are our scores with our noise (`coupled_scores`), after vLLM's bias, penalties and grammar. There is
one row for each draft token, so that this holds with speculation. The drafter proposes its own argmax.

A request carries `SamplingParams.extra_args["laps_sd"]`: temperature, top_p, top_k, min_p, seed, prompt tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from worker_svc.engine.sampling.noise import weyl_of
from worker_svc.engine.vllm.coupled_scores import coupled_scores, signed64

__all__ = ["PATH", "CoupledNoise"]

PATH = f"{__name__}:CoupledNoise"
"""Name of the processor for vLLM's configuration: each rank imports it."""
_OFF = (0.0, 1.0, 0, 0.0, 0, 0)


class CoupledNoise(LogitsProcessor):
    """Adds the noise of requests that have a temperature; others stay as they are."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        places, device = req_states.max_num_reqs, req_states.device
        self._vocab: int = req_states.vocab_size
        # By place of a request: temperature, top_p, min_p; and top_k, seed, prompt tokens.
        self._floats = torch.zeros(places, 3)
        self._ints = torch.zeros(places, 3, dtype=torch.int64)
        self._device_floats = self._floats.to(device)
        self._device_ints = self._ints.to(device)
        self._weyl = weyl_of(self._vocab, device)
        self._changed = True
        self._truncate: set[int] = set()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for settings that this processor does not understand."""
        ours = (sampling_params.extra_args or {}).get("laps_sd")
        if ours is not None and (len(ours) != len(_OFF) or sampling_params.temperature != 0):
            raise ValueError("laps_sd must be six numbers, with temperature 0 for vLLM")

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take the settings of the request at a place, and return whether it has any."""
        ours = (sampling_params.extra_args or {}).get("laps_sd") or _OFF
        temperature, top_p, top_k, min_p, seed, prompt_tokens = ours
        self._floats[req_idx] = torch.tensor([temperature, top_p, min_p])
        self._ints[req_idx] = torch.tensor([top_k or self._vocab, signed64(seed), prompt_tokens])
        truncates = temperature > 0 and (top_k or top_p < 1 or min_p)
        (self._truncate.add if truncates else self._truncate.discard)(req_idx)
        self._changed = True
        return bool(temperature > 0)

    def apply_staged_writes(self) -> None:
        """Copy changed settings to the device."""
        if self._changed:
            self._device_floats.copy_(self._floats)
            self._device_ints.copy_(self._ints)
            self._changed = False

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Return logits [rows, vocabulary] with noise; see the top of this file."""
        place = ctx.expanded_idx_mapping.long()
        ints = self._device_ints[place]
        logits[:, : self._vocab] = coupled_scores(
            logits[:, : self._vocab],
            self._device_floats[place],
            ints[:, :2],
            # A row at position p of the sequence chooses the token after it.
            ctx.pos.long() + 1 - ints[:, 2],
            self._weyl,
            truncates=not self._truncate.isdisjoint(ctx.idx_mapping_np.tolist()),
        )
        return logits
