"""The message of one choice of a chat: content, reasoning and calls of tools, read from the text of the output.

A stream gets `deltas` of it; a whole answer gets the `message`. A call that breaks after it was announced cannot be
taken back in a stream: its arguments end, and all of it follows as content. A whole answer has it as content only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.api.openai.body import Json
from gateway.api.openai.request import ParsedRequest
from gateway.calls.generation import Generation
from gateway.calls.tools import is_single, schemas_of
from gateway.model.files import ModelFiles
from gateway.model.reasoning import Answer, Reasoning, ReasoningReader, State
from gateway.model.token_bytes import TokenBytes
from gateway.model.tool_calls.families import ToolFamily
from gateway.model.tool_calls.parameters import Schema
from gateway.model.tool_calls.reader import Arguments, Broken, Call, Done, Event, Text

__all__ = ["MessageReader", "readers_of", "reason_with_calls"]


def readers_of(
    parsed: ParsedRequest, generation: Generation, model: ModelFiles
) -> list[MessageReader | None]:
    """Return the reader of each choice; None for a choice whose text is its content as it is."""
    if parsed.kind != "chat":
        return [None] * len(generation.accepted)
    dialect = model.dialect
    chat = parsed.requests[0].messages
    tools = schemas_of(chat)
    family = dialect.tools if tools else None
    fixed = parsed.requests[0].output_format.WhichOneof("format") in ("regex", "grammar")
    readers: list[MessageReader | None] = []
    for state, accepted in zip(generation.states, generation.accepted, strict=True):
        reasoning = None
        if dialect.reasoning is not None and state is not None and not fixed:
            reasoning = ReasoningReader(dialect.reasoning, state)
        if family is None and reasoning is None:
            readers.append(None)
        else:
            readers.append(
                MessageReader(
                    family,
                    tools,
                    reasoning,
                    model.token_bytes,
                    request_id=accepted.request_id,
                    single=is_single(chat, dialect),
                    shows_reasoning=parsed.include_reasoning,
                )
            )
    return readers


def reason_with_calls(reason: str, reader: MessageReader | None) -> str:
    """Return OpenAI's reason of the end of an output that may have calls, from that of its text."""
    called = reader is not None and reader.has_calls
    return "tool_calls" if called and reason == "stop" else reason


@dataclass(slots=True)
class _ReadCall:
    """A call of a message."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class MessageReader:
    """Reads one output."""

    def __init__(
        self,
        family: ToolFamily | None,
        tools: Mapping[str, Schema],
        reasoning: ReasoningReader | None,
        token_bytes: TokenBytes,
        *,
        request_id: str,
        single: bool,
        shows_reasoning: bool,
    ) -> None:
        self._calls_of = None if family is None else family.reader(tools)
        self._family = family
        self._request_id = request_id
        self._reasoning_of = reasoning
        self._token_bytes = token_bytes
        self._single = single
        self._shows_reasoning = shows_reasoning
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _ReadCall] = {}
        """Calls by their index in the output."""
        self._places: dict[int, int] = {}
        """Their index among those that the client gets."""
        self._complete = 0
        self.reasoning_tokens = 0
        self._ends: list[int] | None = []
        """Bytes of the output up to the end of each token; None: the reasoning has ended."""

    @property
    def has_calls(self) -> bool:
        """Return whether the output has a complete call."""
        return self._complete > 0

    def has_call(self, call_id: str) -> bool:
        """Return whether a call that was announced is part of the message: it did not break."""
        return any(call.id == call_id for call in self._calls.values())

    def deltas(self, text: str, token_ids: Sequence[int], *, over: bool) -> list[Json]:
        """Add what the output grew by; return the deltas of the message. `over`: the output has ended."""
        return list(self._deltas(self._parts(text, token_ids, over=over), over=over))

    def message(self) -> Json:
        """Return the message of an output that is over."""
        message: Json = {"role": "assistant", "content": "".join(self._content)}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in self._calls.values()
            ]
        if self._reasoning:
            message |= _reasoning("".join(self._reasoning))
        return message

    # ---- reasoning

    def _parts(self, text: str, token_ids: Sequence[int], *, over: bool) -> Iterable[Reasoning | Answer]:
        reader = self._reasoning_of
        if reader is None:
            return [Answer(text)] if text else []
        parts = reader.feed(text) if text else []
        if over:
            parts += reader.finish()
        self._count(reader, token_ids)
        return parts

    def _count(self, reader: ReasoningReader, token_ids: Sequence[int]) -> None:
        """Count the tokens of the reasoning: those whose bytes begin before its end."""
        if self._ends is None:
            return
        for token in token_ids:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._token_bytes.bytes_of(token)))
        if reader.state is State.INSIDE:
            self.reasoning_tokens = len(self._ends)
        elif reader.state is State.AFTER:
            count = bisect_left(self._ends, reader.reasoned_bytes) + 1 if reader.reasoned_bytes else 0
            self.reasoning_tokens = min(count, len(self._ends))
            self._ends = None

    # ---- calls

    def _deltas(self, parts: Iterable[Reasoning | Answer], *, over: bool) -> Iterator[Json]:
        for part in parts:
            if isinstance(part, Reasoning):
                if self._shows_reasoning:
                    self._reasoning.append(part.text)
                    yield _reasoning(part.text)
            elif self._calls_of is None:
                yield self._text(part.text)
            else:
                yield from self._of_calls(self._calls_of.feed(part.text))
        if over and self._calls_of is not None:
            yield from self._of_calls(self._calls_of.finish())

    def _of_calls(self, events: Iterable[Event]) -> Iterator[Json]:
        for event in events:
            match event:
                case Text(text):
                    yield self._text(text)
                case Call(index, name):
                    if self._single and self._complete:
                        continue  # the request allows one call
                    assert self._family is not None, "calls have a family"
                    call = _ReadCall(self._family.id_of(self._request_id, index), name)
                    self._calls[index] = call
                    self._places[index] = len(self._places)
                    yield _tool_call(
                        self._places[index],
                        id=call.id,
                        type="function",
                        function={"name": name, "arguments": ""},
                    )
                case Arguments(index, text):
                    if index in self._calls:
                        self._calls[index].arguments.append(text)
                        yield _tool_call(self._places[index], function={"arguments": text})
                case Done(index):
                    self._complete += index in self._calls
                case Broken(index, text):
                    if self._calls.pop(index, None) is not None:
                        yield self._text(text)

    def _text(self, text: str) -> Json:
        self._content.append(text)
        return {"content": text}


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(index: int, **fields: object) -> Json:
    return {"tool_calls": [{"index": index, **fields}]}
