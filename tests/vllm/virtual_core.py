"""vLLM's engine core with async scheduling, over a device without a model.

A CPU has no async scheduling. Here vLLM's own `EngineCore.step_with_batch_queue` and `AsyncScheduler` run; the
device knows the tokens of a request as soon as it has computed them, and the scheduler one step later.
"""

from __future__ import annotations

import copy
import queue
import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput
from vllm.v1.structured_output import StructuredOutputManager

from bench._vllm.in_core import model_output
from tests.vllm.virtual import BLOCK, config_of
from tests.worker.contract import decode
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.parameters import Rules, TokenChooser
from worker_svc.engine.vllm.scheduler import round_scheduler


def token_at(first: int, position: int) -> int:
    """Return the token at this position of the context of a prompt that begins with `first`."""
    return 3 + (first * 131 + position * 7919) % 900


@dataclass
class _Context:
    prompt: list[int]
    outputs: list[int] = field(default_factory=list)
    computed: int = 0


class HostMemory(KVConnectorBase_V1):
    """A connector that has all KV of preempted requests, and brings it back during so many steps."""

    def __init__(self, steps: int) -> None:
        self.left: dict[str, int] = {}
        """Steps until the KV of a request is there."""
        self._steps = steps

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        stored = (request.num_tokens - 1) // BLOCK * BLOCK if request.num_preemptions else 0
        found = max(0, stored - num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.left[request.request_id] = self._steps

    def arrived(self) -> set[str]:
        """Return the requests whose loads end with this step."""
        arrived = {name for name, left in self.left.items() if left == 1}
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return arrived

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Device:
    """A model runner whose tokens are a function of the prompt's first token and the position."""

    def __init__(self, seed: int) -> None:
        self.host: HostMemory | None = None
        self.steps = 0
        self.fails_at = 0
        """The step that raises; 0: none."""
        self._random = random.Random(seed)
        self._contexts: dict[str, _Context] = {}
        self._sampled: Any = None

    def execute_model(self, output: Any, *, non_block: bool) -> Future[Any]:
        done: Future[Any] = Future()
        loaded = None if self.host is None else KVConnectorOutput(finished_recving=self.host.arrived())
        if not output.total_num_scheduled_tokens:
            nothing = copy.copy(EMPTY_MODEL_RUNNER_OUTPUT)
            nothing.kv_connector_output = loaded
            done.set_result(nothing)
            return done
        self.steps += 1
        if self.steps == self.fails_at:
            done.set_exception(RuntimeError("the device fell off"))
            self._sampled = None
            return done
        padded = self._update(output)
        names = list(output.num_scheduled_tokens)
        tokens = [self._run(name, output, padded) for name in names]
        self._sampled = model_output(names, tokens)
        self._sampled.kv_connector_output = loaded
        done.set_result(None)
        return done

    def sample_tokens(self, grammar: Any, *, non_block: bool) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(self._sampled)
        return done

    def _update(self, output: Any) -> set[str]:
        """Take in new and resumed requests; return them."""
        began = set()
        for new in output.scheduled_new_reqs:
            # To vLLM's second runner a resumed request is a new one, with its output in what it prefills.
            prompt = list(new.prompt_token_ids)
            outputs = list(new.prefill_token_ids or ())[len(prompt) :]
            self._contexts[new.req_id] = _Context(prompt, outputs, new.num_computed_tokens)
            began.add(new.req_id)
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                context = self._contexts[name]
                del context.outputs[cached.num_output_tokens[at] :]
                context.computed = cached.num_computed_tokens[at]
                began.add(name)
        return began

    def _run(self, name: str, output: Any, padded: set[str]) -> list[int]:
        context = self._contexts[name]
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        length = len(context.prompt) + len(context.outputs)
        context.computed += output.num_scheduled_tokens[name] - drafts
        if context.computed < length:
            return []
        accepted = 0 if name in padded else self._random.randint(0, drafts)
        tokens = [token_at(context.prompt[0], length + at) for at in range(accepted + 1)]
        context.outputs += tokens
        context.computed = length + accepted
        return tokens


class VirtualCore(EngineCore):
    """vLLM's core without its start: no model, no profile of memory."""

    def __init__(
        self, *, slots: int, residents: int, blocks: int, seed: int, budget: int, block_size: int = BLOCK
    ) -> None:
        config, kv = config_of(
            slots=slots,
            residents=residents,
            blocks=blocks + 1,
            asynchronous=True,
            budget=budget,
            block_size=block_size,
        )
        init_none_hash(sha256)
        self.vllm_config = config
        self.log_stats = False
        self._weight_version = "default"
        self.device = Device(seed)
        self.model_executor = self.device  # type: ignore[assignment]
        self.structured_output_manager = StructuredOutputManager(config)
        self.scheduler = round_scheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=self.structured_output_manager,
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=False,
        )
        self.check_for_draft_tokens = True
        self.mm_receiver_cache = None
        self.batch_queue_size = 2
        self.batch_queue = deque(maxlen=2)
        self.is_mm_encoder_only = self.is_pooling_model = False
        self.request_block_hasher = get_request_block_hasher(block_size, sha256)
        self.async_scheduling = True
        self.aborts_queue = queue.Queue()


def overlapped_engine(
    *,
    slots: int = 4,
    residents: int = 16,
    blocks: int = 64,
    seed: int = 1,
    budget: int = 64,
    block_size: int = BLOCK,
    load_steps: int = 0,
    **more: Any,
) -> VllmEngine:
    """Return the engine over such a core. `load_steps`: evicted KV is in host memory, as with
    `kv_offloading_size`, and comes back during so many steps.
    """
    core = VirtualCore(
        slots=slots, residents=residents, blocks=blocks, seed=seed, budget=budget, block_size=block_size
    )
    if load_steps:
        core.device.host = core.scheduler.connector = HostMemory(load_steps)  # type: ignore[attr-defined]
        core.scheduler.defer_block_free = True  # type: ignore[attr-defined]
    rules = Rules(
        TokenChooser.VLLM, second_runner=False, speculates=True, on_cpu=False, version="test", eos_ids=[1]
    )
    return VllmEngine(core, rules, slots=slots, fingerprint="virtual", **{"decode": decode} | more)
