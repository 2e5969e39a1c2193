"""A rolling upgrade as the chart does it, process by process, under traffic: no call fails and every text is
the same as without it. Before it, all processes have the protocol version before this one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.conftest import StackMaker
from tests.helpers import wait_until_async
from tests.services.scheduler.peers import gateway
from tests.system.calls import Outcome, seeded, stream

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "scheduler", "worker")
CLIENTS = 4


class Service:
    """A Kubernetes Service in front of the gateways: new calls go to those that are listed, in turn."""

    def __init__(self, addresses: list[str]) -> None:
        self.channels = {address: grpc.aio.insecure_channel(address) for address in addresses}
        self.listed = list(addresses)
        self._turn: Iterator[int] = itertools.count()

    def stub(self) -> inference_pb2_grpc.InferenceStub:
        address = self.listed[next(self._turn) % len(self.listed)]
        return inference_pb2_grpc.InferenceStub(self.channels[address])


def request(number: int) -> pb.GenerateRequest:
    return seeded(f"prompt {number}", seed=number, max_tokens=40, ignore_eos=True)


def begin_with_version(stack: LocalStack, version: int, folder: Path) -> None:
    """Start all processes of the stack again with this protocol version alone."""
    (folder / "sitecustomize.py").write_text(
        f"from laps_sd.service import leader_link\nleader_link.PROTOCOL_VERSIONS = ({version},)\n"
    )
    children = [child for child in stack.children.values() if child.name.startswith(SERVICES)]
    for child in children:
        environment = child.environment
        child.environment = {**environment, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        stack.restart(child.name, wait=False)
        child.environment = environment  # of the next start
    for child in children:
        if not child.name.startswith("scheduler"):
            stack.wait_ready(child.name)


async def version_of_leader(stack: LocalStack) -> int:
    """Return the protocol version that the leader chooses for a gateway of this release."""
    for address in stack.scheduler_addresses:
        async with gateway(address) as peer:
            reply = await peer.wait_for(lambda _: True, "a greeting")
            if reply.HasField("hello"):
                return reply.hello.protocol_version
    raise AssertionError("no scheduler leads")


async def replace(stack: LocalStack, name: str) -> None:
    """Send SIGTERM, wait for the end, and start the same again: a pod of a StatefulSet, or one that was
    surged before.
    """
    await asyncio.to_thread(stack.terminate, name, timeout_s=60.0)
    wait = not name.startswith("scheduler")  # a standby becomes ready when it leads
    await asyncio.to_thread(stack.restart, name, wait=wait)


@pytest.mark.long
async def test_every_component_is_replaced_under_traffic_and_no_request_notices(
    make_stack: StackMaker, tmp_path: Path
) -> None:
    now, before = PROTOCOL_VERSIONS
    stack = make_stack(schedulers=2, gateways=2, workers=2, slots=4, drain_s=40.0)
    await asyncio.to_thread(begin_with_version, stack, before, tmp_path)
    assert await version_of_leader(stack) == before
    service = Service(stack.gateway_addresses)
    numbers, done = itertools.count(1), asyncio.Event()
    outcomes: dict[int, Outcome] = {}
    part = ""
    during: dict[str, int] = {}

    async def client() -> None:
        while not done.is_set():
            number = next(numbers)
            outcomes[number] = await stream(service.stub(), request(number))
            during[part] = during.get(part, 0) + 1

    async def some_more(count: int) -> None:
        seen = len(outcomes)
        await wait_until_async(lambda: len(outcomes) >= seen + count, description="calls go on ending")

    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(client())
        await some_more(CLIENTS)

        part = "gateways"
        for number, address in enumerate(list(service.listed)):
            service.listed.remove(address)  # the endpoint goes before the signal: preStop
            await replace(stack, f"gateway-{number}")
            service.listed.append(address)
            await some_more(2)
        part = "schedulers"
        for name in ("scheduler-1", "scheduler-0"):
            await replace(stack, name)
            await some_more(2)
        part = "workers"
        for old in ("worker-0", "worker-1"):
            await asyncio.to_thread(stack.add_worker)  # maxSurge
            await asyncio.to_thread(stack.terminate, old, timeout_s=60.0)
            await some_more(2)
        done.set()

    assert {"gateways", "schedulers", "workers"} <= set(during)
    assert await version_of_leader(stack) == now
    assert {outcome.end.finish_reason for outcome in outcomes.values() if outcome.end} == {
        pb.FINISH_REASON_LENGTH
    }
    for number, outcome in sorted(outcomes.items()):
        assert len(outcome.tokens) == 40
        if number % 5 == 0:  # a sample is run again, without an upgrade
            calm = await stream(service.stub(), request(number))
            assert (calm.tokens, calm.text) == (outcome.tokens, outcome.text)
    for channel in service.channels.values():
        await channel.close()
