"""The token ids of a request's prompt: the chat template, and the tokenizer away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from gateway.model.tokenizer import THREAD_FROM_CHARACTERS, ModelFiles, TemplateRefused
from laps_sd.contract.length_features import FeatureHash
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import inference_pb2

__all__ = ["Prompts", "features_of"]

LONG_PROMPTS_AT_ONCE = 2
"""Maximum number of long prompts that are tokenized at the same time. Tokenizing a prompt of the largest size
takes some hundred MiB."""


SYSTEM_CHARACTERS = 1000
"""Characters of the instructions at the beginning of a chat by which they are recognised. Our choice."""


class Prompts:
    """Renders and tokenizes the prompts of one model."""

    def __init__(self, model: ModelFiles, features: FeatureHash | None) -> None:
        """Take the model's files, and the hash for features; None: no request has features."""
        self._model = model
        self._hash = features
        self._long_prompts = asyncio.Semaphore(LONG_PROMPTS_AT_ONCE)

    async def ids_of(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the token ids of a checked request's prompt. Raises InvalidArgument for messages that the
        chat template refuses."""
        match request.WhichOneof("prompt"):
            case "text":
                return await self._encode(request.text, rendered=False)
            case "messages":
                return await self._encode(self._render(request.messages), rendered=True)
            case _:
                return list(request.token_ids.ids)

    def features_of(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Return the features of a checked request; empty if predictions are off."""
        return [] if self._hash is None else features_of(request, self._hash)

    def _render(self, messages: inference_pb2.ChatMessages) -> str:
        """Return messages as the text that the model's chat template renders."""
        assert self._model.template is not None, "messages are refused without a template"
        plain = [{"role": message.role, "content": message.content} for message in messages.messages]
        try:
            return self._model.template.render(plain)
        except TemplateRefused as error:
            raise InvalidArgument("messages", f"do not fit the chat template: {error}") from error

    async def _encode(self, text: str, *, rendered: bool) -> list[int]:
        if len(text) < THREAD_FROM_CHARACTERS:
            return await self._model.encode_off_loop(text, rendered=rendered)
        async with self._long_prompts:
            return await self._model.encode_off_loop(text, rendered=rendered)


def features_of(request: inference_pb2.GenerateRequest, hashed: FeatureHash) -> list[int]:
    """Return hashed words of a checked request's prompt, for predicting the length of its output: of the last
    message of a chat. Empty for a prompt of token ids.
    """
    match request.WhichOneof("prompt"):
        case "text":
            return hashed.features_of(request.text, _marks(request))
        case "messages":
            return hashed.features_of(request.messages.messages[-1].content, _marks(request))
        case _:
            return []


def _marks(request: inference_pb2.GenerateRequest) -> Iterator[str]:
    """Yield what else in a request shows the length of its output, each as one word: its length limit by powers
    of 2, its format, how far a chat has got, and which instructions begin it.
    """
    if request.sampling.HasField("max_tokens"):
        yield f"most {request.sampling.max_tokens.bit_length()}"
    kind = request.output_format.WhichOneof("format")
    if kind is not None:
        yield f"format {kind}"
    messages = request.messages.messages
    if messages:
        yield f"messages {len(messages).bit_length()}"
        if messages[0].role == "system":
            yield "system " + messages[0].content[:SYSTEM_CHARACTERS]
