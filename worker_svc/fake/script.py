"""The script of the fake engine: tokens, lengths and acceptance as functions of (prompt, seed, position)."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Sequence

from worker_svc.engine.interface import Specification
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.restrictions import Restrictions

LENGTH_SIGMA = 0.8
"""Spread of ln(output tokens) of the fake engine (our choice)."""
ACCEPTANCE_STREAM = 0xACCE97  # keeps acceptance independent of the tokens of the same seed

Lengths = Callable[[Specification], int]


def lognormal_lengths(median: float) -> Lengths:
    """Return output lengths ~ lognormal(ln median, LENGTH_SIGMA), at least 1 token, a function of
    (prompt, seed) alone."""

    def length(spec: Specification) -> int:
        draw = random.Random(digest_of(spec)).lognormvariate(0.0, LENGTH_SIGMA)
        return max(1, round(median * draw))

    return length


def digest_of(spec: Specification) -> int:
    """Return 64 bits of (prompt, seed)."""
    packed = struct.pack(f"<Q{len(spec.prompt_ids)}I", spec.sampling.seed, *spec.prompt_ids)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class Script:
    """Tokens that the engine generates and accepts; see `FakeEngine` for the arguments."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_id: int,
        acceptance: float,
        concentration: float,
        lengths: Lengths | None,
    ) -> None:
        if vocab_size < 2:
            raise ValueError("vocab_size must be at least 2")
        if not 0 <= acceptance <= 1:
            raise ValueError("acceptance must be from 0 to 1")
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._acceptance = acceptance
        self._concentration = concentration
        self._lengths = lengths

    def token(
        self,
        digest: int,
        spec: Specification,
        length: int,
        position: int,
        restrictions: Restrictions | None,
        before: Sequence[int],
    ) -> int:
        """Return the output token at a position of a request that is `length` tokens long. `before`: at least
        the output tokens before it that `restrictions` need."""
        if position == length - 1 and not spec.ignore_eos:
            return self._eos_id
        drawn = counter.mix64(digest ^ counter.row_key(spec.sampling.seed, position)) % (self._vocab_size - 1)
        token = drawn + (drawn >= self._eos_id)  # every id but EOS
        return token if restrictions is None else self._allowed(token, position, restrictions, before)

    def _allowed(self, token: int, position: int, restrictions: Restrictions, before: Sequence[int]) -> int:
        """Return the first token from `token` on that the restrictions allow; `token` itself if there is none."""
        ids = sorted(restrictions.allowed) or range(self._vocab_size)
        first = token % len(ids) if restrictions.allowed else token
        tail = before[max(0, len(before) - restrictions.reach) :]
        for at in range(len(ids)):
            candidate = ids[(first + at) % len(ids)]
            if candidate != self._eos_id and restrictions.allows(candidate, position, tail):
                return candidate
        return token

    def length(self, spec: Specification) -> int:
        """Return the number of output tokens after which a request ends by EOS."""
        length = spec.max_tokens + 1 if self._lengths is None else self._lengths(spec)
        return max(length, spec.sampling.min_tokens + 1)

    def mean_acceptance(self, digest: int) -> float:
        """Return the chance that a draft token of a request is accepted."""
        if self._acceptance in (0.0, 1.0):
            return self._acceptance
        a = self._acceptance * self._concentration
        return random.Random(digest ^ ACCEPTANCE_STREAM).betavariate(a, self._concentration - a)

    def accepts(self, digest: int, seed: int, mean: float, position: int) -> bool:
        """Return whether the draft token at a position is accepted, in a request with this mean acceptance."""
        key = counter.row_key(seed ^ ACCEPTANCE_STREAM, position)
        return counter.uniform(key ^ digest, 0) < mean
