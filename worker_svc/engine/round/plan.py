"""First phase of the round: what each request is fed, the length of its draft, and its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from laps_sd.contract.round_time import prefill_time_s
from worker_svc.engine.cache.kv import BlockTable
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.found import WORTH_LOOKING
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS
from worker_svc.engine.draft_lengths.outlook import Outlook, OutputLengths
from worker_svc.engine.interface import OutOfBlocks, blocks_needed
from worker_svc.engine.pair import ModelPair
from worker_svc.engine.round.prefill import LEAST_CHUNK, Prefill
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.sampling.stopping import cut
from worker_svc.engine.sequence import Sequence


@dataclass(slots=True)
class RoundPlan:
    """The work of a round."""

    requests: list[RoundRequest]
    # Tokens of the contexts of the requests that decode.
    keys: int
    # Longest time of the round, seconds, where because of it some context waits for a later one; otherwise 0.
    limit_s: float = 0.0


class RoundPlanner:
    """Decides the work of each request: prefill from the budget, draft lengths by goodput."""

    def __init__(
        self,
        pair: ModelPair,
        prefill: Prefill,
        output_lengths: OutputLengths,
        *,
        max_draft_len: int,
        block_size: int,
        max_round_s: float | None,
    ) -> None:
        """`max_draft_len`: draft tokens per request and round, at most; `max_round_s`: see `EngineOptions`."""
        self._pair = pair
        self._prefill = prefill
        self._output_lengths = output_lengths
        self._max_draft_len = max_draft_len
        self._block_size = block_size
        self.max_round_s = max_round_s
        # Least number of context tokens that the draft model reads before it proposes.
        self._least_feed = 1 if pair.draft is not None and pair.draft.by_kernels else FIRST_STEP_ROWS

    def plan(self, sequences: SequenceOf[Sequence], lengths: DraftLengths) -> RoundPlan:
        """Return the work of each request: first what those that decode draft, then context in the time that
        is left."""
        requests = [
            RoundRequest(sequence, len(sequence.tokens), sequence.kv_length) for sequence in sequences
        ]
        decoding = [request for request in requests if request.decodes]
        plan = RoundPlan(requests, sum([request.context for request in decoding]))
        by_model = self._plan_drafts(plan, decoding, lengths)
        left = self._prefill.budget
        reads = any(request.sequence.draft_lag > FIRST_STEP_ROWS for request in by_model)
        if reads or len(decoding) < len(requests):
            rows = len(decoding) + sum([request.draft_len for request in decoding])
            plain_s = lengths.round_s(rows, plan.keys, drafts=bool(by_model))
            plain_s += lengths.steps_s([request.draft_len for request in by_model], plan.keys)
            left = self._draft_budget(self._plan_prefill(plan, plain_s, len(decoding)), lengths)
        for request in by_model:
            left -= self._feed_draft(request, left)
        return plan

    def _plan_drafts(
        self, plan: RoundPlan, decoding: SequenceOf[RoundRequest], lengths: DraftLengths
    ) -> list[RoundRequest]:
        """Choose the draft of each request that decodes. Returns those for which the draft model proposes."""
        most = self._max_draft_len if lengths.fixed is None else min(lengths.fixed, self._max_draft_len)
        row_price = lengths.row_price(len(decoding), plan.keys) if decoding else math.inf
        drafting: list[RoundRequest] = []
        caps: list[int] = []
        looking: list[tuple[RoundRequest, int]] = []
        for request in decoding:
            cap = self._draft_cap(request, most)
            if cap:
                if request.sequence.by_model:
                    drafting.append(request)
                    caps.append(cap)
                if row_price < WORTH_LOOKING and request.sequence.lookup is not None:
                    looking.append((request, cap))
        # While a batch is being filled, the requests that generate already are no measure of it: drafts that pay
        # for a few of them, and for reading their contexts, do not pay for all.
        if 2 * len(decoding) >= len(plan.requests):
            # Requests that cannot draft add rows, but have no draft length to choose. Prefill is due in any case.
            chosen = lengths.lengths(
                [request.sequence.acceptance for request in drafting], caps, len(decoding) - len(drafting),
                lambda at: self._outlook(drafting[at].sequence), plan.keys,
            )  # fmt: skip
            for request, length in zip(drafting, chosen, strict=True):
                request.draft_len = length
        self._look_up(looking, lengths, row_price)
        return [request for request in drafting if request.draft_len and not request.draft_tokens]

    def _plan_prefill(self, plan: RoundPlan, plain_s: float, decoding: int) -> float:
        """Plan the context to compute with `decoding` requests whose part of the round takes `plain_s` seconds.

        Returns the seconds that are left after it.
        """
        if self.max_round_s is None:
            seconds = math.inf
        else:
            seconds = prefill_time_s(self.max_round_s, plain_s, decoding)
        chunks = self._prefill.chunks([request.sequence for request in plan.requests], seconds)
        for request, tokens in zip(plan.requests, chunks.tokens, strict=True):
            request.chunk = tokens
        if chunks.cut_by_time:
            plan.limit_s = plain_s + seconds
        return chunks.seconds_left

    def _draft_budget(self, seconds: float, lengths: DraftLengths) -> int:
        """Return the context tokens that the draft model may read in `seconds`, which the target's prefill left."""
        most, read_s = self._prefill.budget, lengths.read_s()
        if seconds >= most * read_s:
            return most
        return max(min(LEAST_CHUNK, most), int(seconds / read_s))

    def _draft_cap(self, request: RoundRequest, most: int) -> int:
        """Return the longest useful draft of a request that decodes.

        It is at most `most`, the request's own cap, and one less than its remaining tokens, because the target adds
        one.
        """
        sequence = request.sequence
        if not (sequence.by_model or sequence.lookup is not None):
            return 0
        own = sequence.spec.max_draft_len
        cap = most if own is None else min(own, most)
        return max(0, min(cap, sequence.spec.max_tokens - sequence.output_length - 1))

    def _look_up(
        self, looking: SequenceOf[tuple[RoundRequest, int]], lengths: DraftLengths, row_price: float
    ) -> None:
        """Find draft tokens in the context of these requests, for each at most the number that comes with it.

        They replace the model's where they gain more. `row_price`: tokens that a row must be worth.
        """
        for request, cap in looking:
            sequence = request.sequence
            assert sequence.lookup is not None
            found = sequence.lookup.look(sequence.tokens, cap)
            if found is None:
                continue
            request.found = found
            length = lengths.found_length(
                sequence.found, found, row_price, sequence.acceptance, request.draft_len
            )
            if length:
                usable = self._usable(sequence, found.tokens[:length])
                if usable:
                    request.draft_tokens, request.draft_len = usable, len(usable)

    def _usable(self, sequence: Sequence, found: list[int]) -> list[int]:
        """Return the first of the found tokens, up to an end, that the format allows."""
        if sequence.format is not None:
            found = found[: sequence.format.valid(found)]
        end = cut(sequence.spec, sequence.output_length, found, self._pair.eos_ids, None, ())
        return found[: end.tokens]

    def _outlook(self, sequence: Sequence) -> Outlook:
        output = sequence.output_length
        to_come = min(sequence.spec.max_tokens - output, self._output_lengths.to_come(output))
        return Outlook(to_come, max(0, sequence.draft_lag - FIRST_STEP_ROWS))

    def _feed_draft(self, request: RoundRequest, left: int) -> int:
        """Plan what the draft model reads before it proposes; return what that takes of the `left` budget."""
        lag = request.sequence.draft_lag
        # After full acceptance the draft lacks one entry more. Where that matters all requests read the same
        # number of tokens, so that they run as one batch.
        feed = min(max(lag, self._least_feed), request.context)
        if lag <= FIRST_STEP_ROWS or feed <= left:
            request.catch_up = feed
        else:
            # Its context does not fit this round's budget: the draft catches up first, and proposes later.
            request.draft_len, request.catch_up = 0, left
        return request.catch_up if lag > FIRST_STEP_ROWS else 0

    def hold(self, requests: SequenceOf[RoundRequest]) -> None:
        """Take the blocks that this round needs, or raise OutOfBlocks and take none."""
        size, pools = self._block_size, self._pair.pools
        # By pool: (table, blocks needed, blocks that it may need later).
        wanted: list[list[tuple[BlockTable, int, int]]] = [[], []]
        for request in requests:
            sequence = request.sequence
            needed = blocks_needed(request.context, request.draft_len + 1, size)
            expected = blocks_needed(len(sequence.spec.prompt_ids) + sequence.spec.max_tokens, 1, size)
            if request.fed or sequence.swapped:
                wanted[0].append((sequence.target, needed, expected))
            if sequence.draft is not None and (
                request.catch_up or (sequence.swapped and sequence.swapped[1] is not None)
            ):
                wanted[1].append((sequence.draft, needed, expected))
        for name, pool, tables in zip(("target", "draft"), pools, wanted, strict=False):
            missing = pool.missing(tables)
            if missing > pool.allocator.free_blocks:
                raise OutOfBlocks(
                    f"the {name} pool has {pool.allocator.free_blocks} free KV blocks "
                    f"and this round needs {missing}"
                )
        for request in requests:
            if request.fed and request.sequence.target.found and not request.sequence.swapped:
                request.sequence.reused = request.sequence.target.found_tokens
        for pool, tables in zip(pools, wanted, strict=False):
            pool.hold(tables)
