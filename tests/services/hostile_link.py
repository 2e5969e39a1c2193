"""A scheduler's side of a link, as a real gRPC server that writes arbitrary bytes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from laps_sd.service.wire import server_options


class HostileLink:
    """A server that greets each peer, and then sends messages until the peer leaves; a subclass chooses them.
    `service`: its full name.
    """

    def __init__(self, service: str, message: type[Message], seed: int) -> None:
        self.said = 0
        self._rng = random.Random(seed)
        self._service = service
        self._message = message
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Start the server and return its port."""
        self._server = grpc.aio.server(options=server_options())
        connect = grpc.stream_stream_rpc_method_handler(
            self._connect, request_deserializer=self._message.FromString
        )
        services = grpc.method_handlers_generic_handler(self._service, {"Connect": connect})
        self._server.add_generic_rpc_handlers((services,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def _connect(self, requests: Any, context: Any) -> None:
        await context.read()
        if not await self._greet(context):
            return
        listening = asyncio.create_task(self._listen(context))
        try:
            while not listening.done():
                if self._is_silent():
                    await asyncio.sleep(0.01)
                    continue
                await context.write(self._anything())
                self.said += 1
                await asyncio.sleep(0)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self._hear(message)

    async def _greet(self, context: Any) -> bool:
        """Return whether more messages are to be sent."""
        raise NotImplementedError

    def _is_silent(self) -> bool:
        return False

    def _hear(self, message: Any) -> None:
        raise NotImplementedError

    def _anything(self) -> bytes:
        raise NotImplementedError
