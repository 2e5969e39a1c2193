"""Sends inputs by the thousand, and counts their results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

HEAVY_AT_ONCE = 2


class Sent(Protocol):
    """An input; its text describes it in a complaint."""

    @property
    def kind(self) -> str: ...
    @property
    def heavy(self) -> bool:
        """Return whether it is large: few of them are sent at once."""
        ...


class Verdict(NamedTuple):
    """The end of an input."""

    outcome: str
    wrong: str | None
    """The fault of the answer; None: no fault."""


SentT = TypeVar("SentT", bound=Sent)
Send = Callable[[SentT], Awaitable[Verdict]]
"""Function that sends one input and judges the answer; TimeoutError when none comes."""


@dataclass
class Tally:
    """Results of a run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def add(self, sent: Sent, verdict: Verdict) -> None:
        """Count one more input."""
        self.kinds[sent.kind] += 1
        self.outcomes[verdict.outcome] += 1
        if verdict.wrong is not None:
            self.complaints.append(f"{sent}: {verdict.wrong}")

    @property
    def inputs(self) -> int:
        """Return the number of inputs."""
        return sum(self.outcomes.values())

    def __str__(self) -> str:
        outcomes, kinds = (
            ", ".join(f"{name} {count}" for name, count in counter.most_common())
            for counter in (self.outcomes, self.kinds)
        )
        return f"{self.inputs} inputs: {outcomes}\n  by kind: {kinds}"


async def send_all(inputs: Iterator[SentT], senders: Sequence[Send[SentT]]) -> Tally:
    """Send everything, as many at a time as there are senders."""
    tally = Tally()
    few = asyncio.Semaphore(HEAVY_AT_ONCE)

    async def one(send: Send[SentT], sent: SentT) -> None:
        try:
            tally.add(sent, await send(sent))
        except TimeoutError:
            tally.add(sent, Verdict("hung", "never came back"))

    async def work(send: Send[SentT]) -> None:
        for sent in inputs:  # one iterator for all
            if sent.heavy:
                async with few:
                    await one(send, sent)
            else:
                await one(send, sent)

    async with asyncio.TaskGroup() as group:
        for send in senders:
            group.create_task(work(send))
    return tally
