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
MOST = 8.0
"""Bound of a hidden number in units of the mean size (our choice): a few numbers of some models are a thousand
times as large as the others, and would be all that the projection shows."""
SCALARS = 3
"""One, ln(1 + output tokens), ln(prompt tokens)."""
COUNT = SCALARS + DIMS


class Projection:
    """A random projection of hidden states; the same seed gives the same one, with every version of numpy."""

    def __init__(self, hidden: int, seed: int = SEED) -> None:
        """`hidden`: numbers of a hidden state."""
        # Of numpy's generators, only the stream of this one never changes.
        matrix = np.random.RandomState(seed).standard_normal((hidden, DIMS)) / math.sqrt(hidden)
        self._matrix = matrix.astype(np.float32)

    def features(self, hidden: Features, prompt_tokens: int, output_tokens: int) -> Features | None:
        """Return the features [COUNT] of a hidden state [hidden]; None if it is not finite, or zero."""
        size = float(np.abs(hidden).mean())
        if not 0.0 < size < math.inf:
            return None
        found = np.empty(COUNT, np.float32)
        found[:SCALARS] = 1.0, math.log1p(output_tokens), math.log(prompt_tokens)
        np.matmul((hidden / np.float32(size)).clip(-MOST, MOST), self._matrix, out=found[SCALARS:])
        return found
