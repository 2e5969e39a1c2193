"""Look-ups in the context: what followed the last tokens before is what they propose."""

from __future__ import annotations

import random

import pytest

from worker_svc.engine.draft_lengths.acceptance import Acceptance
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.draft_lengths.found import FoundLengths
from worker_svc.engine.proposers.lookup import MOST_EQUAL, RESTS_AFTER, TRIED, Found, Lookup


@pytest.mark.parametrize(
    ("context", "count", "found"),
    [
        ([], 4, []),
        ([1, 2, 3], 4, []),
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], 2, [9, 8]),
        ([1, 2, 5, 6, 1, 2, 7, 8, 1, 2], 2, [7, 8]),  # the most recent
        ([0, 1, 2, 5, 9, 3, 1, 2, 7, 0, 1, 2], 1, [5]),  # the longest before the most recent
        ([4, 5, 4, 5, 4, 5], 5, [4, 5, 4, 5, 4]),  # a repetition continues
        ([3, 3, 3], 4, [3, 3, 3, 3]),
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_what_is_proposed(context: list[int], count: int, found: list[int]) -> None:
    proposed = Lookup().propose(context, count)
    assert (proposed.tokens if proposed else []) == found


@pytest.mark.parametrize(
    ("context", "equal"),
    [([1, 2, 5, 1, 2], 2), ([9, 1, 2, 3, 5, 9, 1, 2, 3], 4), ([0] * 40, MOST_EQUAL), ([1, 2, 3, 1, 2, 3], 3)],
)
def test_the_equal_tokens_before_a_proposal_are_counted(context: list[int], equal: int) -> None:
    found = Lookup().propose(context, 1)
    assert found is not None and found.equal == equal


def test_a_common_pair_is_tried_at_its_latest_places_only() -> None:
    context = [5, 1, 2, 70] + [token for at in range(TRIED) for token in (10 + at, 1, 2, 50 + at)] + [5, 1, 2]
    found = Lookup().propose(context, 1)
    assert found is not None and (found.tokens, found.equal) == ([50 + TRIED - 1], 2)


def test_an_index_that_grows_finds_what_a_new_one_finds() -> None:
    rng = random.Random(0)
    context: list[int] = []
    lookup = Lookup()
    for _ in range(300):
        context += [rng.randrange(4) for _ in range(rng.choice((1, 1, 2, 5)))]
        assert lookup.propose(context, 6) == Lookup().propose(context, 6)


def test_looks_in_vain_become_rarer_until_one_finds_something() -> None:
    lookup, context, looked = Lookup(), [1, 2, 3], []
    for token in range(4, 60):
        context.append(token)
        before = len(lookup._earlier)
        assert lookup.look(context, 4) is None
        looked.append(len(lookup._earlier) > before)
    assert all(looked[:RESTS_AFTER])
    assert sum(looked[-20:]) <= 6
    for _ in range(60):
        context += [1, 2]
        lookup.look(context, 4)
    found = lookup.look(context, 4)
    assert found is not None and found.tokens == [1, 2, 1, 2]


def chooser_of(row_s: float, step_s: float) -> DraftLengths:
    """Return a chooser for a machine on which a round takes 1 s and `row_s` for each further row."""
    return DraftLengths(8, plain=CostTable([1, 101], [1.0, 1 + 100 * row_s]), step=CostTable([1], [step_s]))


def taught(chooser: DraftLengths, rate: float, equal: int = 2, rounds: int = 400) -> Acceptance:
    """Return the evidence of a request whose found tokens were right with this chance, one a round."""
    rng, evidence = random.Random(0), Acceptance()
    for _ in range(rounds):
        chooser.found.observe(evidence, Found([7], equal), [7 if rng.random() < rate else 8])
    return evidence


def test_found_tokens_pay_for_their_rows_where_the_model_does_not_pay_for_its_steps() -> None:
    chooser = chooser_of(row_s=0.1, step_s=0.9)
    model, found = Acceptance(accepted=6.0, tested=10.0), taught(chooser, 0.6)
    assert chooser.lengths([model], [8]) == [0]
    assert 3 <= chooser.found_length(found, Found([7] * 8, 2), chooser.row_price(1), model, 0) <= 6


def test_found_tokens_that_are_worth_less_than_their_rows_are_not_verified() -> None:
    dear = chooser_of(row_s=0.7, step_s=0.1)
    price = dear.row_price(1)
    assert dear.found_length(taught(dear, 0.6), Found([7] * 8, 2), price, Acceptance(), 0) == 0
    assert dear.found_length(taught(dear, 0.95), Found([7] * 8, 2), price, Acceptance(), 0) >= 3


@pytest.mark.parametrize(("found_rate", "model_rate", "won"), [(0.9, 0.5, True), (0.5, 0.9, False)])
def test_the_source_that_gains_more_drafts(found_rate: float, model_rate: float, won: bool) -> None:
    chooser = chooser_of(row_s=0.05, step_s=0.05)
    model = Acceptance()
    for at in range(100):
        chooser.observe_acceptance(model, int(at < 100 * model_rate), 1)
    (drafted,) = chooser.lengths([model], [8])
    assert drafted > 0
    length = chooser.found_length(
        taught(chooser, found_rate), Found([7] * 8, 2), chooser.row_price(1), model, drafted
    )
    assert (length > 0) == won


def test_what_a_draft_step_costs_decides_between_equal_sources() -> None:
    chooser = chooser_of(row_s=0.02, step_s=0.2)
    model = Acceptance(accepted=90.0, tested=100.0)
    (drafted,) = chooser.lengths([model], [8])
    assert chooser.found_length(taught(chooser, 0.9), Found([7] * 8, 2), chooser.row_price(1), model, drafted)


def test_a_probe_of_the_model_is_not_replaced() -> None:
    chooser, model = chooser_of(row_s=0.02, step_s=0.2), Acceptance()
    model.probe()
    assert chooser.found_length(taught(chooser, 0.9), Found([7] * 8, 2), chooser.row_price(1), model, 1) == 0


def test_what_was_found_is_compared_with_the_text_whether_it_was_drafted_or_not() -> None:
    lengths, evidence = FoundLengths(), Acceptance()
    lengths.observe(evidence, Found([5, 6, 7, 8], 2), [5])
    assert (evidence.accepted, evidence.tested) == (1, 1)
    lengths.observe(evidence, Found([5, 6, 7, 8], 2), [5, 6, 9])
    assert evidence.tested == pytest.approx(4, abs=0.2)
    assert evidence.accepted == pytest.approx(3, abs=0.2)


def test_more_equal_tokens_before_it_make_a_found_token_more_likely() -> None:
    chooser = chooser_of(row_s=0.5, step_s=1.0)
    taught(chooser, 0.3, equal=3)
    taught(chooser, 0.95, equal=12)
    price, unknown = chooser.row_price(1), Acceptance()
    assert chooser.found_length(unknown, Found([7] * 8, 3), price, Acceptance(), 0) == 0
    assert chooser.found_length(unknown, Found([7] * 8, 12), price, Acceptance(), 0) > 0


def test_sources_have_priors_of_their_own() -> None:
    chooser = DraftLengths(6)
    taught(chooser, 0.0)
    assert chooser.found.length(Acceptance(), Found([7], 2), row_price=0.1) == 0
    assert chooser.rate(Acceptance()) > 0.5
