"""Loading of a model pair into an engine."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import torch

from laps_sd.service.model_dir import end_ids
from laps_sd.service.tokenizer_match import vocabulary_digest
from worker_svc.engine.cpu import kernels
from worker_svc.engine.cpu.quantised import PANEL
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.facts import facts, model_words
from worker_svc.engine.interface import ComputedBy, Drafter, ModelError
from worker_svc.engine.length_probe.probe import LengthProbe
from worker_svc.engine.models.dtypes import dtype_for
from worker_svc.engine.models.fingerprint import fingerprint
from worker_svc.engine.models.load import check_tokenizers, check_vocabularies, load_packed
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.tokenizer import load_tokenizer
from worker_svc.engine.options import EngineOptions, LoadOptions
from worker_svc.engine.quantisation.linear import VERSION as QUANTISATION_VERSION
from worker_svc.engine.sampling.formats import Formats

# Enters the fingerprint: change it with `sampling.counter`.
NOISE_VERSION = "gumbel-2"
# Wall clock, at most about this, that loading spends on measuring the cost of rows and draft steps.
CALIBRATION_S = 1.0


def load_engine(
    target_dir: str | Path, draft_dir: str | Path | None = None, options: LoadOptions | None = None
) -> SpeculativeEngine:
    """Load a model pair and return its engine, which has measured its costs.

    Raises ModelError in one sentence, or ValueError for a bad option.
    """
    options = options or LoadOptions()
    device = _device(options.device)
    target_path = Path(target_dir)
    options = replace(options, dtype=dtype_for(options.dtype, target_path, device))
    if options.drafter == "model" and draft_dir is None:
        raise ValueError("drafter model needs a draft model")
    draft_path = None
    if draft_dir is not None and options.drafter not in ("lookup", "none"):
        draft_path = Path(draft_dir)
    _check_deterministic(options, device)
    if draft_path is not None:
        check_tokenizers(target_path, draft_path)
    kernels.use_threads(options.threads, options.cores)
    target = _model(target_path, "target", device, options, deterministic=options.deterministic)
    _check_exact(options, target)
    tokenizer = load_tokenizer(target_path)
    eos_ids = frozenset(token for token in end_ids(target_path) if token < target.shape.vocab_size)
    draft = None
    if draft_path is not None:
        # The draft's tokens are only guesses: its arithmetic may differ from batch to batch.
        draft = _model(draft_path, "draft", device, options, deterministic=False)
        check_vocabularies(target_path, target, draft_path, draft)
    engine = SpeculativeEngine(
        target,
        draft,
        _engine_options(options, target, draft),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        formats=None
        if tokenizer is None
        else Formats(target_path / "tokenizer.json", target.shape.vocab_size, eos_ids),
        probe=_probe(target_path, target) if options.length_probe else None,
        fingerprint=_fingerprint(target_path, draft_path, options, eos_ids),
        vocabulary=vocabulary_digest(target_path),
    )
    engine.calibrate(CALIBRATION_S if options.draft_len is None else 0.0)
    engine.computed_by = ComputedBy(
        target.path,
        options.dtype,
        _threads(target, options),
        (target.bytes_read or 0) / engine.lengths.plain(1),
    )
    engine.facts = facts(
        _models_in_words(target_path, target, draft_path, draft, options.dtype),
        _engine_in_words(target, draft, options, engine.options, engine.computed_by),
        engine.capacity,
        bytes_per_token=sum(_bytes_per_token(model) for model in (target, draft) if model is not None),
    )
    return engine


def _check_deterministic(options: LoadOptions, device: torch.device) -> None:
    """Raise ModelError or ValueError if no model could be deterministic with these options on this device."""
    if not options.deterministic:
        return
    if device.type != "cpu":
        raise ModelError(
            f"deterministic needs a CPU: on {device} the bits of a product depend on the other rows; leave the setting out"
        )
    if options.dtype == "float16":
        raise ValueError("deterministic needs dtype float32 or bfloat16, not float16")


def _check_exact(options: LoadOptions, target: PackedModel) -> None:
    """Raise ModelError if this target is not deterministic, and the options require it."""
    if options.deterministic and options.dtype != "float32" and not target.exact:
        raise ModelError(
            f"deterministic in {options.dtype} needs a target of the Llama family, of sizes that are "
            f"multiples of {PANEL}, on an x86 CPU with AVX2; "
            "leave the setting out, or use float32"
        )


def _models_in_words(
    target_path: Path, target: PackedModel, draft_path: Path | None, draft: PackedModel | None, dtype: str
) -> str:
    words = model_words("target", target_path, target.kind, target.parameters)
    kinds = target.quantised
    if draft is not None and draft_path is not None:
        words += ", " + model_words("draft", draft_path, draft.kind, draft.parameters)
        kinds |= draft.quantised
    return f"{words}, {dtype}" + (f", weights {' and '.join(sorted(kinds))}" if kinds else "")


def _engine_in_words(
    target: PackedModel,
    draft: PackedModel | None,
    given: LoadOptions,
    options: EngineOptions,
    computed_by: ComputedBy,
) -> str:
    words = str(target.device)
    if computed_by.threads:
        words += f", {computed_by.threads} thread{'s' * (computed_by.threads > 1)}"
        if given.cores:
            words += f" on cores {', '.join(map(str, given.cores))}"
    words += f", {computed_by.dtype}; {target.path_in_words}"
    if draft is not None and draft.path_in_words != target.path_in_words:
        words += f"; the draft: {draft.path_in_words}"
    if computed_by.weight_bytes_per_s:
        words += f"; weights are read at {computed_by.weight_bytes_per_s / 1e9:.1f} GB/s"
    drafter = {
        None: "none, plain decoding",
        Drafter.LOOKUP: "prompt lookup",
        Drafter.MODEL: "the draft model",
        Drafter.EITHER: "the draft model or prompt lookup",
    }
    words += f"; draft tokens: {drafter[options.drafter]}"
    return words + ("; equal seeds give equal text" if target.exact else "; the text may depend on the batch")


def _threads(target: PackedModel, options: LoadOptions) -> int:
    """Return the threads that compute a forward of the target; 0: not on the CPU."""
    if target.device.type != "cpu":
        return 0
    return options.threads if target.all_by_kernels else torch.get_num_threads()


def _device(name: str) -> torch.device:
    """Return a device that tensors can be made on. Raises ModelError."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _model(
    path: Path, role: str, device: torch.device, options: LoadOptions, *, deterministic: bool | None
) -> PackedModel:
    return load_packed(
        path,
        role=role,
        dtype=getattr(torch, options.dtype),
        device=device,
        max_length=options.max_length,
        deterministic=deterministic,
        fused=options.fused,
        quantization=options.quantization,
        trust_remote_code=options.trust_remote_code,
    )


def _engine_options(options: LoadOptions, target: PackedModel, draft: PackedModel | None) -> EngineOptions:
    """Return the options of an engine of these models, with the size of its pools."""
    blocks = options.blocks
    if blocks is None and options.memory_bytes is not None:
        token_bytes = sum(_bytes_per_token(model) for model in (target, draft) if model is not None)
        blocks = options.memory_bytes // (token_bytes * options.block_size)
        if not blocks:
            raise ModelError(
                f"{options.memory_bytes} bytes of KV hold no block of {options.block_size} tokens, which takes "
                f"{token_bytes * options.block_size}: set a larger LAPS_SD_KV_MEMORY_BYTES"
            )
    elif blocks is None:
        blocks = options.slots * -(-(options.max_length + options.max_draft_len) // options.block_size)
    drafter = Drafter.EITHER if options.drafter == "auto" else Drafter.MODEL
    if draft is None:
        drafter = Drafter.LOOKUP
    return EngineOptions(
        slots=options.slots,
        target_blocks=blocks,
        draft_blocks=blocks if draft is not None else 0,
        block_size=options.block_size,
        max_length=options.max_length,
        max_draft_len=options.max_draft_len,
        prefill_chunk=options.prefill_chunk,
        max_round_s=options.max_round_s,
        draft_len=options.draft_len,
        host_bytes=options.host_bytes,
        threads=_threads(target, options) or 1,
        drafter=None if options.drafter == "none" else drafter,
        prefix_reuse_tokens=options.prefix_reuse_tokens,
    )


def _probe(target_path: Path, target: PackedModel) -> LengthProbe | None:
    """Return a probe of the middle layer; None if the hidden states of this architecture cannot be read."""
    if target.hidden_size is None:
        logging.getLogger(__name__).warning(
            "no output lengths are predicted: the layers of the target model are not found"
        )
        return None
    return LengthProbe(fingerprint(target_path), target.shape.layers // 2, target.hidden_size)


def _fingerprint(target: Path, draft: Path | None, options: LoadOptions, eos_ids: frozenset[int]) -> str:
    """Return a hash of all that decides the text of an engine. `eos_ids` may come from files that the models'
    fingerprints leave out.

    Determinism counts as it is set: where the setting leaves it open, machines of different kinds share a pool.
    """
    deterministic = options.dtype == "float32" if options.deterministic is None else options.deterministic
    names = [
        NOISE_VERSION,
        options.dtype,
        str(deterministic),
        ",".join(map(str, sorted(eos_ids))),
        fingerprint(target, code=options.trust_remote_code),
        fingerprint(draft, code=options.trust_remote_code) if draft else "-",
    ]
    if options.quantization != "none":
        names += [options.quantization, QUANTISATION_VERSION]
    return hashlib.blake2b(":".join(names).encode(), digest_size=16).hexdigest()


def _bytes_per_token(model: PackedModel) -> int:
    shape = model.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_size * model.dtype.itemsize
