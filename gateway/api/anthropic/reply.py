"""A message: its content blocks as they grow, as server-sent events or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator

from gateway.api.anthropic.errors import anthropic_error
from gateway.api.openai.answer import AnswerReader
from gateway.api.openai.body import Json
from gateway.api.openai.growing import GrowingReply
from gateway.api.openai.reply import COMPACT
from gateway.api.openai.request import ParsedRequest
from gateway.calls.generation import Generation
from gateway.model.files import ModelFiles
from laps_sd.errors import LapsSdError

__all__ = ["MessagesReply"]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(GrowingReply):
    """One message; see `StreamedReply`."""

    TEXT, REASONING, CALL = "text", "thinking", "tool_use"

    def __init__(
        self,
        parsed: ParsedRequest,
        generation: Generation,
        *,
        created_unix_s: int,
        model: ModelFiles,
    ) -> None:
        super().__init__(AnswerReader(parsed, generation, model))
        self._arguments: list[str] = []
        """Parts of the JSON of the call that grows."""

    # ---- as StreamedReply

    def opening(self) -> bytes:
        """Return the events before any output has arrived."""
        message = self._message(None) | {"usage": self._usage()}
        return _event("message_start", message=message) + _event("ping")

    def closing(self) -> bytes:
        """Return the events of the end."""
        events = b"".join(self._close())
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stop or None}
        return events + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def failure(self, error: LapsSdError) -> bytes:
        """Return the event of a failure."""
        return _event("error", error=anthropic_error(error)["error"])

    # ---- blocks

    def _begun(self, block: Json) -> bytes:
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._grows(kind):
            yield from self._close()
            yield from self._begin(
                {"type": "text", "text": ""}
                if kind == self.TEXT
                else {"type": "thinking", "thinking": "", "signature": ""}
            )
        self._blocks[-1][kind] += text
        yield self._delta(f"{kind}_delta", **{kind: text})

    def _call(self, call_id: str, name: str) -> Json:
        return {"type": "tool_use", "id": call_id, "name": name, "input": {}}

    def _add_arguments(self, text: str) -> bytes:
        self._arguments.append(text)
        return self._delta("input_json_delta", partial_json=text)

    def _close(self) -> Iterator[bytes]:
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == self.CALL:
            written, self._arguments = "".join(self._arguments), []
            block["input"] = _input(written)
        if block["type"] == self.REASONING:
            # Nothing checks it, but clients leave out earlier reasoning that has none.
            block["signature"] = self.id
            yield self._delta("signature_delta", signature=self.id)
        yield _event("content_block_stop", index=len(self._blocks) - 1)

    def _delta(self, kind: str, **fields: object) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, **fields})

    # ---- the message

    def _whole(self) -> Json:
        return self._message(self._stop_reason())

    def _stop_reason(self) -> str:
        return "stop_sequence" if self._answer.stop else STOP_REASONS[self._answer.finish_reason]

    def _message(self, stop_reason: str | None) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": list(self._blocks),
            "stop_reason": stop_reason,
            "stop_sequence": self._answer.stop or None,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """Return the usage; Anthropic's input tokens are those that no cache had."""
        cached = self._answer.cached_tokens
        return {
            "input_tokens": self._answer.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._answer.output_tokens,
        }


def _input(arguments: str) -> Json:
    """Return the arguments of a call as an object; empty for what is not one."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {COMPACT.encode({'type': kind, **fields})}\n\n".encode()
