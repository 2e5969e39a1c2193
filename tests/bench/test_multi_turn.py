"""`laps-sd bench serve --regime multi-turn`, without its processes."""

from __future__ import annotations

import pytest

from bench._serve.multi_turn import (
    CONVERSATIONS,
    INSTRUCTION_TOKENS,
    TURNS,
    Served,
    conversations,
    simulated,
    verdicts,
)

LONGEST = 1000
"""Most tokens of context that the demo pair is at home with, about."""


def served(seed: int) -> list[Served]:
    """Return turns as a stack would serve them, with two tokens a round."""
    found = []
    for conversation in conversations(seed):
        context = list(conversation.instructions)
        for turn in conversation.turns:
            context += turn.message
            prompt_tokens = len(context)
            context += [7] * turn.output_tokens
            rounds = (turn.output_tokens + 1) // 2
            found.append(Served(1.0, 0.5, prompt_tokens, 0, list(context), rounds=rounds, drafted=6 * rounds))
    return found


def test_a_seed_gives_the_same_conversations_and_another_one_gives_others() -> None:
    assert conversations(1) == conversations(1) != conversations(2)


def test_contexts_stay_within_what_the_pair_has_learnt() -> None:
    turns = served(3)
    assert len(turns) == CONVERSATIONS * TURNS
    assert min(len(turn.context) for turn in turns) > INSTRUCTION_TOKENS
    assert max(len(turn.context) for turn in turns) <= LONGEST


def test_the_simulator_finds_more_in_caches_where_placement_knows_them() -> None:
    wanted, truth = conversations(1), served(1)
    blind, ours = (simulated(wanted, truth, name) for name in ("least-loaded", "soonest-done"))
    assert ours["hit_share"] > blind["hit_share"] > 0
    assert ours["first_token_s"] < blind["first_token_s"]


@pytest.mark.parametrize(("measured_s", "met"), [(0.8, True), (1.2, False)])
def test_goals_are_about_the_ratio_to_least_loaded(measured_s: float, met: bool) -> None:
    def row(seed: int, placement: str, seconds: float) -> dict[str, object]:
        figures = {"first_token_s": seconds, "mean_s": seconds, "hit_share": 0.5}
        simulated = {"first_token_s": 0.8, "mean_s": 0.8} if placement == "soonest-done" else {}
        return {
            "seed": seed,
            "placement": placement,
            **figures,
            "simulated": {"first_token_s": 1.0, "mean_s": 1.0} | simulated,
        }

    rows = [
        row(seed, name, s)
        for seed in (1, 2)
        for name, s in (("least-loaded", 1.0), ("soonest-done", measured_s))
    ]
    assert {goal["met"] for goal in verdicts(rows)} == {met}
