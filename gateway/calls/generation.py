"""The output of a call as it is generated: the choices of all its requests, each read from a stream of its
own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from gateway.calls.output import Output
from gateway.calls.stream_metrics import StreamMetrics
from gateway.links.client_stream import Accepted, ClientStream
from gateway.links.link import ShardLink
from gateway.tracing import CallSpan
from laps_sd.v1 import inference_pb2

__all__ = ["Attachment", "Event", "Generation"]

Event: TypeAlias = "inference_pb2.Delta | inference_pb2.Ended"


class Attachment:
    """One accepted choice: its stream, which the stack of the call closes, and its output."""

    output: Output
    metrics: StreamMetrics
    span: CallSpan | None = None

    def __init__(self, link: ShardLink, stream: ClientStream, acceptance: Accepted) -> None:
        self.link = link
        self.stream = stream
        self.acceptance = acceptance
        self.over = False

    async def read(self) -> list[Event]:
        """Wait for new output and return it, at least one event. Raises the stream's failure."""
        batch = await self.link.read(self.stream)
        self.metrics.tokens(len(batch.token_ids))
        if self.span is not None:
            self.span.tokens(len(batch.token_ids))
        events = list(self.output.messages(batch))
        for event in events:
            if isinstance(event, inference_pb2.Ended):
                self.metrics.ended(event)
                if self.span is not None:
                    self.span.ended(event)
                self.over = True
        return events


class Generation:
    """The choices of one call as they are generated. Only one task may read."""

    def __init__(self, accepted: Sequence[inference_pb2.Accepted], attachments: Sequence[Attachment]) -> None:
        self.accepted = accepted
        """The first message of each choice, by choice."""
        self._attachments = attachments
        self._reading: dict[int, asyncio.Task[list[Event]]] = {}

    @property
    def over(self) -> bool:
        """Return whether every choice has ended and `read` has returned all of its output."""
        return not self._reading and all(attachment.over for attachment in self._attachments)

    async def read(self) -> list[tuple[int, Event]]:
        """Return all output since the last call, each event with its choice. Raises the failure of the first
        choice that failed."""
        if len(self._attachments) == 1:
            return [(0, event) for event in await self._attachments[0].read()]
        for choice, attachment in enumerate(self._attachments):
            if not attachment.over and choice not in self._reading:
                self._reading[choice] = asyncio.create_task(attachment.read(), name=f"choice {choice}")
        await asyncio.wait(self._reading.values(), return_when=asyncio.FIRST_COMPLETED)
        ready = sorted(choice for choice, task in self._reading.items() if task.done())
        return [(choice, event) for choice in ready for event in self._reading.pop(choice).result()]

    async def close(self) -> None:
        """Cancel all pending reads. Nothing is read afterwards."""
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
