"""Workers that die with a request: which requests are suspected, run alone, are cleared, and are not tried
again."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Command, Drop, Finish, Lease, Release
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    Held,
    Recovered,
    RequestFacts,
    RoundReported,
    WorkerAway,
    WorkerDraining,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.handlers.deaths import MOST_LOST
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import ALONE_AFTER, MOST_DEATHS, QUIET_S, SURVIVED_ROUNDS
from scheduler_svc.core.views import RequestState
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts
from tests.core.test_properties import QUICK
from tests.core.test_scheduler import did, request


def core(*, fair: bool = False) -> Scheduler:
    settings = CoreSettings(tenant_fairness=fair)
    return Scheduler(policy_named("laps-sd", settings), settings, Priors())


class Shard:
    """Core whose steps are checked, with the newest lease of each request."""

    def __init__(self, *, fair: bool = False) -> None:
        self.core = core(fair=fair)
        self.leases: dict[str, Lease] = {}
        self.emitted: dict[str, int] = {}
        self.now_s = 1.0

    def seconds_pass(self, seconds: float = QUIET_S) -> list[Command]:
        self.now_s += seconds
        return self.step()

    def step(self, *events: Event) -> list[Command]:
        commands = self.core.step(self.now_s, events)
        self.core.check()
        self.leases |= {command.request_id: command for command in commands if isinstance(command, Lease)}
        return commands

    def up(self, worker_id: str, *held: Held, slots: int = 4, **more: int) -> list[Command]:
        worker = WorkerFacts(worker_id, slots, 1000, 1000, 16, 4096, 5)
        return self.step(WorkerUp(replace(worker, **more), held))

    def arrive(self, *requests: RequestFacts) -> list[Command]:
        return self.step(*(Arrived(facts) for facts in requests))

    def lost(self, worker_id: str, **more: bool) -> list[Command]:
        return self.step(WorkerLost(worker_id, **more))

    def round(self, worker_id: str, *request_ids: str) -> list[Command]:
        progress = []
        for request_id in request_ids:
            at = self.emitted.get(request_id, 0)
            self.emitted[request_id] = at + 1
            progress.append(did(request_id, at, 1, lease_epoch=self.leases[request_id].lease_epoch))
        round_ = RoundReported(worker_id, tuple(progress), (), 0.01, 0.02, 0.0, 0.0, 0.0, 0.03, 900, 900)
        return self.step(round_)

    def worker_of(self, request_id: str) -> str | None:
        view = self.core.explain(request_id, 1.0)
        assert view is not None
        return view.worker_id

    def waits_for(self, request_id: str) -> str:
        view = self.core.explain(request_id, 1.0)
        assert view is not None
        return view.waits_for

    def deaths(self, *request_ids: str) -> list[int]:
        return [self.core._shard.requests[request_id].deaths for request_id in request_ids]

    def suspect(self, *request_ids: str) -> None:
        """Make these requests suspects: only they share two workers that die."""
        self.arrive(*(request(request_id, number) for number, request_id in enumerate(request_ids)))
        for number in range(ALONE_AFTER):
            self.up(f"doomed{number}")
            self.lost(f"doomed{number}")
        assert self.deaths(*request_ids) == [ALONE_AFTER] * len(request_ids)

    def recover_surviving(self, request_id: str, *, deaths: int) -> None:
        """Enter a request from the record that has survived enough rounds since its last death."""
        rounds = 1 + SURVIVED_ROUNDS
        counts = {"lease_epoch": 2, "deaths": deaths, "death_round": 1}
        self.step(Recovered(request(request_id), 9, rounds, 0, 0, 0.0, 0, None, **counts))

    def clear_of_w1(self, request_id: str) -> None:
        """Let a request lose worker w1, and survive so many rounds of w2 that this does not count any more."""
        self.up("w1")
        self.arrive(request(request_id))
        self.lost("w1")
        self.up("w2")
        for _ in range(SURVIVED_ROUNDS):
            self.round("w2", request_id)


def releases(commands: list[Command]) -> dict[str, tuple[int, int]]:
    return {c.request_id: (c.deaths, c.death_round) for c in commands if isinstance(c, Release)}


class TestWhoIsSuspected:
    def test_what_may_have_been_in_the_batch_and_nothing_that_had_paused(self) -> None:
        shard = Shard()
        shard.up("w", slots=2)
        shard.arrive(request("ran"), request("paused"), request("listed"))
        shard.round("w", "paused")
        shard.round("w", "ran")
        commands = shard.lost("w")

        assert shard.deaths("ran", "paused", "listed") == [1, 0, 1]
        assert releases(commands) == {"ran": (1, 1), "paused": (0, 0), "listed": (1, 0)}

    def test_nothing_goes_to_a_worker_whose_stream_has_ended_and_its_death_counts_once(self) -> None:
        """Machines of one rack die together, and the scheduler gives them up one after another."""
        shard = Shard()
        for worker_id in ("w1", "w2", "w3"):
            shard.up(worker_id)
        shard.arrive(*(request(name, number) for number, name in enumerate("abc")))
        shard.step(WorkerAway("w1"))
        shard.step(WorkerAway("w2"))
        shard.arrive(request("d", 4), request("e", 5))
        shard.lost("w1")
        shard.lost("w2")

        assert {shard.worker_of(name) for name in "abcde"} == {"w3"}
        assert sorted(shard.deaths(*"abcde")) == [0, 0, 0, 1, 1]

    def test_a_worker_that_is_up_again_gets_requests_as_before(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a"))
        shard.step(WorkerAway("w"), WorkerAway("unknown"))
        shard.arrive(request("b", 2))
        assert (shard.worker_of("a"), shard.worker_of("b")) == ("w", None)
        assert shard.waits_for("b") == "a worker: none takes work now"

        shard.up("w")

        assert (shard.worker_of("a"), shard.worker_of("b")) == ("w", "w")
        assert shard.deaths("a", "b") == [0, 0]

    def test_requests_may_wait_for_the_one_worker_that_can_hold_them_while_its_stream_is_broken(self) -> None:
        shard = Shard()
        shard.up("small", max_length=512)
        shard.up("large")
        shard.step(WorkerAway("large"))
        shard.arrive(request("a", max_tokens=3_000))
        assert shard.core.capacity_tokens == 4096
        assert shard.worker_of("a") is None

        shard.up("large")
        assert shard.worker_of("a") == "large"

        shard.lost("large")
        assert shard.core.capacity_tokens == 512

    def test_a_worker_whose_stream_has_ended_is_not_cleared_for_a_suspect(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a"))
        shard.step(WorkerAway("w"))
        shard.suspect("s")
        shard.seconds_pass()
        assert (shard.worker_of("a"), shard.worker_of("s")) == ("w", None)

        shard.up("w")
        shard.seconds_pass()

        assert (shard.worker_of("a"), shard.worker_of("s")) == (None, "w")

    def test_not_what_a_draining_worker_still_ran(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a"))
        shard.round("w", "a")
        shard.step(WorkerDraining("w"))
        shard.lost("w")

        assert shard.deaths("a") == [0]

    def test_its_story_says_how_many_died_once_it_has_to_run_alone(self) -> None:
        shard = Shard()
        shard.arrive(request("a"))
        for number, alone in (
            (1, ""),
            (2, ", alone: 2 workers died with it"),
            (3, ", alone: 3 workers died with it"),
        ):
            shard.up("w")
            shard.seconds_pass()
            shard.lost("w", hung=True)
            view = shard.core.explain("a", 1.0)
            assert view is not None
            assert view.story[-1].what == "requeued"
            lost = "worker w was lost; continues from its committed tokens"
            assert (number, view.story[-1].detail) == (number, lost + alone)

    def test_eight_rounds_clear_it(self) -> None:
        shard = Shard()
        shard.up("w1")
        shard.arrive(request("a"))
        shard.round("w1", "a")
        shard.lost("w1")
        shard.up("w2")
        for _ in range(SURVIVED_ROUNDS - 1):
            shard.round("w2", "a")
        assert shard.deaths("a") == [1]

        shard.round("w2", "a")
        assert shard.deaths("a") == [0]
        shard.lost("w2")
        assert shard.deaths("a") == [1]

    def test_a_worker_that_dials_again_did_not_die(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a"), request("ends"))
        shard.lost("w")
        shard.step(EndRequested("ends", End.CANCELLED, ""))
        commands = shard.up("w", Held("a", 1, Residency.DEVICE))

        assert shard.deaths("a") == [0]
        assert Drop("w", (("a", 1),)) in commands, "all the same, its lease was taken back"
        view = shard.core.explain("a", 1.0)
        assert view is not None
        assert ("cleared", "worker w is alive") in [(line.what, line.detail) for line in view.story]
        shard.lost("w")
        assert shard.deaths("a") == [1], "each time it is given up is counted, and taken back, once"

    def test_unless_it_was_connected_and_hung(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a"))
        shard.lost("w", hung=True)
        shard.up("w")

        assert shard.deaths("a") == [1]

    def test_one_that_must_run_alone_all_the_same_keeps_its_turn(self) -> None:
        shard = Shard()
        shard.suspect("a")
        shard.up("w")
        shard.lost("w")
        shard.step(Recovered(request("b"), 0, 0, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=ALONE_AFTER))
        shard.up("w")
        assert shard.deaths("a", "b") == [ALONE_AFTER, ALONE_AFTER]
        assert [shard.worker_of(name) for name in "ab"] == ["w", None], "the longest waiting first"

    def test_what_was_cleared_meanwhile_stays_so(self) -> None:
        shard = Shard()
        shard.clear_of_w1("a")
        shard.up("w1")

        assert shard.deaths("a") == [0]

    def test_a_death_that_was_cleared_is_not_taken_back_again_from_a_later_one(self) -> None:
        shard = Shard()
        shard.clear_of_w1("a")
        shard.lost("w2")
        shard.up("w1")
        assert shard.deaths("a") == [1]

        shard.up("w2")
        assert shard.deaths("a") == [0]

    def test_what_was_not_counted_is_not_taken_back(self) -> None:
        """By the record two that must run alone share a worker: its death counts for neither."""
        shard = Shard()
        for number, name in enumerate("ab"):
            shard.step(Recovered(request(name, number), 0, 0, 0, 0, 0.0, 0, "w", 1, deaths=ALONE_AFTER))
        for _ in range(2):
            shard.up("w")
            assert shard.deaths("a", "b") == [ALONE_AFTER, ALONE_AFTER]
            shard.lost("w")

    def test_of_many_lost_workers_the_oldest_are_forgotten(self) -> None:
        shard = Shard()
        shard.arrive(request("a", max_tokens=3_000))
        for number in range(MOST_LOST + 1):
            shard.up(f"w{number}")
            for _ in range(SURVIVED_ROUNDS):
                shard.round(f"w{number}", "a")
            shard.lost(f"w{number}")

        assert list(shard.core._deaths.died_with) == [f"w{number}" for number in range(1, MOST_LOST + 1)]


class TestRunningAlone:
    def test_nothing_joins_it_until_it_is_cleared(self) -> None:
        shard = Shard()
        shard.suspect("a")
        shard.up("w")
        shard.arrive(request("b", 1))
        assert (shard.worker_of("a"), shard.worker_of("b")) == ("w", None)
        assert shard.waits_for("b") == "a worker: none takes work now"
        assert shard.core.capacity_tokens == 4096, "requests that it can hold may wait for it"

        for _ in range(SURVIVED_ROUNDS):
            assert shard.worker_of("b") is None
            shard.round("w", "a")
        assert (shard.worker_of("a"), shard.worker_of("b")) == ("w", "w")

    @pytest.mark.parametrize("end", ["ends", "is cancelled"])
    def test_or_until_it_ends(self, end: str) -> None:
        shard = Shard()
        shard.suspect("a")
        shard.up("w")
        shard.arrive(request("b", 1))
        if end == "ends":
            epoch = shard.leases["a"].lease_epoch
            last = did("a", 0, 1, lease_epoch=epoch, end=End.STOP)
            shard.step(RoundReported("w", (last,), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 900, 900))
        else:
            shard.step(EndRequested("a", End.CANCELLED, ""))

        assert shard.worker_of("b") == "w"

    def test_one_at_a_time_and_the_worker_is_cleared_for_it(self) -> None:
        shard = Shard(fair=True)
        shard.suspect("a", "b")
        shard.up("w1")
        assert [shard.worker_of(name) for name in "ab"] == ["w1", None]
        shard.up("w2")
        shard.arrive(request("c", 1))
        assert [shard.worker_of(name) for name in "abc"] == ["w1", None, "w2"]
        assert shard.waits_for("b") == f"a worker of its own: {ALONE_AFTER} workers died with it"
        assert [entry.request_id for entry in shard.core.queue(1.0, 9)] == ["a", "b", "c"]
        assert shard.core.totals().queued == 1
        ahead = shard.core.explain("c", 1.0)
        assert ahead is not None and ahead.ahead.total == 2

        commands = shard.step(EndRequested("a", End.CANCELLED, ""))
        assert [shard.worker_of(name) for name in "bc"] == [None, "w2"], "w1 may still be in a round with a"
        commands += shard.seconds_pass(QUIET_S / 2)
        assert shard.worker_of("b") is None
        commands += shard.seconds_pass(QUIET_S / 2)
        assert [shard.worker_of(name) for name in "bc"] == ["w1", "w2"], "the emptiest worker is taken"
        assert not releases(commands)
        assert not shard.core.has_suspects

    def test_of_many_up_to_half_of_the_workers_run_one_each(self) -> None:
        """After a power loss, most suspects are innocent."""
        shard = Shard()
        names = [f"r{number:02d}" for number in range(8)]
        shard.suspect(*names)
        for worker in ("w1", "w2", "w3", "w4", "w5"):
            shard.up(worker)
        assert [shard.worker_of(name) for name in names[:3]] == ["w1", "w2", None]
        shard.arrive(request("busy"))
        assert shard.worker_of("busy") in ("w3", "w4", "w5")

    @pytest.mark.parametrize(
        ("suspects", "workers", "trials"),
        [(1, 8, 1), (4, 8, 1), (5, 8, 2), (9, 8, 3), (20, 8, 4), (20, 1, 1), (20, 3, 1)],
    )
    def test_one_worker_for_each_four_of_them_and_at_most_half(
        self, suspects: int, workers: int, trials: int
    ) -> None:
        shard = Shard()
        names = [f"r{number:02d}" for number in range(suspects)]
        shard.arrive(*(request(name, number) for number, name in enumerate(names)))
        for number in range(ALONE_AFTER):
            shard.up(f"doomed{number}", slots=20)
            shard.lost(f"doomed{number}")
        shard.step(*(WorkerUp(WorkerFacts(f"w{n}", 4, 1000, 1000, 16, 4096, 5), ()) for n in range(workers)))
        alone = [worker for worker in map(shard.worker_of, names) if worker is not None]
        assert len(alone) == len(set(alone)) == trials
        assert [name for name in names if shard.worker_of(name)] == names[:trials], (
            "the longest waiting first"
        )
        assert shard.step() == []

    def test_workers_that_drain_are_not_among_these(self) -> None:
        shard = Shard()
        names = [f"r{number}" for number in range(5)]
        shard.suspect(*names)
        ups = [WorkerUp(WorkerFacts(f"w{n}", 4, 1000, 1000, 16, 4096, 5), ()) for n in range(4)]
        shard.step(*ups, WorkerDraining("w2"), WorkerDraining("w3"))
        assert [shard.worker_of(name) for name in names] == ["w0", None, None, None, None]

    def test_the_next_one_takes_the_place_of_one_that_is_cleared_at_once(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        shard.up("w1")
        for _ in range(SURVIVED_ROUNDS):
            assert [shard.worker_of(name) for name in "ab"] == ["w1", None]
            shard.round("w1", "a")
        assert [shard.worker_of(name) for name in "ab"] == [None, "w1"], (
            "no time to keep it empty: a is harmless"
        )

    def test_after_one_that_ended_there_the_next_one_goes_where_nothing_ran(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        shard.up("w1")
        shard.up("w0")
        assert [shard.worker_of(name) for name in "ab"] == ["w1", None]
        shard.step(EndRequested("a", End.CANCELLED, ""))
        assert shard.worker_of("b") == "w0", "w1 may still be in a round with a"

    def test_unless_it_was_cleared_by_the_round_that_ended_it(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        shard.up("w1")
        shard.up("w0")
        for _ in range(SURVIVED_ROUNDS - 1):
            shard.round("w1", "a")
        epoch = shard.leases["a"].lease_epoch
        last = did("a", SURVIVED_ROUNDS - 1, 1, lease_epoch=epoch, end=End.STOP)
        shard.step(RoundReported("w1", (last,), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 900, 900))
        assert shard.worker_of("b") == "w1", "its worker is the next one's"

    def test_the_one_with_the_most_deaths_goes_first(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        certain = Recovered(request("c"), 0, 0, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=ALONE_AFTER + 1)
        shard.step(certain)
        shard.up("w1")
        assert [shard.worker_of(name) for name in "abc"] == [None, None, "w1"]

    def test_the_only_worker_is_cleared_of_what_it_runs(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("busy"))
        shard.round("w", "busy")
        shard.step(
            Recovered(
                request("a"), 0, 0, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=ALONE_AFTER, death_round=0
            )
        )

        assert (shard.worker_of("a"), shard.worker_of("busy")) == ("w", None)
        view = shard.core.explain("busy", 1.0)
        assert view is not None
        assert view.story[-1].detail == "worker w is cleared for a request that runs alone"
        view = shard.core.explain("a", 1.0)
        assert view is not None
        assert view.story[-1].detail == f"to worker w, alone: {ALONE_AFTER} workers died with it"

    def test_what_is_not_known_to_be_harmless_leaves_first(self) -> None:
        """A worker that gets a Drop is in a round with the request until then: its death would be attributed
        to the wrong request."""
        shard = Shard()
        shard.up("w")
        shard.arrive(request("new"))
        suspect = Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=ALONE_AFTER)
        commands = shard.step(suspect)
        assert list(releases(commands)) == ["new"]
        assert [shard.worker_of(name) for name in ("a", "new")] == [None, None]
        assert shard.core.has_suspects

        shard.seconds_pass()
        assert [shard.worker_of(name) for name in ("a", "new")] == ["w", None]

    @pytest.mark.parametrize("where", ["in the queue", "on another list", "ended"])
    def test_a_worker_that_dies_just_after_it_left_may_have_died_of_it(self, where: str) -> None:
        shard = Shard()
        shard.up("w")
        deadly = Recovered(request("deadly"), 0, 0, 0, 0, 0.0, 0, "w", lease_epoch=2, deaths=1)
        suspect = Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=ALONE_AFTER)
        shard.step(deadly)
        shard.step(suspect)
        assert shard.worker_of("deadly") is None, "w is cleared for the suspect"
        if where == "on another list":
            shard.up("other")
            assert shard.worker_of("deadly") == "other"
        if where == "ended":
            shard.step(EndRequested("deadly", End.CANCELLED, ""))
        commands = shard.lost("w")
        if where == "on another list":
            assert Drop("other", (("deadly", shard.leases["deadly"].lease_epoch),)) in commands

        if where != "ended":
            assert shard.deaths("deadly", "a") == [ALONE_AFTER, ALONE_AFTER]
            view = shard.core.explain("deadly", 1.0)
            assert view is not None
            details = [line.detail for line in view.story if line.what == "requeued"]
            assert details[-1] == (
                "worker w was lost, which it had just left; runs alone: 2 workers died with it"
            )

    def test_a_death_counts_once_for_a_request_that_left_twice(self) -> None:
        """Shorter requests displace it from the list, end, and others come, between two reports of the worker."""
        shard = Shard()
        shard.up("w", slots=2)
        shard.arrive(*(request(f"ran{n}", n, expected_output_tokens=100) for n in range(2)))
        shard.round("w", "ran0", "ran1")
        shard.arrive(request("a", 5, max_tokens=1000, expected_output_tokens=900))
        for turn in range(2):
            shard.step(*(EndRequested(f"short{n}", End.CANCELLED, "") for n in range(5 * turn)))
            assert shard.worker_of("a") == "w"
            short = [f"short{5 * turn + n}" for n in range(5)]
            shard.arrive(*(request(name, 9, max_tokens=20, expected_output_tokens=5) for name in short))
            assert shard.worker_of("a") is None
        shard.lost("w")

        assert shard.deaths("a", "ran0") == [1, 1]
        assert shard.waits_for("a") == "a worker: none takes work now"

    def test_a_report_shows_that_it_did_not_die_of_what_left_before(self) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a", 0), request("b", 1))
        shard.step(EndRequested("a", End.CANCELLED, ""))
        assert list(shard.core._shard.workers["w"].taken_off) == ["a"]
        shard.round("w", "b")

        assert not shard.core._shard.workers["w"].taken_off

    @pytest.mark.parametrize("why", ["it ends", "the worker drains", "the worker is lost"])
    def test_a_worker_is_kept_empty_no_longer_than_it_is_needed(self, why: str) -> None:
        shard = Shard()
        shard.up("w")
        shard.arrive(request("new"))
        shard.step(Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=ALONE_AFTER))
        if why == "it ends":
            shard.step(EndRequested("a", End.CANCELLED, ""))
            assert shard.worker_of("new") == "w"
        elif why == "the worker drains":
            shard.step(WorkerDraining("w"))
            shard.up("other")
            assert (shard.worker_of("a"), shard.worker_of("new")) == ("other", None)
        else:
            shard.lost("w")
            shard.up("other")
            assert (shard.worker_of("a"), shard.worker_of("new")) == ("other", None)

    def test_one_that_no_worker_can_hold_lets_the_next_one_go_first(self) -> None:
        shard = Shard()
        shard.arrive(request("large", 0, prompt_tokens=2000), request("small", 1))
        for number in range(ALONE_AFTER):
            shard.up(f"doomed{number}")
            shard.lost(f"doomed{number}")
        shard.up("w", max_length=1000)

        assert (shard.worker_of("large"), shard.worker_of("small")) == (None, "w")

    def test_one_that_only_a_cleared_worker_can_hold_lets_the_next_one_go_first(self) -> None:
        shard = Shard()
        large = [request(f"large{number}", number, prompt_tokens=2000) for number in range(2)]
        small = [request(name, 2 + number) for number, name in enumerate("abc")]
        shard.step(
            *(Recovered(one, 0, 0, 0, 0, 0.0, 0, None, 1, deaths=ALONE_AFTER) for one in (*large, *small))
        )
        limits = {"big": 4096, "w0": 1000, "w1": 1000, "w2": 1000}
        workers = [WorkerFacts(name, 4, 1000, 1000, 16, most, 5) for name, most in limits.items()]
        shard.step(*(WorkerUp(worker, ()) for worker in workers))

        names = ("large0", "large1", "a", "b", "c")
        assert [shard.worker_of(name) for name in names] == ["big", None, "w0", None, None]

    def test_those_that_no_worker_can_hold_clear_no_further_worker(self) -> None:
        """One worker is enough for the two others."""
        shard = Shard()
        large = [request(f"large{number}", number, prompt_tokens=2000) for number in range(4)]
        shard.arrive(*large, request("a", 4), request("b", 5))
        for number in range(ALONE_AFTER):
            shard.up(f"doomed{number}", slots=6)
            shard.lost(f"doomed{number}")
        workers = [WorkerFacts(f"w{number}", 4, 1000, 1000, 16, 1000, 5) for number in range(4)]
        shard.step(*(WorkerUp(worker, ()) for worker in workers))

        assert [shard.worker_of(name) for name in "ab"] == ["w0", None]

    def test_it_gets_a_worker_that_can_hold_it_though_another_has_less_to_do(self) -> None:
        shard = Shard()
        shard.suspect("a")
        small = WorkerFacts("small", 4, 1000, 1000, 16, 64, 5)
        shard.step(WorkerUp(small, ()), WorkerUp(replace(small, worker_id="w", max_length=4096), ()))
        assert shard.worker_of("a") == "w"

    def test_it_is_shared_again_when_a_worker_that_was_given_up_is_back(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        shard.up("doomed0")
        assert shard.deaths("a", "b") == [1, 1]
        assert [shard.worker_of(name) for name in "ab"] == ["doomed0", "doomed0"]

    def test_also_where_it_runs_alone_by_then(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        shard.up("w")
        assert [shard.worker_of(name) for name in "ab"] == ["w", None]
        shard.up("doomed1")

        assert shard.deaths("a", "b") == [1, 1]
        shard.arrive(request("c"), request("d"))
        assert {shard.worker_of(name) for name in "abcd"} == {"w", "doomed1"}

    def test_of_the_oldest_requests_one_that_must_run_alone_has_no_part_in_the_reserved_share(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        shard.up("w", slots=1)
        shard.up("w2", slots=1)
        shard.arrive(request("c", 7), request("d", 8))

        assert (shard.worker_of("a"), shard.worker_of("b")) == ("w", None)
        assert {shard.worker_of("c"), shard.worker_of("d")} == {"w2"}

    def test_one_that_waits_for_a_worker_of_its_own_takes_no_part_of_the_share_from_others(self) -> None:
        shard = Shard()
        shard.suspect("a", "b")
        for worker in ("w", "w2", "w3"):
            shard.up(worker, slots=1)
        shard.arrive(request("c", 7), request("d", 8))

        assert (shard.worker_of("a"), shard.worker_of("b")) == ("w", None)
        reserved = {name for name in "abcd" if shard.core._shard.requests[name].reserved}
        assert reserved == {"a", "c"}, "two of the workers are shared"


class TestWhoIsGivenUp:
    def test_one_with_which_three_workers_died_that_ran_nothing_else(self) -> None:
        shard = Shard()
        shard.suspect("a")
        commands = []
        for number in range(MOST_DEATHS - ALONE_AFTER):
            assert commands == []
            shard.up(f"w{number}")
            commands = [c for c in shard.lost(f"w{number}") if isinstance(c, Finish)]

        [finish] = commands
        assert (finish.request_id, finish.end) == ("a", End.ERROR)
        assert finish.detail == (
            "5 workers died in a row while they ran this request, 3 of them while they ran nothing else: it is not tried again"
        )
        assert [line.what for line in finish.story][-2:] == ["given up", "ended"]
        assert shard.core.explain("a", 1.0) is None

    def test_not_one_that_survived_in_between(self) -> None:
        shard = Shard()
        shard.suspect("a")
        for number in range(2 * MOST_DEATHS):
            shard.up(f"w{number}")
            for _ in range(SURVIVED_ROUNDS):
                shard.round(f"w{number}", "a")
            shard.lost(f"w{number}")

        assert shard.deaths("a") == [1]

    def test_four_workers_killed_in_a_row_end_nothing(self) -> None:
        shard = Shard()
        shard.arrive(*(request(f"r{number}", number) for number in range(8)))
        for number in range(MOST_DEATHS - 1):
            shard.up(f"w{number}")
            ended = [c for c in shard.lost(f"w{number}") if isinstance(c, Finish)]
            assert ended == []

    def test_not_while_it_may_have_been_a_neighbour(self) -> None:
        """A former leader may have shared the worker: requests that are on one list by the record stay
        there."""
        shard = Shard()
        for _ in range(2 * MOST_DEATHS):
            shard.step(
                Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, "w", lease_epoch=2, deaths=3, death_round=0),
                Recovered(request("b"), 0, 0, 0, 0, 0.0, 0, "w", lease_epoch=2, deaths=0, death_round=0),
            )
            ended = [c for c in shard.lost("w") if isinstance(c, Finish)]
            assert ended == []
            assert shard.deaths("a", "b") == [3, 1]


class TestAfterAChangeOfLeader:
    def test_the_count_goes_on_from_the_record(self) -> None:
        shard = Shard()
        known = Recovered(
            request("a"), 9, 9, 0, 0, 0.0, 0, None, lease_epoch=2, deaths=MOST_DEATHS - 1, death_round=9
        )
        shard.step(known)
        assert shard.waits_for("a") == f"a worker of its own: {MOST_DEATHS - 1} workers died with it"
        shard.up("w")
        assert [c.end for c in shard.lost("w") if isinstance(c, Finish)] == [End.ERROR]

    def test_what_has_survived_by_the_record_is_cleared(self) -> None:
        shard = Shard()
        shard.recover_surviving("a", deaths=3)
        assert shard.deaths("a") == [0]

    def test_what_it_has_survived_is_not_taken_back_when_that_worker_dials_again(self) -> None:
        """The record's answer may enter a request again during the term of a leader, too."""
        shard = Shard()
        shard.up("w")
        shard.arrive(request("a"))
        shard.round("w", "a")
        shard.lost("w")
        assert shard.deaths("a") == [1]
        shard.recover_surviving("a", deaths=1)
        shard.up("other")
        shard.emitted["a"] = 9
        shard.round("other", "a")
        shard.lost("other")
        shard.up("w")

        assert shard.deaths("a") == [1]


class DeadlyCluster(Cluster):
    """Some requests kill each worker: in the round that runs them, or as soon as they are listed. Another
    worker comes a second later."""

    def __init__(self, *args: object, deadly: dict[str, str], noticed_s: float) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.deadly = deadly
        self.noticed_s = noticed_s
        self.deaths = 0

    def _round(self, worker):  # type: ignore[no-untyped-def]
        listed = {entry.request_id for entry in worker.entries} & set(worker.held)
        dies = any(self.deadly.get(request_id) == "listed" for request_id in listed)
        if not dies:
            super()._round(worker)
            if not any(self.deadly.get(request_id) == "run" for request_id in worker.ran):
                return
            self._heap = [entry for entry in self._heap if not _reports(entry, worker)]
            heapq.heapify(self._heap)
        worker.busy = True
        self.deaths += 1
        self.at(self.now_s + self.noticed_s, "lost", worker.facts.worker_id)
        self.at(self.now_s + 1.0, "up", replace(worker.facts, worker_id=f"{worker.facts.worker_id}'"))


def _reports(entry: tuple[float, int, str, object], worker: object) -> bool:
    return entry[2] == "report" and entry[3][1] is worker  # type: ignore[index]


@given(
    outputs=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    deadly=st.lists(st.sampled_from(["run", "listed"]), min_size=1, max_size=3),
    slots=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    noticed_s=st.sampled_from([0.001, 0.5, 2.0]),
)
@QUICK
def test_what_kills_its_workers_is_ended_and_nothing_else_suffers(
    outputs: list[int], deadly: list[str], slots: list[int], noticed_s: float
) -> None:
    ways = {f"deadly{number}": way for number, way in enumerate(deadly)}
    workers = [facts(f"w{n}", count) for n, count in enumerate(slots)]
    cluster = DeadlyCluster("laps-sd", workers, deadly=ways, noticed_s=noticed_s)
    cluster.submit([Job(f"r{n}", 0.01 * n, 20, output) for n, output in enumerate(outputs)])
    cluster.submit([Job(name, 0.05, 20, 50) for name in ways])
    cluster.run()

    assert {name for name, end in cluster.ended.items() if end is End.ERROR} == set(ways)
    for number, output in enumerate(outputs):
        assert cluster.ended[f"r{number}"] is End.STOP
        assert cluster.committed[f"r{number}"] == list(range(output))
    # Not exactly five each: which one it was is not certain each time.
    assert cluster.deaths <= (MOST_DEATHS + 1) * len(ways)
    assert all(view.running == view.listed == 0 for view in cluster.scheduler.workers())
    assert RequestState.QUEUED not in {entry.state for entry in cluster.scheduler.queue(cluster.now_s, 9)}
