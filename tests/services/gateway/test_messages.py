"""Anthropic's Messages API: whole, as events in Anthropic's order, with tools, and its errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.api.anthropic.body import read_messages
from gateway.api.http_requests import with_api_key
from gateway.api.openai.unknown_fields import refuse
from gateway.model.files import ModelFiles, load_model
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from tests.services.gateway.conftest import TEMPLATE, Served, Start, write_model
from tests.services.gateway.fake_scheduler import Kind
from tests.services.gateway.test_responses import CALL, prompt_of, served
from tests.services.gateway.test_vllm_fields import answer_of

__all__ = ["served"]

BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "hello"}],
}
TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def nested(levels: int) -> Any:
    return {"properties": {"a": nested(levels - 1)}} if levels else {}


CALLED = {"type": "tool_use", "id": "c1", "name": "server.look", "input": {}}
OF_TOOLS: Any = [
    ({"tools": [TOOL | {"name": "server.look"}]}, "tools[0].name must be 1 to 128 letters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name must be given once"),
    ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema must be the schema of"),
    ({"tools": [TOOL | {"input_schema": nested(30)}]}, "tools[0].input_schema must nest at most 48 levels"),
    ({"tools": [TOOL | {"input_schema": nested(40)}]}, "tools[0].input_schema must nest at most 64 levels"),
    ({"tools": [TOOL] * 129}, "tools must be at most 128"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}, "tool_choice must name one of the"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs must have names of variables"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages must be absent"),
    (
        {"system": "Be brief.", "messages": [*BODY["messages"], {"role": "assistant", "content": [CALLED]}]},
        "messages has a part whose name must be 1 to 128 letters",
    ),
]
"""Faults that are found in the chat, with the beginnings of their messages."""


async def counted(served: Served, body: Any) -> Any:
    """Return the number of tokens of the prompt of a body."""
    prompt = {name: value for name, value in body.items() if name != "max_tokens"}
    _, _, answer = await served.post("/v1/messages/count_tokens", prompt)
    return answer["input_tokens"]


async def events_of(
    served: Served, body: Any, text: str = "hello world", end: Any = Kind.KIND_STOP, count: int = 1
) -> list[Any]:
    """Return the events of a stream, each named by its type."""
    async with served.session.post(served.url + "/v1/messages", json=body | {"stream": True}) as response:
        await served.finished(text, end, count)
        blocks = [block for block in (await response.text()).split("\n\n") if block]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def test_a_text(served: Served, model: ModelFiles) -> None:
    answer = await answer_of(
        served, "/v1/messages", BODY | {"system": [{"type": "text", "text": "Be brief."}]}
    )
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["content"] == [{"type": "text", "text": "hello world"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] == len(model.encode_rendered("hello world"))
    assert answer["usage"]["input_tokens"] > 0
    assert prompt_of(served, model).endswith("<|system|>Be brief.\n<|user|>hello\n<|assistant|>")


async def test_the_id_of_a_call_is_in_anthropics_header(served: Served) -> None:
    answer = asyncio.create_task(served.post("/v1/messages", BODY))
    await served.finished()
    _, headers, message = await answer
    assert headers["request-id"] == headers["x-request-id"] == message["id"]

    _, headers, _ = await served.post("/v1/messages", BODY | {"model": "other"})
    assert headers["request-id"] == headers["x-request-id"]


async def test_a_stop_sequence(served: Served) -> None:
    end = link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, cut_characters=5)
    answer = await answer_of(served, "/v1/messages", BODY | {"stop_sequences": ["wor"]}, end)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "wor")
    assert answer["content"] == [{"type": "text", "text": "hello "}]


async def test_a_stream(served: Served) -> None:
    events = await events_of(served, BODY, end=Kind.KIND_LENGTH)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == []
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == "hello world"
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


async def test_reasoning_has_a_signature(serve: Start, model_dir: Path) -> None:
    """Clients leave out earlier reasoning that has none, or send it as text."""
    served = await serve(model=load_model(model_dir, name="tiny", parsers=("auto", "think")))
    body, text = BODY | {"thinking": {"type": "adaptive"}}, "<think>brown</think>fox"
    answer = asyncio.create_task(served.post("/v1/messages", body))
    await served.finished(text)
    _, _, message = await answer
    thinking = {"type": "thinking", "thinking": "brown", "signature": message["id"]}
    assert message["content"] == [thinking, {"type": "text", "text": "fox"}]

    events = await events_of(served, body, text, count=2)
    of_thinking = [event for event in events if event.get("index") == 0]
    assert of_thinking[-1]["type"] == "content_block_stop"
    signature = {"type": "signature_delta", "signature": events[0]["message"]["id"]}
    assert of_thinking[-2]["delta"] == signature


async def test_a_failure_in_a_stream_is_an_event(served: Served) -> None:
    events = await events_of(served, BODY, end=Kind.KIND_ERROR)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_tool(served: Served, stream: bool) -> None:
    body = BODY | {"tools": [TOOL], "tool_choice": {"type": "auto"}}
    if stream:
        events = await events_of(served, body, CALL)
        (begun,) = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert {delta["type"] for delta in deltas} == {"input_json_delta"}
        block = begun | {"input": json.loads("".join(delta["partial_json"] for delta in deltas))}
        reason = events[-2]["delta"]["stop_reason"]
    else:
        call = asyncio.create_task(served.post("/v1/messages", body))
        await served.finished(CALL)
        _, _, answer = await call
        (block,) = answer["content"]
        reason = answer["stop_reason"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert block["id"]
    assert reason == "tool_use"


async def test_a_conversation_with_calls(served: Served, model: ModelFiles) -> None:
    messages = [
        {"role": "user", "content": "Is it hot?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "33 degrees"}],
                },
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    await answer_of(served, "/v1/messages", BODY | {"messages": messages, "tools": [TOOL]})
    prompt = prompt_of(served, model)
    places = [prompt.index(part) for part in ("Is it hot?", "Let me see.", "33 degrees", "And?")]
    assert places == sorted(places)


async def test_the_output_continues_a_last_message_of_the_assistant(
    served: Served, model: ModelFiles
) -> None:
    messages = [
        *BODY["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "The answer is"}]},
    ]
    body = BODY | {"messages": messages}
    answer = await answer_of(served, "/v1/messages", body)
    assert prompt_of(served, model).endswith("<|user|>hello\n<|assistant|>The answer is")
    assert answer["content"] == [{"type": "text", "text": "hello world"}]
    assert await counted(served, body) == answer["usage"]["input_tokens"]


async def test_no_output_continues_a_call_or_nothing(served: Served, model: ModelFiles) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    for count, content in enumerate(([{"type": "text", "text": "Well"}, call], "", " "), start=1):
        messages = [*BODY["messages"], {"role": "assistant", "content": content}]
        task = asyncio.create_task(
            served.post("/v1/messages", BODY | {"messages": messages, "tools": [TOOL]})
        )
        await served.finished(count=count)
        await task
        assert prompt_of(served, model).endswith("<|assistant|>")


async def test_instructions_may_come_between_the_messages(served: Served, model: ModelFiles) -> None:
    messages = [
        *BODY["messages"],
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And?"},
    ]
    await answer_of(served, "/v1/messages", BODY | {"messages": messages})
    assert prompt_of(served, model).endswith(
        "<|user|>hello\n<|system|>Be brief.\n<|assistant|>Hi.\n<|user|>And?\n<|assistant|>"
    )


async def test_consecutive_turns_of_one_side_are_one(served: Served, model: ModelFiles) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "user", "content": "world"},
        {"role": "assistant", "content": "Let me see."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "33 degrees"}],
        },
        {"role": "user", "content": "And?"},
    ]
    await answer_of(served, "/v1/messages", BODY | {"messages": messages, "tools": [TOOL]})
    prompt = prompt_of(served, model)
    assert "<|user|>hello\n\nworld\n<|assistant|>Let me see." in prompt
    assert prompt.count("<|assistant|>") == 2, "of the conversation and of the answer"
    assert prompt.index("Rome") < prompt.index("33 degrees") < prompt.index("<|user|>And?")


async def test_edits_that_clear_earlier_reasoning_are_the_templates_choice(
    served: Served, model: ModelFiles
) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = BODY | {"thinking": {"type": "adaptive"}, "context_management": {"edits": edits}}
    await answer_of(served, "/v1/messages", body)
    assert prompt_of(served, model).endswith("<|user|>hello\n<|assistant|>")


async def test_a_block_that_differs_in_each_request_is_no_part_of_the_prompt(
    served: Served, model: ModelFiles
) -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"
    system = [{"type": "text", "text": text} for text in (billing, "Be brief.")]
    await answer_of(served, "/v1/messages", BODY | {"system": system})
    assert prompt_of(served, model).endswith("<|begin|><|system|>Be brief.\n<|user|>hello\n<|assistant|>")


@pytest.mark.parametrize(
    ("thinking", "arguments", "shown"),
    [
        ({"type": "disabled"}, None, "False False"),
        ({"type": "enabled", "budget_tokens": 1024}, None, "True True"),
        ({"type": "adaptive"}, {"enable_thinking": False}, "False True"),
        (None, None, "open open"),
    ],
)
async def test_thinking_is_a_switch_of_the_template(
    serve: Start, tmp_path: Path, thinking: Any, arguments: Any, shown: str
) -> None:
    switches = "{{ enable_thinking | default('open') }} {{ thinking | default('open') }}"
    directory = write_model(tmp_path / "model", template=TEMPLATE + switches)
    model = load_model(directory, name="tiny")
    served = await serve(model=model)
    body = BODY | {"thinking": thinking, "chat_template_kwargs": arguments}
    answer = await answer_of(served, "/v1/messages", body)
    assert prompt_of(served, model).endswith(shown)
    assert await counted(served, body) == answer["usage"]["input_tokens"]


async def test_the_tokens_of_a_prompt_are_counted(served: Served) -> None:
    answer = await answer_of(served, "/v1/messages", BODY)
    assert await counted(served, BODY) == answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"container": "x"}, "container"),
        ({"speed": "fast"}, "speed is not supported"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"colour": "red"}, "colour"),
        *OF_TOOLS,
    ],
)
async def test_a_refusal_has_anthropics_shape_and_names_the_field(
    served: Served, change: Any, param: str
) -> None:
    status, headers, answer = await served.post("/v1/messages", BODY | change)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error"), (
        answer
    )
    assert answer["error"]["param"] == param.split()[0]
    assert answer["error"]["message"].startswith(param)
    assert headers["x-request-id"]


@pytest.mark.parametrize(("change", "said"), OF_TOOLS)
async def test_a_prompt_that_is_counted_is_refused_in_the_same_words(
    served: Served, change: Any, said: str
) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"} | change
    status, _, answer = await served.post("/v1/messages/count_tokens", body)
    assert (status, answer["error"]["param"]) == (400, said.split()[0]), answer
    assert answer["error"]["message"].startswith(said)


async def test_the_field_that_is_missing_must_be_given(served: Served) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"}
    _, _, answer = await served.post("/v1/messages", body)
    assert answer["error"]["message"] == "max_tokens must be given"


@pytest.mark.parametrize("unknown_fields", ["refuse", "ignore"])
async def test_a_thread_is_refused_so_that_clients_send_all_messages(
    serve: Start, unknown_fields: str
) -> None:
    served = await serve(unknown_fields=unknown_fields)
    status, _, answer = await served.post("/v1/messages", BODY | {"thread": {"type": "create"}})
    assert status == 400
    assert answer["error"] == {
        "type": "invalid_request_error",
        "message": "thread is not supported: nothing is stored; send all messages; leave it out",
        "param": "thread",
        "details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
    }


async def test_of_an_unknown_model_is_404(served: Served) -> None:
    status, _, answer = await served.post("/v1/messages", BODY | {"model": "claude"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_what_is_refused_before_a_body_is_read_has_anthropics_shape_too(
    served: Served, path: str
) -> None:
    async with served.session.post(served.url + path, data="text") as response:
        status, answer = response.status, await response.json()

    assert status == 415
    assert answer == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "the Content-Type must be application/json",
            "param": None,
        },
    }


async def test_an_expectation_that_is_not_met_is_refused_in_anthropics_shape(served: Served) -> None:
    headers = {"Expect": "a miracle"}
    async with served.session.post(served.url + "/v1/messages", json=BODY, headers=headers) as response:
        status, answer = response.status, await response.json()

    assert (status, answer["type"], answer["error"]["type"]) == (417, "error", "invalid_request_error")


async def test_what_anthropic_has_and_this_server_does_not_is_refused_in_anthropics_shape(
    served: Served,
) -> None:
    status, _, answer = await served.post("/v1/messages/batches", {"requests": []})

    assert (status, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    assert "POST /v1/messages" in answer["error"]["message"]


async def test_a_body_that_is_too_large_is_refused_in_anthropics_shape(serve: Start) -> None:
    served = await serve(max_message_bytes=65536)
    status, _, answer = await served.post("/v1/messages", BODY | {"system": "x" * 65536})

    assert (status, answer["type"], answer["error"]["type"]) == (413, "error", "request_too_large")


async def test_a_stopping_gateway_refuses_in_anthropics_shape(served: Served) -> None:
    served.running.gateway.app.stopping.set()
    status, headers, answer = await served.post("/v1/messages", BODY)

    assert (status, headers["Retry-After"]) == (503, "1")
    assert (answer["type"], answer["error"]["type"]) == ("error", "overloaded_error")


def test_a_key_in_anthropics_header_is_a_key() -> None:
    assert dict(with_api_key([("X-Api-Key", "k")]))["authorization"] == "Bearer k"
    both = [("x-api-key", "k"), ("Authorization", "Bearer other")]
    assert list(with_api_key(both)) == both


async def test_a_call_that_is_cut_off_is_text(served: Served) -> None:
    body = BODY | {"tools": [TOOL]}
    call = asyncio.create_task(served.post("/v1/messages", body))
    await served.finished(CALL[:-12], Kind.KIND_LENGTH)
    _, _, answer = await call
    assert answer["stop_reason"] == "max_tokens"
    (block,) = answer["content"]
    assert block == {"type": "text", "text": CALL[:-12]}


def test_a_call_whose_input_nests_too_deeply_is_refused() -> None:
    value: dict[str, Any] = {}
    inner = value
    for _ in range(5000):
        inner["a"] = inner = {}
    call = {"type": "tool_use", "id": "call_1", "name": "look", "input": value}
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "assistant", "content": [call]}]}
    with pytest.raises(InvalidArgument, match="messages must not nest this deeply"):
        read_messages(body, refuse)
