"""The command line of `laps-sd bench chaos`."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench._faults import KINDS


def arguments(given: list[str] | None, description: str) -> argparse.Namespace:
    """Return the options of the command. Exit with a message if one is wrong."""
    parser = argparse.ArgumentParser(prog="laps-sd bench chaos", description=description)
    parser.add_argument("--faults", type=int, default=100, help="faults in all (default 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and of the requests (default 1)")
    parser.add_argument(
        "--engine", choices=("fake", "demo"), default="fake", help="scripted tokens, or the shipped pair"
    )
    parser.add_argument("--workers", type=int, help="at the start (default: fake 6, demo 2)")
    parser.add_argument("--slots", type=int, help="of each worker (default 8)", default=8)
    parser.add_argument("--requests", type=int, help="open at once (default: fake 200, demo 24)")
    parser.add_argument("--pieces", type=int, help="distinct requests (default: fake 120, demo 24)")
    parser.add_argument("--every-s", type=float, help="mean time between faults (default: fake 1, demo 10)")
    parser.add_argument(
        "--round-s", type=float, default=0.1, help="of a round of the fake engine (default 0.1)"
    )
    parser.add_argument(
        "--cancel-share", type=float, default=0.03, help="of the requests that are cancelled (default 0.03)"
    )
    parser.add_argument(
        "--kinds", help=f"only these kinds of faults, separated by commas, of: {', '.join(KINDS)}"
    )
    parser.add_argument("--floor", type=int, help="requests completed at least (default: as many as faults)")
    parser.add_argument(
        "--logs", type=Path, help="keep the processes' logs in this folder (violations keep them anyway)"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(given)
    fake = options.engine == "fake"
    for name, of_fake, of_demo in (
        ("workers", 6, 2),
        ("requests", 200, 24),
        ("pieces", 120, 24),
        ("every_s", 1.0, 10.0),
    ):
        if getattr(options, name) is None:
            setattr(options, name, of_fake if fake else of_demo)
    if options.floor is None:
        options.floor = options.faults
    kinds = tuple(kind.strip() for kind in options.kinds.split(",")) if options.kinds else KINDS
    unknown = set(kinds) - set(KINDS)
    if unknown:
        parser.error(f"no such kind of fault: {', '.join(sorted(unknown))}")
    if not fake:  # a real engine has no request that is known to end it
        kinds = tuple(kind for kind in kinds if kind != "deadly request")
    options.kinds = kinds
    if options.workers < 2 or options.faults < 1:
        parser.error("--workers must be at least 2, --faults at least 1")
    return options
