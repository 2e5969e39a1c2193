"""One round: its phases in order, and their times."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.outlook import OutputLengths
from worker_svc.engine.interface import RoundResult
from worker_svc.engine.length_probe.probe import LengthProbe
from worker_svc.engine.options import EngineOptions
from worker_svc.engine.pair import ModelPair
from worker_svc.engine.round.choices import choices_of
from worker_svc.engine.round.commit import Commit
from worker_svc.engine.round.draft import Drafting, DraftSteps
from worker_svc.engine.round.plan import RoundPlan, RoundPlanner
from worker_svc.engine.round.prefill import Prefill
from worker_svc.engine.round.prefill_time import Chunk
from worker_svc.engine.round.remaining import Remaining
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.round.verify import Verification
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sequence import Sequence

# Least ratio of a round's time to the expected time of its chunks at which it is a measurement of the other rows;
# otherwise it is one of the chunks.
CHUNKS_ARE_FEW = 8


class Rounds:
    """The phases of an engine's rounds, and what they learn from round to round."""

    def __init__(self, pair: ModelPair, options: EngineOptions, probe: LengthProbe | None) -> None:
        self._pair = pair
        max_draft_len = 0 if options.drafter is None else options.max_draft_len
        self.lengths = DraftLengths(max_draft_len, options.draft_len)
        self._noise = Noise(pair.vocab_size, pair.device)
        output_lengths = OutputLengths()
        self.prefill = Prefill(options, pair.pools, pair.vocab_size)
        self.planner = RoundPlanner(
            pair,
            self.prefill,
            output_lengths,
            max_draft_len=max_draft_len,
            block_size=options.block_size,
            max_round_s=options.max_round_s,
        )
        self.drafting = Drafting(pair)
        self.verification = Verification(pair, 0 if probe is None else probe.kind.layer)
        self._commit = Commit(pair, self.prefill, output_lengths)
        self.remaining = Remaining(probe)

    def run(self, sequences: SequenceOf[Sequence], started: float) -> RoundResult:
        """Run one round over exactly these requests, which began at `started` of `time.perf_counter`.

        Tokens and the target's lengths change in the commit only.
        """
        pair = self._pair
        round_clock = pair.clock()
        plan = self._plan(sequences)
        requests = plan.requests
        self.remaining.mark(requests)
        swapping_s, swap_s = self._swap_in(requests)
        choices = choices_of(requests, self._noise, pair.vocab_size, pair.device)
        draft_started = time.perf_counter()
        steps = self.drafting.draft(requests, choices)
        pair.synchronize()
        verify_started = time.perf_counter()
        self.verification.verify(requests, choices, steps.on_device)
        ended = time.perf_counter()
        reports = [self._commit.commit(request, self.lengths) for request in requests]
        self.prefill.grow()
        forward_s = ended - verify_started
        prefill_s = forward_s * self._prefill_share(requests, plan.keys)
        self._observe_costs(requests, pair.clock() - round_clock - swapping_s, steps, plan.keys)
        # After the measurement: its cost does not depend on draft lengths.
        settled = self.remaining.settle(requests, reports)
        free_target, free_draft = pair.free_blocks
        return RoundResult(
            requests=settled,
            draft_s=verify_started - draft_started,
            verify_s=forward_s - prefill_s,
            prefill_s=prefill_s,
            swap_s=swap_s,
            total_s=time.perf_counter() - started,
            limit_s=plan.limit_s,
            free_target_blocks=free_target,
            free_draft_blocks=free_draft,
        )

    def _plan(self, sequences: SequenceOf[Sequence]) -> RoundPlan:
        """Return the work of each request, which holds the blocks for it."""
        pair = self._pair
        try:
            self.prefill.find_prefixes(sequences)
            plan = self.planner.plan(sequences, self.lengths)
            self.planner.hold(plan.requests)
        finally:
            for sequence in sequences:
                for table in pair.tables(sequence):
                    table.found = []
        return plan

    def _swap_in(self, requests: SequenceOf[RoundRequest]) -> tuple[float, float]:
        """Bring KV back from host memory; return the seconds, by the clock of the pair and by the wall's."""
        # The CPU clock is read only if there is swapping to measure: each reading is a system call.
        coming = [request.sequence for request in requests if request.sequence.swapped]
        if not coming:
            return 0.0, 0.0
        clock, wall = self._pair.clock(), time.perf_counter()
        for sequence in coming:
            self._pair.swap_in(sequence)
        return self._pair.clock() - clock, time.perf_counter() - wall

    def _prefill_share(self, requests: SequenceOf[RoundRequest], keys: int) -> float:
        """Return the share of a forward that chunks are expected to take, from 0 to 1.

        By rows it would be too small: a row deep in a long context takes several times as long as one of a draft.
        """
        chunks = _chunks(requests)
        rows = sum([request.fed for request in requests if not request.chunk])
        if not chunks or not rows:
            return float(bool(chunks))
        chunks_s = self.prefill.time.seconds(chunks)
        return chunks_s / (chunks_s + self.lengths.round_s(rows, keys, drafts=False))

    def _observe_costs(
        self, requests: SequenceOf[RoundRequest], round_s: float, steps: DraftSteps, keys: int
    ) -> None:
        """Take in the measured cost of a round, which took `round_s` without swapping.

        `keys`: tokens of the contexts of the requests that decode. Rows of a chunk have another cost than draft
        tokens, and under load nearly every round has a few of them: the larger part of a round is measured, and the
        other one is taken to cost what is expected.
        """
        if any(request.prompt_rows for request in requests):
            return  # the logits of prompts are no part of what other rounds cost
        fed = [request.fed for request in requests if request.fed and not request.chunk]
        chunks = _chunks(requests)
        rows, forward_s = sum(fed), round_s - steps.seconds
        chunks_s = self.prefill.time.seconds(chunks)
        if chunks and (not rows or chunks_s * CHUNKS_ARE_FEW > forward_s):
            others_s = self.lengths.round_s(rows, keys, drafts=bool(steps.batches))
            self.prefill.time.observe(chunks, forward_s - others_s)
        elif rows:
            self.lengths.observe_costs(
                rows,
                forward_s - chunks_s,
                steps.batches,
                steps.seconds,
                keys,
                sum([request.catch_up for request in requests]),
            )


def _chunks(requests: SequenceOf[RoundRequest]) -> list[Chunk]:
    return [Chunk(request.known, request.chunk) for request in requests if request.chunk]
