"""The runner, turn by turn and without a thread: rounds, reports and kept state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from laps_sd.contract.length_probe import LearntProbe, ProbeKind
from laps_sd.service.wire import MAX_MESSAGE_BYTES
from tests.services.worker.harness import Desk, entry, spec
from tests.worker.pairs import llama_config, load_pair, write_model
from worker_svc.engine.interface import (
    DeviceFailed,
    OutOfBlocks,
    OutOfMemory,
    RoundResult,
    Sampling,
    Specification,
)
from worker_svc.fake.engine import FakeEngine
from worker_svc.link.wire import round_report
from worker_svc.runner.failures import FAILURES_IN_A_ROW, ROUNDS_WITH_FEWER
from worker_svc.runner.messages import (
    Acknowledged,
    Assigned,
    Dropped,
    HeldNow,
    HeldRequested,
    Learnt,
    Message,
    Missing,
    Outcome,
    Round,
    Specified,
    Taught,
)
from worker_svc.runner.runner import Runner


def engine(**options: object) -> FakeEngine:
    return FakeEngine(**{"slots": 2, "max_length": 512, **options})  # type: ignore[arg-type]


def held(desk: Desk) -> HeldNow:
    desk.put(HeldRequested())
    desk.turns(1)
    return next(one for one in reversed(desk.outcomes) if isinstance(one, HeldNow))


class Foretelling(FakeEngine):
    """An engine that predicts in the first round of a request that 9 tokens remain."""

    def round(self, run: Sequence[str]) -> RoundResult:
        result = super().round(run)
        return replace(
            result,
            requests=tuple(
                one if one.position else one._replace(predicted_remaining_tokens=9.0)
                for one in result.requests
            ),
        )


def test_what_remains_of_the_newest_prediction_is_in_the_hello() -> None:
    desk = Desk(Foretelling(slots=2, max_length=512, draft_len=0))
    one = spec("a", max_tokens=40)
    desk.give(one)
    assert held(desk).requests[0].predicted_remaining_tokens is None
    desk.assign(entry("a"))
    told = []
    for _ in range(14):
        desk.turns(1)
        now = held(desk).requests[0]
        told.append((len(now.output_ids), now.predicted_remaining_tokens))
    assert told == [(count, max(1.0, 10.0 - count)) for count, _ in told]
    assert told[-1][0] > 10


def test_rounds_follow_one_another_without_any_answer() -> None:
    desk = Desk(engine())
    one = spec("a")
    desk.give(one)
    desk.assign(entry("a"))
    desk.turn_until_idle()

    assert desk.tokens("a") == desk.engine.expected(one)[0]  # type: ignore[attr-defined]
    assert [report.number for report in desk.rounds] == list(range(1, len(desk.rounds) + 1))
    assert desk.rounds[-1].progress[-1][1].finish is End.LENGTH


def test_a_new_assignment_preempts_at_the_next_round() -> None:
    desk = Desk(engine(slots=1))
    desk.give(spec("long", max_tokens=200), spec("short"))
    desk.assign(entry("long", 10.0))
    desk.turns(3)
    desk.assign(entry("short", 1.0), entry("long", 10.0))
    desk.turns(1)

    assert desk.who() == [("long",), ("long",), ("long",), ("short",)]
    assert desk.rounds[-1].preempted == 1


def test_the_newest_of_several_assignments_counts() -> None:
    desk = Desk(engine(slots=1))
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a"))
    desk.assign(entry("b"))
    desk.turns(1)

    assert desk.who() == [("b",)]


def test_the_next_in_the_list_takes_the_place_of_one_that_ended() -> None:
    desk = Desk(engine(slots=2))
    desk.give(spec("a", max_tokens=1), spec("b", max_tokens=100), spec("c", max_tokens=100))
    desk.assign(entry("a", 1.0), entry("b", 2.0), entry("c", 3.0))
    desk.turns(2)

    assert desk.who() == [("a", "b"), ("b", "c")]


def test_an_unlisted_request_does_not_run_and_is_kept() -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=100))
    desk.assign(entry("a"))
    desk.turns(2)
    desk.assign()

    assert not desk.runner.turn()
    assert [one.residency for one in held(desk).requests] == [Residency.DEVICE]


def test_what_is_listed_without_a_specification_is_asked_for() -> None:
    desk = Desk(engine())
    desk.give(spec("a"), lease_epoch=1)
    desk.assign(entry("a", lease_epoch=2), entry("b"))
    desk.turn_until_idle()

    assert desk.outcomes == [Missing(("a", "b"))]


def test_only_the_lease_that_is_listed_runs() -> None:
    desk = Desk(engine())
    desk.give(spec("a"), lease_epoch=3)
    desk.assign(entry("a", lease_epoch=2))

    assert not desk.runner.turn()
    assert desk.outcomes == []


@pytest.mark.parametrize(("dropped", "remains"), [(1, True), (2, False), (3, False)])
def test_a_drop_obeys_the_lease_epoch(dropped: int, remains: bool) -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=100), lease_epoch=2)
    desk.assign(entry("a", lease_epoch=2))
    desk.turns(2)
    desk.put(Dropped((("a", dropped), ("never heard of", 9))))
    desk.turns(1)

    assert (desk.engine.known() == {"a"}) is remains
    assert (desk.who()[-1] == ("a",)) is remains


def test_a_request_pauses_at_its_bound_of_unacknowledged_tokens_and_others_go_on() -> None:
    desk = Desk(engine(slots=1), max_unacknowledged_tokens=20)
    desk.give(spec("a", max_tokens=400), spec("b", max_tokens=400))
    desk.assign(entry("a", 1.0), entry("b", 2.0))
    desk.turn_until_idle()

    assert 20 <= len(desk.tokens("a")) < 20 + 9
    assert 20 <= len(desk.tokens("b")) < 20 + 9
    before = len(desk.tokens("a"))
    desk.put(Acknowledged(desk.rounds[-1].number))
    desk.turns(1)
    assert len(desk.tokens("a")) > before


def test_a_request_that_paused_at_its_bound_joins_the_others_in_the_round_after_the_acknowledgement() -> None:
    desk = Desk(engine(slots=2), max_unacknowledged_tokens=20)
    desk.give(spec("a", max_tokens=400))
    desk.assign(entry("a", 1.0))
    desk.turn_until_idle()
    paused_after = desk.rounds[-1].number
    desk.give(spec("b", max_tokens=400))
    desk.assign(entry("a", 1.0), entry("b", 2.0))
    desk.turns(2)
    assert desk.who()[-2:] == [("b",), ("b",)]

    desk.put(Acknowledged(paused_after))
    desk.turns(1)
    assert desk.who()[-1] == ("a", "b")


def test_a_new_lease_with_all_tokens_acknowledges_them_whatever_older_reports_had() -> None:
    desk = Desk(engine(slots=1), max_unacknowledged_tokens=20)
    desk.give(spec("a", max_tokens=400))
    desk.assign(entry("a"))
    desk.turn_until_idle()
    committed = desk.tokens("a")

    desk.give(spec("a", max_tokens=400, committed=committed), lease_epoch=2)
    desk.put(Acknowledged(1))
    (now,) = held(desk).requests

    assert len(committed) >= 20
    assert now.acknowledged == len(now.output_ids) == len(committed)


def test_the_worker_pauses_at_its_bound_of_unacknowledged_reports() -> None:
    desk = Desk(engine(), max_unacknowledged_reports=3)
    desk.give(spec("a", max_tokens=400))
    desk.assign(entry("a"))
    desk.turn_until_idle()

    assert len(desk.rounds) == 3
    desk.put(Acknowledged(1))
    desk.turn_until_idle()
    assert len(desk.rounds) == 4


def test_what_ended_is_held_until_its_report_is_acknowledged() -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=3))
    desk.assign(entry("a"))
    desk.turn_until_idle()

    (one,) = held(desk).requests
    assert (len(one.output_ids), one.acknowledged, one.residency) == (3, 0, Residency.NONE)
    desk.put(Acknowledged(desk.rounds[-1].number))
    assert held(desk).requests == ()
    assert desk.engine.known() == set()
    assert desk.runner.holds_nothing


def test_a_drop_that_frees_blocks_is_reported_when_nothing_runs() -> None:
    desk = Desk(engine(target_blocks=64))
    desk.give(spec("a", max_tokens=200), spec("b", max_tokens=200), spec("waits"))
    desk.assign(entry("a"), entry("b"))
    desk.turns(3)
    assert desk.rounds[-1].result.free_target_blocks < 64
    desk.put(Dropped((("a", 1), ("b", 1))))
    desk.turns(1)

    last = desk.rounds[-1]
    assert (last.number, last.result.requests, last.progress) == (4, (), [])
    assert (last.result.free_target_blocks, last.result.free_draft_blocks) == desk.engine.free_blocks
    assert last.result.free_target_blocks == 64
    desk.put(Acknowledged(4), Dropped((("waits", 1),)))
    desk.turns(2)
    assert len(desk.rounds) == 4, "nothing else became free"


def test_a_report_after_room_was_made_has_the_blocks_that_are_free_then() -> None:
    desk = Desk(engine(target_blocks=64))
    desk.give(spec("a", max_tokens=200))
    desk.assign(entry("a"))
    desk.turns(2)
    desk.put(Dropped((("a", 1),)))
    desk.give(spec("refused", max_tokens=10_000))
    desk.turn_until_idle()

    assert [step.finish for _, step in desk.rounds[-1].progress] == [End.ERROR]
    assert desk.rounds[-1].result.free_target_blocks == 64


class Scripted:
    """An inbox that brings the next messages whenever the runner waits, and stops it after the last."""

    def __init__(self, *batches: tuple[Message, ...]) -> None:
        self.stopped = False
        self._coming = list(batches)
        self._arrived: tuple[Message, ...] = ()

    def take(self) -> Sequence[Message]:
        arrived, self._arrived = self._arrived, ()
        return arrived

    def wait(self, *, holds_nothing: bool) -> None:
        if self._coming:
            self._arrived = self._coming.pop(0)
        else:
            self.stopped = True


def test_the_time_before_a_report_without_a_round_is_counted_once() -> None:
    inbox = Scripted(
        (Specified(spec("a", max_tokens=5), 1), Assigned((entry("a"),))),
        (Specified(spec("refused", max_tokens=10_000), 1),),
        (Specified(spec("b", max_tokens=5), 1), Assigned((entry("b"),))),
    )
    outcomes: list[Outcome] = []
    Runner(engine(), inbox, outcomes.append).run()
    reports = [one for one in outcomes if isinstance(one, Round)]

    without = [one for one in reports if not one.result.requests]
    assert [(one.idle_s, one.waited_s) for one in without] == [(0.0, 0.0)]
    after = reports[reports.index(without[0]) + 1]
    assert 0.0 < after.waited_s < after.idle_s


def test_an_acknowledged_end_causes_no_further_report() -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=5))
    desk.assign(entry("a"))
    desk.turn_until_idle()
    reports = len(desk.rounds)
    desk.put(Acknowledged(reports))
    desk.turns(2)

    assert desk.runner.holds_nothing
    assert len(desk.rounds) == reports


def test_held_requests_tell_what_no_leader_acknowledged() -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=100, committed=[5, 6]), lease_epoch=4)
    desk.assign(entry("a", lease_epoch=4))
    desk.turns(3)
    desk.put(Acknowledged(2))
    desk.assign()
    answer = held(desk)

    (one,) = answer.requests
    assert answer.last_report == 3
    assert one.lease_epoch == 4
    assert one.acknowledged == 2 + sum(
        len(step.tokens) for report in desk.rounds[:2] for _, step in report.progress
    )
    assert len(one.output_ids) == one.acknowledged + len(desk.rounds[2].progress[0][1].tokens)


def test_a_request_that_the_engine_refuses_ends_alone() -> None:
    desk = Desk(engine())
    desk.give(spec("good"), spec("too long", max_tokens=10_000))
    desk.assign(entry("too long", 1.0), entry("good", 2.0))
    desk.turn_until_idle()

    (end,) = [step for report in desk.rounds for _, step in report.progress if step.request_id == "too long"]
    assert end.finish is End.ERROR
    assert "max_tokens" in (end.error or "")
    assert len(desk.tokens("good")) == 40


def test_a_refused_request_is_reported_when_nothing_runs() -> None:
    desk = Desk(engine())
    desk.give(spec("too long", max_tokens=10_000))
    desk.turn_until_idle()

    assert [step.finish for report in desk.rounds for _, step in report.progress] == [End.ERROR]


def test_a_request_with_all_its_tokens_ends_by_length() -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=2, committed=[5, 6]))
    desk.turn_until_idle()

    ((_, end),) = desk.rounds[0].progress
    assert (end.position, end.tokens, end.finish) == (2, (), End.LENGTH)


class Forgetful(FakeEngine):
    """An engine that loses a request before its third round."""

    calls = 0

    def round(self, run: Sequence[str]) -> RoundResult:
        self.calls += 1
        if self.calls == 3:
            self.drop("a")
        return super().round(run)


def test_a_request_that_the_engine_lost_ends_alone() -> None:
    desk = Desk(Forgetful(slots=2))
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a"), entry("b"))
    desk.turn_until_idle()

    assert [step.finish for r in desk.rounds for _, step in r.progress if step.request_id == "a"][
        -1
    ] is End.ERROR
    assert len(desk.tokens("b")) == 40


class Miserly(FakeEngine):
    """An engine with less room than it reports: one resident request at a time."""

    def round(self, run: Sequence[str]) -> RoundResult:
        resident = [name for name in self.known() if self.status(name).residency is Residency.DEVICE]
        if len({*resident, *run}) > 1:
            raise OutOfBlocks("no room")
        return super().round(run)


def test_running_out_of_blocks_is_never_a_crash() -> None:
    desk = Desk(Miserly(slots=2))
    desk.give(spec("a"), spec("b"), spec("c"))
    desk.assign(entry("a"), entry("b"), entry("c"))
    desk.turn_until_idle()

    assert all(len(desk.tokens(name)) == 40 for name in "abc")


class Narrowing(FakeEngine):
    """An engine that has room for the growth of one request only, from its third round on."""

    calls = 0

    def round(self, run: Sequence[str]) -> RoundResult:
        self.calls += 1
        if self.calls > 2 and len(run) > 1:
            raise OutOfBlocks("no room")
        return super().round(run)


def test_the_last_of_a_round_for_which_blocks_are_missing_leaves_the_device() -> None:
    """Then `choose` counts what it needs, and does not choose the same round again and again."""
    desk = Desk(Narrowing(slots=2))
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a", 1.0), entry("b", 2.0))
    desk.turns(3)

    assert desk.who() == [("a", "b"), ("a", "b"), ("a",)]
    assert [change[:1] + change[2:] for change in desk.rounds[2].residency] == [("b", Residency.HOST)]


class Stingy(FakeEngine):
    """An engine that never has room for one of the requests."""

    def round(self, run: Sequence[str]) -> RoundResult:
        if "a" in run:
            raise OutOfBlocks("no room")
        return super().round(run)


def test_a_request_that_never_fits_ends_with_an_error() -> None:
    desk = Desk(Stingy(slots=1))
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a", 1.0), entry("b", 2.0))
    desk.turn_until_idle()

    (end,) = [step for report in desk.rounds for _, step in report.progress if step.request_id == "a"]
    assert end.finish is End.ERROR
    assert len(desk.tokens("b")) == 40


def test_kv_that_choose_cannot_see_makes_room() -> None:
    """Unlisted requests keep their KV until another request needs the blocks."""
    desk = Desk(engine(target_blocks=8, block_size=16, max_draft_len=4))
    desk.give(spec("old", prompt=60, max_tokens=20), spec("new", prompt=60, max_tokens=20))
    desk.assign(entry("old"))
    desk.turns(2)
    desk.assign(entry("new"))
    desk.turn_until_idle()

    assert len(desk.tokens("new")) == 20
    changes = [change[:1] + change[2:] for report in desk.rounds for change in report.residency]
    assert changes == [("old", Residency.DEVICE), ("old", Residency.HOST), ("new", Residency.DEVICE)]


def test_without_a_draft_model_no_draft_blocks_are_needed() -> None:
    """Else each request that is no longer listed would be pushed out, however much room there is."""
    desk = Desk(engine(draft_blocks=0))
    desk.give(spec("old", max_tokens=20), spec("new", max_tokens=20))
    desk.assign(entry("old"))
    desk.turns(2)
    desk.assign(entry("new"))
    desk.turn_until_idle()

    assert len(desk.tokens("new")) == 20
    changes = [change[:1] + change[2:] for report in desk.rounds for change in report.residency]
    assert changes == [("old", Residency.DEVICE), ("new", Residency.DEVICE)]


@pytest.mark.parametrize("host_tokens", [0, None], ids=["dropped", "swapped out"])
@pytest.mark.parametrize("blocks", [200, 300])
def test_requests_with_one_beginning_run_together_where_its_kv_fits_once(
    blocks: int, host_tokens: int | None
) -> None:
    """125 blocks of the beginning and 2 to 5 of each request: of 200, 75 are left for these. If the first round of each
    needed room for all of its context, one or two would run. Those that lose their KV find the beginning again.
    """
    fake = engine(
        slots=32,
        target_blocks=blocks,
        draft_blocks=0,
        max_length=4096,
        vocab_size=4096,
        prefill_chunk=2048,
        prefix_reuse_tokens=16,
        host_tokens=host_tokens,
    )
    desk = Desk(fake)
    specs = [replace(spec(f"r{at}"), prompt_ids=(*range(1, 2001), 2001 + at)) for at in range(30)]
    desk.give(*specs)
    desk.assign(*[entry(one.request_id, 1.0 + at) for at, one in enumerate(specs)])
    while desk.runner.turn():
        desk.put(Acknowledged(len(desk.rounds)))
        fake.check()

    assert max(map(len, desk.who())) == 30
    assert len(desk.rounds) < 80  # one after another they take 1,200
    assert all(len(desk.tokens(one.request_id)) == 40 for one in specs)


def test_a_request_may_fill_the_whole_pool_to_its_last_token() -> None:
    desk = Desk(engine(target_blocks=4, block_size=16, max_draft_len=8, max_length=64))
    desk.give(spec("a", prompt=4, max_tokens=60))
    desk.assign(entry("a"))
    desk.turn_until_idle()

    assert len(desk.tokens("a")) == 60


def test_room_is_made_for_what_an_engine_reserves_beyond_a_draft() -> None:
    """vLLM reserves KV for a draft twice. With 4 draft tokens a request of 16 tokens needs two blocks, with 16
    more a third one, and two such requests do not fit into five.
    """
    choices = []
    for lookahead in (0, 16):
        small = engine(target_blocks=5, block_size=16, max_draft_len=4)
        small.capacity = replace(small.capacity, lookahead=lookahead)
        desk = Desk(small)
        desk.give(spec("a", prompt=16, max_tokens=40), spec("b", prompt=16, max_tokens=40))
        desk.assign(entry("a", 1.0), entry("b", 2.0))
        desk.turns(1)
        choices += desk.who()

    assert choices == [("a", "b"), ("a",)]


def test_a_request_that_no_pool_can_hold_with_its_reserve_ends_at_once() -> None:
    small = engine(target_blocks=4, block_size=16, max_draft_len=4)
    small.capacity = replace(small.capacity, lookahead=4)
    desk = Desk(small)
    desk.give(spec("whole", prompt=4, max_tokens=60), spec("less", prompt=4, max_tokens=56))
    desk.assign(entry("whole", 1.0), entry("less", 2.0))
    desk.turn_until_idle()

    ends = {s.request_id: s for one in desk.rounds for _, s in one.progress if s.finish is not None}
    assert ends["whole"].error == "max_tokens: 64 tokens do not fit the target KV pool of 4 blocks of 16"
    assert ends["less"].finish is End.LENGTH


def test_a_new_lease_goes_on_with_what_the_record_holds() -> None:
    desk = Desk(engine())
    one = spec("a", max_tokens=60)
    desk.give(one)
    desk.assign(entry("a"))
    desk.turns(4)
    recorded = desk.tokens("a")[:3]
    desk.outcomes.clear()
    desk.give(spec("a", max_tokens=60, committed=recorded), lease_epoch=2)
    desk.assign(entry("a", lease_epoch=2))
    desk.turn_until_idle()

    steps = [(epoch, step) for report in desk.rounds for epoch, step in report.progress]
    assert {epoch for epoch, _ in steps} == {2}
    assert steps[0][1].position == 3
    again = recorded + tuple(token for _, step in steps for token in step.tokens)
    assert again == desk.engine.expected(one)[0]  # type: ignore[attr-defined]


def test_a_new_lease_that_knows_everything_keeps_the_kv() -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=60))
    desk.assign(entry("a"))
    desk.turns(4)
    desk.give(spec("a", max_tokens=60, committed=desk.tokens("a")), lease_epoch=2)
    desk.assign(entry("a", lease_epoch=2))
    desk.turns(1)

    ((epoch, step),) = desk.rounds[-1].progress
    assert (epoch, step.prefilled) == (2, 0)


@pytest.mark.parametrize("lease_epoch", [1, 2])
def test_a_specification_of_the_same_or_an_older_lease_changes_nothing(lease_epoch: int) -> None:
    desk = Desk(engine())
    desk.give(spec("a", max_tokens=60), lease_epoch=2)
    desk.assign(entry("a", lease_epoch=2))
    desk.turns(3)
    desk.give(spec("a", max_tokens=60), lease_epoch=lease_epoch)
    desk.turns(1)

    ((epoch, step),) = desk.rounds[-1].progress
    assert (epoch, step.prefilled) == (2, 0)


def test_evictions_and_returns_are_told() -> None:
    desk = Desk(engine(slots=1, target_blocks=6, block_size=16, host_tokens=0, max_draft_len=4))
    desk.give(spec("a", prompt=50, max_tokens=20), spec("b", prompt=50, max_tokens=20))
    desk.assign(entry("a", 10.0), entry("b", 20.0))
    desk.turns(2)
    desk.assign(entry("b", 1.0), entry("a", 10.0))
    desk.turn_until_idle()

    changes = [(change.request_id, change.residency) for report in desk.rounds for change in report.residency]
    assert changes == [
        ("a", Residency.DEVICE),
        ("a", Residency.NONE),  # no room on the host
        ("b", Residency.DEVICE),
        ("a", Residency.DEVICE),
    ]


class Exact(FakeEngine):
    """An engine that would survive a lack of blocks, but must never lack them: the decided round fits."""

    def round(self, run: Sequence[str]) -> RoundResult:
        try:
            return super().round(run)
        except OutOfBlocks as error:
            raise AssertionError("the decision did not fit") from error


NAMES = ("a", "b", "c", "d", "e")
BEGINNING = tuple(range(1, 49))
SHARED = (48, 48, 48, 16, 0)
"""Tokens of it with which their prompts begin, where they share KV."""


@st.composite
def churn(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Return messages that a scheduler may send to a worker, in any order."""
    step = st.one_of(
        st.tuples(st.just("run"), st.integers(1, 25)),
        st.tuples(st.just("acknowledge"), st.integers(0, 4)),
        st.tuples(
            st.just("assign"),
            st.lists(
                st.tuples(
                    st.sampled_from(NAMES),
                    st.sampled_from([0.1, 1.0, 1.05, 2.0, 8.0]),
                    st.booleans(),
                    st.booleans(),
                ),
                unique_by=lambda one: one[0],
                max_size=5,
            ),
        ),
        st.tuples(st.just("release"), st.sampled_from(NAMES)),
    )
    return draw(st.lists(step, max_size=40))


@settings(max_examples=150, deadline=None)
@given(
    script=churn(),
    slots=st.integers(1, 3),
    blocks=st.sampled_from([8, 11, 20, 200]),
    host_tokens=st.sampled_from([None, 0, 60]),
    bound=st.sampled_from([7, 256]),
    shares=st.booleans(),
)
def test_tokens_do_not_depend_on_the_churn_of_assignments(
    script: list[tuple[str, object]],
    slots: int,
    blocks: int,
    host_tokens: int | None,
    bound: int,
    shares: bool,
) -> None:
    """With any sequence of listing, pausing, evicting, releasing and leasing again, the record ends with the
    output that the engine would have produced alone; and the remembered last choice gives the same result as
    a new choice.
    """
    told = [_churned(script, slots, blocks, host_tokens, bound, shares, reuse) for reuse in (True, False)]
    assert told[0] == told[1]


def _churned(
    script: list[tuple[str, object]],
    slots: int,
    blocks: int,
    host_tokens: int | None,
    bound: int,
    shares: bool,
    reuse: bool,
) -> list[tuple[tuple[str, ...], list[tuple[str, Residency]]]]:
    fake = Exact(
        slots=slots,
        target_blocks=blocks,
        draft_blocks=0 if shares else blocks,
        block_size=16,
        max_length=128,
        max_draft_len=4,
        host_tokens=host_tokens,
        prefill_chunk=24,
        prefix_reuse_tokens=16 if shares else 0,
    )
    desk = Desk(fake, max_unacknowledged_tokens=bound)
    if not reuse:
        desk.runner._chooser._reuse_choices = False
    wanted: dict[str, Specification] = {
        name: spec(name, prompt=10 + 12 * i, max_tokens=20 + 11 * i) for i, name in enumerate(NAMES)
    }
    if shares:
        for name, tokens in zip(NAMES, SHARED, strict=True):
            one = wanted[name]
            wanted[name] = replace(
                one,
                prompt_ids=(*BEGINNING[:tokens], *one.prompt_ids[:20]),
                max_tokens=min(one.max_tokens, 50),
            )
    record: dict[str, list[int]] = {name: [] for name in NAMES}
    epochs = dict.fromkeys(NAMES, 1)
    ended: set[str] = set()
    committed = 0

    def commit(upto: int) -> None:
        """Accept reports as a scheduler does: by lease epoch and position."""
        nonlocal committed
        for report in desk.rounds[committed:upto]:
            for epoch, step in report.progress:
                name = step.request_id
                if epoch == epochs[name] and step.position == len(record[name]) and name not in ended:
                    record[name] += step.tokens
                    if step.finish is not None:
                        ended.add(name)
        committed = max(committed, min(upto, len(desk.rounds)))
        desk.put(Acknowledged(committed))

    def assign(entries: list[tuple[str, float, bool, bool]]) -> None:
        desk.assign(
            *[
                entry(name, index_s, lease_epoch=epochs[name])._replace(reserved=reserved, pinned=pinned)
                for name, index_s, reserved, pinned in entries
                if name not in ended
            ]
        )

    desk.give(*wanted.values())
    for what, argument in script:
        match what, argument:
            case "run", int(count):
                desk.turns(count)
            case "acknowledge", int(count):
                commit(committed + count)
            case "assign", list(entries):
                assign(entries)
            case "release", str(name) if name not in ended:
                epochs[name] += 1
                one = wanted[name]
                desk.give(
                    Specification(name, one.prompt_ids, tuple(record[name]), one.sampling, one.max_tokens),
                    lease_epoch=epochs[name],
                )
        fake.check()
    while len(ended) < len(NAMES):
        assign([(name, 1.0, False, False) for name in NAMES])
        desk.turn_until_idle()
        commit(len(desk.rounds))
    desk.turns(1)
    fake.check()

    assert {name: tuple(tokens) for name, tokens in record.items()} == {
        name: fake.expected(one)[0] for name, one in wanted.items()
    }
    assert fake.known() == set()
    moved = [[(change.request_id, change.residency) for change in report.residency] for report in desk.rounds]
    return list(zip(desk.who(), moved, strict=True))


# -- failures of a round ---------------------------------------------------------------------------------------


class Poisoned(FakeEngine):
    """An engine that raises in every round with a request whose name is marked."""

    def round(self, run: Sequence[str]) -> RoundResult:
        if any(name.startswith("poison") for name in run):
            raise IndexError("index 7 is out of bounds")
        return super().round(run)


def poisoned(**options: object) -> Poisoned:
    return Poisoned(**{"slots": 8, "max_length": 512, **options})  # type: ignore[arg-type]


def test_a_request_that_makes_rounds_fail_ends_alone() -> None:
    desk = Desk(poisoned())
    names = ["a", "b", "poison", "c", "d"]
    desk.give(*map(spec, names))
    desk.assign(*map(entry, names))
    desk.turn_until_idle()

    for name in "abcd":
        assert desk.tokens(name) == desk.engine.expected(spec(name))[0]  # type: ignore[attr-defined]
    (end,) = [step for one in desk.rounds for _, step in one.progress if step.request_id == "poison"]
    assert end.finish is End.ERROR
    assert end.error == "the engine failed on this request: IndexError: index 7 is out of bounds"
    assert [one.number for one in desk.rounds] == list(range(1, len(desk.rounds) + 1))


def test_two_poisoned_requests_in_one_round_both_end() -> None:
    desk = Desk(poisoned())
    names = ["poison 1", "a", "poison 2"]
    desk.give(*map(spec, names))
    desk.assign(*map(entry, names))
    desk.turn_until_idle()

    ends = {step.request_id: step.finish for one in desk.rounds for _, step in one.progress if step.finish}
    assert ends == {"poison 1": End.ERROR, "a": End.LENGTH, "poison 2": End.ERROR}


def test_a_round_in_which_everybody_fails_is_the_engines() -> None:
    desk = Desk(poisoned())
    desk.give(spec("poison 1"), spec("poison 2"))
    desk.assign(entry("poison 1"), entry("poison 2"))
    with pytest.raises(IndexError):
        desk.turn_until_idle()


def test_failures_one_after_another_are_the_engines() -> None:
    desk = Desk(poisoned())
    with pytest.raises(IndexError):
        for number in range(FAILURES_IN_A_ROW):
            assert len(desk.rounds) == number
            desk.give(spec(f"poison {number}"))
            desk.assign(entry(f"poison {number}"))
            desk.turn_until_idle()


def test_failures_with_others_that_do_not_fail_are_the_requests_own() -> None:
    desk = Desk(poisoned())
    desk.give(spec("a", max_tokens=400))
    for number in range(FAILURES_IN_A_ROW):
        desk.give(spec(f"poison {number}"))
        desk.assign(entry("a"), entry(f"poison {number}"))
        desk.turns(1)
    desk.give(spec("poison alone"))
    desk.assign(entry("poison alone"))
    desk.turns(2)

    ended = [step.request_id for report in desk.rounds for _, step in report.progress if step.finish]
    assert ended == [*(f"poison {number}" for number in range(FAILURES_IN_A_ROW)), "poison alone"]


def test_a_device_that_failed_is_not_asked_again() -> None:
    class Gone(FakeEngine):
        asked = 0

        def round(self, run: Sequence[str]) -> RoundResult:
            self.asked += 1
            raise DeviceFailed("the device is gone")

    desk = Desk(Gone(slots=4))
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a"), entry("b"))
    with pytest.raises(DeviceFailed):
        desk.turn_until_idle()
    assert desk.engine.asked == 1  # type: ignore[attr-defined]


class Small(FakeEngine):
    """An engine with memory for rounds of `room` requests."""

    room = 3

    def round(self, run: Sequence[str]) -> RoundResult:
        if len(run) > self.room:
            raise OutOfMemory(f"the device has no memory for a round of {len(run)} requests")
        return super().round(run)


def test_running_out_of_memory_shrinks_the_batch_and_is_told() -> None:
    desk = Desk(Small(slots=8, max_length=512))
    names = "abcdefgh"
    desk.give(*(spec(name, max_tokens=30) for name in names))
    desk.assign(*(entry(name, float(at)) for at, name in enumerate(names)))
    desk.turns(1)
    assert desk.who() == [("a", "b")], "half, and half of that"
    assert desk.rounds[0].out_of_memory == 2
    desk.turn_until_idle()

    for name in names:
        assert len(desk.tokens(name)) == 30
    assert sum(one.out_of_memory for one in desk.rounds) == 2
    assert {len(one.result.requests) for one in desk.rounds} <= {1, 2}


def test_more_run_again_after_a_while() -> None:
    engine = Small(slots=8, max_length=8192, max_draft_len=0, draft_len=0)
    desk = Desk(engine, max_unacknowledged_tokens=10_000)
    names = "abcdefgh"
    desk.give(*(spec(name, max_tokens=4000) for name in names))
    desk.assign(*map(entry, names))
    desk.turns(1)
    engine.room = 8
    desk.turns(2 * ROUNDS_WITH_FEWER + 2)

    assert [len(one.result.requests) for one in desk.rounds][:: ROUNDS_WITH_FEWER + 1] == [2, 4, 8]


def test_one_request_without_memory_ends_with_the_reason() -> None:
    engine = Small(slots=8, max_length=512)
    engine.room = 0
    desk = Desk(engine)
    desk.give(spec("a"))
    desk.assign(entry("a"))
    desk.turn_until_idle()

    (end,) = [step for one in desk.rounds for _, step in one.progress]
    assert (end.finish, end.error) == (
        End.ERROR,
        "the device has no memory for a round of 1 requests",
    )


def test_blocks_of_a_round_that_failed_are_free_again(tmp_path: Path) -> None:
    """The pool holds two of the four contexts, and the first round, of all four, fails. If it kept blocks for
    those that do not run again at once, none would be left for one that generates.
    """
    real = load_pair(
        write_model(tmp_path, llama_config(), seed=0),
        slots=4, max_length=128, draft_len=2, blocks=20, block_size=8, length_probe=False,
    )  # fmt: skip
    forward = real._pair.target.forward

    def short_of_memory(ids: torch.Tensor, *more: Any) -> torch.Tensor:
        if len(ids) > 10:
            raise torch.OutOfMemoryError("tried to allocate 20 GiB")
        real._pair.target.forward = forward  # type: ignore[method-assign]
        return forward(ids, *more)

    real._pair.target.forward = short_of_memory  # type: ignore[method-assign]
    desk = Desk(real, max_unacknowledged_tokens=10_000)
    lengths = {"a": (10, 100), "b": (36, 20), "c": (36, 20), "d": (36, 20)}
    for name, (prompt, tokens) in lengths.items():
        first = tuple(2 + (7 * n + ord(name)) % 120 for n in range(prompt))
        desk.give(Specification(name, first, (), Sampling(), tokens, ignore_eos=True))
    desk.assign(*(entry(name, float(at)) for at, name in enumerate(lengths)))
    desk.turn_until_idle()

    assert desk.rounds[0].out_of_memory
    assert {name: len(desk.tokens(name)) for name in lengths} == {"a": 100, "b": 20, "c": 20, "d": 20}


class Learner:
    """A probe whose requests the test counts."""

    kind = ProbeKind("ab12", 3, 1, 128)

    def __init__(self) -> None:
        self.requests = 0
        self.adopted: list[LearntProbe] = []

    def learnt(self) -> LearntProbe:
        return LearntProbe(self.kind, self.requests, b"\0\0")

    def adopt(self, learnt: LearntProbe) -> bool:
        self.adopted.append(learnt)
        if learnt.requests <= self.requests:
            return False
        self.requests = learnt.requests
        return True


def learning_desk(**options: object) -> tuple[Desk, Learner]:
    """Return a desk whose engine has a probe, with a request that runs."""
    own, probe = engine(draft_len=0), Learner()
    own.length_probe = probe
    desk = Desk(own, **options)
    desk.give(spec("a", max_tokens=100))
    desk.assign(entry("a"))
    return desk, probe


def shared(desk: Desk) -> list[int]:
    return [one.learnt.requests for one in desk.outcomes if isinstance(one, Learnt)]


def test_what_the_probe_learns_goes_out_once() -> None:
    desk, probe = learning_desk(share_s=0.0)
    desk.turns(2)
    assert shared(desk) == []
    probe.requests = 3
    desk.turns(3)
    assert shared(desk) == [3]
    probe.requests = 4
    desk.turns(3)
    assert shared(desk) == [3, 4]


def test_what_the_probe_learns_does_not_go_out_before_its_time() -> None:
    desk, probe = learning_desk(share_s=3600.0)
    probe.requests = 3
    desk.turns(5)
    assert shared(desk) == []


def test_a_probe_that_has_failed_sends_and_learns_nothing_more() -> None:
    desk, probe = learning_desk(share_s=0.0)
    desk.turns(1)
    probe.requests = 3
    desk.engine.length_probe = None
    desk.put(Taught(LearntProbe(probe.kind, 50, b"\0\0")))
    desk.turns(3)
    assert shared(desk) == []
    assert probe.adopted == []


def test_a_probe_continues_what_another_has_learnt_and_does_not_send_that_back() -> None:
    desk, probe = learning_desk(share_s=0.0)
    taught = LearntProbe(probe.kind, 50, b"\0\0")
    desk.put(Taught(taught))
    desk.turns(3)
    assert probe.adopted == [taught]
    assert shared(desk) == []
    probe.requests += 1
    desk.turns(1)
    assert shared(desk) == [51]


def test_an_engine_without_a_probe_ignores_what_another_has_learnt() -> None:
    desk = Desk(engine())
    desk.put(Taught(LearntProbe(Learner.kind, 50, b"\0\0")))
    desk.turns(2)
    assert shared(desk) == []


def test_a_round_that_is_too_large_for_a_message_goes_in_several_reports() -> None:
    """Its stream would break, and again at each report after that: they are offered in order."""
    desk = Desk(engine(slots=16, target_blocks=16 * 260, max_length=4100, prefill_chunk=16 * 4032))
    names = [f"r{number:02}" for number in range(16)]
    desk.give(*(replace(spec(name, prompt=4032, max_tokens=3), prompt_logprobs=64) for name in names))
    desk.assign(*(entry(name) for name in names))
    desk.turn_until_idle()

    assert [one.number for one in desk.rounds] == list(range(1, len(desk.rounds) + 1))
    assert all(round_report(one).ByteSize() < MAX_MESSAGE_BYTES / 2 for one in desk.rounds)
    told = [step for one in desk.rounds for _, step in one.progress if step.prompt_logprobs is not None]
    assert sorted(step.request_id for step in told) == names
    assert [len(desk.tokens(name)) for name in names] == [3] * 16
