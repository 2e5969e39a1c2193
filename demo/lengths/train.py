"""Train the start weights of the length predictor: `python -m demo.lengths.train FOLDER`

FOLDER contains gzipped JSON lines, one file for each source of `SOURCES`, with the fields `model`, `prompt`, `output_tokens`, and
optionally `turn` (only the first turn, 0, is used), `cut` (true: the answer was cut, and is left out) and `judges` (true: the prompt
is part of a benchmark that judges the predictor, and is left out). docs/lengths.md names where the sources come from and their
licences.

Each answer counts as its ln(length), less the mean of its model, over the standard deviation of its model. The mean of a prompt over
its models is what its hashed words are fitted to, by ridge regression (conjugate gradients). Weights are written to
`scheduler_svc/start_weights/weights.bin`: a signed byte for each feature, in steps of `STEP`, compressed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from laps_sd.contract.length_features import FEATURES, FeatureHash
from scheduler_svc.start_weights import STEP, WEIGHTS_FILE

SOURCES = {
    "oasst_model_eval": 1.5,
    "arena_hard_v0.1_many": 3.0,
    "arena_hard_v2.0_many": 1.5,
    "oasst_eval": 1.0,
    "mt_bench": 2.0,
    "xstest": 1.0,
    "llm_logbook": 2.0,
    "expertqa": 0.5,
    "hh_helpful_base": 0.3,
    "gpteacher_codegen": 0.12,
    "gsm8k": 0.1,
    "self_instruct": 0.05,
}
"""Weight of a prompt by its source: more for chat, which is where words learned elsewhere help most."""
LEFT_OUT = frozenset({"30b-chip2"})
"""Models whose answers are not those of a chat model."""
FEWEST_ANSWERS = 30
"""Answers of a model without which it has no mean of its own, and is left out."""
MOST_MODELS = 20
MODELS_POWER = 0.25
"""A prompt counts as the number of its models to this power. The mean over many models has less noise, but what
the words leave open is the same for one model and for all."""
RIDGE = 6.0
ROUNDS = 300
"""Most rounds of conjugate gradients."""

Floats = npt.NDArray[np.float64]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the answers of a source that count."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        row
        for row in rows
        if not row.get("turn")
        and not row.get("cut")
        and not row.get("judges")
        and row["model"] not in LEFT_OUT
    ]


def prompts_of(rows: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Return each prompt with its standardised ln(length), the mean over its models, and their number."""
    by_model = defaultdict(list)
    for row in rows:
        by_model[row["model"]].append(math.log(max(1, row["output_tokens"])))
    scales = {
        model: (float(np.mean(found)), max(0.3, float(np.std(found))))
        for model, found in by_model.items()
        if len(found) >= FEWEST_ANSWERS
    }
    answers: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["model"] in scales:
            mean, spread = scales[row["model"]]
            log_length = math.log(max(1, row["output_tokens"]))
            answers[row["prompt"]][row["model"]].append((log_length - mean) / spread)
    return [
        (prompt, float(np.mean([np.mean(each) for each in found.values()])), len(found))
        for prompt, found in answers.items()
    ]


class Prompts:
    """Prompts as rows of a sparse matrix, all values of a row equal, with their targets and weights."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self.targets: list[float] = []
        self.weights: list[float] = []

    def add(self, features: list[int], target: float, weight: float) -> None:
        """Add a prompt; the weights of its features are averaged as `PromptLengths` does."""
        self._rows += [len(self.targets)] * len(features)
        self._columns += features
        self._values += [1 / math.sqrt(len(features) + 1)] * len(features)
        self.targets.append(target)
        self.weights.append(weight)

    def fitted(self) -> Floats:
        """Return the weights of all features by ridge regression, with an intercept that is dropped."""
        rows, columns = np.array(self._rows), np.array(self._columns)
        values, targets = np.array(self._values), np.array(self.targets)
        weights = np.array(self.weights) / np.mean(self.weights)
        targets = targets - np.average(targets, weights=weights)

        def times(w: Floats) -> Floats:
            scores = np.bincount(rows, values * w[columns], len(targets)) * weights
            product: Floats = np.bincount(columns, values * scores[rows], FEATURES) + RIDGE * w
            return product

        w = np.zeros(FEATURES)
        residual: Floats = np.bincount(columns, values * (weights * targets)[rows], FEATURES).astype(
            np.float64
        )
        direction, square = residual.copy(), float(residual @ residual)
        for _ in range(ROUNDS):
            product = times(direction)
            step = square / (direction @ product)
            w += step * direction
            residual -= step * product
            before, square = square, float(residual @ residual)
            if square < 1e-10:
                break
            direction = residual + square / before * direction
        return w


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the sources, NAME.jsonl.gz each")
    parser.add_argument("--output", type=Path, default=WEIGHTS_FILE, help="default: %(default)s")
    options = parser.parse_args()
    hashed, prompts = FeatureHash(), Prompts()
    for source, weight in SOURCES.items():
        found = prompts_of(rows_of(options.folder / f"{source}.jsonl.gz"))
        for prompt, target, models in found:
            features = hashed.features_of(prompt)
            if features:
                prompts.add(features, target, weight * min(models, MOST_MODELS) ** MODELS_POWER)
        print(f"{source}: {len(found)} prompts")
    weights = np.clip(np.round(prompts.fitted() / STEP), -127, 127).astype(np.int8)
    options.output.write_bytes(zlib.compress(weights.tobytes(), 9))
    print(f"{options.output}: {options.output.stat().st_size} bytes, {np.count_nonzero(weights)} weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
