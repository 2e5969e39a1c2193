"""Loading of vLLM's engine core for the engine over it.

The import raises VersionError with a vLLM that is not supported.
"""

# ruff: noqa: E402 -- another version of vLLM may lack what is imported: its number is checked before

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import vllm
from pydantic import ValidationError

from laps_vllm.versions import VersionError, check_names, check_version

check_version(vllm.__version__)

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from laps_sd.service.model_dir import end_ids, served_name
from laps_sd.service.tokenizer_match import vocabulary_digest
from laps_vllm import known_faults
from worker_svc.engine.facts import model_words, stored_parameters
from worker_svc.engine.interface import ModelError
from worker_svc.engine.length_probe.probe import LengthProbe
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.models.fingerprint import fingerprint as fingerprint_of
from worker_svc.engine.models.tokenizer import load_tokenizer
from worker_svc.engine.vllm.adapters import arguments_for, identity, load_adapters
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.fingerprint import fingerprint
from worker_svc.engine.vllm.grammars import bound_formats
from worker_svc.engine.vllm.names import check_engine_names
from worker_svc.engine.vllm.options import VllmOptions
from worker_svc.engine.vllm.parameters import Rules, TokenChooser
from worker_svc.engine.vllm.scheduler import round_scheduler

__all__ = ["load_core", "load_engine", "models_in_words", "rules_for"]

CPU_MEMORY_BYTES = 2**30
"""KV on a CPU unless a size is set: vLLM would take a share of all the memory of the machine."""
CPU_BLOCK_SIZE = 32
"""Tokens per block on a CPU unless set: the smallest that vLLM's attention takes there, for short contexts."""
MAX_LOGPROBS = 64


def load_engine(
    options: VllmOptions, on_lost_rank: Callable[[], None] | None = None
) -> tuple[VllmEngine, tuple[str, ...]]:
    """Load a model into vLLM and return its engine, and warnings: sentences on known faults of this vLLM.

    `on_lost_rank` is called in a thread of vLLM's when a process of one of several ranks has ended. Raises
    ModelError in one sentence.
    """
    try:
        check_names(vllm.__version__, Scheduler, Request, SchedulerOutput, KVCacheManager, BlockPool)
    except VersionError as error:
        raise ModelError(str(error)) from error
    core, chooser = load_core(options, on_lost_rank)
    adapters = load_adapters(core, options.adapters)
    tokenizer = load_tokenizer(options.model)
    rules = rules_for(core.vllm_config, chooser)
    engine = VllmEngine(
        core,
        rules,
        slots=options.slots,
        fingerprint=fingerprint(
            core.vllm_config, chooser, rules.eos_ids, vllm.__version__, identity(options.adapters)
        ),
        vocabulary=vocabulary_digest(options.model),
        adapters=adapters,
        decode=None if tokenizer is None else tokenizer.decode,
        decode_all=None if tokenizer is None else tokenizer.decode_all,
        formats=tokenizer is not None,
        share_prefixes=options.share_prefixes,
        max_round_s=options.max_round_s,
        probe=_probe(core.vllm_config, chooser) if options.length_probe else None,
        models=models_in_words(core.vllm_config, options.model),
    )
    return engine, tuple(_warnings(core.vllm_config, chooser))


def load_core(
    options: VllmOptions, on_lost_rank: Callable[[], None] | None = None
) -> tuple[EngineCore, TokenChooser]:
    """Return vLLM's core with the model loaded, and what chooses tokens in it. Raises ModelError."""
    known = {one.name for one in fields(EngineArgs)}
    for name in options.arguments:
        if name not in known:
            raise ModelError(f"LAPS_SD_VLLM_ARGS has {name!r}, which vLLM {vllm.__version__} does not know")
    if options.speculative is None:
        # A request whose logits are NaN ends with an error. With speculation vLLM names the wrong request.
        os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    try:
        config = EngineArgs(**_arguments(options)).create_engine_config()
        chooser = _chooser(config, options)
        _check_overlap(config, chooser, options)
        if chooser is TokenChooser.PROCESSOR:
            from worker_svc.engine.vllm.coupled_noise import PATH

            config.model_config.logits_processors = [PATH]
        check_engine_names(vllm.__version__, first_runner=chooser is TokenChooser.REPLACED)
        executor = Executor.get_class(config)
        core = EngineCore(config, executor, log_stats=False, executor_fail_callback=on_lost_rank)
        bound_formats(core)
        return core, chooser
    except ModelError:
        raise
    except VersionError as error:
        raise ModelError(str(error)) from error
    except Exception as error:  # vLLM raises a dozen types; each means that the model cannot be served
        raise ModelError(f"vLLM cannot load {options.model}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return why vLLM refused a configuration, in one line. The first line of pydantic's errors only counts them."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    one = error.errors()[0]
    field = ".".join(map(str, one["loc"]))
    # Without a field it is a check of vLLM's own, and the value is the whole configuration.
    message = first_line(ValueError(one["msg"].removeprefix("Value error, ")))
    return f"{field}: {message}, got {one['input']!r}" if field else message


def models_in_words(config: Any, target: Path) -> str:
    """Return the models of this configuration of vLLM in words."""
    model = config.model_config
    words = model_words(
        "target",
        target,
        str(getattr(model, "architecture", "unknown architecture")),
        stored_parameters(target),
    )
    speculative = config.speculative_config
    if speculative is not None:
        # For methods without a model of their own it is the target, or the name of the method.
        draft = getattr(speculative, "model", None)
        own = draft and draft not in (speculative.method, model.model)
        named = f" {served_name(Path(str(draft)))}" if own else ""
        words += f", draft tokens by {speculative.method}{named}"
    return f"{words}, {str(model.dtype).removeprefix('torch.')}"


def rules_for(config: Any, chooser: TokenChooser) -> Rules:
    """Return the rules for requests in this configuration of vLLM."""
    return Rules(
        chooser,
        second_runner=config.use_v2_model_runner,
        speculates=config.speculative_config is not None,
        on_cpu=config.device_config.device_type == "cpu",
        version=vllm.__version__,
        eos_ids=_end_ids(config.model_config),
    )


def _arguments(options: VllmOptions) -> dict[str, Any]:
    speculative = options.speculative
    drafts = int(speculative.get("num_speculative_tokens") or 0) if speculative else 0
    residents = max(options.residents, options.slots)
    arguments = {
        "model": str(options.model),
        "dtype": options.dtype,
        "max_model_len": options.max_length,
        "max_num_seqs": residents,
        "max_num_active_seqs": options.slots,
        "max_num_batched_tokens": max(options.prefill_chunk + options.slots * (2 * drafts + 2), residents),
        "enable_prefix_caching": True,
        "async_scheduling": {"auto": None, "on": True, "off": False}[options.overlap],
        "scheduler_cls": f"{round_scheduler.__module__}.{round_scheduler.__name__}",
        "speculative_config": None if speculative is None else dict(speculative),
        "max_logprobs": MAX_LOGPROBS,
        "disable_log_stats": True,
        "skip_tokenizer_init": not (options.model / "tokenizer.json").is_file(),
        "trust_remote_code": options.trust_remote_code,
        "num_gpu_blocks_override": None if options.blocks is None else options.blocks + 1,
        "kv_cache_memory_bytes": options.memory_bytes,
    }
    arguments |= arguments_for(options.adapters, on_cpu=_on_cpu())
    if _on_cpu():
        arguments["block_size"] = CPU_BLOCK_SIZE
        arguments["kv_cache_memory_bytes"] = options.memory_bytes or CPU_MEMORY_BYTES
    return arguments | dict(options.arguments)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _chooser(config: Any, options: VllmOptions) -> TokenChooser:
    if options.sampling == "own":
        return TokenChooser.VLLM
    if config.use_v2_model_runner:
        return TokenChooser.PROCESSOR
    if config.device_config.device_type == "cpu" and config.parallel_config.world_size == 1:
        return TokenChooser.REPLACED
    raise ModelError(
        "vLLM uses its first model runner for this configuration, and there LAPS_SD_VLLM_SAMPLING=coupled works"
        " on one CPU only: set LAPS_SD_VLLM_SAMPLING=own, or leave out what needs that runner"
    )


def _check_overlap(config: Any, chooser: TokenChooser, options: VllmOptions) -> None:
    overlaps = config.scheduler_config.async_scheduling
    if options.overlap == "on" and not overlaps:
        raise ModelError(
            "LAPS_SD_VLLM_OVERLAP=on, and vLLM has no async scheduling on this device or with these settings:"
            " set it to auto or off"
        )
    if overlaps and chooser is TokenChooser.REPLACED:
        raise ModelError(
            "LAPS_SD_VLLM_SAMPLING=coupled chooses tokens between two steps with this model runner, so that they"
            " cannot overlap: set LAPS_SD_VLLM_OVERLAP=off, or LAPS_SD_VLLM_SAMPLING=own"
        )


def _probe(config: Any, chooser: TokenChooser) -> LengthProbe | None:
    """Return a probe by the hidden states after the last layer; None where the engine does not see them."""
    model = config.model_config
    directory = Path(model.model)
    if chooser is not TokenChooser.REPLACED or not directory.is_dir():
        logging.getLogger(__name__).info(
            "no output lengths are predicted: over vLLM that needs its first model runner on one CPU and"
            " LAPS_SD_VLLM_SAMPLING=coupled"
        )
        return None
    layers = model.hf_text_config.num_hidden_layers
    return LengthProbe(fingerprint_of(directory), layers, model.get_hidden_size())


def _end_ids(model_config: Any) -> list[int]:
    vocabulary = model_config.get_vocab_size()
    return sorted(token for token in end_ids(Path(model_config.model)) if token < vocabulary)


def _warnings(config: Any, chooser: TokenChooser) -> Iterator[str]:
    """Yield known faults. With the coupling vLLM's sampler is not used, and neither are its seeds."""
    if chooser is TokenChooser.VLLM:
        yield from known_faults.warnings(config, vllm.__version__, spare_lora_place=True)
