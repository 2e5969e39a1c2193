"""Look-ups in the context: what followed the last tokens before is what they propose."""

from __future__ import annotations

import random

import pytest

from worker_svc.engine.draft_lengths.acceptance import Acceptance, Prior
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.proposers.lookup import Lookup


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
    assert Lookup().propose(context, count) == found


def test_an_index_that_grows_finds_what_a_new_one_finds() -> None:
    rng = random.Random(0)
    context: list[int] = []
    lookup = Lookup()
    for _ in range(300):
        context += [rng.randrange(4) for _ in range(rng.choice((1, 1, 2, 5)))]
        assert lookup.propose(context, 6) == Lookup().propose(context, 6)


def test_proposals_that_cost_no_step_are_longer() -> None:
    """A draft step has such a high cost that the model does not pay; the same acceptance from
    look-ups does.
    """
    costs = {"plain": CostTable([1, 100], [1.0, 1.5]), "step": CostTable([1, 100], [0.9, 0.9])}
    chooser = DraftLengths(6, **costs)
    model, looked_up = Acceptance(accepted=6.0, tested=10.0), Acceptance(prior=Prior(), free=True)
    assert chooser.lengths([model], [6]) == [0]
    assert chooser.lengths([looked_up], [6])[0] >= 3


def test_sources_have_priors_of_their_own() -> None:
    chooser = DraftLengths(6)
    prior = Prior()
    for _ in range(200):
        chooser.observe_acceptance(Acceptance(prior=prior, free=True), 0, 1)
    assert chooser.rate(Acceptance(prior=prior)) < 0.1
    assert chooser.rate(Acceptance()) > 0.5
