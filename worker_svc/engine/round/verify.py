"""Third phase of the round: one forward of the target over all requests, and its choices."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch

from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import TokenLogprobs
from worker_svc.engine.models.hidden import HiddenRows
from worker_svc.engine.models.plan import Piece, Plan
from worker_svc.engine.pair import ModelPair
from worker_svc.engine.round.choices import Choices
from worker_svc.engine.round.prompt_logprobs import add_prompt_logprobs, rows_wanted
from worker_svc.engine.round.request import RoundRequest

NOT_FINITE = "the target's logits are not finite"

# Draft tokens on the device, by draft step: its requests, and their tokens [requests].
OnDevice = SequenceOf[tuple[SequenceOf[RoundRequest], torch.Tensor]]


class Verification:
    """The target's part of a round: prefill chunks and draft tokens of all requests share one forward."""

    def __init__(self, pair: ModelPair, hidden_layer: int) -> None:
        """`hidden_layer`: target's layers before the hidden states of requests that are looked at."""
        self.pair = pair
        self.hidden_layer = hidden_layer

    def verify(self, requests: SequenceOf[RoundRequest], choices: Choices, on_device: OnDevice) -> None:
        """Add the target's choices to the requests, and the draft tokens that are still on the device."""
        if not self._forward(requests, choices, on_device):
            self._verify_one_by_one(requests, choices)

    def _forward(self, requests: SequenceOf[RoundRequest], choices: Choices, on_device: OnDevice) -> bool:
        """Run the target's forward, and take in its choices.

        Returns False if a choice, or the end of a chunk without one, has logits that are not finite: their
        choices mean nothing.
        """
        fed = [request for request in requests if request.fed]
        if not fed:
            return True
        device = self.pair.device
        pieces = [Piece(request.sequence.target, request.start, request.fed) for request in fed]
        plan = self.pair.target.planner.plan(pieces)
        rows = _packed_rows(fed, pieces, plan)
        ids = kernels.int64s(rows.ids).to(device)
        guesses = _fill_in(ids, fed, plan, on_device)
        # [choice rows, watched rows and prompt rows, vocab]
        wanted = kernels.int64s(rows.with_choice + rows.watched + rows.of_prompts).to(device)
        hidden = HiddenRows(self.hidden_layer, rows.hidden) if rows.hidden else None
        logits = self.pair.target.forward(ids, plan, wanted, hidden)
        if rows.scored:
            own = len(logits) - len(rows.of_prompts)
            for request in add_prompt_logprobs(logits[own:], rows.scored):
                request.problem = NOT_FINITE
            logits = logits[:own]
        if guesses is None and kernels.choose_of(logits):
            picked, finite = _choose_by_kernels(logits, rows.choice_rows, choices)
        else:
            count = len(rows.choice_rows)
            sound = logits.sum(-1, dtype=torch.float32).isfinite().long()
            chosen_ids = choices.choose(logits[:count], rows.choice_rows)
            parts = [chosen_ids, sound] if guesses is None else [chosen_ids, sound, guesses]
            picked = torch.cat(parts).tolist()  # the round's only transfer to the host
            finite = all(picked[count : count + len(sound)])
            _take_back(picked[count + len(sound) :], on_device)
        at = 0
        for request in fed:
            after = at + request.choices
            request.chosen = picked[at:after][: request.allowed]
            at = after
        _add_logprobs(logits, picked, fed)
        if hidden is not None:
            for request, state in zip(rows.looked_at, hidden.on_host(), strict=True):
                request.hidden = state
        return finite

    def _verify_one_by_one(self, requests: SequenceOf[RoundRequest], choices: Choices) -> None:
        """Repeat a verification with non-finite logits, and find out which requests fail.

        One request's inf or nan reaches others through the masked part of a slice of the pool (0 * nan). So a
        request fails if its own KV is not finite; then the pools are cleaned, which reads all of them, and each
        other request is run alone: it fails if its logits are still not finite, without draft tokens too.
        """
        target = self.pair.pools[0]
        sound: list[RoundRequest] = []
        for request in requests:
            if request.fed and not target.is_finite(request.sequence.target, request.sequence.target.length):
                request.problem = NOT_FINITE
            elif request.fed:
                sound.append(request)
        self._clean_pools()
        for request in sound:
            # That of its prompt rows, which the KV of another request may have reached.
            if request.problem == NOT_FINITE:
                request.problem = None
            if not self._run_alone(request, choices) and not self._without_draft(request, choices):
                request.problem = NOT_FINITE

    def _run_alone(self, request: RoundRequest, choices: Choices) -> bool:
        """Verify one request, and clean the pools if it wrote what is not finite. Returns as `_forward` does."""
        finite = self._forward([request], choices, ())
        if not self.pair.pools[0].is_finite(request.sequence.target, request.start + request.fed):
            self._clean_pools()
        return finite

    def _without_draft(self, request: RoundRequest, choices: Choices) -> bool:
        """Repeat the verification of a request without draft tokens, after which the logits may have broken: the
        target need not choose them. Returns False if that does not help, as `_forward` does."""
        if not request.draft_tokens:
            return False
        request.draft_tokens, request.draft_len = [], 0
        if request.catch_up and request.sequence.draft is not None:
            request.sequence.draft.length = request.context
        return self._run_alone(request, choices)

    def _clean_pools(self) -> None:
        for pool in self.pair.pools:
            pool.zero_nonfinite()


class _PackedRows(NamedTuple):
    """The packed rows of a forward, by what is wanted at each."""

    ids: list[int]  # tokens of all rows; 0 in padding, and where a draft token is on the device
    with_choice: list[int]
    choice_rows: list[int]  # those of `Choices`, in the order of `with_choice`
    # Rows without a choice. NaN and infinity must be detected there too, before another request reads the KV.
    watched: list[int]
    of_prompts: list[int]  # whose logits become log probabilities of the prompts of `scored`
    scored: list[RoundRequest]
    hidden: list[int]  # the last of its context of each request in `looked_at`
    looked_at: list[RoundRequest]


def _packed_rows(fed: SequenceOf[RoundRequest], pieces: SequenceOf[Piece], plan: Plan) -> _PackedRows:
    """Return the rows of these requests, and set their `prompt_rows`."""
    rows = _PackedRows([0] * plan.total, [], [], [], [], [], [], [])
    for request, (_, start, count), row in zip(fed, pieces, plan.first_row, strict=True):
        known = request.sequence.tokens[start : start + count]
        known += request.draft_tokens  # empty where they are on the device
        rows.ids[row : row + len(known)] = known
        chosen = request.choices
        rows.with_choice.extend(range(row + count - chosen, row + count))
        rows.choice_rows.extend(range(request.first_choice, request.first_choice + chosen))
        if not chosen:
            rows.watched.append(row + count - 1)
        if request.sequence.prompt_logprobs is not None:
            request.prompt_rows = rows_wanted(request.sequence, start, request.chunk)
            if request.prompt_rows:
                rows.scored.append(request)
                rows.of_prompts.extend(row + at - start for at in request.prompt_rows)
        if request.looked_at:
            rows.looked_at.append(request)
            rows.hidden.append(row + request.context - 1 - start)
    return rows


def _choose_by_kernels(
    logits: torch.Tensor, choice_rows: list[int], choices: Choices
) -> tuple[list[int], bool]:
    """Return the choices at `logits` [choice rows and others, vocab], and whether all of them are finite."""
    # The choices of rows that are chosen for apart mean nothing, but whether their logits are finite does.
    others = len(logits) - len(choice_rows)
    picked = kernels.choose(logits, choice_rows + [0] * others, choices.for_kernels)
    finite = min(picked) >= 0
    if choices.apart:
        apart = [at for at, row in enumerate(choice_rows) if row in choices.apart]
        own = choices.choose(logits[apart], [choice_rows[at] for at in apart]).tolist()
        for at, token in zip(apart, own, strict=True):
            picked[at] = token
    return picked, finite


def _fill_in(
    ids: torch.Tensor, fed: SequenceOf[RoundRequest], plan: Plan, on_device: OnDevice
) -> torch.Tensor | None:
    """Put the draft tokens that are on the device into `ids`; return them, one step after the other."""
    if not on_device:
        return None
    guesses = torch.cat([tokens for _, tokens in on_device])
    first_row = dict(zip(fed, plan.first_row, strict=True))
    ids[[first_row[request] + 1 + j for j, (members, _) in enumerate(on_device) for request in members]] = (
        guesses
    )
    return guesses


def _take_back(tokens: SequenceOf[int], on_device: OnDevice) -> None:
    """Add the draft tokens that were on the device, `tokens`, to their requests."""
    at = 0
    for members, _ in on_device:
        for request in members:
            request.draft_tokens.append(tokens[at])
            at += 1


def _add_logprobs(logits: torch.Tensor, chosen: SequenceOf[int], fed: SequenceOf[RoundRequest]) -> None:
    """Add log probabilities to the requests that want them. `logits` [rows, vocab], `chosen` [rows]."""
    if all(request.sequence.spec.logprobs is None for request in fed):
        return
    # (request, its rows, number of alternatives)
    wanted: list[tuple[RoundRequest, range, int]] = []
    at = 0
    for request in fed:
        after = at + request.choices
        alternatives = request.sequence.spec.logprobs
        if alternatives is not None and after > at:
            wanted.append((request, range(at, after), alternatives))
        at = after
    if not wanted:
        return
    rows = [row for _, own, _ in wanted for row in own]
    # -1: not finite.
    ids = torch.tensor([[max(0, chosen[row])] for row in rows], device=logits.device)
    all_logprobs = logits[torch.tensor(rows, device=logits.device)].float().log_softmax(-1)
    of_chosen = all_logprobs.gather(-1, ids)[:, 0].tolist()
    most = min(max(count for _, _, count in wanted), logits.shape[-1])
    best = all_logprobs.topk(most, dim=-1)
    values, tokens = best.values.tolist(), best.indices.tolist()
    at = 0
    for request, own, count in wanted:
        request.logprobs = [
            TokenLogprobs(of_chosen[n], tuple(zip(tokens[n][:count], values[n][:count], strict=True)))
            for n in range(at, at + len(own))
        ]
        at += len(own)
