"""Figures and stories that the core keeps for people and for other parts, and when it brings them up to date."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, Commit, Drained, Lease, Rank, Release
from scheduler_svc.core.estimates.calibration import GuessHistory
from scheduler_svc.core.estimates.cost import CONTEXT_UNIT
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    Held,
    Recovered,
    ResidencyChange,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.handlers.requests import LOOKED_AT_PER_ARRIVAL
from scheduler_svc.core.policies import POLICIES, policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import ALONE_AFTER, Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.tenants import Account
from scheduler_svc.core.state.worker import STUCK_REPORTS, Worker
from scheduler_svc.core.views import Explanation
from tests.core.test_scheduler import W, core, did, report, request

LONG = request("a", max_tokens=3900, expected_output_tokens=3900)


def of(scheduler: Scheduler, request_id: str) -> Explanation:
    found = scheduler.explain(request_id, 0.0)
    assert found is not None
    return found


class TestRecovery:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_some_at_a_time_is_as_good_as_all_in_one_step(self, policy: str) -> None:
        """They wait, run, must run alone, and are on workers of the record that may come back."""
        holders = [None, None, "w", None, "gone"]
        found = [
            Recovered(
                request(f"r{n}", n, max_tokens=100 + 50 * (n % 7)),
                emitted=4 * (n % 5),
                rounds=n % 5,
                drafted=5 * (n % 5),
                accepted=3 * (n % 5),
                attained_s=0.1 * (n % 5),
                preemptions=0,
                worker_id=holders[n % 5],
                lease_epoch=1,
                deaths=ALONE_AFTER if n == 8 else 0,
            )
            for n in range(20)
        ]
        at_once, by_threes = core(policy), core(policy)
        commands = [at_once.step(1.0, found)]
        for first in range(0, len(found), 3):
            by_threes.recover(1.0, found[first : first + 3])
            by_threes.check()
        others = [by_threes.step(1.0, [])]
        workers = [replace(W, slots=3), replace(W, worker_id="v", slots=2)]
        for now_s, event in enumerate([*(WorkerUp(facts, ()) for facts in workers), WorkerLost("gone")]):
            commands.append(at_once.step(2.0 + now_s, [event]))
            others.append(by_threes.step(2.0 + now_s, [event]))

        assert others == commands
        assert any(isinstance(command, Lease) for some in commands for command in some)
        assert by_threes.queue(9.0, 20) == at_once.queue(9.0, 20)
        assert by_threes.totals() == at_once.totals()
        for n in range(20):
            assert by_threes.explain(f"r{n}", 9.0) == at_once.explain(f"r{n}", 9.0)


class TestParking:
    @pytest.mark.parametrize("fair", [False, True])
    def test_requests_wait_where_some_worker_can_hold_them_and_are_parked_otherwise(self, fair: bool) -> None:
        """Many change their place together, and few, when the worker with the longest context comes or goes."""
        settings = CoreSettings(tenant_fairness=fair)
        scheduler = Scheduler(policy_named("laps-sd", settings), settings, Priors())
        tokens = {f"r{n}": 2100 - 100 * (n % 20) for n in range(100)}
        arrivals = [
            Arrived(request(name, n, tenant=f"t{n % 3}", max_tokens=tokens[name] - 100))
            for n, name in enumerate(tokens, start=1)
        ]
        scheduler.step(0.0, arrivals)
        changes: list[tuple[list[Event], int]] = [
            ([WorkerUp(replace(W, worker_id="short", slots=4, max_length=1000), ())], 1000),
            ([WorkerUp(replace(W, worker_id="long", slots=4, max_length=2000), ())], 2000),
            ([WorkerUp(replace(W, worker_id="longer", slots=4, max_length=2100), ())], 2100),
            ([WorkerLost("longer")], 2000),
            ([WorkerUp(replace(W, worker_id="longer", slots=4, max_length=2100), ())], 2100),
            ([WorkerLost("long"), WorkerLost("longer")], 1000),  # with requests of the reserved share
            ([WorkerDraining("short")], 0),
        ]
        for at_s, (events, capacity) in enumerate(changes, start=1):
            scheduler.step(float(at_s), events)

            scheduler.check()
            assert scheduler.capacity_tokens == capacity
            waiting = [entry.request_id for entry in scheduler.queue(9.0, 100) if not entry.worker_id]
            too_long = {name for name in waiting if tokens[name] > capacity}
            assert set(scheduler._shard.parked) == too_long


class TestRecentFiguresOfAWorker:
    def test_they_come_from_its_newest_rounds(self) -> None:
        """At 2 % for the newest round, 35 rounds are half of what they show."""
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(LONG)])
        for n in range(400):
            scheduler.step(1.0, [report(did("a", 4 * n, 4))])
        view = scheduler.workers()[0]
        assert (view.rounds, view.tokens) == (400, 1600)
        assert view.acceptance == pytest.approx(3 / 5, rel=0.01)
        assert view.tokens_per_s == pytest.approx(4 / 0.03, rel=0.01)
        for n in range(35):
            scheduler.step(1.0, [report(did("a", 1600 + n, 1), total_s=0.06)])
        view = scheduler.workers()[0]
        assert (view.rounds, view.tokens) == (435, 1635)
        assert view.acceptance == pytest.approx(3 / 10, rel=0.05)
        assert view.tokens_per_s == pytest.approx((4 / 0.03 + 1 / 0.06) / 2, rel=0.05)

    def test_drafted_tokens_are_recent_too(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(LONG)])
        for n in range(300):
            scheduler.step(1.0, [report(did("a", n, 1, drafted=2, accepted=1))])
        for n in range(300):
            scheduler.step(1.0, [report(did("a", 300 + n, 1, drafted=8, accepted=1))])
        assert scheduler.workers()[0].acceptance == pytest.approx(1 / 8, rel=0.02)

    def test_all_requests_of_a_round_count(self) -> None:
        scheduler = core()
        arrivals = [Arrived(request(name, i)) for i, name in enumerate("ab")]
        scheduler.step(0.0, [WorkerUp(replace(W, slots=2), ()), *arrivals])
        scheduler.step(1.0, [report(did("a", 0, 4), did("b", 0, 2, drafted=3))])
        view = scheduler.workers()[0]
        assert (view.rounds, view.tokens, view.running) == (1, 6, 2)
        assert view.acceptance == pytest.approx(4 / 8)

    def test_one_that_is_known_from_leases_only_has_none(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, "w", 1)])
        view = scheduler.workers()[0]
        assert (view.up, view.slots, view.listed, view.target_blocks, view.draft_blocks) == (
            False,
            0,
            1,
            0,
            0,
        )

    def test_a_hello_says_that_all_its_blocks_are_free(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ())])
        scheduler.step(1.0, [report(free_target_blocks=3, free_draft_blocks=4)])
        view = scheduler.workers()[0]
        assert (view.free_target_blocks, view.free_draft_blocks) == (3, 4)
        scheduler.step(2.0, [WorkerUp(replace(W, draft_blocks=700), ())])
        view = scheduler.workers()[0]
        assert (view.free_target_blocks, view.free_draft_blocks) == (1000, 700)

    def test_a_hello_says_where_the_kv_of_each_request_lies(self) -> None:
        """What must be computed or moved again is part of what is left."""
        left = []
        for held in (
            (),
            (Held("a", 1, Residency.HOST),),
            (Held("a", 1, Residency.DEVICE),),
            (Held("a", 9, Residency.DEVICE),),
        ):
            scheduler = core()
            scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a", prompt_tokens=2000))])
            scheduler.step(1.0, [report(did("a", 0, 3))])
            scheduler.step(2.0, [WorkerUp(W, held)])
            left.append(of(scheduler, "a").remaining_s)
        nowhere, host, device, other_lease = left
        assert nowhere > host > device
        assert other_lease == nowhere

    def test_a_drained_one_is_told_so_once_and_again_after_a_hello(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ())])
        assert scheduler.step(1.0, [WorkerDraining("w")]) == [Drained("w")]
        assert scheduler.step(2.0, [report()]) == []
        assert Drained("w") in scheduler.step(3.0, [WorkerUp(W, ())])


class TestTheBacklog:
    def test_it_is_what_full_workers_would_need(self) -> None:
        """Batches are half as large as the workers of this shard have slots in the mean; those that are not
        up do not count."""
        scheduler = core()
        for _ in range(300):
            scheduler.priors.cost.observe_round(6, 36, 3000, 0.03)
        workers = [
            WorkerUp(replace(W, worker_id=name, slots=slots), ()) for name, slots in (("v", 8), ("w", 16))
        ]
        recovered = Recovered(request("r", 9), 0, 0, 0, 0, 0.0, 0, "lost", 1)
        scheduler.step(0.0, [*workers, *(Arrived(request(f"a{i}", i)) for i in range(3)), recovered])
        total = scheduler.totals()
        assert (total.queued, total.listed, total.running) == (0, 4, 0)
        whole_s = sum(of(scheduler, name).remaining_s for name in ("a0", "a1", "a2", "r"))
        share = scheduler.priors.cost.full_share(12)
        assert share < 0.9
        assert total.backlog_s == pytest.approx(whole_s * share)

    def test_it_follows_arrivals_rounds_evictions_and_ends(self) -> None:
        scheduler = core()

        def check(*names: str) -> None:
            scheduler.check()
            assert scheduler.totals().backlog_s == pytest.approx(
                sum(of(scheduler, n).remaining_s for n in names)
            )

        scheduler.step(0.0, [WorkerUp(W, ()), *(Arrived(request(n, i)) for i, n in enumerate("abcd"))])
        check("a", "b", "c", "d")
        scheduler.step(1.0, [report(did("a", 0, 5))])
        check("a", "b", "c", "d")
        scheduler.step(2.0, [report(residency=(ResidencyChange("a", 1, Residency.NONE),))])
        check("a", "b", "c", "d")
        scheduler.step(3.0, [EndRequested("a", End.CANCELLED, ""), EndRequested("d", End.CANCELLED, "")])
        check("b", "c")
        scheduler.step(4.0, [WorkerUp(W, (Held("b", 1, Residency.DEVICE),))])
        check("b", "c")


class TestStories:
    @pytest.mark.parametrize(("rounds", "what"), [(0, "started"), (1, "resumed")])
    def test_one_from_the_record_resumes_if_it_had_begun(self, rounds: int, what: str) -> None:
        scheduler = core()
        found = Recovered(request("a"), 4 * rounds, rounds, 5 * rounds, 3 * rounds, 0.1 * rounds, 0, "w", 1)
        scheduler.step(0.0, [WorkerUp(W, ()), found])
        scheduler.step(1.0, [report(did("a", 4 * rounds, 4))])
        line = of(scheduler, "a").story[-1]
        assert (line.at_s, line.what, line.detail) == (1.0, what, "on worker w")

    def test_starts_pauses_and_resumptions_each_have_a_line(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), *(Arrived(request(n, i)) for i, n in enumerate("ab"))])
        for at, name, position in ((1.0, "a", 0), (2.0, "b", 0), (3.0, "a", 1), (4.0, "a", 2)):
            scheduler.step(at, [report(did(name, position, 1))])
        lines = [
            (line.at_s, line.what)
            for line in of(scheduler, "a").story
            if line.what in ("started", "paused", "resumed")
        ]
        assert lines == [(1.0, "started"), (2.0, "paused"), (3.0, "resumed")]
        assert (of(scheduler, "a").preemptions, of(scheduler, "b").preemptions) == (1, 1)

    def test_a_request_that_moves_says_where_to_and_why(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(W, ()), *(Arrived(request(n, i)) for i, n in enumerate("ab"))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        commands = scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v"), ())])
        assert Lease("b", "v", 2) in commands
        assert not [command for command in commands if isinstance(command, Release)]
        line = of(scheduler, "b").story[-1]
        assert (line.at_s, line.what, line.detail) == (2.0, "moved", "to worker v, which had a free slot")

    def test_a_change_of_level_and_of_what_is_known_has_a_line(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(LONG)])
        for n in range(200):
            before = of(scheduler, "a")
            scheduler.step(1.0 + n, [report(did("a", 19 * n, 19))])
            after = of(scheduler, "a")
            new = [(line.at_s, line.what, line.detail) for line in after.story[len(before.story) :]]
            levels = [line for line in new if line[1] == "level"]
            if after.level != before.level:
                assert levels == [(1.0 + n, "level", f"from {before.level} to {after.level}")]
            else:
                assert levels == []
            known = [what for _, what, _ in new if what in ("perceptible", "non-perceptible")]
            now = "perceptible" if after.perceptible else "non-perceptible"
            assert known == ([now] if after.perceptible != before.perceptible else [])
        assert len({line.detail for line in after.story if line.what == "level"}) > 1


class TestReportsThatComeTwice:
    @pytest.mark.parametrize("again", [3, 1])
    def test_tokens_that_were_committed_count_once(self, again: int) -> None:
        """The worker sends a report again because it got no acknowledgement: all of it, or a part that was
        committed."""
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(1.0, [report(did("a", 0, 3))])
        before = of(scheduler, "a")
        commands = scheduler.step(2.0, [report(did("a", 3 - again, again))])
        assert [c.position for c in commands if isinstance(c, Commit)] == [3 - again], "answered all the same"
        assert of(scheduler, "a") == before

    def test_what_is_new_in_one_that_overlaps_counts(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(1.0, [report(did("a", 0, 3))])
        commands = scheduler.step(2.0, [report(did("a", 1, 4))])
        assert [(c.position, c.tokens) for c in commands if isinstance(c, Commit)] == [(3, (3, 4))]
        found = of(scheduler, "a")
        assert (found.emitted, found.rounds) == (5, 2)
        assert scheduler._shard.requests["a"].seen_squares == 3**2 + 2**2, "two of the four tokens are new"

    def test_an_end_that_comes_again_ends_it(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(1.0, [report(did("a", 0, 3))])
        commands = scheduler.step(2.0, [report(did("a", 0, 3, end=End.STOP))])
        assert [c.end for c in commands if isinstance(c, Commit)] == [End.STOP]
        assert scheduler.explain("a", 2.0) is None


def test_each_arrival_has_the_next_waiting_requests_ranked_again() -> None:
    """From the oldest to the youngest, and then from the beginning, so that each has its turn."""
    settings = CoreSettings(reserved_share=False)
    scheduler = Scheduler(policy_named("srpt-length", settings), settings, Priors())
    waiting = 5 * LOOKED_AT_PER_ARRIVAL
    arrivals = [Arrived(request(f"r{i:02d}", i, expected_output_tokens=20 + i)) for i in range(waiting)]
    scheduler.step(0.0, [WorkerUp(W, ()), *arrivals])
    for _ in range(2):
        before = {entry.request_id: entry.index_s for entry in scheduler.queue(0.0, 99)}
        for _ in range(100):
            scheduler.priors.cost.observe_round(1, 5, 100, scheduler.priors.cost.share_s(100) * 3)
        # The first one may end a turn that began before.
        for number in range(2 * waiting // LOOKED_AT_PER_ARRIVAL + 2):
            name = f"new{number}"
            scheduler.step(
                0.0, [Arrived(request(name, 100 + number, max_tokens=4000, expected_output_tokens=4000))]
            )
            scheduler.step(0.0, [EndRequested(name, End.CANCELLED, "")])
        after = {entry.request_id: entry.index_s for entry in scheduler.queue(0.0, 99)}
        assert set(after) == set(before)
        assert all(after[name] > 1.2 * before[name] for name in before)


def test_waiting_requests_that_ended_do_not_stay_until_others_arrive() -> None:
    scheduler = core()
    names = [f"ended-{i}" for i in range(10 * LOOKED_AT_PER_ARRIVAL)]
    for number, name in enumerate(names):
        scheduler.step(0.0, [Arrived(request(name, number))])
    scheduler.step(1.0, [EndRequested(name, End.CANCELLED, "") for name in names])

    kept = [one for one in gc.get_objects() if isinstance(one, Request)]
    assert not {one.request_id for one in kept} & set(names)


class TestWhyItWasPaused:
    def test_because_its_tenant_is_ahead(self) -> None:
        """Tenant x has had thirty seconds; a request of y, of which more wait, takes its slot."""
        settings = CoreSettings(tenant_fairness=True, reserved_share=False)
        scheduler = Scheduler(policy_named("fcfs", settings), settings, Priors())
        ones = [Arrived(request(f"x{i}", i, tenant="x")) for i in range(4)]
        others = [Arrived(request(f"y{i}", 10 + i, tenant="y")) for i in range(4)]
        scheduler.step(0.0, [WorkerUp(W, ()), *ones, *others])
        scheduler.step(1.0, [report(did("x0", 0, 1), verify_s=10.0)])
        scheduler.step(2.0, [report(did("x1", 0, 1), verify_s=20.0)])
        assert of(scheduler, "x1").tenant_ahead
        assert not of(scheduler, "y0").tenant_ahead
        assert of(scheduler, "y0").worker_id == "w"
        scheduler.step(3.0, [report(did("y0", 0, 1))])
        line = of(scheduler, "x1").story[-1]
        assert (line.what, line.detail) == ("paused", "its tenant is ahead of others that wait")

    def test_not_so_where_the_other_one_is_of_a_tenant_that_is_ahead_too(self) -> None:
        settings = CoreSettings(tenant_fairness=True, reserved_share=False)
        scheduler = Scheduler(policy_named("las", settings), settings, Priors())
        ones = [Arrived(request(f"x{i}", i, tenant="x")) for i in range(2)]
        others = [Arrived(request(f"y{i}", 5 + i, tenant="y", prompt_tokens=3000)) for i in range(3)]
        scheduler.step(0.0, [WorkerUp(W, ()), *ones, *others])
        scheduler.step(1.0, [report(did("x0", 0, 1), verify_s=20.0)])
        scheduler.step(2.0, [report(did("x0", 1, 1), verify_s=20.0)])
        scheduler.step(3.0, [report(did("x1", 0, 1))])
        assert of(scheduler, "x0").tenant_ahead == of(scheduler, "x1").tenant_ahead
        assert of(scheduler, "x0").story[-1].detail.startswith("outranked by a request with")

    def test_one_with_the_reserved_share_that_is_better_anyway_did_not_need_it(self) -> None:
        scheduler = core("srpt-length")
        long = {"expected_output_tokens": 400}
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("long", 2, **long))])
        scheduler.step(1.0, [report(did("long", 0, 1))])
        scheduler.step(2.0, [Arrived(request("old", 1, expected_output_tokens=5))])
        assert of(scheduler, "old").reserved
        scheduler.step(3.0, [report(did("old", 0, 1))])
        assert of(scheduler, "long").story[-1].detail.startswith("outranked by a request with")

    def test_because_kv_is_short_where_the_one_that_began_is_worse(self) -> None:
        """Two fill ten blocks. When both no longer fit, a third one that does takes the slot of the larger one."""
        scheduler = core("srpt-length")
        sizes = {"a": (70, 5), "b": (75, 20), "c": (10, 60)}
        arrivals = [
            Arrived(request(name, 1, prompt_tokens=prompt, max_tokens=80, expected_output_tokens=hint))
            for name, (prompt, hint) in sizes.items()
        ]
        scheduler.step(0.0, [WorkerUp(replace(W, slots=2, target_blocks=10, draft_blocks=10), ()), *arrivals])
        scheduler.step(1.0, [report(did("a", 0, 3), did("b", 0, 3))])
        out = (ResidencyChange("b", 1, Residency.NONE),)
        scheduler.step(2.0, [report(did("a", 3, 3), did("c", 0, 3), residency=out)])
        lines = [(line.what, line.detail) for line in of(scheduler, "b").story]
        assert ("paused", "no KV blocks left for it") in lines

    def test_ranks_count_as_the_worker_has_them(self) -> None:
        """What runs comes closer to its end, which is no reason to send the list again."""
        scheduler = core("srpt-length")
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("long", expected_output_tokens=400))])
        scheduler.step(1.0, [report(did("long", 0, 10))])
        commands = scheduler.step(1.5, [Arrived(request("short", 2, expected_output_tokens=250))])
        assert [c for c in commands if isinstance(c, Assign)]
        for n in range(1, 36):
            commands = scheduler.step(2.0 + n, [report(did("long", 10 * n, 10))])
            assert not [c for c in commands if isinstance(c, Assign)]
        assert of(scheduler, "long").index_s < of(scheduler, "short").index_s
        scheduler.step(90.0, [report(did("short", 0, 1))])
        assert of(scheduler, "long").story[-1].detail.startswith("outranked by a request with")


def test_the_record_has_the_place_of_one_that_is_queued_again() -> None:
    scheduler = core()
    scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
    scheduler.step(1.0, [report(did("a", 0, 1))])
    commands = scheduler.step(2.0, [WorkerLost("w")])
    rank = scheduler.rank_of("a")
    assert rank is not None
    assert commands[1:] == [Rank("a", rank.level, of(scheduler, "a").index_s)]


class TestLeavingADrainingWorker:
    def after_a_round(self, **more: object) -> str | None:
        """Return the worker of a request of which one token was made, on a worker that drains beside an empty
        one."""
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a", **more))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v"), ()), WorkerDraining("w")])
        assert of(scheduler, "a").worker_id == "w", "it leaves at the end of a round only"
        scheduler.step(3.0, [report(did("a", 1, 1))])
        scheduler.check()
        return of(scheduler, "a").worker_id

    def test_what_has_much_left_goes_elsewhere(self) -> None:
        assert self.after_a_round(expected_output_tokens=400) == "v"

    def test_what_would_have_to_compute_more_again_than_is_left_ends_here(self) -> None:
        assert self.after_a_round(prompt_tokens=3900, max_tokens=4) == "w"

    def test_also_what_no_other_worker_has_room_for(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a", expected_output_tokens=400))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v", max_length=64), ()), WorkerDraining("w")])
        scheduler.step(3.0, [report(did("a", 1, 1))])
        assert of(scheduler, "a").worker_id == "w"

    def test_what_does_not_run_leaves_at_once(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), *(Arrived(request(n, i)) for i, n in enumerate("ab"))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        commands = scheduler.step(2.0, [WorkerDraining("w")])
        assert [c.request_id for c in commands if isinstance(c, Release)] == ["b"]


class TestWhatAnEndTeaches:
    def guesses(self, hint: int | None, *predictions: float) -> tuple[float, float]:
        """Return the sums of ln(guess) of clients and workers (of what remained) after a request of three
        rounds of three tokens.
        """
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a", expected_output_tokens=hint))])
        for n in range(3):
            told = {"predicted_remaining_tokens": predictions[n]} if n < len(predictions) else {}
            end = End.STOP if n == 2 else None
            scheduler.step(1.0 + n, [report(did("a", 3 * n, 3, end=end, **told))])
        learnt = scheduler.priors.to_dict()
        of_class = learnt["classes"]["chat"]
        assert sum(of_class["length_counts"].values()) == 1
        of_clients = GuessHistory(*learnt["hints"]["classes"].get("chat", ()))
        return of_clients.guesses, sum(stage["guesses"]["guesses"] for stage in of_class["stages"])

    @pytest.mark.parametrize(
        ("hint", "log_guess"), [(None, 0.0), (0, 0.0), (1, 0.0), (2, math.log(2)), (60, math.log(60))]
    )
    def test_the_clients_guess_of_at_least_one_token(self, hint: int | None, log_guess: float) -> None:
        assert self.guesses(hint) == (pytest.approx(log_guess), 0.0)

    def test_the_workers_first_prediction_in_each_stage(self) -> None:
        assert self.guesses(None, 400.0) == (0.0, pytest.approx(math.log(400)))
        assert self.guesses(None, 400.0, 20.0) == (0.0, pytest.approx(math.log(400) + math.log(20)))

    def test_a_prediction_of_less_than_one_token_is_one(self) -> None:
        assert self.guesses(None, 0.0) == (0.0, 0.0)

    def test_a_new_leader_has_the_newest_predictions_from_the_hello_of_the_worker(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [Recovered(request("a"), 5, 2, 2, 3, 0.1, 0, "w", 1)])
        scheduler.step(1.0, [WorkerUp(W, (Held("a", 1, Residency.DEVICE, 7, 40.0),))])
        newest = scheduler._shard.requests["a"].guesses.worker
        assert newest is not None
        assert (newest.emitted, newest.remaining) == (7, 40.0)

    def test_what_really_remained_is_what_a_prediction_is_judged_by(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a", expected_output_tokens=None))])
        scheduler.step(1.0, [report(did("a", 0, 1, predicted_remaining_tokens=2.0))])
        scheduler.step(2.0, [report(did("a", 1, 2, predicted_remaining_tokens=9.0))])
        scheduler.step(3.0, [report(did("a", 3, 4, end=End.STOP))])
        stages = scheduler.priors.to_dict()["classes"]["chat"]["stages"]
        seen = [stage["guesses"] for stage in stages]
        assert [each["weight"] for each in seen] == [0, 1, 0, 0, 0, 0, 0], "1 and 3 tokens are one stage"
        assert seen[1]["lengths"] == pytest.approx(math.log(6))


@pytest.mark.parametrize("end", ["is lost", "has room again"])
def test_a_worker_is_short_of_blocks_until_it_is_lost_or_runs_all_again(end: str) -> None:
    scheduler = core()
    scheduler.step(0.0, [WorkerUp(replace(W, slots=2), ()), Arrived(request("a")), Arrived(request("b", 2))])
    for n in range(STUCK_REPORTS):
        assert list(scheduler._shard.short_of_blocks) == []
        scheduler.step(1.0 + n, [report(did("a", n, 1))])
    assert list(scheduler._shard.short_of_blocks) == ["w"]
    again = report(did("a", STUCK_REPORTS, 1), did("b", 0, 1))
    scheduler.step(9.0, [WorkerLost("w") if end == "is lost" else again])
    assert list(scheduler._shard.short_of_blocks) == []
    scheduler.check()


def test_without_workers_the_backlog_is_what_the_requests_need() -> None:
    scheduler = core()
    scheduler.step(0.0, [Arrived(request(name, i)) for i, name in enumerate("ab")])
    assert scheduler.totals().backlog_s == pytest.approx(
        of(scheduler, "a").remaining_s + of(scheduler, "b").remaining_s
    )


class TestWhatARoundTeachesAndCosts:
    def three(self) -> Scheduler:
        """Return a core with requests a, b and c of 100, 50 and 30 tokens on one worker."""
        scheduler = core()
        prompts = {"a": 100, "b": 50, "c": 30}
        arrivals = [Arrived(request(n, i, prompt_tokens=p)) for i, (n, p) in enumerate(prompts.items())]
        scheduler.step(0.0, [WorkerUp(replace(W, slots=3), ()), *arrivals])
        return scheduler

    def test_the_contexts_of_what_it_verified(self) -> None:
        scheduler = self.three()
        only_prefilled = did("c", 0, 0, drafted=0, prefilled=30)
        scheduler.step(1.0, [report(did("a", 0, 3), did("b", 0, 2), only_prefilled)])
        cost = scheduler.priors.cost
        assert cost.squares[3] * CONTEXT_UNIT == pytest.approx(100 + 50)
        assert (cost.batch, cost.tokens) == (2, 12)
        scheduler.step(2.0, [report(did("a", 3, 3), did("b", 2, 2))])
        assert cost.squares[3] * CONTEXT_UNIT == pytest.approx(150 + 103 + 52, rel=1e-3)

    def test_each_sequence_that_it_verified_pays_the_same_and_for_its_own_prefill(self) -> None:
        scheduler = self.three()
        progress = (
            did("a", 0, 3, prefilled=100),
            did("b", 0, 1, prefilled=50),
            did("c", 0, 0, drafted=0, prefilled=30),
        )
        scheduler.step(1.0, [report(*progress, draft_s=0.1, verify_s=0.3, prefill_s=1.8)])
        paid = [of(scheduler, name).attained_s for name in "abc"]
        assert paid == pytest.approx([0.2 + 1.0, 0.2 + 0.5, 0.3])

    def test_where_it_verified_nothing_all_share_it(self) -> None:
        scheduler = self.three()
        progress = [did(name, 0, 0, drafted=0, prefilled=n) for name, n in (("a", 20), ("b", 10))]
        scheduler.step(1.0, [report(*progress, draft_s=0.1, verify_s=0.3, prefill_s=0.6)])
        assert [of(scheduler, name).attained_s for name in "abc"] == pytest.approx(
            [0.2 + 0.4, 0.2 + 0.2, 0.0]
        )

    def test_what_was_judged_is_told_for_one_step(self) -> None:
        scheduler = self.three()
        scheduler.step(1.0, [report(did("a", 0, 3, end=End.STOP))])
        assert {one.moment.value for one in scheduler.estimate_errors.latest} >= {"arrival"}
        scheduler.step(2.0, [])
        assert scheduler.estimate_errors.latest == []

    def test_estimates_of_one_that_was_cut_short_are_not_judged(self) -> None:
        scheduler = self.three()
        scheduler.step(1.0, [report(did("a", 0, 3, end=End.ERROR, error="x"))])
        assert scheduler.estimate_errors.latest == []


def test_an_eviction_that_pauses_nothing_and_moves_no_level_is_not_recorded() -> None:
    scheduler = core()
    scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a", prompt_tokens=10))])
    scheduler.step(1.0, [report(did("a", 0, 3))])
    scheduler.step(1.5, [report(residency=(ResidencyChange("a", 1, Residency.HOST),))])
    before = of(scheduler, "a")
    commands = scheduler.step(2.0, [report(residency=(ResidencyChange("a", 1, Residency.NONE),))])
    assert of(scheduler, "a").level == before.level
    assert not [command for command in commands if isinstance(command, Rank)]
    assert of(scheduler, "a").remaining_s > before.remaining_s


class TestTheCheckOfTheInvariants:
    """Other tests rely on it, so it must see what is wrong."""

    def busy(self) -> Scheduler:
        settings = CoreSettings(tenant_fairness=True)
        scheduler = Scheduler(policy_named("laps-sd", settings), settings, Priors())
        arrivals = [Arrived(request(f"r{i}", i, tenant="xy"[i % 2])) for i in range(6)]
        scheduler.step(0.0, [WorkerUp(replace(W, slots=2), ()), *arrivals])
        scheduler.step(1.0, [report(did("r0", 0, 2), did("r1", 0, 2))])
        scheduler.check()
        return scheduler

    @pytest.mark.parametrize(
        "break_it",
        [
            lambda shard: setattr(shard, "running", shard.running + 1),
            lambda shard: shard.depth.update({0: 1}),
            lambda shard: shard.workers["w"].members.pop("r0"),
            lambda shard: shard.workers["w"].running.pop("r0"),
            lambda shard: setattr(shard.workers["w"], "reserved", 7),
            lambda shard: setattr(shard.workers["w"], "unsent", 7),
            lambda shard: setattr(shard.workers["w"], "priors_version", 7),
            lambda shard: setattr(shard.requests["r0"], "worker", None),
            lambda shard: setattr(shard.requests["r0"], "reserved", not shard.requests["r0"].reserved),
            lambda shard: setattr(shard.requests["r0"], "deaths", ALONE_AFTER),
            lambda shard: setattr(shard.requests["r5"], "deaths", ALONE_AFTER),
            lambda shard: shard.parked.update(r5=shard.requests["r5"]),
            lambda shard: shard.reserved_queued.update(r5=shard.requests["r5"]),
            lambda shard: shard.queued.remove(shard.requests["r5"].order_key),
            lambda shard: setattr(shard.requests["r5"].account, "waiting_at_s", None),
            lambda shard: setattr(shard.requests["r5"].account, "ahead", True),
            lambda shard: setattr(shard.requests["r5"].account, "waiting", 7),
            lambda shard: setattr(shard.requests["r5"].account, "unfinished", 7),
            lambda shard: shard._listed_of.update({Account(0, "z", 0.0): {}}),
            lambda shard: shard.short_of_blocks.update(gone=Worker("gone")),
            lambda shard: shard.short_of_blocks.update(w=Worker("w")),
            lambda shard: shard.worker_orders._cut_of.clear(),
        ],
    )
    def test_it_finds_one_that_is_broken(self, break_it: Callable[[Shard], object]) -> None:
        scheduler = self.busy()
        break_it(scheduler._shard)
        with pytest.raises(AssertionError):
            scheduler.check()
