"""The body of a message as that of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from gateway.api.openai.base import Model
from gateway.api.openai.body import Json
from gateway.api.openai.field_errors import PARTS, TEXT, refused, validated
from gateway.api.openai.field_types import AtMost, Number, Positive, Text, TopK, kind_of_content
from gateway.api.openai.fields_of_chats import NAMES_OF_TOOLS, PASSED_ON, passed_on, renamed
from gateway.api.openai.limits import MAX_ITEMS
from gateway.api.openai.request import IGNORED_FIELDS, ParsedRequest, read_chat
from gateway.api.openai.tools import switches
from gateway.api.openai.unknown_fields import OnUnknown, Unsupported, check_fields
from gateway.bounded_json import encode
from gateway.model.instructions import joined
from laps_sd.errors import InvalidArgument

__all__ = ["CountBody", "MessagesBody", "read_count", "read_messages"]

UNSUPPORTED_FIELDS: Unsupported = {
    "container": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "thread": (),
}
REASONS = {"thread": "nothing is stored; send all messages"}
WITHOUT_EFFECT = ("cache_control", "diagnostics", "user_profile_id", "workspace_id")
"""Fields that change no answer."""
BILLING = "x-anthropic-billing-header:"
"""Beginning of a block of instructions by which Claude Code reports itself to Anthropic. It is no part of the
prompt: it differs in each request, so that nothing after it would be found in a cache."""

NAMES = (
    ("sampling.stop", "stop_sequences"),
    ("max_completion_tokens", "max_tokens"),
    ("messages.messages", "messages"),
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("stop", "stop_sequences"),
    *NAMES_OF_TOOLS,
    ("messages", "messages"),
)
"""Beginnings of names of fields of a chat, with those of this API."""


class TextBlock(Model):
    """Text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Model):
    """Earlier reasoning."""

    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Model):
    """Reasoning of another server, which cannot be read here."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Model):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


Texts = Annotated[
    Annotated[Text, Tag(TEXT)]
    | Annotated[list[TextBlock], Field(fail_fast=True), AtMost(MAX_ITEMS), Tag(PARTS)],
    Discriminator(kind_of_content),
]


class ToolResultBlock(Model):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts | None = None


KINDS = ("thinking", "redacted_thinking", "tool_use", "tool_result")


def _kind_of_block(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in KINDS else "<text>"


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(_kind_of_block),
]


class MessageParam(Model):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[Text, Tag(TEXT)]
        | Annotated[list[Block], Field(fail_fast=True), AtMost(MAX_ITEMS), Tag(PARTS)],
        Discriminator(kind_of_content),
    ]


class ClientTool(Model):
    """A tool of the client's own."""

    type: Literal["custom"] | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]


class Choice(Model):
    """The choice of the tools that an answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Model):
    """A switch for the reasoning. Its length is the model's choice."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(Model):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    effort: Text | None = None


def _clears_reasoning(kind: str) -> str:
    if not kind.startswith("clear_thinking_"):
        raise refused("is not supported: the messages are used as they are; leave it out")
    return kind


class Edit(Model):
    """An edit of the earlier messages. Which of their reasoning is kept is decided by the chat template."""

    type: Annotated[Text, AfterValidator(_clears_reasoning)]


class ContextManagement(Model):
    """Edits of the earlier messages."""

    edits: Annotated[list[Edit], Field(fail_fast=True), AtMost(MAX_ITEMS)] | None = None


class CountBody(Model):
    """The prompt of a message."""

    model: Text | None = None
    messages: Annotated[list[MessageParam], Field(fail_fast=True), AtMost(MAX_ITEMS)]
    system: Texts | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True), AtMost(MAX_ITEMS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesBody(CountBody):
    """The body of a message; besides these it has the extensions that chats have."""

    max_tokens: Positive
    stop_sequences: Annotated[list[Text], Field(fail_fast=True), AtMost(MAX_ITEMS)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: TopK | None = None
    stream: bool | None = None


def read_messages(body: Json, on_unknown: OnUnknown) -> ParsedRequest:
    """Return the chat that a body describes. Raises InvalidArgument."""
    read = validated(MessagesBody, body)
    _check_other_fields(body, MessagesBody, on_unknown)
    return _chat(
        read,
        passed_on(body)
        | {
            "max_completion_tokens": read.max_tokens,
            "stop": read.stop_sequences,
            "temperature": read.temperature,
            "top_p": read.top_p,
            "top_k": read.top_k,
            "stream": read.stream,
        },
    )


def read_count(body: Json, on_unknown: OnUnknown) -> ParsedRequest:
    """Return the chat whose prompt a body describes. Raises InvalidArgument."""
    read = validated(CountBody, body)
    _check_other_fields(body, CountBody, on_unknown)
    return _chat(read, passed_on(body))


def _chat(read: CountBody, others: Json) -> ParsedRequest:
    choice = read.tool_choice
    thinks = read.thinking is not None and read.thinking.type != "disabled"
    output = read.output_config or OutputConfig()
    messages = _alternating(_messages(read))
    chat: Json = {
        "model": read.model,
        "messages": messages,
        "continue_final_message": _is_begun(messages),
        "tools": [_tool(tool) for tool in read.tools or ()],
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "include_reasoning": thinks,
        "reasoning_effort": output.effort,
        "response_format": _format(output.format),
        **others,
    }
    if read.thinking is not None:
        given = others.get("chat_template_kwargs")
        if isinstance(given, dict | None):  # anything else is refused below
            chat["chat_template_kwargs"] = switches(thinks) | (given or {})
    schemas = [
        (f"{ours}.parameters", f"tools[{index}].input_schema")
        for index in range(len(read.tools or ()))
        for ours in (f"messages.tools[{index}]", f"tools[{index}].function")
    ]
    names = (*schemas, *NAMES)
    try:
        return replace(read_chat(chat), names=names)
    except InvalidArgument as error:
        raise renamed(error, names) from None


def _messages(read: CountBody) -> Iterator[Json]:
    """Yield the messages of a chat: results of calls are messages of their own."""
    if system := _instructions(read.system or ""):
        yield {"role": "system", "content": system}
    for message in read.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            continue
        texts, thoughts, calls = [], [], []
        for block in message.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": _arguments(block)}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif isinstance(block, ToolResultBlock):
                result = _text(block.content or "")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
        made: Json = {"role": message.role, "content": "".join(texts)}
        if thoughts:
            made["reasoning_content"] = "".join(thoughts)
        if calls:
            made["tool_calls"] = calls
        if texts or thoughts or calls:
            yield made


def _alternating(messages: Iterable[Json]) -> list[Json]:
    """Return the messages with consecutive turns of one side as one, as the API has it: many chat templates
    refuse turns that do not alternate. A blank line separates their texts (our choice)."""
    turns: list[Json] = []
    for message in messages:
        role = message["role"]
        if not turns or role not in ("user", "assistant") or turns[-1]["role"] != role:
            turns.append(message)
            continue
        before = turns[-1]
        for name in ("content", "reasoning_content"):
            if text := joined(before.get(name, ""), message.get(name, "")):
                before[name] = text
        if "tool_calls" in message:
            before["tool_calls"] = before.get("tool_calls", []) + message["tool_calls"]
    return turns


def _instructions(system: str | list[TextBlock]) -> str:
    if isinstance(system, str):
        return system
    return _text([block for block in system if not block.text.startswith(BILLING)])


def _is_begun(messages: list[Json]) -> bool:
    """Return whether the last message is the beginning of the answer, which the output continues."""
    last = messages[-1] if messages else {"role": ""}
    return last["role"] == "assistant" and "tool_calls" not in last and bool(last["content"].strip())


def _arguments(block: ToolUseBlock) -> str:
    try:
        return encode(block.input, ascii_only=False)
    except ValueError:
        raise InvalidArgument("messages", "must not nest this deeply in the input of a call") from None


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: ClientTool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: Choice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidArgument("tool_choice.name", "must be given where the type is tool")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(wanted: Json | None) -> Any:
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema":
        raise InvalidArgument("output_config.format.type", "must be json_schema")
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _check_other_fields(body: Json, model: type[Model], on_unknown: OnUnknown) -> None:
    known = {*model.model_fields, *IGNORED_FIELDS, *WITHOUT_EFFECT, *PASSED_ON}
    check_fields(body, known, UNSUPPORTED_FIELDS, on_unknown, REASONS)
