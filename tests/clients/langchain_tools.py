"""LangChain: a model with bound tools, a call that is run by hand, a stream, and structured output."""

from __future__ import annotations

import sys

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.place import CITIES, City


@tool
def weather(city: City) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


class Person(BaseModel):
    """A person."""

    city: City
    age: int = Field(ge=0, le=99)


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=200, seed=1, max_retries=0)
    question = HumanMessage("What is the weather in Oslo?")
    forced = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)

    called = forced.invoke([question])
    (call,) = called.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in CITIES, called
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = chat.bind_tools([weather], tool_choice="none").invoke([question, called, result])
    assert answer.content and not answer.tool_calls, answer

    whole: AIMessageChunk | None = None
    for chunk in forced.stream([question]):
        whole = chunk if whole is None else whole + chunk  # type: ignore[assignment]
    assert whole is not None and whole.tool_calls[0]["args"] == call["args"], whole

    greedy = ChatOpenAI(
        base_url=url, api_key="none", model=model, max_tokens=200, temperature=0, max_retries=0
    )
    chosen = greedy.bind_tools([weather]).invoke([question])
    assert [(each["name"], each["args"]) for each in chosen.tool_calls] == [("weather", {"city": "Oslo"})], (
        chosen
    )

    person = chat.with_structured_output(Person, method="function_calling").invoke([question])
    assert isinstance(person, Person), person
    person = chat.with_structured_output(Person, method="json_schema").invoke([question])
    assert isinstance(person, Person), person


if __name__ == "__main__":
    main(*sys.argv[1:])
