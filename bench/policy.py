"""What does a policy gain? The production core in virtual time, policy against policy. `laps-sd bench policy`

Every policy runs the same jobs (paired by seed); each figure is a ratio to FCFS and to the oracle, with the
95 % interval over seeds. A regime is a file of bench/regimes: arrivals, lengths, acceptance, predictor,
machine, and what must hold there. The command exits non-zero when an expectation of a regime that ran fails.

Examples:
  laps-sd bench policy --regime chat --loads 0.5,0.7,0.8,0.9 --figure chat.svg
  laps-sd bench policy --regime all --data ../shared/data --json policy.json
  laps-sd bench policy --trace day.csv --predictor 1.0 --batch 32 --workers 4 --load 0.9 --policy fcfs --policy laps-sd
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench._policy.judge import judged
from bench._policy.options import arguments, regimes_of
from bench._policy.regime import Regime
from bench._policy.rows import at_loads, rows_of, short, sweep_rows
from bench._policy.run import run_regimes
from bench._policy.tables import show, show_verdicts
from bench.report import about, finish


def facts(options: argparse.Namespace, regimes: Sequence[Regime]) -> dict[str, Any]:
    """Return the facts of the run that the rows do not contain."""
    return {
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


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv, __doc__)
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
        rows += own
        verdicts += judged(regime, runs)
    if verdicts:
        show_verdicts(verdicts)
    rows += [{"kind": "verdict", **verdict} for verdict in verdicts]
    rows += itertools.chain.from_iterable(sweep_rows(*each, runs) for each in swept)
    told = about("policy", argv) | facts(options, regimes)
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
