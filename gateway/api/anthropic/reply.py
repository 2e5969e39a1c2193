"""A message: its content blocks as they grow, as server-sent events or whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from gateway.api.anthropic.errors import anthropic_error
from gateway.api.openai.answer import AnswerReader
from gateway.api.openai.body import Json
from gateway.api.openai.reply import COMPACT
from gateway.api.openai.request import ParsedRequest
from gateway.calls.output import Piece
from gateway.model.reasoning import State
from gateway.model.tokenizer import ModelFiles
from laps_sd.errors import LapsSdError
from laps_sd.v1 import inference_pb2

__all__ = ["MessagesReply"]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply:
    """One message; see `StreamedReply`."""

    def __init__(
        self,
        parsed: ParsedRequest,
        accepted: Sequence[inference_pb2.Accepted],
        *,
        created_unix_s: int,
        model: ModelFiles,
        states: Sequence[State | None] = (),
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._answer = AnswerReader(parsed, accepted, model, states)
        self._content: list[Json] = []
        self._arguments: list[str] = []
        """Parts of the JSON of the call that grows."""
        self._open = False
        """The last block grows."""
        self.id = self._answer.id

    # ---- as StreamedReply

    def opening(self) -> bytes:
        """Return the events before any output has arrived."""
        message = self._message(None) | {"usage": self._usage()}
        return _event("message_start", message=message) + _event("ping")

    def events(self, choice: int, piece: Piece) -> bytes:
        """Return the events of a piece, and add it. Raises the failure of a failed output."""
        return b"".join(event for delta in self._answer.deltas(piece) for event in self._of_delta(delta))

    def closing(self) -> bytes:
        """Return the events of the end."""
        events = b"".join(self._close())
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stop or None}
        return events + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def failure(self, error: LapsSdError) -> bytes:
        """Return the event of a failure."""
        return _event("error", error=anthropic_error(error)["error"])

    def add(self, choice: int, piece: Piece) -> None:
        """Add a piece. Raises the failure of a failed output."""
        self._answer.deltas(piece)

    def whole(self) -> Json:
        """Return the message, which is over."""
        for delta in self._answer.message():
            self._take(self._of_delta(delta))
        self._take(self._close())
        return self._message(self._stop_reason())

    def _take(self, events: Iterator[bytes]) -> None:
        """Let the content grow without the events of it."""
        for _ in events:
            pass

    # ---- blocks

    def _of_delta(self, delta: Json) -> Iterator[bytes]:
        if text := delta.get("reasoning_content"):
            yield from self._grow("thinking", text)
        if text := delta.get("content"):
            yield from self._grow("text", text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._close()
                block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                yield from self._begin(block)
            if self._grows("tool_use") and function["arguments"]:
                self._arguments.append(function["arguments"])
                yield self._delta("input_json_delta", partial_json=function["arguments"])

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._grows(kind):
            yield from self._close()
            yield from self._begin(
                {"type": "text", "text": ""}
                if kind == "text"
                else {"type": "thinking", "thinking": "", "signature": ""}
            )
        self._content[-1][kind] += text
        yield self._delta(f"{kind}_delta", **{kind: text})

    def _grows(self, kind: str) -> bool:
        return self._open and self._content[-1]["type"] == kind

    def _begin(self, block: Json) -> Iterator[bytes]:
        self._content.append(block)
        self._open = True
        yield _event("content_block_start", index=len(self._content) - 1, content_block=block.copy())

    def _close(self) -> Iterator[bytes]:
        """End the block that grows."""
        if not self._open:
            return
        self._open = False
        block = self._content[-1]
        if block["type"] == "tool_use":
            written, self._arguments = "".join(self._arguments), []
            block["input"] = _input(written)
        yield _event("content_block_stop", index=len(self._content) - 1)

    def _delta(self, kind: str, **fields: object) -> bytes:
        return _event("content_block_delta", index=len(self._content) - 1, delta={"type": kind, **fields})

    # ---- the message

    def _stop_reason(self) -> str:
        return "stop_sequence" if self._answer.stop else STOP_REASONS[self._answer.finish_reason]

    def _message(self, stop_reason: str | None) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": list(self._content),
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
