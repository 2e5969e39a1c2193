"""Rounds that are reported together count as they do one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Commit
from scheduler_svc.core.events import (
    Arrived,
    CacheChanged,
    EndRequested,
    Event,
    Merged,
    Progress,
    Refused,
    ResidencyChange,
    RoundReported,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.merged_rounds import MOST_ROUNDS, MergedRounds, merged
from scheduler_svc.core.scheduler import Scheduler
from tests.core.test_scheduler import W, core, request

ROUNDS = ((4, 3), (1, 0), (6, 5))
"""Tokens and accepted draft tokens of `a` in three rounds, 5 drafted in each; `b` has one token without a draft."""


def of_a(position: int, tokens: int, accepted: int) -> Progress:
    ids = tuple(range(position, position + tokens))
    return Progress("a", 1, position, ids, 5, accepted, 0, None, 0, "")


def of_b(position: int) -> Progress:
    return Progress("b", 1, position, (7,), 0, 0, 0, None, 0, "")


def reported(*progress: Progress, rounds: int = 1) -> RoundReported:
    return RoundReported(
        "w", progress, (), 0.01 * rounds, 0.02 * rounds, 0.0, 0.0, 0.0, 0.03 * rounds, 900, 800, rounds
    )


def started() -> Scheduler:
    scheduler = core()
    arrivals = [Arrived(request("a", 1)), Arrived(request("b", 2))]
    scheduler.step(1.0, [WorkerUp(replace(W, slots=2), ()), *arrivals])
    return scheduler


def one_by_one() -> Scheduler:
    scheduler, position = started(), 0
    for number, (tokens, accepted) in enumerate(ROUNDS):
        scheduler.step(2.0, [reported(of_a(position, tokens, accepted), of_b(number))])
        position += tokens
    return scheduler


A_MERGED = Progress(
    "a",
    1,
    0,
    tuple(range(11)),
    15,
    8,
    0,
    None,
    0,
    "",
    merged=Merged(rounds=3, drafts=3, token_squares=16 + 1 + 36),
)
B_MERGED = Progress("b", 1, 0, (7, 7, 7), 0, 0, 0, None, 0, "", merged=Merged(3, 0, 3))


def together() -> Scheduler:
    scheduler = started()
    scheduler.step(2.0, [reported(A_MERGED, B_MERGED, rounds=3)])
    return scheduler


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_request_has_the_same_progress_and_pays_the_same(name: str) -> None:
    single, merged = one_by_one().explain(name, 3.0), together().explain(name, 3.0)

    assert single is not None
    assert merged is not None
    for field in ("emitted", "rounds", "drafted", "accepted", "preemptions", "state"):
        assert getattr(merged, field) == getattr(single, field), field
    assert merged.attained_s == pytest.approx(single.attained_s)


def test_the_worker_has_the_same_rounds_and_tokens() -> None:
    single, merged = one_by_one().workers()[0], together().workers()[0]

    assert (merged.rounds, merged.tokens) == (single.rounds, single.tokens) == (3, 14)


def test_acceptance_is_learnt_as_from_single_rounds() -> None:
    single, merged = one_by_one().priors, together().priors
    single_rate, merged_rate = (priors.tokens_per_round("chat", 0, 0).mean for priors in (single, merged))
    assert merged_rate == pytest.approx(single_rate, rel=1e-3)


def test_an_end_teaches_the_variance_of_its_single_rounds() -> None:
    learnt = []
    for scheduler in (one_by_one(), together()):
        last = Progress("a", 1, 11, (1, 2), 5, 1, 0, End.STOP, 0, "")
        scheduler.step(3.0, [reported(last, of_b(3))])
        learnt.append(scheduler.priors.to_dict()["all"]["acceptance"])

    assert learnt[1] == pytest.approx(learnt[0], rel=1e-3)
    # Rounds of 4, 1, 6 and 2 tokens: squared deviations from their mean.
    assert learnt[1]["sum_within"] == pytest.approx(16 + 1 + 36 + 4 - 13**2 / 4)


def test_the_cost_of_a_round_is_learnt_as_their_mean() -> None:
    single, merged = one_by_one().priors.cost, together().priors.cost

    assert merged.batch == pytest.approx(single.batch)
    assert merged.round_s(2, 7, 200) == pytest.approx(single.round_s(2, 7, 200), rel=0.1)


def test_the_record_gets_all_their_tokens_in_one_commit() -> None:
    commands = started().step(2.0, [reported(A_MERGED, B_MERGED, rounds=3)])

    commits = {command.request_id: command for command in commands if isinstance(command, Commit)}
    assert commits["a"].tokens == tuple(range(11))
    assert commits["a"].standing.rounds == 3


def test_the_debt_of_the_reserved_share_is_that_of_all_rounds() -> None:
    debts = []
    for rounds in (1, 3):
        scheduler = core()
        facts = replace(W, slots=4, target_blocks=100, draft_blocks=100)
        scheduler.step(1.0, [WorkerUp(facts, ()), Arrived(request("a", 1, prompt_tokens=800))])
        merged = None if rounds == 1 else Merged(rounds, 0, rounds)
        tokens = (1,) * rounds
        for _ in range(2):
            emitted = scheduler.explain("a", 2.0)
            assert emitted is not None
            progress = Progress("a", 1, emitted.emitted, tokens, 0, 0, 0, None, 0, "", merged=merged)
            full = replace(reported(progress, rounds=rounds), free_target_blocks=10, free_draft_blocks=10)
            scheduler.step(2.0, [full])
        debts.append(scheduler._shard.workers["w"].reserve_debt_blocks)

    assert debts[1] == pytest.approx(3 * debts[0], rel=0.05)
    assert debts[0] > 0


def on_record(*progress: Progress, worker_id: str = "w", **more: object) -> RoundReported:
    taken = tuple(replace(one, recorded=one.end is None) for one in progress)
    return replace(reported(*taken), worker_id=worker_id, **more)  # type: ignore[arg-type]


def due(rounds: MergedRounds, *events: Event, at_s: float = 1.0) -> list[RoundReported]:
    """Return the reports that the core receives with these events."""
    received = rounds.due(events, at_s, lambda _: None)
    assert all(isinstance(event, RoundReported) for event in received)
    return received  # type: ignore[return-value]  # the line before


def hurried(rounds: MergedRounds, worker_id: str) -> list[RoundReported]:
    rounds.hurry(worker_id)
    return due(rounds)


class TestMergedRounds:
    """Reports that wait, and what they become. Ten workers are known, so that each waits 50 ms."""

    def waiting(self) -> MergedRounds:
        rounds = MergedRounds()
        for number in range(10):
            due(rounds, on_record(of_b(0), worker_id=f"w{number}"), at_s=0.0)
        assert due(rounds, on_record(of_b(0), worker_id="w0")), "its interval is over"
        return rounds

    def test_reports_that_continue_each_other_become_one(self) -> None:
        rounds, position = self.waiting(), 0
        for number, (tokens, accepted) in enumerate(ROUNDS):
            one = on_record(of_a(position, tokens, accepted), of_b(number), worker_id="w0")
            assert due(rounds, one) == []
            position += tokens

        [merged] = hurried(rounds, "w0")

        assert merged.progress == (replace(A_MERGED, recorded=True), replace(B_MERGED, recorded=True))
        assert (merged.rounds, merged.verify_s, merged.total_s) == (
            3,
            pytest.approx(0.06),
            pytest.approx(0.09),
        )
        assert hurried(rounds, "w0") == []

    def test_times_are_summed_and_what_is_free_is_that_of_the_newest(self) -> None:
        times = ("draft_s", "verify_s", "prefill_s", "swap_s", "idle_s", "total_s")
        first, last = (
            replace(
                reported(of_b(number)),
                **{name: 10.0**number * place for place, name in enumerate(times, 1)},
                free_target_blocks=500 + number,
                free_draft_blocks=400 + number,
            )
            for number in range(2)
        )

        both = merged([first, last])

        assert [getattr(both, name) for name in times] == [11.0 * place for place in range(1, 7)]
        assert (both.free_target_blocks, both.free_draft_blocks) == (501, 401)

    def test_the_next_ones_wait_again_after_a_hurry(self) -> None:
        rounds = self.waiting()
        due(rounds, on_record(of_b(1), worker_id="w0"))
        assert len(hurried(rounds, "w0")) == 1

        due(rounds, on_record(of_b(2), worker_id="w0"))
        assert due(rounds) == []

    def test_they_are_due_when_the_interval_is_over(self) -> None:
        rounds = self.waiting()
        assert due(rounds, on_record(of_b(1), worker_id="w0"), at_s=1.049) == []
        [merged] = due(rounds, on_record(of_b(2), worker_id="w0"), at_s=1.051)
        assert merged.rounds == 2

    def test_a_worker_alone_waits_less_than_its_rounds_take(self) -> None:
        rounds = MergedRounds()
        for number in range(10):
            assert len(due(rounds, on_record(of_b(number)), at_s=number * 0.006)) == 1

    def test_no_more_than_so_many_wait(self) -> None:
        rounds = self.waiting()
        for number in range(MOST_ROUNDS - 1):
            assert due(rounds, on_record(of_b(number), worker_id="w0")) == []
        [merged] = due(rounds, on_record(of_b(MOST_ROUNDS - 1), worker_id="w0"))
        assert merged.rounds == MOST_ROUNDS

    @pytest.mark.parametrize(
        "deciding",
        [
            on_record(replace(of_b(1), end=End.STOP)),
            reported(of_b(1)),
            on_record(replace(of_b(1), prefilled=8)),
            on_record(of_b(1), residency=(ResidencyChange("c", 1, Residency.NONE),)),
        ],
        ids=["an end", "tokens that are not on the record", "a prefill", "KV that moved"],
    )
    def test_what_needs_a_decision_brings_the_others_with_it(self, deciding: RoundReported) -> None:
        rounds = self.waiting()
        due(rounds, on_record(of_b(0), worker_id="w0"))
        received = due(rounds, replace(deciding, worker_id="w0"))
        assert sum(report.rounds for report in received) == 2
        assert received[-1].progress[0].end is deciding.progress[0].end

    def test_a_request_that_left_the_batch_begins_another_report(self) -> None:
        rounds = self.waiting()
        due(rounds, on_record(of_a(0, 2, 1), of_b(0), worker_id="w0"))
        due(rounds, on_record(of_b(1), worker_id="w0"))
        due(rounds, on_record(of_a(2, 2, 1), of_b(2), worker_id="w0"))

        first, rest = hurried(rounds, "w0")

        assert [one.request_id for one in first.progress] == ["a", "b"]
        assert [(one.request_id, one.position) for one in rest.progress] == [("b", 1), ("a", 2)]

    def test_a_prediction_is_less_by_what_came_after_it(self) -> None:
        rounds = self.waiting()
        due(rounds, on_record(replace(of_a(0, 4, 3), predicted_remaining_tokens=30.0), worker_id="w0"))
        due(rounds, on_record(of_a(4, 6, 5), worker_id="w0"))

        [merged] = hurried(rounds, "w0")

        assert merged.progress[0].predicted_remaining_tokens == 24.0

    def test_reports_after_which_none_came_are_late(self) -> None:
        rounds = self.waiting()
        due(rounds, on_record(of_b(1), worker_id="w0"))
        rounds.hurry_late(1.5, 1.0)
        assert due(rounds, at_s=1.5) == []
        rounds.hurry_late(2.0, 1.0)
        assert len(due(rounds, at_s=2.0)) == 1

    @pytest.mark.parametrize(
        "event",
        [
            WorkerLost("w0"),
            WorkerDraining("w0"),
            WorkerUp(replace(W, worker_id="w0"), ()),
            EndRequested("b", End.CANCELLED, ""),
            Refused("b"),
        ],
    )
    def test_what_is_about_their_worker_comes_after_them(self, event: Event) -> None:
        rounds = self.waiting()
        due(rounds, on_record(of_b(1), worker_id="w0"))
        waited, then = rounds.due([event], 1.0, lambda _: "w0")
        assert isinstance(waited, RoundReported)
        assert then is event

    @pytest.mark.parametrize("event", [WorkerDraining("w0"), WorkerLost("w9")])
    def test_where_requests_may_have_left_their_worker_nothing_is_merged(self, event: Event) -> None:
        """The core counts what is on the record of one that has left; with its end it would count nothing."""
        rounds = self.waiting()
        end = replace(of_b(2), end=End.STOP)
        reports = [on_record(of_b(1), worker_id="w0"), on_record(end, worker_id="w0")]
        assert rounds.due([event, *reports], 1.0, lambda _: "w0") == [event, *reports]

    def test_an_arrival_leaves_them_waiting(self) -> None:
        rounds = self.waiting()
        due(rounds, on_record(of_b(1), worker_id="w0"))
        arrived = Arrived(request("c", 3))
        assert rounds.due([arrived], 1.0, lambda _: "w0") == [arrived]


class TestCaches:
    """What a worker's cache gained and lost comes with the report of its round."""

    def change(self, number: int) -> CacheChanged:
        return CacheChanged("w", bytes([number] * 8), b"")

    def waiting(self, position: int) -> RoundReported:
        return reported(replace(of_a(position, 1, 0), recorded=True))

    def test_changes_wait_with_their_reports_and_come_before_them(self) -> None:
        rounds = MergedRounds(0.01)
        assert len(rounds.due([self.change(0), self.waiting(0)], 0.0, lambda _: "w")) == 2
        for number in (1, 2):
            assert rounds.due([self.change(number), self.waiting(number)], 0.1, lambda _: "w") == []
        rounds.hurry("w")
        *changes, report = rounds.due([], 0.2, lambda _: "w")
        assert changes == [self.change(1), self.change(2)]
        assert isinstance(report, RoundReported)
        assert report.rounds == 2

    def test_what_was_found_is_summed(self) -> None:
        rounds = [replace(of_a(0, 1, 0), cached=640), of_a(1, 1, 0)]
        (progress,) = merged([reported(one) for one in rounds]).progress
        assert progress.cached == 640
