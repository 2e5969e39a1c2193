"""`laps-sd bench serve --regime multi-turn`: conversations on three workers, placed by what is computed and by load alone.

Conversations begin with one of a few sets of instructions; a turn is sent some time after the answer before it, with
the whole conversation in its prompt. Every worker is the shipped demo pair, which really computes; a round and a
context token take a fixed time at least, so that three workers share two cores without changing the figures. Prompts
and outputs are token ids, outputs end at limits that are drawn, and the seed decides the tokens: every placement
serves the same requests. The salt of each run is its own, so none finds what another has computed.

Goals: mean latency and mean first token no worse than least loaded by the upper end of the interval over pairs of
runs, and both ratios within 15 % of the simulated ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from bench._replay import TEMPERATURE, Reply, draw_ids, send_one
from bench._serve.workloads import in_turn
from bench._serve_stack import DRAFT_LEN, spread
from bench.report import progress, ratio_interval, table
from laps_sd.contract.prompt_blocks import name_blocks
from laps_sd.service.wire import channel_options
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.settings import CoreSettings
from simulator.cluster import Cluster
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.routers import ROUTERS

PLACEMENTS = ("least-loaded", "soonest-done")
WORKERS = 3
SLOTS = 4
CONVERSATIONS = 24
TURNS = 5
INSTRUCTIONS, INSTRUCTION_TOKENS = 6, 384
MESSAGE_TOKENS = (24, 72)
OUTPUT_TOKENS = (12, 48)
THINK_S = 4.0
"""Mean time between an answer and the next turn; exponential."""
GAP_S = 1.2
"""Mean time between two first turns; exponential."""
ROUND_S, PREFILL_TOKEN_S, CHUNK = 0.050, 0.001, 128
"""Least times of a round and of each context token in it, and most context tokens of a round."""
KV_BLOCKS, BLOCK_TOKENS = 1024, 16
SIMULATED = 0.15


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    number: int
    message: list[int]
    output_tokens: int
    think_s: float
    """Time between its answer and the next turn."""
    seed: int


@dataclass(frozen=True)
class Served:
    """Result of one turn."""

    reply: Reply
    context: list[int]
    """The conversation with the answer."""


@dataclass(frozen=True)
class Conversation:
    """Instructions, first turn's time, and turns."""

    at_s: float
    instructions: list[int]
    turns: list[Turn]


def conversations(seed: int) -> list[Conversation]:
    """Return the conversations of a seed."""
    rng = random.Random(f"serve/multi-turn/{seed}")

    shared = [draw_ids(rng, INSTRUCTION_TOKENS) for _ in range(INSTRUCTIONS)]
    found, at_s, number = [], 0.0, 0
    for _ in range(CONVERSATIONS):
        turns = []
        for _ in range(TURNS):
            turns.append(
                Turn(
                    number,
                    draw_ids(rng, rng.randint(*MESSAGE_TOKENS)),
                    rng.randint(*OUTPUT_TOKENS),
                    rng.expovariate(1 / THINK_S),
                    rng.getrandbits(31),
                )
            )
            number += 1
        found.append(Conversation(at_s, rng.choice(shared), turns))
        at_s += rng.expovariate(1 / GAP_S)
    return found


async def serve(address: str, wanted: Sequence[Conversation], salt: str) -> list[Served]:
    """Hold all conversations; return the turns by number. Raise RuntimeError if one failed."""
    results: dict[int, Served] = {}
    start_s = time.monotonic() + 0.5
    async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
        await channel.channel_ready()
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def hold(conversation: Conversation) -> None:
            context, due_s = list(conversation.instructions), start_s + conversation.at_s
            for turn in conversation.turns:
                context += turn.message
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                request = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=context),
                    cache_salt=salt,
                    sampling=pb.SamplingParams(
                        max_tokens=turn.output_tokens,
                        seed=turn.seed,
                        ignore_eos=True,
                        temperature=TEMPERATURE,
                    ),
                )
                reply = await send_one(request, due_s, stub.GenerateStream)
                if reply.error or len(reply.token_ids) != turn.output_tokens:
                    tokens = f"{len(reply.token_ids)} of {turn.output_tokens} tokens"
                    raise RuntimeError(f"turn {turn.number}: {reply.error or tokens}")
                context += reply.token_ids
                results[turn.number] = Served(reply, list(context))
                due_s = time.monotonic() + turn.think_s

        await asyncio.gather(*(hold(conversation) for conversation in wanted))
    return [results[number] for number in sorted(results)]


def simulated(wanted: Sequence[Conversation], truth: Sequence[Served], placement: str) -> dict[str, float]:
    """Return the figures of the same requests in the simulator."""
    jobs = []
    for conversation in wanted:
        before, waits_s = "", conversation.at_s
        for turn in conversation.turns:
            one = truth[turn.number]
            speculation = one.reply.ended.speculation
            rounds = max(1, min(speculation.rounds, turn.output_tokens))
            paces = spread(turn.output_tokens, rounds)
            refused = spread(max(0, speculation.drafted - (turn.output_tokens - rounds)), rounds)
            jobs.append(
                Job(
                    request_id=f"r{turn.number:04d}",
                    arrival_s=waits_s,
                    prompt_tokens=len(one.context) - turn.output_tokens,
                    paces=bytes(paces),
                    drafts=bytes(pace - 1 + more for pace, more in zip(paces, refused, strict=True)),
                    max_tokens=turn.output_tokens,
                    blocks=name_blocks(one.context),
                    after=before,
                )
            )
            before, waits_s = f"r{turn.number:04d}", turn.think_s
    machine = Machine(
        slots=SLOTS,
        draft_len=DRAFT_LEN,
        round_s=ROUND_S,
        verified_token_s=0.0,
        context_token_s=0.0,
        prefill_token_s=PREFILL_TOKEN_S,
        prefill_chunk=CHUNK,
        kv_tokens=KV_BLOCKS * BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
    )
    outcome = Cluster(
        jobs,
        machine,
        WORKERS,
        lambda _, settings: policy_named("laps-sd", settings),
        CoreSettings(),
        router=ROUTERS[placement](),
    ).run()
    fates = outcome.fates
    return {
        "mean_s": statistics.fmean(fate.latency_s for fate in fates),
        "first_token_s": statistics.fmean(fate.first_token_s - fate.arrival_s for fate in fates),
        "hit_share": outcome.found_tokens / sum(job.prompt_tokens for job in jobs),
    }


def figures(served: Sequence[Served]) -> dict[str, float]:
    """Return the figures of a run."""
    usages = [one.reply.ended.usage for one in served]
    return {
        "mean_s": statistics.fmean(one.reply.latency_s for one in served),
        "first_token_s": statistics.fmean(one.reply.first_token_s for one in served),
        "hit_share": sum(usage.cached_prompt_tokens for usage in usages)
        / sum(usage.prompt_tokens for usage in usages),
    }


def planned(seeds: int) -> list[tuple[int, str]]:
    """Return the runs, each a seed and a placement, in their order."""
    return [(seed, name) for seed in range(1, seeds + 1) for name in in_turn(PLACEMENTS, seed)]


def kept(path: Path, seeds: int) -> list[dict[str, Any]]:
    """Return the rows of planned runs that a file of results has; none if there is no file. Raise ValueError if it has
    no results of this benchmark.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text())["rows"]
        runs = [row for row in rows if not row.get("verdict")]
        return [row for row in runs if (row["seed"], row["placement"]) in planned(seeds)]
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has no results of --regime multi-turn") from error


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every placement with every seed; return a row of each run, in the order of the plan.

    With `options.resume` the runs in the file of `options.json` count as made; at most `options.runs` others are.
    """
    rows = kept(options.json, options.seeds) if options.resume else []
    made = {(row["seed"], row["placement"]) for row in rows}
    missing = [one for one in planned(options.seeds) if one not in made]
    rows += _make(missing[: options.runs])
    return sorted(rows, key=lambda row: planned(options.seeds).index((row["seed"], row["placement"])))


def _make(plan: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if not plan:
        return rows
    environment = {
        "LAPS_SD_KV_BLOCKS": str(KV_BLOCKS),
        "LAPS_SD_BLOCK_SIZE": str(BLOCK_TOKENS),
        "LAPS_SD_MAX_DRAFT_LEN": str(DRAFT_LEN),
        "LAPS_SD_DRAFT_LEN": str(DRAFT_LEN),
        "LAPS_SD_ROUND_FLOOR_S": str(ROUND_S),
        "LAPS_SD_PREFILL_FLOOR_S": str(PREFILL_TOKEN_S),
        "LAPS_SD_PREFILL_CHUNK": str(CHUNK),
    }
    with LocalStack(
        engine="demo", workers=WORKERS, slots=SLOTS, log_level="warning", environment=environment
    ) as stack:
        for number, (seed, placement) in enumerate(plan, start=1):
            stack.restart("scheduler-0", policy="laps-sd", placement=placement)
            stack.wait_ready("gateway-0")
            wanted = conversations(seed)
            served = asyncio.run(serve(stack.gateway_address, wanted, f"{seed} {placement}"))
            row: dict[str, Any] = {
                "seed": seed,
                "placement": placement,
                "requests": len(served),
                **figures(served),
                "simulated": simulated(wanted, served, placement),
            }
            rows.append(row)
            progress(
                f"{number}/{len(plan)}  seed {seed}, {placement}: first token {row['first_token_s']:.2f} s (simulated "
                f"{row['simulated']['first_token_s']:.2f}), mean {row['mean_s']:.2f} s ({row['simulated']['mean_s']:.2f}), "
                f"hits {row['hit_share']:.0%} ({row['simulated']['hit_share']:.0%})"
            )
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the goals with their results, over the seeds of which all runs are there; none if there is no such seed."""
    by = {(row["seed"], row["placement"]): row for row in rows}
    seeds = sorted({seed for seed, _ in by if all((seed, name) in by for name in PLACEMENTS)})
    found: list[dict[str, Any]] = []
    if not seeds:
        return found
    for figure in ("first_token_s", "mean_s"):
        pairs = [(by[seed, "soonest-done"], by[seed, "least-loaded"]) for seed in seeds]
        measured = ratio_interval([(ours[figure], theirs[figure]) for ours, theirs in pairs])
        predicted = ratio_interval([(o["simulated"][figure], t["simulated"][figure]) for o, t in pairs])
        off = measured.middle / predicted.middle
        for goal, value, met in (
            (f"{figure} / least-loaded ≤ 1", measured.middle, measured.high <= 1),
            (
                f"{figure} / least-loaded, measured / simulated within {SIMULATED:.0%}",
                off,
                abs(off - 1) <= SIMULATED,
            ),
        ):
            found.append(
                {
                    "verdict": True,
                    "goal": goal,
                    "found": value,
                    "low": measured.low,
                    "high": measured.high,
                    "simulated": predicted.middle,
                    "met": bool(met),
                }
            )
    return found


def show(rows: Sequence[dict[str, Any]], goals: Sequence[dict[str, Any]]) -> None:
    """Print the means by placement, and the goals."""
    shown = []
    for placement in PLACEMENTS:
        own = [row for row in rows if row["placement"] == placement]
        if not own:
            continue
        shown.append(
            {
                "placement": placement,
                **{
                    label: f"{statistics.fmean(row[name] for row in own):.3f} "
                    f"({statistics.fmean(row['simulated'][name] for row in own):.3f})"
                    for label, name in (
                        ("first token s", "first_token_s"),
                        ("mean s", "mean_s"),
                        ("hits", "hit_share"),
                    )
                },
            }
        )
    table("conversations on three workers; in brackets: simulated", shown)
    if not goals:
        return
    table(
        "goals",
        [
            {
                "goal": goal["goal"],
                "found": f"{goal['found']:.3f}",
                "ratio": f"[{goal['low']:.3f}, {goal['high']:.3f}], simulated {goal['simulated']:.3f}",
                "": "met" if goal["met"] else "MISSED",
            }
            for goal in goals
        ],
    )
