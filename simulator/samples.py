"""Samples of recorded lengths, predictions and acceptance. Each file is read once per process: every seed
draws from the same files.
"""

from __future__ import annotations

import itertools
import statistics
from functools import cache
from pathlib import Path

from simulator.lengths import RecordedAnswer, read_answers
from simulator.traces import (
    RecordedAcceptance,
    read_acceptance,
    read_column,
    read_quantiles,
    read_texts,
    read_trace,
)
from simulator.workload import AcceptanceModel, Lengths

CODE_CHARACTERS_PER_TOKEN = 3.5

read_trace_cached = cache(read_trace)
read_acceptance_cached = cache(read_acceptance)
column = cache(read_column)


@cache
def client_quantiles(path: Path, name: str) -> tuple[list[float], list[list[float]]]:
    """Return the cumulative request rates and their quantiles."""
    found = read_quantiles(path, name)
    return list(itertools.accumulate(rate for rate, _ in found)), [quantiles for _, quantiles in found]


@cache
def code_tokens(path: Path) -> list[float]:
    """Return the lengths of reference programs, in tokens of about 3.5 characters."""
    return [len(code) / CODE_CHARACTERS_PER_TOKEN for code in read_texts(path, "code")]


@cache
def predictions(path: Path) -> list[tuple[int, int]]:
    """Return pairs (true length, predicted length); the prediction is the median length of the predicted
    class.
    """
    pairs = list(zip(read_column(path, "output_tokens"), read_column(path, "predicted_class"), strict=True))
    classes = sorted({predicted for _, predicted in pairs})
    medians = {
        each: round(statistics.median(true for true, predicted in pairs if predicted == each))
        for each in classes
    }
    return [(true, medians[predicted]) for true, predicted in pairs if true > 0]


@cache
def answers(path: Path, wanted: Lengths) -> list[RecordedAnswer]:
    """Return the recorded answers that match the description. ValueError if there are none."""
    found = [
        answer
        for answer in read_answers(path)
        if (not wanted.models or answer.model in wanted.models)
        and (not wanted.sources or answer.source in wanted.sources)
    ]
    if not found:
        raise ValueError(f"{path} has no answers of models {wanted.models}, sources {wanted.sources}")
    return found


@cache
def recordings(path: Path, wanted: AcceptanceModel) -> list[RecordedAcceptance]:
    """Return the recordings that match the description. ValueError if there are none."""
    found = [
        recorded
        for recorded in read_acceptance_cached(path)
        if (not wanted.runs or recorded.run in wanted.runs)
        and (not wanted.tasks or recorded.task in wanted.tasks)
        and (not wanted.categories or recorded.category in wanted.categories)
    ]
    if not found:
        raise ValueError(f"{path} has no recording of runs {wanted.runs}, tasks {wanted.tasks}")
    return found
