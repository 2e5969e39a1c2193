"""How much does each constant of the draft lengths matter? `laps-sd bench draft-lengths`

The production chooser (worker_svc/engine/draft_lengths) in virtual time: requests with an acceptance rate and
an output length of their own, and a machine whose true costs are the chooser's tables with noise on every
round and a slow drift. Each constant is set to a lower and a higher value, one at a time; the table shows the
tokens per second relative to the values in the code, for the same requests and the same machine, as the mean
over workloads and the worst and best of them. Rows above it compare with fixed draft lengths.

Not modelled: time to read a prompt, and the time that choosing takes.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from bench.report import command_line, finish, progress, table
from worker_svc.engine.draft_lengths import acceptance, chooser, cost_table, outlook
from worker_svc.engine.draft_lengths.acceptance import Acceptance
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.draft_lengths.goodput import FIRST_STEP_ROWS
from worker_svc.engine.draft_lengths.outlook import Outlook, OutputLengths

MAX_DRAFT_LEN = 6
MACHINES = {
    # The demo pair on one CPU thread: a round costs 1 ms and 0.14 ms per row, a draft step 2 % of a round.
    "cpu": (
        CostTable([1, 8, 64, 512], [1.1e-3, 1.9e-3, 1.0e-2, 7.5e-2]),
        CostTable([1, 128], [2.0e-5, 6.0e-4]),
    ),
    # Rows are nearly free, a draft step costs a tenth of a round.
    "memory-bound": (CostTable([1, 512], [2e-2, 2.6e-2]), CostTable([1, 128], [2e-3, 2.2e-3])),
    # A row costs what a token is worth as soon as a few requests run.
    "compute-bound": (CostTable([1, 8, 512], [5e-3, 8e-3, 4e-1]), CostTable([1, 128], [8e-4, 1.2e-2])),
}
BATCHES = (1, 4, 16, 64)
RATES = {"poor": (0.25, 0.25), "mixed": (0.6, 0.6), "good": (0.85, 0.85), "poor to good": (0.1, 0.85)}
"""Mean acceptance in the first and in the second half of a run."""
VALUES: tuple[tuple[ModuleType, str, float, float], ...] = (
    (acceptance, "PRIOR_STRENGTH", 4.0, 16.0),
    (acceptance, "KEPT", 0.95, 0.99),
    (cost_table, "LEARNING_STEP", 0.02, 0.1),
    (cost_table, "DEVIATION_LIMIT", 0.1, 1.0),
    (outlook, "RECENT", 16, 256),
    (chooser, "MARGIN", 0.0, 0.1),
    (chooser, "READING_MARGIN", 1.0, 6.0),
    (chooser, "HOLD_ROUNDS", 4, 64),
    (chooser, "EXPLORED_SHARE", 0.001, 0.02),
)


@dataclass(frozen=True)
class Workload:
    """A machine, a number of requests at once, and how their draft tokens fare."""

    machine: str
    batch: int
    rates: str

    @property
    def name(self) -> str:
        return f"{self.machine}, batch {self.batch}, {self.rates}"


@dataclass
class _Request:
    rng: random.Random
    rate: float
    length: int
    prompt: int
    acceptance: Acceptance
    emitted: int = 0
    lacks: int = 0

    def verify(self, drafted: int) -> int:
        """Return the accepted ones of `drafted` tokens."""
        accepted = 0
        while accepted < drafted and self.rng.random() < self.rate:
            accepted += 1
        return accepted


def goodput(workload: Workload, *, rounds: int, seed: int, fixed: int | None = None) -> float:
    """Return tokens per second of one run."""
    rng = random.Random(f"{workload.name} {seed}")
    true_round, true_step = (one.copy() for one in MACHINES[workload.machine])
    # What was measured at the start is off by some per cent, differently at each size.
    first = CostTable(true_round.counts, [s * rng.uniform(0.92, 1.08) for s in true_round.seconds])
    step = CostTable(true_step.counts, [s * rng.uniform(0.92, 1.08) for s in true_step.seconds])
    for measured in (first, step):
        measured.seconds.sort()
    plain = CostTable(first.counts, first.seconds)
    lengths = DraftLengths(MAX_DRAFT_LEN, fixed, plain=plain, step=step)
    outputs = OutputLengths()
    numbers = itertools.count()
    total_s, tokens = 0.0, 0

    def new(at: int) -> _Request:
        mean = RATES[workload.rates][at * 2 >= rounds]
        own = random.Random(f"{seed} {next(numbers)}")
        rate = own.betavariate(mean * 8, (1 - mean) * 8)
        prompt = max(4, round(own.lognormvariate(math.log(150), 1)))
        length = max(1, round(own.lognormvariate(math.log(150), 1)))
        return _Request(own, rate, length, prompt, Acceptance(), lacks=prompt)

    running = [new(0) for _ in range(workload.batch)]
    for at in range(rounds):
        ahead = [
            Outlook(outputs.to_come(one.emitted), max(0, one.lacks - FIRST_STEP_ROWS)) for one in running
        ]
        caps = [min(MAX_DRAFT_LEN, one.length - one.emitted - 1) for one in running]
        drafts = lengths.lengths([one.acceptance for one in running], caps, 0, ahead.__getitem__)
        steps = [sum(drafted > j for drafted in drafts) for j in range(max(drafts))]
        rows = len(running) + sum(drafts)
        read = sum(
            max(1, min(one.lacks, 10_000)) for one, drafted in zip(running, drafts, strict=True) if drafted
        )
        drift = 1 + 0.15 * math.sin(2 * math.pi * at / 1500)
        noise = drift * rng.lognormvariate(0, 0.03)
        # Drafts of unequal length take longer to verify where attention has no kernel of its own.
        round_s = true_round(rows) * noise * (1 + 0.06 * (len(set(drafts)) > 1))
        draft_s = (true_step(read) + sum(true_step(going) for going in steps[1:])) * noise if steps else 0.0
        total_s += round_s + draft_s
        lengths.observe_costs(rows, round_s, steps, draft_s, read=read)
        for index, (one, drafted) in enumerate(zip(running, drafts, strict=True)):
            accepted = one.verify(drafted)
            lengths.observe_acceptance(one.acceptance, accepted, drafted)
            one.emitted += accepted + 1
            one.lacks = 1 if drafted else one.lacks + 1
            tokens += accepted + 1
            if one.emitted >= one.length:
                outputs.observe(one.emitted)
                running[index] = new(at)
    return tokens / total_s


@contextmanager
def changed(module: ModuleType, name: str, value: float) -> Iterator[None]:
    """Set a constant for the time of the context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def compared(
    workloads: Sequence[Workload],
    base: dict[tuple[Workload, int], float],
    *,
    rounds: int,
    fixed: int | None = None,
) -> dict[str, float]:
    """Return the ratios of goodput to `base`: their geometric mean, the least and the greatest by workload."""
    ratios: dict[Workload, list[float]] = {}
    for (workload, seed), usual in base.items():
        found = goodput(workload, rounds=rounds, seed=seed, fixed=fixed)
        ratios.setdefault(workload, []).append(math.log(found / usual))
    means = [math.exp(statistics.fmean(logs)) for logs in ratios.values()]
    return {
        "mean": math.exp(statistics.fmean(math.log(mean) for mean in means)),
        "worst": min(means),
        "best": max(means),
    }


def main(given: list[str] | None = None) -> int:
    parser = command_line("draft-lengths", __doc__)
    parser.add_argument("--rounds", type=int, default=3000, help="rounds of a run (default 3000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of a workload (default 3)")
    options = parser.parse_args(given)
    workloads = [Workload(*each) for each in itertools.product(MACHINES, BATCHES, RATES)]
    progress(f"{len(workloads)} workloads, {options.seeds} seeds, with the values in the code")
    base = {
        (workload, seed): goodput(workload, rounds=options.rounds, seed=seed)
        for workload in workloads
        for seed in range(options.seeds)
    }
    rows = []
    for length in (0, 2, 4):
        row = compared(workloads, base, rounds=options.rounds, fixed=length)
        rows.append({"config": f"always {length} draft tokens", **row})
        progress(f"{rows[-1]['config']}: {row['mean']:.3f}")
    for module, name, low, high in VALUES:
        for value in (low, high):
            with changed(module, name, value):
                row = compared(workloads, base, rounds=options.rounds)
            rows.append({"config": f"{name} = {value:g}, not {getattr(module, name):g}", **row})
            progress(f"{rows[-1]['config']}: {row['mean']:.3f} [{row['worst']:.3f}, {row['best']:.3f}]")
    table("Tokens per second, relative to the values in the code", rows)
    return finish(rows, json_file=options.json, summary=f"{len(rows)} rows", met=None)


if __name__ == "__main__":
    sys.exit(main())
