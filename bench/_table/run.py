"""`laps-sd bench engine --table`: all sessions one by one, within the time that is given."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench._engine.goals import verdict
from bench._table import models, turns
from bench._table.goals import goals
from bench._table.plan import LONG_PROMPT_TOKENS, MODELS, sessions, usable_threads
from bench._table.rows import left_out, merged, rows_of
from bench._table.tables import tables
from bench.report import about as described
from bench.report import finish, progress


def run(options: argparse.Namespace, given: Sequence[str] | None) -> int:
    """Measure the table; return the exit code. With `--only` the rows of an earlier file are kept."""
    planned = sessions(options)
    rows: list[dict[str, Any]] = []
    for session in planned:
        turns.prepare(session, options)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="laps-sd-table-") as name:
        for at, session in enumerate(planned):
            passed_s = time.monotonic() - began
            progress(f"{at + 1}/{len(planned)}, after {passed_s / 60:.1f} min: {session}")
            if session.threads > usable_threads():
                rows += left_out(session, f"this machine has {usable_threads()} threads")
            elif passed_s > options.minutes * 60:
                rows += left_out(session, f"no time was left: --minutes {options.minutes:g}")
            else:
                scratch = Path(name) / str(at)
                scratch.mkdir()
                rows += rows_of(session, turns.run(session, options, scratch))
    about = {**described("engine", given), **_facts(options)}
    if options.only and options.json is not None and options.json.exists():
        before = json.loads(options.json.read_text())
        again = [*before["about"].get("again", []), about["command"]]
        rows, about = merged(before["rows"], rows), {**before["about"], "again": again}
    tables(rows, about)
    judged = goals(rows)
    for goal in judged:
        if not goal.met:
            print(f"missed: {goal.text}")
    met, _ = verdict(judged)
    summary = f"{sum(goal.met for goal in judged)} of {len(judged)} ratios are at their goals; {time.monotonic() - began:.0f} s"
    return finish(rows, json_file=options.json, summary=summary, met=met, about=about)


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    found = {}
    for name in options.models:
        model = MODELS[name]
        source = models.directory(model, options.cache)
        short, _ = models.prompts(model, source, max(options.batch))
        lengths = sorted(map(len, short))
        found[name] = {
            **models.sizes(source),
            "prompt_tokens": [lengths[0], lengths[-1]],
            "generated_tokens": model.generated_tokens(options.turns),
        }
    return {
        "models": found,
        "long_prompt_tokens": LONG_PROMPT_TOKENS,
        "threads": options.threads,
        "machine_threads": usable_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_name": _cpu_name(),
        "turns": options.turns,
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
