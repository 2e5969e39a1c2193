"""The tools of a chat: their checks, and the forms in which chat templates and readers of calls take them. Pure.

Names of fields are paths from the request, as in `gateway.calls.validation`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from gateway.bounded_json import decode_text, is_few, is_flat
from gateway.model.dialect import Dialect
from gateway.model.files import ModelFiles
from gateway.settings import GatewaySettings
from laps_sd.contract.limits import MAX_FORMAT_CHARACTERS
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import inference_pb2

__all__ = [
    "MAX_ARGUMENT_CHARACTERS",
    "MAX_DEPTH",
    "MAX_TOOLS",
    "characters_of",
    "check_tools",
    "is_single",
    "offered_tools",
    "schemas_of",
    "template_tools",
]

MAX_TOOLS = 128
"""Most tools of a request, as in OpenAI's API."""
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Names of functions, as in Anthropic's API. OpenAI's has the same letters, and 64 of them."""
MAX_ID_CHARACTERS = 128
MAX_CALLS = 128
"""Most calls of one message."""
MAX_DEPTH = 48
"""Most levels of a tool's schema and of a template's variables: fewer than a format may have, which holds a schema in
levels of its own."""
MAX_ARGUMENT_CHARACTERS = 16_384
"""Most characters of the further variables of a chat template."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = inference_pb2.ToolChoice.Mode
Chat: TypeAlias = inference_pb2.ChatMessages


def offered_tools(chat: Chat) -> Sequence[inference_pb2.Tool]:
    """Return the tools that an answer may call."""
    return () if chat.tool_choice.mode == Mode.MODE_NONE else chat.tools


def schemas_of(chat: Chat) -> dict[str, dict[str, Any]]:
    """Return the names of the offered tools, each with the schema of its arguments."""
    return {tool.name: _parameters(tool) for tool in offered_tools(chat)}


def is_single(chat: Chat, dialect: Dialect) -> bool:
    """Return whether an answer has one call at most: because the request or the chat template has no place
    for more."""
    return chat.tool_choice.single or dialect.single_call


def characters_of(chat: Chat) -> int:
    """Return the number of characters of all texts of a chat that are rendered."""
    count = len(chat.template_arguments)
    count += sum(len(tool.name) + len(tool.description) + len(tool.parameters) for tool in chat.tools)
    for message in chat.messages:
        count += len(message.content) + len(message.reasoning) + len(message.tool_call_id)
        count += sum(len(call.id) + len(call.name) + len(call.arguments) for call in message.tool_calls)
    return count


def check_tools(request: inference_pb2.GenerateRequest, settings: GatewaySettings, model: ModelFiles) -> None:
    """Raise InvalidArgument unless the tools, the calls and the template's variables of a chat are in bounds."""
    chat = request.messages
    texts = list(_texts_of_json(chat))
    if not is_few(texts, settings.max_message_fields, settings.max_message_fields):
        raise InvalidArgument(
            "messages.tools",
            f"must be JSON of at most {settings.max_message_fields} lists, objects and fields of them, "
            "together with the calls of messages and the template's variables",
        )
    _check_messages(chat)
    _check_arguments(chat, model)
    if len(chat.tools) > MAX_TOOLS:
        raise InvalidArgument("messages.tools", f"must be at most {MAX_TOOLS}, got {len(chat.tools)}")
    names: set[str] = set()
    for index, tool in enumerate(chat.tools):
        field = f"messages.tools[{index}]"
        _check_name(f"{field}.name", tool.name)
        if tool.name in names:
            raise InvalidArgument(f"{field}.name", f"must be given once, got {tool.name!r} twice")
        names.add(tool.name)
        if tool.parameters:
            _check_schema(f"{field}.parameters", tool.parameters)
    if chat.tools and model.dialect.tools is None:
        raise InvalidArgument("messages.tools", "cannot be used: this gateway reads no calls of tools")
    _check_choice(request, names)


def _texts_of_json(chat: Chat) -> Iterator[str]:
    yield chat.template_arguments
    for tool in chat.tools:
        yield tool.parameters
    for message in chat.messages:
        for call in message.tool_calls:
            yield call.arguments


def _check_messages(chat: Chat) -> None:
    for index, message in enumerate(chat.messages):
        field = f"messages.messages[{index}]"
        for name, value in (("tool_calls", message.tool_calls), ("reasoning", message.reasoning)):
            if value and message.role != "assistant":
                raise InvalidArgument(f"{field}.{name}", "must be absent unless the role is assistant")
        if (message.role == "tool") != bool(message.tool_call_id):
            problem = (
                "given if the role is tool" if message.role == "tool" else "absent unless the role is tool"
            )
            raise InvalidArgument(f"{field}.tool_call_id", f"must be {problem}")
        _check_id(f"{field}.tool_call_id", message.tool_call_id)
        if len(message.tool_calls) > MAX_CALLS:
            raise InvalidArgument(
                f"{field}.tool_calls", f"must be at most {MAX_CALLS}, got {len(message.tool_calls)}"
            )
        for number, call in enumerate(message.tool_calls):
            _check_id(f"{field}.tool_calls[{number}].id", call.id)
            _check_name(f"{field}.tool_calls[{number}].name", call.name)


def _check_id(field: str, value: str) -> None:
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidArgument(field, f"must be at most {MAX_ID_CHARACTERS} characters, got {len(value)}")


def _check_name(field: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidArgument(field, f"must be 1 to 128 letters, digits, _ and -, got {name[:80]!r}")


def _check_arguments(chat: Chat, model: ModelFiles) -> None:
    text, field = chat.template_arguments, "messages.template_arguments"
    if len(text) > MAX_ARGUMENT_CHARACTERS:
        raise InvalidArgument(
            field, f"must be at most {MAX_ARGUMENT_CHARACTERS} characters as JSON, got {len(text)}"
        )
    assert model.template is not None, "messages are refused without a template"
    for name in _object(field, text):
        if not VARIABLE.fullmatch(name):
            raise InvalidArgument(field, f"must have names of variables, got {name[:80]!r}")
        if name in model.template.own_arguments:
            raise InvalidArgument(f"{field}.{name}", "must be absent: the gateway sets it")


def _check_schema(field: str, text: str) -> None:
    if len(text) > MAX_FORMAT_CHARACTERS:
        raise InvalidArgument(
            field, f"must be at most {MAX_FORMAT_CHARACTERS} characters as JSON, got {len(text)}"
        )
    schema = _object(field, text)
    if schema.get("type", "object") != "object":
        raise InvalidArgument(field, 'must be the schema of an object: its type must be "object"')


def _object(field: str, text: str) -> dict[str, Any]:
    """Return the object in a text of JSON; an empty text is an empty object."""
    if not text:
        return {}
    try:
        value = decode_text(text)
    except ValueError as error:
        raise InvalidArgument(field, f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(field, "must be a JSON object")
    if not is_flat(value, MAX_DEPTH):
        raise InvalidArgument(field, f"must nest at most {MAX_DEPTH} levels")
    return value


def _check_choice(request: inference_pb2.GenerateRequest, names: set[str]) -> None:
    chat, choice = request.messages, request.messages.tool_choice
    field = "messages.tool_choice"
    if choice.mode not in Mode.values():
        raise InvalidArgument(f"{field}.mode", f"must be a known mode, got {choice.mode}")
    if choice.name and choice.mode != Mode.MODE_REQUIRED:
        raise InvalidArgument(f"{field}.name", "needs MODE_REQUIRED")
    if choice.name and choice.name not in names:
        raise InvalidArgument(field, f"must name one of the tools, got {choice.name[:80]!r}")
    if choice.mode == Mode.MODE_REQUIRED and not names:
        raise InvalidArgument(field, "needs tools")
    kind = request.output_format.WhichOneof("format")
    if kind in ("regex", "grammar") and offered_tools(chat):
        raise InvalidArgument(f"output_format.{kind}", "cannot be used together with tools")
    if choice.mode == Mode.MODE_REQUIRED and request.sampling.ignore_eos:
        raise InvalidArgument(
            "sampling.ignore_eos",
            "must be absent or false with a required call, which ends with the end token",
        )


def template_tools(chat: Chat) -> list[dict[str, Any]]:
    """Return the offered tools in the form that chat templates read."""
    tools = []
    for tool in offered_tools(chat):
        # All keys are there, and in the order of OpenAI's pages: templates join the texts.
        function = {"name": tool.name, "description": tool.description, "parameters": _parameters(tool)}
        tools.append({"type": "function", "function": function})
    return tools


def _parameters(tool: inference_pb2.Tool) -> dict[str, Any]:
    return _object("messages.tools", tool.parameters) if tool.parameters else NO_PARAMETERS
