"""The command line of `laps-sd bench chaos`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench._faults.plans import ENGINE_KINDS, KINDS
from bench.report import command_line

DEFAULTS = {
    "fake": {"workers": 6, "slots": 8, "requests": 200, "pieces": 120, "every_s": 1.0},
    "demo": {"workers": 2, "slots": 8, "requests": 24, "pieces": 24, "every_s": 10.0},
    # A worker over vLLM takes 20 s to start, so that with two of them none would be left too often.
    "vllm": {"workers": 3, "slots": 4, "requests": 24, "pieces": 24, "every_s": 10.0},
}
"""Defaults of each engine (our choice for two cores)."""


def arguments(given: list[str] | None, description: str | None) -> argparse.Namespace:
    """Return the options of the command. Exit with a message if one is wrong."""
    parser = command_line("chaos", description)
    parser.add_argument("--faults", type=int, default=100, help="faults in all (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and of the requests (default 1)")
    parser.add_argument(
        "--engine",
        choices=tuple(DEFAULTS),
        default="fake",
        help="scripted tokens, the shipped pair, or the shipped pair in vLLM",
    )
    parser.add_argument(
        "--vllm", metavar="PYTHON", type=Path, help="an interpreter that has vllm, for --engine vllm"
    )
    parser.add_argument("--workers", type=int, help=f"at the start ({_defaults('workers')})")
    parser.add_argument("--slots", type=int, help=f"of each worker ({_defaults('slots')})")
    parser.add_argument("--requests", type=int, help=f"open at once ({_defaults('requests')})")
    parser.add_argument("--pieces", type=int, help=f"distinct requests ({_defaults('pieces')})")
    parser.add_argument("--every-s", type=float, help=f"mean time between faults ({_defaults('every_s')})")
    parser.add_argument(
        "--round-s", type=float, default=0.1, help="of a round of the fake engine (default 0.1)"
    )
    parser.add_argument(
        "--kinds", help=f"only these kinds of faults, separated by commas, of: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--logs", type=Path, help="keep the processes' logs in this folder (violations keep them anyway)"
    )
    options = parser.parse_args(given)
    if (options.engine == "vllm") != (options.vllm is not None):
        parser.error("--engine vllm and --vllm PYTHON go together")
    if options.vllm is not None:
        options.vllm = options.vllm.absolute()
    for name, default in DEFAULTS[options.engine].items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    kinds = tuple(kind.strip() for kind in options.kinds.split(",")) if options.kinds else KINDS
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"no such kind of fault: {', '.join(sorted(unknown))}")
    # The fake engine has no process of its own, and a real engine no request that is known to end it.
    impossible = ENGINE_KINDS if options.engine == "fake" else {"deadly request"}
    options.kinds = tuple(kind for kind in kinds if kind not in impossible)
    if options.workers < 2 or options.faults < 1:
        parser.error("--workers must be at least 2, --faults at least 1")
    return options


def _defaults(name: str) -> str:
    """Return the defaults of an option for the help."""
    return "default: " + ", ".join(f"{engine} {values[name]:g}" for engine, values in DEFAULTS.items())
