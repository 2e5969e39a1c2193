"""Plain decoding by transformers, one token at a time, and the sampling rule written a second time, for
comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.worker.margins import margin
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise

Allowed = Callable[[list[int]], AbstractSet[int]]
MARGIN = 1e-4  # below this, two arithmetics may disagree about which token is best


def adjusted(
    logits: torch.Tensor,
    spec: Specification,
    output: list[int],
    allowed: Allowed | None,
    eos_ids: AbstractSet[int] = frozenset(),
) -> torch.Tensor:
    """Apply output format, restrictions, bias and penalties in double precision, token by token. `logits` [vocab]."""
    sampling, values = spec.sampling, logits.double().cpu().tolist()
    if allowed is not None:
        may = allowed(output)
        values = [value if token in may else -math.inf for token, value in enumerate(values)]
    ends = {*spec.stop_token_ids, *(() if spec.ignore_eos else eos_ids)}
    for forbidden in (
        lambda token: sampling.allowed_token_ids and token not in sampling.allowed_token_ids,
        lambda token: len(output) < sampling.min_tokens and token in ends,
        lambda token: any([*output, token][-len(word) :] == list(word) for word in sampling.bad_words_ids),
    ):
        left = [-math.inf if forbidden(token) else value for token, value in enumerate(values)]
        if max(left) > -math.inf:
            values = left
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in {*spec.prompt_ids, *output}:
        values[token] *= sampling.repetition_penalty if values[token] < 0 else 1 / sampling.repetition_penalty
        times = output.count(token)
        values[token] -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
    return torch.tensor(values, dtype=torch.float64)


def choose(logits: torch.Tensor, sampling: Sampling, position: int, noise: Noise) -> int:
    """Apply the sampling rule in double precision, straight from its definition. `logits` [vocab]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    gumbel = noise.gumbel([counter.row_key(sampling.seed, position)])[0].double().tolist()
    scores = [logit / sampling.temperature for logit in logits.double().tolist()]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        weights = [math.exp(scores[i] - scores[order[0]]) for i in order]
        enough = sampling.top_p * sum(weights)
        reached, kept = 0.0, 0
        while reached < enough and kept < len(order):
            reached += weights[kept]
            kept += 1
        order = order[:kept]
    if sampling.min_p > 0:
        best = max(scores)
        order = [i for i in order if math.exp(scores[i] - best) >= sampling.min_p]
    return max(order, key=lambda i: scores[i] + gumbel[i])


@dataclass
class PlainText:
    """The output of plain decoding and how close each choice was."""

    tokens: list[int]
    margins: list[float]  # smaller of gap and boundary, per token
    logprobs: list[float] = field(default_factory=list)  # of each token, by the model alone


class PlainDecoder:
    """An ordinary forward with an ordinary cache: float32, batch 1, one token per forward."""

    def __init__(self, directory: str, device: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().to(device)
        self.noise = Noise(self.model.config.vocab_size, device)
        self.device = device

    @torch.inference_mode()
    def decode(
        self, spec: Specification, eos_ids: frozenset[int] = frozenset(), allowed: Allowed | None = None
    ) -> PlainText:
        """Decode plainly. `allowed` returns the token ids that may follow an output."""
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([[*spec.prompt_ids, *spec.committed_ids]], device=self.device)
        text = PlainText(list(spec.committed_ids), [])
        while len(text.tokens) < spec.max_tokens:
            logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1].float()
            logprobs = logits.double().log_softmax(-1)
            logits = adjusted(logits, spec, text.tokens, allowed, eos_ids).float()
            position = len(text.tokens)
            row = None
            if spec.sampling.temperature > 0:
                row = self.noise.gumbel([counter.row_key(spec.sampling.seed, position)])[0].to(logits.device)
            near = margin(logits, spec.sampling, row)
            token = choose(logits, spec.sampling, position, self.noise)
            text.tokens.append(token)
            text.logprobs.append(float(logprobs[token]))
            text.margins.append(min(near.gap, near.boundary))
            if token in spec.stop_token_ids or (token in eos_ids and not spec.ignore_eos):
                break
            ids = torch.tensor([[token]], device=self.device)
        return text
