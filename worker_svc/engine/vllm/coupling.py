"""Same seed, same text, on vLLM's first model runner: the choice of `worker_svc.engine.sampling` in its place.

That runner takes no logits processors together with speculation, so methods of objects that vLLM made are replaced:
the runner's `_sample`, the target's `compute_logits` (to keep hidden states for the probe of output lengths), and
`_greedy_sample` of the drafter (with `propose`, to count its steps). The target's choice at every row is made
here, with bias and penalties; a draft token is accepted if it is that choice. The drafter proposes by the
same rule with the same noise.

vLLM has applied the output format to the logits before, so log probabilities are those of allowed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import SamplerOutput

from laps_sd.contract.acceptance import accepted_of
from worker_svc.engine.interface import Sampling, TokenLogprobs
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sampling.restricted import restricted
from worker_svc.engine.sampling.sampling import choose_tokens, rows_for
from worker_svc.engine.sampling.tally import Tally
from worker_svc.engine.vllm.known import Known

__all__ = ["couple"]

_REFUSED = -1
"""vLLM's mark for a place of the result that holds no token."""


class _Rows(NamedTuple):
    """The rows of one request in a step: one for each draft token, and one more."""

    known: Known
    first: int
    draft: list[int]

    @property
    def rows(self) -> int:
        return len(self.draft) + 1


class _Coupling:
    """The replacement of a runner's sampler."""

    def __init__(self, runner: Any) -> None:
        self.known: Mapping[str, Known] = {}
        self._runner = runner
        self._vocab: int = runner.model_config.get_vocab_size()
        self._noise = Noise(self._vocab, runner.device)
        self._vllm_sample = runner._sample
        self._vllm_logits = runner.model.compute_logits
        self._hidden: torch.Tensor | None = None
        # (settings, next position) of each request of the step, for the drafter; and its steps so far.
        self._next: list[tuple[Sampling, int]] = []
        self._steps = 0

    def compute_logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the logits of these rows of the target, and keep their hidden states for `sample`."""
        self._hidden = hidden
        return self._vllm_logits(hidden, *args, **kwargs)

    def sample(self, logits: torch.Tensor, metadata: Any) -> SamplerOutput:
        """Return the accepted draft tokens and one more of each request: int32 [requests, longest draft + 1]."""
        names = list(self._runner.input_batch.req_ids)
        if any(name not in self.known for name in names):
            return self._vllm_sample(logits, metadata)  # vLLM's warm-up
        logits = logits[:, : self._vocab]
        parts = self._parts(names, metadata)
        self._look_at(parts)
        adjusted = self._adjusted(logits, parts)
        finite = adjusted.amax(-1).isfinite().tolist()
        rows = [
            (part.known.spec.sampling, len(part.known.output) + n) for part in parts for n in range(part.rows)
        ]
        chosen = self._choose(adjusted, rows).tolist()
        result = torch.full((len(parts), max(part.rows for part in parts)), _REFUSED, dtype=torch.int32)
        self._next = []
        for at, (known, first, draft) in enumerate(parts):
            accepted = accepted_of(draft, chosen[first : first + len(draft) + 1])
            block = chosen[first : first + accepted + 1]
            result[at, : len(block)] = torch.tensor(block, dtype=torch.int32)
            self._next.append((known.spec.sampling, len(known.output) + len(block)))
            known.problem = (
                ""
                if all(finite[first : first + len(block)])
                else "the target's logits are not finite, or its format allows no token"
            )
            known.logprobs = _logprobs(logits[first : first + len(block)], block, known.spec.logprobs)
        return SamplerOutput(sampled_token_ids=result.to(logits.device), logprobs_tensors=None)

    def propose(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next draft token of each request: int64 [requests]."""
        logits = self._runner.drafter.model.compute_logits(hidden)
        if len(self._next) != logits.shape[0]:
            greedy: torch.Tensor = logits.argmax(-1)  # vLLM's warm-up
            return greedy
        rows = [(sampling, position + self._steps) for sampling, position in self._next]
        self._steps += 1
        return self._choose(logits[:, : self._vocab], rows)

    def begin_proposing(self) -> None:
        """Start to count the drafter's steps."""
        self._steps = 0

    def _look_at(self, parts: Sequence[_Rows]) -> None:
        """Give the requests that are due for a look the hidden state of their last token before the step."""
        hidden, self._hidden = self._hidden, None
        for known, first, _ in parts:
            watched = known.watched
            if watched is not None and hidden is not None and len(known.output) >= watched.due:
                known.hidden = hidden[first].float().cpu().numpy().copy()

    def _parts(self, names: Sequence[str], metadata: Any) -> list[_Rows]:
        counts = [0] * len(names) if metadata is None else list(metadata.num_draft_tokens)
        drafts = [] if metadata is None else metadata.draft_token_ids.tolist()
        parts, first, read = [], 0, 0
        for name, count in zip(names, counts, strict=True):
            parts.append(_Rows(self.known[name], first, drafts[read : read + count]))
            first, read = first + count + 1, read + count
        return parts

    def _choose(self, logits: torch.Tensor, rows: Sequence[tuple[Sampling, int]]) -> torch.Tensor:
        settings = [sampling for sampling, _ in rows]
        noise = None
        if any(sampling.temperature > 0 for sampling in settings):
            keys = [counter.row_key(sampling.seed, position) for sampling, position in rows]
            noise = self._noise.gumbel(keys)[:, : logits.shape[-1]]
        return choose_tokens(logits, rows_for(settings, self._vocab, logits.device), noise)

    def _adjusted(self, logits: torch.Tensor, parts: Sequence[_Rows]) -> torch.Tensor:
        """Return the logits with bias and penalties; the argument is not changed."""
        wanted = [
            part
            for part in parts
            if part.known.spec.sampling.penalises
            or part.known.spec.sampling.logit_bias
            or (
                part.known.restrictions is not None
                and part.known.restrictions.applies(len(part.known.output))
            )
        ]
        if not wanted:
            return logits
        adjusted = logits.float() if logits.dtype != torch.float32 else logits.clone()
        for known, first, draft in wanted:
            sampling = known.spec.sampling
            rows = adjusted[first : first + len(draft) + 1]
            if known.restrictions is not None:
                _restrict(rows, known, draft)
            if sampling.logit_bias:
                bias = dict(sampling.logit_bias)
                rows[:, torch.tensor(list(bias), device=rows.device)] += torch.tensor(
                    list(bias.values()), dtype=torch.float32, device=rows.device
                )
            if sampling.penalises:
                tally = self._tally(known)
                counts = tally.output.clone()
                for at, row in enumerate(rows):
                    if at and 0 <= draft[at - 1] < self._vocab:
                        counts[draft[at - 1]] += 1
                    row.copy_(tally.penalised(row, counts, sampling))
        return adjusted

    def _tally(self, known: Known) -> Tally:
        if known.tally is None:
            known.tally = Tally(known.spec.prompt_ids, self._vocab, self._runner.device)
        known.tally.follow([*known.spec.prompt_ids, *known.output], len(known.spec.prompt_ids))
        return known.tally


def _restrict(rows: torch.Tensor, known: Known, draft: Sequence[int]) -> None:
    """Exclude what the restrictions of a request exclude in its rows [draft tokens + 1, vocab], in place."""
    restrictions = known.restrictions
    assert restrictions is not None
    reach = restrictions.reach
    before = [*known.output[max(0, len(known.output) - reach) :], *draft]
    known_before = len(before) - len(draft)
    for at, row in enumerate(rows):
        tail = before[max(0, known_before + at - reach) : known_before + at]
        row.copy_(restricted(row, restrictions, len(known.output) + at, tail))


def _logprobs(logits: torch.Tensor, block: Sequence[int], top: int | None) -> list[TokenLogprobs]:
    """Return the log probabilities of the tokens of `block`, one for each row of `logits`."""
    if top is None:
        return []
    every = logits.float().log_softmax(-1)
    best = every.topk(top, dim=-1)
    return [
        TokenLogprobs(
            float(row[token]),
            tuple(
                (token_id, value)
                for token_id, value in zip(ids, values, strict=True)
                if value > float("-inf")
            ),
        )
        for row, token, ids, values in zip(
            every, block, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]


def couple(runner: Any, known: Mapping[str, Known]) -> None:
    """Let the coupling choose the tokens of these requests in vLLM's first model runner."""
    coupling = getattr(runner, "_laps_sd_coupling", None)
    if coupling is None:
        coupling = runner._laps_sd_coupling = _Coupling(runner)
        runner._sample = coupling.sample
        runner.model.compute_logits = coupling.compute_logits
        drafter: Any = getattr(runner, "drafter", None)
        if hasattr(drafter, "_greedy_sample"):
            propose = drafter.propose

            def counted(*args: Any, **kwargs: Any) -> Any:
                coupling.begin_proposing()
                return propose(*args, **kwargs)

            drafter.propose = counted
            drafter._greedy_sample = coupling.propose
    coupling.known = known
