"""Prefill of a round: its budgets of context tokens and of time, and the KV that the prefix cache has already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from worker_svc.engine.cache.kv import BlockTable, KVPool
from worker_svc.engine.cache.prompts import CachedPrompts
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS
from worker_svc.engine.interface import SharedBlocks
from worker_svc.engine.options import EngineOptions
from worker_svc.engine.round.prefill_time import Chunk, PrefillTime
from worker_svc.engine.round.prompt_logprobs import rows_in_round, rows_wanted
from worker_svc.engine.sequence import Sequence

# Prefill tokens of a round, at least, however short memory is.
LEAST_CHUNK = 16
# Rounds without running out of memory after which the budget doubles, up to its usual size.
CHUNK_GROWS_AFTER = 256


class Chunks(NamedTuple):
    """The prefill of a round."""

    tokens: list[int]  # by request
    cut_by_time: bool  # some context waits because its time was over
    seconds_left: float


class Prefill:
    """The prefill budget of an engine's rounds, and its prefix cache."""

    def __init__(self, options: EngineOptions, pools: SequenceOf[KVPool], vocab_size: int) -> None:
        """`pools`: the target's, and the draft's if there is a draft; `vocab_size`: the target's."""
        self.prompts = CachedPrompts(pools[0].allocator, options.block_size)
        """Content of the prefix cache."""
        self.time = PrefillTime()
        """Expected seconds of context tokens in a round."""
        self._pools = pools
        self._usual = options.prefill_chunk
        self._block_size = options.block_size
        self._least_reuse = options.prefix_reuse_tokens
        self._most_prompt_rows = rows_in_round(vocab_size)
        # Context tokens per round; less than usual while memory is short.
        self.budget = options.prefill_chunk
        self._rounds_with_budget = 0

    def shrink(self, longest: int) -> bool:
        """Lower the budget after a shortage of memory; `longest`: most tokens that a context lacks.

        Returns False, and changes nothing, if less prefill cannot help.
        """
        budget = min(self.budget, longest) // 2
        self._rounds_with_budget = 0
        if longest <= 1 or budget < LEAST_CHUNK:
            return False
        self.budget = budget
        return True

    def grow(self) -> None:
        """Count a round, and raise the budget towards its usual size again after a shortage of memory."""
        if self.budget < self._usual:
            self._rounds_with_budget += 1
            if self._rounds_with_budget >= CHUNK_GROWS_AFTER:
                self.budget = min(2 * self.budget, self._usual)
                self._rounds_with_budget = 0

    def find_prefixes(self, sequences: SequenceOf[Sequence]) -> None:
        """Look up cached KV of the context of each request that has none.

        The last token is left out, because its logits are needed, and so is every prompt whose log
        probabilities are missing. The draft is fed the last tokens of a context again.
        """
        for sequence in sequences:
            for pool, table, names, most in self._usable(sequence):
                pool.find(table, names[:most], self._least_reuse)

    def _usable(self, sequence: Sequence) -> Iterator[tuple[KVPool, BlockTable, list[bytes], int]]:
        """Yield each pool in which a request has no blocks, its table there, the names of the blocks of its context,
        and how many of these it can use: what it swapped out, or all but the last tokens.
        """
        if not self._least_reuse:
            return
        size, tokens, draft = self._block_size, len(sequence.tokens), sequence.draft
        names = sequence.names.kv_blocks(sequence.tokens, size)
        if not sequence.target.blocks and not sequence.scores_prompt:
            most = sequence.kv_length if sequence.swapped else tokens - 1
            yield self._pools[0], sequence.target, names, most // size
        if draft is not None and sequence.by_model and not draft.blocks:
            most = max(0, tokens - FIRST_STEP_ROWS)
            if sequence.swapped:
                most = min(most, sequence.draft_kv_length)
            yield self._pools[1], draft, names, most // size

    def _owned(self, sequence: Sequence) -> Iterator[tuple[KVPool, list[bytes], int]]:
        """Yield the pools in which a request will find blocks that others hold, the names of the blocks of its
        context, and how many of these it will find.
        """
        for pool, _, names, most in self._usable(sequence):
            owned = pool.allocator.owned(names, most)
            if owned * self._block_size >= self._least_reuse:
                yield pool, names, owned

    def expect(self, sequences: SequenceOf[Sequence]) -> None:
        """Count as shared what these requests will find and others hold, until the next call."""
        starts = [found for sequence in sequences for found in self._owned(sequence)]
        for pool in self._pools:
            pool.allocator.expect([(names, owned) for where, names, owned in starts if where is pool])

    def shared_blocks(self, sequence: Sequence) -> tuple[SharedBlocks, ...]:
        """Return the blocks of a request that others hold as well, or will find. In a pool in which it has none:
        those that it will find and others hold.
        """
        tables = [sequence.target] if sequence.draft is None else [sequence.target, sequence.draft]
        held = [(pool, table.blocks) for pool, table in zip(self._pools, tables, strict=True) if table.blocks]
        runs = [(pool, pool.allocator.shared(blocks)) for pool, blocks in held]
        if len(held) < len(tables):
            runs += [
                (pool, pool.allocator.will_share(names, owned))
                for pool, names, owned in self._owned(sequence)
            ]
        return tuple(
            [
                # The names of the target's are 0 or more.
                SharedBlocks(first, count, 0)
                if pool is self._pools[0]
                else SharedBlocks(-1 - first, 0, count)
                for pool, found in runs
                for first, count in found
            ]
        )

    def remember(self, sequence: Sequence) -> None:
        """Add the KV that is final to the prefix cache, for requests with the same context start."""
        if self._least_reuse:
            names, table = sequence.names, sequence.target
            of_blocks = names.kv_blocks(sequence.tokens, self._block_size)
            self._pools[0].remember(table, of_blocks, table.length)
            table.noted = self.prompts.note(names, sequence.tokens, table.noted, table.named)
            if sequence.draft is not None:
                final = min(sequence.draft.length, len(sequence.tokens) - FIRST_STEP_ROWS)
                self._pools[1].remember(sequence.draft, of_blocks, final)

    def chunks(self, sequences: SequenceOf[Sequence], seconds: float = math.inf) -> Chunks:
        """Return the context tokens to prefill for each request.

        The first requests, which rank best, are served first from the budgets of tokens and of `seconds`: after one
        that the time cuts, none gets any. One token at least is prefilled, however long it takes.

        A request without KV gets none while another one, ahead of it, computes the same tokens: it finds them
        in the next round.
        """
        left, size, cut_by_time = self.budget, self._block_size, False
        rows_left = self._most_prompt_rows
        coming: set[bytes] = set()  # names of the blocks that this round fills
        chunks: list[int] = []
        for sequence in sequences:
            known, missing = sequence.kv_length, len(sequence.tokens) - sequence.kv_length
            chunk = min(missing, left) if missing > 1 or known == 0 else 0
            if chunk and sequence.scores_prompt:
                chunk = _with_prompt_rows(sequence, known, chunk, rows_left)
            if chunk and self._comes(sequence, coming):
                chunk = 0
            elif chunk and seconds < math.inf:
                fitting = 0 if cut_by_time else self.time.fitting(seconds, known, chunk)
                fitting = max(fitting, int(not any(chunks)))
                chunk, cut_by_time = fitting, cut_by_time or fitting < chunk
            if self._least_reuse and chunk:
                coming.update(sequence.names.kv[known // size : (known + chunk) // size])
            if sequence.prompt_logprobs is not None:
                rows_left -= len(rows_wanted(sequence, known, chunk))
            left -= chunk
            seconds -= self.time.seconds([Chunk(known, chunk)])
            chunks.append(chunk)
        return Chunks(chunks, cut_by_time, max(0.0, seconds))

    def _comes(self, sequence: Sequence, coming: set[bytes]) -> bool:
        """Return whether enough of a context without KV is among the blocks that this round fills."""
        if not self._least_reuse or sequence.target.blocks or sequence.swapped or sequence.scores_prompt:
            return False
        names, size, known = sequence.names.kv, self._block_size, sequence.kv_length
        after = known // size
        while after < (len(sequence.tokens) - 1) // size and names[after] in coming:
            after += 1
        return after * size - known >= self._least_reuse


def _with_prompt_rows(sequence: Sequence, known: int, chunk: int, rows_left: int) -> int:
    """Return how much of a chunk fits where logits of `rows_left` prompt rows may be computed."""
    wanted = rows_wanted(sequence, known, chunk)
    return chunk if len(wanted) <= rows_left else wanted.start + rows_left - known
