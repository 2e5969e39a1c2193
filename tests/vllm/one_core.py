"""One core of vLLM with the demo pair for many engines: a load takes half a minute, a scheduler nothing.

On a GPU it is vLLM's second model runner, without CUDA graphs; `LAPS_SD_TEST_VLLM_DTYPE` is its dtype there. What
two runs with other batches compute is equal on a GPU only with `VLLM_BATCH_INVARIANT=1`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.worker.contract import decode
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.sampling.stopping import Decode
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.fingerprint import fingerprint
from worker_svc.engine.vllm.loading import load_core, rules_for
from worker_svc.engine.vllm.options import VllmOptions
from worker_svc.engine.vllm.parameters import TokenChooser
from worker_svc.engine.vllm.scheduler import round_scheduler

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Variables that `worker_svc.loading` sets before it imports vLLM."""
ON_CPU: bool = current_platform.is_cpu()
EQUAL_ARITHMETIC = ON_CPU or os.environ.get("VLLM_BATCH_INVARIANT") == "1"
"""Rows have equal numbers in whatever batch."""
cpu_only = pytest.mark.skipif(not ON_CPU, reason="it is about vLLM's first model runner, on a CPU")
like_torch = pytest.mark.skipif(
    not ON_CPU, reason="numbers of a GPU are not those of the torch engine on a CPU"
)
equal_arithmetic = pytest.mark.skipif(
    not EQUAL_ARITHMETIC, reason="on a GPU other batches have other last bits without VLLM_BATCH_INVARIANT=1"
)
Texts = dict[str, list[int]]
COUNT = 20
"""Requests whose texts are compared."""
LEAST_EQUAL = COUNT if EQUAL_ARITHMETIC else int(0.8 * COUNT)
"""Without batch invariance a text may turn at a token whose two best scores are nearly equal."""
BLOCK_SIZE = 32
MEMORY_SHARE = 0.1
"""Share of a device's memory that must be free: others use it too. KV takes `KV_BYTES` of it."""
KV_BYTES = 2**30
DRAFT_LEN = 4
MAX_LENGTH = 512
PAIR = VllmOptions(
    model=TARGET_DIR,
    slots=20,
    residents=32,
    max_length=MAX_LENGTH,
    speculative={
        "method": "draft_model",
        "model": str(DRAFT_DIR),
        "num_speculative_tokens": DRAFT_LEN,
    },
    dtype="float32" if ON_CPU else os.environ.get("LAPS_SD_TEST_VLLM_DTYPE", "bfloat16"),
    memory_bytes=KV_BYTES,
    overlap="off",  # a round returns its own outcome
    arguments={"gpu_memory_utilization": MEMORY_SHARE}
    | ({} if ON_CPU else {"block_size": BLOCK_SIZE, "enforce_eager": True}),
)


def with_head(method: str, head: Path) -> VllmOptions:
    """Return the options of `PAIR` with a head for its target in place of its draft model.

    On a CPU too without torch.compile: it fails if a model that was loaded before is freed while it traces.
    """
    speculative = {"method": method, "num_speculative_tokens": DRAFT_LEN}
    options = replace(PAIR, speculative=speculative, arguments={**PAIR.arguments, "enforce_eager": True})
    if method == "mtp":  # the head is a part of the target's checkpoint
        return replace(options, model=head)
    return replace(options, speculative={**speculative, "model": str(head)})


def options_for(method: str, head_of: Callable[[str], Path]) -> VllmOptions:
    """Return the options of a drafter by this method of vLLM's; `head_of` returns the head of one that needs it."""
    return PAIR if method == "draft_model" else with_head(method, head_of(method))


def continued(texts: Texts) -> list[Specification]:
    """Return the requests of `mixed` as another worker gets them, each with more of its text than the one before."""
    return [
        replace(one, committed_ids=tuple(texts[one.request_id][: 1 + 2 * at]))
        for at, one in enumerate(mixed(len(texts)))
    ]


def equal(found: Texts, expected: Texts) -> int:
    """Return how many texts are equal; all have the expected length."""
    assert found.keys() == expected.keys()
    assert all(len(found[name]) == len(expected[name]) for name in expected)
    return sum(found[name] == expected[name] for name in expected)


class OneCore:
    """The core, and engines over it; each `engine` ends the one before."""

    def __init__(self, options: VllmOptions = PAIR) -> None:
        self.core, self.chooser = load_core(options)
        self._kv = self.core.scheduler.kv_cache_config
        self._engine: VllmEngine | None = None

    def engine(
        self,
        *,
        slots: int = 4,
        blocks: int = 64,
        prefill_chunk: int | None = None,
        residents: int | None = None,
        chooser: TokenChooser | None = None,
        decode: Decode | None = decode,
        **more: Any,
    ) -> VllmEngine:
        core, config = self.core, self.core.vllm_config
        if self._engine is not None:
            for name in self._engine.known():
                self._engine.drop(name)
            core.step_fn()  # the model runner forgets them too
            while core.batch_queue:
                core.step_fn()
        core.scheduler = round_scheduler(
            vllm_config=config,
            kv_cache_config=replace(self._kv, num_blocks=blocks + 1),
            structured_output_manager=core.structured_output_manager,
            block_size=self.core.scheduler.block_size,
            hash_block_size=self.core.scheduler.block_size,
            log_stats=False,
        )
        if prefill_chunk is not None:
            core.scheduler.max_num_scheduled_tokens = prefill_chunk
        if residents is not None:
            core.scheduler.max_num_running_reqs = residents
        chosen = chooser or self.chooser
        rules = rules_for(config, chosen)
        self._engine = VllmEngine(
            core,
            rules,
            slots=slots,
            fingerprint=fingerprint(config, chosen, rules.eos_ids, "test"),
            decode=decode,
            **more,
        )
        if (
            chosen is TokenChooser.VLLM and ON_CPU
        ):  # vLLM's sampler serves requests that the coupling does not know
            core.model_executor.driver_worker.worker.model_runner._laps_sd_coupling.known = {}
        return self._engine


KINDS = (
    Sampling(),
    Sampling(0.8),
    Sampling(1.0, top_p=0.9),
    Sampling(0.7, top_k=20),
    Sampling(1.0, min_p=0.05),
)


def mixed(count: int, max_tokens: int = 48, kinds: tuple[Sampling, ...] = KINDS) -> list[Specification]:
    """Requests of all kinds, with prompts of 4 to 63 tokens and seeds of up to 64 bits."""
    return [
        Specification(
            f"r{at}",
            tuple(3 + (at * 37 + n * 11) % 1000 for n in range(4 + at * 3 % 60)),
            (),
            replace(kinds[at % len(kinds)], seed=(2**64 - 1) // (at + 1)),
            max_tokens,
            ignore_eos=True,
        )
        for at in range(count)
    ]


__all__ = [
    "COUNT",
    "DRAFT_LEN",
    "ENVIRONMENT",
    "EQUAL_ARITHMETIC",
    "KINDS",
    "KV_BYTES",
    "LEAST_EQUAL",
    "MEMORY_SHARE",
    "ON_CPU",
    "PAIR",
    "OneCore",
    "Texts",
    "continued",
    "cpu_only",
    "equal",
    "equal_arithmetic",
    "like_torch",
    "mixed",
    "options_for",
]
