"""Options of the command, and the regimes that they select and change."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench._policy.regime import REGIMES, Regime, read_regime, router_of, settings_of
from bench._simulations import add_arguments
from bench.report import command_line
from scheduler_svc.core.policies import POLICIES
from simulator.routers import ROUTERS
from simulator.workload import Arrivals, Predictor

CACHES = "cache-"
"""Beginning of the names of regimes that compare placements, which `--regime caches` runs and `all` does not."""


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Return the options of the command. Exit with a message if one is wrong."""
    parser = command_line("policy", description)
    names = ", ".join(sorted(path.stem for path in REGIMES.glob("*.toml")))
    parser.add_argument(
        "--regime",
        action="append",
        help=f"a regime, a file of one, all (but those of caches) or caches (default chat); there are: {names}",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help="only these, as NAME or NAME:setting=value,… (default: what the regime names); reports_per_s=0.01 lets the "
        "core receive up to four rounds of a worker together, router=NAME places requests in another way ("
        + ", ".join(ROUTERS)
        + "); there are: "
        + ", ".join([*sorted(POLICIES), "oracle"]),
    )
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=5, help="independent draws of the jobs (default 5)")
    parser.add_argument("--requests", type=int, help="requests per draw (default: the regime's)")
    parser.add_argument("--load", type=float, help="offered load, 1 = what the workers can just do")
    parser.add_argument("--batch", type=int, help="slots of a worker")
    parser.add_argument("--workers", type=int, help="workers")
    parser.add_argument(
        "--trace",
        type=Path,
        help="arrivals and lengths from a file: CSV arrival_s,input_tokens,output_tokens or Mooncake",
    )
    parser.add_argument(
        "--predictor", help="error of the length prediction: sigma of its logarithm (0.3, 1.0, …), or none"
    )
    parser.add_argument(
        "--figure",
        type=Path,
        help="draw into this file (.png or .svg): of one regime latency distribution and mean against load (with --loads), "
        "of several the ratios of laps-sd",
    )
    parser.add_argument(
        "--loads",
        action="append",
        default=[],
        metavar="[REGIME:]LOAD,LOAD,…",
        help="also run the regime (default: each) at these loads, with half of its requests",
    )
    options = parser.parse_args(argv)
    if options.seeds < 1 or options.processes < 1:
        parser.error("--seeds and --processes must be at least 1")
    for spec in options.policy or ():
        name = spec.partition(":")[0]
        if name != "oracle" and name not in POLICIES:
            parser.error(
                f"--policy: there is no {name!r}; there are: {', '.join([*sorted(POLICIES), 'oracle'])}"
            )
        try:
            settings_of(spec, {})
            router_of(spec)
        except ValueError as error:
            parser.error(f"--policy {error}")
    try:
        options.loads = [loads_of(text) for text in options.loads]
    except ValueError:
        parser.error("--loads must be [REGIME:]LOAD,LOAD,… with loads above 0, for example chat:0.5,0.7,0.9")
    return options


def loads_of(text: str) -> tuple[str, list[float]]:
    """Return (regime or "" for each, loads). Raise ValueError if the text cannot be read."""
    name, _, numbers = text.rpartition(":")
    loads = sorted({float(number) for number in numbers.split(",")})
    if not all(0 < load < float("inf") for load in loads):
        raise ValueError(text)
    return name, loads


def regimes_of(options: argparse.Namespace) -> list[Regime]:
    """Return the requested regimes, as changed by the options. A changed regime has no expectations."""
    wanted = options.regime or ["chat"]
    if wanted == ["all"]:
        paths = sorted(path for path in REGIMES.glob("*.toml") if not path.name.startswith(CACHES))
    elif wanted == ["caches"]:
        paths = sorted(REGIMES.glob(f"{CACHES}*.toml"))
    else:
        paths = [
            path if (path := Path(name)).suffix == ".toml" else REGIMES / f"{name}.toml" for name in wanted
        ]
    regimes = {regime.name: regime for path in paths for regime in [adapted(read_regime(path), options)]}
    for regime in list(regimes.values()):
        for expected in regime.expect:
            if expected.of_regime and expected.of_regime not in regimes:
                other = adapted(read_regime(REGIMES / f"{expected.of_regime}.toml"), options)
                regimes[other.name] = other
    return list(regimes.values())


def adapted(regime: Regime, options: argparse.Namespace) -> Regime:
    """Return the regime as changed by the options."""
    workload, machine = regime.workload, regime.machine
    arrivals, predictor = workload.arrivals, workload.predictor
    if options.trace is not None:
        arrivals = Arrivals(process="trace", file=str(options.trace.absolute()), load=arrivals.load)
    if options.load is not None:
        arrivals = dataclasses.replace(arrivals, load=options.load)
    if options.predictor is not None:
        known = options.predictor != "none"
        predictor = (
            Predictor(kind="noisy", sigma=float(options.predictor)) if known else Predictor(kind="none")
        )
    if options.batch is not None:
        machine = dataclasses.replace(machine, slots=options.batch)
    workload = dataclasses.replace(
        workload,
        arrivals=arrivals,
        predictor=predictor,
        requests=options.requests or workload.requests,
    )
    changed = dataclasses.replace(
        regime, workload=workload, machine=machine, workers=options.workers or regime.workers
    )
    if options.policy:
        changed = dataclasses.replace(changed, policies=tuple(options.policy))
    if changed != regime:
        changed = dataclasses.replace(changed, expect=())
    return changed
