"""The interface of an engine to the loops that measure it."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Refused(RuntimeError):
    """Error of an engine that does not run as requested here; the message is one sentence."""


class Progress(NamedTuple):
    """The outcome of one step for one request."""

    number: int
    tokens: list[int]  # new output tokens
    ended: bool


class PeerEngine(Protocol):
    """An engine that generates greedily, one step at a time."""

    version: str

    def add(self, number: int, ids: list[int], tokens: int) -> None:
        """Begin a request of at most `tokens` output tokens. Numbers are never used again."""

    def step(self) -> list[Progress]:
        """Compute once; return the requests that have new tokens or ended."""
