"""What does a policy gain? The production core in virtual time, policy against policy. `laps-sd bench policy`

Every policy runs the same jobs (paired by seed); each figure stands as a ratio to FCFS and to the oracle, with the 95 %
interval over seeds. A regime is a file of bench/regimes: arrivals, lengths, acceptance, predictor, machine, and what must
hold there. The command exits non-zero when an expectation of a regime that ran fails.

Examples:
  laps-sd bench policy --regime chat --details
  laps-sd bench policy --regime chat --loads 0.5,0.7,0.8,0.9 --figure chat.svg
  laps-sd bench policy --regime all --data ../shared/data --json policy.json
  laps-sd bench policy --trace day.csv --predictor 1.0 --batch 32 --workers 4 --load 0.9 --policy fcfs --policy laps-sd
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import math
import statistics
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench._policy_tables import show, show_details, show_verdicts
from bench._simulations import add_arguments, run_all
from bench.report import Interval, finish, ratio_interval
from scheduler_svc.core.estimates.errors import Basis, EstimateErrors, Moment
from scheduler_svc.core.policies import POLICIES, Policy, policy_named
from scheduler_svc.core.settings import CoreSettings
from simulator.cluster import Cluster
from simulator.draw import draw
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.oracle import Oracle
from simulator.outcome import Outcome
from simulator.workload import AcceptanceModel, Arrivals, Predictor, Workload, described

REGIMES = Path(__file__).parent / "regimes"
ALWAYS = ("fcfs", "oracle", "srpt-length", "sd-index", "laps-sd")
"""Policies that run in every regime that names no others: the yardsticks, the strongest rival, and ours."""
OURS = "laps-sd"
LEVELS_COST = 1.02
"""Upper bound of the mean latency of `laps-sd` over that of its level-free limit, in every regime."""
RIVALS = (
    "fcfs", "sjf-length", "srpt-length", "mlfq", "las", "laps-sd-paper", "laps-sd-paper:perceived_levels=true",
    "sd-index", "laps-sd", "oracle",
)  # fmt: skip
"""Policies that `--rivals` runs in every regime."""
LEVELS_AT_WORK = 3
"""Levels of `laps-sd` that carry work in every goal regime: with fewer it would be no more than an index."""
WORK_SHARE = 0.01
"""Share of the machine's time below which a level carries no work. Our choice."""
SWEEP_SHARE = 1 / 3
"""Share of a regime's requests at each load of `--loads`: it shows a course, and no goal is judged by it."""
SWEPT = ("fcfs", "oracle", "srpt-length", "laps-sd")
"""Policies that `--loads` shows of a regime that runs them all; of other regimes it shows all that run."""
DISTRIBUTION_POINTS = 200
LEARNED_FROM = 50
"""Requests of each tenant that its means leave out: until then the error of its predictions is not known."""


# -- regimes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Bounds of `figure` of `policy` divided by that (or `of_figure`) of `of`, in this regime or in
    `of_regime`, mean over seeds. Regimes are paired by seed, so another regime should draw the same jobs.
    """

    policy: str = "laps-sd"
    figure: str = "mean_s"
    of: str = "fcfs"
    of_figure: str = ""
    of_regime: str = ""
    at_most: float = float("inf")
    at_least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Workload, machines and settings of the core, with the expectations."""

    title: str
    workers: int = 1
    policies: tuple[str, ...] = ()
    machine: Machine = field(default_factory=Machine)
    workload: Workload = field(default_factory=Workload)
    settings: Mapping[str, Any] = field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()
    name: str = ""

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Return the expectations of the file, and the one that every regime has."""
        return (*self.expect, Expectation(of="sd-index", at_most=LEVELS_COST))

    @property
    def runs(self) -> tuple[str, ...]:
        """Return the policies that run, each once."""
        named = [*self.policies] or [*ALWAYS]
        for expected in self.expectations if not self.policies else self.expect:
            named += [expected.policy, expected.of]
        return tuple(dict.fromkeys(named))


def read_regime(path: Path) -> Regime:
    """Read a regime. Raise ValueError with the table and the key that is wrong."""
    with path.open("rb") as file:
        regime = described(Regime, tomllib.load(file), path.name)
    return dataclasses.replace(regime, name=path.stem)


def make_policy(spec: str, jobs: Mapping[str, Job], machine: Machine, settings: CoreSettings) -> Policy:
    """Return `oracle`, or a policy with the knowledge of production."""
    name = spec.partition(":")[0]
    return Oracle(settings, jobs, machine) if name == "oracle" else policy_named(name, settings)


def settings_of(spec: str, common: Mapping[str, Any]) -> CoreSettings:
    """Return the settings of a policy: `NAME:setting=value,setting=value` sets those that differ from the
    regime's.
    """
    own: dict[str, Any] = {}
    for part in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = part.partition("=")
        try:
            own[key] = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            raise ValueError(f"{spec}: {key} must be true, false or a number, not {value!r}") from None
    return described(CoreSettings, {**common, **own}, spec)


# -- one run --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _jobs(workload: Workload, machine: Machine, workers: int, seed: int, data: Path | None) -> list[Job]:
    return draw(workload, machine, workers, seed, data)


def simulate(regime: Regime, spec: str, seed: int, data: Path | None) -> dict[str, Any]:
    """Run one policy on the jobs of one seed. Return plain figures, in seconds unless their name has another
    unit.
    """
    machine = regime.machine
    jobs = _jobs(regime.workload, machine, regime.workers, seed, data)
    began_s = time.process_time()
    outcome = Cluster(
        jobs,
        machine,
        regime.workers,
        lambda by_id, settings: make_policy(spec, by_id, machine, settings),
        settings_of(spec, regime.settings),
    ).run()
    return {**figures(outcome, machine, regime.workers), "cpu_s": time.process_time() - began_s}


def figures(outcome: Outcome, machine: Machine, workers: int) -> dict[str, Any]:
    """Return the reported figures of a run."""
    fates = outcome.fates
    latencies = sorted(fate.latency_s for fate in fates)
    after = sorted(fate.perceptible_after for fate in fates if fate.perceptible_after is not None)
    return {
        "mean_s": statistics.fmean(latencies),
        "p50_s": quantile(latencies, 0.50),
        "p90_s": quantile(latencies, 0.90),
        "p99_s": quantile(latencies, 0.99),
        "mean_slowdown": statistics.fmean(fate.latency_s / machine.alone_s(fate.job) for fate in fates),
        "longest_wait_s": max(fate.waited_s for fate in fates),
        "first_token_s": statistics.fmean(fate.first_token_s - fate.job.arrival_s for fate in fates),
        "preemptions": statistics.fmean(fate.preemptions for fate in fates),
        "evictions": statistics.fmean(fate.evictions for fate in fates),
        "utilisation": outcome.busy_s / outcome.end_s / workers,
        "perceptible_share": len(after) / len(fates),
        "perceptible_at_arrival_share": after.count(0) / len(fates),
        **{
            f"perceptible_after_rounds{name}": found if after else None
            for name, found in (
                ("", statistics.fmean(after or [0])),
                ("_p50", quantile(after or [0], 0.5)),
                ("_p90", quantile(after or [0], 0.9)),
            )
        },
        "level_s": {str(level): outcome.level_s[level] for level in sorted(outcome.level_s)},
        "level_requests": {
            str(level): len(outcome.level_requests[level]) for level in sorted(outcome.level_s)
        },
        **tenant_means(outcome),
        "estimates": estimates(outcome.estimate_errors),
        "latencies_s": [
            quantile(latencies, (point + 0.5) / DISTRIBUTION_POINTS) for point in range(DISTRIBUTION_POINTS)
        ],
    }


def tenant_means(outcome: Outcome) -> dict[str, float]:
    """Return the mean latency of each group of tenants, `mean_s_NAME`, without the first `LEARNED_FROM` of each tenant."""
    latencies: dict[str, list[float]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for fate in sorted(outcome.fates, key=lambda fate: fate.job.arrival_s):
        tenant = fate.job.tenant
        seen[tenant] += 1
        if tenant and seen[tenant] > LEARNED_FROM:
            latencies[tenant.rpartition("-")[0]].append(fate.latency_s)
    return {f"mean_s_{group}": statistics.fmean(found) for group, found in latencies.items()}


def estimates(errors: EstimateErrors) -> list[dict[str, Any]]:
    """Return actual over predicted remaining service, by the moment of the estimate and the basis of its
    length.
    """
    return [
        {
            "moment": moment.value,
            "basis": basis.value,
            "requests": found.count,
            "predicted_s": found.predicted_s,
            "actual_s": found.actual_s,
            "log_rms": found.rms,
            "ratio_p10": math.exp(found.quantile(0.1)),
            "ratio_p50": math.exp(found.quantile(0.5)),
            "ratio_p90": math.exp(found.quantile(0.9)),
        }
        for moment in Moment
        for basis in Basis
        if (found := errors.by.get((moment, basis))) is not None
    ]


def quantile(ordered: Sequence[float], level: float) -> float:
    """Return the smallest of the values, given in ascending order, that at least this
    share does not exceed.
    """
    return ordered[min(len(ordered) - 1, int(level * len(ordered)))]


# -- many runs ------------------------------------------------------------------------------------------------------------

Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""Figures of each seed, in order, by (regime, policy)."""


def run_regimes(regimes: Sequence[Regime], seeds: int, data: Path | None, processes: int) -> Runs:
    """Run every policy of every regime on every seed, in that number of processes."""
    tasks = {
        (regime.name, spec, seed): (regime, spec, seed, data)
        for regime in regimes
        for seed in range(1, seeds + 1)
        for spec in regime.runs
    }
    found: Runs = defaultdict(list)
    for (name, spec, _), figures in run_all(
        simulate, tasks, processes, lambda key: f"{key[0]}: {key[1]}"
    ).items():
        found[name, spec].append(figures)
    return dict(found)


def ratio(
    runs: Runs,
    regime: str,
    policy: str,
    of: str,
    figure: str,
    of_figure: str = "",
    of_regime: str = "",
) -> Interval:
    """Return the ratio, paired over seeds. One seed has no interval."""
    runs_of_both = zip(runs[regime, policy], runs[of_regime or regime, of], strict=True)
    pairs = [(ours[figure], theirs[of_figure or figure]) for ours, theirs in runs_of_both]
    if len(pairs) > 1:
        return ratio_interval(pairs)
    alone = pairs[0][0] / pairs[0][1]
    return Interval(alone, alone, alone)


def rows_of(regime: Regime, runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """Return one aggregated row per policy."""
    rows = []
    for spec in regime.runs:
        own = runs[regime.name, spec]
        row: dict[str, Any] = {"kind": "policy", "regime": regime.name, "policy": spec}
        for figure in own[0]:
            if isinstance(own[0][figure], float | int):
                row[figure] = statistics.fmean(run[figure] for run in own)
        for base in ("fcfs", "oracle", "srpt-length"):
            if base in regime.runs:
                for figure, label in (("mean_s", ""), ("p99_s", "p99_"), ("longest_wait_s", "longest_wait_")):
                    found = ratio(runs, regime.name, spec, base, figure)
                    key = f"{label}ratio_{base.replace('-', '_')}"
                    row |= {key: found.middle, f"{key}_low": found.low, f"{key}_high": found.high}
        if spec == OURS:
            row["ratios"] = {
                other: dataclasses.astuple(ratio(runs, regime.name, spec, other, "mean_s"))
                for other in regime.runs
                if other != spec
            }
        for name in ("", "_p50", "_p90"):
            key = f"perceptible_after_rounds{name}"
            after = [run[key] for run in own if run[key] is not None]
            row[key] = statistics.fmean(after) if after else None
        for name in ("level_s", "level_requests"):
            levels = sorted({int(level) for run in own for level in run[name]})
            row[name] = {
                str(level): statistics.fmean(run[name].get(str(level), 0.0) for run in own)
                for level in levels
            }
        pooled = sorted(itertools.chain.from_iterable(run["latencies_s"] for run in own))
        row["latencies_s"] = [
            float(f"{quantile(pooled, (point + 0.5) / DISTRIBUTION_POINTS):.4g}")
            for point in range(DISTRIBUTION_POINTS)
        ]
        row["estimates"] = pooled_estimates([run["estimates"] for run in own])
        row["seeds"] = seeds
        rows.append(row)
    return rows


def pooled_estimates(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the estimates pooled over seeds: sums are added, the root mean square is that of all, quantiles
    are weighted means of the seeds'.
    """
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for found in itertools.chain.from_iterable(runs):
        by[found["moment"], found["basis"]].append(found)
    order = [moment.value for moment in Moment]
    pooled = []
    for (moment, basis), parts in sorted(by.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        counts = [part["requests"] for part in parts]
        row = {"moment": moment, "basis": basis, "requests": sum(counts)}
        row |= {key: sum(part[key] for part in parts) for key in ("predicted_s", "actual_s")}
        row["log_rms"] = math.sqrt(statistics.fmean([part["log_rms"] ** 2 for part in parts], counts))
        for key in ("ratio_p10", "ratio_p50", "ratio_p90"):
            row[key] = statistics.fmean([part[key] for part in parts], counts)
        pooled.append(row)
    return pooled


def short(value: Any) -> Any:
    """Return the value with six significant digits: more than the seeds justify, in a
    file of moderate size.
    """
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: short(each) for key, each in value.items()}
        case list() | tuple():
            return [short(each) for each in value]
    return value


def levels_at_work(level_s: Mapping[str, float]) -> int:
    """Return the number of levels that carry work."""
    return sum(seconds >= WORK_SHARE * sum(level_s.values()) for seconds in level_s.values())


def judged(regime: Regime, runs: Runs) -> list[dict[str, Any]]:
    """Return each expectation with its result."""
    verdicts = []
    for expected in regime.expectations:
        of_regime = expected.of_regime or regime.name
        if (regime.name, expected.policy) not in runs or (of_regime, expected.of) not in runs:
            continue
        found = ratio(
            runs,
            regime.name,
            expected.policy,
            expected.of,
            expected.figure,
            expected.of_figure,
            expected.of_regime,
        )
        verdicts.append(
            {
                "regime": regime.name,
                "policy": expected.policy,
                "figure": expected.figure,
                "of": " ".join(
                    part
                    for part in (
                        expected.of,
                        expected.of_figure,
                        f"in {expected.of_regime}" if expected.of_regime else "",
                    )
                    if part
                ),
                "found": found.middle,
                "found_low": found.low,
                "found_high": found.high,
                "at_least": expected.at_least,
                "at_most": expected.at_most if expected.at_most < math.inf else None,
                "met": expected.at_least <= found.middle <= expected.at_most,
            }
        )
    if regime.expect and (regime.name, OURS) in runs:
        counts = [levels_at_work(run["level_s"]) for run in runs[regime.name, OURS]]
        verdicts.append(
            {
                "regime": regime.name,
                "policy": OURS,
                "figure": "levels_at_work",
                "of": "",
                "found": min(counts),
                "found_low": min(counts),
                "found_high": max(counts),
                "at_least": LEVELS_AT_WORK,
                "at_most": None,
                "met": min(counts) >= LEVELS_AT_WORK,
            }
        )
    return verdicts


# -- mean against load ----------------------------------------------------------------------------------------------------


def at_loads(regime: Regime, loads: Sequence[float]) -> list[Regime]:
    """Return the regime at each load, shorter and without expectations. Raise ValueError
    if it has no load.
    """
    arrivals = regime.workload.arrivals
    if arrivals.process == "burst":
        raise ValueError(f"--loads: {regime.name} is a burst and has no load")
    requests = max(1, round(regime.workload.requests * SWEEP_SHARE))
    return [
        dataclasses.replace(
            regime,
            name=f"{regime.name} at load {load:g}",
            policies=SWEPT if set(SWEPT) <= set(regime.runs) else regime.runs,
            expect=(),
            workload=dataclasses.replace(
                regime.workload, requests=requests, arrivals=dataclasses.replace(arrivals, load=load)
            ),
        )
        for load in loads
    ]


def sweep_rows(regime: Regime, loads: Sequence[float], runs: Runs) -> list[dict[str, Any]]:
    """Return one row per load and policy."""
    return [
        {
            "kind": "sweep",
            "regime": regime.name,
            "load": load,
            "requests": at.workload.requests,
            "policy": spec,
            "mean_s": statistics.fmean(run["mean_s"] for run in runs[at.name, spec]),
        }
        for load, at in zip(loads, at_loads(regime, loads), strict=True)
        for spec in at.runs
    ]


# -- the command ----------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench policy",
        description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(sorted(path.stem for path in REGIMES.glob("*.toml")))
    parser.add_argument(
        "--regime",
        action="append",
        help=f"a regime, a file of one, or all (default chat); there are: {names}",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help="only these, as NAME or NAME:setting=value,… (default: what the regime names); there are: "
        + ", ".join([*sorted(POLICIES), "oracle"]),
    )
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, default=5, help="independent draws of the jobs (default 5)")
    parser.add_argument("--requests", type=int, help="requests per draw (default: the regime's)")
    parser.add_argument("--load", type=float, help="offered load, 1 = what the workers can just do")
    parser.add_argument("--batch", type=int, help="slots of a worker")
    parser.add_argument("--workers", type=int, help="workers")
    parser.add_argument(
        "--kv-tokens", type=int, help="tokens of context that a worker's KV holds (default: endless)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="arrivals and lengths from a file: CSV arrival_s,input_tokens,output_tokens or Mooncake",
    )
    parser.add_argument("--acceptance", type=Path, help="replay recorded rounds from a file (JSON lines)")
    parser.add_argument(
        "--predictor", help="error of the length prediction: sigma of its logarithm (0.3, 1.0, …), or none"
    )
    parser.add_argument(
        "--rivals", action="store_true", help="run every policy in every regime (takes twice as long)"
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="also tell levels, perceptibility and errors of the estimates",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
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


def command_of(options: argparse.Namespace) -> str:
    """Return the command that reproduces these figures: all that determines them, and nothing about the
    machine it ran on.
    """
    said = [("regime", name) for name in options.regime or ["chat"]]
    said += [("policy", spec) for spec in options.policy or ()]
    for name in ("requests", "load", "batch", "workers", "kv_tokens", "trace", "acceptance", "predictor"):
        value = getattr(options, name)
        if value is not None:
            said.append((name.replace("_", "-"), value.name if isinstance(value, Path) else value))
    said += [("seeds", options.seeds)]
    for name, loads in options.loads:
        said.append(("loads", f"{name}:" * bool(name) + ",".join(f"{load:g}" for load in loads)))
    return " ".join(
        ["laps-sd bench policy", *(f"--{name} {value}" for name, value in said)]
        + ["--rivals"] * options.rivals
    )


def about(options: argparse.Namespace, regimes: Sequence[Regime]) -> dict[str, Any]:
    """Return the facts of the run that the rows do not contain."""
    return {
        "command": command_of(options),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seeds": options.seeds,
        "regimes": {
            regime.name: {
                key: value
                for key, value in dataclasses.asdict(regime).items()
                if key not in ("name", "policies", "expect")
            }
            | {"goals": len(regime.expect)}
            for regime in regimes
        },
    }


def regimes_of(options: argparse.Namespace) -> list[Regime]:
    """Return the requested regimes, as changed by the options. A changed regime has no expectations."""
    wanted = options.regime or ["chat"]
    if wanted == ["all"]:
        paths = sorted(REGIMES.glob("*.toml"))
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
    arrivals, predictor, kinds = workload.arrivals, workload.predictor, workload.kinds
    if options.trace is not None:
        arrivals = Arrivals(process="trace", file=str(options.trace.absolute()), load=arrivals.load)
    if options.load is not None:
        arrivals = dataclasses.replace(arrivals, load=options.load)
    if options.predictor is not None:
        known = options.predictor != "none"
        predictor = (
            Predictor(kind="noisy", sigma=float(options.predictor)) if known else Predictor(kind="none")
        )
    if options.acceptance is not None:
        replay = AcceptanceModel(kind="recorded", file=str(options.acceptance.absolute()))
        kinds = tuple(dataclasses.replace(kind, acceptance=replay) for kind in kinds)
    if options.batch is not None:
        machine = dataclasses.replace(machine, slots=options.batch)
    if options.kv_tokens is not None:
        machine = dataclasses.replace(machine, kv_tokens=options.kv_tokens)
    workload = dataclasses.replace(
        workload,
        arrivals=arrivals,
        predictor=predictor,
        kinds=kinds,
        requests=options.requests or workload.requests,
    )
    changed = dataclasses.replace(
        regime, workload=workload, machine=machine, workers=options.workers or regime.workers
    )
    if options.policy:
        changed = dataclasses.replace(changed, policies=tuple(options.policy))
    if changed != regime:
        changed = dataclasses.replace(changed, expect=())
    if options.rivals:
        changed = dataclasses.replace(changed, policies=tuple(dict.fromkeys((*RIVALS, *changed.runs))))
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        regimes = regimes_of(options)
        unknown = {name for name, _ in options.loads} - {"", *(regime.name for regime in regimes)}
        if unknown:
            raise ValueError(f"--loads: {', '.join(sorted(unknown))} does not run: name it with --regime too")
        swept = [
            (regime, loads)
            for regime in regimes
            for name, loads in options.loads
            if name in ("", regime.name)
        ]
        everything = [*regimes, *itertools.chain.from_iterable(at_loads(*each) for each in swept)]
        began_s = time.monotonic()
        runs = run_regimes(everything, options.seeds, options.data, options.processes)
    except (ValueError, OSError) as error:
        print(f"laps-sd bench policy: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    for regime in regimes:
        own = rows_of(regime, runs, options.seeds)
        show(regime.name, regime.title, own)
        if options.details:
            show_details(regime.name, own)
        rows += own
        verdicts += judged(regime, runs)
    if verdicts:
        show_verdicts(verdicts)
    rows += [{"kind": "verdict", **verdict} for verdict in verdicts]
    rows += itertools.chain.from_iterable(sweep_rows(*each, runs) for each in swept)
    told = about(options, regimes)
    missed = [verdict for verdict in verdicts if not verdict["met"]]
    if options.figure is not None:
        from bench.figures import draw_policy  # only here: the figure's library is an extra

        draw_policy(options.figure, {"about": told, "rows": rows})
    minutes = (time.monotonic() - began_s) / 60
    return finish(
        [short(row) for row in rows],
        about=told,
        json_file=options.json,
        summary=f"{len(verdicts) - len(missed)} of {len(verdicts)} expectations hold in {len(regimes)} regimes, "
        f"{options.seeds} seeds each, {minutes:.1f} minutes",
        met=not missed,
    )


if __name__ == "__main__":
    sys.exit(main())
