"""The command line of `laps-sd bench engine`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench._table.homes import cache_folder
from bench._table.plan import MODELS, PRECISIONS, read_only, usable_threads
from bench.report import command_line, numbers

TABLE_BATCHES, TABLE_TURNS, QUICK_BATCHES, QUICK_TURNS = [1, 4, 16], 6, [1, 16], 3
TABLE_PRECISIONS = ("bfloat16", "int8", "int4")
TABLE_THREADS = (1, 2, 4)


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Return the options of the command. Exit with a message if one is wrong."""
    parser = command_line("engine", description)
    parser.add_argument("--target", type=Path, help="directory of the target (default: the demo pair)")
    parser.add_argument("--draft", type=Path, help="directory of the draft")
    parser.add_argument(
        "--shape", choices=["memory-bound", "qwen2.5-0.5b", "tiny"], help="a random pair instead"
    )
    parser.add_argument(
        "--acceptance", type=float, help="keep proposals with this chance (default with --shape: 0.7)"
    )
    parser.add_argument("--batch", type=numbers, help="batch sizes (default 1,4,16,64; of the table 1,4,16)")
    parser.add_argument(
        "--kinds", help="kinds of prompts measured alone, by commas; all (default with the demo pair) or none"
    )
    parser.add_argument("--tokens", type=int, help="tokens per request at most (default 96; with --shape 32)")
    parser.add_argument("--turns", type=int, help="turns of every cell (default 5; of the table 6)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default float32; bfloat16 with --shape, but for tiny",
    )
    parser.add_argument(
        "--threads", type=_threads,
        help="threads of an operation, or `all` cores (default 1); of the table several (default 1,2,4, as far as the machine has them)",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers",
        action="store_true",
        help="leave transformers' own modes out; of the table all other engines",
    )
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm")
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="an interpreter that has openvino-genai and optimum-intel"
    )
    of_table = parser.add_argument_group(
        "table", "engines by precision and threads, without speculation, in place of the cells; engines without an interpreter are installed"
    )  # fmt: skip
    of_table.add_argument("--table", action="store_true", help="measure the table, in about 16 minutes")
    of_table.add_argument("--quick", action="store_true", help="with 3 turns, at batch 1 and 16")
    of_table.add_argument(
        "--only", type=read_only, default={}, metavar="NAME=VALUE+VALUE,…",
        help="some cells by model, precision, threads, batch (prefill is one) and engine; other rows of the --json file stay",
    )  # fmt: skip
    of_table.add_argument("--models", default=",".join(MODELS), help=f"(default {','.join(MODELS)})")
    of_table.add_argument(
        "--precisions",
        default=",".join(TABLE_PRECISIONS),
        help=f"of the weights, {', '.join(PRECISIONS)} (default {','.join(TABLE_PRECISIONS)})",
    )
    of_table.add_argument(
        "--minutes", type=float, default=25.0, help="begin nothing after this time (default 25)"
    )
    of_table.add_argument("--llamacpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    of_table.add_argument(
        "--cache", type=Path, default=cache_folder(), metavar="DIR",
        help=f"for models and engines that are made once (default {cache_folder()})".replace(str(Path.home()), "~"),
    )  # fmt: skip
    options = parser.parse_args(argv)
    options.cache = options.cache.absolute()
    if options.table:
        return _of_table(parser, options)
    options.threads = options.threads or [1]
    if len(options.threads) > 1:
        parser.error("--threads: several numbers are for --table")
    (options.threads,) = options.threads
    options.batch = options.batch or [1, 4, 16, 64]
    options.turns = 5 if options.turns is None else options.turns
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
    options.dtype = options.dtype or ("bfloat16" if options.shape not in (None, "tiny") else "float32")
    return options


def _threads(text: str) -> list[int]:
    found = [usable_threads()] if text == "all" else numbers(text)
    if not found or min(found) < 1:
        raise ValueError("1 thread at least")
    return found


def _of_table(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Return the options of the table. Exit with a message if one is wrong."""
    if options.shape or options.target:
        parser.error("--table has models of its own (--models): leave --shape and --target out")
    options.turns = options.turns or (QUICK_TURNS if options.quick else TABLE_TURNS)
    if options.turns < 2:
        parser.error("--turns must be 2 at least: one turn has no interval")
    options.batch = options.batch or (QUICK_BATCHES if options.quick else TABLE_BATCHES)
    options.threads = options.threads or [n for n in TABLE_THREADS if n <= max(2, usable_threads())]
    for name, known in (("models", MODELS), ("precisions", PRECISIONS)):
        chosen = getattr(options, name).split(",")
        if unknown := [one for one in chosen if one not in known]:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
        setattr(options, name, chosen)
    return options
