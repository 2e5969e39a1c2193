"""Start weights of the length predictor: how words of a prompt and the length of its answer go together.

Learned from prompts and answer lengths of Apache-2.0, MIT and CC BY sources by `demo/lengths/train.py`; docs/lengths.md
names them. Only a number for each hashed word is kept, no text.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Final

from laps_sd.contract.length_features import FEATURES, FeatureHash

WEIGHTS_FILE: Final = Path(__file__).with_name("weights.bin")
STEP = 1 / 48
"""Weights are whole multiples of this, a signed byte each."""


def start_weights(key: str = "") -> tuple[list[float], str]:
    """Return the weight of each feature as hashed under this key, and a name that changes with either."""
    raw = WEIGHTS_FILE.read_bytes()
    steps = zlib.decompress(raw)
    assert len(steps) == FEATURES
    weights = [0.0] * FEATURES
    for place, byte in zip(FeatureHash(key).places, steps, strict=True):
        weights[place] = (byte - 256 if byte > 127 else byte) * STEP
    return weights, hashlib.blake2b(raw, key=key.encode()[:64], digest_size=8).hexdigest()
