"""The command line of `laps-sd bench serve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench._serve.cases import sigma_of
from bench._serve.workloads import LOADS
from bench.report import command_line
from scheduler_svc.core.policies import POLICIES

DEFAULT_SIGMAS = (0.3, None)
ALL_POLICIES = ("fcfs", "srpt-length", "laps-sd", "sjf-length", "las", "laps-sd-paper", "sd-index")


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    parser = command_line("serve", description)
    parser.add_argument(
        "--regime",
        choices=("policies", "multi-turn"),
        default="policies",
        help="what is compared: policies on one worker (default), or placements of conversations on three workers, "
        "of whose options only --seeds, --json, --resume and --runs count",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="multi-turn: keep the runs that the file of --json has, and make the others",
    )
    parser.add_argument(
        "--runs", type=int, metavar="N", help="multi-turn: make at most N runs now, of about a minute each"
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help=f"only these (default: {', '.join(ALL_POLICIES)})",
    )
    parser.add_argument(
        "--scenario", action="append", choices=list(LOADS), help="only these (default: all three)"
    )
    parser.add_argument(
        "--requests", type=int, default=36, help="requests per run (default 36: three of each kind)"
    )
    parser.add_argument(
        "--seeds", type=int, default=6, help="independent sets of requests and arrivals (default 6)"
    )
    parser.add_argument("--slots", type=int, default=1, help="requests in a round of the worker (default 1)")
    parser.add_argument(
        "--round-ms",
        type=float,
        default=15.0,
        metavar="MS",
        help="least time of a round; more than twice what one needs, to be sure (default 15; 0: as long as it takes)",
    )
    parser.add_argument(
        "--predictor",
        action="append",
        type=sigma_of,
        metavar="SIGMA",
        help="error of the length hints, or `none`: requests have neither a hint nor a class (default: 0.3 and none)",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="limit of each request (default 256)")
    parser.add_argument(
        "--warm-up", type=int, default=200, help="requests that teach the priors (default 200)"
    )
    parser.add_argument(
        "--figure", type=Path, help="draw measured and simulated ratios into this .png or .svg"
    )
    parser.add_argument("--engine", choices=("demo", "fake"), default="demo", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for name in ("requests", "seeds", "slots", "max_tokens", "warm_up"):
        least = 2 if name in ("requests", "warm_up") else 1
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if options.runs is not None and options.runs < 1:
        parser.error("--runs must be at least 1")
    if options.resume and options.json is None:
        parser.error("--resume needs --json, the file that it goes on with")
    if (options.resume or options.runs is not None) and options.regime != "multi-turn":
        parser.error("--resume and --runs are options of --regime multi-turn")
    if not 0 <= options.round_ms <= 1000:
        parser.error("--round-ms must be from 0 to 1000")
    options.scenario = list(dict.fromkeys(options.scenario or LOADS))
    options.predictor = list(dict.fromkeys(options.predictor or DEFAULT_SIGMAS))
    options.policy = list(dict.fromkeys(options.policy or ALL_POLICIES))
    return options
