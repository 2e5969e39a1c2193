"""Bodies and answers of `/tokenize` and `/detokenize`, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gateway.api.openai.base import Model
from gateway.api.openai.body import Json
from gateway.api.openai.field_errors import validated
from gateway.api.openai.field_types import AtMost, ListedIds, Text
from gateway.api.openai.limits import MAX_ITEMS
from gateway.api.openai.models import Message
from gateway.api.openai.request import put_messages
from gateway.api.openai.tools import ToolFields, set_tools
from gateway.api.openai.unknown_fields import OnUnknown, Unsupported, check_fields
from gateway.model.files import ModelFiles
from laps_sd.errors import InvalidArgument
from laps_sd.v1.inference_pb2 import GenerateRequest

__all__ = ["DetokenizeBody", "TokenizeBody", "read_detokenize", "read_tokenize", "tokens_json"]

UNSUPPORTED_FIELDS: Unsupported = {
    "chat_template": ("",),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Fields of vLLM that make other prompts than those served here."""


class TokenizeBody(ToolFields):
    """The body of `/tokenize`: a prompt, or the messages of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True), AtMost(MAX_ITEMS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Model):
    """The body of `/detokenize`."""

    model: Text | None = None
    tokens: ListedIds


def read_tokenize(body: Json, on_unknown: OnUnknown) -> tuple[GenerateRequest, bool]:
    """Return the prompt as a request, and whether the answer has the tokens' texts. Raises
    InvalidArgument."""
    read = validated(TokenizeBody, body)
    if (read.prompt is None) == (read.messages is None):
        raise InvalidArgument("prompt", "must be given, or messages, and not both")
    check_fields(body, TokenizeBody.model_fields, UNSUPPORTED_FIELDS, on_unknown)
    request = GenerateRequest(model=read.model or "", add_special_tokens=read.add_special_tokens)
    if read.messages is None:
        request.text = read.prompt or ""
    else:
        put_messages(request, read.messages, read.add_generation_prompt, read.continue_final_message)
        set_tools(request.messages, read)
    return request, bool(read.return_token_strs)


def read_detokenize(body: Json, on_unknown: OnUnknown) -> DetokenizeBody:
    """Return the body of `/detokenize`. Raises InvalidArgument."""
    read = validated(DetokenizeBody, body)
    check_fields(body, DetokenizeBody.model_fields, UNSUPPORTED_FIELDS, on_unknown)
    return read


def tokens_json(ids: Sequence[int], model: ModelFiles, *, with_texts: bool) -> Json:
    """Return the answer of `/tokenize`; `token_strs` are entries of the vocabulary."""
    return {
        "count": len(ids),
        "max_model_len": model.context_tokens,
        "tokens": list(ids),
        "token_strs": [model.tokenizer.id_to_token(token) for token in ids] if with_texts else None,
    }
