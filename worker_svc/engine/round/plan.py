"""First phase of the round: what each request is fed, the length of its draft, and its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from laps_sd.contract.round_time import prefill_time_s
from worker_svc.engine.cache.kv import BlockTable
from worker_svc.engine.draft_lengths.chooser import DraftLengths
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
        """Return the work of each request: first what those that decode draft, then context in the time that is left."""
        requests = [
            RoundRequest(sequence, len(sequence.tokens), sequence.kv_length) for sequence in sequences
        ]
        decoding = [request for request in requests if request.decodes]
        plan = RoundPlan(requests, sum([request.context for request in decoding]))
        drafting: list[RoundRequest] = []
        caps: list[int] = []
        for request in decoding:
            cap = self._draft_cap(request)
            if cap and request.sequence.lookup is not None:
                request.draft_tokens = self._look_up(request.sequence, cap)
                cap = len(request.draft_tokens)
            if cap:
                drafting.append(request)
                caps.append(cap)
        # Requests that cannot draft add rows, but have no draft length to choose. Prefill is due in any case.
        chosen = lengths.lengths(
            [request.sequence.acceptance for request in drafting], caps, len(decoding) - len(drafting),
            lambda at: self._outlook(drafting[at].sequence), plan.keys,
        )  # fmt: skip
        by_model = [
            0 if request.draft_tokens else length for request, length in zip(drafting, chosen, strict=True)
        ]
        left = self._prefill.budget
        reads = any(
            length and request.sequence.draft_lag > FIRST_STEP_ROWS
            for request, length in zip(drafting, by_model, strict=True)
        )
        if reads or len(decoding) < len(requests):
            plain_s = lengths.round_s(len(decoding) + sum(chosen), plan.keys, drafts=any(by_model))
            plain_s += lengths.steps_s(by_model, plan.keys)
            left = self._draft_budget(self._plan_prefill(plan, plain_s, len(decoding)), lengths)
        for request, length in zip(drafting, chosen, strict=True):
            if request.draft_tokens:
                request.draft_tokens = request.draft_tokens[:length]
                request.draft_len = length
            elif length:
                left -= self._feed_draft(request, length, left)
        return plan

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

    def _draft_cap(self, request: RoundRequest) -> int:
        """Return the longest useful draft of a request that decodes.

        It is at most the request's own cap, and one less than its remaining tokens, because the target adds
        one.
        """
        sequence, most = request.sequence, self._max_draft_len
        if self._pair.draft is None and sequence.lookup is None:
            return 0
        own = sequence.spec.max_draft_len
        cap = most if own is None else min(own, most)
        return max(0, min(cap, sequence.spec.max_tokens - sequence.output_length - 1))

    def _look_up(self, sequence: Sequence, cap: int) -> list[int]:
        """Return at most `cap` draft tokens found in the context, up to an end, that its format allows."""
        assert sequence.lookup is not None
        found = sequence.lookup.propose(sequence.tokens, cap)
        if sequence.format is not None:
            found = found[: sequence.format.valid(found)]
        end = cut(sequence.spec, sequence.output_length, found, self._pair.eos_ids, None, ())
        return found[: end.tokens]

    def _outlook(self, sequence: Sequence) -> Outlook:
        output = sequence.output_length
        to_come = min(sequence.spec.max_tokens - output, self._output_lengths.to_come(output))
        return Outlook(to_come, max(0, sequence.draft_lag - FIRST_STEP_ROWS))

    def _feed_draft(self, request: RoundRequest, length: int, left: int) -> int:
        """Plan `length` tokens of the draft model; return what its prefill takes of the `left` budget."""
        lag = request.sequence.draft_lag
        # After full acceptance the draft lacks one entry more. Where that matters all requests read the same
        # number of tokens, so that they run as one batch.
        feed = min(max(lag, self._least_feed), request.context)
        if lag <= FIRST_STEP_ROWS or feed <= left:
            request.draft_len, request.catch_up = length, feed
        else:
            # Its context does not fit this round's budget: the draft catches up first, and proposes later.
            request.catch_up = left
        return request.catch_up if lag > FIRST_STEP_ROWS else 0

    def hold(self, requests: SequenceOf[RoundRequest]) -> None:
        """Take the blocks that this round needs, or raise OutOfBlocks and take none."""
        size, pools = self._block_size, self._pair.pools
        # By pool: (place, blocks needed, blocks that it may need later).
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
        for name, pool, places in zip(("target", "draft"), pools, wanted, strict=False):
            missing = sum([pool.missing(place, needed) for place, needed, _ in places])
            if missing > pool.allocator.free_blocks:
                raise OutOfBlocks(
                    f"the {name} pool has {pool.allocator.free_blocks} free KV blocks "
                    f"and this round needs {missing}"
                )
        for request in requests:
            if request.fed and request.sequence.target.found:
                request.sequence.reused = request.sequence.target.found_tokens
        for pool, places in zip(pools, wanted, strict=False):
            pool.hold(places)
