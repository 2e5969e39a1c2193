"""The output of a call as it is generated: the choices of all its requests, each taken from a stream of its
own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.calls.output import Output, Piece
from gateway.calls.stream_metrics import StreamMetrics
from gateway.links.client_stream import Batch
from gateway.links.link import AcceptedStream
from gateway.model.reasoning import State
from gateway.tracing import CallSpan
from laps_sd.errors import FailedPrecondition, LapsSdError
from laps_sd.v1 import inference_pb2

__all__ = ["Attachment", "Generation"]


class Attachment:
    """One accepted choice: its stream, which the stack of the call closes, and its output."""

    def __init__(
        self, accepted: AcceptedStream, output: Output, metrics: StreamMetrics, span: CallSpan | None
    ) -> None:
        self.stream = accepted.stream
        self.over = False
        self._link, _, self._acceptance = accepted
        self._output = output
        self._metrics = metrics
        self._span = span
        submit = self.stream.submit
        self._awaits_prompt = submit is not None and submit.specification.HasField("prompt_logprobs")

    def take(self, now: float) -> Piece:
        """Return the output since the last call. Raises the stream's failure, and FailedPrecondition if the log
        probabilities of the prompt are missing."""
        batch = self._link.take(self.stream, now)
        count = len(batch.token_ids)
        if self._awaits_prompt and count:
            self._awaits_prompt = False
            self._check_prompt(batch)
        self._metrics.tokens(count, now)
        if self._span is not None:
            self._span.tokens(count)
        piece = self._output.add(batch)
        if piece.end is not None:
            self._metrics.ended(piece.end)
            if self._span is not None:
                self._span.ended(piece.end)
            self.over = True
        return piece

    def failed(self, error: Exception) -> None:
        """Record why the output does not go on."""
        self._metrics.failed(error)
        if self._span is not None:
            self._span.failed(error)

    def _check_prompt(self, batch: Batch) -> None:
        """Check that the log probabilities of the prompt came with its first token."""
        if batch.prompt_logprobs is not None:
            return
        if self._acceptance.prompt_tokens > 1:
            raise FailedPrecondition(
                "the log probabilities of the prompt are missing: the scheduler or the worker is of a release that"
                " does not have them, or they were lost together with the record"
            )
        # Nothing comes before a single token.
        batch.prompt_logprobs = inference_pb2.PromptLogprobs()


class Generation:
    """The choices of one call as they are generated. It has one reader: a task that calls `read`, or one that
    calls `take` after `listen`."""

    def __init__(
        self,
        accepted: Sequence[inference_pb2.Accepted],
        attachments: Sequence[Attachment],
        states: Sequence[State | None],
    ) -> None:
        self.accepted = accepted
        """The first message of each choice, by choice."""
        self.states = states
        """The state that the output of each choice begins in; None: its reasoning is not read."""
        self.prompts: list[Sequence[int]] = [
            () if attachment.stream.submit is None else attachment.stream.submit.specification.prompt_ids
            for attachment in attachments
        ]
        """Token ids of the prompt of each choice; none for requests of other calls."""
        self._attachments = attachments
        self.over = False
        """Every choice has ended, and all of its output was returned."""
        self._failure: LapsSdError | None = None
        """Why the whole call does not go on."""
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        """The future that `read` waits for. An event would cost several calls more for each delivery."""
        self.listen(self._wake)

    def listen(self, on_news: Callable[[], object]) -> None:
        """Have `on_news` called whenever output begins to wait for `take`. It is called within the link's
        work, so it must be quick and must not raise."""
        self._on_news = on_news
        for attachment in self._attachments:
            attachment.stream.on_news = on_news

    def fail(self, error: LapsSdError) -> None:
        """End the call with an error, which `take` raises from now on."""
        if not self.over:
            self._failure = error
            self._on_news()

    def take(self) -> list[tuple[int, Piece]]:
        """Return all output since the last call, each piece with its choice. Raises the failure of the call, or
        of the first choice that failed."""
        if self._failure is not None:
            raise self._failure
        now = self._loop.time()
        pieces = []
        for choice, attachment in enumerate(self._attachments):
            if attachment.stream.has_news and not attachment.over:
                pieces.append((choice, attachment.take(now)))
                if attachment.over:
                    self.over = all(each.over for each in self._attachments)
        return pieces

    async def read(self) -> list[tuple[int, Piece]]:
        """Wait for output and `take` it."""
        while not (pieces := self.take()):
            self._waiter = self._loop.create_future()
            await self._waiter
        return pieces

    def failed(self, error: Exception) -> None:
        """Record why the choices that have not ended do not go on, for a caller that returns the error in place of
        raising it."""
        for attachment in self._attachments:
            if not attachment.over:
                attachment.failed(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
