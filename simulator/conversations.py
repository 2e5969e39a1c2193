"""Conversations: requests that begin with the whole conversation before them, and with instructions that others share."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Callable, Sequence

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS
from simulator.jobs import Job
from simulator.workload import Conversations, Lengths

_SHARED = 1 << 63
"""Marks the blocks of instructions, which conversations share."""
_BLOCKS = 1 << 20
"""Names that each conversation, and each set of instructions, has for its blocks."""


def as_conversations(
    jobs: Sequence[Job],
    conversations: Conversations,
    rng: random.Random,
    length: Callable[[Lengths], int],
) -> list[Job]:
    """Return the jobs as turns of conversations: with the context before them in their prompts, with names of their
    blocks, and with the turn that each follows. The prompt of a job, as drawn, is its message.

    The first turn of each conversation keeps its `arrival_s`; that of the others is the time after the end of the turn
    before.
    """
    shared = [length(conversations.instructions) for _ in range(conversations.kinds)]
    found: list[Job] = []
    at = conversation = 0
    while at < len(jobs):
        kind = rng.randrange(conversations.kinds) if conversations.kinds else None
        common = 0 if kind is None else shared[kind]
        context, before = common + length(conversations.document), ""
        while at < len(jobs):
            job = jobs[at]
            prompt = context + job.prompt_tokens
            context = prompt + job.output_tokens
            found.append(
                dataclasses.replace(
                    job,
                    prompt_tokens=prompt,
                    arrival_s=rng.expovariate(1 / conversations.think_s) if before else 0.0,
                    after=before,
                    blocks=_names(kind, common, conversation, context),
                )
            )
            before, at = job.request_id, at + 1
            if rng.random() * conversations.turns < 1:
                break
        conversation += 1
    return found


def _names(kind: int | None, common: int, conversation: int, tokens: int) -> bytes:
    """Return names for the blocks of a context; those that lie in the instructions are the same for all."""
    first = common // BLOCK_TOKENS
    names = array("Q")
    if kind is not None:
        names.extend(_SHARED + kind * _BLOCKS + block for block in range(first))
    names.extend(conversation * _BLOCKS + block for block in range(first, tokens // BLOCK_TOKENS))
    return names.tobytes()
