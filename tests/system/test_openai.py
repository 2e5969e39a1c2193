"""The official `openai` package, unchanged, against a whole stack."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from laps_sd.client import Client, OutputFormat
from laps_sd.stack.local import LocalStack

MODEL = "laps-sd-demo"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture
def client(fake_stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fake_stack.http_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_chat_is_the_one_that_grpc_gives(client: openai.OpenAI, fake_stack: LocalStack) -> None:
    with Client(fake_stack.gateway_address) as grpc_client:
        expected = grpc_client.generate(MESSAGES, max_tokens=20, seed=3)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, seed=3)  # type: ignore[arg-type]

    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.end.usage.completion_tokens
    assert answer.usage.prompt_tokens == expected.accepted.prompt_tokens


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=30, seed=4)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_completion_tokens=30,
        seed=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One", "Two"], n=2, max_tokens=5, seed=1)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(model=MODEL, prompt="Two", max_tokens=5, seed=1)
    assert answer.choices[2].text == again.choices[0].text


def test_a_stream_of_a_completion_that_is_closed_early(client: openai.OpenAI) -> None:
    with client.completions.create(model=MODEL, prompt="Once", max_tokens=400, stream=True) as stream:
        first = next(iter(stream))

    assert first.object == "text_completion"


async def test_the_asynchronous_client(fake_stack: LocalStack) -> None:
    async with openai.AsyncOpenAI(base_url=fake_stack.http_url, api_key="none", timeout=60) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, seed=9)  # type: ignore[arg-type]
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=12,
            seed=9,
            stream=True,  # type: ignore[arg-type]
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == whole.choices[0].message.content


def test_extensions_go_in_the_extra_body(client: openai.OpenAI, fake_stack: LocalStack) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=5,
        extra_body={"priority": 7, "workload_class": "chat"},  # type: ignore[arg-type]
    )
    with Client(fake_stack.gateway_address) as grpc_client:
        explanation = grpc_client.explain(answer.id)

    assert explanation.priority == 7
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_several_outputs_are_those_of_grpc(
    client: openai.OpenAI, fake_stack: LocalStack, stream: bool
) -> None:
    with Client(fake_stack.gateway_address) as grpc_client:
        first = grpc_client.generate(MESSAGES, n=3, max_tokens=15, seed=8)
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 3, "max_tokens": 15, "seed": 8}
    texts = ["", "", ""]
    if stream:
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        for choice in client.chat.completions.create(**asked).choices:
            texts[choice.index] += choice.message.content

    assert texts == [answer.text for answer in (first, *first.more)]
    assert len(set(texts)) == 3


def test_the_command_of_the_page_is_answered(fake_stack: LocalStack) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "openai.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ (curl .*)$", page.replace("\\\n", " "), re.MULTILINE)
    _, url, *options = shlex.split(line)
    given = dict(zip(options[::2], options[1::2], strict=True))
    asked = urllib.request.Request(
        url.replace("http://127.0.0.1:8000/v1", fake_stack.http_url),
        data=given["-d"].encode(),
        headers=dict([given["-H"].split(": ")]),
    )
    with urllib.request.urlopen(asked, timeout=60) as response:
        answer = json.load(response)

    assert answer["choices"][0]["message"]["content"]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_errors_of_the_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)  # type: ignore[arg-type]
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)  # type: ignore[arg-type]
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            tools=[{"type": "function", "function": {"name": "f g", "parameters": {}}}],
        )
    assert tools.value.param == "tools[0].function.name"
    assert refused.value.request_id is not None


class Address(BaseModel):
    street: str = Field(max_length=8)
    number: int | None = Field(le=99, ge=0)


class Person(BaseModel):
    """A model with common features of the package's users: choices, lists, unions, references."""

    name: str = Field(description="full name", max_length=8)
    mood: Literal["good", "bad"]
    homes: list[Address] = Field(max_length=2)
    best: Address | None


def test_a_model_of_pydantic_is_a_format(demo_stack: LocalStack) -> None:
    with openai.OpenAI(base_url=demo_stack.http_url, api_key="none", timeout=60) as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 300, "seed": 1}
        answer = client.chat.completions.parse(**asked, response_format=Person)
        with client.chat.completions.stream(**asked, response_format=Person) as stream:
            streamed = stream.get_final_completion()

    assert isinstance(answer.choices[0].message.parsed, Person)
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


def test_a_stop_text_ends_an_answer(demo_stack: LocalStack) -> None:
    with openai.OpenAI(base_url=demo_stack.http_url, api_key="none", timeout=60) as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 20, "seed": 2}
        whole = client.completions.create(**asked).choices[0].text
        stop = whole[len(whole) // 2 :][:3]
        answer = client.completions.create(**asked, stop=[stop, "not in there"])

    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 20


def test_log_probabilities_of_a_completion(demo_stack: LocalStack) -> None:
    with openai.OpenAI(base_url=demo_stack.http_url, api_key="none", timeout=60) as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon", "max_tokens": 12, "temperature": 0}
        choice = client.completions.create(**asked, logprobs=2).choices[0]
        told = choice.logprobs
        streamed = [
            chunk.choices[0].logprobs for chunk in client.completions.create(**asked, logprobs=2, stream=True)
        ]

    assert told is not None and told.tokens is not None and told.text_offset is not None
    assert "".join(told.tokens).startswith(choice.text)
    assert all(
        choice.text[at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True)
    )
    assert told.token_logprobs == [max(top.values()) for top in told.top_logprobs or []], "greedy"
    assert [token for one in streamed if one for token in one.tokens or []] == told.tokens


def test_output_formats_and_log_probabilities_with_the_shipped_pair(demo_stack: LocalStack) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "maximum": 99},
        },
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    with openai.OpenAI(base_url=demo_stack.http_url, api_key="none", timeout=60) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=100,
            temperature=0.7,
            seed=1,
            frequency_penalty=0.3,
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
        )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    value = json.loads(choice.message.content or "")
    assert set(value) == {"city", "people"} and len(value["city"]) <= 12 and value["people"] <= 99
    assert choice.logprobs is not None and choice.logprobs.content
    assert {len(one.top_logprobs) for one in choice.logprobs.content} == {2}
    assert all(one.logprob <= one.top_logprobs[0].logprob <= 0 for one in choice.logprobs.content)
    with Client(demo_stack.gateway_address) as grpc_client:
        plain, drafted, looked_up = (
            grpc_client.generate(
                "A colour: ",
                max_tokens=20,
                seed=5,
                output_format=OutputFormat(regex="(red|green|blue)!"),
                **how,
            )  # type: ignore[arg-type]
            for how in ({"speculation": "off"}, {}, {"drafter": "lookup"})
        )
    assert plain.text in ("red!", "green!", "blue!")
    assert plain.text == drafted.text == looked_up.text
