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

    def __init__(self, hidden: int) -> None:
        """`hidden`: numbers of a hidden state."""
        random = np.random.RandomState(SEED)  # of numpy's generators the one whose stream never changes
        self._signs = np.where(random.randint(0, 2, hidden) == 1, 1, -1).astype(np.float32)
        self._missing = -hidden % DIMS

    def features(self, hidden: Features, scalars: Features) -> Features:
        """Return the features [n, COUNT] of hidden states [n, hidden] with these scalars [n, SCALARS]."""
        signed = hidden * self._signs
        if self._missing:
            signed = np.pad(signed, ((0, 0), (0, self._missing)))
        sums = np.add.reduce(signed.reshape(len(hidden), -1, DIMS), axis=1)
        return np.concatenate([scalars, sums], axis=1)

    def reader(self, weights: Features) -> Features:
        """Return the vector [hidden] whose product with a hidden state is that of `weights` [COUNT] with its
        features, without the scalars.

        So a prediction takes one product, and features are needed only to learn.
        """
        repeated = np.resize(weights[SCALARS:], len(self._signs) + self._missing)
        return repeated[: len(self._signs)] * self._signs


def scalars_of(prompt_tokens: int, output_tokens: int) -> tuple[float, float, float]:
    """Return the features that do not come from the hidden state."""
    return 1.0, math.log1p(output_tokens), math.log(prompt_tokens)
