"""Loading of the engine that the settings describe."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from laps_sd.errors import StartupError
from laps_sd.service.adapters import adapter_directories, adapter_names
from laps_sd.service.cores import MOST_THREADS, usable_cores
from laps_sd.service.hub import local_model
from laps_sd.service.log import get_logger
from laps_sd.service.model_dir import LONGEST_DEFAULT_TOKENS, context_tokens, stored_dtype
from laps_sd.service.tokenizer_match import check_tokenizers
from laps_vllm.versions import VersionError
from worker_svc.engine.interface import Engine, ModelError
from worker_svc.engine.options import LoadOptions
from worker_svc.engine.vllm.options import VllmOptions
from worker_svc.fake.paced import paced
from worker_svc.settings import WorkerSettings
from worker_svc.vllm_arguments import arguments_of

log = get_logger(__name__)

RESIDENTS_PER_SLOT = 4
"""Requests with KV for each slot of vLLM, unless set (our choice): a place costs little, an eviction a prefill."""
DRAFT_TOKENS = 4
"""Draft tokens of vLLM in a round, unless set (our choice): it drafts as many in every round."""
LOOKUP_TOKENS = 4
"""Tokens that vLLM's prompt lookup compares at most (our choice)."""
DEMO = Path(__file__).parent / "demo"
"""Directory of the shipped model pair: `target/` and `draft/`."""


def load(settings: WorkerSettings) -> Engine:
    """Return the engine that the settings describe.

    Raises StartupError with one sentence if it cannot be loaded.
    """
    by_name = {"fake": _fake_engine, "vllm": _vllm_engine}
    engine = by_name.get(settings.engine, _model_engine)(settings)
    if not (settings.round_floor_s or settings.prefill_floor_s):
        return engine
    return paced(engine, settings.round_floor_s, settings.prefill_floor_s)


def _model_engine(settings: WorkerSettings) -> Engine:
    target, draft = model_directories(settings)
    draft = _used_draft(settings, target, draft)
    threads, cores = _threads(settings)
    _limit_threads(threads)
    # What these imports make stays, and the collector would go through it again and again.
    gc.disable()
    try:
        import torch
        from transformers.utils import logging as model_logging

        from worker_svc.engine.engine import is_out_of_memory
        from worker_svc.engine.load import load_engine
        from worker_svc.engine.models.errors import first_line
    except ImportError as error:
        raise StartupError(
            f"The worker needs PyTorch and transformers ({error}): pip install 'laps-sd[worker]', "
            "or LAPS_SD_ENGINE=fake."
        ) from error
    finally:
        gc.freeze()
        gc.enable()
    torch.set_num_threads(threads)
    model_logging.set_verbosity_error()
    model_logging.disable_progress_bar()
    try:
        engine = load_engine(target, draft, _load_options(settings, target, threads, cores))
    except (ModelError, ValueError, OSError) as error:
        raise StartupError(f"The model pair cannot be served: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(
            f"The device has no memory for the model pair and its KV ({first_line(error)}): set a smaller "
            "LAPS_SD_KV_MEMORY_BYTES (or LAPS_SD_KV_BLOCKS), LAPS_SD_SLOTS or LAPS_SD_CONTEXT_TOKENS, or serve smaller models."
        ) from error
    if engine.all_by_kernels:  # what is left for torch is small
        torch.set_num_threads(1)
    return engine


def _load_options(
    settings: WorkerSettings, target: Path, threads: int, cores: tuple[int, ...]
) -> LoadOptions:
    return LoadOptions(
        device=settings.device,
        threads=threads,
        cores=cores,
        dtype=settings.dtype,
        quantization=settings.quantization,
        slots=settings.slots,
        blocks=settings.kv_blocks,
        memory_bytes=settings.kv_memory_bytes,
        block_size=settings.block_size,
        max_length=context_tokens(target, settings.context_tokens) or LONGEST_DEFAULT_TOKENS,
        max_draft_len=settings.max_draft_len,
        draft_len=settings.draft_len,
        deterministic=settings.deterministic,
        prefill_chunk=settings.prefill_chunk,
        max_round_s=settings.max_round_s,
        host_bytes=settings.host_bytes,
        drafter=settings.drafter,
        prefix_reuse_tokens=settings.prefix_reuse_tokens,
        trust_remote_code=settings.trust_remote_code,
        length_probe=settings.length_probe,
    )


def _threads(settings: WorkerSettings) -> tuple[int, tuple[int, ...]]:
    """Return the number of threads, and a CPU for each if they are to be pinned. Raises StartupError."""
    usable = usable_cores()
    threads = settings.threads or (1 if settings.engine == "vllm" else min(usable.threads, MOST_THREADS))
    if excess := usable.excess(threads):
        raise StartupError(f"LAPS_SD_THREADS {excess}.")
    return threads, usable.cpus[:threads] if settings.pin_threads else ()


def _limit_threads(threads: int) -> None:
    """Set the threads of torch's operations, before torch is imported. They sleep as soon as one is done."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")


def _vllm_engine(settings: WorkerSettings) -> Engine:
    arguments = arguments_of(settings.vllm_args)
    named = arguments.pop("model", None)
    target, draft = model_directories(settings) if named is None else (_named_model(named), None)
    draft = _used_draft(settings, target, draft)
    speculative = arguments.pop("speculative_config", _speculation(settings, draft))
    _limit_threads(_threads(settings)[0])
    # Before vLLM is imported. Its core runs in this process, which is the engine's own.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # Threads that are bound to cores would share these with the next worker of this machine.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # It sends statistics about its use to its authors otherwise.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "DEBUG" if settings.log_level == "debug" else "WARNING")
    try:
        from worker_svc.engine.vllm.loading import load_engine
    except VersionError as error:
        raise StartupError(f"The model cannot be served: {error}.") from error
    except ImportError as error:
        raise StartupError(
            f"LAPS_SD_ENGINE=vllm needs vLLM in the Python environment of the worker ({error}): install vllm "
            "there, or start the worker with an interpreter that has it (laps-sd up --worker-python)."
        ) from error
    residents = settings.vllm_residents or RESIDENTS_PER_SLOT * settings.slots
    try:
        engine, warnings = load_engine(
            VllmOptions(
                model=target,
                slots=settings.slots,
                residents=residents,
                max_length=context_tokens(target, settings.context_tokens) or LONGEST_DEFAULT_TOKENS,
                prefill_chunk=settings.prefill_chunk,
                max_round_s=settings.max_round_s,
                dtype=stored_dtype(target) if settings.dtype == "auto" else settings.dtype,
                blocks=settings.kv_blocks,
                memory_bytes=settings.kv_memory_bytes,
                share_prefixes=settings.prefix_reuse_tokens > 0,
                sampling=settings.vllm_sampling,
                overlap=settings.vllm_overlap,
                trust_remote_code=settings.trust_remote_code,
                length_probe=settings.length_probe,
                adapters=_adapters(settings),
                speculative=speculative,
                arguments=arguments,
            ),
            _end_for_a_lost_rank,
        )
    except ModelError as error:
        raise StartupError(f"The model cannot be served: {error}.") from error
    for sentence in warnings:
        log.warning("a known fault of vLLM", fault=sentence)
    return engine


def _end_for_a_lost_rank() -> None:
    """End this process, the engine's own. No round can fail while none runs, and requests would come."""
    log.error("a process of vLLM's has ended, and the engine cannot go on without it")
    os._exit(1)


def _adapters(settings: WorkerSettings) -> dict[str, Path]:
    """Return the directory of each adapter. Raises StartupError."""
    found = {}
    for name, named in adapter_directories(settings.adapters).items():
        found[name] = local_model(named)
        if not found[name].is_dir():
            raise StartupError(
                f"There is no directory {named}: LAPS_SD_ADAPTERS must name directories of adapters or adapters of the"
                " Hugging Face hub."
            )
    return found


def _speculation(settings: WorkerSettings, draft: Path | None) -> dict[str, Any] | None:
    """Return vLLM's configuration of speculation that the settings describe, where its arguments have none."""
    tokens = min(DRAFT_TOKENS, settings.max_draft_len) if settings.draft_len is None else settings.draft_len
    if settings.drafter == "none" or not tokens:
        return None
    if settings.drafter == "lookup":
        return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": LOOKUP_TOKENS}
    if draft is None:
        return None
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": tokens}


def _used_draft(settings: WorkerSettings, target: Path, draft: Path | None) -> Path | None:
    """Return the draft if it is used, after a comparison of its tokenizer with the target's. Raises StartupError.

    The comparison takes a second, loading the models may take minutes.
    """
    if draft is None or settings.drafter in ("lookup", "none"):
        return None
    try:
        note = check_tokenizers(target, draft)
    except ValueError as error:
        raise StartupError(f"The model pair cannot be served: {error}") from error
    if note:
        log.info("the tokenizers differ a little", note=note)
    return draft


def model_directories(settings: WorkerSettings) -> tuple[Path, Path | None]:
    """Return the directories of target and draft (None: plain decoding).

    Raises StartupError if one is missing.
    """
    if settings.target is None:
        target: Path = DEMO / "target"
        draft: Path | None = DEMO / "draft"
        advice = "this installation lacks the demo pair; set LAPS_SD_TARGET and LAPS_SD_DRAFT"
    else:
        target = local_model(settings.target)
        draft = None if settings.draft is None else local_model(settings.draft)
        advice = (
            "LAPS_SD_TARGET and LAPS_SD_DRAFT must name model directories or models of the Hugging Face hub"
        )
    for path in (target, draft):
        if path is not None and not path.is_dir():
            raise StartupError(f"There is no directory {path}: {advice}.")
    return target, draft


def _named_model(named: str) -> Path:
    """Return the directory of the model that vLLM's arguments name. Raises StartupError."""
    target = local_model(Path(named))
    if not target.is_dir():
        raise StartupError(
            f"There is no directory {target}: the 'model' of LAPS_SD_VLLM_ARGS must name a model directory or"
            " a model of the Hugging Face hub."
        )
    return target


def _fake_engine(settings: WorkerSettings) -> Engine:
    from worker_svc.fake.engine import FakeCosts, FakeEngine
    from worker_svc.fake.script import lognormal_lengths

    # The tokens are scripted, but gateways have the demo model's limits.
    longest = context_tokens(DEMO / "target", settings.context_tokens) or LONGEST_DEFAULT_TOKENS
    blocks_per_slot = -(-(longest + settings.max_draft_len) // settings.block_size)
    return FakeEngine(
        slots=settings.slots,
        target_blocks=settings.kv_blocks or settings.slots * blocks_per_slot,
        block_size=settings.block_size,
        max_length=longest,
        max_draft_len=settings.max_draft_len,
        draft_len=min(4, settings.max_draft_len) if settings.draft_len is None else settings.draft_len,
        lengths=lognormal_lengths(settings.fake_output_tokens) if settings.fake_output_tokens else None,
        prefill_chunk=settings.prefill_chunk,
        max_round_s=settings.max_round_s,
        prefix_reuse_tokens=settings.prefix_reuse_tokens,
        costs=FakeCosts(round_s=settings.fake_round_s),
        time_scale=settings.fake_time_scale,
        deadly_seed=settings.fake_deadly_seed,
        adapters=adapter_names(settings.adapters),
    )
