"""An answer as blocks that grow one after another: text, reasoning and calls, as APIs have them that are not chats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from gateway.api.openai.answer import AnswerReader
from gateway.api.openai.body import Json
from gateway.calls.output import Piece

__all__ = ["GrowingReply"]


class GrowingReply(ABC):
    """The part of a `StreamedReply` that such APIs share; a subclass has the events and the form of the blocks."""

    TEXT: ClassVar[str]
    REASONING: ClassVar[str]
    CALL: ClassVar[str]
    """The `type` of each kind of block."""

    def __init__(self, answer: AnswerReader) -> None:
        self._answer = answer
        self._blocks: list[Json] = []
        self._open: Json | None = None
        """The last block while it grows."""
        self.id = answer.id

    def events(self, choice: int, piece: Piece) -> bytes:
        """Return the events of a piece, and add it. Raises the failure of a failed output."""
        return b"".join(event for delta in self._answer.deltas(piece) for event in self._of_delta(delta))

    def add(self, choice: int, piece: Piece) -> None:
        """Add a piece. Raises the failure of a failed output."""
        self._answer.deltas(piece)

    def whole(self) -> Json:
        """Return the answer, which is over."""
        for delta in self._answer.message():
            for _ in self._of_delta(delta):
                pass  # the blocks grow without the events of it
        for _ in self._close():
            pass
        return self._whole()

    def _of_delta(self, delta: Json) -> Iterator[bytes]:
        if text := delta.get("reasoning_content"):
            yield from self._grow(self.REASONING, text)
        if text := delta.get("content"):
            yield from self._grow(self.TEXT, text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._close()
                yield from self._begin(self._call(call["id"], function["name"]))
            if function["arguments"] and self._grows(self.CALL):
                yield self._add_arguments(function["arguments"])

    def _grows(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, block: Json) -> Iterator[bytes]:
        self._blocks.append(block)
        self._open = block
        yield self._begun(block.copy())

    @abstractmethod
    def _begun(self, block: Json) -> bytes:
        """Return the event of the last block, which has begun."""

    @abstractmethod
    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        """Add text to the block that grows, if it is of this kind, or to a new one."""

    @abstractmethod
    def _call(self, call_id: str, name: str) -> Json:
        """Return a new block for a call."""

    @abstractmethod
    def _add_arguments(self, text: str) -> bytes:
        """Add to the arguments of the call that grows."""

    @abstractmethod
    def _close(self) -> Iterator[bytes]:
        """End the block that grows, if one does."""

    @abstractmethod
    def _whole(self) -> Json:
        """Return the answer with all blocks."""
