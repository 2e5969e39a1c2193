"""The scheduler's replies to queries, and events that scenario files cannot express well."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, Commit, Drained, Drop, Finish, Lease, Rank, Release
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Held,
    Progress,
    Recovered,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerDraining,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.placement.placement import MOST_REFRESHED
from scheduler_svc.core.policies import POLICIES, policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import MAX_STORY_LINES, Request
from scheduler_svc.core.views import Ahead, RequestState, Totals
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts


def core(policy: str = "laps-sd") -> Scheduler:
    settings = CoreSettings()
    return Scheduler(policy_named(policy, settings), settings, Priors())


def request(request_id: str, sequence: int = 1, **more: object) -> RequestFacts:
    base = RequestFacts(request_id, sequence, 1.0, "tenant", 0, "chat", 100, 500, 60)
    return replace(base, **more)  # type: ignore[arg-type]


W = WorkerFacts("w", 1, 1000, 1000, 16, 4096, 5)


def did(request_id: str, position: int, tokens: int, **more: object) -> Progress:
    ids = tuple(range(position, position + tokens))
    base = Progress(request_id, 1, position, ids, 5, max(0, tokens - 1), 0, None, 0, "")
    return replace(base, **more)  # type: ignore[arg-type]


def report(*progress: Progress, **more: object) -> RoundReported:
    base = RoundReported("w", progress, (), 0.01, 0.02, 0.0, 0.0, 0.0, 0.03, 900, 800)
    return replace(base, **more)  # type: ignore[arg-type]


class TestReserve:
    """The reserved share is counted in blocks where KV is short: 4 slots, one of them reserved, and 25 of
    100 blocks."""

    SMALL = replace(W, slots=4, target_blocks=100, draft_blocks=100)

    def run(self, free_blocks: int, rounds: int) -> tuple[Scheduler, list[bool]]:
        """Run the oldest request, of 50 blocks, to its end in this number of rounds; then return for
        eight whether the next oldest is preferred."""
        scheduler = core()
        arrivals = [
            Arrived(request("old", 0, prompt_tokens=800)),
            Arrived(request("next", 1, prompt_tokens=700)),
            *(Arrived(request(f"r{i}", 2 + i, prompt_tokens=20)) for i in range(3)),
        ]
        commands = scheduler.step(0.0, [WorkerUp(self.SMALL, ()), *arrivals])
        sent = {entry.request_id: entry for c in commands if isinstance(c, Assign) for entry in c.entries}
        assert [i for i, entry in sent.items() if entry.reserved] == ["old"]
        free = {"free_target_blocks": free_blocks, "free_draft_blocks": free_blocks}
        for n in range(rounds):
            end = End.STOP if n == rounds - 1 else None
            commands = scheduler.step(1.0, [report(did("old", n, 1, end=end), **free)])
        preferred = []
        for n in range(8):
            sent |= {
                entry.request_id: entry for c in commands if isinstance(c, Assign) for entry in c.entries
            }
            preferred.append(sent["next"].reserved)
            commands = scheduler.step(1.0, [report(did("r0", n, 1), **free)])
            scheduler.check()
        return scheduler, preferred

    def test_where_kv_is_short_the_next_one_waits_until_the_share_is_paid(self) -> None:
        # Three rounds of 50 blocks and a little, of which 25 were due: the same number of rounds and one more
        # without.
        _, preferred = self.run(free_blocks=29, rounds=3)
        assert preferred == [False] * 4 + [True] * 4

    def test_where_there_is_room_it_costs_nothing(self) -> None:
        _, preferred = self.run(free_blocks=30, rounds=3)
        assert preferred == [True] * 8

    def test_what_only_one_worker_could_hold_stays_there_though_the_share_of_another_is_free(self) -> None:
        scheduler = core()
        large, small = replace(W, slots=2), replace(W, worker_id="small", slots=2, max_length=64)
        arrivals = [Arrived(request(f"r{i}", i)) for i in range(6)]
        scheduler.step(0.0, [WorkerUp(large, ()), WorkerUp(small, ()), *arrivals])
        scheduler.step(1.0, [report(did("r2", 0, 1), did("r3", 0, 1))])
        scheduler.check()
        oldest = [scheduler.explain(f"r{i}", 0.0) for i in range(3)]
        assert [(e.worker_id, e.reserved) for e in oldest if e] == [("w", True), ("w", True), ("w", False)]

    def test_who_has_begun_keeps_its_place_until_it_ends(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(self.SMALL, ()), Arrived(request("old", 0, prompt_tokens=800))])
        scheduler.step(0.1, [Arrived(request(f"r{i}", 1 + i, prompt_tokens=20)) for i in range(9)])
        for n in range(5):
            others = [did(f"r{i}", n, 1) for i in range(3)]
            commands = scheduler.step(
                1.0, [report(did("old", n, 1), *others, free_target_blocks=0, free_draft_blocks=0)]
            )
            assert all(
                entry.reserved
                for command in commands
                if isinstance(command, Assign)
                for entry in command.entries
                if entry.request_id == "old"
            )


class TestExplain:
    def test_a_queued_request(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [Arrived(request("a"))])
        e = scheduler.explain("a", 3.5)
        assert e is not None
        assert (e.state, e.worker_id, e.waiting_s, e.tenant, e.policy) == (
            RequestState.QUEUED,
            None,
            2.5,
            "tenant",
            "laps-sd",
        )
        assert e.waits_for == "a worker: none takes work now"
        assert 0 < e.remaining_low_s < e.remaining_s < e.remaining_high_s
        assert "client's estimate" in e.basis
        assert [line.what for line in e.story] == ["arrived"]

    def test_a_round_without_draft_tokens_is_no_draft(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        standings = []
        for at, drafted in enumerate((5, 0, 5)):
            commands = scheduler.step(2.0 + at, [report(did("a", 4 * at, 4, drafted=drafted))])
            standings += [command.standing for command in commands if isinstance(command, Commit)]
        assert [(s.rounds, s.drafts, s.drafted) for s in standings] == [(1, 1, 5), (2, 1, 5), (3, 2, 10)]

        after = core()
        after.step(0.0, [Recovered(request("a"), 12, 3, 10, 9, 0.3, 0, "w", 1, drafts=2), WorkerUp(W, ())])
        commands = after.step(1.0, [EndRequested("a", End.CANCELLED, "")])
        assert [command.standing.drafts for command in commands if isinstance(command, Finish)] == [2]

    def test_a_running_request(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 4, prefilled=100), prefill_s=0.5)])
        e = scheduler.explain("a", 2.0)
        assert e is not None
        assert (e.state, e.worker_id, e.lease_epoch) == (RequestState.RUNNING, "w", 1)
        assert (e.rounds, e.drafted, e.accepted, e.emitted) == (1, 5, 3, 4)
        assert e.attained_s == pytest.approx(0.53)
        assert [(line.at_s, line.what) for line in e.story][:3] == [
            (1.0, "arrived"),
            (1.0, "leased"),
            (2.0, "started"),
        ]

    @pytest.mark.parametrize(("policy", "own"), [("laps-sd", True), ("srpt-length", False)])
    def test_an_estimate_names_its_own_rounds_where_the_policy_uses_them(
        self, policy: str, own: bool
    ) -> None:
        scheduler = core(policy)
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 4))])
        e = scheduler.explain("a", 2.0)
        assert e is not None
        assert e.basis.endswith("; 1 rounds of its own") is own
        assert "None" not in e.basis

    @pytest.mark.parametrize(
        ("policy", "has_levels", "perceives"),
        [
            ("laps-sd", True, True),
            ("laps-sd-paper", True, True),
            ("mlfq", True, False),
            ("sd-index", False, False),
            ("srpt-length", False, False),
            ("sjf-length", False, False),
            ("las", False, False),
            ("fcfs", False, False),
        ],
    )
    def test_it_names_no_level_and_no_perception_where_the_policy_has_none(
        self, policy: str, has_levels: bool, perceives: bool
    ) -> None:
        scheduler = core(policy)
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 4))])
        e, entry = scheduler.explain("a", 2.0), scheduler.queue(2.0, 1)[0]
        assert e is not None
        assert (e.level is not None) == (entry.level is not None) == has_levels
        assert (e.perceptible is not None) == (entry.perceptible is not None) == perceives
        assert e.ordered_by == entry.ordered_by != ""
        assert ("level" in e.ordered_by) == has_levels

    def test_a_pause_is_told_in_the_terms_of_the_policy(self) -> None:
        scheduler = core("las")
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("old", 1))])
        scheduler.step(1.0, [report(did("old", 0, 1))])
        scheduler.step(1.0, [Arrived(request("new", 2))])
        scheduler.step(2.0, [report(did("new", 0, 1))])
        e = scheduler.explain("old", 2.0)
        assert e is not None
        assert e.story[-1].detail == (
            "outranked by a request with 0 s of service so far; this one has 0.03 s of service so far"
        )

    def test_who_is_ahead_is_counted_by_what_puts_them_there(self) -> None:
        settings = CoreSettings(tenant_fairness=True)
        scheduler = Scheduler(policy_named("laps-sd", settings), settings, Priors())
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("first", 0, expected_output_tokens=9))])
        short = {"expected_output_tokens": 2, "max_tokens": 4}
        waiting = [
            *(request(f"urgent{i}", 1 + i, priority=5, tenant="other") for i in range(3)),
            *(request(f"guest{i}", 4 + i, tenant="guest", **short) for i in range(2)),
            request("a short one", 6, **short),
            *(request(name, 7) for name in ("like it", "like it too", "me")),
        ]
        scheduler.step(1.0, [Arrived(facts) for facts in waiting])
        scheduler.step(
            2.0, [report(did("first", 0, 2, end=End.STOP), verify_s=9.0)]
        )  # its tenant has had much
        scheduler.check()
        e = scheduler.explain("me", 2.0)
        assert e is not None
        assert e.tenant_ahead
        assert e.ahead == Ahead(by_priority=3, by_tenant=2, by_level=1, by_rank=2)
        assert e.ahead.total == len(waiting) - 1
        assert scheduler.explain("urgent0", 2.0).ahead == Ahead(0, 0, 0, 0)  # type: ignore[union-attr]

        scheduler.step(3.0, [WorkerLost(W.worker_id)])  # no worker takes work now
        order = [entry.request_id for entry in scheduler.queue(3.0, 100)]
        for place, name in enumerate(order):
            ahead = scheduler.explain(name, 3.0).ahead  # type: ignore[union-attr]
            assert ahead.total == place
            assert ahead.by_priority == (0 if name.startswith("urgent") else 3)
        assert len(order) == len(waiting)
        assert [entry.request_id for entry in scheduler.queue(3.0, 3)] == order[:3]

    def test_an_unknown_request(self) -> None:
        assert core().explain("nobody", 0.0) is None

    def test_the_story_of_a_pause_names_nobody(self) -> None:
        cluster = Cluster("laps-sd", [facts("w")])
        cluster.submit([Job("long", 0.0, 50, 900, hint=900), Job("short", 1.0, 50, 12, hint=12)])
        cluster.run(until_s=1.2)
        e = cluster.scheduler.explain("long", 1.2)
        assert e is not None
        paused = next(line for line in e.story if line.what == "paused")
        assert "short" not in paused.detail
        assert "outranked by a request with about" in paused.detail

    def test_the_reserved_share_and_missing_blocks_are_told(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("old", 1, expected_output_tokens=500))])
        scheduler.step(0.0, [Arrived(request("new", 2, expected_output_tokens=5))])
        scheduler.step(1.0, [report(did("new", 0, 1))])
        scheduler.step(2.0, [report(did("old", 0, 1))])
        e = scheduler.explain("new", 2.0)
        assert e is not None
        assert e.story[-1].detail == "the reserved share went to an older request"
        scheduler.step(3.0, [report(did("new", 1, 1), did("old", 1, 1))])
        scheduler.step(4.0, [report(did("old", 2, 1))])
        e = scheduler.explain("new", 4.0)
        assert e is not None
        assert e.story[-1].detail == "no KV blocks left for it"
        assert e.preemptions == 2


class TestOtherQuestions:
    def test_the_queue_is_best_first_and_bounded(self) -> None:
        scheduler = core()
        events = [Arrived(request(f"r{i}", i, expected_output_tokens=100 * (9 - i))) for i in range(8)]
        scheduler.step(1.0, events)
        entries = scheduler.queue(4.0, 3)
        assert [entry.request_id for entry in entries] == ["r7", "r6", "r5"]
        assert (entries[0].state, entries[0].waiting_s, entries[0].worker_id) == (
            RequestState.QUEUED,
            3.0,
            None,
        )

    def test_workers(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a")), Arrived(request("b", 2))])
        view = scheduler.workers()[0]
        assert (view.up, view.slots, view.running, view.listed, view.acceptance) == (True, 1, 0, 2, 0.0)
        scheduler.step(2.0, [report(did("a", 0, 4))])
        view = scheduler.workers()[0]
        assert (view.running, view.listed, view.rounds, view.tokens) == (1, 2, 1, 4)
        assert (view.free_target_blocks, view.free_draft_blocks) == (900, 800)
        assert view.acceptance == pytest.approx(0.6)
        assert view.tokens_per_s > 0
        assert view.moving_cost_s > 0

    @pytest.mark.parametrize("policy", POLICIES)
    def test_what_it_costs_to_lose_a_worker_does_not_depend_on_the_policy(self, policy: str) -> None:
        scheduler = core(policy)
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 4))])
        assert scheduler.workers()[0].moving_cost_s == pytest.approx(
            scheduler.priors.cost.prefill_share_s(104)
        )

    def test_totals_and_depth(self) -> None:
        scheduler = core()
        assert scheduler.depth_by_level() == []
        assert scheduler.totals() == Totals(0, 0, 0, 0.0)
        scheduler.step(1.0, [Arrived(request(f"r{i}", i)) for i in range(4)])
        assert sum(scheduler.depth_by_level()) == 4
        assert scheduler.totals().queued == 4
        scheduler.step(1.0, [WorkerUp(W, ())])
        scheduler.step(1.0, [report(did("r0", 0, 2))])
        totals = scheduler.totals()
        assert (totals.queued, totals.listed, totals.running) == (2, 2, 1)
        assert totals.backlog_s > 0
        assert sum(scheduler.depth_by_level()) == 3

    def test_the_backlog_is_what_the_unfinished_ones_need(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), *(Arrived(request(f"r{i}", i)) for i in range(3))])
        scheduler.step(2.0, [report(did("r0", 0, 5))])
        scheduler.step(3.0, [EndRequested("r1", End.CANCELLED, "")])
        left = [scheduler.explain(request_id, 3.0).remaining_s for request_id in ("r0", "r2")]  # type: ignore[union-attr]
        assert scheduler.totals().backlog_s == pytest.approx(sum(left))

    def test_the_longest_context_that_a_worker_could_hold(self) -> None:
        scheduler = core()
        assert scheduler.capacity_tokens == 0
        scheduler.step(1.0, [WorkerUp(replace(W, target_blocks=20, draft_blocks=10), ())])
        assert scheduler.capacity_tokens == 10 * 16 - 5
        scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v", target_blocks=20, draft_blocks=0), ())])
        assert scheduler.capacity_tokens == 20 * 16 - 5
        scheduler.step(3.0, [WorkerDraining("v"), WorkerUp(replace(W, max_length=100), ())])
        assert scheduler.capacity_tokens == 100
        exact = [request("fits", 1, prompt_tokens=90, max_tokens=10), request("does not", 2, max_tokens=1)]
        scheduler.step(4.0, [Arrived(facts) for facts in exact])
        assert scheduler.explain("fits", 4.0).worker_id == "w"  # type: ignore[union-attr]
        assert scheduler.explain("does not", 4.0).waits_for == (  # type: ignore[union-attr]
            "a worker that can hold its 101 tokens: the largest now holds 100"
        )
        assert scheduler.explain("fits", 4.0).waits_for == ""  # type: ignore[union-attr]


class TestReports:
    def test_an_arrival_told_twice_is_one_request(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [Arrived(request("a")), Arrived(request("a"))])
        assert scheduler.totals().queued == 1

    def test_a_report_counts_before_its_worker_has_greeted_a_new_leader(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, "w", 1)])
        scheduler.step(1.0, [report(did("a", 0, 3))])
        assert scheduler.explain("a", 1.0).emitted == 3  # type: ignore[union-attr]

    def test_an_unknown_worker_is_told_to_drop_what_it_reports(self) -> None:
        scheduler = core()
        commands = scheduler.step(1.0, [report(did("a", 0, 3)), report()])
        assert commands == [Drop("w", (("a", 1),))]

    def test_a_worker_that_is_ahead_of_the_record_loses_the_request_and_its_story_says_why(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        commands = scheduler.step(2.0, [report(did("a", 7, 3))])
        assert Release("a", 1) in commands
        assert Drop("w", (("a", 1),)) in commands
        told = scheduler.explain("a", 2.0)
        assert told is not None
        assert ("requeued", "its worker was ahead of the record") in [(x.what, x.detail) for x in told.story]

    def test_many_that_it_does_not_know_are_dropped_without_comparing_each_to_the_others(self) -> None:
        compared: list[str] = []

        class CountedId(str):
            __slots__ = ()
            __hash__ = str.__hash__

            def __eq__(self, other: object) -> bool:
                compared.append(self)
                return str.__eq__(self, other)

        ids = [CountedId(f"lost-{number}") for number in range(2000)]
        held = tuple(Held(request_id, 3, Residency.NONE) for request_id in (*ids, *ids[:10]))
        commands = core().step(0.0, [WorkerUp(W, held)])
        comparisons = len(compared)
        assert [one for one in commands if isinstance(one, Drop)] == [
            Drop("w", tuple((str(request_id), 3) for request_id in ids))
        ]
        assert comparisons < 10 * len(ids)

    @pytest.mark.parametrize("end", [None, End.STOP])
    def test_a_worker_that_passes_the_limit_of_the_output_is_cut_there(self, end: End | None) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a", max_tokens=10))])
        scheduler.step(2.0, [report(did("a", 0, 8))])
        commands = scheduler.step(3.0, [report(did("a", 8, 5, end=end, cut_characters=3))])
        (commit,) = [command for command in commands if isinstance(command, Commit)]
        assert (commit.position, commit.tokens, commit.end) == (8, (8, 9), End.LENGTH)
        assert commit.cut_characters == 0
        assert Drop("w", (("a", 1),)) in commands
        assert scheduler.explain("a", 3.0) is None

    def test_a_round_that_only_prefilled_is_charged(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        commands = scheduler.step(
            2.0, [report(did("a", 0, 0, prefilled=64, drafted=0), prefill_s=0.2, total_s=0.0)]
        )
        commit = commands[0]
        assert isinstance(commit, Commit)
        assert (commit.tokens, commit.standing.attained_s) == ((), pytest.approx(0.23))

    def test_workers_predictions_are_used_once_they_were_better(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ())])
        for n in range(20):
            length = 40 if n % 2 else 400
            scheduler.step(2.0, [Arrived(request("a", n))])
            told = report(did("a", 0, 3, predicted_remaining_tokens=length - 3.0))
            scheduler.step(2.0, [told])
            e = scheduler.explain("a", 2.0)
            assert e is not None
            assert ("worker's prediction" in e.basis) == (n > 8)
            good = re.search(
                r"after the first round such estimates were wrong by .* of (\d+) requests", e.basis
            )
            assert (int(good[1]) if good else 0) == max(0, n - 9)
            scheduler.step(2.0, [report(did("a", 3, length - 3, end=End.STOP))])

    def test_a_request_that_runs_to_its_limit_has_a_known_length(self) -> None:
        scheduler = core()
        known = request("a", max_tokens=90, runs_to_limit=True, expected_output_tokens=7)
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(known)])
        scheduler.step(2.0, [report(did("a", 0, 30))])
        e = scheduler.explain("a", 2.0)
        assert e is not None
        assert e.basis.startswith("its limit of 90 tokens")
        assert scheduler.rank_of("a").remaining.basis is Basis.LIMIT  # type: ignore[union-attr]
        before = scheduler.priors.to_dict()["all"]["length_counts"]
        scheduler.step(3.0, [report(did("a", 30, 60, end=End.LENGTH))])
        learned = scheduler.priors.to_dict()["all"]
        assert (learned["length_counts"], learned["length_cuts"]) == (before, {}), "it teaches no length"

    def test_the_newest_prediction_is_read_as_what_remains(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ())])
        for n in range(40):
            length = 4 + 30 * n
            scheduler.step(2.0, [Arrived(request("a", n, max_tokens=3900))])
            for at in range(0, length - 3, 30):
                step = min(30, length - at - 1)
                said = length - at - step
                scheduler.step(2.0, [report(did("a", at, step, predicted_remaining_tokens=float(said)))])
            scheduler.step(2.0, [report(did("a", at + step, 1, end=End.STOP))])
        scheduler.step(3.0, [Arrived(request("b", 99, max_tokens=3900))])
        scheduler.step(3.0, [report(did("b", 0, 1000, predicted_remaining_tokens=5.0))])
        left = scheduler._shard.requests["b"]
        assert scheduler.priors.tokens_left("chat", 1000, 3900, left.guesses).mean < 10

    def test_a_failed_request_teaches_no_length(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        commands = scheduler.step(2.0, [report(did("a", 0, 3, end=End.ERROR, error="the model said NaN"))])
        commit = commands[0]
        assert isinstance(commit, Commit)
        assert (commit.end, commit.detail) == (End.ERROR, "the model said NaN")
        assert [line.what for line in commit.story] == ["arrived", "leased", "started", "ended"]
        assert scheduler.priors.to_dict()["classes"]["chat"]["length_counts"] == {}

    def test_one_that_fails_before_its_first_token(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 0, end=End.ERROR, error="x"))])
        assert scheduler.totals() == Totals(0, 0, 0, 0.0)

    def test_residency_of_an_old_lease_changes_nothing(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 3))])
        changes = (ResidencyChange("a", 7, Residency.NONE), ResidencyChange("b", 1, Residency.NONE))
        scheduler.step(3.0, [report(residency=changes)])
        e = scheduler.explain("a", 3.0)
        assert e is not None
        assert e.state is RequestState.RUNNING

    def test_a_worker_that_comes_back_without_it_can_lose_it_at_no_cost(self) -> None:
        for held, costs in (((), False), ((Held("a", 1, Residency.HOST),), True)):
            scheduler = core()
            scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
            scheduler.step(2.0, [report(did("a", 0, 3))])
            scheduler.step(3.0, [WorkerUp(W, held)])
            assert (scheduler.workers()[0].moving_cost_s > 0) is costs
            assert scheduler.workers()[0].running == 0

    def test_leaving_a_draining_worker_is_told(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [WorkerDraining("w")])
        e = scheduler.explain("a", 2.0)
        assert e is not None
        assert [(line.what, line.detail) for line in e.story][-1] == ("requeued", "worker w is leaving")

    def test_what_is_learnt_counts_often_at_first_and_then_at_intervals(self) -> None:
        scheduler = core()
        versions = []
        for quarter in range(240):
            scheduler.priors.observe_length(f"class {quarter}", 10, Guesses())
            scheduler.step(quarter / 4, [])
            versions.append(scheduler.priors.version)
        assert versions[0] == 1
        assert versions[8] >= 4
        assert 15 <= versions[-1] <= 25

    def test_only_what_ran_is_paused_by_an_eviction(self) -> None:
        scheduler = core()
        wide = replace(W, slots=2)
        scheduler.step(1.0, [WorkerUp(wide, ()), Arrived(request("a")), Arrived(request("b", 2))])
        scheduler.step(2.0, [report(did("a", 0, 3), did("b", 0, 3))])
        scheduler.step(3.0, [report(did("b", 3, 3))])
        gone = tuple(ResidencyChange(i, 1, Residency.NONE) for i in "ab")
        stays = (ResidencyChange("b", 1, Residency.DEVICE),)
        scheduler.step(4.0, [report(residency=stays)])
        assert scheduler.explain("b", 4.0).state is RequestState.RUNNING  # type: ignore[union-attr]
        scheduler.step(5.0, [report(residency=gone)])
        for request_id in "ab":
            e = scheduler.explain(request_id, 5.0)
            assert e is not None
            assert (e.state, e.preemptions) == (RequestState.LISTED, 1)

    def test_an_eviction_that_moves_it_to_another_level_is_recorded(self) -> None:
        """KV that must be computed again is part of the remaining service."""
        scheduler = core()
        large = request("a", prompt_tokens=3000, max_tokens=60, expected_output_tokens=60)
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(large)])
        scheduler.step(2.0, [report(did("a", 0, 50, prefilled=3000), prefill_s=0.3)])
        before = scheduler.explain("a", 2.0)
        commands = scheduler.step(3.0, [report(residency=(ResidencyChange("a", 1, Residency.NONE),))])
        after = scheduler.explain("a", 3.0)
        assert before is not None and after is not None
        assert after.level > before.level
        assert Rank("a", after.level, after.index_s, preemptions=1) in commands

    def test_an_end_teaches_the_rounds_that_were_seen(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 0, prefilled=100))])
        scheduler.step(3.0, [report(did("a", 0, 4))])
        scheduler.step(4.0, [report(did("a", 4, 1, end=End.STOP))])
        learnt = scheduler.priors.to_dict()["classes"]["chat"]
        acceptance = learnt["acceptance"]
        assert (acceptance["requests"], acceptance["sum_n"], acceptance["sum_nm"]) == (1, 2, 5)
        assert acceptance["sum_within"] == pytest.approx(1.5**2 * 2)
        assert acceptance["rounds"] == pytest.approx(2, rel=1e-3)
        assert sum(learnt["length_counts"].values()) == 1

    def test_swaps_teach_what_moving_a_context_costs(self) -> None:
        """The cost leaves with the change of residency, and returns with the round that runs it again."""
        scheduler = core()
        wide = replace(W, slots=3)
        a, c = request("a", prompt_tokens=70), request("c", 3, prompt_tokens=50)
        scheduler.step(1.0, [WorkerUp(wide, ()), *map(Arrived, (a, request("b", 2), c))])
        scheduler.step(2.0, [report(did("a", 0, 3), did("b", 0, 3), did("c", 0, 3))])
        out = (
            ResidencyChange("b", 1, Residency.HOST),
            ResidencyChange("c", 9, Residency.HOST),
            ResidencyChange("gone", 1, Residency.HOST),
            ResidencyChange("a", 1, Residency.DEVICE),
        )
        scheduler.step(3.0, [report(did("a", 3, 3), residency=out, swap_s=0.2)])
        cost = scheduler.priors.cost
        assert (cost.swap_tokens, cost.swap_s) == (103, 0.2)
        scheduler.step(4.0, [report(did("b", 3, 3), swap_s=0.1)])
        assert cost.swap_tokens == pytest.approx(206, rel=0.01)
        assert cost.swap_s == pytest.approx(0.3, rel=0.01)
        scheduler.step(5.0, [report(did("b", 6, 3), swap_s=0.1)])
        assert cost.swap_s == pytest.approx(0.3, rel=0.01), "nothing moved that it knows of"

    def test_a_round_counts_what_it_verified(self) -> None:
        """One sequence verifies 6 tokens, one only has context computed and pays for that alone."""
        scheduler = core()
        wide = replace(W, slots=2)
        scheduler.step(1.0, [WorkerUp(wide, ()), Arrived(request("a")), Arrived(request("b", 2))])
        scheduler.step(2.0, [report(did("a", 0, 3), did("b", 0, 0, prefilled=80, drafted=0), prefill_s=0.4)])
        cost = scheduler.priors.cost
        assert (cost.rounds, cost.batch, cost.tokens) == (1, 1, 6)
        a, b = scheduler.explain("a", 2.0), scheduler.explain("b", 2.0)
        assert a is not None and b is not None
        assert (a.attained_s, b.attained_s) == (pytest.approx(0.03), pytest.approx(0.4))

    def test_a_round_that_only_prefills_is_all_prefill(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        before = replace(scheduler.priors.cost)
        scheduler.step(2.0, [report(did("a", 0, 0, prefilled=80, drafted=0), prefill_s=0.4)])
        cost = scheduler.priors.cost
        assert cost.rounds == 0
        assert cost.prefill_s - before.prefill_s == pytest.approx(0.43, rel=0.01)

    def test_a_step_makes_few_ranks_anew_however_many_wait(self) -> None:
        """They move back as the rounds cost more than expected, so that the next one comes to the front each
        time."""
        anew = []
        for crowd in (600, 1200):
            scheduler = core("srpt-length")
            events = [Arrived(request(f"r{i:04d}", i, prompt_tokens=100 + i)) for i in range(crowd)]
            scheduler.step(0.0, [WorkerUp(W, ()), *events])
            before = {entry.request_id: entry.index_s for entry in scheduler.queue(0.0, crowd)}
            scheduler.step(50.0, [report(did("r0000", 0, 1), draft_s=5.0, verify_s=5.0)])
            after = scheduler.queue(50.0, crowd)
            anew.append(sum(entry.index_s > 2 * before[entry.request_id] for entry in after))
            scheduler.check()
        assert MOST_REFRESHED <= anew[0] == anew[1] < 600

    def test_the_bound_on_new_ranks_is_one_for_the_step_not_one_for_each_lease(self) -> None:
        scheduler = core("srpt-length")
        slots = 8
        events = [Arrived(request(f"r{i:04d}", i, prompt_tokens=100 + i)) for i in range(600)]
        scheduler.step(0.0, [WorkerUp(replace(W, slots=slots), ()), *events])
        before = {entry.request_id: entry.index_s for entry in scheduler.queue(0.0, 600)}
        ends = [did(f"r{i:04d}", 0, 1, end=End.STOP) for i in range(slots)]
        scheduler.step(50.0, [report(*ends, draft_s=50.0, verify_s=50.0)])
        after = scheduler.queue(50.0, 600)
        anew = sum(entry.index_s > 2 * before[entry.request_id] for entry in after)
        assert MOST_REFRESHED <= anew <= MOST_REFRESHED + 2 * slots, "the front of the queue, and one list"
        scheduler.check()

    def test_ranks_of_waiting_requests_follow_what_is_learnt(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), *(Arrived(request(f"r{i}", i)) for i in range(30))])
        before = {entry.request_id: entry.index_s for entry in scheduler.queue(0.0, 99)}
        for i in range(60):
            scheduler.step(1.0 + i, [report(did("r0", i, 1), draft_s=0.5, verify_s=0.5)])
        scheduler.step(99.0, [EndRequested("r0", End.CANCELLED, "")])
        after = {entry.request_id: entry.index_s for entry in scheduler.queue(99.0, 99)}
        worker_list = [i for i in after if scheduler.explain(i, 99.0).worker_id]  # type: ignore[union-attr]
        assert worker_list
        assert all(after[i] > 5 * before[i] for i in worker_list)
        scheduler.check()


class TestMemory:
    def test_a_worker_takes_a_request_for_which_it_has_just_enough_blocks(self) -> None:
        """A worker leaves out a request for want of blocks: 107 tokens and a draft of 5 are 7 blocks of
        16."""
        for free, taker in ((7, "thief"), (6, "w")):
            scheduler = core("fcfs")
            scheduler.step(0.0, [WorkerUp(replace(W, slots=2), ())])
            scheduler.step(0.0, [Arrived(request("a")), Arrived(request("b", 2, prompt_tokens=107))])
            scheduler.step(1.0, [report(did("a", 0, 1))])
            scheduler.step(2.0, [WorkerUp(replace(W, worker_id="thief"), ())])
            short = report(worker_id="thief", free_target_blocks=free, free_draft_blocks=free)
            scheduler.step(3.0, [short, report(did("a", 1, 1))])
            assert scheduler.explain("b", 3.0).worker_id == taker  # type: ignore[union-attr]

    def test_the_smaller_pool_decides_unless_there_is_no_draft_model(self) -> None:
        for draft_blocks, taker in ((0, "thief"), (1000, "w")):
            scheduler = core("fcfs")
            scheduler.step(0.0, [WorkerUp(replace(W, slots=2), ())])
            scheduler.step(0.0, [Arrived(request("a")), Arrived(request("b", 2))])
            scheduler.step(1.0, [report(did("a", 0, 1))])
            scheduler.step(2.0, [WorkerUp(replace(W, worker_id="thief", draft_blocks=draft_blocks), ())])
            short = report(worker_id="thief", free_target_blocks=7, free_draft_blocks=0)
            scheduler.step(3.0, [short, report(did("a", 1, 1))])
            assert scheduler.explain("b", 3.0).worker_id == taker  # type: ignore[union-attr]


class TestSteps:
    def test_the_records_commands_come_before_the_workers(self) -> None:
        """The order of the contract, over a busy trace with faults."""
        cluster = Cluster("laps-sd", [facts("w0", 2), facts("w1", 1)])
        cluster.submit(
            [Job(f"r{i:02d}", 0.05 * i, 40, 10 + 7 * (i % 9), hint=10 + 7 * (i % 9)) for i in range(40)]
        )
        for time_s, what, who in ((0.5, "drain", "w0"), (1.1, "cancel", "r20"), (1.2, "lost", "w1")):
            cluster.at(time_s, what, who)
        cluster.at(1.5, "up", facts("w2", 2))
        cluster.run()
        assert set(cluster.ended) == set(cluster.jobs)
        for commands in cluster.steps:
            order = [{Drop: 1, Assign: 2, Drained: 3}.get(type(command), 0) for command in commands]
            assert order == sorted(order)
        assert {type(command) for commands in cluster.steps for command in commands} >= {
            Commit,
            Finish,
            Lease,
            Release,
        }

    def test_an_assignment_is_not_repeated_because_time_passes(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        assert scheduler.step(500.0, []) == []

    def test_a_list_that_fits_the_slots_is_not_sent_again_for_ranks(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        for i in range(20):
            commands = scheduler.step(1.0 + i, [report(did("a", i, 1), verify_s=0.1 * i)])
            assert not any(isinstance(command, Assign) for command in commands)

    def test_who_waits_behind_the_slots_is_sent_again_when_its_estimate_moved(self) -> None:
        scheduler = core("srpt-length")
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a")), Arrived(request("b", 2))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        # Rounds are much shorter than expected. That "a" looks better changes nothing, it runs; that "b" does
        # may.
        sent = [
            {entry.request_id: entry.index_s for entry in command.entries}
            for i in range(1, 9)
            for command in scheduler.step(
                1.0 + 30 * i, [report(did("a", i, 1), draft_s=0.0, verify_s=0.0003)]
            )
            if isinstance(command, Assign)
        ]
        assert sent
        assert sent[-1]["b"] < 0.5

    def news(self, arrival: RequestFacts, known: int = 16, free_blocks: int = 900) -> set[str]:
        """Return the list for eight slots that is sent when this request arrives after many known ones."""
        scheduler = core("srpt-length")
        others = [Arrived(request(f"r{i:02d}", i, expected_output_tokens=20 + i)) for i in range(known - 1)]
        scheduler.step(0.0, [WorkerUp(replace(W, slots=8), ()), *others])
        scheduler.step(0.1, [Arrived(request("last", 80, expected_output_tokens=100))])
        # One leaves, so that the list has room.
        empty = report(free_target_blocks=free_blocks, free_draft_blocks=free_blocks)
        scheduler.step(0.2, [EndRequested("r07", End.CANCELLED, ""), empty])
        commands = scheduler.step(0.3, [Arrived(arrival)])
        scheduler.check()
        assert any(isinstance(c, Lease) and c.request_id == arrival.request_id for c in commands)
        return {e.request_id for c in commands if isinstance(c, Assign) for e in c.entries}

    def test_who_comes_last_on_a_long_list_is_not_news_yet(self) -> None:
        """The worker knows 15 for its 8 slots: the next list names the one that it needs."""
        assert self.news(request("new", 90, expected_output_tokens=200)) == set()

    def test_whose_turn_may_be_near_is_news_at_once(self) -> None:
        assert "new" in self.news(request("new", 90, expected_output_tokens=5))
        assert "new" in self.news(request("new", 90, expected_output_tokens=30)), "the eleventh"

    def test_a_worker_that_knows_few_hears_of_everybody(self) -> None:
        assert "new" in self.news(request("new", 90, expected_output_tokens=200), known=12)

    def test_a_worker_short_of_blocks_hears_of_everybody(self) -> None:
        """Many may be too big to fit: the search ends with the list."""
        assert "new" in self.news(request("new", 90, expected_output_tokens=200), free_blocks=100)

    def test_the_story_of_a_cancelled_request_says_so(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        ended = scheduler.step(3.0, [EndRequested("a", End.CANCELLED, "")])[0]
        assert isinstance(ended, Finish)
        assert [(line.at_s, line.what, line.detail) for line in ended.story][-1] == (
            3.0,
            "ended",
            "cancelled",
        )

    def test_a_drain_told_twice_is_one(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(1.0, [report(did("a", 0, 1))])
        assert scheduler.step(1.0, [WorkerDraining("w"), WorkerDraining("w"), WorkerDraining("nobody")]) == []

    def test_a_long_story_keeps_its_beginning_and_its_end(self) -> None:
        request_ = Request(request("a"))
        for i in range(200):
            request_.record_event(float(i), "resumed" if i % 4 else "paused", str(i))
        details = [line.detail for line in request_.story]
        assert len(details) == MAX_STORY_LINES
        assert details[:8] == [str(i) for i in range(8)]
        assert details[9:] == [str(i) for i in range(200 - MAX_STORY_LINES + 9, 200)]

    def test_and_says_what_it_left_out_between(self) -> None:
        request_ = Request(request("a"))
        for i in range(MAX_STORY_LINES + 1):
            request_.record_event(float(i), "resumed" if i % 4 else "paused", str(i))
        first = request_.story[8]
        for i in range(MAX_STORY_LINES + 1, 200):
            request_.record_event(float(i), "resumed" if i % 4 else "paused", str(i))
        gone = range(8, 200 - MAX_STORY_LINES + 9)
        assert (first.at_s, first.what, first.detail) == (8.0, "left_out", "2 lines, 1 of them paused")
        assert request_.story[8].at_s == 8.0
        assert (
            request_.story[8].detail == f"{len(gone)} lines, {sum(i % 4 == 0 for i in gone)} of them paused"
        )


def test_the_mean_latency_of_laps_sd_is_below_fcfs_with_real_preemption() -> None:
    """The trace is contended, with one long request in ten."""
    jobs = [
        Job(
            f"r{i:03d}",
            0.12 * i,
            60,
            300 if i % 10 == 0 else 15 + i % 7,
            (1 + i % 6,),
            hint=300 if i % 10 == 0 else 20,
        )
        for i in range(80)
    ]
    means, paused = {}, {}
    for policy in ("fcfs", "srpt-length", "laps-sd"):
        cluster = Cluster(policy, [facts("w", 1)], check=False)
        cluster.submit(jobs)
        cluster.run()
        means[policy] = cluster.mean_latency_s()
        paused[policy] = sum(
            command.standing.preemptions
            for _, command in cluster.commands
            if isinstance(command, Commit) and command.end
        )
    assert means["laps-sd"] < 0.6 * means["fcfs"]
    assert means["laps-sd"] < 1.1 * means["srpt-length"]
    assert paused["fcfs"] == 0 < paused["laps-sd"]


class TestHowSlowAWorkerIs:
    """Compared with the others, by the times of its rounds; placement takes notice of it in steps."""

    def rounds(self, shard: Scheduler, worker_id: str, request_id: str, count: int, seconds: float) -> float:
        """Report rounds of one token; return how slow placement takes the worker to be."""
        for _ in range(count):
            at = shard._shard.requests[request_id].emitted
            epoch = shard._shard.requests[request_id].lease_epoch
            progress = (did(request_id, at, 1, lease_epoch=epoch),)
            shard.step(
                1.0, [RoundReported(worker_id, progress, (), 0.0, seconds, 0.0, 0.0, 0.0, seconds, 900, 900)]
            )
        return shard._shard.workers[worker_id].slowness

    def core(self) -> Scheduler:
        shard = core()
        for name in ("a", "b"):
            shard.step(1.0, [WorkerUp(WorkerFacts(name, 1, 1000, 1000, 16, 4096, 5), ())])
        shard.step(1.0, [Arrived(request("first")), Arrived(request("second", 1))])
        return shard

    def test_one_outlier_changes_nothing_and_many_slow_rounds_do(self) -> None:
        shard = self.core()
        at = {view.worker: name for name, view in shard._shard.requests.items()}
        for _ in range(30):
            for name in ("a", "b"):
                assert self.rounds(shard, name, at[name], 1, 0.05) == 1.0

        assert self.rounds(shard, "b", at["b"], 1, 5.0) == 1.0
        slow = self.rounds(shard, "b", at["b"], 60, 0.10)
        assert 1.3 < slow <= 2.0
        assert shard._shard.workers["a"].slowness == 1.0

    def test_it_moves_when_its_recent_rounds_differ_by_more_than_a_tenth(self) -> None:
        shard = self.core()
        at = {view.worker: name for name, view in shard._shard.requests.items()}
        for _ in range(30):
            for name in ("a", "b"):
                self.rounds(shard, name, at[name], 1, 0.05)
        worker = shard._shard.workers["b"]
        for recent, expected in ((1.09, 1.0), (1.15, 1.15), (1.06, 1.15), (1.02, 1.02)):
            worker.recent_slowness = recent
            assert self.rounds(shard, "b", at["b"], 1, 0.05 * recent) == pytest.approx(expected, abs=0.01)
