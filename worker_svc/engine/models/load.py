"""Loads a model from its directory, and checks that a pair of models goes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from laps_sd.service import tokenizer_match
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.models.linears import replace_conv1d
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.shape import INSTEAD
from worker_svc.engine.models.weights import read_model
from worker_svc.engine.quantisation.checkpoint import is_quantised, load_quantised
from worker_svc.engine.quantisation.linear import Quantization, kinds_of, left_out, quantise_model


def load_packed(
    directory: Path,
    *,
    role: str,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int,
    deterministic: bool | None,
    fused: bool,
    quantization: Quantization = "none",
    trust_remote_code: bool = False,
) -> PackedModel:
    """Load one model, lay out its weights, and compare it with its plain forward. Raises ModelError in one
    sentence.

    `deterministic` as in `PackedModel`.
    """
    if not (directory / "config.json").is_file():
        raise ModelError(f"there is no {role} model in {directory}: config.json is missing")
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # the causes of its warnings are raised below
    transformers_logging.disable_progress_bar()
    try:
        if is_quantised(directory):
            model = load_quantised(directory, dtype=dtype, trust_remote_code=trust_remote_code)
            info: dict[str, Any] = {}
        else:
            model, info = read_model(directory, dtype=dtype, trust_remote_code=trust_remote_code)
    except ModelError as error:
        raise ModelError(f"the {role} model in {directory} {error}") from error
    # transformers, safetensors and json raise a dozen kinds; each means "cannot be loaded".
    except Exception as error:
        raise ModelError(f"the {role} model in {directory} cannot be loaded: {first_line(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    wrong = [*info.get("missing_keys", ()), *(key[0] for key in info.get("mismatched_keys", ()))]
    if wrong:
        raise ModelError(
            f"the {role} model in {directory} lacks weights or has them in another shape: {sorted(wrong)[0]}"
        )
    replace_conv1d(model)
    quantise_model(model, quantization)
    if quantization != "none" and (weight := left_out(model)) is not None:
        raise ModelError(
            f"the {role} model ({type(model).__name__}) cannot be quantised: {weight} and others are no linear "
            f"layers of a width that groups divide; leave LAPS_SD_QUANTIZATION out, or {INSTEAD}"
        )
    without_kernels = kernels.why_not(device, dtype, kernels.GRAIN)
    if without_kernels and kinds_of(model):
        raise ModelError(
            f"quantised weights need the kernels in C ({without_kernels}): LAPS_SD_ENGINE=vllm serves them elsewhere"
        )
    packed = PackedModel(model.to(device), role=role, max_length=max_length, deterministic=deterministic)
    packed.self_check(fused=fused)
    return packed


def check_tokenizers(target: Path, draft: Path) -> None:
    """Raise ModelError unless a token id means the same to both models, few excepted; either may have ids that
    the other lacks.
    """
    try:
        tokenizer_match.check_tokenizers(target, draft)
    except ValueError as error:
        raise ModelError(str(error)) from error


def check_vocabularies(target_dir: Path, target: PackedModel, draft_dir: Path, draft: PackedModel) -> None:
    """Raise ModelError if the vocabularies differ in size and a tokenizer is missing: with both, they were
    compared token by token.
    """
    compared = all((directory / "tokenizer.json").is_file() for directory in (target_dir, draft_dir))
    if not compared and target.shape.vocab_size != draft.shape.vocab_size:
        raise ModelError(
            f"target and draft have vocabularies of {target.shape.vocab_size} and {draft.shape.vocab_size} tokens: "
            "a token id must mean the same to both"
        )
