"""The text before the output in an answer with `echo`."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.model.files import ModelFiles
from laps_sd.v1.inference_pb2 import GenerateRequest

__all__ = ["echo_of"]


def echo_of(request: GenerateRequest, prompt_ids: Sequence[int], model: ModelFiles) -> str:
    """Return the prompt of a completion; of a chat its last message if that is the assistant's."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "messages":
            last = request.messages.messages[-1]
            return last.content if last.role == "assistant" else ""
        case _:
            return model.decode([token for token in prompt_ids if token not in model.silent_ids])
