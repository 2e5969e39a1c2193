"""`laps-sd bench serve --regime multi-turn`, without its processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench._replay import Reply
from bench._serve.multi_turn import (
    CONVERSATIONS,
    INSTRUCTION_TOKENS,
    TURNS,
    Served,
    conversations,
    kept,
    planned,
    run,
    simulated,
    verdicts,
)
from bench._serve.options import arguments
from bench.report import about, finish

LONGEST = 1000
"""Most tokens of context that the demo pair is at home with, about."""


def served(seed: int) -> list[Served]:
    """Return turns as a stack would serve them, with two tokens a round."""
    found = []
    for conversation in conversations(seed):
        context = list(conversation.instructions)
        for turn in conversation.turns:
            context += turn.message
            reply = Reply(latency_s=1.0, first_token_s=0.5)
            reply.ended.usage.prompt_tokens = len(context)
            context += [7] * turn.output_tokens
            reply.ended.speculation.rounds = rounds = (turn.output_tokens + 1) // 2
            reply.ended.speculation.drafted = 6 * rounds
            found.append(Served(reply, list(context)))
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


def results(path: Path, *runs: tuple[int, str]) -> Path:
    """Write a file of results with these runs and a verdict."""
    rows = [{"seed": seed, "placement": placement, "mean_s": 1.0} for seed, placement in runs]
    finish([*rows, {"verdict": True, "met": False}], json_file=path, summary="", met=False, about={})
    return path


def test_runs_are_kept_by_seed_and_placement(tmp_path: Path) -> None:
    path = results(tmp_path / "turns.json", (1, "soonest-done"), (3, "least-loaded"))
    assert [(row["seed"], row["placement"]) for row in kept(path, seeds=2)] == [(1, "soonest-done")]
    assert kept(tmp_path / "none.json", seeds=2) == []
    (tmp_path / "other.json").write_text(json.dumps({"rows": [{"policy": "fcfs"}]}))
    with pytest.raises(ValueError, match=r"other.json has no results of --regime multi-turn"):
        kept(tmp_path / "other.json", seeds=2)


def test_nothing_is_started_when_all_runs_are_there(tmp_path: Path) -> None:
    path = results(tmp_path / "turns.json", *reversed(planned(2)))
    given = ["--regime", "multi-turn", "--seeds", "2", "--json", str(path), "--resume", "--runs", "1"]
    rows = run(arguments(given, ""))
    assert [(row["seed"], row["placement"]) for row in rows] == planned(2)
    assert about("serve", given)["command"] == "laps-sd bench serve --regime multi-turn --seeds 2"


def test_a_seed_counts_when_all_its_runs_are_there() -> None:
    figures = {"first_token_s": 1.0, "mean_s": 1.0}
    rows = [
        {"seed": seed, "placement": name, **figures, "simulated": figures}
        for seed, name in [*planned(2)[:2], (3, "soonest-done")]
    ]
    assert verdicts(rows[:1]) == []
    assert [goal["found"] for goal in verdicts(rows)] == [1.0] * 4


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("--regime", "multi-turn", "--resume"), "--resume needs --json"),
        (("--regime", "multi-turn", "--runs", "0"), "--runs must be at least 1"),
        (("--runs", "1"), "are options of --regime multi-turn"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    given: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(given, "")
    assert problem in capsys.readouterr().err
