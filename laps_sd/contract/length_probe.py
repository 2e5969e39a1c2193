"""State of a worker's predictor of output lengths, as it goes to the scheduler and to the next worker."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

MAX_BYTES = 65536
"""Most bytes of the numbers (our choice): what is learnt takes about 35 kB."""
MAX_NAME = 128
"""Most characters of a model's name."""
MAX_COUNT = 2**32 - 1
"""Largest of the whole numbers that a message has room for."""


@dataclass(frozen=True, slots=True)
class ProbeKind:
    """Properties that must be equal for one worker to use the state of another one's probe."""

    model: str  # identifier of the target's weights
    layer: int  # decoder layers before the hidden state
    seed: int  # of the projection
    dims: int  # numbers that the hidden state is projected to


@dataclass(frozen=True, slots=True)
class LearntProbe:
    """The learnt state of a probe of one kind."""

    kind: ProbeKind
    requests: int  # from which it learnt
    numbers: bytes  # float16, little endian


def problem_with_kind(kind: ProbeKind) -> str:
    """Return what is wrong with a kind that a peer sent, in a few words; empty: nothing."""
    if not 1 <= len(kind.model) <= MAX_NAME or not kind.model.isalnum() or not kind.model.isascii():
        return f"its model's name must be 1 to {MAX_NAME} letters and digits"
    if not all(0 <= number <= MAX_COUNT for number in (kind.layer, kind.seed, kind.dims)):
        return f"its layer, seed and dims must be 0 to {MAX_COUNT}"
    return ""


def problem_with(probe: LearntProbe) -> str:
    """Return what is wrong with a probe that a peer sent, in a few words; empty: nothing."""
    if problem := problem_with_kind(probe.kind):
        return problem
    if not 1 <= probe.requests <= MAX_COUNT:
        return f"it must have learnt from 1 to {MAX_COUNT} requests"
    size = len(probe.numbers)
    if not 2 <= size <= MAX_BYTES or size % 2:
        return f"its numbers must be an even number of bytes, {MAX_BYTES} at most"
    if not all(map(math.isfinite, struct.unpack(f"<{size // 2}e", probe.numbers))):
        return "its numbers must be finite"
    return ""
