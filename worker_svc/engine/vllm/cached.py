"""The prompt blocks that vLLM's prefix cache holds, by the names that the scheduler knows.

vLLM calls `BlockPool.cache_full_blocks` when blocks of a request become findable, and removes a block's hash from
`cached_block_hash_to_block` when the block is evicted. Both are methods of objects that vLLM made, and are replaced
here. vLLM's KV cache events bring the same, but copy the tokens of each block and name no request, and one consumer
takes them.

A model whose KV lies in several groups (a hybrid of full and windowed attention or of attention and Mamba) finds a
beginning only if all groups have it, and groups other than full attention keep parts of it only. What such a model
would find is not known here, so that nothing is reported.

Blocks count as held from the step that computes them on, since a later step finds them. Where the drafter is EAGLE
or MTP vLLM computes the last KV block that it finds again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.kv_cache_utils import get_block_hash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS
from worker_svc.engine.cache.prompts import CachedPrompts, ContextNames
from worker_svc.engine.vllm.scheduler import Rounds

__all__ = ["CachedByVllm", "follow_cache"]

_GROUP = 0
"""The only KV cache group."""


@dataclass(slots=True)
class _Context:
    names: ContextNames
    # Prompt blocks of it that `CachedPrompts` knows.
    noted: int = 0


class CachedByVllm:
    """The prompt blocks that the block pool of one scheduler holds: `NamedBlocks` by vLLM's block hashes."""

    def __init__(self, scheduler: Rounds) -> None:
        """Follow the pool of this scheduler from now on."""
        manager = scheduler.kv_cache_manager
        self.blocks = scheduler.pool_blocks
        self.on_forgotten: Callable[[bytes], None] | None = None
        self._pool: Any = manager.block_pool
        self._block_size: int = manager.coordinator.single_type_managers[_GROUP].block_size
        self._contexts: WeakKeyDictionary[Request, _Context] = WeakKeyDictionary()
        self.prompts = CachedPrompts(self, self._block_size)
        self._follow_cached()
        self._follow_evicted()
        self._follow_reset()

    def holds(self, name: bytes) -> bool:
        """Return whether a block has this hash."""
        key = make_block_hash_with_group_id(name, _GROUP)
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None

    def used(self, request: Request, tokens: int) -> None:
        """Note that a request began with `tokens` tokens that were found, if no full block of it followed."""
        if request not in self._contexts:
            self._note(request, 0, tokens // self._block_size)

    def _note(self, request: Request, noted_blocks: int, blocks: int) -> None:
        """Note the first `blocks` KV blocks of a request, of which the first `noted_blocks` were found or noted."""
        context = self._contexts.get(request)
        if context is None:
            names = ContextNames(request.cache_salt or "", kv=request.block_hashes)
            context = self._contexts[request] = _Context(names)
        # A request that lost its KV finds less of it than was noted.
        noted = min(context.noted, noted_blocks * self._block_size // BLOCK_TOKENS)
        context.noted = self.prompts.note(context.names, request.all_token_ids, noted, blocks)

    def _follow_cached(self) -> None:
        cache_full_blocks = self._pool.cache_full_blocks

        def followed(
            request: Request,
            blocks: Sequence[Any],
            num_cached_blocks: int,
            num_full_blocks: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            if num_cached_blocks < num_full_blocks:
                self._note(request, num_cached_blocks, num_full_blocks)

        self._pool.cache_full_blocks = followed

    def _follow_evicted(self) -> None:
        blocks = self._pool.cached_block_hash_to_block
        pop = blocks.pop

        def followed(key: Any, block_id: int) -> Any:
            block = pop(key, block_id)
            # Two requests that compute the same at once have two blocks with one hash.
            if block is not None and self.on_forgotten is not None and blocks.get_one_block(key) is None:
                self.on_forgotten(get_block_hash(key))
            return block

        blocks.pop = followed

    def _follow_reset(self) -> None:
        reset_prefix_cache = self._pool.reset_prefix_cache

        def followed() -> bool:
            done: bool = reset_prefix_cache()
            if done:
                self.prompts.clear()
                self._follow_evicted()  # of the new map
            return done

        self._pool.reset_prefix_cache = followed


def follow_cache(scheduler: Rounds) -> CachedByVllm | None:
    """Return what follows the prefix cache of a scheduler; None where it is not known what a request finds."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if len(managers) == 1 and type(managers[0]) is FullAttentionManager:
        return CachedByVllm(scheduler)
    logging.getLogger(__name__).info(
        "the scheduler does not place requests by this worker's prefix cache: that needs full attention in all"
        " layers, and this model's KV is kept by %s",
        ", ".join(type(one).__name__ for one in managers),
    )
    return None
