"""LoRA adapters of the engine over vLLM.

All of them stay loaded, so that a round may have requests of each of them (our choice): vLLM would refuse a batch of more
adapters than it has places, and the order of requests is the scheduler's. A place takes device memory for the largest
rank, `max_lora_rank`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.models.fingerprint import fingerprint_of_files

__all__ = ["arguments_for", "identity", "load_adapters"]

CONFIG = "adapter_config.json"
RANKS: tuple[int, ...] = tuple(sorted(get_args(MaxLoRARanks)))
"""Ranks for which vLLM has places."""


def arguments_for(adapters: Mapping[str, Path], *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM with which all adapters fit. Raises ModelError."""
    if not adapters:
        return {}
    rank = max(_place(name, directory) for name, directory in adapters.items())
    # vLLM 0.32 on a CPU computes requests without an adapter with that of the last place, which stays empty.
    return {"enable_lora": True, "max_loras": len(adapters) + on_cpu, "max_lora_rank": rank}


def load_adapters(core: EngineCore, adapters: Mapping[str, Path]) -> dict[str, LoRARequest]:
    """Load all adapters, and return for each name what names it to vLLM. Raises ModelError."""
    loaded = {}
    for number, (name, directory) in enumerate(sorted(adapters.items()), start=1):
        loaded[name] = LoRARequest(name, number, str(directory))
        try:
            core.add_lora(loaded[name])
            core.pin_lora(number)
        except Exception as error:  # vLLM raises many types; each means that the adapter cannot be served
            raise ModelError(f"vLLM cannot load the adapter {name!r}: {first_line(error)}") from error
    return loaded


def identity(adapters: Mapping[str, Path]) -> list[tuple[str, str]]:
    """Return the name of each adapter with a hash of its files: workers with equal ones give the same text."""
    return [(name, fingerprint_of_files(directory, CONFIG)) for name, directory in sorted(adapters.items())]


def _place(name: str, directory: Path) -> int:
    """Return the smallest rank of vLLM's places for which the adapter is small enough."""
    file = directory / CONFIG
    try:
        config = json.loads(file.read_text())
        ranks = [int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values())]
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(f"the adapter {name!r}: {file} cannot be read: {first_line(error)}") from error
    for place in RANKS:
        if place >= max(ranks):
            return place
    raise ModelError(f"the adapter {name!r} has rank {max(ranks)}, and vLLM takes at most {RANKS[-1]}")
