"""Measured costs of rows, draft steps and long contexts on this device, before the first request arrives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from worker_svc.engine.cache.kv import KV_TILE, KVPool
from worker_svc.engine.cpu import kernels
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS
from worker_svc.engine.interface import blocks_needed
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.plan import Piece
from worker_svc.engine.round.prefill_time import token_costs

TURNS = 8  # measurements of a size, if time allows: the first are slower than any later one
SHORT = 64  # tokens of the contexts of most measurements. Our choice
# Tokens of a chunk that is measured at the beginning of a context, and after this number of them. Our choice.
CHUNK, FAR = 64, 1024
# Draft steps of one row each that are measured together, where they are one call. Our choice.
STEPS_IN_A_CALL = 4
# Seconds of a round, and of each of its rows, besides the forward, before they were measured.
AROUND_S, AROUND_ROW_S = 2e-4, 1.5e-5

Clock = Callable[[], float]  # seconds of computing


def measure_rounds(
    target: PackedModel, *, slots: int, deepest: int, max_length: int, clock: Clock, deadline: float
) -> CostTable:
    """Return the seconds of a round without draft steps, by rows.

    `deepest`: rows of a request, at most; `deadline` of the monotonic clock, but each size is measured twice.
    The model has a pool attached.
    """
    forward = _measure(target, _ladder(slots * deepest), slots, max_length, clock, deadline, proposes=False)
    seconds = [
        took + AROUND_S + AROUND_ROW_S * count
        for count, took in zip(forward.counts, forward.seconds, strict=True)
    ]
    return CostTable(forward.counts, seconds, forward.key_s)


@torch.inference_mode()
def measure_prefill(
    target: PackedModel, plain_s: float, *, max_length: int, clock: Clock, deadline: float
) -> CostTable:
    """Return the seconds that a context token adds, by its position, to a round of `plain_s` without any.

    Arguments as in `measure_rounds`.
    """
    longest = min(max_length, target.pool.allocator.free_blocks * target.pool.block_size)
    tokens = min(CHUNK, longest // 2)
    far = min(FAR, longest - tokens)
    if not tokens:  # no context has room for two tokens
        return token_costs(1, plain_s, 2 * plain_s, 1, 2 * plain_s, max_length)
    near_s = far_s = math.inf
    for _ in range(TURNS):
        near_s = min(near_s, _seconds(target, 1, tokens, 0, 1, clock, proposes=False, last_only=True))
        far_s = min(far_s, _seconds(target, 1, tokens, far, 1, clock, proposes=False, last_only=True))
        if time.monotonic() > deadline:
            break
    return token_costs(tokens, plain_s, near_s, far, far_s, max_length)


def measure_draft_steps(
    draft: PackedModel, *, slots: int, max_length: int, clock: Clock, deadline: float
) -> CostTable:
    """Return the seconds of a draft step, by rows. Arguments as in `measure_rounds`."""
    counts = _ladder(slots * FIRST_STEP_ROWS)
    return _measure(draft, counts, slots, max_length, clock, deadline, proposes=True)


@torch.inference_mode()
def _measure(
    model: PackedModel,
    counts: Sequence[int],
    slots: int,
    max_length: int,
    clock: Clock,
    deadline: float,
    *,
    proposes: bool,
) -> CostTable:
    """Return the seconds by about these counts of rows, and of a key.

    They are the least of several measurements, as long as time allows.
    """
    steps = min(STEPS_IN_A_CALL, -(-max_length // 2)) if proposes and model.proposes else 1
    short, long = min(SHORT, max_length // 2), min(KV_TILE, max_length) - steps
    pool = model.pool
    many = min(slots, _room(pool, long, 1, steps))
    # Rows of up to `slots` sequences, as a round has them; and one row of each in short and in long contexts. Those of
    # long drafts begin earlier where they would leave the longest context.
    shapes = []
    for count in counts:
        per = min(-(-count // min(count, slots)), max_length)
        shapes.append((min(slots, -(-count // per)), per, min(short, max_length - per)))
    shapes += [(many, 1, short), (many, 1, long)]
    seconds: dict[tuple[int, int, int], float] = {}
    for turn in range(TURNS):
        for sequences, per, start in shapes:
            if turn > 1 and sequences * per > FIRST_STEP_ROWS * slots:
                continue  # expensive to measure, and rarely needed
            sequences = min(sequences, _room(pool, start, per, steps))
            if sequences < 1:
                continue
            together = steps if per == 1 else 1
            took = _seconds(model, sequences, per, start, together, clock, proposes=proposes)
            shape = (sequences, per, start)
            seconds[shape] = min(took, seconds.get(shape, took))
        if turn and time.monotonic() > deadline:
            break
    key_s = 0.0
    for (sequences, per, start), took in seconds.items():
        before = seconds.get((sequences, per, short))
        if start > short and before is not None:
            key_s = max(0.0, (took - before) / (sequences * (start - short)))
    by_rows = {
        sequences * per: max(1e-6, took - key_s * sequences * (start + per))
        for (sequences, per, start), took in seconds.items()
        if start <= short
    }
    if not by_rows:
        return CostTable([1], [1e-3])
    return CostTable(sorted(by_rows), [by_rows[rows] for rows in sorted(by_rows)], key_s)


def _held(pool: KVPool, start: int, per: int, steps: int) -> int:
    """Return the blocks of a context of `start` tokens that grows in `steps` steps.

    The first adds `per` tokens, each other one.
    """
    return blocks_needed(start + steps, per, pool.block_size)


def _room(pool: KVPool, start: int, per: int, steps: int) -> int:
    """Return the number of such contexts that there is room for."""
    return pool.allocator.free_blocks // _held(pool, start, per, steps)


def _seconds(
    model: PackedModel,
    sequences: int,
    per: int,
    start: int,
    steps: int,
    clock: Clock,
    *,
    proposes: bool,
    last_only: bool = False,
) -> float:
    """Return the seconds of a forward of `per` tokens each after `start` in a context, and of the choices.

    The choices are at all rows, or at the last row of each sequence if the model `proposes`, or with `last_only`; if
    `steps` draft steps are one call, it is their mean.
    """
    pool, device = model.pool, model.device
    tables = [pool.new_table() for _ in range(sequences)]
    held = _held(pool, start, per, steps)
    pool.hold([(table, held, held) for table in tables])
    began = clock()
    plan = model.planner.plan([Piece(table, start, per) for table in tables])
    ids = torch.zeros(plan.total, dtype=torch.int64, device=device)
    if proposes and model.proposes:
        drafts = [kernels.Draft(at, at, steps, False) for at in range(sequences)]
        model.propose(ids, plan, drafts, None, model.shape.vocab_size, [])
    else:
        every = per if proposes or last_only else 1
        rows = range(every - 1, sequences * per, every)
        model.forward(ids, plan, kernels.int64s(rows).to(device)).argmax(-1).tolist()
    took = clock() - began
    for table in tables:
        pool.release(table)
    return took / steps


def _ladder(largest: int) -> list[int]:
    """Return 1, 2, 4 ... up to and including `largest`."""
    return sorted({largest, *(2**i for i in range(largest.bit_length()))} - {0})
