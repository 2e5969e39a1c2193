"""Client on the gateway link that keeps a constant number of requests unfinished."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from operator import add
from typing import Any

from bench._control.latency import Arrivals
from bench._control.lengths import prompt_features
from laps_sd.service import wire
from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.v1 import gateway_link_pb2 as pb
from laps_sd.v1.gateway_link_pb2_grpc import GatewayLinkStub
from laps_sd.v1.inference_pb2 import SamplingParams

HEARTBEAT_S = 1.0


class Client:
    """Gateway link that keeps a constant number of requests unfinished, and receives the tokens.

    `max_tokens` is the limit of each request, `output_tokens` the median of their lengths, of which the prompts show
    something; `arrivals`, if given, notes when tokens arrive.
    """

    def __init__(
        self, shard: str, *, max_tokens: int, output_tokens: int, arrivals: Arrivals | None = None
    ) -> None:
        self.unfinished = 0
        self.wanted = 0
        self.accepted = 0
        self._shard = shard
        self._max_tokens = max_tokens
        self._output_tokens = output_tokens
        self._arrivals = arrivals
        self._number = 0
        self._rng = random.Random(1)
        self._news = asyncio.Event()

    def want(self, count: int) -> None:
        """Set the number of unfinished requests."""
        self.wanted = count
        self._news.set()

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the messages to the scheduler: the hello, submissions, and a heartbeat each second."""
        yield pb.GatewayMessage(
            hello=pb.GatewayHello(gateway_id="bench", protocol_versions=PROTOCOL_VERSIONS)
        )
        heartbeat_s = time.monotonic()
        while True:
            while self.unfinished < self.wanted:
                self.unfinished += 1
                self._number += 1
                yield pb.GatewayMessage(submit=self._submit())
            self._news.clear()
            now_s = time.monotonic()
            if now_s >= heartbeat_s:
                heartbeat_s = now_s + HEARTBEAT_S
                yield pb.GatewayMessage(heartbeat=pb.Heartbeat(sent_ms=time.monotonic_ns() // 1_000_000))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s - now_s):
                    await self._news.wait()

    def _submit(self) -> Any:
        rng = self._rng
        request_id = f"{self._shard}.{self._number:026d}"
        specification = pb.Specification(
            request_id=request_id,
            prompt_ids=[rng.randrange(1, 1000) for _ in range(rng.randint(16, 64))],
            sampling=SamplingParams(
                max_tokens=self._max_tokens,
                temperature=1.0,
                top_p=1.0,
                seed=self._number,
            ),
        )
        return pb.Submit(
            submission_id=self._number,
            request_id=request_id,
            tenant="bench",
            specification=specification,
            attachment_id=request_id,
            model="laps-sd-demo",
            length_features=prompt_features(request_id, self._output_tokens),
        )

    @contextlib.asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[None]:
        """Be connected with a scheduler."""
        async with wire.make_channel(address) as channel:
            self._listening = asyncio.create_task(
                self.listen(GatewayLinkStub(channel).Connect(self.messages()))
            )
            try:
                yield
            finally:
                self._listening.cancel()

    async def pause(self, seconds: float) -> None:
        """Wait. Raise the error of the stream if it ends, or RuntimeError."""
        ended, _ = await asyncio.wait({self._listening}, timeout=seconds)
        if ended:
            self._listening.result()
            raise RuntimeError("the scheduler ended the stream")

    async def reach(self, count: int) -> None:
        """Wait until this number of requests was accepted, all unfinished."""
        self.want(count)
        while self.accepted < count:
            await self.pause(0.1)

    async def listen(self, call: Any) -> None:
        """Read the stream until it ends. Raise RuntimeError if a submission is refused."""
        async for message in call:
            now_s = time.monotonic()
            kind = message.WhichOneof("message")
            if kind == "deliveries":
                deliveries = message.deliveries.deliveries
                if self._arrivals is not None:
                    self._arrivals.note(now_s, _reached(message.deliveries))
                ended = sum([delivery.HasField("end") for delivery in deliveries])
                if ended:
                    self.unfinished -= ended
                    self._news.set()
            elif kind == "submit_reply":
                if message.submit_reply.HasField("refused"):
                    raise RuntimeError(f"a submission was refused: {message.submit_reply.refused.detail}")
                self.accepted += 1


def _reached(deliveries: Any) -> Iterator[tuple[str, int]]:
    """Yield each request of a message (`laps_sd.v1.Deliveries`) with the number of its tokens after it."""
    for delivery in deliveries.deliveries:
        yield delivery.request_id, delivery.first_token + len(delivery.token_ids)
    plain = deliveries.plain  # attachments have the ids of their requests here
    firsts_and_counts = map(add, plain.first_tokens, plain.token_counts)
    yield from zip(plain.attachment_ids, firsts_and_counts, strict=True)
