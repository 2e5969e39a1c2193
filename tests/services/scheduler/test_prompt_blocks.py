"""What is computed, and where: names of prompt blocks from gateways and workers, over the real links."""

from __future__ import annotations

import pytest

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, NAME_BYTES, name_blocks
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, gateway

PROMPT = tuple(range(2 * BLOCK_TOKENS + 1))
BLOCKS = name_blocks(PROMPT, "acme")


def known_blocks(scheduler: SchedulerUnderTest, request_id: str) -> bytes:
    """Return the names that the core has received with a request."""
    loop = scheduler.leadership.loop
    assert loop is not None
    return loop.clients.live[request_id].facts.prompt_blocks


class TestOfRequests:
    @pytest.mark.parametrize(
        ("blocks", "said"),
        [
            (bytes(NAME_BYTES + 1), "must hold 8 bytes for each block, not 9 in all"),
            (bytes(3 * NAME_BYTES), "must name at most 2 blocks, not 3"),
        ],
        ids=["not whole", "more than the prompt has"],
    )
    async def test_names_that_no_gateway_sends_are_refused_by_field(
        self, scheduler: SchedulerUnderTest, blocks: bytes, said: str
    ) -> None:
        async with gateway(scheduler.address) as client:
            refused = (await client.submit("r1", prompt=PROMPT, prompt_blocks=blocks)).refused

            assert refused.reason == gateway_pb.SubmitRefused.REASON_INVALID
            assert refused.detail.startswith("prompt_blocks")
            assert said in refused.detail
            assert await scheduler.store.unfinished_ids() == []

    async def test_a_salt_has_the_length_of_a_name(self, scheduler: SchedulerUnderTest) -> None:
        async with gateway(scheduler.address) as client:
            refused = (await client.submit("r1", cache_salt="s" * 257)).refused

            assert refused.reason == gateway_pb.SubmitRefused.REASON_INVALID
            assert refused.detail.startswith("specification.cache_salt")

    async def test_every_leader_knows_them(self, start: StartScheduler) -> None:
        first = await start(reattach_grace_s=60.0)
        async with gateway(first.address) as client:
            await client.submit("named", prompt=PROMPT, prompt_blocks=BLOCKS)
            await client.submit("of-an-earlier-gateway", prompt=PROMPT, submission_id=2)

            assert known_blocks(first, "named") == BLOCKS
            assert known_blocks(first, "of-an-earlier-gateway") == b""
            await first.crash()
        second = await start(reattach_grace_s=60.0)

        assert known_blocks(second, "named") == BLOCKS
        assert known_blocks(second, "of-an-earlier-gateway") == b""
