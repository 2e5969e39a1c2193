"""The questions of an operator about a running shard, and the places of the answers: the /metrics endpoints,
Admin, Explain.
"""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from laps_sd.client import Accepted, Client, Ended
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import admin_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from tests.conftest import StackMaker
from tests.helpers import wait_until

SLOTS = 2
LONG = 12
SHORT = 4
PROMPT = "Tell me a story about the harbour."
AT_ARRIVAL = {"when": "arrival", "basis": "limit"}
"""Labels of the estimates for the short requests at arrival: nothing but their limit ends them."""


@dataclass(frozen=True)
class Scrape:
    """One reading of a process's metrics."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float:
        """Return one sample; 0 where there is none yet."""
        return self.samples.get((name, frozenset(labels.items())), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return all samples of a metric with one label."""
        return {dict(labels)[label]: value for (of, labels), value in self.samples.items() if of == name}


def scrape(stack: LocalStack, component: str) -> Scrape:
    with urllib.request.urlopen(stack.metrics_url(component), timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return Scrape(
        {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
    )


@dataclass(frozen=True)
class Busy:
    """A shard with more work than fits, and an operator's means to look at it."""

    stack: LocalStack
    client: Client
    admin: admin_pb2_grpc.AdminStub
    ended: tuple[Ended, ...]
    """The short requests, which have ended; the long ones have not."""


@pytest.fixture(scope="module")
def busy() -> Iterator[Busy]:
    """Start long requests that continue without a client, and short ones that have overtaken them."""
    with (
        LocalStack(engine="fake", slots=SLOTS) as stack,
        Client(stack.gateway_address) as client,
        grpc.insecure_channel(stack.scheduler_address) as channel,
    ):
        for seed in range(LONG):
            events = client.stream(
                PROMPT, seed=seed, max_tokens=1500, ignore_eos=True, expected_output_tokens=1500, keep=True
            )
            assert isinstance(next(events), Accepted)
            events.close()
        ended = tuple(
            client.generate(PROMPT, seed=seed, max_tokens=8, ignore_eos=True, expected_output_tokens=8).end
            for seed in range(SHORT)
        )
        yield Busy(stack, client, admin_pb2_grpc.AdminStub(channel), ended)


def queue_of(busy: Busy) -> list[admin_pb.QueueEntry]:
    return list(busy.admin.ListQueue(admin_pb.ListQueueRequest()).entries)


def test_what_waits_and_at_which_level(busy: Busy) -> None:
    def same_answer() -> dict[str, float]:
        """Check that the gauges, Admin.ListQueue and Admin.GetShard agree, unless the state has changed
        between the reads.
        """
        waiting = Counter(
            str(entry.level) for entry in queue_of(busy) if entry.state != pb.Explanation.STATE_RUNNING
        )
        gauges = scrape(busy.stack, "scheduler").by("laps_sd_scheduler_queue_depth", "level")
        shard = busy.admin.GetShard(admin_pb.GetShardRequest())
        by_admin = {str(level): depth for level, depth in enumerate(shard.depth_by_level) if depth}
        by_gauges = {level: depth for level, depth in gauges.items() if depth}
        all_slots_run = sum(by_gauges.values()) == LONG - SLOTS
        return by_gauges if all_slots_run and by_gauges == by_admin == dict(waiting) else {}

    assert wait_until(same_answer, description="three places tell the same about what waits")


def test_how_much_work_waits_and_how_many_workers_there_are_for_it(busy: Busy) -> None:
    shard = busy.admin.GetShard(admin_pb.GetShardRequest())

    assert shard.backlog_s > 0
    assert shard.workers == scrape(busy.stack, "scheduler").value("laps_sd_scheduler_workers") == 1


def test_why_this_request_waits(busy: Busy) -> None:
    last = queue_of(busy)[-1]

    told = busy.client.explain(last.request_id)

    assert told.state in (pb.Explanation.STATE_QUEUED, pb.Explanation.STATE_LISTED)
    assert told.policy == "laps-sd"
    assert SLOTS <= told.ahead < LONG, "others run before it"
    assert 0 < told.remaining_low_s <= told.remaining_s <= told.remaining_high_s
    assert told.basis
    assert told.story[0].what == "arrived"
    assert told.age_s > 0
    assert told.waits_for == ""
    assert told.ahead_by_priority == told.ahead_by_tenant == 0, "all have one priority and one tenant"


def test_what_the_acceptance_is(busy: Busy) -> None:
    before = scrape(busy.stack, "worker")
    rounds = before.value("laps_sd_worker_rounds_total")

    def some_rounds_later() -> Scrape | None:
        now = scrape(busy.stack, "worker")
        return now if now.value("laps_sd_worker_rounds_total") >= rounds + 10 else None

    after = wait_until(some_rounds_later, description="ten more rounds")
    drafted, accepted = (
        after.value(name) - before.value(name)
        for name in ("laps_sd_worker_drafted_tokens_total", "laps_sd_worker_accepted_tokens_total")
    )
    by_scheduler = scrape(busy.stack, "scheduler")
    by_admin = busy.admin.ListWorkers(admin_pb.ListWorkersRequest()).workers[0].acceptance

    assert 0 < accepted < drafted
    assert 0 < by_admin < 1
    assert by_scheduler.value("laps_sd_scheduler_accepted_tokens_total") > 0
    assert (
        after.value("laps_sd_worker_drafted_tokens_total")
        <= by_scheduler.value("laps_sd_scheduler_drafted_tokens_total") + drafted
    ), "the scheduler has heard of what the worker did"


def test_whether_the_device_is_idle(busy: Busy) -> None:
    """Under load every part of a round grows, `waiting` (nothing to run) does not."""
    before = scrape(busy.stack, "worker").by("laps_sd_worker_seconds_total", "phase")

    def grown() -> dict[str, float]:
        now = scrape(busy.stack, "worker").by("laps_sd_worker_seconds_total", "phase")
        return now if now["verify"] > before["verify"] and now["draft"] > before["draft"] else {}

    after = wait_until(grown, description="another round")

    assert set(after) == {"draft", "verify", "prefill", "swap", "other", "idle", "waiting"}
    assert after["waiting"] == before["waiting"]
    assert scrape(busy.stack, "worker").value("laps_sd_worker_slots_used") == SLOTS
    worker = busy.admin.ListWorkers(admin_pb.ListWorkersRequest()).workers[0]
    assert worker.running == SLOTS <= worker.listed


def test_how_long_the_wait_for_the_first_token_is(busy: Busy) -> None:
    """The histogram holds the values that the clients received."""
    scheduler = scrape(busy.stack, "scheduler")
    gateway = scrape(busy.stack, "gateway")

    for name, told in (
        ("laps_sd_scheduler_queue_wait_seconds", [end.timing.queued_s for end in busy.ended]),
        ("laps_sd_scheduler_first_token_seconds", [end.timing.first_token_s for end in busy.ended]),
        ("laps_sd_scheduler_request_seconds", [end.timing.total_s for end in busy.ended]),
    ):
        assert scheduler.value(f"{name}_count") == SHORT, name
        assert scheduler.value(f"{name}_sum") == pytest.approx(sum(told), abs=0.01), name
    assert gateway.value("laps_sd_gateway_first_token_seconds_count") >= SHORT
    assert scheduler.value("laps_sd_scheduler_requests_ended_total", end="length") == SHORT


def test_how_fast_the_text_comes_once_it_comes(busy: Busy) -> None:
    """Seconds per output token, after the first: by the record at the scheduler, by arrival at the gateway."""
    scheduler = scrape(busy.stack, "scheduler")
    gateway = scrape(busy.stack, "gateway")
    told = [
        (end.timing.total_s - end.timing.first_token_s) / (end.usage.completion_tokens - 1)
        for end in busy.ended
    ]

    name = "laps_sd_scheduler_output_token_seconds"
    assert scheduler.value(f"{name}_count") == SHORT
    assert scheduler.value(f"{name}_sum") == pytest.approx(sum(told), abs=0.01)
    name = "laps_sd_gateway_time_per_output_token_seconds"
    assert gateway.value(f"{name}_count") >= SHORT
    assert gateway.value(f"{name}_sum") > 0
    assert gateway.value("laps_sd_gateway_requests_total", end="length") == SHORT


def test_how_many_tokens_a_round_brings(busy: Busy) -> None:
    """Each round brings a request the tokens it accepted and one more, so their sum is the output."""
    now = scrape(busy.stack, "scheduler")
    name = "laps_sd_scheduler_acceptance_length_tokens"

    assert now.value(f"{name}_sum") == now.value("laps_sd_scheduler_output_tokens_total")
    assert now.value(f"{name}_count") >= now.value("laps_sd_scheduler_rounds_total"), (
        "one or more requests a round"
    )
    assert now.value(f"{name}_sum") / now.value(f"{name}_count") > 1, "speculation gains something"
    ended_rounds = sum(end.speculation.rounds for end in busy.ended)
    assert now.value(f"{name}_count") >= ended_rounds > 0


def test_where_the_time_of_a_round_goes(busy: Busy) -> None:
    """The scheduler adds up what its workers report, `idle` between two rounds included."""
    before = scrape(busy.stack, "scheduler").by("laps_sd_scheduler_round_seconds_total", "part")

    def grown() -> dict[str, float]:
        now = scrape(busy.stack, "scheduler").by("laps_sd_scheduler_round_seconds_total", "part")
        return now if all(now[part] > before[part] for part in ("draft", "verify", "idle")) else {}

    assert set(wait_until(grown, description="more rounds")) == {"draft", "verify", "prefill", "swap", "idle"}


def test_how_long_the_record_takes_to_commit(busy: Busy) -> None:
    """Every accepted request and every token shown went through a commit, so there are some, and they take
    time."""
    now = scrape(busy.stack, "scheduler")

    assert now.value("laps_sd_scheduler_submissions_total", outcome="accepted") == LONG + SHORT
    assert now.value("laps_sd_scheduler_commit_seconds_count") >= SHORT
    assert now.value("laps_sd_scheduler_commit_seconds_sum") > 0


def test_how_wrong_the_estimates_are(busy: Busy) -> None:
    """Machine seconds taken over machine seconds predicted at arrival, of every request that came to its own
    end."""
    scheduler = scrape(busy.stack, "scheduler")
    name = "laps_sd_scheduler_estimate_error_ratio"

    assert scheduler.value(f"{name}_count", **AT_ARRIVAL) == SHORT
    assert scheduler.value(f"{name}_bucket", le="+Inf", **AT_ARRIVAL) == SHORT
    assert 0 < scheduler.value(f"{name}_sum", **AT_ARRIVAL) / SHORT < 1024


def test_how_often_the_intervals_of_estimates_are_right(busy: Busy) -> None:
    """A share of those of `test_how_wrong_the_estimates_are`, also if it is 0."""
    scheduler = scrape(busy.stack, "scheduler")
    name = "laps_sd_scheduler_estimates_covered_total"

    assert (name, frozenset(AT_ARRIVAL.items())) in scheduler.samples
    assert 0 <= scheduler.value(name, **AT_ARRIVAL) <= SHORT


def test_how_often_requests_are_preempted(busy: Busy) -> None:
    preemptions = scrape(busy.stack, "worker").value("laps_sd_worker_preemptions_total")

    assert preemptions >= 1, "short requests have overtaken long ones"


def test_whether_everybody_is_connected(busy: Busy) -> None:
    assert scrape(busy.stack, "scheduler").value("laps_sd_scheduler_leading") == 1
    assert scrape(busy.stack, "worker").value("laps_sd_worker_connected") == 1
    assert scrape(busy.stack, "gateway").value("laps_sd_gateway_link_up", shard="s0") == 1


def test_whether_the_record_is_there(make_stack: StackMaker) -> None:
    """A gauge shows when it is not; the request that ran during the outage loses nothing."""
    stack = make_stack()

    def unavailable() -> float:
        return scrape(stack, "scheduler").value("laps_sd_scheduler_record_unavailable")

    with Client(stack.gateway_address) as client:
        events = client.stream(PROMPT, max_tokens=300, ignore_eos=True)
        next(events), next(events)
        assert unavailable() == 0

        stack.pause("valkey")
        wait_until(lambda: unavailable() == 1, description="the scheduler says that the record is away")
        stack.resume("valkey")
        wait_until(lambda: unavailable() == 0, description="the scheduler says that it is back")
        *_, end = events

    assert isinstance(end, Ended)
    assert end.usage.completion_tokens == 300
