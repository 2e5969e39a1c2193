"""The heading of a run: sizes of the models, lengths of the prompts, threads."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench._engine.cells import RAMP, Cell
from bench._table.plan import threads_in_words
from worker_svc.engine.facts import stored_parameters

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def facts_of(options: argparse.Namespace, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the sizes of both models and, for each kind, the shortest, mean and longest prompt in tokens."""
    lengths: dict[str, list[int]] = {}
    for cell in cells:
        if cell.kind != RAMP:
            lengths.setdefault(cell.kind, []).extend(len(one.ids) for one in cell.requests)
    models = {}
    for role in ("target", "draft"):
        parameters = stored_parameters(getattr(options, role)) or 0
        models[role] = {"parameters": parameters, "bytes": parameters * ITEM_BYTES[options.dtype]}
    return {
        "models": models,
        "prompt_tokens": {
            kind: [min(found), round(statistics.fmean(found)), max(found)] for kind, found in lengths.items()
        },
    }


def models_in_words(facts: Mapping[str, Any], dtype: str) -> str:
    """Return the sizes of the models."""
    return ", ".join(
        f"{role} {found['parameters'] / 1e6:.1f} M weights ({found['bytes'] / 1e6:.1f} MB in {dtype})"
        for role, found in facts["models"].items()
    )


def heading(facts: Mapping[str, Any], options: argparse.Namespace) -> str:
    """Return the facts in a few lines."""
    models = models_in_words(facts, options.dtype)
    prompts = "; ".join(
        f"{kind} {mean} ({least} to {most})" for kind, (least, mean, most) in facts["prompt_tokens"].items()
    )
    return (
        f"models: {models}\nprompts, mean tokens of each kind: {prompts}\n"
        f"outputs: {options.tokens} tokens at most; {threads_in_words(options.threads)}; speeds count CPU time of all threads"
    )
