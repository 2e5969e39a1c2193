"""The bodies that clients send, as typed models. `null` is an absent field everywhere.

`request` refuses fields of a body that are not here and would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from google.protobuf.descriptor import FieldDescriptor
from pydantic import Discriminator, Field, Tag, create_model, model_validator

from gateway.api.openai.base import Model
from gateway.api.openai.field_errors import FORMAT, PARTS, SCHEMA, TEXT
from gateway.api.openai.field_types import (
    AtMost,
    Biases,
    Count,
    JsonSchema,
    ListedIds,
    ListsOfIds,
    Logprobs,
    Number,
    Positive,
    Priority,
    Prompt,
    Seed,
    Stop,
    Text,
    TopK,
    UnixMs,
    Unsupported,
    kind_of_content,
    text_of_refusal,
)
from gateway.api.openai.limits import MAX_ITEMS
from gateway.api.openai.structured_outputs import Choices, StructuredOutputs
from gateway.api.openai.tools import ChatToolCall, ToolFields
from laps_sd.v1.inference_pb2 import SamplingParams

__all__ = [
    "SAMPLING_FIELDS",
    "Body",
    "ChatBody",
    "CompletionBody",
    "Message",
    "ResponseFormat",
    "SchemaFormat",
    "StreamOptions",
]


class TextPart(Model):
    """A part of a message's content."""

    type: Literal["text"]
    text: Text

    _of_refusal = model_validator(mode="before")(text_of_refusal)


Content = Annotated[
    Annotated[Text, Tag(TEXT)]
    | Annotated[list[TextPart], Field(fail_fast=True), AtMost(MAX_ITEMS), Tag(PARTS)],
    Discriminator(kind_of_content),
]


class Message(Model):
    """A message of a chat."""

    function_call: Unsupported = None
    audio: Unsupported = None
    role: Text
    content: Content | None = None
    tool_calls: Annotated[list[ChatToolCall], Field(fail_fast=True), AtMost(MAX_ITEMS)] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None
    """The text of an assistant that refused, in place of content."""
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    """vLLM's name of `reasoning_content`."""


class NamedSchema(Model):
    """A JSON schema. It is always followed strictly."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class SchemaFormat(Model):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class PlainFormat(Model):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


def _kind_of_format(value: object) -> str:
    return SCHEMA if isinstance(value, dict) and value.get("type") == "json_schema" else FORMAT


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag(FORMAT)] | Annotated[SchemaFormat, Tag(SCHEMA)], Discriminator(_kind_of_format)
]


class StreamOptions(Model):
    """Content of a stream besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI pads its events against listeners; here it has no effect."""


SAMPLING_TYPES: Mapping[str, Any] = {
    "allowed_token_ids": ListedIds,
    "bad_words": Stop,
    "bad_words_ids": ListsOfIds,
    "logit_bias": Biases,
    "max_tokens": Positive,
    "seed": Seed,
    "stop": Stop,
    "stop_token_ids": ListedIds,
    "top_k": TopK,
}
"""Types of sampling parameters that are not simply those of their field in `SamplingParams`."""
TYPES: Mapping[int, Any] = {
    FieldDescriptor.CPPTYPE_BOOL: bool,
    FieldDescriptor.CPPTYPE_FLOAT: Number,
    FieldDescriptor.CPPTYPE_UINT32: Count,
}
SAMPLING_FIELDS = tuple(SamplingParams.DESCRIPTOR.fields_by_name)
"""The sampling parameters, which have the same names in bodies and in the message."""

if TYPE_CHECKING:

    class SamplingFields(Model):
        """The sampling parameters: an attribute for each of `SAMPLING_FIELDS`."""

else:
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Model,
        **{
            name: (SAMPLING_TYPES.get(name, TYPES.get(field.cpp_type)) | None, None)
            for name, field in SamplingParams.DESCRIPTOR.fields_by_name.items()
        },
    )


class Body(SamplingFields):
    """The fields of both endpoints."""

    model: Text | None = None
    priority: Priority | None = None
    time_limit_ms: Count | None = None
    deadline_unix_ms: UnixMs | None = None
    expected_output_tokens: Count | None = None
    workload_class: Text | None = None
    conversation: Text | None = None
    cache_salt: Text | None = None
    n: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(Body, ToolFields):
    """The body of a chat completion."""

    top_logprobs: Count | None = None
    logprobs: bool | None = None
    max_completion_tokens: Positive | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    messages: Annotated[list[Message], Field(fail_fast=True), AtMost(MAX_ITEMS)]


class CompletionBody(Body):
    """The body of a completion of texts or token ids."""

    logprobs: Logprobs = None
    # 0 with `echo`: the prompt alone.
    max_tokens: Count | None = None
    prompt: Prompt
