"""Tokens that the caller has on the record before the core has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.commands import Commit, Rank
from scheduler_svc.core.events import Arrived, Recovered, WorkerDraining, WorkerLost, WorkerUp
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.request import ALONE_AFTER
from tests.core.test_scheduler import W, core, did, report, request


def emitted(scheduler: Scheduler, request_id: str) -> int:
    explanation = scheduler.explain(request_id, 9.0)
    assert explanation is not None
    return explanation.emitted


def test_they_count_and_need_no_commit() -> None:
    scheduler = core()
    scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])

    commands = scheduler.step(2.0, [report(did("a", 0, 3, recorded=True))])

    assert not [command for command in commands if isinstance(command, Commit)]
    assert emitted(scheduler, "a") == 3


def test_a_pause_and_a_new_level_are_for_the_record() -> None:
    scheduler = core()
    large = request("a", prompt_tokens=3000, max_tokens=60, expected_output_tokens=60)
    arrivals = [Arrived(large), Arrived(request("b", 2))]
    scheduler.step(1.0, [WorkerUp(replace(W, slots=1), ()), *arrivals])
    before = scheduler.explain("a", 1.0)
    prefilled = report(did("a", 0, 30, prefilled=3000, recorded=True), prefill_s=0.3)
    commands = scheduler.step(2.0, [prefilled])
    after = scheduler.explain("a", 2.0)
    assert before is not None and after is not None
    assert after.level < before.level
    assert Rank("a", after.level, after.index_s) in commands

    commands = scheduler.step(3.0, [report(did("b", 0, 1, recorded=True))])
    [paused] = [one for one in commands if isinstance(one, Rank) and one.request_id == "a"]
    assert paused.preemptions == 1


def test_they_count_where_the_request_has_left_the_worker() -> None:
    scheduler = core()
    scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
    scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v"), ()), WorkerDraining("w")])

    scheduler.step(3.0, [report(did("a", 0, 3))])
    assert emitted(scheduler, "a") == 0, "the record has not taken them, and the lease is another worker's"

    scheduler.step(3.0, [report(did("a", 0, 3, recorded=True))])
    assert emitted(scheduler, "a") == 3
    scheduler.check()


def test_what_has_left_the_worker_pays_for_them_and_its_rank_follows() -> None:
    scheduler = core()
    scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a", max_tokens=40, runs_to_limit=True))])
    scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v"), ()), WorkerDraining("w")])
    before = scheduler.explain("a", 2.0)

    scheduler.step(3.0, [report(did("a", 0, 30, recorded=True))])

    after = scheduler.explain("a", 3.0)
    assert before is not None and after is not None
    assert (before.attained_s, after.attained_s) == (0.0, pytest.approx(0.03))
    assert after.remaining_s < before.remaining_s / 2
    scheduler.check()


def test_they_count_once() -> None:
    scheduler = core()
    scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
    scheduler.step(2.0, [WorkerUp(replace(W, worker_id="v"), ()), WorkerDraining("w")])

    for _ in range(2):
        scheduler.step(3.0, [report(did("a", 0, 3, recorded=True))])

    assert emitted(scheduler, "a") == 3


def test_they_count_where_no_worker_can_hold_the_request() -> None:
    scheduler = core()
    scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
    scheduler.step(2.0, [WorkerLost("w")])

    scheduler.step(3.0, [report(did("a", 0, 3, recorded=True))])

    assert emitted(scheduler, "a") == 3
    scheduler.check()


def test_they_count_where_the_request_waits_to_run_alone() -> None:
    scheduler = core()
    died = Recovered(request("a"), 0, 0, 0, 0, 0.0, 0, None, 1, deaths=ALONE_AFTER)
    scheduler.step(1.0, [died])
    assert scheduler.has_suspects

    scheduler.step(2.0, [report(did("a", 0, 3, recorded=True))])

    assert emitted(scheduler, "a") == 3
    scheduler.check()
