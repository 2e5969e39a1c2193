"""Jobs drawn from the description of a workload. Seeded; equal seeds give equal jobs."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from simulator.conversations import as_conversations
from simulator.jobs import Job
from simulator.lengths import RecordedAnswer
from simulator.machine import Machine
from simulator.samples import (
    answers,
    client_quantiles,
    code_tokens,
    column,
    predictions,
    read_trace_cached,
    recordings,
)
from simulator.traces import SERVEGEN_LEVELS, TracedRequest
from simulator.workload import AcceptanceModel, Kind, Lengths, Predictor, Workload

MOST_TOKENS_PER_ROUND = 255


def draw(
    workload: Workload, machine: Machine, workers: float, seed: int, data: Path | None
) -> tuple[list[Job], list[Job]]:
    """Return the jobs of one seed, and those that the core has learned from before. `data` is the folder that
    each `file` is relative to; `workers` the number of workers, slower ones counted as parts of one."""
    drawing = _Draw(workload, machine, workers, seed, data)
    jobs = drawing.jobs()
    return jobs, drawing.history()


def window_s(workload: Workload, machine: Machine, seed: int, data: Path | None) -> tuple[float, float]:
    """Return when the first and the last of the jobs of a seed arrive in the recorded trace."""
    drawing = _Draw(workload, machine, 1, seed, data)
    drawing.jobs()
    return drawing.traced[0].arrival_s, drawing.traced[-1].arrival_s


class _Draw:
    def __init__(
        self, workload: Workload, machine: Machine, workers: float, seed: int, data: Path | None
    ) -> None:
        self.workload = workload
        self.machine = machine
        self.workers = workers
        self.data = data
        self.random = random.Random(seed)  # a simulation
        self._others = random.Random(-seed)  # so that all predictors see the same jobs
        self._decks: dict[Lengths, list[RecordedAnswer]] = {}
        """Answers that are left to be drawn."""
        self.traced: list[TracedRequest] = []
        """The requests of the trace from which the jobs were drawn."""

    def jobs(self) -> list[Job]:
        workload, rng = self.workload, self.random
        kinds = self._kinds(workload.requests)
        traced = None
        if workload.arrivals.process == "trace":
            rows = read_trace_cached(self._path(workload.arrivals.file))
            if workload.arrivals.every > 1:
                rows = rows[rng.randrange(workload.arrivals.every) :: workload.arrivals.every]
            first = rng.randrange(max(1, len(rows) - workload.requests))
            self.traced = traced = rows[first : first + workload.requests]
            kinds = kinds[: len(traced)]
        drawn = [
            self._job(f"r{number:06d}", kind, None if traced is None else traced[number])
            for number, kind in enumerate(kinds)
        ]
        if workload.conversations is not None:
            drawn = as_conversations(drawn, workload.conversations, self._others, self._length)
        times = self._times(drawn, None if traced is None else [row.arrival_s for row in traced])
        return [
            job if job.after else dataclasses.replace(job, arrival_s=arrival_s)
            for job, arrival_s in zip(drawn, times, strict=True)
        ]

    def history(self) -> list[Job]:
        """Return the jobs that the core has learned from before."""
        return [
            self._job(f"h{number:06d}", kind, None)
            for number, kind in enumerate(self._kinds(self.workload.learned))
        ]

    def _kinds(self, count: int) -> list[Kind]:
        kinds = self.workload.kinds
        return self.random.choices(kinds, [kind.share for kind in kinds], k=count)

    def _job(self, request_id: str, kind: Kind, traced: TracedRequest | None) -> Job:
        workload = self.workload
        tenant, predictor = self._tenant(kind)
        features = b""
        if kind.output.kind == "answers":
            answer = self._answer(kind.output)
            output, prompt = min(answer.output_tokens, workload.max_tokens), answer.prompt_tokens
            predicted = self._predict(output, predictor)
            if predictor.kind == "prompt":
                features = answer.features
            elif predictor.kind == "shuffled":
                features = self._others.choice(self._all_answers).features
            elif predictor.kind == "short":
                features = self._others.choice(self._shortest).features
        else:
            output, predicted = self._output(kind, predictor)
            prompt = self._length(kind.prompt)
        if traced is not None:
            prompt, output = max(1, traced.input_tokens), min(traced.output_tokens, workload.max_tokens)
            predicted = self._predict(output, predictor)
        task, paces, uncut_last = self._paces(kind.acceptance, output)
        name = "/".join(part for part in (kind.name, task) if part)
        return Job(
            request_id=request_id,
            arrival_s=0.0,
            prompt_tokens=prompt,
            paces=paces,
            max_tokens=workload.max_tokens,
            predicted_tokens=predicted,
            workload_class=name if workload.classes else "",
            tenant=tenant,
            uncut_last=uncut_last,
            length_features=features,
            blocks=b"" if traced is None else traced.blocks,
        )

    def _tenant(self, kind: Kind) -> tuple[str, Predictor]:
        tenants = [
            (f"{group.name}-{number}", group.predictor)
            for group in self.workload.tenants
            if not group.kinds or kind.name in group.kinds
            for number in range(group.count)
        ]
        return self.random.choice(tenants) if tenants else ("", self.workload.predictor)

    def _answers(self, lengths: Lengths) -> list[RecordedAnswer]:
        return answers(self._path(lengths.file), lengths)

    @cached_property
    def _all_answers(self) -> list[RecordedAnswer]:
        """Return the recorded answers of all kinds."""
        outputs = [kind.output for kind in self.workload.kinds if kind.output.kind == "answers"]
        return [answer for lengths in outputs for answer in self._answers(lengths)]

    @cached_property
    def _shortest(self) -> list[RecordedAnswer]:
        """Return a twentieth of the recorded answers, the shortest."""
        found = sorted(self._all_answers, key=lambda answer: answer.output_tokens)
        return found[: max(1, len(found) // 20)]

    def _answer(self, lengths: Lengths) -> RecordedAnswer:
        """Return the next answer of a shuffled deck."""
        deck = self._decks.get(lengths)
        if not deck:
            deck = self._decks[lengths] = list(self._answers(lengths))
            self.random.shuffle(deck)
        return deck.pop()

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
            case "none" | "prompt" | "shuffled" | "short":
                if self.workload.tenants:
                    self.random.gauss(0, 1)
                return None
        raise ValueError(
            "predictor.kind must be noisy, inverse, constant, recorded, prompt, shuffled, short or none, "
            f"not {predictor.kind!r}"
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
                    "lengths.kind must be lognormal, constant, column, quantiles, code or (of outputs) answers, "
                    f"not {lengths.kind!r}"
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

    def _process(self, acceptance: AcceptanceModel) -> Iterator[int]:
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
            return [(time_s - traced_s[0]) / arrivals.speed for time_s in traced_s]
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
