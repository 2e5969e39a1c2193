"""Output lengths of synthetic requests, and the features of their prompts (`laps_sd.contract.length_features`) that a
gateway would send along."""

from __future__ import annotations

import math
import random

from laps_sd.contract.length_features import FEATURES

LENGTH_SIGMA = 0.8
"""Spread of ln(output tokens)."""
WORDS = 150
"""Features of a prompt, at most; some words come twice."""
KINDS_PER_E = 3
"""Kinds of prompts by length: so many while lengths grow by a factor of e."""
KIND_SIGMA = 0.5
"""Spread of ln(output tokens) of the prompts of one kind."""
MOST_KINDS = 64


def output_length(rng: random.Random, median: int) -> int:
    """Return the output tokens of the request that begins `rng`, the same wherever it runs."""
    return round(rng.lognormvariate(math.log(median), LENGTH_SIGMA))


def prompt_features(request_id: str, median: int) -> list[int]:
    """Return the features of a prompt: words, of which a few are frequent and most are rare, and one that gives the
    kind away. So a scheduler can learn to predict its length about as well as those of instructions to a model.
    """
    length = output_length(random.Random(request_id), median)
    rng = random.Random(f"prompt of {request_id}")
    kind = round(KINDS_PER_E * (math.log(max(1, length)) + rng.gauss(0.0, KIND_SIGMA)))
    words = FEATURES - MOST_KINDS
    found = {words + min(max(0, kind), MOST_KINDS - 1)}
    found.update([int(rng.paretovariate(1.0) * 1000 - 1000) % words for _ in range(WORDS - 1)])
    return sorted(found)
