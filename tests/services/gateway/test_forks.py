"""Children of a gateway, which it forks while gRPC's threads run."""

from __future__ import annotations

import subprocess
import sys

FORKS = """
import asyncio
import gateway
import grpc
import uvloop

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async def call():
            while True:
                try:
                    await channel.unary_unary("/no/such")(b"")
                except grpc.aio.AioRpcError:
                    pass
        calls = [asyncio.create_task(call()) for _ in range(4)]
        ends = []
        for _ in range(400):
            child = await asyncio.create_subprocess_exec("/bin/true")
            ends.append(await child.wait())
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await server.stop(None)
    print(sum(ends), flush=True)

uvloop.run(main())
"""


def test_no_child_dies_before_it_begins() -> None:
    """gRPC's handlers of a fork killed about one child in a hundred."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "0", done.stderr
