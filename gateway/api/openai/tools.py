"""The fields of a chat that are about tools, as typed models, and as the messages that all protocols share."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from gateway.api.openai.base import Model
from gateway.api.openai.field_errors import NAME, OBJECT, refused
from gateway.api.openai.field_types import AtMost, Text
from gateway.api.openai.values import kind_of, shown
from gateway.bounded_json import is_flat
from laps_sd.v1 import inference_pb2

__all__ = ["ChatToolCall", "Tool", "ToolChoice", "ToolFields", "set_tools", "switches", "tool_call_message"]

MAX_TOOLS, MAX_LEVELS = 4096, 64
"""Larger than the limits of `gateway.calls.tools`, which gets the same message from every protocol."""

Mode = inference_pb2.ToolChoice.Mode
MODES = {"auto": Mode.MODE_AUTO, "none": Mode.MODE_NONE, "required": Mode.MODE_REQUIRED}


def _function(value: object) -> object:
    if value != "function":
        raise refused(f"must be function, got {shown(value)}")
    return value


FunctionType = Annotated[Literal["function"], BeforeValidator(_function)]


def _check_levels(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what nests so deeply that it could not be written as JSON again."""
    if not is_flat(value, MAX_LEVELS):
        raise refused(f"must nest at most {MAX_LEVELS} levels")
    return value


Nested = Annotated[dict[str, Any], AfterValidator(_check_levels)]


class Function(Model):
    """A function that an answer may call. `strict` has no effect: required calls always follow their schema."""

    name: Text
    description: Text | None = None
    parameters: Nested | None = None
    strict: bool | None = None


class Tool(Model):
    """A tool of a request."""

    type: FunctionType
    function: Function


class NamedFunction(Model):
    """The function of a choice."""

    name: Text


class NamedTool(Model):
    """The choice of one tool."""

    type: FunctionType
    function: NamedFunction


def _mode(value: object) -> object:
    if not isinstance(value, str) or value not in MODES:
        raise refused(f"must be auto, none, required, or an object that names a function, got {shown(value)}")
    return value


def _kind_of_choice(value: object) -> str:
    return OBJECT if isinstance(value, dict) else NAME


ToolChoice = Annotated[
    Annotated[Literal["auto", "none", "required"], BeforeValidator(_mode), Tag(NAME)]
    | Annotated[NamedTool, Tag(OBJECT)],
    Discriminator(_kind_of_choice),
]


class CalledFunction(Model):
    """The function of a call, with its arguments as JSON."""

    name: Text
    arguments: Text | None = None


class ChatToolCall(Model):
    """A call in an earlier message of the assistant."""

    id: Text | None = None
    type: FunctionType | None = None
    function: CalledFunction


def _object_of_arguments(value: object) -> object:
    if not isinstance(value, dict):
        raise refused(f"must be an object, got {kind_of(value)}")
    return value


class ToolFields(Model):
    """The fields of a chat that are about tools and the chat template."""

    tools: Annotated[list[Tool], Field(fail_fast=True), AtMost(MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[Nested, BeforeValidator(_object_of_arguments)] | None = None
    reasoning_effort: Text | None = None
    include_reasoning: bool | None = None


def switches(thinks: bool) -> dict[str, bool]:
    """Return the variables by which chat templates switch the reasoning on and off, under the names that
    different models have for them."""
    return {"enable_thinking": thinks, "thinking": thinks}


def set_tools(chat: inference_pb2.ChatMessages, fields: ToolFields) -> None:
    """Set the tools, the choice among them and the template's variables of a chat."""
    for tool in fields.tools or ():
        function = tool.function
        chat.tools.add(
            name=function.name,
            description=function.description or "",
            parameters="" if function.parameters is None else _json(function.parameters),
        )
    choice = fields.tool_choice
    if isinstance(choice, NamedTool):
        chat.tool_choice.mode = Mode.MODE_REQUIRED
        chat.tool_choice.name = choice.function.name
    elif choice is not None and (chat.tools or choice == "required"):
        chat.tool_choice.mode = MODES[choice]
    if fields.parallel_tool_calls is False and chat.tools:
        chat.tool_choice.single = True
    arguments = dict(fields.chat_template_kwargs or {})
    if (effort := fields.reasoning_effort) is not None:
        arguments = {"reasoning_effort": effort, **switches(effort != "none"), **arguments}
    if arguments:
        chat.template_arguments = _json(arguments)


def _json(value: dict[str, Any]) -> str:
    """Return JSON that a message can hold. Strings that are not valid Unicode stay escaped, and are refused later."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def tool_call_message(call: ChatToolCall) -> inference_pb2.ToolCall:
    """Return an earlier call as a message."""
    return inference_pb2.ToolCall(
        id=call.id or "", name=call.function.name, arguments=call.function.arguments or ""
    )
