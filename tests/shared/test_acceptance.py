"""The mean acceptance length is vLLM's: a round without a draft does not count."""

from __future__ import annotations

import pytest

from laps_sd.contract.acceptance import mean_acceptance_length


@pytest.mark.parametrize(
    ("accepted", "drafts", "length"), [(0, 0, 1.0), (0, 5, 1.0), (6, 2, 4.0), (20, 4, 6.0), (7, 2, 4.5)]
)
def test_it_is_one_more_than_the_accepted_tokens_of_a_draft(
    accepted: int, drafts: int, length: float
) -> None:
    assert mean_acceptance_length(accepted, drafts) == length
