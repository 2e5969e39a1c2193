"""Runs counted in engine steps: arrivals at fixed steps, latencies in steps, no clock of a busy machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench._peers import Peer
from bench._vllm.figures import figures
from bench._vllm.modes import FCFS, MODES, WARM, Mode
from bench._vllm.workload import Workload, burst_arrivals, demo_workload, guessed, load_arrivals, requests_of
from bench.report import progress

WITHIN = 40
"""Steps over which a burst arrives."""
LEARN_SEED, LEARN_COUNT = 1000, 600
"""The burst that `learnt before` has learnt from."""
FIRST = MODES[0]


def learn(peer: Peer, counts: Sequence[int], seeds: Sequence[int], folder: Path) -> None:
    """Write what each mode with earlier learning starts with. A prompt that comes in any run is left out: its
    answer, at temperature 0 always the same, would be known.
    """
    to_come = [demo_workload(count, seed) for count in counts for seed in seeds]
    workload = demo_workload(LEARN_COUNT, LEARN_SEED).without(to_come)
    progress(f"learning from {len(workload)} of {LEARN_COUNT} prompts, which come in no run")
    arrivals = burst_arrivals(len(workload), WITHIN)
    alone = run_mode(peer, FIRST, workload, arrivals, [], [], folder, replay=False)
    guesses = guessed(alone["lengths"], LEARN_SEED)
    for mode in WARM:
        save = str(folder / mode.file_name)
        cold = replace(mode, learnt=False)
        run_mode(peer, cold, workload, arrivals, alone["lengths"], guesses, folder, replay=True, save=save)


def measure(
    peer: Peer, counts: Sequence[int], seeds: Sequence[int], load: float, slots: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield a row for each run: for each seed a burst of each count, and arrivals at `load` of the requests of
    the last one. The engine runs the requests once, and the modes replay them; those of the first burst run
    in the engine too, as a check.
    """
    for seed in seeds:
        for count in counts:
            workload = demo_workload(count, seed)
            arrivals = burst_arrivals(count, WITHIN)
            first = run_mode(peer, FIRST, workload, arrivals, [], [], folder, replay=False)
            check = (seed, count) == (seeds[0], counts[0])
            yield from _in_turn(peer, f"burst of {count}", workload, arrivals, first, folder, check=check)
        at_load = load_arrivals(first["service"], slots, load, seed)
        yield from _in_turn(peer, f"load {load:g}", workload, at_load, first, folder, check=False)


def _in_turn(
    peer: Peer,
    setting: str,
    workload: Workload,
    arrivals: Sequence[int],
    recorded: dict[str, Any],
    folder: Path,
    *,
    check: bool,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each mode. With `check`, each mode runs in the engine too, and its row has the mean
    latency found there.
    """
    lengths, guesses = recorded["lengths"], guessed(recorded["lengths"], workload.seed)
    fcfs_mean = 0.0
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        outcome = run_mode(peer, mode, workload, arrivals, lengths, guesses, folder, replay=True)
        found[mode.name] = row = {
            "measured": "steps",
            "setting": setting,
            "requests": len(workload),
            "seed": workload.seed,
            "mode": mode.name,
            **figures(outcome["latencies"]),
            "steps": outcome["steps"],
            "tokens": sum(outcome["lengths"]),
            "pauses": outcome["pauses"],
            "evictions": outcome["evictions"],
            "in_engine": None,
        }
        fcfs_mean = fcfs_mean or row["mean"]
        progress(
            f"{setting}, seed {workload.seed}: {mode.name}, {row['mean']:.1f} steps,"
            f" {row['mean'] / fcfs_mean:.2f} of {FCFS}"
        )
    if check:
        for mode in MODES:
            outcome = run_mode(peer, mode, workload, arrivals, lengths, guesses, folder, replay=False)
            found[mode.name]["in_engine"] = figures(outcome["latencies"])["mean"]
            found[mode.name]["same_texts"] = sum(
                ours == theirs for ours, theirs in zip(outcome["texts"], recorded["texts"], strict=True)
            )
            progress(f"{setting}, in the engine: {mode.name}, {found[mode.name]['in_engine']:.1f} steps")
    yield from found.values()


def run_mode(
    peer: Peer,
    mode: Mode,
    workload: Workload,
    arrivals: Sequence[int],
    lengths: Sequence[int],
    guesses: Sequence[int],
    folder: Path,
    *,
    replay: bool,
    save: str = "",
) -> dict[str, Any]:
    """Run requests under a mode; return the driver's answer."""
    return peer.ask(
        {
            "task": "burst",
            "scheduler": mode.scheduler,
            "requests": requests_of(workload, mode, arrivals, lengths, guesses),
            "environment": mode.environment_in(folder),
            "save": save,
            "replay": replay,
        }
    )
