"""What the same steps cost: tokens per second while a full batch waits, and the CPU time of decisions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._peers import Peer, PeerFailed
from bench._vllm.in_steps import run_mode
from bench._vllm.modes import FCFS, MODES, OURS
from bench._vllm.workload import burst_arrivals, demo_workload, guessed
from bench.report import progress

INTERPRETED, COMPILED = "interpreted", "compiled"
SLOTS, WAITING = 64, 1000
BLOCKS = 20_000
WARM_STEPS, STEPS = 100, 300
SPEED_COUNT = 100
SPEED_SEED = 2000


def speeds(peer: Peer, turns: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of a burst in the engine, modes in turn: the tokens of the steps in which at
    least a full batch waited, and their CPU time.

    Other work on the machine changes the pace from run to run. `full_speed_by_parts` is free of that: tokens
    per step, less the scheduler's share of the step; the rest, the model's work on full batches, is the same in
    all modes.
    """
    modes = (MODES[0], *OURS)
    for turn in range(turns):
        workload = demo_workload(SPEED_COUNT, SPEED_SEED + turn)
        arrivals = burst_arrivals(SPEED_COUNT, 1)
        first = run_mode(peer, modes[0], workload, arrivals, [], [], folder, replay=False)
        lengths, guesses = first["lengths"], guessed(first["lengths"], workload.seed)
        order = list(modes)
        random.Random(turn).shuffle(order)
        for mode in order:
            found = run_mode(peer, mode, workload, arrivals, lengths, guesses, folder, replay=False)
            speed = found["full_tokens"] / found["full_cpu_s"]
            share = found["full_scheduler_s"] / found["full_cpu_s"]
            progress(
                f"turn {turn}: {mode.name}, {speed:.0f} tokens per CPU second while a full batch waits,"
                f" {share:.1%} of it the scheduler's"
            )
            yield {
                "measured": "speed",
                "setting": f"burst of {SPEED_COUNT}",
                "seed": turn,
                "mode": mode.name,
                "full_steps": found["full_steps"],
                "full_tokens": found["full_tokens"],
                "full_cpu_s": round(found["full_cpu_s"], 4),
                "full_s": round(found["full_s"], 4),
                "full_speed": round(speed, 1),
                "scheduler_share": round(share, 5),
                "full_speed_by_parts": found["full_tokens"] / found["full_steps"] * (1 - share),
            }


def costs(peers: Mapping[str, Peer], turns: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of the virtual steps: peers (an interpreted and a compiled core) and modes in
    turn.
    """
    for turn in range(turns):
        for mode in (MODES[0], *OURS):
            for name, peer in peers.items():
                if mode.name == FCFS and peer is not next(iter(peers.values())):
                    continue
                found = peer.ask(
                    {
                        "task": "cost",
                        "scheduler": mode.scheduler,
                        "sends_class": mode.sends_class,
                        "guessed": bool(mode.lengths),
                        "slots": SLOTS,
                        "waiting": WAITING,
                        "blocks": BLOCKS,
                        "warm": WARM_STEPS,
                        "steps": STEPS,
                    }
                )
                if found["compiled"] != (name == COMPILED):
                    raise PeerFailed(f"the {name} core is {'' if found['compiled'] else 'not '}compiled")
                ours_ms = found["choose_ms"] + found["report_ms"]
                progress(
                    f"turn {turn}: {mode.name}, {name}: core and choose {ours_ms:.3f} ms, schedule"
                    f" {found['schedule_ms']:.3f} ms"
                )
                yield {
                    "measured": "cost",
                    "setting": f"{SLOTS} in a step, {WAITING} waiting",
                    "seed": turn,
                    "mode": mode.name,
                    "core": name,
                    "decision_ms": round(ours_ms, 4),
                    **{key: round(value, 4) for key, value in found.items() if key != "compiled"},
                }


def least(rows: Sequence[Mapping[str, Any]], mode: str, core: str, figure: str) -> float | None:
    """Return the least of a figure over the turns: other work on a machine only adds to CPU time."""
    found = [
        row[figure]
        for row in rows
        if row["measured"] == "cost" and row["mode"] == mode and row["core"] == core
    ]
    return min(found, default=None)
