"""Metrics of the operator. The label `pool` is the name of a SpeculativePool."""

from __future__ import annotations

from laps_sd.service.metrics import counter, gauge
from laps_sd_operator.problems import Problem, Reason
from laps_sd_operator.status import Counts
from laps_sd_operator.watching import Watched

LEADING = gauge("laps_sd_operator_leading", "1 while this operator acts, 0 while it waits for the Lease.")
WATCH_AGE = gauge(
    "laps_sd_operator_watch_age_seconds",
    "Seconds since the API server last served the watch of these objects; normally at most 120.",
    ["resource"],
)
TURNS = counter("laps_sd_operator_turns_total", "Turns that ended, well or with a problem.", ["pool"])
FAILURES = counter(
    "laps_sd_operator_turn_failures_total",
    "Turns that ended with a problem, by the reason that the condition Ready shows.",
    ["pool", "reason"],
)
PROBLEM = gauge(
    "laps_sd_operator_problem", "1 for the reason of the pool's present problem, else 0.", ["pool", "reason"]
)
WORKERS = gauge(
    "laps_sd_operator_workers",
    "Workers of the pool: wanted (its number within its bounds), ready, and draining before they leave.",
    ["pool", "state"],
)

_STATES = ("wanted", "ready", "draining")


def watches(watched: Watched) -> None:
    """Expose the age of a watch from now on."""
    WATCH_AGE.labels(watched.kind).set_function(watched.age_s)


def turned(pool: str, problem: Problem | None, counts: Counts | None) -> None:
    """Count a turn, and expose what it found. `counts` None: nothing new is known."""
    TURNS.labels(pool).inc()
    if problem is not None:
        FAILURES.labels(pool, problem.reason).inc()
    for reason in Reason:
        PROBLEM.labels(pool, reason).set(problem is not None and reason is problem.reason)
    if counts is not None:
        for state in _STATES:
            WORKERS.labels(pool, state).set(getattr(counts, state))


def forget(pool: str) -> None:
    """Remove what is exposed about a pool that is gone, or has turns elsewhere."""
    for gone in (TURNS, FAILURES, PROBLEM, WORKERS):
        gone.remove_by_labels({"pool": pool})
