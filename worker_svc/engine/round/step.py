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
from worker_svc.engine.round.plan import RoundPlanner
from worker_svc.engine.round.prefill import Prefill
from worker_svc.engine.round.remaining import Remaining
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.round.verify import Verification
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sequence import Sequence

# Least ratio of all rows to prefill rows at which a round is a measurement of the cost of the other rows.
CHUNKS_ARE_FEW = 8


class Rounds:
    """The phases of an engine's rounds, and what they learn from round to round."""

    def __init__(self, pair: ModelPair, options: EngineOptions, probe: LengthProbe | None = None) -> None:
        self._pair = pair
        max_draft_len = 0 if options.drafter is None else options.max_draft_len
        self.lengths = DraftLengths(max_draft_len, options.draft_len)
        if pair.target.by_kernels:
            self.lengths.uneven = 0.0
        self._noise = Noise(pair.vocab_size, pair.device)
        output_lengths = OutputLengths()
        self.prefill = Prefill(options, pair.pools[0])
        self.planner = RoundPlanner(
            pair,
            self.prefill,
            output_lengths,
            max_draft_len=max_draft_len,
            block_size=options.block_size,
        )
        self.drafting = Drafting(pair)
        self.verification = Verification(pair, 0 if probe is None else probe.kind.layer)
        self._commit = Commit(pair, self.prefill, output_lengths)
        self._remaining = Remaining(probe)

    def run(self, sequences: SequenceOf[Sequence], started: float) -> RoundResult:
        """Run one round over exactly these requests, which began at `started` of `time.perf_counter`.

        Tokens and the target's lengths change in the commit only.
        """
        pair = self._pair
        round_clock = pair.clock()
        keys = sum([len(sequence.tokens) for sequence in sequences])
        requests = self._plan(sequences, keys)
        self._remaining.mark(requests)
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
        rows, chunk_rows = sum([request.fed for request in requests]), sum([r.chunk for r in requests])
        prefill_s = forward_s * chunk_rows / rows if rows else 0.0
        if chunk_rows * CHUNKS_ARE_FEW <= rows > 0:
            # Rows of a chunk have another cost than draft tokens. Under load nearly every round has a few of
            # them.
            self._observe_costs(requests, rows, pair.clock() - round_clock - swapping_s, steps, keys)
        # After the measurement: what it costs says nothing about draft lengths.
        settled = self._remaining.settle(requests, reports)
        free = [pool.allocator.free_blocks for pool in pair.pools]
        return RoundResult(
            requests=settled,
            draft_s=verify_started - draft_started,
            verify_s=forward_s - prefill_s,
            prefill_s=prefill_s,
            swap_s=swap_s,
            total_s=time.perf_counter() - started,
            free_target_blocks=free[0],
            free_draft_blocks=free[1] if pair.draft else 0,
        )

    def _plan(self, sequences: SequenceOf[Sequence], keys: int) -> list[RoundRequest]:
        """Return the work of each request, which holds the blocks for it."""
        try:
            self.prefill.find_prefixes(sequences)
            requests = self.planner.plan(sequences, keys, self.lengths)
            self.planner.hold(requests)
        finally:
            for sequence in sequences:
                sequence.target.found = []
        return requests

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

    def _observe_costs(
        self, requests: SequenceOf[RoundRequest], rows: int, round_s: float, steps: DraftSteps, keys: int
    ) -> None:
        """Take in the measured cost of a round of `rows` rows, which took `round_s` without swapping."""
        fed = [request.fed for request in requests]
        self.lengths.observe_costs(
            rows,
            round_s - steps.seconds,
            steps.batches,
            steps.seconds,
            keys,
            sum([request.catch_up for request in requests]),
            uneven=min(fed) < max(fed),
        )
