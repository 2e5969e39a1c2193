"""The OpenAI Agents SDK over chat completions: an agent that has to call its tool, whole and as a stream."""

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
        instructions="Answer questions about the weather.",
        tools=[weather],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=200, extra_body={"seed": 1}
        ),
    )

    # After the first call the SDK lets the model decide.
    result = await Runner.run(agent, "What is the weather in Oslo?", max_turns=4)
    check(result.new_items, result.final_output)
    stream = Runner.run_streamed(agent, "What is the weather in Oslo?", max_turns=4)
    async for _ in stream.stream_events():
        pass
    check(stream.new_items, stream.final_output)


def check(items: list[object], answer: object) -> None:
    outputs = [item.output for item in items if isinstance(item, ToolCallOutputItem)]
    assert len([item for item in items if isinstance(item, ToolCallItem)]) == len(outputs) >= 1, items
    assert all(str(output).startswith("rain in ") for output in outputs), items
    assert isinstance(answer, str) and answer, items


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
