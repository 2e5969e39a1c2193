"""Tools and reasoning over HTTP: what the model sees, what a worker must follow, and what the client gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from llguidance import LLTokenizer

from gateway.calls.tools import MAX_DEPTH, MAX_TOOLS
from gateway.model.chat_template import ChatTemplate
from gateway.model.files import ModelFiles, load_model
from laps_sd.contract.formats import matcher_of
from laps_sd.service.model_dir import demo_target_dir
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, Tool
from laps_sd.v1.inference_pb2 import ToolChoice as Choice
from tests.services.gateway.conftest import SPECIAL, Served, StartGateway, write_model
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.test_http import events

BYTES = LLTokenizer("byte")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
        },
        "strict": True,
    },
}
WEATHER_CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"messages": [ASK], "tools": [WEATHER, NOW]}
OSLO = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CODER_OSLO = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
GLM_OSLO = "weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
LLAMA_OSLO = OSLO.replace("arguments", "parameters")

QWEN = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %} in <tool_call></tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.name %} of {{ m.name }}{% endif %}{{ '\n' }}{% endfor %}assistant:"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
R1 = "{{ messages[0].content }}{{ '<think>\\n' }}{# </think> <tool_call> #}"
MISTRAL = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{# [TOOL_CALLS] #}"
LLAMA = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{# <|python_tag|> #}"
CODER = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{# <tool_call> <parameter= #}"
GLM = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{# <tool_call> <arg_key> #}"
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture
async def serve_template(
    scheduler: FakeScheduler, start_gateway: StartGateway, tmp_path: Path
) -> AsyncIterator[Any]:
    """Return a function that serves a model with a chat template, and with some more special tokens."""
    async with aiohttp.ClientSession() as session:

        async def start(template: str, *special: str, **parsers: Any) -> Served:
            write_model(tmp_path, template=template, context=4096, special=(*SPECIAL, *special))
            model = load_model(tmp_path, name="tiny", **parsers)
            running = await start_gateway(scheduler.address, model=model, http_port=0)
            await asyncio.wait_for(running.link.greeted.wait(), 10)
            return Served(running, scheduler, session, f"http://127.0.0.1:{running.gateway.http.port}")

        yield start


async def submitted(served: Served) -> tuple[str, link_pb2.Submit]:
    request_id = await served.scheduler.submitted(1)
    return request_id, served.scheduler.record.requests[request_id].submit


async def answer(served: Served, body: dict[str, Any], output: str, end: Any = Kind.KIND_STOP) -> Any:
    """Return the whole answer to a call whose model writes `output`."""
    call = asyncio.create_task(served.post("/v1/chat/completions", body))
    await served.finished(output, end)
    status, _, decoded = await call
    assert status == 200, decoded
    return decoded


async def chunks(served: Served, body: dict[str, Any], output: str, end: Any = Kind.KIND_STOP) -> list[Any]:
    """Return the chunks of a stream whose model writes `output`, one token at a time."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    call = asyncio.create_task(served.session.post(served.url + "/v1/chat/completions", json=body))
    request_id = await served.scheduler.submitted(1)
    for token in served.running.model.encode_rendered(output):
        served.scheduler.commit(request_id, [token])
        await asyncio.sleep(0)
    served.scheduler.commit(request_id, [], end)
    return await events(await call)


def put_together(parts: list[Any]) -> dict[str, Any]:
    """Return the message of a stream's chunks, as a client puts it together."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in parts:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                    assert call["type"] == "function"
                    continue
                assert set(call) == {"index", "function"}, "id, type and name come once"
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def finish_of(parts: list[Any]) -> Any:
    return next(chunk["choices"][0]["finish_reason"] for chunk in reversed(parts) if chunk["choices"])


class TestTheModelSees:
    async def test_the_tools_and_the_calls_by_its_template(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        called = {
            "id": "a",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
        messages = [
            ASK,
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "rain"}]},
        ]
        text = await prompt_of(served, CHAT | {"messages": messages, "reasoning_effort": "high"})
        function = dict(WEATHER["function"])  # type: ignore[call-overload]
        function.pop("strict")

        head, shown = text.split("assistant:(Hm.)")
        assert json.dumps({"type": "function", "function": function}) in head
        assert '"name": "now", "description": "", "parameters": {"type": "object", "properties": {}' in head
        assert shown == (
            '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>\ntool:rain of weather\n'
            "assistant:high"
        )

    @pytest.mark.parametrize(
        ("fields", "shown"),
        [
            ({"reasoning_effort": "none"}, "none off off"),
            ({"reasoning_effort": "low"}, "low on on"),
            ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "low off on"),
            ({}, "None None None"),
        ],
    )
    async def test_an_effort_as_a_switch_of_its_template_too(
        self, serve_template: Any, fields: Any, shown: str
    ) -> None:
        switch = "{{ {true: 'on', false: 'off'}[%s] if %s is defined else none }}"
        variables = " ".join(switch % (name, name) for name in ("enable_thinking", "thinking"))
        served = await serve_template(f"{{{{ reasoning_effort or none }}}} {variables}")
        assert await prompt_of(served, CHAT | {"tools": None} | fields) == shown

    def test_what_transformers_renders(self) -> None:
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(Path(demo_target_dir()) / "tokenizer.json")
        )
        messages = [ASK, {"role": "tool", "tool_call_id": "a", "content": "Köln <b>"}]
        arguments = {"enable_thinking": False, "reasoning_effort": "low"}

        for tools in ([], [WEATHER, NOW]):
            rendered = ChatTemplate(QWEN, special_tokens={}).render(messages, tools, arguments)
            assert rendered == tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=QWEN,
                tokenize=False,
                add_generation_prompt=True,
                **arguments,
            )

    async def test_no_tools_that_it_must_not_call(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)

        assert "weather" not in await prompt_of(served, CHAT | {"tool_choice": "none"})

    async def test_tools_as_text_where_the_template_has_no_place_for_them(self, serve_template: Any) -> None:
        served = await serve_template(PLAIN)
        called = {"id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}
        text = await prompt_of(
            served,
            CHAT
            | {
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    ASK,
                    {"role": "assistant", "content": "", "tool_calls": [called, called | {"id": "b"}]},
                    {"role": "tool", "tool_call_id": "a", "content": "noon"},
                    {"role": "tool", "tool_call_id": "b", "content": "one"},
                ]
            },
        )

        assert text.startswith('system:Be brief.\n\nYou can call these functions:\n{"name": "weather"')
        assert 'answer with nothing but this:\n[{"name": NAME, "arguments": OBJECT}]\n' in text
        assert text.endswith(
            'assistant:[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]\n'
            "user:Result of now: noon\nResult of now: one\nassistant:"
        )

    @pytest.mark.parametrize(("parser", "form"), [("qwen3_coder", CODER_OSLO), ("glm45", GLM_OSLO)])
    async def test_the_form_that_a_setting_names(self, serve_template: Any, parser: str, form: str) -> None:
        served = await serve_template(PLAIN, parsers=(parser, "none"))
        called = {"role": "assistant", "tool_calls": [{"id": "a", "function": WEATHER_CALL}]}
        result = {"role": "tool", "tool_call_id": "a", "content": "rain"}
        prompt = await prompt_of(served, CHAT | {"messages": [ASK, called, result]})

        assert form in prompt
        assert form.replace("weather", "NAME").replace("city", "PARAMETER").replace("Oslo", "VALUE") in prompt

    @pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
    @pytest.mark.parametrize("arguments", ["not json", "[1]"])
    async def test_no_earlier_call_that_the_form_cannot_write(
        self, serve_template: Any, parser: str, arguments: str
    ) -> None:
        served = await serve_template(PLAIN, parsers=(parser, "none"))
        called = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
        body = CHAT | {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [called]}, ASK]}
        status, _, decoded = await served.post("/v1/chat/completions", body)

        assert (status, decoded["error"]["param"]) == (400, "messages")
        assert "the arguments of the earlier call of 'now' must be an object" in decoded["error"]["message"]

    async def test_variables_of_its_template(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        body = {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": False}}

        assert (await prompt_of(served, body)).endswith("<think>\n\n</think>\n\n")


async def prompt_of(served: Served, body: dict[str, Any]) -> str:
    call = asyncio.create_task(served.post("/v1/chat/completions", body))
    _, submit = await submitted(served)
    await served.finished("x")
    assert (await call)[0] == 200
    return served.running.model.decode(submit.specification.prompt_ids)


FAMILIES = {
    "hermes": (QWEN, (), f"I look.\n<tool_call>\n{OSLO}\n</tool_call>\n<tool_call>\n{{\"name\": \"now\"}}\n</tool_call>"),
    "hermes, special tokens": (
        QWEN,
        ("<tool_call>", "</tool_call>"),
        f"I look.<tool_call>{OSLO}</tool_call><tool_call>{{\"name\": \"now\"}}</tool_call>",
    ),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",), f'I look.[TOOL_CALLS][{OSLO}, {{"name": "now"}}]'),
    "llama": (LLAMA, ("<|python_tag|>",), f'I look.<|python_tag|>{LLAMA_OSLO}; {{"name": "now"}}'),
    "qwen coder": (CODER, (), f"I look.\n<tool_call>\n{CODER_OSLO}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    "glm": (GLM, (), f"I look.<tool_call>{GLM_OSLO}</tool_call><tool_call>now\n</tool_call>"),
    "glm, special tokens": (
        GLM,
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        f"I look.<tool_call>{GLM_OSLO}</tool_call><tool_call>now\n</tool_call>",
    ),
}  # fmt: skip
CALLED = [("weather", '{"city": "Oslo"}'), ("now", "{}")]


@pytest.mark.parametrize("family", FAMILIES)
class TestCallsOfEachFamily:
    async def test_are_read_in_a_whole_answer(self, serve_template: Any, family: str) -> None:
        template, special, output = FAMILIES[family]
        served = await serve_template(template, *special)
        (choice,) = (await answer(served, CHAT, output))["choices"]
        calls = choice["message"]["tool_calls"]

        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == CALLED
        assert all(call["type"] == "function" for call in calls)
        assert calls[0]["id"] != calls[1]["id"]

    async def test_are_read_in_a_stream(self, serve_template: Any, family: str) -> None:
        template, special, output = FAMILIES[family]
        served = await serve_template(template, *special)
        parts = await chunks(served, CHAT, output)
        message = put_together(parts)

        assert finish_of(parts) == "tool_calls"
        assert message["content"] == "I look."
        assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == CALLED
        pieces = [
            call["function"]["arguments"]
            for chunk in parts
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls", ())
        ]
        assert len([piece for piece in pieces if piece]) >= 3, "arguments come in pieces"

    @pytest.mark.parametrize("choice", ["required", "named"])
    async def test_are_written_where_they_are_required(
        self, serve_template: Any, family: str, choice: str
    ) -> None:
        """Text that the grammar of the worker accepts is read as calls."""
        template, special, _ = FAMILIES[family]
        served = await serve_template(template, *special)
        wanted = "required" if choice == "required" else {"type": "function", "function": {"name": "weather"}}
        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT | {"tool_choice": wanted}))
        request_id, submit = await submitted(served)
        model = served.running.model
        accepted = generated(submit.specification.output_format.grammar, model)
        served.scheduler.commit(request_id, accepted, Kind.KIND_STOP)
        _, _, decoded = await call
        (made,) = decoded["choices"]

        assert made["finish_reason"] == "tool_calls"
        assert made["message"]["content"] is None
        (first, *others) = made["message"]["tool_calls"]
        assert first["function"]["name"] == "weather"
        assert json.loads(first["function"]["arguments"]) == {"city": "Oslo"}
        assert len(others) == (0 if choice == "named" else 31)


def generated(grammar: str, model: ModelFiles) -> list[int]:
    """Return tokens that a grammar accepts: the first allowed token at each place that leads to calls of the weather
    in Oslo, as many as it allows."""
    tokenizer = LLTokenizer(model.tokenizer.to_str(), n_vocab=model.vocab_size, eos_token=list(model.eos_ids))
    matcher = matcher_of("grammar", grammar, tokenizer)
    tokens: list[int] = []
    while not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(model.vocab_size) if bits[token // 8] >> (token % 8) & 1]
        others = [token for token in allowed if token not in model.eos_ids]
        if not others:
            break
        best = max(others, key=lambda token: preference(model.decode([token])))
        tokens.append(best)
        assert matcher.try_consume_tokens([best]) == 1
        assert len(tokens) < 4000
    return tokens


def preference(text: str) -> tuple[bool, ...]:
    """Return which of several tokens is taken: the one to a call, to a further call, to "weather" or "Oslo", but no
    whitespace where something else is allowed."""
    return (text == "<tool_call>", bool(text.strip(" \n\r\t")), text[:1] in ",;wO<o", len(text) == 1)


class TestAnAnswerMayHave:
    async def test_no_calls_and_is_as_without_tools(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        (choice,) = (await answer(served, CHAT, " hello <world\n"))["choices"]

        assert choice["message"] == {"role": "assistant", "content": " hello <world\n"}
        assert choice["finish_reason"] == "stop"

    async def test_markup_as_content_where_calls_are_not_wanted(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        output = f"<tool_call>{OSLO}</tool_call>"
        (choice,) = (await answer(served, CHAT | {"tool_choice": "none"}, output))["choices"]

        assert choice["message"] == {"role": "assistant", "content": output}

    async def test_an_incomplete_call_which_ends_as_content(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        output = 'So:\n<tool_call>\n{"name": "weather", "arguments": {"ci'
        (choice,) = (await answer(served, CHAT, output, Kind.KIND_LENGTH))["choices"]

        assert choice["message"] == {"role": "assistant", "content": output}
        assert choice["finish_reason"] == "length"

    async def test_an_incomplete_call_in_a_stream(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        output = '<tool_call>\n{"name": "weather", "arguments": {"ci'
        parts = await chunks(served, CHAT, output, Kind.KIND_LENGTH)

        assert put_together(parts)["content"] == output
        assert put_together(parts)["tool_calls"][0]["arguments"] == '{"ci'
        assert finish_of(parts) == "length"

    async def test_one_call_where_more_are_not_wanted(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        output = f"<tool_call>{OSLO}</tool_call>\n" * 2
        parts = await chunks(served, CHAT | {"parallel_tool_calls": False}, output)

        assert len(put_together(parts)["tool_calls"]) == 1
        assert put_together(parts)["content"] == ""

    @pytest.mark.parametrize("stream", [False, True])
    async def test_nothing_of_an_incomplete_call_where_more_are_not_wanted(
        self, serve_template: Any, stream: bool
    ) -> None:
        served = await serve_template(QWEN)
        output = f"<tool_call>{OSLO}</tool_call>\n<tool_call>{OSLO[:-9]}"
        body = CHAT | {"parallel_tool_calls": False}
        if stream:
            message = put_together(await chunks(served, body, output, Kind.KIND_LENGTH))
        else:
            message = (await answer(served, body, output, Kind.KIND_LENGTH))["choices"][0]["message"]

        assert len(message["tool_calls"]) == 1
        assert not message["content"]

    async def test_one_call_where_the_template_refuses_more(self, serve_template: Any) -> None:
        served = await serve_template(LLAMA + "{# This model only supports single tool-calls at once! #}")
        (choice,) = (await answer(served, CHAT, f"{LLAMA_OSLO}; {LLAMA_OSLO}"))["choices"]

        assert len(choice["message"]["tool_calls"]) == 1

    async def test_the_same_calls_when_a_key_finds_it_again(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        headers = {"Idempotency-Key": "k"}
        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT, headers=headers))
        await served.finished(f"<tool_call>{OSLO}</tool_call>")
        (_, _, first), (_, _, again) = (
            await call,
            await served.post("/v1/chat/completions", CHAT, headers=headers),
        )

        assert again["choices"] == first["choices"]
        status, _, _ = await served.post("/v1/chat/completions", CHAT | {"tools": [NOW]}, headers=headers)
        assert status == 409

    async def test_a_format_or_calls(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"],
                  "additionalProperties": False}  # fmt: skip
        wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT | {"response_format": wanted}))
        _, submit = await submitted(served)
        await served.finished('{"sum": 7}')
        _, _, decoded = await call
        grammar = submit.specification.output_format.grammar

        assert decoded["choices"][0]["message"]["content"] == '{"sum": 7}'
        assert accepts(grammar, '{"sum": 7}')
        assert accepts(grammar, f"<tool_call>\n{OSLO}\n</tool_call>")
        assert not accepts(grammar, "hello")


def accepts(grammar: str, text: str) -> bool:
    matcher = matcher_of("grammar", grammar, BYTES)
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


async def stopping_at_a_marker(serve_template: Any, change: Any) -> tuple[Any, asyncio.Task[Any], Any]:
    """Return a server whose markers are special tokens, a call with one of them as a stop string, and its submission."""
    served = await serve_template("{{ messages[0].content }}{# [/THINK] #}", "[THINK]", "[/THINK]")
    call = asyncio.create_task(
        served.post("/v1/chat/completions", {"messages": [ASK], "stop": "[/THINK]"} | change)
    )
    _, submit = await submitted(served)
    return served, call, submit


class TestReasoning:
    async def test_is_not_content(self, serve_template: Any) -> None:
        served = await serve_template(QWEN + "{# </think> #}")
        decoded = await answer(served, {"messages": [ASK]}, "<think>\nhello\n</think>\n\nworld")
        (choice,) = decoded["choices"]
        tokens = served.running.model.encode_rendered("<think>\nhello\n</think>")

        assert choice["message"] == {
            "role": "assistant",
            "content": "world",
            "reasoning_content": "hello",
            "reasoning": "hello",
        }
        assert choice["finish_reason"] == "stop"
        assert decoded["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(tokens)}

    async def test_that_began_in_the_prompt_comes_before_calls_in_a_stream(self, serve_template: Any) -> None:
        served = await serve_template(R1)
        parts = await chunks(served, CHAT, f"hello\n</think>\n\nI look.\n<tool_call>{OSLO}</tool_call>")
        message = put_together(parts)

        assert (message["reasoning_content"], message["content"]) == ("hello", "I look.")
        assert message["tool_calls"][0]["arguments"] == '{"city": "Oslo"}'
        assert parts[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    async def test_that_the_template_has_ended_is_none(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        body = {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": False}}
        decoded = await answer(served, body, "<think>x</think>")

        assert decoded["choices"][0]["message"]["content"] == "<think>x</think>"
        assert decoded["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}

    async def test_is_left_out_on_request(self, serve_template: Any) -> None:
        served = await serve_template(R1)
        decoded = await answer(served, {"messages": [ASK], "include_reasoning": False}, "x</think>y")

        assert decoded["choices"][0]["message"] == {"role": "assistant", "content": "y"}

    async def test_comes_before_a_format(self, serve_template: Any) -> None:
        served = await serve_template(R1)
        body = {"messages": [ASK], "response_format": {"type": "json_object"}}
        call = asyncio.create_task(served.post("/v1/chat/completions", body))
        _, submit = await submitted(served)
        await served.finished('It is {"a": 2}?</think>{"a": 1}')
        _, _, decoded = await call

        assert decoded["choices"][0]["message"]["content"] == '{"a": 1}'
        assert accepts(submit.specification.output_format.grammar, 'It is {"a": 2}?</think>\n\n{"a": 1}')
        assert not accepts(submit.specification.output_format.grammar, '{"a": 1}')

    async def test_may_come_before_required_calls(self, serve_template: Any) -> None:
        served = await serve_template(QWEN)
        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT | {"tool_choice": "required"}))
        _, submit = await submitted(served)
        await served.finished("x")
        await call
        grammar, called = submit.specification.output_format.grammar, f"<tool_call>\n{OSLO}\n</tool_call>"

        assert accepts(grammar, called)
        assert accepts(grammar, f"<think>\nHm <tool_call>\n</think>\n\n{called}")
        assert not accepts(grammar, "<think>Hm</think>\n\nhello")

    async def test_with_markers_that_are_special_tokens(self, serve_template: Any) -> None:
        served = await serve_template("{{ messages[0].content }}{# [/THINK] #}", "[THINK]", "[/THINK]")
        decoded = await answer(served, {"messages": [ASK]}, "[THINK]hello[/THINK]world")

        assert decoded["choices"][0]["message"]["reasoning_content"] == "hello"
        assert decoded["choices"][0]["message"]["content"] == "world"

    @pytest.mark.parametrize(
        "change",
        [{}, {"include_stop_str_in_output": True}, {"stop": ["x", "[/THINK]"], "stop_token_ids": [7]}],
    )
    async def test_ends_the_output_with_a_marker_that_is_a_stop_string(
        self, serve_template: Any, change: Any
    ) -> None:
        """Workers find stop strings in text, and a special token has none there."""
        served, call, submit = await stopping_at_a_marker(serve_template, change)
        await served.finished("[THINK]hello[/THINK]")
        (choice,) = (await call)[2]["choices"]

        marker = served.running.model.tokenizer.token_to_id("[/THINK]")
        assert list(submit.specification.sampling.stop_token_ids) == [
            *change.get("stop_token_ids", ()),
            marker,
        ]
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("hello", "")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "[/THINK]")

    @pytest.mark.parametrize(
        "change", [{"min_tokens": 2}, {"skip_special_tokens": False}, {"stop": ["/THINK"]}]
    )
    async def test_ends_no_output_with_a_marker_where_a_worker_sees_it_or_another_rule_holds(
        self, serve_template: Any, change: Any
    ) -> None:
        served, call, submit = await stopping_at_a_marker(serve_template, change)
        await served.finished("x")
        await call

        assert not submit.specification.sampling.stop_token_ids

    async def test_is_content_where_it_is_not_read(self, serve_template: Any) -> None:
        served = await serve_template(R1, parsers=("auto", "none"))
        decoded = await answer(served, {"messages": [ASK]}, "x</think>y")

        assert decoded["choices"][0]["message"]["content"] == "x</think>y"
        assert "completion_tokens_details" not in decoded["usage"]


def deep(levels: int) -> dict[str, Any]:
    return {"properties": {"a": deep(levels - 1)}} if levels else {}


def calling(*arguments: str) -> dict[str, Any]:
    """Return a message with a call for each of the arguments."""
    calls = [{"function": {"name": "now", "arguments": text}} for text in arguments]
    return {"role": "assistant", "tool_calls": calls}


def tool(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | changes}]}


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"tools": 5}, "tools", "must be a list of tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object with a name"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type", "must be function"),
        (tool(name="f g"), "tools[0].function.name", "1 to 128 letters, digits, _ and -"),
        (tool(name="f" * 129), "tools[0].function.name", "1 to 128"),
        (tool(parameters=[]), "tools[0].function.parameters", "must be an object"),
        (tool(parameters={"type": "string"}), "tools[0].function.parameters", 'must be "object"'),
        (tool(parameters=deep(30)), "tools[0].function.parameters", f"at most {MAX_DEPTH} levels"),
        (tool(parameters={"title": "\ud800"}), "tools[0].function.parameters", "Unicode"),
        (tool(parameters={"title": "x" * 70_000}), "tools[0].function.parameters", "at most 65536 characters"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "must be given once"),
        ({"tools": [NOW] * (MAX_TOOLS + 1)}, "tools", f"must be at most {MAX_TOOLS}, got {MAX_TOOLS + 1}"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": []}, "tool_choice", "auto, none, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "must be an object with a name"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "one of the tools, got 'g'"),
        (tool(parameters={"pattern": "("}) | {"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "required call"),
        (
            tool(parameters={"properties": {"a": {"type": "string", "pattern": "("}}}) | {"tool_choice": "required"},
            "tools",
            "cannot be used",
        ),
        ({"guided_regex": "a"}, "guided_regex", "cannot be used together with tools"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "names of variables"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "the gateway sets it"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token", "the gateway sets it"),
        ({"chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs", "at most 16384 characters"),
        ({"messages": [ASK | {"role": "tool"}]}, "messages[0].tool_call_id", "given if the role is tool"),
        ({"messages": [ASK | {"tool_call_id": "a"}]}, "messages[0].tool_call_id", "absent unless the role is tool"),
        (
            {"messages": [ASK | {"tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
            "unless the role is assistant",
        ),
        (
            {"messages": [ASK, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": ""}}]}]},
            "messages[1].tool_calls[0].function.name",
            "1 to 128",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function", "a name"),
        ({"messages": [ASK, calling('"', "[" * 70_000)]}, "tools", "JSON of at most 65536 lists, objects and fields"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_field_and_the_limit(
    serve_template: Any, change: dict[str, Any], param: str, said: str
) -> None:
    served = await serve_template(QWEN)
    status, _, decoded = await served.post("/v1/chat/completions", CHAT | change)

    assert status == 400
    assert decoded["error"]["param"] == param
    assert said in decoded["error"]["message"]


EVERYTHING = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "Anything."},
        "kind": {"enum": ["a", "b c", 7]},
        "many": {"type": "array", "items": {"$ref": "#/$defs/Odd"}, "minItems": 1},
        "else": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["text", "kind"],
    "$defs": {"Odd": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
}


def coder_call(**arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


async def test_arguments_between_tags_follow_their_schemas(serve_template: Any) -> None:
    served = await serve_template(CODER)
    body = {"messages": [ASK], "tool_choice": "required"} | tool(parameters=EVERYTHING)
    call = asyncio.create_task(served.post("/v1/chat/completions", body))
    _, submit = await submitted(served)
    written = submit.specification.output_format.grammar
    output = coder_call(text='one\n<two> "3"', kind="b c", many='[{"n": 1}]')
    await served.finished(output)
    _, _, decoded = await call

    (made,) = decoded["choices"][0]["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {
        "text": 'one\n<two> "3"',
        "kind": "b c",
        "many": [{"n": 1}],
    }
    assert accepts(written, output)
    assert accepts(written, coder_call(text="", kind="7", **{"else": "x"}))
    for wrong in (
        coder_call(text="x"),
        coder_call(kind="a"),
        coder_call(text="x", kind="c"),
        coder_call(text="x", kind="a", many="[]"),
        coder_call(text="x", kind="a", many='[{"n": "1"}]'),
        coder_call(text="x", kind="a", more="1"),
    ):
        assert not accepts(written, wrong), wrong


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "pattern of 'a'"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}]}}}, "maxLength of 'a'"),
        ({"properties": {}, "anyOf": [{"required": ["a"]}]}, "anyOf next to properties"),
        ({"properties": {}, "required": ["a"]}, "required names 'a'"),
        ({"properties": {"a": {"$ref": "#/$defs/B"}}}, "the schema of 'a' refers to a definition"),
        (
            {
                "properties": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/B"}]}},
                "$defs": {"B": {"pattern": "x+"}},
            },
            "pattern of 'a'",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/B"}},
                "$defs": {"B": {"anyOf": [{"$ref": "#/$defs/B"}] * 300}},
            },
            "more than 256 alternatives of 'a'",
        ),
        (
            {
                "properties": {"a": {"type": "array"}, "b": {"type": "array"}},
                "$defs": {"B": {"title": "x" * 40_000}},
            },
            "as one format",
        ),
        ({"properties": {"a": {"type": "array", "minItems": -1}}}, "cannot be used"),
        ({"properties": 5}, "properties must be an object"),
    ],
)
async def test_arguments_that_cannot_be_written_between_tags_are_refused_where_they_are_required(
    serve_template: Any, parameters: dict[str, Any], said: str
) -> None:
    served = await serve_template(CODER)
    body = {"messages": [ASK], "tool_choice": "required"} | tool(parameters=parameters)
    status, _, decoded = await served.post("/v1/chat/completions", body)

    assert (status, decoded["error"]["param"]) == (400, "tools")
    assert said in decoded["error"]["message"]


async def test_tools_are_refused_where_calls_are_not_read(serve_template: Any) -> None:
    served = await serve_template(QWEN, parsers=("none", "auto"))
    status, _, decoded = await served.post("/v1/chat/completions", CHAT)

    assert (status, decoded["error"]["param"]) == (400, "tools")


async def test_over_grpc_the_calls_are_text_that_follows_their_schema(serve_template: Any) -> None:
    served = await serve_template(QWEN)
    chat = ChatMessages(
        messages=[ChatMessage(role="user", content="hello")],
        tools=[Tool(name="weather", parameters=json.dumps(WEATHER["function"]["parameters"]))],  # type: ignore[index]
        tool_choice=Choice(mode=Choice.MODE_REQUIRED, single=True),
    )
    call = asyncio.ensure_future(served.running.stub.Generate(GenerateRequest(messages=chat)))
    _, submit = await submitted(served)
    output = f"<tool_call>\n{OSLO}\n</tool_call>"
    await served.finished(output)

    assert (await call).text == output
    assert accepts(submit.specification.output_format.grammar, output)
    assert not accepts(submit.specification.output_format.grammar, output + "\n" + output)
