"""Reasoning in an output: what is read does not depend on how the output was cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.model.reasoning import REASONING, Reasoning, ReasoningReader, State, markers_of

THINK = REASONING["think"]
BEFORE, INSIDE, AFTER = State.BEFORE, State.INSIDE, State.AFTER


def read(state: State, pieces: Iterable[str]) -> tuple[str, str, int]:
    """Return reasoning, answer, and the bytes up to the end of the reasoning."""
    reader = ReasoningReader(THINK, state)
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return (
        reasoning,
        "".join(part.text for part in parts if not isinstance(part, Reasoning)),
        reader.reasoned_bytes,
    )


CASES: dict[str, tuple[State, str, tuple[str, str, int]]] = {
    "both": (BEFORE, "<think>\nHm. é\n\n</think>\n\nYes.\n", ("Hm. é", "Yes.\n", 24)),
    "begun in the prompt": (INSIDE, "\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", 13)),
    "none": (BEFORE, " Yes. <think>a</think>", ("", " Yes. <think>a</think>", 0)),
    "ended in the prompt": (AFTER, "<think>a</think> Yes.", ("", "<think>a</think> Yes.", 0)),
    "without an end": (BEFORE, "<think>Hm. </thi", ("Hm. </thi", "", 16)),
    "empty": (BEFORE, "<think>\n\n</think>\n\nYes.", ("", "Yes.", 17)),
    "a mark begun": (BEFORE, "<thin", ("", "<thin", 0)),
    "nothing": (INSIDE, "", ("", "", 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_cut_gives_the_same_reasoning_and_answer(case: str) -> None:
    state, output, expected = CASES[case]

    assert read(state, [output]) == expected
    assert read(state, output) == expected
    for cut in range(1, len(output)):
        assert read(state, [output[:cut], output[cut:]]) == expected, f"cut at {cut}"


PIECES = st.sampled_from(["<think>", "</think>", "<thi", "</", " ", "\n", "a", "é", "answer"])


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(State),
    st.lists(PIECES, max_size=16).map("".join),
    st.lists(st.integers(0, 80), max_size=8),
)
def test_any_output_is_read_the_same_however_it_is_cut(state: State, output: str, cuts: list[int]) -> None:
    places = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})

    assert read(state, [output[a:b] for a, b in pairwise(places)]) == read(state, [output])


def test_the_end_of_the_prompt_decides_where_the_output_begins() -> None:
    assert THINK.state_after("<|im_start|>assistant\n") is BEFORE
    assert THINK.state_after("<|Assistant|><think>\n") is INSIDE
    assert THINK.state_after("assistant\n<think>\n\n</think>\n\n") is AFTER


@pytest.mark.parametrize(
    ("template", "markers"),
    [
        ("{{ content.split('</think>')[-1] }}", REASONING["think"]),
        ("[THINK]{{ thoughts }}[/THINK]", REASONING["mistral"]),
        ("{{ content }}", None),
    ],
)
def test_the_markers_are_those_that_the_template_mentions(template: str, markers: object) -> None:
    assert markers_of(template) == markers
