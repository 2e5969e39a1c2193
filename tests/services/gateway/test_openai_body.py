"""Bodies of OpenAI's API: which field a fault names, and how much a body full of faults costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.api.openai.body import Json
from gateway.api.openai.limits import MAX_ITEMS, MAX_PROMPTS, MAX_TOKEN_IDS
from gateway.api.openai.models import Body, ChatBody, CompletionBody
from gateway.api.openai.request import ParsedRequest, read_chat, read_completion
from laps_sd.errors import InvalidArgument

CHAT: Json = {"messages": [{"role": "user", "content": "hello"}]}
TEXT: Json = {"prompt": "the quick"}


def fault_of(read: Callable[[Json], ParsedRequest], body: Json) -> tuple[str, str]:
    """Return the field that a refusal names, and what it says of it."""
    with pytest.raises(InvalidArgument) as error:
        read(body)
    (fault,) = error.value.violations
    return fault


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ({"messages": None}, "messages", "must be a list of messages, got nothing"),
        ({"messages": [5]}, "messages[0]", "must be an object, got a number"),
        ({"messages": [{}]}, "messages[0].role", "must be given"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "must be a text or a list of parts, got a number",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            'must be text, all that the engine reads, got "image_url"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            "must be given",
        ),
        (
            {"messages": [{"role": "user", "content": [{}]}]},
            "messages[0].content[0].type",
            "must be text, all that the engine reads, got null",
        ),
        ({"messages": [{"role": "\ud800"}]}, "messages[0].role", "must be valid Unicode"),
        ({"model": 5}, "model", "must be a text, got a number"),
        ({"temperature": 10**400}, "temperature", "must be a number of ordinary size"),
        ({"temperature": -1e39}, "temperature", "must be a number of ordinary size"),
        ({"temperature": True}, "temperature", "must be a number, got a truth value"),
        ({"top_k": -2}, "top_k", "must be from -1 to 4294967295, got -2"),
        ({"seed": 2**64}, "seed", "must be from -9223372036854775808 to 18446744073709551615, got 184467440"),
        ({"stop": {}}, "stop", "must be a text or a list of texts, got an object"),
        ({"stop": "\ud800"}, "stop[0]", "must be valid Unicode"),
        ({"logit_bias": {"7": True}}, "logit_bias[7]", "must be a number, got a truth value"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias", 'must name token ids, got "4294967296"'),
        ({"response_format": "text"}, "response_format", "must be an object, got a text"),
        (
            {"response_format": {}},
            "response_format.type",
            "must be text, json_object or json_schema, got null",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "must be a JSON schema, got an empty list",
        ),
        ({"stream_options": {"x": True}}, "stream_options", "needs stream: true"),
        ({"stream": True, "stream_options": {"x": 0}}, "stream_options.x", "is not known here"),
        ({"{said}": 1}, "{said}", "is not a known field"),
        ({"\ud800": 1}, "\ud800", "is not a known field"),
        (
            {"guided_json": "{said}", "guided_regex": "a"},
            "guided_regex",
            "cannot be used together with another output format (guided_json, guided_regex)",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
            "cannot be used together with another",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "must hold one of json, regex, choice, grammar"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must hold one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must hold at least one text"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "must hold no empty"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]", "must be a text, got a"),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "is not supported here",
        ),
        ({"structured_outputs": {"colour": 1}}, "structured_outputs.colour", "is not a known field"),
    ],
)
def test_a_fault_of_a_chat_names_its_field(change: Json, name: str, said: str) -> None:
    named, sentence = fault_of(read_chat, CHAT | change)

    assert named == name
    assert sentence.startswith(said)


@pytest.mark.parametrize(
    ("prompt", "name", "said"),
    [
        (None, "prompt", "must be a text, token ids, or a list of them, got nothing"),
        ([], "prompt", "must be a text, token ids, or a list of them, got an empty list"),
        ({}, "prompt", "must be a text, token ids, or a list of them, got an object"),
        ("\ud800", "prompt", "must be valid Unicode"),
        ([7, "x"], "prompt[1]", 'must be a token id, got "x"'),
        ([7, 7.0], "prompt[1]", "must be a token id, got 7.0"),
        ([-1], "prompt[0]", "must be a token id, got -1"),
        ([[7], [True]], "prompt[1][0]", "must be a token id, got true"),
        (["x", 7], "prompt[1]", "must be a text"),
        ([""] * (MAX_PROMPTS + 1), "prompt", "must be at most 1024 items, got 1025"),
        ([1] * (MAX_TOKEN_IDS + 1), "prompt", "must be at most 1048576 items, got 1048577"),
        ([[1] * (MAX_TOKEN_IDS // 2 + 1)] * 2, "prompt", "must be at most 1048576 token ids in all"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_a_fault_of_a_prompt_names_its_item(prompt: Any, name: str, said: str) -> None:
    named, sentence = fault_of(read_completion, {"prompt": prompt})

    assert named == name
    assert sentence.startswith(said)


def test_what_requests_nothing_is_accepted() -> None:
    nothing = {
        "tools": [],
        "n": None,
        "colour": None,
        "\ud800": None,
        "user": {"any": ["thing"]},
        "echo": False,
    }
    parsed = read_chat(CHAT | nothing | {"stream": True, "stream_options": {"x": None, "y": False}})

    assert parsed.requests == read_chat(CHAT).requests
    assert (parsed.stream, parsed.include_usage) == (True, False)
    assert not read_completion(TEXT | {"logprobs": False}).requests[0].HasField("logprobs")


def test_one_format_may_have_two_names() -> None:
    """As Guidance sends it, for earlier and present vLLM."""
    grammar = 'start: "a"'
    twice: Json = {"guided_decoding_backend": "guidance", "guided_grammar": grammar}
    (request,) = read_chat(CHAT | twice | {"structured_outputs": {"grammar": grammar}}).requests

    assert request.output_format.grammar == grammar


def test_fields_of_a_format_that_request_nothing_are_left_out() -> None:
    """As `asdict` of vLLM's StructuredOutputsParams has them."""
    nothing = {"json": None, "json_object": False, "_backend": None, "_backend_was_auto": False}
    (request,) = read_chat(CHAT | {"structured_outputs": nothing | {"regex": "a"}}).requests

    assert request.output_format.regex == "a"


def test_a_refusal_is_what_the_assistant_said() -> None:
    before = [
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    (request,) = read_chat({"messages": before}).requests

    assert [message.content for message in request.messages.messages] == ["No.", "No."]


def test_a_number_that_is_whole_is_a_whole_number() -> None:
    (request,) = read_completion(TEXT | {"max_tokens": 7.0, "seed": -1.0}).requests

    assert (request.sampling.max_tokens, request.sampling.seed) == (7, 2**64 - 1)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, {"messages": [5] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": [5] * 1000}] * 1000}),
        (ChatBody, CHAT | {"stop": [5] * 1000}),
        (ChatBody, CHAT | {"logit_bias": {str(n): "x" for n in range(1000)}}),
        (ChatBody, CHAT | {"logit_bias": dict.fromkeys(map(str, range(-1000, 0)), 1)}),
        (CompletionBody, {"prompt": [None] * 1000}),
        (CompletionBody, {"prompt": ["x"] + [None] * 1000}),
        (CompletionBody, {"prompt": [[None] * 1000] * 1000}),
    ],
)
def test_a_body_full_of_faults_makes_one_error_of_each_field(model: type[Body], body: Json) -> None:
    """An error takes a microsecond to find and ten to describe, and a body may hold a million faults."""
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)

    assert error.value.error_count() == 1


@pytest.mark.parametrize(
    "body", [{"messages": [5] * (MAX_ITEMS + 1)}, CHAT | {"stop": [5] * (MAX_ITEMS + 1)}]
)
def test_a_list_is_counted_before_its_items_are_checked(body: Json) -> None:
    assert fault_of(read_chat, body)[1] == f"must be at most {MAX_ITEMS} items, got {MAX_ITEMS + 1}"
