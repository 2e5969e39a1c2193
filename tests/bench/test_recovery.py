"""The requests of `laps-sd bench recovery` are like those that gateways submit."""

from __future__ import annotations

import random

from bench.recovery import a_request
from laps_sd.contract.length_features import problem_of, unpacked


def test_requests_bring_the_words_of_their_prompts_which_a_new_leader_predicts_lengths_from():
    features = unpacked(a_request(7, 64, random.Random(1)).length_features)

    assert len(features) > 100
    assert not problem_of(features)
