"""The body of a response as that of a chat.

Nothing is stored here: `store: true`, `previous_response_id` and their like are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.api.openai.base import Model
from gateway.api.openai.body import Json
from gateway.api.openai.field_errors import ITEM, PARTS, TEXT, validated
from gateway.api.openai.field_types import AtMost, Number, Positive, Text, kind_of_content, text_of_refusal
from gateway.api.openai.fields_of_chats import NAMES_OF_TOOLS, PASSED_ON, passed_on, renamed
from gateway.api.openai.limits import MAX_ITEMS
from gateway.api.openai.request import CONVERSATION_FIELDS, IGNORED_FIELDS, ParsedRequest, read_chat
from gateway.api.openai.responses.tools import ToolsOfResponse, name_in_chat, read_tools
from gateway.api.openai.unknown_fields import OnUnknown, Unsupported, check_fields
from gateway.api.openai.values import check_text, shown
from gateway.bounded_json import encode, is_flat
from laps_sd.errors import InvalidArgument

__all__ = ["ResponsesBody", "read_responses"]

UNSUPPORTED_FIELDS: Unsupported = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
REASONS = {
    "background": "a response is made while its call is open",
    "conversation": "nothing is stored; send the earlier items as input",
    "previous_response_id": "nothing is stored; send the earlier items as input",
    "store": "nothing is stored",
    "top_logprobs": "chats and completions have log probabilities",
    "truncation": "a prompt is never cut",
}
MAX_LEVELS = 256
"""Levels of a field that the answer repeats: more than schemas have, and far from what JSON cannot be written with."""
WITHOUT_EFFECT = ("reasoning.encrypted_content",)
"""Values of `include` for content that answers here do not have."""

NAMES = (
    ("sampling.max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages.messages", "input"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    *NAMES_OF_TOOLS,
    ("messages", "input"),
)
"""Beginnings of names of fields of a chat, with those of a response."""


class Part(Model):
    """A part of an item's content."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text

    _of_refusal = model_validator(mode="before")(text_of_refusal)


Content = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[list[Part], Field(fail_fast=True), AtMost(MAX_ITEMS), Tag(PARTS)],
    Discriminator(kind_of_content),
]


class MessageItem(Model):
    """A message."""

    type: Literal["message"] | None = None
    role: Text
    content: Content


class FunctionCall(Model):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    namespace: Text | None = None
    arguments: Text


class FunctionOutput(Model):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningItem(Model):
    """Earlier reasoning."""

    type: Literal["reasoning"]
    content: Annotated[list[Part], Field(fail_fast=True), AtMost(MAX_ITEMS)] | None = None


def _kind_of_item(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("function_call", "function_call_output", "reasoning") else ITEM


Item = Annotated[
    Annotated[MessageItem, Tag(ITEM)]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_kind_of_item),
]
Input = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[list[Item], Field(fail_fast=True), AtMost(MAX_ITEMS), Tag(PARTS)],
    Discriminator(kind_of_content),
]


class ReasoningOptions(Model):
    """How the model reasons."""

    effort: Text | None = None


class TextOptions(Model):
    """The form of the text."""

    format: dict[str, Any] | None = None


class ResponsesBody(Model):
    """The body of a response; besides these it has the extensions that chats have."""

    model: Text | None = None
    input: Input
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Text] | None = None


def read_responses(body: Json, on_unknown: OnUnknown) -> tuple[ParsedRequest, ToolsOfResponse, Json]:
    """Return the chat that a body describes, its tools, and the fields that the answer repeats. Raises
    InvalidArgument."""
    read = validated(ResponsesBody, body)
    _check_other_fields(body, read, on_unknown)
    tools = read_tools(read.tools or (), on_unknown)
    chat: Json = {
        "model": read.model,
        "messages": list(_messages(read)),
        "max_completion_tokens": read.max_output_tokens,
        "temperature": read.temperature,
        "top_p": read.top_p,
        "stream": read.stream,
        "tools": tools.functions,
        "tool_choice": _tool_choice(read.tool_choice),
        "parallel_tool_calls": read.parallel_tool_calls,
        "reasoning_effort": None if read.reasoning is None else read.reasoning.effort,
        "response_format": _format(read),
        **passed_on(body),
        **{name: body[name] for name in CONVERSATION_FIELDS if name in body},
    }
    names = (*tools.names, *NAMES)
    try:
        parsed = read_chat(chat)
    except InvalidArgument as error:
        raise renamed(error, names) from None
    return replace(parsed, names=names), tools, _repeated(read, body)


def _messages(read: ResponsesBody) -> Iterator[Json]:
    """Yield the messages of a chat: calls that follow each other, or their message, are one message."""
    if read.instructions:
        yield {"role": "system", "content": read.instructions}
    if isinstance(read.input, str):
        yield {"role": "user", "content": read.input}
        return
    assistant: Json = {}
    for item in read.input:
        if isinstance(item, ReasoningItem):
            if assistant.keys() - {"role", "reasoning_content"}:
                yield assistant
                assistant = {}
            assistant |= {"role": "assistant", "reasoning_content": _text(item.content or [])}
        elif isinstance(item, MessageItem) and item.role == "assistant":
            if assistant.keys() - {"role", "reasoning_content"}:
                yield assistant
                assistant = {}
            assistant |= {"role": "assistant", "content": _text(item.content)}
        elif isinstance(item, FunctionCall):
            assistant.setdefault("role", "assistant")
            function = {"name": name_in_chat(item.name, item.namespace), "arguments": item.arguments}
            assistant.setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
        else:
            if assistant:
                yield assistant
                assistant = {}
            if isinstance(item, FunctionOutput):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            else:
                yield {"role": item.role, "content": _text(item.content)}
    if assistant:
        yield assistant


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = name_in_chat(choice.get("name"), choice.get("namespace"))
        return {"type": "function", "function": {"name": name}}
    return choice


def _format(read: ResponsesBody) -> Any:
    wanted = None if read.text is None else read.text.format
    if wanted is not None and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
    return wanted


def _check_other_fields(body: Json, read: ResponsesBody, on_unknown: OnUnknown) -> None:
    for index, name in enumerate(read.include or ()):
        if name not in WITHOUT_EFFECT:
            raise InvalidArgument(f"include[{index}]", f"is not supported here: {shown(name)}; leave it out")
    known = {
        *ResponsesBody.model_fields,
        *IGNORED_FIELDS,
        *CONVERSATION_FIELDS,
        *PASSED_ON,
        "client_metadata",
    }
    check_fields(body, known, UNSUPPORTED_FIELDS, on_unknown, REASONS)


def _repeated(read: ResponsesBody, body: Json) -> Json:
    """Return the fields that the answer repeats. Raises InvalidArgument for one that could not be written there."""
    repeated: Json = {
        "instructions": read.instructions,
        "max_output_tokens": read.max_output_tokens,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": read.parallel_tool_calls is not False,
        "temperature": read.temperature,
        "top_p": read.top_p,
        "tool_choice": read.tool_choice or "auto",
        "tools": read.tools or [],
        "text": {"format": (None if read.text is None else read.text.format) or {"type": "text"}},
        "reasoning": {"effort": None if read.reasoning is None else read.reasoning.effort, "summary": None},
    }
    for key, value in repeated.items():
        name = "text.format" if key == "text" else key
        if not is_flat(value, MAX_LEVELS):
            raise InvalidArgument(name, f"must nest at most {MAX_LEVELS} levels")
        check_text(name, encode(value, ascii_only=False))
    return repeated
