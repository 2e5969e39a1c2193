"""Events that come late, twice, out of order, or not at all, from peers that may be wrong.

The leader passes on what gateways and workers send and what the record answers. Their order is not in its hand: a report may
arrive after its request moved, its worker was lost, or the record was read again. `Scheduler.check` must hold after every
step, and no message may end the leader.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, Command, Commit, Finish, Lease, Release
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    CacheChanged,
    EndRequested,
    Event,
    Held,
    Merged,
    Progress,
    Recovered,
    Refused,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerDraining,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.merged_rounds import MergedRounds
from scheduler_svc.core.placement.routing import PLACEMENTS, PlacementName, router_named
from scheduler_svc.core.policies import POLICIES, policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import ALONE_AFTER, SURVIVED_ROUNDS
from tests.core.test_scheduler import W, core, did, report, request

LARGEST = 2**32 - 1
"""Largest number of most fields on the wire."""

REQUESTS = st.sampled_from([f"r{number}" for number in range(6)])
WORKERS = st.sampled_from(["w0", "w1", "w2"])
HOLDERS = st.sampled_from([None, "w0", "w1", "gone"])
ENDS = st.sampled_from(End)
RESIDENCIES = st.sampled_from(Residency)
PREDICTIONS = st.sampled_from([None, -1.0, 0.0, 1.0, 250.0, 1e30, 1.7e308])
SECONDS = st.sampled_from([0.0, 1e-300, 0.01, 0.5, 86_400.0])
NAMES = st.lists(st.integers(0, 5), max_size=3).map(
    lambda numbers: b"".join([number.to_bytes(8, "little") for number in numbers])
)
FACTS = st.builds(
    RequestFacts,
    request_id=REQUESTS,
    sequence=st.integers(0, 50),
    arrival_s=st.floats(0, 2000),
    tenant=st.sampled_from("ab"),
    priority=st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]),
    workload_class=st.sampled_from(["", "chat"]),
    prompt_tokens=st.sampled_from([1, 16, 64, 300, 100_000]),
    max_tokens=st.sampled_from([1, 2, 50, 400, 1_000_000]),
    expected_output_tokens=st.sampled_from([None, 0, 1, 30, LARGEST]),
    runs_to_limit=st.booleans(),
    prompt_blocks=NAMES,
    conversation=st.sampled_from([b"", b"c"]),
)
CAPACITIES = st.builds(
    WorkerFacts,
    worker_id=WORKERS,
    slots=st.sampled_from([1, 2, 8]),
    target_blocks=st.sampled_from([1, 10, 40, 1000, LARGEST]),
    draft_blocks=st.sampled_from([0, 10, 1000]),
    block_size=st.sampled_from([1, 16, 64]),
    max_length=st.sampled_from([1, 100, 4096, LARGEST]),
    max_draft_len=st.sampled_from([0, 1, 5, LARGEST]),
)
EPOCHS = st.sampled_from([0, 0, 0, -1, 1])
"""Lease epochs that a worker names, relative to the request's."""
POSITIONS = st.sampled_from([0, 0, 0, 0, -3, -1, 1, LARGEST])
"""Positions that it reports, relative to the request's."""
STEPS_S = st.sampled_from([0.0, 0.001, 0.1, 5.0, -0.5, 1000.0])


@st.composite
def one_progress(draw: st.DrawFn) -> Progress:
    """Return progress whose epoch and position are relative, for `Peers.absolute`."""
    tokens = tuple(range(draw(st.sampled_from([0, 1, 1, 5]))))
    drafted = draw(st.sampled_from([0, 4, 4096]))
    accepted = draw(st.integers(0, drafted))
    end = draw(st.none() | st.none() | ENDS)
    return Progress(
        draw(REQUESTS),
        draw(EPOCHS),
        draw(POSITIONS),
        tokens,
        drafted,
        accepted,
        draw(st.sampled_from([0, 0, 10, 2**24])),
        end,
        0,
        "",
        draw(PREDICTIONS),
        draw(st.none() | st.just(Merged(SURVIVED_ROUNDS, min(1, drafted), 40))) if tokens else None,
        bool(tokens) and end is None and draw(st.booleans()),
        draw(st.sampled_from([0, 16, 2**24])),
    )


class Peers(RuleBasedStateMachine):
    """A core between peers that send anything that passes the checks of `scheduler_svc.wire`."""

    reports: Bundle[RoundReported] = Bundle("reports")

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        placement=st.sampled_from(PLACEMENTS),
        fair=st.booleans(),
        list_factor=st.sampled_from([1, 4]),
        reports_per_s=st.sampled_from([0.5, 200.0]),
    )
    def begin(
        self, policy: str, placement: PlacementName, fair: bool, list_factor: int, reports_per_s: float
    ) -> None:
        chosen = CoreSettings(tenant_fairness=fair, list_factor=list_factor)
        self.core = Scheduler(policy_named(policy, chosen), chosen, Priors(), router_named(placement))
        self.rounds = MergedRounds(reports_per_s)
        self.leases: dict[str, tuple[str | None, int]] = {}
        self.emitted: dict[str, int] = {}
        self.ended: set[str] = set()
        self.now_s = 1000.0

    def step(self, *events: Event) -> None:
        self.take(self.core.step(self.now_s, self.rounds.due(events, self.now_s, self.worker_of)))

    def worker_of(self, request_id: str) -> str | None:
        return self.leases.get(request_id, (None, 0))[0]

    def take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Lease(request_id, worker_id, lease_epoch):
                    assert request_id not in self.ended
                    self.leases[request_id] = (worker_id, lease_epoch)
                case Release(request_id):
                    assert request_id not in self.ended
                    self.leases[request_id] = (None, self.leases[request_id][1])
                case Commit(request_id) as commit:
                    assert request_id not in self.ended
                    if commit.end is not None:
                        self.ended.add(request_id)
                case Finish(request_id):
                    assert request_id not in self.ended
                    self.ended.add(request_id)
                case Assign():
                    for entry in command.entries:
                        assert math.isfinite(entry.index_s) and math.isfinite(entry.resume_cost_s)
                        assert self.leases[entry.request_id] == (command.worker_id, entry.lease_epoch)
        for request_id in self.leases:
            found = self.core.explain(request_id, self.now_s)
            if found is not None:
                self.emitted[request_id] = found.emitted

    @rule(facts=FACTS)
    def arrives(self, facts: RequestFacts) -> None:
        if facts.request_id not in self.leases:  # ids are drawn once
            self.leases[facts.request_id] = (None, 0)
            self.step(Arrived(facts))

    @rule(
        facts=FACTS,
        emitted=st.sampled_from([0, 3, 40]),
        rounds=st.sampled_from([0, 2, 20]),
        holder=HOLDERS,
        deaths=st.sampled_from([0, 1, 2, 2, 9]),
    )
    def is_read_again(
        self, facts: RequestFacts, emitted: int, rounds: int, holder: str | None, deaths: int
    ) -> None:
        """The record refused something, and has another state; it may have lost that the request ended."""
        request_id = facts.request_id
        epoch = self.leases.get(request_id, (None, 0))[1]
        self.leases[request_id] = (holder, epoch)
        self.emitted[request_id] = emitted
        self.ended.discard(request_id)
        again = Recovered(facts, emitted, rounds, 0, 0, 1.0, 0, holder, epoch, deaths, rounds // 2)
        self.step(Refused(request_id), again)

    @rule(facts=CAPACITIES, held=st.lists(st.tuples(REQUESTS, EPOCHS, RESIDENCIES, PREDICTIONS)), names=NAMES)
    def comes_up(
        self,
        facts: WorkerFacts,
        held: list[tuple[str, int, Residency, float | None]],
        names: bytes,
    ) -> None:
        now_held = tuple(
            Held(name, max(0, self.leases.get(name, (None, 0))[1] + epoch), residency, LARGEST, predicted)
            for name, epoch, residency, predicted in held
        )
        self.step(WorkerUp(facts, now_held, names))

    @rule(worker_id=WORKERS | st.just("gone"), hung=st.booleans())
    def is_lost(self, worker_id: str, hung: bool) -> None:
        self.step(WorkerLost(worker_id, hung))

    @rule(worker_id=WORKERS)
    def drains(self, worker_id: str) -> None:
        self.step(WorkerDraining(worker_id))

    @rule(worker_id=WORKERS, added=NAMES, removed=NAMES)
    def caches(self, worker_id: str, added: bytes, removed: bytes) -> None:
        self.step(CacheChanged(worker_id, added, removed))

    @rule(request_id=REQUESTS, end=ENDS)
    def is_ended(self, request_id: str, end: End) -> None:
        self.step(EndRequested(request_id, end, "by a peer"))

    @rule(
        target=reports,
        worker_id=WORKERS,
        progress=st.lists(one_progress(), max_size=4, unique_by=lambda one: one.request_id),
        moved=st.lists(st.tuples(REQUESTS, EPOCHS, RESIDENCIES), max_size=2),
        seconds=st.lists(SECONDS, min_size=6, max_size=6),
        free=st.sampled_from([0, 5, LARGEST]),
        limit_s=st.sampled_from([0.0, 0.3]),
    )
    def reports_a_round(
        self,
        worker_id: str,
        progress: list[Progress],
        moved: list[tuple[str, int, Residency]],
        seconds: list[float],
        free: int,
        limit_s: float,
    ) -> RoundReported:
        changes = tuple(ResidencyChange(name, self.epoch(name, by), where) for name, by, where in moved)
        told = tuple([self.absolute(one) for one in progress])
        draft_s, verify_s, prefill_s, swap_s, idle_s, total_s = seconds
        times = (draft_s, verify_s, prefill_s, swap_s, idle_s, total_s)
        found = RoundReported(worker_id, told, changes, *times, free, free, limit_s=limit_s)
        self.step(found)
        return found

    @rule(found=reports)
    def reports_it_again(self, found: RoundReported) -> None:
        self.step(found)

    @rule(found=reports, worker_id=WORKERS)
    def another_reports_it(self, found: RoundReported, worker_id: str) -> None:
        self.step(replace(found, worker_id=worker_id))

    @rule(by_s=STEPS_S)
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        self.rounds.hurry_late(self.now_s, 1.0)
        self.step()

    def epoch(self, request_id: str, by: int) -> int:
        return max(0, self.leases.get(request_id, (None, 0))[1] + by)

    def absolute(self, progress: Progress) -> Progress:
        name = progress.request_id
        position = max(0, self.emitted.get(name, 0) + progress.position)
        return replace(progress, lease_epoch=self.epoch(name, progress.lease_epoch), position=position)

    @invariant()
    def is_in_order(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        assert math.isfinite(self.core.totals().backlog_s)
        load = self.core.arriving_load(self.now_s)
        assert math.isfinite(load) and load >= 0
        assert all(math.isfinite(view.moving_cost_s) for view in self.core.workers())
        for entry in self.core.queue(self.now_s, 100):
            found = self.core.explain(entry.request_id, self.now_s)
            assert found is not None and math.isfinite(found.remaining_s)


HEALTH = tuple(HealthCheck)


def test_peers_break_no_invariant() -> None:
    run_state_machine_as_test(
        Peers,
        settings=settings(
            max_examples=10, stateful_step_count=40, deadline=None, suppress_health_check=HEALTH
        ),
    )


@pytest.mark.long
def test_the_same_at_length() -> None:
    run_state_machine_as_test(
        Peers,
        settings=settings(
            max_examples=400, stateful_step_count=80, deadline=None, suppress_health_check=HEALTH
        ),
    )


def test_two_that_must_run_alone_are_named_with_one_worker_by_the_record() -> None:
    """Both were cleared, and shared it; then the record lost the rounds that had cleared them."""
    scheduler = core()
    again = [
        Recovered(request(name, number), 3, 3, 0, 0, 0.0, 0, "w", 1, deaths=ALONE_AFTER)
        for number, name in enumerate("ab")
    ]
    scheduler.step(1.0, [WorkerUp(W, ()), *again])

    scheduler.step(2.0, [EndRequested("a", End.CANCELLED, "")])

    scheduler.check()


def test_one_that_waits_to_run_alone_gets_no_worker_that_has_not_come_up() -> None:
    """The late report clears the request for which that worker was kept."""
    scheduler = core()
    kept = Recovered(request("kept"), 0, 0, 0, 0, 0.0, 0, "gone", 1, deaths=ALONE_AFTER)
    waits = Recovered(request("waits", 2), 0, 0, 0, 0, 0.0, 0, None, 1, deaths=ALONE_AFTER)
    scheduler.step(1.0, [kept, waits])

    late = did("kept", 0, 16, merged=Merged(SURVIVED_ROUNDS, 0, 32), recorded=True)
    commands = scheduler.step(2.0, [report(late)])

    assert not [command for command in commands if isinstance(command, Lease)]
    scheduler.check()
