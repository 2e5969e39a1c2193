"""The OpenAI Agents SDK over chat completions: an agent that calls its tool by its own choice, whole and as a stream."""

from __future__ import annotations

import asyncio
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    ToolCallItem,
    ToolCallOutputItem,
    function_tool,
    set_tracing_disabled,
)

from tests.clients.place import City


@function_tool
def weather(city: City) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def main(url: str, model: str) -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    agent = Agent(
        name="Weatherman",
        instructions="You are a helpful assistant.",
        tools=[weather],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=ModelSettings(temperature=0, max_tokens=200),
    )

    result = await Runner.run(agent, "What is the weather in Oslo?", max_turns=4)
    check(result.new_items, result.final_output)
    stream = Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=4)
    async for _ in stream.stream_events():
        pass
    check(stream.new_items, stream.final_output)


def check(items: list[object], answer: object) -> None:
    outputs = [item.output for item in items if isinstance(item, ToolCallOutputItem)]
    assert len([item for item in items if isinstance(item, ToolCallItem)]) == len(outputs) >= 1, items
    assert outputs == ["rain in Oslo"], items
    assert isinstance(answer, str) and "rain" in answer, items


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
