"""Second phase of the round: the draft model proposes tokens.

The draft token of a request at draft step j is chosen with the noise and the adjustments of its choice row
j, which are also the target's. Draft tokens of prompt lookup are there already: they are found while the
round is planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from worker_svc.engine.cache.kv import BlockTable
from worker_svc.engine.cpu import kernels
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.plan import Piece, Plan
from worker_svc.engine.pair import ModelPair
from worker_svc.engine.round.choices import Choices
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.sampling.stopping import ends_of


@dataclass(slots=True)
class DraftSteps:
    """The draft steps of a round."""

    # By draft step: its requests, and their draft tokens [requests], which are still on the device.
    on_device: list[tuple[list[RoundRequest], torch.Tensor]] = field(default_factory=list)
    # Number of requests of each draft step.
    batches: list[int] = field(default_factory=list)
    # Time of these steps, by `ModelPair.clock`; the work around them does not grow with their number.
    seconds: float = 0.0


class Drafting:
    """The draft model's part of a round."""

    def __init__(self, pair: ModelPair) -> None:
        self._pair = pair
        # True if draft tokens are read as they are made. On an accelerator that takes longer than it saves.
        self.reads_tokens = pair.device.type == "cpu"

    def draft(self, requests: SequenceOf[RoundRequest], choices: Choices) -> DraftSteps:
        """Propose tokens for the requests that the plan feeds to the draft model."""
        steps, adjustments = DraftSteps(), choices.adjustments
        try:
            if adjustments.wanted:
                self._take_in_found(requests, choices)
            fed = [request for request in requests if request.catch_up]
            if fed and self._pair.draft is not None:
                for some in self._apart(self._pair.draft, fed, choices):
                    self._run(self._pair.draft, some, choices, steps)
        finally:
            adjustments.close()
        if adjustments.wanted:
            for request in requests:
                if request.choices:
                    request.allowed = adjustments.usable.get(request.first_choice)
                    request.problem = adjustments.failed.get(request.first_choice)
        return steps

    def _apart(
        self, draft: PackedModel, fed: list[RoundRequest], choices: Choices
    ) -> Iterator[list[RoundRequest]]:
        """Yield the requests in groups that are fed together: those whose tokens the kernels cannot choose
        must not make all others draft step by step."""
        apart = [request for request in fed if request.draft_len and request.first_choice in choices.apart]
        others = [request for request in fed if request not in apart] if apart else fed
        if draft.proposes and apart and any(request.draft_len for request in others):
            yield others
            yield apart
        else:
            yield fed

    def _take_in_found(self, requests: SequenceOf[RoundRequest], choices: Choices) -> None:
        """Let the adjustments follow the draft tokens of prompt lookup, step by step."""
        for j in range(max((len(request.draft_tokens) for request in requests), default=0)):
            members = [request for request in requests if len(request.draft_tokens) > j]
            tokens = torch.tensor([request.draft_tokens[j] for request in members], device=self._pair.device)
            choices.adjustments.proposed([request.first_choice + j for request in members], tokens)

    def _run(
        self, draft: PackedModel, fed: SequenceOf[RoundRequest], choices: Choices, steps: DraftSteps
    ) -> None:
        """Feed the draft model what it lacks, and run its steps."""
        pieces = [_feed(request) for request in fed]
        plan = draft.planner.plan(pieces)
        host_ids: list[int] = []
        for at in plan.order:
            _, start, count = pieces[at]
            host_ids.extend(fed[at].sequence.tokens[start : start + count])
        ids = self._draft_ids(kernels.int64s(host_ids).to(self._pair.device))
        proposing = [at for at in plan.order if fed[at].draft_len]
        at_once = draft.proposes and not any(fed[at].first_choice in choices.apart for at in proposing)
        if proposing and at_once:
            self._propose_at_once(draft, fed, ids, plan, choices, steps)
            return
        last = [plan.first_row[at] + pieces[at].tokens - 1 for at in proposing]
        self._propose_by_steps(draft, [fed[at] for at in proposing], ids, plan, last, choices, steps)

    def _propose_at_once(
        self,
        draft: PackedModel,
        fed: SequenceOf[RoundRequest],
        ids: torch.Tensor,
        plan: Plan,
        choices: Choices,
        steps: DraftSteps,
    ) -> None:
        """Run all draft steps in one call: at a few rows, calling takes as long as computing."""
        pair = self._pair
        proposing = [(at, request) for at, request in enumerate(fed) if request.draft_len]
        drafts = [
            kernels.Draft(at, request.first_choice, request.draft_len, not request.sequence.spec.ignore_eos)
            for at, request in proposing
        ]
        began = pair.clock()
        proposed = draft.propose(ids, plan, drafts, choices.for_kernels, pair.draft_vocab, list(pair.eos_ids))
        steps.seconds += pair.clock() - began
        for (_, request), tokens in zip(proposing, proposed, strict=True):
            request.draft_tokens = tokens
            request.draft_len = len(tokens)
            _draft_table(request).length += len(tokens) - 1
        depth = max(map(len, proposed))
        steps.batches += [sum([len(tokens) > j for tokens in proposed]) for j in range(depth)]

    def _propose_by_steps(
        self,
        draft: PackedModel,
        members: list[RoundRequest],
        ids: torch.Tensor,
        plan: Plan,
        last: SequenceOf[int],
        choices: Choices,
        steps: DraftSteps,
    ) -> None:
        """Run the draft steps one by one.

        `members`: the requests that propose, in packed order; `last`: the last row of each.
        """
        pair = self._pair
        began = pair.clock()
        logits = draft.forward(ids, plan, torch.tensor(last, dtype=torch.int64, device=pair.device))
        depth = max((request.draft_len for request in members), default=0)
        tokens = self._choose(logits, members, 0, choices, steps) if members else ids[:0]
        step_plan: Plan | None = None
        for j in range(1, depth):
            going = [at for at, request in enumerate(members) if request.draft_len > j]
            if not going:
                break
            if len(going) < len(members):
                members, tokens = [members[at] for at in going], tokens[going]
                step_plan = None
            if step_plan is None or not draft.planner.advance(step_plan):
                pieces = [
                    Piece(table, table.length, 1) for table in (_draft_table(request) for request in members)
                ]
                step_plan = draft.planner.plan(pieces, reserve=depth - j - 1)
                if step_plan.order != list(range(len(members))):
                    members, tokens = [members[at] for at in step_plan.order], tokens[step_plan.order]
            for request in members:
                _draft_table(request).length += 1
            logits = draft.forward(self._draft_ids(tokens), step_plan, None)[: len(members)]
            tokens = self._choose(logits, members, j, choices, steps)
        pair.synchronize()
        steps.seconds += pair.clock() - began

    def _choose(
        self,
        logits: torch.Tensor,
        members: list[RoundRequest],
        j: int,
        choices: Choices,
        steps: DraftSteps,
    ) -> torch.Tensor:
        """Return the draft tokens [members] of step `j`.

        They are added to the requests, or to `steps` if they stay on the device.
        """
        choice_rows = [request.first_choice + j for request in members]
        tokens = choices.choose(logits[:, : self._pair.draft_vocab], choice_rows)
        choices.adjustments.proposed(choice_rows, tokens)
        steps.batches.append(len(members))
        if not self.reads_tokens:
            steps.on_device.append((members, tokens))
            return tokens
        for request, token in zip(members, tokens.tolist(), strict=True):
            request.draft_tokens.append(token)
            if token in ends_of(request.sequence.spec, self._pair.eos_ids):
                request.draft_len = j + 1  # draft tokens after an end would be discarded
        return tokens

    def _draft_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Clamp the ids to the draft's rows: padded vocabularies of one tokenizer may differ in size."""
        limit = self._pair.draft_vocab
        return ids if limit == self._pair.vocab_size else ids.clamp(max=limit - 1)


def _feed(request: RoundRequest) -> Piece:
    """Return the tokens that the draft model reads first.

    They end at the last token of the context if it proposes, else at the end of the budget.
    """
    table, feed = _draft_table(request), request.catch_up
    start = request.context - feed if request.draft_len else table.length
    table.length = start + feed
    return Piece(table, start, feed)


def _draft_table(request: RoundRequest) -> BlockTable:
    assert request.sequence.draft is not None
    return request.sequence.draft
