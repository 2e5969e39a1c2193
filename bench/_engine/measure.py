"""The turns: every configuration generates every cell, in changing order."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator, Sequence

from bench._engine.cells import Cell
from bench._engine.configs import Config
from bench._engine.outcomes import Outcome, in_turn
from bench.report import progress

CELL_S, LEAST_PASSES = 2.0, 3
"""CPU seconds that the modes of our engine take in a turn over a cell, and the least number of passes: they
are compared more closely than the peers are."""


def measure(configs: list[Config], cells: Sequence[Cell], turns: int) -> None:
    """Run one turn that does not count, then the turns that do."""
    rng = random.Random(0)
    began = time.monotonic()
    passes: dict[tuple[str, int], int] = {}  # by kind and batch size
    for turn in range(turns + 1):
        for cell in rng.sample(list(cells), len(cells)):
            sliced: list[Config] = []
            outcomes: list[tuple[Config, Outcome]] = []
            for config in rng.sample(configs, len(configs)):
                if not config.takes(cell):
                    continue
                try:
                    run = config.run(cell)
                except Exception as error:
                    if turn:
                        raise
                    progress(f"{config.name} does not run here: {error!r:.300}")
                    configs.remove(config)
                    continue
                if isinstance(run, Outcome):
                    outcomes.append((config, run))
                else:
                    sliced.append(config)
            for _ in range(passes.get((cell.kind, cell.batch), 1) if turn else 1):
                done = in_turn(_slices(config, cell) for config in sliced)
                outcomes += zip(sliced, done, strict=True)
                if sliced and not turn:
                    needed = math.ceil(CELL_S / sum(outcome.cpu_s for outcome in done))
                    passes[cell.kind, cell.batch] = max(
                        needed, passes.get((cell.kind, cell.batch), LEAST_PASSES)
                    )
            for config, outcome in outcomes:
                if not outcome.tokens:
                    raise RuntimeError(f"{config.name} generated nothing")
                if turn:
                    config.outcomes.setdefault(cell.key, []).append(outcome)
        progress(f"turn {turn}/{turns} done after {time.monotonic() - began:.0f} s")


def _slices(config: Config, cell: Cell) -> Generator[None, None, Outcome]:
    run = config.run(cell)
    assert not isinstance(run, Outcome)
    return run
