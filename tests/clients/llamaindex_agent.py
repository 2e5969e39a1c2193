"""LlamaIndex: a call with tools, and an agent that runs them."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.clients.place import CITIES, City


def weather(city: City) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


async def main(url: str, model: str) -> None:
    llm = OpenAILike(
        model=model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=200,
        max_retries=0,
        temperature=0,
    )
    tool = FunctionTool.from_defaults(weather)

    answer = await llm.achat_with_tools([tool], user_msg="What is the weather?", tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and call.tool_kwargs["city"] in CITIES, answer

    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="You are a helpful assistant.")
    handler = agent.run("What is the weather in Oslo?")
    results = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
    assert "rain" in str(await handler)
    assert [str(result.tool_output) for result in results] == ["rain in Oslo"], results


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
