"""The command line of `laps-sd bench control`, and its goals."""

from __future__ import annotations

import argparse
from typing import Any

from bench.report import command_line, numbers

GOAL_MS = 1.0
GOAL_GROWTH = 2.0
GOAL_BYTES = 2048


def arguments(description: str | None) -> argparse.Namespace:
    parser = command_line("control", description)
    parser.add_argument(
        "--queued", type=numbers, default=[1_000, 10_000, 100_000, 1_000_000], help="queue sizes"
    )
    parser.add_argument("--workers", type=numbers, default=[1, 10, 100, 1_000], help="numbers of workers")
    parser.add_argument("--slots", type=int, default=64, help="requests in one report (default 64)")
    parser.add_argument(
        "--reports", type=int, default=1_000, help="reports timed at each size (default 1000)"
    )
    parser.add_argument("--policy", default="laps-sd", help="the scheduler's policy (default laps-sd)")
    parser.add_argument(
        "--fake-workers", type=int, default=100, help="workers of the whole scheduler; 0 leaves it out"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the scheduler is watched")
    parser.add_argument(
        "--fake-round-s", type=float, default=0.8, help="round time of the fake workers (default 0.8)"
    )
    parser.add_argument(
        "--carried",
        type=numbers,
        default=[8, 16, 24],
        help="numbers of synthetic workers that one shard may carry, a run each; empty leaves them out",
    )
    parser.add_argument(
        "--output-tokens", type=int, default=250, help="median output of the synthetic workers (default 250)"
    )
    parser.add_argument(
        "--round-s",
        type=float,
        default=0.05,
        help="round time of the synthetic workers, and of the worker for which workers per shard are given "
        "(default 0.05)",
    )
    parser.add_argument(
        "--round-spread",
        type=float,
        default=0.1,
        help="share by which a round of a synthetic worker may be shorter or longer (default 0.1; 0: rounds at even "
        "distances, so that reports hardly ever wait for each other)",
    )
    parser.add_argument("--backlog", type=int, default=5_000, help="queued requests of the whole scheduler")
    parser.add_argument("--goal-ms", type=float, default=GOAL_MS, help=argparse.SUPPRESS)
    return parser.parse_args()


def verdict(rows: list[dict[str, Any]], goal_ms: float = GOAL_MS) -> tuple[bool, str]:
    """Return whether the rows of the core meet the goals, and the sentence for the summary line."""
    slowest = max(row["median_ms"] for row in rows)
    growth = max(row["ratio_shortest"] for row in rows)
    # Tables of the core double at times; per request of a short queue this would weigh too much.
    longest = max(row["queued"] for row in rows)
    memory = max(row["memory_per_queued_bytes"] for row in rows if row["queued"] == longest)
    met = slowest <= goal_ms and growth <= GOAL_GROWTH and memory < GOAL_BYTES
    return met, (
        f"at most {slowest:.2f} ms per report in the median (goal {goal_ms:g}), {growth:.2f} times as much with the "
        f"longest queue (goal {GOAL_GROWTH:g}), {memory:.0f} bytes per queued request (goal {GOAL_BYTES})"
    )
