"""Contents of the workers' prefix caches, as the scheduler knows them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, NAME_BYTES, most_cached
from scheduler_svc.core.state.block_index import BlockIndex
from scheduler_svc.core.state.found_tokens import FoundTokens
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker

MOST_CONVERSATIONS: Final = 65_536
"""Conversations of which the last worker is remembered, the most recent ones. Our choice."""


class Caches:
    """Blocks of prompts by worker, as the workers report them, and the last worker of each conversation.

    A worker that reports nothing may have a cache all the same. For those the conversation counts: the last turn ran
    there, and the next one begins with it.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self._workers = workers
        self.blocks = BlockIndex()
        self.found = FoundTokens()
        self._conversations: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        """Worker and context tokens of the last turn that ended."""

    def changed(self, worker_id: str, added: bytes, removed: bytes) -> None:
        """Note what a worker has computed and lost. Of more than its memory can hold, the rest is left out."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.facts is None:
            return
        self.blocks.remove(worker_id, removed)
        room = most_cached(worker.facts.target_blocks, worker.facts.block_size) - self.blocks.blocks_of(
            worker_id
        )
        self.blocks.add(worker_id, added[: room * NAME_BYTES])

    def replaced(self, worker_id: str, names: bytes) -> None:
        """Note what a worker has, in place of what was known before."""
        self.blocks.forget(worker_id)
        self.changed(worker_id, names, b"")

    def blocks_of(self, request: Request) -> Mapping[str, int]:
        """Return how many blocks at the start of a request's prompt each worker has; those without any are left out."""
        facts = request.facts
        found = self.blocks.cached(facts.prompt_blocks)
        last = self._conversations.get(facts.conversation)
        if last is None:
            return found
        worker_id, tokens = last
        if worker_id not in self._workers or self.blocks.blocks_of(worker_id):
            return found
        return {**found, worker_id: min(tokens, facts.prompt_tokens) // BLOCK_TOKENS}

    def tokens_on(self, request: Request, worker_id: str) -> int:
        """Return how many tokens at the start of a request's context a worker has."""
        return request.cached_in(self.blocks_of(request).get(worker_id, 0))

    def most_tokens(self, request: Request) -> int:
        """Return how many tokens at the start of a request's context the worker has that has most of it."""
        return request.cached_in(max(self.blocks_of(request).values(), default=0))

    def ended(self, request: Request, worker_id: str) -> None:
        """Note that a request ended on a worker."""
        conversation = request.facts.conversation
        if conversation:
            self._conversations[conversation] = (worker_id, request.context_tokens)
            self._conversations.move_to_end(conversation)
            if len(self._conversations) > MOST_CONVERSATIONS:
                self._conversations.popitem(last=False)
