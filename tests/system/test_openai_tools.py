"""Tools by the official `openai` package, against a stack with the shipped model pair."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from gateway.model.files import load_model
from laps_sd.service.model_dir import demo_target_dir
from laps_sd.stack.local import LocalStack

MODEL = "laps-sd-demo"
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Weather(BaseModel):
    """Return the weather."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Search(BaseModel):
    """Find pages."""

    words: list[Literal["rain", "snow"]] = Field(min_length=1, max_length=2)


TOOLS: list[Any] = [
    openai.pydantic_function_tool(Weather, name="weather"),
    openai.pydantic_function_tool(Search, name="search"),
]
MODELS: dict[str, type[BaseModel]] = {"weather": Weather, "search": Search}


@pytest.fixture
def client(demo_stack: LocalStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo_stack.http_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_follow_the_schemas_of_their_tools(client: openai.OpenAI, seed: int) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []

    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.type == "function"
    MODELS[call.function.name].model_validate_json(call.function.arguments)


def test_a_named_tool_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=ASK,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "search"}},
        seed=1,
    )
    (call,) = completion.choices[0].message.tool_calls or []

    assert isinstance(call.function.parsed_arguments, Search)


def test_a_stream_has_the_call_of_the_whole_answer(client: openai.OpenAI) -> None:
    wanted: dict[str, Any] = {"messages": ASK, "tools": TOOLS, "tool_choice": "required", "seed": 4}
    whole = client.chat.completions.create(model=MODEL, **wanted)
    with client.chat.completions.stream(model=MODEL, **wanted) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()

    assert "tool_calls.function.arguments.delta" in kinds
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert calls_of(streamed) == calls_of(whole)


def calls_of(completion: Any) -> list[tuple[str, Any]]:
    calls = completion.choices[0].message.tool_calls
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_each_of_several_answers_has_calls_with_ids_of_their_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=3, seed=1
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({call.id for call in calls}) == len(calls) == 3


def test_a_conversation_continues_with_the_result_of_a_call(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1
    )
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It rains."}
    second = client.chat.completions.create(
        model=MODEL, messages=[*ASK, message, result], tools=TOOLS, tool_choice="none", max_tokens=20, seed=1
    )

    assert second.choices[0].message.content
    assert second.usage and first.usage
    assert second.usage.prompt_tokens > len(ASK)
    assert second.choices[0].message.tool_calls is None


QUESTIONS = {
    "What is the weather in Oslo?": [("weather", {"city": "Oslo"})],
    "What is the weather in Berlin and Rome?": [
        ("weather", {"city": "Berlin"}),
        ("weather", {"city": "Rome"}),
    ],
    "What is 17 * 23?": [("calculator", {"expression": "17 * 23"})],
    "Search for brave lions.": [("search", {"query": "brave lions"})],
    "Hello!": [],
}
"""Questions to the shipped model, which has learned to call tools, and the calls that they need."""


def plain_tool(name: str, description: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


OFFERED: list[Any] = [
    plain_tool("weather", "Return the weather of a city.", "city"),
    plain_tool("calculator", "Evaluate an expression.", "expression"),
    plain_tool("search", "Search the web.", "query"),
]


@pytest.mark.parametrize(("question", "calls"), QUESTIONS.items())
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_the_model_calls_the_tools_that_a_question_needs(
    client: openai.OpenAI, question: str, calls: list[tuple[str, Any]], streamed: bool
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "tools": OFFERED,
        "temperature": 0,
    }
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            answer: Any = stream.get_final_completion()
    else:
        answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices

    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert bool(choice.message.content) == (not calls)
    assert (calls_of(answer) if calls else []) == calls


def test_the_model_uses_the_result_of_its_call(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": OFFERED, "temperature": 0}
    called = client.chat.completions.create(messages=ASK, **asked).choices[0].message
    (call,) = called.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = client.chat.completions.create(messages=[*ASK, called, result], **asked)

    assert answer.choices[0].message.content == "The weather in Oslo: rain."


def test_tools_that_may_not_be_called_are_not_shown(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 40}
    hidden = client.chat.completions.create(tools=OFFERED, tool_choice="none", **asked)

    assert hidden.choices[0].message.tool_calls is None
    assert (
        hidden.choices[0].message.content
        == client.chat.completions.create(**asked).choices[0].message.content
    )


def test_calls_are_an_alternative_to_an_answer_of_a_format(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": OFFERED, "temperature": 0, "max_tokens": 100}
    asked |= {"response_format": {"type": "json_object"}}
    called = client.chat.completions.create(messages=ASK, **asked)
    begin = load_model(demo_target_dir(), name=MODEL).tokenizer.token_to_id("{")
    answered = client.chat.completions.create(messages=ASK, logit_bias={str(begin): 100}, **asked)

    assert calls_of(called) == QUESTIONS[ASK[0]["content"]]
    assert answered.choices[0].message.tool_calls is None
    assert (answered.choices[0].message.content or "").startswith("{")


def test_the_program_of_the_page_runs(demo_stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "tools.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    exec(program.replace("http://127.0.0.1:8000/v1", demo_stack.http_url), {})
    assert capsys.readouterr().out.splitlines() == ["weather {'city': 'Oslo'}", "The weather in Oslo: rain."]
