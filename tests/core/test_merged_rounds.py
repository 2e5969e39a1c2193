"""Rounds that are reported together count as they do one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Commit
from scheduler_svc.core.events import Arrived, Merged, Progress, RoundReported, WorkerUp
from scheduler_svc.core.scheduler import Scheduler
from tests.core.test_scheduler import W, core, request

ROUNDS = ((4, 3), (1, 0), (6, 5))
"""Tokens and accepted draft tokens of `a` in three rounds, 5 drafted in each; `b` has one token without a draft."""


def of_a(position: int, tokens: int, accepted: int) -> Progress:
    by_position = (1,) * min(5, accepted + 1), ((1,) * accepted + (0,))[:5]
    ids = tuple(range(position, position + tokens))
    return Progress("a", 1, position, ids, 5, accepted, 0, None, 0, "", *by_position)


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
    (3, 2, 2, 2, 1),
    (2, 2, 2, 1, 1),
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
