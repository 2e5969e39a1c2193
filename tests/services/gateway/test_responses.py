"""OpenAI's Responses API by the official client, and the refusals of what needs storage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.model.files import ModelFiles, load_model
from tests.services.gateway.conftest import Served, Start
from tests.services.gateway.fake_scheduler import Kind

ASKED: dict[str, Any] = {"model": "tiny", "input": "hello"}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NAMESPACE: dict[str, Any] = {
    "type": "namespace",
    "name": "world",
    "description": "The world.",
    "tools": [TOOL],
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.fixture
async def served(serve: Start, model_dir: Path) -> Served:
    """Return a gateway whose context has room for the descriptions of tools."""
    return await serve(model=load_model(model_dir, name="tiny", context_tokens=2048))


@pytest.fixture
def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=30)


async def response_of(
    served: Served, client: openai.AsyncOpenAI, output: str = "hello world", **fields: Any
) -> Any:
    """Return the response to a body whose output is this text."""
    call = asyncio.create_task(client.responses.create(**{**ASKED, **fields}))
    await served.finished(output, count=len(served.scheduler.all_heard("submit")) + 1)
    return await call


def prompt_of(served: Served, model: ModelFiles) -> str:
    """Return the newest prompt."""
    return model.decode(served.scheduler.all_heard("submit")[-1].specification.prompt_ids)


async def test_a_text(served: Served, client: openai.AsyncOpenAI, model: ModelFiles) -> None:
    response = await response_of(
        served,
        client,
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        metadata={"of": "me"},
    )
    assert response.output_text == "hello world"
    assert (response.status, response.object) == ("completed", "response")
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.usage.input_tokens > 0
    assert response.usage.output_tokens == len(model.encode_rendered("hello world"))
    assert (response.instructions, response.temperature, response.store) == ("Be brief.", 0.5, False)
    assert response.metadata == {"of": "me"}
    assert prompt_of(served, model).endswith("<|system|>Be brief.\n<|user|>hello\n<|assistant|>")
    assert served.scheduler.all_heard("submit")[-1].specification.sampling.max_tokens == 9


async def test_a_response_has_all_fields_that_are_required(served: Served) -> None:
    call = asyncio.create_task(served.post("/v1/responses", ASKED | {"tools": [TOOL]}))
    await served.finished()
    _, _, answer = await call
    openai.types.responses.Response.model_validate(answer)


async def test_a_cut_text_is_incomplete(served: Served, client: openai.AsyncOpenAI) -> None:
    call = asyncio.create_task(client.responses.create(**ASKED))
    await served.finished(end=Kind.KIND_LENGTH)
    response = await call
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["incomplete"]

    async with client.responses.stream(**ASKED) as stream:
        await served.finished(end=Kind.KIND_LENGTH, count=2)
        done = [event.item async for event in stream if event.type == "response.output_item.done"]
    assert [item.status for item in done] == ["incomplete"]


async def test_a_stream(served: Served, client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(**ASKED) as stream:
        await served.finished()
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == "hello world"
    assert final.usage is not None


async def test_a_failure_in_a_stream_is_an_event(served: Served, client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(**ASKED, stream=True)
    await served.finished(end=Kind.KIND_ERROR)
    events = [event async for event in stream]
    assert events[-1].type == "error"
    assert "failed" in events[-1].message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_function(served: Served, client: openai.AsyncOpenAI, stream: bool) -> None:
    if stream:
        async with client.responses.stream(**ASKED, tools=[TOOL]) as events:  # type: ignore[list-item]
            await served.finished(CALL)
            kinds = [event.type async for event in events]
            response: Any = await events.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        assert "response.function_call_arguments.done" in kinds
    else:
        response = await response_of(served, client, CALL, tools=[TOOL])
    (item,) = response.output
    assert (item.type, item.name, json.loads(item.arguments)) == (
        "function_call",
        "weather",
        {"city": "Rome"},
    )
    assert item.call_id


@pytest.mark.parametrize(
    ("output", "end", "arguments"),
    [
        (CALL[:-4], Kind.KIND_LENGTH, '{"city": "Rom'),
        (CALL[:-1] + ', "x": 1}', Kind.KIND_STOP, '{"city": "Rome"}'),
    ],
)
async def test_a_call_that_breaks_in_a_stream_is_never_complete(
    served: Served, client: openai.AsyncOpenAI, output: str, end: Any, arguments: str
) -> None:
    """Clients may run a call once its item is done; the answer without a stream has it as text alone."""
    # The official client decodes the arguments of calls of such tools in the last event.
    asked: Any = ASKED | {"tools": [TOOL | {"strict": True}]}
    call = asyncio.create_task(client.responses.create(**asked))
    await served.finished(output, end)
    (shown,) = (await call).output
    async with client.responses.stream(**asked) as stream:
        await served.finished(output, end, 2)
        events: list[Any] = [event async for event in stream]

    assert "response.function_call_arguments.done" not in [event.type for event in events]
    broken, text = (event.item for event in events if event.type == "response.output_item.done")
    assert (broken.type, broken.status, broken.arguments) == ("function_call", "incomplete", arguments)
    (last,) = events[-1].response.output
    assert last.content[0].text == text.content[0].text == shown.content[0].text == output
    assert last.status == text.status == shown.status


async def test_a_complete_call_of_a_cut_answer_is_complete(served: Served) -> None:
    call = asyncio.create_task(served.post("/v1/responses", ASKED | {"tools": [TOOL]}))
    await served.finished(CALL, Kind.KIND_LENGTH)
    _, _, answer = await call
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "completed")


async def test_a_conversation_with_calls(
    served: Served, client: openai.AsyncOpenAI, model: ModelFiles
) -> None:
    conversation = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Is it "}, {"type": "input_text", "text": "hot?"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot see."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "33 degrees"},
    ]
    response = await response_of(served, client, input=conversation, tools=[TOOL])
    assert response.output_text == "hello world"
    prompt = prompt_of(served, model)
    for part in ("Is it hot?", "Let me see.", "I cannot see.", "Rome", "33 degrees"):
        assert part in prompt


async def test_a_format(served: Served, client: openai.AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    await response_of(served, client, '{"a": "b"}', text=wanted)
    specification = served.scheduler.all_heard("submit")[-1].specification
    assert json.loads(specification.output_format.json_schema) == schema


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 5}, "top_logprobs is not supported: chats and completions have log probabilities"),
        (
            {"include": ["file_search_call.results"]},
            'include[0] is not supported here: "file_search_call.results"',
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "function", "name": 5}]}, "tools[1].name"),
        ({"tools": [TOOL | {"name": "two words"}]}, "tools[0].name must be 1 to 128 letters"),
        ({"tools": [NAMESPACE | {"name": "two words"}]}, "tools[0].tools[0].name must be 1 to 128 letters"),
        ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "tools[0].parameters must be the schema of"),
        ({"tools": [TOOL] * 129}, "tools must be at most 128"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}},
            "tool_choice must name one of the tools, got 'look'",
        ),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages must be absent"),
        (
            {"instructions": "Be brief.", "input": [{"role": "judge", "content": "hello"}]},
            "input has a part whose role must be",
        ),
        ({"tools": [NAMESPACE | {"name": 5}]}, "tools[0].name"),
        ({"tools": [NAMESPACE | {"tools": None}]}, "tools[0].tools"),
        ({"tools": [NAMESPACE | {"tools": [TOOL, {"type": "custom"}]}]}, "tools[0].tools[1].type"),
        ({"tools": [TOOL, NAMESPACE | {"tools": [TOOL, TOOL | {"name": 5}]}]}, "tools[1].tools[1].name"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type must be message, function_call,"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 101}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "text.format"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_refusal_names_the_field(served: Served, change: Any, param: str) -> None:
    status, _, answer = await served.post("/v1/responses", ASKED | change)
    assert (status, answer["error"]["param"]) == (400, param.split()[0]), answer
    assert answer["error"]["message"].startswith(param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["\ud800", "deep"])
@pytest.mark.parametrize("field", ["metadata", "text", "tools"])
async def test_what_the_answer_could_not_repeat_is_refused(
    served: Served, field: str, value: str, stream: bool
) -> None:
    """A value can be read that is too deep for the answer around it, or has no UTF-8."""
    extra = '{"a": ' * 300 + "1" + "}" * 300 if value == "deep" else json.dumps(value)
    repeated = {
        "metadata": f'{{"x": {extra}}}',
        "text": f'{{"format": {{"type": "text", "x": {extra}}}}}',
        "tools": f'[{{"type": "function", "name": "f", "x": {extra}}}]',
    }
    body = json.dumps(ASKED | {"stream": stream})[:-1] + f', "{field}": {repeated[field]}}}'
    headers = {"Content-Type": "application/json"}
    async with served.session.post(served.url + "/v1/responses", data=body, headers=headers) as response:
        answer = await response.json()
    assert response.status == 400
    assert answer["error"]["param"].startswith(field), answer


@pytest.mark.parametrize("name", ["prompt_cache_key", "user"])
async def test_a_conversation_is_named_as_in_chats(
    served: Served, client: openai.AsyncOpenAI, name: str
) -> None:
    await response_of(served, client, **{name: "one"})
    await response_of(served, client, **{name: "one"}, extra_body={"client_metadata": {"a": "b"}})
    await response_of(served, client)
    first, again, without = (
        submit.specification.conversation for submit in served.scheduler.all_heard("submit")
    )
    assert first == again
    assert (len(first), without) == (8, b"")


async def test_tools_that_are_not_functions_are_left_out_where_a_setting_allows_it(
    serve: Start, model_dir: Path
) -> None:
    model = load_model(model_dir, name="tiny", context_tokens=2048)
    served = await serve(model=model, unknown_fields="ignore")
    call = asyncio.create_task(
        served.post("/v1/responses", ASKED | {"tools": [{"type": "web_search"}, TOOL, {"type": 5}]})
    )
    await served.finished(CALL)
    _, _, answer = await call
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert "web_search" not in prompt_of(served, model)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_function_of_a_namespace_has_both_names(
    served: Served, client: openai.AsyncOpenAI, model: ModelFiles, stream: bool
) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "tools": [TOOL, NAMESPACE],
        "tool_choice": {"type": "function", "name": "weather", "namespace": "world"},
    }
    call = '{"name": "world__weather", "arguments": {"city": "Rome"}}'
    if stream:
        async with client.responses.stream(**asked) as events:
            await served.finished(call)
            response: Any = await events.get_final_response()
    else:
        response = await response_of(served, client, call, **asked)
    (item,) = response.output
    assert (item.type, item.namespace, item.name) == ("function_call", "world", "weather")
    assert json.loads(item.arguments) == {"city": "Rome"}
    assert prompt_of(served, model).count("world__weather") == 1

    items: Any = [
        {"role": "user", "content": "Is it hot?"},
        item.model_dump(include={"type", "call_id", "namespace", "name", "arguments"}),
        {"type": "function_call_output", "call_id": item.call_id, "output": "33 degrees"},
    ]
    again: dict[str, Any] = {"input": items, "tools": [NAMESPACE]}
    await response_of(served, client, **again)
    assert prompt_of(served, model).count("world__weather") == 3, "offered, called, answered"


async def test_what_requests_nothing_is_accepted(served: Served, client: openai.AsyncOpenAI) -> None:
    fields = {"store": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"]}
    extensions = {"extra_body": {"min_tokens": 2, "workload_class": "chat"}}
    await response_of(served, client, metadata={"a": "b"}, tool_choice="auto", **fields, **extensions)
    submit = served.scheduler.all_heard("submit")[-1]
    assert (submit.specification.sampling.min_tokens, submit.workload_class) == (2, "chat")
