"""The command line of `laps-sd bench engine`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.report import numbers


def arguments(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Return the options of the command. Exit with a message if one is wrong."""
    parser = argparse.ArgumentParser(prog="laps-sd bench engine", description=description)
    parser.add_argument("--target", type=Path, help="directory of the target (default: the demo pair)")
    parser.add_argument("--draft", type=Path, help="directory of the draft")
    parser.add_argument("--shape", choices=["memory-bound", "tiny"], help="a random pair instead")
    parser.add_argument(
        "--acceptance", type=float, help="keep proposals with this chance (default with --shape: 0.7)"
    )
    parser.add_argument(
        "--batch", type=numbers, default=[1, 4, 16, 64], help="batch sizes (default 1,4,16,64)"
    )
    parser.add_argument(
        "--kinds", help="kinds of prompts measured alone, by commas; all (default with the demo pair) or none"
    )
    parser.add_argument("--tokens", type=int, help="tokens per request at most (default 96; with --shape 32)")
    parser.add_argument("--turns", type=int, default=5, help="turns of every cell (default 5)")
    parser.add_argument(
        "--prompts", type=int, default=0,
        help="prompts of a cell; 0: of the mix twice the batch, 48 at least, of one kind the batch, 32 at least; with --shape the batch, 4 at least",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default float32; bfloat16 with --shape memory-bound",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of an operation (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--lookup", action="store_true", help="measure drafting by look-up too")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers' own modes out")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm")
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="an interpreter that has openvino-genai and optimum-intel"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(argv)
    if options.shape and options.target:
        parser.error("--shape makes a pair of its own: leave --target out")
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft go together")
    if options.turns < 2:
        parser.error("--turns must be 2 at least: one turn has no interval")
    if options.shape and options.acceptance is None:
        options.acceptance = 0.7
    options.kinds = options.kinds or ("none" if options.target else "all")
    options.tokens = options.tokens or (32 if options.shape else 96)
    options.dtype = options.dtype or ("bfloat16" if options.shape == "memory-bound" else "float32")
    return options


def public(given: Sequence[str]) -> list[str]:
    """Return the given options without the paths of interpreters on this machine."""
    hidden = list(given)
    for at, option in enumerate(given):
        name, equals, _ = option.partition("=")
        if name in ("--vllm", "--openvino"):
            if equals:
                hidden[at] = f"{name}=PYTHON"
            elif at + 1 < len(given):
                hidden[at + 1] = "PYTHON"
    return hidden
