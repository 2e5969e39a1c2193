"""The reasoning that some models write before their answer, between two markers.

<think>                      DeepSeek R1, Qwen 3 and most others; [THINK] … [/THINK] for Mistral's
The user wants the weather.
</think>

It rains.

A chat template may end the prompt inside the reasoning, or after an empty one: `state_after`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gateway.model.incremental import BLANKS, Incremental, Step

__all__ = ["REASONING", "Answer", "Markers", "Reasoning", "ReasoningReader", "State", "markers_of"]


@dataclass(frozen=True, slots=True)
class Markers:
    """The texts before and after the reasoning in an output."""

    begin: str
    end: str

    def state_after(self, prompt: str) -> State:
        """Return where the output of a rendered prompt begins."""
        tail = prompt.rstrip(BLANKS)
        if tail.endswith(self.begin):
            return State.INSIDE
        return State.AFTER if tail.endswith(self.end) else State.BEFORE


class State(enum.Enum):
    """The part of an output that comes next."""

    BEFORE = enum.auto()  # it may begin with reasoning
    INSIDE = enum.auto()
    AFTER = enum.auto()


REASONING: Mapping[str, Markers] = {
    "think": Markers("<think>", "</think>"),
    "mistral": Markers("[THINK]", "[/THINK]"),
}
"""Forms of reasoning by the names that the setting has for them."""


def markers_of(template: str) -> Markers | None:
    """Return the markers that a chat template mentions; None if it mentions none."""
    for markers in REASONING.values():
        if markers.end in template:
            return markers
    return None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The next piece of the answer."""

    text: str


Part: TypeAlias = Reasoning | Answer


class ReasoningReader(Incremental[Part]):
    """Reads one output. Whitespace around the reasoning belongs to the markers.

    Reasoning without an end is reasoning up to the end of the output; an output that does not begin with the
    marker is all answer.
    """

    def __init__(self, markers: Markers, state: State) -> None:
        super().__init__()
        self._markers = markers
        self.state = state
        self.reasoned_bytes = 0
        """UTF-8 bytes of the output, up to the end of the reasoning with its marker; 0 without reasoning."""
        self._bytes = 0

    def _take(self, count: int) -> str:
        text = super()._take(count)
        if self.state is not State.AFTER:
            self._bytes += len(text.encode())
        return text

    def _run(self) -> Step[None]:
        if self.state is State.BEFORE:
            blanks = yield from self._blanks()
            if (yield from self._literal(self._markers.begin)):
                self.state = State.INSIDE
            else:
                self.state = State.AFTER
                self._answer(blanks)
        if self.state is State.INSIDE:
            yield from self._blanks()
            yield from self._until_end()
            self.state = State.AFTER
            self.reasoned_bytes = self._bytes
            yield from self._blanks()
        while True:
            self._answer(self._take(len(self._text) - self._at))
            if self._ended:
                return
            yield

    def _answer(self, text: str) -> None:
        if text:
            self._events.append(Answer(text))

    def _until_end(self) -> Step[None]:
        """Read the reasoning and its end."""
        space, end = "", self._markers.end
        while True:
            found = self._text.find(end, self._at)
            stop = found if found >= 0 else len(self._text) - self._held((end,))
            text = space + self._take(stop - self._at)
            visible = text.rstrip(BLANKS)
            if visible:
                self._events.append(Reasoning(visible))
            space = text[len(visible) :]
            if found >= 0:
                self._take(len(end))
                return
            if self._ended:
                return
            yield
