"""The one answer of a chat, read piece by piece, for APIs that show it in another form than chat
completions."""

from __future__ import annotations

from typing import Protocol

from gateway.api.ends import openai_reason
from gateway.api.openai.body import Json
from gateway.api.openai.message import readers_of, reason_with_calls
from gateway.api.openai.request import ParsedRequest
from gateway.calls.generation import Generation
from gateway.calls.output import Piece
from gateway.model.files import ModelFiles
from laps_sd.contract.ends import End
from laps_sd.errors import LapsSdError
from laps_sd.service.ends import end_of_reason
from laps_sd.v1 import inference_pb2

__all__ = ["AnswerReader", "MakeReply", "StreamedReply"]


class StreamedReply(Protocol):
    """An answer in the form of one API: as server-sent events (`opening`, `events`, then `closing` or
    `failure`), or whole (`add` every piece, then `whole`)."""

    @property
    def id(self) -> str:
        """Request id of the first choice."""
        ...

    def opening(self) -> bytes:
        """Return the events before any output has arrived."""
        ...

    def events(self, choice: int, piece: Piece) -> bytes:
        """Return the events of a piece, and add it. Raises the failure of a failed choice."""
        ...

    def closing(self) -> bytes:
        """Return the last events, after all output."""
        ...

    def failure(self, error: LapsSdError) -> bytes:
        """Return the last events of an answer that fails."""
        ...

    def add(self, choice: int, piece: Piece) -> None:
        """Add a piece. Raises the failure of a failed choice."""
        ...

    def whole(self) -> Json:
        """Return the answer; every choice has ended."""
        ...


class MakeReply(Protocol):
    """Makes the reply to a request once it is accepted."""

    def __call__(self, generation: Generation, *, created_unix_s: int, model: ModelFiles) -> StreamedReply:
        """Return the reply; its output is passed to it as it arrives."""
        ...


class AnswerReader:
    """Reads the output of the one choice as deltas of a message of chat completions: `content`,
    `reasoning_content`, `tool_calls`."""

    def __init__(self, parsed: ParsedRequest, generation: Generation, model: ModelFiles) -> None:
        self._reader = readers_of(parsed, generation, model)[0]
        accepted = generation.accepted[0]
        self.id = accepted.request_id
        self.model = accepted.model
        self.prompt_tokens = accepted.prompt_tokens
        self.output_tokens = 0
        self.stop = ""
        """The stop string that ended the output."""
        self.cached_tokens = 0
        """Prompt tokens that were found in a cache; known when the output is over."""
        self._texts: list[str] = []
        self._reason = ""

    @property
    def reasoning_tokens(self) -> int:
        """Return the number of tokens of the reasoning."""
        return 0 if self._reader is None else self._reader.reasoning_tokens

    @property
    def finish_reason(self) -> str:
        """Return OpenAI's reason of the end: stop, length or tool_calls."""
        assert self._reason, "only what has ended has a reason"
        return reason_with_calls(self._reason, self._reader)

    def has_call(self, call_id: str) -> bool:
        """Return whether a call whose arguments have ended is one: it is complete."""
        return self._reader is not None and self._reader.has_call(call_id)

    def deltas(self, piece: Piece) -> list[Json]:
        """Add a piece; return the deltas of the message. Raises the failure of a failed output."""
        self.output_tokens += len(piece.token_ids)
        over = piece.end is not None
        if self._reader is not None:
            deltas = self._reader.deltas(piece.text, piece.token_ids, over=over)
        else:
            deltas = [{"content": piece.text}] if piece.text else []
            self._texts.append(piece.text)
        if piece.end is not None:
            self._ended(piece.end, piece.stop)
        return deltas

    def message(self) -> list[Json]:
        """Return the whole message of an output that is over, as deltas: without calls that were cut off,
        which are content there."""
        read = {"content": "".join(self._texts)} if self._reader is None else self._reader.message()
        calls = [call | {"index": index} for index, call in enumerate(read.get("tool_calls", ()))]
        deltas: list[Json] = [
            {name: read[name]} for name in ("reasoning_content", "content") if read.get(name)
        ]
        return [*deltas, {"tool_calls": calls}]

    def _ended(self, ended: inference_pb2.Ended, stop: str) -> None:
        self._reason = openai_reason(ended)
        self.cached_tokens = ended.usage.cached_prompt_tokens
        self.stop = stop if end_of_reason(ended.finish_reason) is End.STOP_SEQUENCE else ""
