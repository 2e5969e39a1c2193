"""What does a policy gain on the real system? `laps-sd bench serve`

The one-machine stack (record, scheduler, worker with the shipped demo pair, gateway, each a process) serves
the same requests under one policy after another: same prompts, seeds, hints and send times, through the
public gRPC API, from an open-loop client. The output compares the measurement with the simulator's prediction
with the production core for the same requests, from a calibration run on the same stack: true lengths and
rounds of every request, and what a round and a prefill cost this worker.

Scenarios: `burst` sends everything at once; `overload` twice as much as the worker can do (with less, a queue
hardly builds in so few requests); `load-0.7` seven tenths of it. One slot by default: there the machine share
of a request is its own round, every decision counts, and the reserved share is a thirty-second of the time;
with two to four slots it would be a quarter to a half of the machine.

Every scenario runs twice: with length hints that are off by a sigma of 0.3, and without any (`--predictor`),
as most clients send requests: no hint and no class, so the scheduler has nothing but the words of the prompt.

Every round takes the same time (`--round-ms`): the worker really computes it and then waits for the rest of
it, as it waits for a GPU. A shared machine may be at half its speed for minutes; without this the order of
the runs would decide. `--round-ms 0` lets rounds take what they take, and needs a machine to itself.

Every scheduler starts with priors that are the same for every policy, learnt from a warm-up of 200 requests
with or without hints, as in the runs, that no run measures. Policies take turns in changing order. A run in
which a request failed, or had another text than alone, does not count, and is reported.

Goals (over the pairs of runs of a seed, 95 % interval of the mean log-ratio): with burst and overload the
mean latency of laps-sd at least 40 % below fcfs, and not above srpt-length by more than 5 %, both by the
upper end; every policy's ratio to fcfs within 15 % of the simulated one; with and without hints.

Examples:
  laps-sd bench serve
  laps-sd bench serve --scenario burst --policy fcfs --policy srpt-length --policy laps-sd --requests 24 --seeds 2
  laps-sd bench serve --predictor none --policy fcfs --policy laps-sd
  laps-sd bench serve --regime multi-turn --seeds 4     conversations on three workers, by placement
  laps-sd bench serve --regime multi-turn --seeds 4 --json turns.json --resume --runs 1     one run more
  laps-sd bench serve --json serve.json --figure serve.svg
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench._serve import multi_turn
from bench._serve.goals import verdicts
from bench._serve.options import arguments
from bench._serve.results import counted, rows_of, run_row
from bench._serve.runs import measure
from bench._serve.tables import show
from bench.report import about, finish
from laps_sd.errors import StartupError

Rows = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv, __doc__)
    began_s = time.monotonic()
    try:
        rows, found, more = (_multi_turn if options.regime == "multi-turn" else _policies)(options)
    except (StartupError, ValueError, OSError, RuntimeError) as error:
        print(f"laps-sd bench serve: {error}", file=sys.stderr)
        return 2
    met = sum(one["met"] for one in found)
    minutes = (time.monotonic() - began_s) / 60
    return finish(
        [*rows, *found],
        json_file=options.json,
        summary=f"{met} of {len(found)} goals hold over {options.seeds} seeds, {minutes:.1f} minutes{more}",
        met=met == len(found) and not (more and options.regime == "multi-turn"),
        about=about("serve", argv),
    )


def _policies(options: argparse.Namespace) -> tuple[Rows, Rows, str]:
    """Return the rows, the goals, and what of the runs failed."""
    runs, lengths = asyncio.run(measure(options))
    by = counted(runs)
    rows, found = rows_of(by, runs), verdicts(by)
    show(rows, lengths, found, runs)
    if options.figure is not None:
        from bench.figures import ratios

        ratios(options.figure, rows)
    failed = sum(bool(run.failures) for run in runs)
    more = f"; {failed} of {len(runs)} runs failed and count for nothing" if failed else ""
    return [*rows, *lengths, *(run_row(run) for run in runs)], found, more


def _multi_turn(options: argparse.Namespace) -> tuple[Rows, Rows, str]:
    """Return the rows, the goals, and what is missing: goals are met by all runs."""
    rows = multi_turn.run(options)
    found = multi_turn.verdicts(rows)
    multi_turn.show(rows, found)
    missing = len(multi_turn.planned(options.seeds)) - len(rows)
    return rows, found, f"; {missing} runs are missing, which --resume makes" if missing else ""


if __name__ == "__main__":
    sys.exit(main())
