"""What do decisions cost? `laps-sd bench control`

Core: CPU time (of the process) of one step of the pure core for one report, in steady state: workers of 64
slots run what they were assigned, requests end and others arrive, ranks change at every round, KV is evicted
at times. One process for each queue size; they take turns, a block of reports each, so that all sizes meet
the same noise. Requests bring the words of prompts, from which the core predicts lengths, and it has learned from 1,500 others.
Memory is what the resident set grows by while the queue is filled, divided by the requests that came; the core holds no tokens.

Scheduler: CPU time of the whole scheduler process (decoding, core, Redis commits, sending tokens and lists)
per report, with FakeEngine workers on real links and a client that takes the tokens off the gateway link; and
from it how many workers one core carries. Workers and client have the other cores: only the scheduler's CPU
time counts, not wall-clock time. Beside it the CPU time of its record, which has a core of its own to end at.

Carried: how many workers one shard carries, with synthetic workers that report a round every `--round-s`
seconds and cost little CPU. A number of workers is carried if the scheduler processes 98 % of the reports and
99 % of them reach the gateway's end within 20 ms. Here all processes share the machine's cores:
`bench/_control/carried.py` names the conditions.

The deployed form of the core is compiled: `make compiled`, then run this in `build/compiled` with PYTHONPATH
set to it. The rows name the form.

Goals: a median of at most 1 ms per report of 64 requests; from the shortest to the longest queue at most
twice as much; less than 2 KiB for each queued request.
"""

from __future__ import annotations

import sys
from typing import Any

from bench._control.carried import IN_TABLE, measure_carried
from bench._control.core import measure_core
from bench._control.options import arguments, verdict
from bench._control.scheduler import measure_scheduler
from bench.report import about, finish, table
from scheduler_svc.core import COMPILED


def main() -> int:
    options = arguments(__doc__)
    if options.reports < 2 or not options.queued or not options.workers:
        raise SystemExit("--reports must be at least 2, and --queued and --workers name one size each")
    core: list[dict[str, Any]] = []
    for workers in options.workers:
        core += measure_core(options, workers)
    told_by_title = ("config", "policy", "compiled", "slots", "prompt_words", "reports")
    which = "compiled core" if COMPILED else "core as it stands, not compiled"
    table(
        f"One report of {options.slots} requests through the {which} ({options.policy}, {options.reports} reports)",
        [{name: value for name, value in row.items() if name not in told_by_title} for row in core],
    )
    rows = list(core)
    if options.fake_workers:
        whole = measure_scheduler(options)
        table(
            "The whole scheduler process", [{"what": name, "value": value} for name, value in whole.items()]
        )
        rows.append(whole)
    if options.carried:
        carried = [measure_carried(options, workers) for workers in options.carried]
        table(
            f"Workers of {options.slots} requests and {options.round_s * 1e3:g} ms rounds on one shard",
            [{name: row[name] for name in ("workers", *IN_TABLE)} for row in carried],
        )
        rows += carried
    met, summary = verdict(core, options.goal_ms)
    return finish(rows, json_file=options.json, summary=summary, met=met, about=about("control"))


if __name__ == "__main__":
    sys.exit(main())
