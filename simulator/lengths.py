"""Recorded lengths of answers by prompt, as JSON lines (gzipped if the name ends in `.gz`).

Rows with text: `model`, `prompt`, `output_tokens`, and optionally `source` and `prompt_tokens`. Rows without:
`hashed` (the plain hash of words and pairs, as `FeatureHash` computes it without a key), `output_tokens` as a
number by model, and optionally `prompt_tokens` and `cues`, the third of which is ln(1 + line breaks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from laps_sd.contract.length_features import FEATURES, MOST_FEATURES, FeatureHash, packed
from simulator.traces import TraceError, json_lines

LINE_BREAKS_CUE = 2
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One prompt, and how long one model's answer was."""

    model: str
    source: str
    features: bytes
    """Packed."""
    prompt_tokens: int
    output_tokens: int


@cache
def read_answers(path: Path) -> list[RecordedAnswer]:
    """Return the recorded answers, in the order of the file. Raises TraceError, which names the line."""
    hashed, found = FeatureHash(), []
    for number, row in json_lines(path):
        try:
            found += _answers(row, hashed)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TraceError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
    if not found:
        raise TraceError(f"{path} holds no answers")
    return found


def _answers(row: dict[str, Any], hashed: FeatureHash) -> list[RecordedAnswer]:
    source = str(row.get("source", ""))
    if "prompt" in row:
        prompt = str(row["prompt"])
        tokens = int(row.get("prompt_tokens", len(prompt) // CHARACTERS_PER_TOKEN + 1))
        features = packed(hashed.features_of(prompt))
        length = max(1, int(row["output_tokens"]))
        return [RecordedAnswer(str(row["model"]), source, features, tokens, length)]
    numbers = {int(feature) for feature in row["hashed"]}
    if numbers and not 0 <= min(numbers) <= max(numbers) < FEATURES:
        raise ValueError(f"hashed must be from 0 to {FEATURES - 1}")
    cues = row.get("cues", ())
    if len(cues) > LINE_BREAKS_CUE:
        numbers.update(hashed.features_of_lines(round(math.exp(cues[LINE_BREAKS_CUE])) - 1))
    features = packed(sorted(numbers)[:: math.ceil(len(numbers) / MOST_FEATURES) or 1])
    tokens = int(row.get("prompt_tokens", len(numbers) // 2))
    return [
        RecordedAnswer(model, source, features, tokens, max(1, int(length)))
        for model, length in row["output_tokens"].items()
    ]
