"""The messages, tools and template variables of a chat: made from plain objects, in the forms of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from laps_sd.v1.inference_pb2 import ChatMessage, ChatMessages, Tool, ToolCall, ToolChoice

__all__ = ["ChatOptions", "Fields", "make_chat"]

Fields: TypeAlias = Mapping[str, Any]
"""A message, a tool or a call as a plain object."""

MODES = {
    "auto": ToolChoice.MODE_AUTO,
    "none": ToolChoice.MODE_NONE,
    "required": ToolChoice.MODE_REQUIRED,
}


class ChatOptions(TypedDict, total=False):
    """Options of a prompt of chat messages; see `ChatMessages` for the meaning."""

    tools: Sequence[Fields]
    """Functions that the answer may call: `{"name": …, "description": …, "parameters": SCHEMA}`, or
    `{"type": "function", "function": …}` around that."""
    tool_choice: str
    """"auto", "none", "required", or the name of the tool to call."""
    parallel_tool_calls: bool
    """False: at most one call."""
    template_arguments: Mapping[str, Any]
    """Further variables of the chat template, as `{"enable_thinking": False}`."""
    add_generation_prompt: bool
    """False ends a chat's prompt after its last message."""
    continue_final_message: bool
    """The output continues the last message of a chat."""


def make_chat(messages: Sequence[Fields], options: ChatOptions) -> ChatMessages:
    """Return the messages with their options; other options are not read. Raises ValueError for a key without
    a meaning or a missing one, TypeError for content that is no text.
    """
    chat = ChatMessages(
        messages=map(_message, messages),
        tools=map(_tool, options.get("tools", ())),
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message", False),
    )
    if "tool_choice" in options:
        wanted = options["tool_choice"]
        chat.tool_choice.mode = MODES.get(wanted, ToolChoice.MODE_REQUIRED)
        chat.tool_choice.name = "" if wanted in MODES else wanted
    if not options.get("parallel_tool_calls", True):
        chat.tool_choice.single = True
    if "template_arguments" in options:
        chat.template_arguments = json.dumps(options["template_arguments"])
    return chat


def _message(message: Fields) -> ChatMessage:
    fields = _known(message, "message", "role", "content", "tool_calls", "tool_call_id", "reasoning")
    content = fields.get("content", "")  # None where OpenAI's API answers with calls
    if not isinstance(content, str):
        raise TypeError("the content of a message must be a text")
    return ChatMessage(
        role=fields["role"],
        content=content,
        tool_calls=map(_tool_call, fields.get("tool_calls", ())),
        tool_call_id=fields.get("tool_call_id", ""),
        reasoning=fields.get("reasoning", ""),
    )


def _tool(tool: Fields) -> Tool:
    fields = _known(_function_of(tool), "tool", "name", "description", "parameters")
    parameters = fields.get("parameters")
    return Tool(
        name=fields["name"],
        description=fields.get("description", ""),
        parameters="" if parameters is None else json.dumps(parameters),
    )


def _tool_call(call: Fields) -> ToolCall:
    fields = _known(_function_of(call), "call", "name", "arguments")
    arguments = fields.get("arguments", "")
    return ToolCall(
        id=call.get("id", ""),
        name=fields["name"],
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def _function_of(value: Fields) -> Fields:
    """Return the function inside OpenAI's form of a tool or a call, or the keys of the shorter form."""
    function: Fields = value.get("function", {name: value[name] for name in value if name != "id"})
    return function


def _known(value: Fields, what: str, *names: str) -> dict[str, Any]:
    """Return the keys that have a value. The first of the names is needed."""
    found = {name: one for name, one in value.items() if one is not None}
    if unknown := found.keys() - set(names):
        raise ValueError(
            f"a {what} has no {', '.join(sorted(map(repr, unknown)))}; its keys are {', '.join(names)}"
        )
    if names[0] not in found:
        raise ValueError(f"a {what} needs {names[0]!r}")
    return found
