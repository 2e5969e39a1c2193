"""The features of one position of an output: a projection of its hidden state, and how far the output is."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]

DIMS = 128
"""Numbers that a hidden state is projected to (our choice): with 64 the error was larger, with 256 no smaller."""
SEED = 1
"""Seed of the projection. Workers share what they learnt only under the same seed."""
SCALARS = 3
"""One, ln(1 + output tokens), ln(prompt tokens)."""
COUNT = SCALARS + DIMS


class Projection:
    """A random projection of hidden states: number i is added to sum i modulo DIMS, or subtracted from it.

    A dense one took ten times as long and was no better. Here a number that is a thousand times as large as the
    others, as some models have a few, spoils one sum and not all of them.
    """

    def __init__(self, hidden: int, seed: int = SEED) -> None:
        """`hidden`: numbers of a hidden state."""
        random = np.random.RandomState(seed)  # of numpy's generators the one whose stream never changes
        self._signs = np.where(random.randint(0, 2, hidden) == 1, 1, -1).astype(np.float32)
        self._missing = -hidden % DIMS

    def features(self, hidden: Features, prompt_tokens: int, output_tokens: int) -> Features | None:
        """Return the features [COUNT] of a hidden state [hidden]; None if it is not finite, or zero."""
        square = float(hidden.dot(hidden)) / len(hidden)
        if not 0.0 < square < math.inf:
            return None
        signed = hidden * self._signs
        if self._missing:
            signed = np.pad(signed, (0, self._missing))
        found = np.empty(COUNT, np.float32)
        sums = found[SCALARS:]
        np.add.reduce(signed.reshape(-1, DIMS), axis=0, out=sums)
        sums *= 1.0 / math.sqrt(square)
        found[0] = 1.0
        found[1] = math.log1p(output_tokens)
        found[2] = math.log(prompt_tokens)
        return found
