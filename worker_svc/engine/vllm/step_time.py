"""The time of vLLM's steps: learnt from those that are over, and bounded for those that compute context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laps_sd.contract.round_time import prefill_time_s
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.round.prefill_time import LEAST_SHARE, Chunk, PrefillTime

FIRST = 4
"""Steps of a kind whose least time is taken as the first measurement: the very first ones compile kernels.
Our choice."""


class Decoding(NamedTuple):
    """The part of a step that decodes."""

    requests: int
    rows: int  # tokens computed for them, draft tokens included
    keys: int  # tokens of their contexts


NONE = Decoding(0, 0, 0)


class StepTime:
    """Times of steps. There is no measurement before the first request: until then steps are bounded by
    tokens alone."""

    def __init__(self, max_round_s: float, *, rows: int, max_length: int) -> None:
        """`max_round_s`: see `EngineOptions`; `rows`: of the decoding part of a step, at most."""
        self._max_round_s = max_round_s
        self._rows, self._max_length = max(2, rows), max(2, max_length)
        self._plain: CostTable | None = None
        self._prefill: PrefillTime | None = None
        self._first_s: list[float] = []
        self._first_token_s: list[float] = []

    def fitting(self, decoding: Decoding, start: int, most: int) -> tuple[int, float]:
        """Return the context tokens that the next step may compute, at most `most`, and the limit of its time.

        `start`: tokens that are computed of the first context. The limit is 0 if time does not bound the tokens.
        """
        if self._plain is None or self._prefill is None:
            return most, 0.0
        plain_s = self._plain(decoding.rows, decoding.keys)
        seconds = prefill_time_s(self._max_round_s, plain_s, decoding.requests)
        tokens = max(1, self._prefill.fitting(seconds, start, most))
        return (tokens, plain_s + seconds) if tokens < most else (most, 0.0)

    def prefill_share(self, decoding: Decoding, chunks: Sequence[Chunk]) -> float:
        """Return the share of a step that its chunks are expected to take; by rows until times are known."""
        tokens = sum([chunk.tokens for chunk in chunks])
        if not chunks or not decoding.rows:
            return float(bool(chunks))
        if self._plain is None or self._prefill is None:
            return tokens / (tokens + decoding.rows)
        chunks_s = self._prefill.seconds(chunks)
        return chunks_s / (chunks_s + self._plain(decoding.rows, decoding.keys))

    def observe(self, decoding: Decoding, chunks: Sequence[Chunk], seconds: float) -> None:
        """Learn from a step that is over."""
        if chunks:
            self._observe_chunks(
                chunks, seconds, self._plain(decoding.rows, decoding.keys) if self._plain else 0.0
            )
        elif decoding.rows:
            self._observe_plain(decoding, seconds)

    def _observe_plain(self, decoding: Decoding, seconds: float) -> None:
        if self._plain is not None and len(self._first_s) == FIRST:
            self._plain.observe(decoding.rows, seconds, decoding.keys)
            return
        self._first_s.append(seconds)
        self._plain = CostTable([1, self._rows], [min(self._first_s)] * 2)

    def _observe_chunks(self, chunks: Sequence[Chunk], seconds: float, plain_s: float) -> None:
        if self._prefill is not None and len(self._first_token_s) == FIRST:
            self._prefill.observe(chunks, seconds - plain_s)
            return
        tokens = sum([chunk.tokens for chunk in chunks])
        self._first_token_s.append(max(seconds - plain_s, seconds * LEAST_SHARE) / tokens)
        self._prefill = PrefillTime(CostTable([1, self._max_length], [min(self._first_token_s)] * 2))
