"""The token ids of a request's prompt: the chat template, and the tokenizer away from the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.bounded_json import decode_text, is_flat
from gateway.calls.tools import template_tools
from gateway.fair_turns import FairTurns
from gateway.model.chat_template import TemplateRefused
from gateway.model.continued import MARK, cut_at_mark
from gateway.model.files import ModelFiles
from laps_sd.contract.length_features import FeatureHash
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import inference_pb2

__all__ = ["Prompts", "features_of"]

LONG_PROMPTS_AT_ONCE = 2
"""Maximum number of long prompts that are tokenized at the same time. Tokenizing a prompt of the largest size
takes some hundred MiB."""
THREAD_FROM_CHARACTERS = 4096
"""Characters from which a prompt is tokenized in a thread, because the tokenizer releases the interpreter lock: a shorter one
is tokenized faster than it is passed to a thread."""
THREAD_FROM_MESSAGES = 128
"""Messages from which a chat is rendered in a thread: templates take up to 20 µs for each."""
MAX_WAITING_CHARACTERS = 64_000_000
"""Characters of the long prompts of one tenant that wait to be tokenized. Our choice: each takes about 3 bytes, or four times
that if it is not ASCII."""

MAX_DEPTH = 128
"""Most levels of the arguments of an earlier call that a template gets as an object."""
SYSTEM_CHARACTERS = 1000
"""Characters of the instructions at the beginning of a chat by which they are recognised. Our choice."""


class Prompts:
    """Renders and tokenizes the prompts of one model."""

    def __init__(self, model: ModelFiles, features: FeatureHash | None) -> None:
        """Take the model's files, and the hash for features; None: no request has features."""
        self._model = model
        self._hash = features
        self._long_prompts = FairTurns(
            LONG_PROMPTS_AT_ONCE, most_waiting=MAX_WAITING_CHARACTERS, what="long prompts"
        )

    async def rendered(self, request: inference_pb2.GenerateRequest, tenant: str) -> str:
        """Return the messages of a checked request as the chat template renders them; empty for another prompt.
        Raises InvalidArgument for messages that the template refuses. Tenants have long chats rendered in rotation."""
        if not request.HasField("messages"):
            return ""
        chat = request.messages
        if len(chat.messages) < THREAD_FROM_MESSAGES:
            return self._render(chat)
        return await self._long_prompts.run(tenant, lambda: self._render(chat), chat.ByteSize())

    async def ids_of(self, request: inference_pb2.GenerateRequest, rendered: str, tenant: str) -> list[int]:
        """Return the token ids of a checked request's prompt. Long prompts of tenants are tokenized in rotation."""
        match request.WhichOneof("prompt"):
            case "text":
                special = request.add_special_tokens or not request.HasField("add_special_tokens")
                return await self._encode(request.text, tenant, rendered=not special)
            case "messages":
                return await self._encode(rendered, tenant, rendered=not request.add_special_tokens)
            case _:
                return list(request.token_ids.ids)

    def features_of(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the features of a checked request; empty if predictions are off."""
        if self._hash is None:
            return []
        return features_of(request, self._hash, self._model.adapter_of(request.model))

    def _render(self, chat: inference_pb2.ChatMessages) -> str:
        assert self._model.template is not None, "messages are refused without a template"
        arguments = decode_text(chat.template_arguments) if chat.template_arguments else {}
        continues = chat.continue_final_message
        begins = chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
        messages = list(_messages_of(chat))
        if continues:
            messages[-1]["content"] += MARK
        try:
            text = self._model.template.render(
                messages,
                template_tools(chat),
                arguments,
                add_generation_prompt=begins and not continues,
            )
        except TemplateRefused as error:
            raise InvalidArgument("messages", f"do not fit the chat template: {error}") from error
        if not continues:
            return text
        cut = cut_at_mark(text, chat.messages[-1].content)
        if cut is None:
            raise InvalidArgument(
                "messages.continue_final_message",
                "cannot be used: the chat template changes the last message",
            )
        return cut

    async def _encode(self, text: str, tenant: str, *, rendered: bool) -> list[int]:
        encode = self._model.encode_rendered if rendered else self._model.encode_text
        if len(text) < THREAD_FROM_CHARACTERS:
            return encode(text)
        return await self._long_prompts.run(tenant, lambda: encode(text), len(text))


def _messages_of(chat: inference_pb2.ChatMessages) -> Iterator[dict[str, Any]]:
    """Yield messages in the form that chat templates read: that of OpenAI's API, but arguments are objects, and
    results have the names of their tools."""
    names: dict[str, str] = {}
    for message in chat.messages:
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call)},
                }
                for call in message.tool_calls
            ]
            names.update((call.id, call.name) for call in message.tool_calls)
        if message.tool_call_id:
            plain["tool_call_id"] = message.tool_call_id
            if name := names.get(message.tool_call_id):
                plain["name"] = name
        yield plain


def _arguments(call: inference_pb2.ToolCall) -> Any:
    """Return the arguments of an earlier call; those that are not an object, or nest so deeply that a template could
    fail over them, stay a text, as the model wrote them."""
    try:
        value = decode_text(call.arguments) if call.arguments else {}
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) and is_flat(value, MAX_DEPTH) else call.arguments


def features_of(request: inference_pb2.GenerateRequest, hashed: FeatureHash, adapter: str = "") -> list[int]:
    """Return hashed words of a checked request's prompt, for predicting the length of its output: of the last
    message of a chat. Empty for a prompt of token ids.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return hashed.features_of(request.text, _marks(request, adapter))
        case "messages":
            return hashed.features_of(request.messages.messages[-1].content, _marks(request, adapter))
        case _:
            return []


def _marks(request: inference_pb2.GenerateRequest, adapter: str) -> Iterator[str]:
    """Yield what else in a request shows the length of its output, each as one word: its adapter, its length limit by
    powers of 2, its format, whether it may call tools, how far a chat has got, and which instructions begin it.
    """
    if adapter:
        yield f"adapter {adapter}"
    if request.sampling.HasField("max_tokens"):
        yield f"most {request.sampling.max_tokens.bit_length()}"
    kind = request.output_format.WhichOneof("format")
    if kind is not None:
        yield f"format {kind}"
    messages = request.messages.messages
    if request.messages.tools:
        yield f"tools {request.messages.tool_choice.mode}"
    if messages:
        yield f"messages {len(messages).bit_length()}"
        if messages[0].role == "system":
            yield "system " + messages[0].content[:SYSTEM_CHARACTERS]
