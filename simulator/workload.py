"""Jobs drawn from a description: classes of requests, a predictor, arrivals. Seeded; equal seeds give equal
jobs.

A description consists of a few small dataclasses, written as tables in a regime file
(`bench/regimes/*.toml`). Every assumption of the evidence that is not recorded data is stated here or there;
all of them are our choice.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from simulator.jobs import Job
from simulator.machine import Machine
from simulator.traces import (
    SERVEGEN_LEVELS,
    RecordedAcceptance,
    read_acceptance,
    read_column,
    read_quantiles,
    read_texts,
    read_trace,
)

CODE_CHARACTERS_PER_TOKEN = 3.5
MOST_TOKENS_PER_ROUND = 255


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of a number of tokens. One of the kinds: lognormal (`median`, `sigma`), constant
    (`value`), column (of a CSV `file`), quantiles (`column` of a ServeGen `file`), code (characters of the
    `code` field of a JSON-lines `file`).
    """

    kind: str = "lognormal"
    median: float = 150.0
    sigma: float = 1.0
    value: int = 0
    file: str = ""
    column: str = ""
    times: float = 1.0
    """Factor of the drawn value."""
    most: int = 2048
    """Upper limit; longer values are cut to it."""


@dataclass(frozen=True, kw_only=True)
class AcceptanceModel:
    """Distribution of the tokens per round. `process`: each request has its own acceptance per draft token ~
    Beta(`mean`, `concentration`), which starts `drift` (standard deviation) away from it, returns within
    `settle_rounds`, and is disturbed by AR(1) noise; a round accepts a geometric number of tokens, at most
    the draft length. `recorded`: replays the rounds of recorded requests, cut at the draft length, and starts
    them again from the beginning if they are too short.
    """

    kind: str = "process"
    mean: float = 0.68
    concentration: float = 8.0
    drift: float = 0.10
    settle_rounds: float = 20.0
    noise: float = 0.06
    noise_keeps: float = 0.8
    file: str = ""
    runs: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    """Recorded categories to use; empty: all. The same holds for `runs` and `tasks`."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One class of requests."""

    name: str = ""
    share: float = 1.0
    prompt: Lengths = Lengths()
    output: Lengths = Lengths()
    acceptance: AcceptanceModel = AcceptanceModel()


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Prediction of the output length at arrival. `noisy`: truth × exp(sigma · z). `inverse`: pivot² / truth
    × exp(sigma · z), which is high where the truth is low. `constant`: always `value`. `recorded`: the joint
    sample of true length and predicted class in `file`; the prediction is the median length of the class, and
    for a kind with output lengths of its own it is wrong by the factor of a recorded pair. `none`: no
    prediction.
    """

    kind: str = "noisy"
    sigma: float = 0.3
    pivot: float = 150.0
    value: int = 1
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """Group of tenants with the same predictor. All tenants of a workload send equally many requests."""

    name: str
    count: int = 1
    predictor: Predictor = Predictor()


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Process of arrivals. `poisson`, `gamma` (with `cv`), `burst` (all at 0), or `trace` (times and lengths
    of `file`, a window of it, stretched so that the load holds, or as recorded where `load` is 0). Load =
    arrival rate × mean machine seconds of a request / workers.
    """

    process: str = "poisson"
    load: float = 0.8
    cv: float = 1.0
    file: str = ""
    every: int = 1
    """Sampling of a trace: one of `every` requests, a smaller service with the same course of the day."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Description of a workload."""

    requests: int = 1500
    max_tokens: int = 2048
    kinds: tuple[Kind, ...] = (Kind(),)
    predictor: Predictor = Predictor()
    tenants: tuple[Tenants, ...] = ()
    """Groups of tenants; empty: one tenant without a name and with the predictions of `predictor`."""
    arrivals: Arrivals = Arrivals()


def draw(workload: Workload, machine: Machine, workers: int, seed: int, data: Path | None) -> list[Job]:
    """Return the jobs of one seed. `data` is the folder that each `file` is relative to."""
    return _Draw(workload, machine, workers, seed, data).jobs()


class _Draw:
    def __init__(
        self, workload: Workload, machine: Machine, workers: int, seed: int, data: Path | None
    ) -> None:
        self.workload = workload
        self.machine = machine
        self.workers = workers
        self.data = data
        self.random = random.Random(seed)  # a simulation

    def jobs(self) -> list[Job]:
        workload, rng = self.workload, self.random
        kinds = rng.choices(workload.kinds, [kind.share for kind in workload.kinds], k=workload.requests)
        traced = None
        if workload.arrivals.process == "trace":
            rows = read_trace_cached(self._path(workload.arrivals.file))
            if workload.arrivals.every > 1:
                rows = rows[rng.randrange(workload.arrivals.every) :: workload.arrivals.every]
            first = rng.randrange(max(1, len(rows) - workload.requests))
            traced = rows[first : first + workload.requests]
            kinds = kinds[: len(traced)]
        tenants = [
            (f"{group.name}-{number}", group.predictor)
            for group in workload.tenants
            for number in range(group.count)
        ]
        drawn = []
        for number, kind in enumerate(kinds):
            tenant, predictor = rng.choice(tenants) if tenants else ("", workload.predictor)
            output, predicted = self._output(kind, predictor)
            prompt = self._length(kind.prompt)
            if traced is not None:
                prompt, output = max(1, traced[number].input_tokens), traced[number].output_tokens
                output = min(output, workload.max_tokens)
                predicted = self._predict(output, predictor)
            task, paces, uncut_last = self._paces(kind.acceptance, output)
            drawn.append(
                Job(
                    request_id=f"r{number:06d}",
                    arrival_s=0.0,
                    prompt_tokens=prompt,
                    paces=paces,
                    max_tokens=workload.max_tokens,
                    predicted_tokens=predicted,
                    workload_class="/".join(part for part in (kind.name, task) if part),
                    tenant=tenant,
                    uncut_last=uncut_last,
                )
            )
        times = self._times(drawn, None if traced is None else [row.arrival_s for row in traced])
        return [
            dataclasses.replace(job, arrival_s=arrival_s) for job, arrival_s in zip(drawn, times, strict=True)
        ]

    def _path(self, name: str) -> Path:
        if self.data is None and not Path(name).is_absolute():
            raise FileNotFoundError(f"{name} is recorded data: say where it lies with --data FOLDER")
        return (self.data or Path()) / name

    # Lengths and predictions.

    def _output(self, kind: Kind, predictor: Predictor) -> tuple[int, int | None]:
        lengths = kind.output
        if predictor.kind == "recorded" and lengths.kind == "column" and lengths.file == predictor.file:
            output, predicted = self.random.choice(predictions(self._path(predictor.file)))
            return min(output, self.workload.max_tokens), predicted
        output = min(self._length(lengths), self.workload.max_tokens)
        return output, self._predict(output, predictor)

    def _predict(self, output: int, predictor: Predictor) -> int | None:
        match predictor.kind:
            case "noisy":
                return max(1, round(output * math.exp(predictor.sigma * self.random.gauss(0, 1))))
            case "inverse":
                mirrored = predictor.pivot**2 / output
                return max(1, round(mirrored * math.exp(predictor.sigma * self.random.gauss(0, 1))))
            case "constant":
                self.random.gauss(0, 1)  # keeps the rest of the draw equal for all predictors of a tenant
                return predictor.value
            case "recorded":
                truth, predicted = self.random.choice(predictions(self._path(predictor.file)))
                return max(1, round(output * predicted / truth))
            case "none":
                if self.workload.tenants:
                    self.random.gauss(0, 1)
                return None
        raise ValueError(
            f"predictor.kind must be noisy, inverse, constant, recorded or none, not {predictor.kind!r}"
        )

    def _length(self, lengths: Lengths) -> int:
        rng = self.random
        match lengths.kind:
            case "lognormal":
                drawn = math.exp(rng.gauss(math.log(lengths.median), lengths.sigma))
            case "constant":
                drawn = lengths.value
            case "column":
                drawn = rng.choice(column(self._path(lengths.file), lengths.column))
            case "quantiles":
                rates, quantiles = client_quantiles(self._path(lengths.file), lengths.column)
                chosen = rng.choices(quantiles, cum_weights=rates)[0]
                drawn = _at_quantile(chosen, rng.random())
            case "code":
                drawn = rng.choice(code_tokens(self._path(lengths.file)))
            case _:
                raise ValueError(
                    f"lengths.kind must be lognormal, constant, column, quantiles or code, not {lengths.kind!r}"
                )
        return min(lengths.most, max(1, round(drawn * lengths.times)))

    # Acceptance.

    def _paces(self, acceptance: AcceptanceModel, output: int) -> tuple[str, bytes, int]:
        """Return the recorded task, the tokens of each round, and those of the last round before its cut."""
        match acceptance.kind:
            case "process":
                rounds = self._process(acceptance)
                task = ""
            case "recorded":
                recording = self.random.choice(recordings(self._path(acceptance.file), acceptance))
                longest = min(self.machine.draft_len + 1, MOST_TOKENS_PER_ROUND)
                rounds = (min(pace, longest) for pace in itertools.cycle(recording.paces))
                task = recording.task
            case _:
                raise ValueError(f"acceptance.kind must be process or recorded, not {acceptance.kind!r}")
        paces = bytearray()
        left, gained = output, 0
        while left:
            gained = next(rounds)
            pace = min(gained, left)
            paces.append(pace)
            left -= pace
        return task, bytes(paces), gained

    def _process(self, acceptance: AcceptanceModel) -> Any:
        rng, most = self.random, self.machine.draft_len
        k, mean = acceptance.concentration, acceptance.mean
        own = rng.betavariate(mean * k, (1 - mean) * k)
        drift, noise = rng.gauss(0, acceptance.drift), 0.0
        for number in itertools.count():
            noise = acceptance.noise_keeps * noise + rng.gauss(0, acceptance.noise)
            chance = own + noise + drift * math.exp(-number / acceptance.settle_rounds)
            chance = min(0.98, max(0.02, chance))
            accepted = int(math.log(1 - rng.random()) / math.log(chance))
            yield 1 + min(most, accepted)

    # Arrivals.

    def _times(self, jobs: Sequence[Job], traced_s: Sequence[float] | None) -> list[float]:
        arrivals, rng = self.workload.arrivals, self.random
        if arrivals.process == "burst":
            return [0.0] * len(jobs)
        if arrivals.process == "trace" and not arrivals.load:
            assert traced_s is not None
            return [time_s - traced_s[0] for time_s in traced_s]
        mean_s = statistics.fmean(self.machine.service_s(job) for job in jobs)
        gap_s = mean_s / (arrivals.load * self.workers)
        match arrivals.process:
            case "poisson":
                gaps = (rng.expovariate(1 / gap_s) for _ in jobs)
            case "gamma":
                shape = arrivals.cv**-2
                gaps = (rng.gammavariate(shape, gap_s / shape) for _ in jobs)
            case "trace":
                assert traced_s is not None
                stretch = gap_s * (len(traced_s) - 1) / (traced_s[-1] - traced_s[0])
                return [(time_s - traced_s[0]) * stretch for time_s in traced_s]
            case _:
                raise ValueError(
                    f"arrivals.process must be poisson, gamma, burst or trace, not {arrivals.process!r}"
                )
        return list(itertools.accumulate(gaps))


def _at_quantile(quantiles: Sequence[float], level: float) -> float:
    above = min(max(1, bisect.bisect_left(SERVEGEN_LEVELS, level)), len(SERVEGEN_LEVELS) - 1)
    low, high = SERVEGEN_LEVELS[above - 1], SERVEGEN_LEVELS[above]
    part = (level - low) / (high - low)
    return quantiles[above - 1] + part * (quantiles[above] - quantiles[above - 1])


# Files are read once per process: every seed draws from the same files.

read_trace_cached = cache(read_trace)
column = cache(read_column)


@cache
def client_quantiles(path: Path, name: str) -> tuple[list[float], list[list[float]]]:
    """Return the cumulative request rates and their quantiles."""
    found = read_quantiles(path, name)
    return list(itertools.accumulate(rate for rate, _ in found)), [quantiles for _, quantiles in found]


@cache
def code_tokens(path: Path) -> list[float]:
    """Return the lengths of reference programs, in tokens of about 3.5 characters."""
    return [len(code) / CODE_CHARACTERS_PER_TOKEN for code in read_texts(path, "code")]


@cache
def predictions(path: Path) -> list[tuple[int, int]]:
    """Return pairs (true length, predicted length); the prediction is the median length of the predicted
    class.
    """
    pairs = list(zip(read_column(path, "output_tokens"), read_column(path, "predicted_class"), strict=True))
    classes = sorted({predicted for _, predicted in pairs})
    medians = {
        each: round(statistics.median(true for true, predicted in pairs if predicted == each))
        for each in classes
    }
    return [(true, medians[predicted]) for true, predicted in pairs if true > 0]


@cache
def _recorded(path: Path) -> list[RecordedAcceptance]:
    return read_acceptance(path)


@cache
def recordings(path: Path, wanted: AcceptanceModel) -> list[RecordedAcceptance]:
    """Return the recordings that match the description. ValueError if there are none."""
    found = [
        recorded
        for recorded in _recorded(path)
        if (not wanted.runs or recorded.run in wanted.runs)
        and (not wanted.tasks or recorded.task in wanted.tasks)
        and (not wanted.categories or recorded.category in wanted.categories)
    ]
    if not found:
        raise ValueError(f"{path} has no recording of runs {wanted.runs}, tasks {wanted.tasks}")
    return found


Described = TypeVar("Described")


def described(cls: Callable[..., Described], table: Mapping[str, Any], where: str) -> Described:
    """Build a dataclass from a table of a regime file. ValueError names the table and the unknown key."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in hints:
            raise ValueError(f"{where}: there is no {key!r}; there are: {', '.join(sorted(hints))}")
        values[key] = _value(hints[key], value, f"{where}.{key}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return described(hint, value, where)  # type: ignore[arg-type]
    if getattr(hint, "__origin__", None) is tuple:
        inner = hint.__args__[0]
        return tuple(_value(inner, each, f"{where}[{place}]") for place, each in enumerate(value))
    allowed = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}.get(hint)
    if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool)):
        raise ValueError(f"{where} must be a {hint.__name__}, not {value!r}")
    return value
