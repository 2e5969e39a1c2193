"""Sections of docs/evidence/system.md from `laps-sd bench serve`, `control` and `gateway`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._control.options import GOAL_GROWTH, GOAL_MS
from bench._evidence.results import Row, read_rows
from bench._markdown import spread, table


def policy_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of single policies in the results of `laps-sd bench serve`; the others are single runs,
    lengths and verdicts.
    """
    return [row for row in rows if "policy" in row and not row.get("run")]


def served(path: Path) -> Iterator[str]:
    """Yield the section on policies on the one-machine stack, with the simulator's
    results for the same runs.
    """
    rows, source, _ = read_rows(path)
    policies = policy_rows(rows)
    goals = [row for row in rows if row.get("verdict")]
    lengths = [row for row in rows if row.get("lengths")]
    yield "Gateway, scheduler, record and one worker with the demo pair, each a process; an open loop of requests through the public gRPC API, the"
    yield f"same for every policy of a seed. {source}."
    yield "Ratios of mean latencies, paired by seed; *simulated* is the simulator's result for the same arrivals, lengths and rounds."
    yield "*Hints* is the error σ of ln(length) of the hints that the requests bring; with *none* they bring neither a hint nor a class."
    yield "*Slowdown* is the mean of latency over the time that the request takes alone. Each run begins with what a warm-up of other requests has taught"
    yield "([how many, and why the worker has one slot and rounds of 15 ms](../../bench/README.md#serve))."
    if lengths:
        yield from _lengths(lengths)
    for scenario in dict.fromkeys(row["config"] for row in policies):
        yield from ("", f"**{scenario}**")
        yield from table(
            ("hints", "policy", "mean s", "p99 s", "first token s", "slowdown", "/ `fcfs`", "simulated", "/ `srpt-length`", "simulated"),
            (
                (
                    row["hints"],
                    f"`{row['policy']}`",
                    *(f"{row[key]:.2f}" for key in ("mean_s", "p99_s", "first_token_s")),
                    f"{row['mean_slowdown']:.1f}",
                    *_ratio(row, "fcfs"),
                    *_ratio(row, "srpt-length"),
                )
                for row in policies
                if row["config"] == scenario and "mean_s" in row
            ),
        )  # fmt: skip
    yield from ("![measured and simulated ratios to fcfs](../figures/serve.svg)", "")
    missed = [row for row in goals if not row["met"]]
    yield f"{len(goals) - len(missed)} of {len(goals)} goals are met" + (". Missed:" if missed else ".")
    yield ""
    for row in missed:
        yield f"- {row['config']}, hints {row['hints']}, {row['goal']}: {row['found']}, asked {row['asked']}"
    yield ""


def _lengths(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what the scheduler knows of the lengths at the start of a run."""
    yield ""
    yield (
        "What the scheduler knows of the lengths before the first request of a run ends (Kendall's τ and the root mean square error of ln(length), "
        f"of {rows[0]['requests']} requests; ln(length) has a spread of {rows[0]['spread']:.2f}). The prompts are short instructions of twelve kinds, "
        f"each worded much alike; the kinds alone explain {rows[0]['explained_by_kinds']:.0%} of the variance of ln(length), and "
        f"{rows[0]['seen']:.0%} of the prompts are in the warm-up too."
    )
    yield from table(
        ("hints", "τ", "rms", "of the variance", "in the 80 % interval"),
        (
            (
                row["hints"],
                f"{row['tau']:.2f}",
                f"{row['rms']:.2f}",
                f"{row['explained']:.0%}",
                f"{row['cover']:.0%}",
            )
            for row in rows
        ),
    )


def _ratio(row: Row, of: str) -> tuple[str, str]:
    """Return the measured ratio with its interval, and the simulated one; dashes for the policy itself and
    where there is none.
    """
    key = f"ratio_{of.replace('-', '_')}"
    if row["policy"] == of or row.get(key) is None or row.get(f"{key}_low") is None:
        return "–", "–"
    measured = spread((row[key], row[f"{key}_low"], row[f"{key}_high"]))
    return measured, f"{row[f'simulated_{key}']:.3f}"


def deciding(path: Path) -> Iterator[str]:
    """Yield the section on the cost of a report for the core and the whole scheduler."""
    rows, source, _ = read_rows(path)
    core = [row for row in rows if "median_ms" in row]
    whole = [row for row in rows if "cpu_ms_per_report" in row]
    how = "compiled as in the scheduler's image" if core[0]["compiled"] else "not compiled"
    yield f"One report of {core[0]['slots']} requests through the core of the scheduler, {how}, which orders and answers it. {source}."
    yield from table(
        ("workers", "queued", "median ms", "p99 ms", "/ shortest queue", "bytes per queued request"),
        (
            (
                f"{row['workers']:,}",
                f"{row['queued']:,}",
                f"{row['median_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                f"{row['ratio_shortest']:.2f}",
                f"{row['memory_per_queued_bytes']:.0f}",
            )
            for row in core
        ),
    )
    yield (
        "Requests bring the words of their prompts, from which the core predicts lengths. Two days before, with numbers in lists and on the machine of that day, a report took 0.41 to 1.30 ms; "
        "in turn on one machine the core takes 0.57 of that CPU time. Bytes are per request that arrived while the queue was filled; with many workers and a short queue most of these joined lists."
    )
    yield ""
    yield (
        f"The goals are {GOAL_MS:g} ms in the median, and {GOAL_GROWTH:g} times the shortest queue's at most: {meeting_goals(core)} of {len(core)} rows meet both."
    )
    yield ""
    for row in whole:
        yield (
            f"The whole scheduler process (decode, core, commit to the record, publish; {row['config'].removeprefix('scheduler, ')}, "
            f"{row['slots']} requests in a report): {row['cpu_ms_per_report']:.2f} ms of CPU time per report."
            + (
                f" Its record takes {row['record_cpu_ms_per_report']:.2f} ms of a core of its own."
                if "record_cpu_ms_per_report" in row
                else ""
            )
        )
    yield ""
    if synthetic := [row for row in rows if "carried_share" in row]:
        yield from _workers_carried(synthetic)


def meeting_goals(core: Sequence[Row]) -> int:
    """Return how many rows of the core meet both goals."""
    return sum(row["median_ms"] <= GOAL_MS and row["ratio_shortest"] <= GOAL_GROWTH for row in core)


def _workers_carried(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what one shard carries, by the synthetic workers."""
    row = rows[0]
    most = max((one["workers"] for one in rows if one["carried"]), default=0)
    yield (
        f"What one shard carries: synthetic workers report {row['slots']} requests every {row['round_s'] * 1e3:g} ms, outputs of {row['output_tokens']} tokens in "
        "the median. Scheduler, record, workers and the client share the machine's cores. Latency is from the report at its worker to its tokens at the gateway's "
        f"link. {most} workers is the most of these that were carried: at least 98 % of the reports processed, and a p99 below 20 ms."
    )
    yield (
        "How many are carried depends on the machine. Before the core had its numbers in arrays, quiet runs of this table carried 28 (without words, on a machine on which a report then took 1.50 ms), 16 and "
        "12. Words cost little of it: in turn on one machine, a report took 1.91 ms with them and 1.88 without (20 workers), 1.62 and 1.67 (28 workers). More cores do not help: a scheduler "
        "decides on one. On 16 slower cores, 5 to 15 s after a cold start, a report took 1.95 ms with 28 workers, so that one core was full, and p99 was 0.98 s."
    )
    yield from table(
        (
            "workers",
            "reports per second",
            "processed",
            "p50 ms",
            "p90",
            "p99",
            "scheduler, CPU ms per report",
            "record",
        ),
        (
            (
                str(one["workers"]),
                f"{one['asked_per_s']:,.0f}",
                f"{one['carried_share']:.1%}",
                *(f"{one[name]:.1f}" for name in ("p50_ms", "p90_ms", "p99_ms")),
                f"{one['scheduler_cpu_ms']:.2f}",
                f"{one['record_cpu_ms']:.2f}",
            )
            for one in rows
        ),
    )
    yield ""


def recovering(path: Path) -> Iterator[str]:
    """Yield the section on the time in which a new leader reads the record."""
    from bench.recovery import GOAL_REQUESTS, GOAL_S, LEASE_S, OUTPUT_TOKENS, SLOTS, WORKERS

    rows, source, _ = read_rows(path)
    how = "compiled as in the scheduler's image" if rows[0]["compiled"] else "not compiled"
    yield (
        f"A new leader, {how}, reads {rows[0]['requests']:,} unfinished requests before it leads; {WORKERS} workers have {SLOTS} of them each, with {OUTPUT_TOKENS} outputs. {source}."
    )
    yield from table(
        ("seconds", "its CPU, s", "the record's CPU, s", "longest time between two renewals of the lease, s"),
        (
            [
                f"{row[key]:.2f}"
                for key in ("seconds", "leader_cpu_s", "record_cpu_s", "longest_without_renewal_s")
            ]
            for row in rows
        ),
    )
    met = all(row["seconds"] < GOAL_S and row["longest_without_renewal_s"] < LEASE_S for row in rows)
    yield (
        f"The goals are {GOAL_S:g} s for {GOAL_REQUESTS:,} requests, and less than the lease, {LEASE_S:g} s, between two renewals: "
        + ("met." if met else "missed.")
    )
    yield ""


def carried(path: Path) -> Iterator[str]:
    """Yield the section on the load that one gateway process carries."""
    from bench.gateway import GOAL_MESSAGES_PER_CPU_S, GOAL_P99_S

    rows, source, _ = read_rows(path)
    yield f"One gateway process, tokens delivered at a steady rate, about three in a message. {source}."
    yield from table(
        ("streams", "messages per second", "of its CPU", "messages per CPU second", "added delay p50", "p99"),
        (
            (
                row["config"],
                f"{row['messages_per_s']:,.0f}",
                f"{row['gateway_cpu_share']:.0%}",
                f"{row['messages_per_cpu_s']:,.0f}",
                f"{row['delay_p50_s'] * 1e3:.1f} ms",
                f"{row['delay_p99_s'] * 1e3:.1f} ms",
            )
            for row in rows
        ),
    )
    met = all(
        row["deliveries_per_cpu_s"] >= GOAL_MESSAGES_PER_CPU_S and row["delay_p99_s"] < GOAL_P99_S
        for row in rows
    )
    yield (
        f"The goals are {GOAL_MESSAGES_PER_CPU_S:,.0f} messages per CPU second and a p99 delay below {GOAL_P99_S * 1e3:g} ms: "
        + ("met." if met else "missed.")
    )
    yield ""
