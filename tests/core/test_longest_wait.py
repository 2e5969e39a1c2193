"""No request waits longer than the reserved share allows, under any load, every policy and with several
workers."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laps_sd.contract.choose import reserved_slots
from scheduler_svc.core.policies import POLICIES
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts

PACE = 3
HANDOVER_ROUNDS = 2
"""Time from the end of one request to the first round of the next in its place: the report and the new list
are sent in it."""


def rounds_of(job: Job) -> int:
    return -(-job.output // PACE) + HANDOVER_ROUNDS


def allowed_s(job: Job, cluster: Cluster, share: int) -> float:
    """Return the bound of docs/policies.md: the rounds of the older requests that were unfinished, over the
    share, and its own."""
    older = [
        other
        for other in cluster.jobs.values()
        if other.arrival_s < job.arrival_s < cluster.finished_s[other.request_id]
    ]
    rounds = sum(map(rounds_of, older)) / share + rounds_of(job)
    return rounds * max(cluster.longest_round_s.values())


def late(cluster: Cluster, share: int) -> dict[str, float]:
    """Return the requests that took longer than the bound, and by what factor."""
    took = {
        job.request_id: (cluster.finished_s[job.request_id] - job.arrival_s) / allowed_s(job, cluster, share)
        for job in cluster.jobs.values()
    }
    return {request_id: factor for request_id, factor in took.items() if factor > 1}


def crowd(policy: str, workers: int, slots: int, outputs: list[int]) -> Cluster:
    """Return requests that come faster than they can be served, so that a queue builds up in which some are
    long."""
    cluster = Cluster(policy, [facts(f"w{n}", slots, 100_000) for n in range(workers)])
    cluster.submit(
        [Job(f"r{n:03d}", 0.001 + n * 0.01, 5, output, hint=output) for n, output in enumerate(outputs)]
    )
    cluster.run()
    return cluster


OUTPUTS = st.lists(st.sampled_from((3, 6, 9, 30, 150, 300)), min_size=2, max_size=60)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(deadline=None, max_examples=10)
@given(outputs=OUTPUTS, workers=st.integers(1, 4), slots=st.sampled_from((2, 3, 4)))
# A request that gets a free slot next must not be moved to a worker without one.
@example(outputs=[9, 6, 150, 3, 3, 150, 150, 150], workers=2, slots=2)
def test_a_request_ends_within_the_rounds_of_the_older_ones_and_its_own(
    policy: str, outputs: list[int], workers: int, slots: int
) -> None:
    assert late(crowd(policy, workers, slots, outputs), workers * reserved_slots(slots)) == {}


@pytest.mark.parametrize("policy", ["laps-sd", "srpt-length", "sjf-length"])
def test_those_that_grew_old_on_one_list_do_not_wait_for_each_other(policy: str) -> None:
    """Long ones are all on one list when another worker comes up, and short ones keep both busy."""
    cluster = Cluster(policy, [facts("w0", 2, 100_000)])
    cluster.at(0.05, "up", facts("w1", 2, 100_000))
    outputs = [*[180] * 4, *[9] * 330]
    cluster.submit(
        [Job(f"r{n:03d}", 0.001 + n * 0.001, 5, output, hint=output) for n, output in enumerate(outputs)]
    )
    cluster.run()

    assert late(cluster, 2) == {}


@pytest.mark.parametrize("policy", ["laps-sd", "srpt-length"])
@pytest.mark.parametrize("how", ["its worker was lost", "it came before its worker"])
def test_one_that_no_worker_can_hold_takes_no_part_of_the_share(policy: str, how: str) -> None:
    """The oldest request waits for a large worker, until it is cancelled. Short requests come faster than they are
    served."""
    cluster = Cluster(policy, [facts("small", 2, 100_000, max_length=1200)])
    if how == "its worker was lost":
        cluster.at(0.0, "up", facts("large", 2, 100_000, max_length=30_000))
        cluster.at(0.02, "lost", "large")
    cluster.submit([Job("huge", 0.001, 100, 3, hint=3, max_tokens=8000)])
    cluster.submit([Job("old", 0.1, 5, 300, hint=300, max_tokens=1000)])
    cluster.submit([Job(f"r{n:03d}", 0.11 + n * 0.03, 5, 9, hint=9, max_tokens=20) for n in range(300)])
    cluster.at(20.0, "cancel", "huge")
    cluster.run()

    assert set(late(cluster, 1)) == {"huge"}
