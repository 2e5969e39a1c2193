"""Section of docs/evidence/placement.md on the placement of requests by what is cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench._evidence.results import Results, read_rows
from bench._markdown import table
from bench._policy.regime import ROUTER
from bench._policy.tables import expected_text
from bench.report import as_text

ROUTED = {
    "soonest-done": "ours: soonest done",
    "least-loaded": "least loaded",
    "round-robin": "round robin",
    "prefix-affinity": "prefix affinity (SGLang, vLLM)",
    "overlap-score": "overlap and load (Dynamo)",
}
"""Names of the routers in the tables."""


def placed(path: Path) -> Iterator[str]:
    """Yield the section on the regimes of caches."""
    results = Results(path)
    _, source, _ = read_rows(path)
    yield "The production core in virtual time, with workers that have the prefix cache of a real one, and prompts that begin like others:"
    yield "recorded ones (Mooncake), conversations, shared instructions, agents, and for comparison prompts of which nothing repeats."
    yield f"{source}. The routers of other servers are small files in [simulator/routers](../../simulator/routers), each with"
    yield "its source; they serve requests in the order of arrival, as those servers do. *Hits* is the share of prompt tokens that"
    yield "were found in a cache, and in brackets that of one cache with the memory of all workers."
    for regime, about in results.regimes.items():
        yield from ("", f"**`{regime}`**: {about['title']}")
        yield from table(
            ("order", "placement", "mean s", "p99 s", "first token s", "hits"),
            (
                (
                    f"`{row['policy'].partition(':')[0]}`",
                    ROUTED[row["policy"].partition(f"{ROUTER}=")[2] or "soonest-done"],
                    *(f"{row[key]:.2f}" for key in ("mean_s", "p99_s", "first_token_s")),
                    f"{row['hit_share']:.1%} [{row['shared_hit_share']:.1%}]",
                )
                for row in results.rows_of(regime)
            ),
        )
    if not results.reduced:
        yield f"{sum(row['met'] for row in results.verdicts)} of {len(results.verdicts)} goals are met:"
        yield from table(
            ("regime", "goal", "found", ""),
            (
                (
                    f"`{row['regime']}`",
                    f"`{row['policy']}`: {expected_text(row)}",
                    as_text(row, "found"),
                    "met" if row["met"] else "**missed**",
                )
                for row in results.verdicts
            ),
        )
    yield ""
