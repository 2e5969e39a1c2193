"""Memory of the record in the server, against the bounds of docs/guarantees.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio as redis_client

from laps_sd.contract.ends import End
from laps_sd.contract.length_features import MOST_FEATURES, packed
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, NAME_BYTES
from scheduler_svc.store.store import Store
from tests.store.kit import OK, One, a_commit, a_request, a_standing, accept, fold, keys_of, lease

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"
REQUEST_BYTES = 2000
"""Bytes of a queued request, its names and settings of usual length, without prompt and
outputs."""
PROMPT_TOKEN_BYTES = 5
OUTPUT_TOKEN_BYTES = 9
"""Bytes per token: four of data; a string that grows keeps as much again in reserve."""
CLAIM_BYTES = 200
SETTINGS_BYTE_BYTES = 1.3
"""Factor over the data: the sizes of allocators are a quarter apart."""
PROMPT, OUTPUT = 4000, 2000
COUNT = 64


async def used(client: redis_client.Redis, store: Store) -> int:
    """Return the bytes of all keys of the shard, by the server's own count."""
    keys = await keys_of(client, store.keys.prefix)
    return sum([await client.memory_usage(key, samples=0) or 0 for key in keys])


async def test_a_queued_request_and_its_tokens_stay_below_the_documented_bound(
    store: Store, client: redis_client.Redis
) -> None:
    before = await used(client, store)
    await accept(
        store,
        *(
            a_request(
                f"shard-0.{number:032x}",
                prompt_ids=range(PROMPT),
                max_tokens=OUTPUT,
                idempotency_key=f"{number:064x}",
                body_hash=f"{number:064x}",
                submission=bytes(128),
                length_features=packed(range(MOST_FEATURES)),
                prompt_blocks=bytes(PROMPT // BLOCK_TOKENS * NAME_BYTES),
                deadline_unix_ms=1_700_000_060_000,
            )
            for number in range(COUNT)
        ),
    )
    queued = await used(client, store)
    each = (queued - before) / COUNT
    assert each <= REQUEST_BYTES + PROMPT_TOKEN_BYTES * PROMPT
    claims = await keys_of(client, "laps-sd:claim:")
    assert len(claims) == COUNT
    assert max([await client.memory_usage(key, samples=0) or 0 for key in claims]) <= CLAIM_BYTES

    for number in range(COUNT):
        request_id = f"shard-0.{number:032x}"
        await lease(store, request_id, f"worker-{0:032x}")
        for position in range(0, OUTPUT, 4):
            await One(store).commit(
                a_commit(
                    request_id,
                    position=position,
                    tokens=(7, 8, 9, 10),
                    standing=a_standing(rounds=position, attained_s=position / 3, score=position / 7),
                )
            )
        if number == 3:
            break  # every request grows alike
    await fold(store)
    last = a_commit(request_id, position=OUTPUT, tokens=(7,), standing=a_standing(rounds=OUTPUT))
    assert await One(store).commit(last) is OK  # its entry takes the place of those that are folded
    per_token = (await used(client, store) - queued) / 4 / OUTPUT
    assert per_token <= OUTPUT_TOKEN_BYTES


async def test_large_settings_take_little_more_than_their_own_size(
    store: Store, client: redis_client.Redis
) -> None:
    """An output format may be larger than everything else of its request."""
    size = 66_000
    await accept(store, a_request("small"))
    small = await used(client, store)
    await accept(store, *(a_request(f"r{number}", submission=bytes(size)) for number in range(COUNT)))

    assert (await used(client, store) - small) / COUNT <= SETTINGS_BYTE_BYTES * size + REQUEST_BYTES


async def test_what_has_ended_frees_its_memory_when_its_time_is_over(
    store: Store, client: redis_client.Redis
) -> None:
    """This holds for errors too: the record keeps no separate dead letters."""
    await accept(store, a_request("r1", idempotency_key="k"), a_request("r2"))
    for request_id in ("r1", "r2"):
        await lease(store, request_id)
        await One(store).commit(a_commit(request_id, end=End.ERROR, detail="out of memory"))

    of_requests = [
        key for key in await keys_of(client, store.keys.prefix) if key.endswith((":r1", ":r2", ":k"))
    ]
    assert len(of_requests) == 7
    for key in of_requests:
        assert 0 < await client.pttl(key) <= 900_000


@pytest.mark.parametrize(
    "number", [REQUEST_BYTES, PROMPT_TOKEN_BYTES, OUTPUT_TOKEN_BYTES, CLAIM_BYTES, SETTINGS_BYTE_BYTES]
)
def test_the_page_names_these_bounds(number: int) -> None:
    assert f"| {number:,} bytes |" in GUARANTEES.read_text(encoding="utf-8")
