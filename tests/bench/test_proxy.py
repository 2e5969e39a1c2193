"""The proxy of the chaos runs: faults of a network, for one dialler at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest

from bench._proxy import BOTH, Direction, Proxy
from tests.helpers import wait_until_async

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Proxy, Ends, Ends]]:
    """Return a proxy, this process's end of a connection through it, and the target's."""
    arrived: asyncio.Queue[Ends] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await arrived.put((reader, writer))

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    proxy = Proxy(f"{host}:{port}")
    await proxy.serve()
    dialler = await asyncio.open_connection(*proxy.address.split(":"))
    target = await arrived.get()
    try:
        yield proxy, dialler, target
    finally:
        for _, writer in (dialler, target):
            writer.close()
        await proxy.close()
        server.close()


async def test_passes_on_both_ways_and_the_end() -> None:
    async with connected() as (_, dialler, target):
        dialler[1].write(b"up")
        target[1].write(b"down")
        dialler[1].write_eof()

        assert await target[0].read() == b"up"
        assert await dialler[0].readexactly(4) == b"down"


@pytest.mark.parametrize(("silent", "heard"), [("up", "down"), ("down", "up")])
async def test_is_silent_in_one_direction_and_what_was_said_arrives_afterwards(
    silent: Direction, heard: Direction
) -> None:
    async with connected() as (proxy, dialler, target):
        ends = {"up": (dialler[1], target[0]), "down": (target[1], dialler[0])}
        assert proxy.hold(os.getpid(), (silent,)) == 1
        for direction in BOTH:
            ends[direction][0].write(b"x")
        late = asyncio.create_task(ends[silent][1].readexactly(1))
        assert await ends[heard][1].readexactly(1) == b"x"
        assert not late.done()

        proxy.release(os.getpid())
        assert await late == b"x"


async def test_a_new_connection_of_who_is_cut_off_is_silent_too_and_nobody_elses() -> None:
    async with connected() as (proxy, dialler, target):
        proxy.hold(1, BOTH)
        dialler[1].write(b"x")
        assert await target[0].readexactly(1) == b"x", "that is another process"

        proxy.hold(os.getpid(), BOTH)
        _, again = await asyncio.open_connection(*proxy.address.split(":"))
        await wait_until_async(lambda: len(proxy.connections) == 2, description="it is taken")
        assert not any(gate.is_set() for link in proxy.connections for gate in link.gates.values())
        again.close()


async def test_cuts_so_that_both_ends_notice() -> None:
    async with connected() as (proxy, dialler, target):
        assert proxy.cut(os.getpid()) == 1
        for reader, _ in (dialler, target):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
