"""The command line of `laps-sd bench gpu`, and its goal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from bench._shapes import PAIRS
from bench.report import command_line, numbers

ACCEPTANCE = 0.7
"""Chance that a proposal is kept."""
TEMPERATURE = 0.8
GOAL_OTHER = 0.10
GOAL_BATCH = 32


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    parser = command_line("gpu", description)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=list(PAIRS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128], help="default 1,8,32,128")
    parser.add_argument(
        "--context",
        type=numbers,
        default=[1024, 8192],
        help="tokens before the timed rounds (default 1024,8192)",
    )
    parser.add_argument("--draft-len", type=int, help="always so many proposals (default: by goodput)")
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds (default 50)")
    parser.add_argument("--prefill-chunk", type=int, default=8192, help="context tokens prefilled per round")
    parser.add_argument(
        "--bandwidth", type=float, help="of the device's memory, GB/s, where its name is not known"
    )
    parser.add_argument(
        "--peak", type=float, help="of the device, dense TFLOP/s, where its name is not known"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    options = parser.parse_args(argv)
    if (options.bandwidth is None) != (options.peak is None):
        parser.error("--bandwidth and --peak go together")
    return options


def verdict(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Return whether the goal is met at every context that could be measured, and the sentence for the
    summary line.
    """
    judged = [row for row in rows if row["batch"] == GOAL_BATCH and row["skipped"] is None]
    if not judged:
        return False, f"no round of batch {GOAL_BATCH} was measured, so nothing is judged"
    told = [
        f"batch {row['batch']}, context {row['context']}: {row['other_share']:.1%} of a round is not draft or verify kernels "
        f"(goal {GOAL_OTHER:.0%})"
        for row in judged
    ]
    return all(row["other_share"] <= GOAL_OTHER for row in judged), "; ".join(told)
