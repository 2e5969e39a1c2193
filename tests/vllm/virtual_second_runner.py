"""vLLM's second model runner without a model: vLLM's real scheduler, and a runner that keeps what the second one
keeps, but computes a hash. A token is a function of seed and output position.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bench._vllm.in_core import model_output
from tests.vllm.virtual import BLOCK, DRAFTS, config_of
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.parameters import Rules, TokenChooser
from worker_svc.engine.vllm.scheduler import RoundScheduler

PLACES = 12


def token_of(seed: int, position: int) -> int:
    return 3 + hashlib.blake2b(f"{seed}:{position}".encode()).digest()[0]


@dataclass
class Slot:
    """What the runner has of one request."""

    seed: int
    prompt: int
    tokens: list[int]

    def token(self, ahead: int = 0) -> int:
        return token_of(self.seed, len(self.tokens) - self.prompt + ahead)


class Runner:
    """The second runner's bookkeeping: a slot from a request's start until it ends or is preempted."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self.drafts: dict[str, list[int]] = {}

    def step(self, output: Any) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self.slots.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert new.sampling_params.temperature == 0
            settings = new.sampling_params.extra_args["laps_sd"]
            assert settings[5] == len(new.prompt_token_ids), "positions begin after the prompt"
            self.drafts.pop(
                new.req_id, None
            )  # vLLM may pad its first step with placeholders for draft tokens
            self.slots[new.req_id] = Slot(settings[4], len(new.prompt_token_ids), list(new.prefill_token_ids))
        assert len(self.slots) <= PLACES
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(output.num_scheduled_tokens)
        sampled = [self._sampled(name, computed[name], output) for name in names]
        for name, tokens in zip(names, sampled, strict=True):
            slot = self.slots[name]
            # Every third draft token is wrong.
            self.drafts[name] = [
                slot.token(ahead) + (len(slot.tokens) + ahead) % 3 // 2 for ahead in range(DRAFTS)
            ] * bool(tokens)
        return model_output(names, sampled), DraftTokenIds(names, [self.drafts[name] for name in names])

    def _sampled(self, name: str, computed: int, output: Any) -> list[int]:
        slot = self.slots[name]
        count = len(output.scheduled_spec_decode_tokens.get(name, ()))
        if computed + output.num_scheduled_tokens[name] - count < len(slot.tokens):
            return []  # a part of its context
        sampled: list[int] = []
        for draft in [*self.drafts.get(name, [])[:count], None]:
            sampled.append(slot.token())
            slot.tokens.append(sampled[-1])
            if sampled[-1] != draft:
                break
        return sampled


class Core:
    """vLLM's EngineCore, as far as the engine uses it, over the virtual runner."""

    def __init__(self, *, slots: int, blocks: int, budget: int = 512, block_size: int = BLOCK) -> None:
        config, kv = config_of(
            slots=slots,
            residents=PLACES,
            blocks=blocks + 1,
            asynchronous=False,
            budget=budget,
            block_size=block_size,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self.vllm_config = config
        self.scheduler = RoundScheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=block_size,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = True
        self.model_executor = SimpleNamespace()
        self.runner = Runner()
        self._drafts: DraftTokenIds | None = None

    def preprocess_add_request(self, request: Any) -> tuple[Request, int]:
        return Request.from_engine_core_request(request, self._hasher), 0

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def abort_requests(self, names: list[str]) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[dict[int, Any], bool]:
        output = self.scheduler.schedule()
        made, self._drafts = self.runner.step(output)
        return self.scheduler.update_from_output(output, made), True

    def post_step(self, executed: bool) -> None:
        assert self._drafts is not None
        self.scheduler.update_draft_token_ids(self._drafts)


def second_runner_engine(
    *, slots: int = 4, blocks: int = 400, budget: int = 512, block_size: int = BLOCK, **more: Any
) -> VllmEngine:
    """Return the engine over such a core."""
    rules = Rules(
        TokenChooser.PROCESSOR,
        second_runner=True,
        speculates=True,
        on_cpu=False,
        version="0.32.0",
        eos_ids=[2],
    )
    core = Core(slots=slots, blocks=blocks, budget=budget, block_size=block_size)
    return VllmEngine(core, rules, slots=slots, fingerprint="virtual", **more)
