"""The message of a choice: a stream's deltas, put together, are the message of the whole answer."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.openai.message import MessageReader
from gateway.model.files import ModelFiles
from gateway.model.reasoning import REASONING, ReasoningReader, State
from gateway.model.tool_calls.families import FAMILIES

FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", ", ", "; ", "\n",
        "hello ", '{"name": "now", "arguments": {"a": [1]}}', '{"name": "now", "parameters": {}}', '{"name": "now"',
    ]
)  # fmt: skip


def reader_of(model: ModelFiles, family: str | None, state: State | None, *, single: bool) -> MessageReader:
    return MessageReader(
        None if family is None else FAMILIES[family],
        {"now"},
        None if state is None else ReasoningReader(REASONING["think"], state),
        model.token_bytes,
        request_id="s0.abc",
        single=single,
        shows_reasoning=True,
    )


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*FAMILIES, None]),
    st.sampled_from([*State, None]),
    st.booleans(),
    st.lists(FRAGMENTS, max_size=14).map("".join),
    st.lists(st.integers(0, 300), max_size=10),
)
def test_deltas_put_together_are_the_message(
    model: ModelFiles, family: str | None, state: State | None, single: bool, output: str, cuts: list[int]
) -> None:
    whole = reader_of(model, family, state, single=single)
    whole.deltas(output, model.encode_rendered(output), over=True)
    message = whole.message()
    streamed = reader_of(model, family, state, single=single)
    places = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    deltas = [
        delta
        for begin, end in pairwise(places)
        for delta in streamed.deltas(output[begin:end], model.encode_rendered(output[begin:end]), over=False)
    ] + streamed.deltas("", [], over=True)

    assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning", "") for delta in deltas) == message.get("reasoning", "")
    calls: dict[str, list[str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls[call["id"]] = [call["function"]["name"], ""]
            else:
                list(calls.values())[call["index"]][1] += call["function"]["arguments"]
    # A stream cannot take back a call that broke, so it may have more.
    for made in message.get("tool_calls", ()):
        assert calls[made["id"]] == [made["function"]["name"], made["function"]["arguments"]]
    assert whole.has_calls == streamed.has_calls == bool(message.get("tool_calls"))
    assert not single or len(message.get("tool_calls", ())) <= 1


@pytest.mark.parametrize(
    ("state", "output", "count"),
    [
        (State.BEFORE, ["<think>", "hello", "</think>", "yes"], 3),
        (State.INSIDE, ["hello", "</think>yes"], 2),
        (State.INSIDE, ["hello", " there"], 2),
        (State.BEFORE, ["hello", "</think>"], 0),
        (State.AFTER, ["<think>", "</think>"], 0),
    ],
)
def test_tokens_of_reasoning_are_counted_with_its_markers(
    model: ModelFiles, state: State, output: list[str], count: int
) -> None:
    """Each text of `output` counts as the tokens it has; a token at the border belongs to the reasoning."""
    reader = reader_of(model, None, state, single=False)
    tokens = [model.encode_rendered(text) for text in output]
    expected = sum(map(len, tokens[: count - 1])) + (
        len(model.encode_rendered(output[count - 1].removesuffix("yes"))) if count else 0
    )
    reader.deltas("".join(output), [token for each in tokens for token in each], over=True)

    assert reader.reasoning_tokens == (expected if count else 0)


def test_a_whole_message_without_content_has_null(model: ModelFiles) -> None:
    reader: Any = reader_of(model, "json", None, single=False)
    reader.deltas('{"name": "now"}', [], over=True)

    assert reader.message()["content"] is None
