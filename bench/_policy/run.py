"""Simulations of regimes, and the figures of each run."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench._policy.regime import Regime, make_policy, reports_per_s_of, router_of, settings_of
from bench._simulations import run_all
from bench.report import quantile
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, numbers_of
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.errors import EstimateErrors, Moment
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.start_weights import start_weights
from simulator.cluster import Cluster
from simulator.draw import draw
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.outcome import Outcome
from simulator.prefix_cache import PrefixCache
from simulator.workload import Workload

DISTRIBUTION_POINTS = 200
LEARNED_FROM = 20
"""Requests of each tenant that its means leave out: until then the error of its predictions is not known."""


@lru_cache(maxsize=1)
def _jobs(
    workload: Workload, machine: Machine, workers: float, seed: int, data: Path | None
) -> tuple[list[Job], list[Job]]:
    return draw(workload, machine, workers, seed, data)


def simulate(regime: Regime, spec: str, seed: int, data: Path | None) -> dict[str, Any]:
    """Run one policy on the jobs of one seed. Return plain figures, in seconds unless their name has another
    unit.
    """
    machine = regime.machine
    jobs, history = _jobs(regime.workload, machine, regime.capacity, seed, data)
    began_s = time.process_time()
    outcome = Cluster(
        jobs,
        machine,
        regime.workers,
        lambda by_id, settings: make_policy(spec, by_id, machine, settings),
        settings_of(spec, regime.settings),
        priors=taught(history),
        reports_per_s=reports_per_s_of(spec),
        slowness=regime.slowness[: regime.workers],
        router=router_of(spec),
    ).run()
    return {
        **figures(outcome, machine, regime.workers),
        **cache_figures(outcome, regime),
        "cpu_s": time.process_time() - began_s,
    }


def taught(history: Sequence[Job]) -> Priors:
    """Return priors that have learned the lengths of these requests, and what their guesses were worth. They
    begin with the start weights that the scheduler ships.
    """
    prompts = PromptLengths(*start_weights())
    priors = Priors(prompts)
    for job in history:
        name, tenant = job.workload_class, job.tenant
        hint = job.facts(0).guessed_tokens
        guesses = Guesses(hint, prompts.predict(job.length_features, name, tenant))
        cut = job.output_tokens == job.max_tokens
        priors.observe_length(name, job.output_tokens, guesses, tenant, cut=cut)
        prompts.learn(job.length_features, name, tenant, job.output_tokens, cut=cut)
    return priors


def figures(outcome: Outcome, machine: Machine, workers: int) -> dict[str, Any]:
    """Return the reported figures of a run."""
    fates = outcome.fates
    latencies = sorted(fate.latency_s for fate in fates)
    after = sorted(fate.perceptible_after for fate in fates if fate.perceptible_after is not None)
    return {
        "mean_s": statistics.fmean(latencies),
        "p50_s": quantile(latencies, 0.50),
        "p90_s": quantile(latencies, 0.90),
        "p99_s": quantile(latencies, 0.99),
        "mean_slowdown": statistics.fmean(fate.latency_s / machine.alone_s(fate.job) for fate in fates),
        "longest_wait_s": max(fate.waited_s for fate in fates),
        "first_token_s": statistics.fmean(fate.first_token_s - fate.arrival_s for fate in fates),
        "preemptions": statistics.fmean(fate.preemptions for fate in fates),
        "evictions": statistics.fmean(fate.evictions for fate in fates),
        "utilisation": outcome.busy_s / outcome.end_s / workers,
        "perceptible_share": len(after) / len(fates),
        "perceptible_at_arrival_share": after.count(0) / len(fates),
        **{
            f"perceptible_after_rounds{name}": found if after else None
            for name, found in (
                ("", statistics.fmean(after or [0])),
                ("_p50", quantile(after or [0], 0.5)),
                ("_p90", quantile(after or [0], 0.9)),
            )
        },
        "level_s": {str(level): outcome.level_s[level] for level in sorted(outcome.level_s)},
        "level_requests": {
            str(level): len(outcome.level_requests[level]) for level in sorted(outcome.level_s)
        },
        **tenant_means(outcome),
        "estimates": estimates(outcome.estimate_errors),
        "latencies_s": [
            quantile(latencies, (point + 0.5) / DISTRIBUTION_POINTS) for point in range(DISTRIBUTION_POINTS)
        ],
    }


def cache_figures(outcome: Outcome, regime: Regime) -> dict[str, float]:
    """Return what share of the prompt tokens was found in prefix caches, and what share one worker with the memory of
    all would have found; nothing if no prompt has names of blocks.
    """
    jobs = [fate.job for fate in sorted(outcome.fates, key=lambda fate: fate.arrival_s)]
    if not any(job.blocks for job in jobs):
        return {}
    blocks = None
    if regime.machine.kv_tokens is not None:
        blocks = regime.workers * regime.machine.kv_tokens // BLOCK_TOKENS
    total = sum(job.prompt_tokens for job in jobs)
    return {"hit_share": outcome.found_tokens / total, "shared_hit_share": found_by_one(jobs, blocks) / total}


def found_by_one(jobs: Sequence[Job], most_blocks: int | None) -> int:
    """Return the prompt tokens that one cache of so many blocks would have if the requests came one after another."""
    cache = PrefixCache()
    found = 0
    for job in jobs:
        names = numbers_of(job.blocks)
        here = cache.find(names, (job.prompt_tokens - 1) // BLOCK_TOKENS)
        found += here * BLOCK_TOKENS
        cache.use(names)
        cache.leave(names)
        if most_blocks is not None and len(cache.idle) > most_blocks:
            cache.evict(len(cache.idle) - most_blocks)
    return found


def tenant_means(outcome: Outcome) -> dict[str, float]:
    """Return the mean latency of each group of tenants, `mean_s_NAME`, without the first `LEARNED_FROM` of
    each tenant."""
    latencies: dict[str, list[float]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for fate in sorted(outcome.fates, key=lambda fate: fate.job.arrival_s):
        tenant = fate.job.tenant
        seen[tenant] += 1
        if tenant and seen[tenant] > LEARNED_FROM:
            latencies[tenant.rpartition("-")[0]].append(fate.latency_s)
    return {f"mean_s_{group}": statistics.fmean(found) for group, found in latencies.items()}


def estimates(errors: EstimateErrors) -> list[dict[str, Any]]:
    """Return actual over predicted remaining service, by the moment of the estimate and the basis of its
    length.
    """
    return [
        {
            "moment": moment.value,
            "basis": basis.value,
            "requests": found.count,
            "predicted_s": found.predicted_s,
            "actual_s": found.actual_s,
            "log_rms": found.rms,
            "ratio_p10": math.exp(found.quantile(0.1)),
            "ratio_p50": math.exp(found.quantile(0.5)),
            "ratio_p90": math.exp(found.quantile(0.9)),
        }
        for moment in Moment
        for basis in Basis
        if (found := errors.by.get((moment, basis))) is not None
    ]


Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""Figures of each seed, in order, by (regime, policy)."""


def run_regimes(regimes: Sequence[Regime], seeds: int, data: Path | None, processes: int) -> Runs:
    """Run every policy of every regime on every seed, in that number of processes."""
    tasks = {
        (regime.name, spec, seed): (regime, spec, seed, data)
        for regime in regimes
        for seed in range(1, seeds + 1)
        for spec in regime.runs
    }
    found: Runs = defaultdict(list)
    for (name, spec, _), figures in run_all(
        simulate, tasks, processes, lambda key: f"{key[0]}: {key[1]}"
    ).items():
        found[name, spec].append(figures)
    return dict(found)
