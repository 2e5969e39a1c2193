"""`laps-sd record`: the record as a person reads it while no scheduler runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_client
from redis import exceptions as redis_errors

from scheduler_svc.dump import head_lines, read_head, read_rows, row_line
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import SchemaMismatch, StoreError
from scheduler_svc.store.keys import SCHEMA_VERSION
from scheduler_svc.store.reading import READ_CHUNK
from scheduler_svc.store.store import Store
from tests.helpers import free_port
from tests.store.conftest import OpenStore
from tests.store.kit import (
    NOW_S,
    One,
    a_commit,
    a_finish,
    a_request,
    a_standing,
    accept,
    fold,
    keys_of,
    lease,
    new_shard,
)
from tests.store.test_rights import PASSWORD, documented_rule

ROOT = Path(__file__).parents[2]


async def write_some(store: Store) -> None:
    """Write a request with tokens in its own keys and in the log, one that waits, and one that has ended; and
    stop leading."""
    await accept(store, a_request("r1", tenant="acme"), a_request("r2", tenant="other"), a_request("r3"))
    await lease(store, "r1", "w1")
    await One(store).commit(a_commit(tokens=(1_000_001, 1_000_002, 1_000_003)))
    await fold(store)
    await One(store).commit(a_commit(position=3, tokens=(1_000_004,), standing=a_standing(rounds=9, level=2)))
    await One(store).finish(a_finish("r3"))
    await store.resign()


@pytest.fixture
async def damaged(server: EmbeddedServer, client: redis_client.Redis) -> AsyncIterator[Store]:
    """Return a store with the requests of `write_some`, whose keys the test may damage."""
    store = Store(server.url, new_shard(), clock=lambda: NOW_S)
    await store.acquire_leadership(owner="a:1", lease_s=60)
    await write_some(store)
    yield store
    await client.delete(*await keys_of(client, store.keys.prefix))
    await store.close()


async def dumped(store: Store, *, tokens: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, log = await read_head(store)
    return head, [row async for row in read_rows(store, log, tokens=tokens)]


def laps_sd_record(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAPS_SD_")}
    return subprocess.run(
        [sys.executable, "-m", "laps_sd", "record", *flags],
        env=kept | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def test_unfinished_requests_have_the_progress_of_keys_and_log(
    store: Store, open_store: OpenStore
) -> None:
    await write_some(store)

    head, rows = await dumped(open_store())

    assert head == {
        "shard": store.keys.shard,
        "schema_version": SCHEMA_VERSION,
        "leader": None,
        "leader_epoch": None,
        "incarnation": store.incarnation,
        "log_entries": 1,
        "log_bytes": head["log_bytes"],
        "unfinished": 2,
    }
    assert head["log_bytes"] > 0
    assert [(row.pop("age_s") > 0, row) for row in rows] == [
        (
            True,
            {
                "request_id": "r1",
                "tenant": "acme",
                "state": "leased",
                "worker": "w1",
                "lease_epoch": 1,
                "committed_tokens": 4,
                "rounds": 9,
                "level": 2,
                "pair": "a pair",
            },
        ),
        (
            True,
            {
                "request_id": "r2",
                "tenant": "other",
                "state": "queued",
                "worker": None,
                "lease_epoch": 0,
                "committed_tokens": 0,
                "rounds": 0,
                "level": 0,
                "pair": None,
            },
        ),
    ]


async def test_a_living_leader_is_named_and_goes_on(store: Store, open_store: OpenStore) -> None:
    head, rows = await dumped(open_store())

    assert (head["leader"], head["leader_epoch"], rows) == ("leader:1", store.epoch, [])
    assert await store.renew_leadership()


async def test_reading_changes_nothing(
    store: Store, open_store: OpenStore, client: redis_client.Redis
) -> None:
    await write_some(store)
    names = await keys_of(client, store.keys.prefix)
    before = [await client.dump(name) for name in names]

    await dumped(open_store(), tokens=True)

    assert await keys_of(client, store.keys.prefix) == names
    assert [await client.dump(name) for name in names] == before


async def test_prompts_and_outputs_are_read_only_on_demand(store: Store, open_store: OpenStore) -> None:
    await write_some(store)

    _, without = await dumped(open_store())
    _, with_tokens = await dumped(open_store(), tokens=True)

    assert not any("ids" in name for row in without for name in row)
    assert with_tokens[0]["prompt_ids"] == list(a_request().prompt_ids)
    assert with_tokens[0]["committed_ids"] == (1_000_001, 1_000_002, 1_000_003, 1_000_004)


async def test_any_number_comes_in_the_order_of_arrival(store: Store, open_store: OpenStore) -> None:
    names = [f"r{at}" for at in range(2 * READ_CHUNK + 1)]
    await accept(store, *(a_request(name) for name in names))

    head, rows = await dumped(open_store())

    assert head["unfinished"] == len(names)
    assert [row["request_id"] for row in rows] == names


async def test_a_request_that_lost_keys_is_listed(own_server: EmbeddedServer) -> None:
    store = Store(own_server.url, "main", clock=lambda: NOW_S)
    await store.acquire_leadership(owner="a:1", lease_s=60)
    await write_some(store)
    async with redis_client.Redis.from_url(own_server.url, protocol=2) as operator:
        await operator.delete(store.keys.tokens("r1"), store.keys.request("r2"))

    _, rows = await dumped(store)

    assert [(row["request_id"], row["state"], row["tenant"]) for row in rows] == [
        ("r1", "incomplete", None),
        ("r2", "incomplete", None),
    ]
    assert row_line(rows[0]).split() == ["r1", "-", "incomplete", *"------"]
    await store.close()


@pytest.mark.parametrize("name", ["schema_version", "leader", "incarnation", "log", "unfinished"])
@pytest.mark.parametrize("kind", ["list", "value"])
async def test_a_key_of_another_program_is_named(
    damaged: Store, client: redis_client.Redis, name: str, kind: str
) -> None:
    """A key of another type, and one of the same type with a value that the store does not write."""
    key = getattr(damaged.keys, name)()
    if kind == "list":
        await client.delete(key)
        await client.rpush(key, "x")
    elif name == "log":
        await client.xadd(key, {"x": "y"})
    elif name == "unfinished":
        await client.zadd(key, {b"\xff": 99.5})
    else:
        await client.set(key, b"\xff")

    expected = "schema version" if (name, kind) == ("schema_version", "value") else re.escape(key)
    with pytest.raises(StoreError, match=f"{expected}.* (no such value|this release reads)"):
        await dumped(damaged)


@pytest.mark.parametrize("kind", ["list", "no fields", "no number", "no tokens"])
async def test_a_request_with_keys_of_another_program_is_listed_between_the_others(
    damaged: Store, client: redis_client.Redis, kind: str
) -> None:
    key = damaged.keys.request("r1")
    match kind:
        case "list":
            await client.delete(key)
            await client.rpush(key, "x")
        case "no fields":
            await client.delete(key)
            await client.hset(key, "x", "y")
        case "no number":
            await client.hset(key, "lease_epoch", "many")
        case _:
            await client.delete(damaged.keys.tokens("r1"))
            await client.rpush(damaged.keys.tokens("r1"), "x")

    _, (foreign, other) = await dumped(damaged)

    assert (foreign["request_id"], foreign["state"], foreign["tenant"]) == ("r1", "unreadable", None)
    assert foreign["problem"].startswith("the request r1 cannot be read: ")
    assert (other["request_id"], other["state"]) == ("r2", "queued")


async def test_the_command_ends_with_the_reason_why_requests_cannot_be_read(
    damaged: Store, server: EmbeddedServer, client: redis_client.Redis
) -> None:
    for request_id in ("r1", "r2"):
        await client.hset(damaged.keys.request(request_id), "lease_epoch", "many")

    shown = laps_sd_record(LAPS_SD_REDIS_URL=server.url, LAPS_SD_SHARD=damaged.keys.shard)

    assert shown.returncode == 1
    assert [line.split()[2] for line in shown.stdout.splitlines() if line.startswith("r")] == [
        "state",
        "unreadable",
        "unreadable",
    ]
    assert shown.stderr.startswith("laps-sd record: the request r1 cannot be read: ")
    assert shown.stderr.endswith("So it is with 1 more\n")
    assert shown.stderr.count("\n") == 1


async def test_a_shard_without_a_record_is_no_error(open_store: OpenStore) -> None:
    head, rows = await dumped(open_store())

    assert (head["schema_version"], head["unfinished"], rows) == (None, 0, [])
    assert any("there is no record of this shard" in line for line in head_lines(head))


async def test_the_layout_of_another_release_is_refused(
    store: Store, open_store: OpenStore, client: redis_client.Redis
) -> None:
    await client.set(store.keys.schema_version(), "9")

    with pytest.raises(SchemaMismatch, match="schema version 9"):
        await dumped(open_store())


async def test_the_documented_reader_reads_everything_and_writes_nothing(own_server: EmbeddedServer) -> None:
    writer = Store(own_server.url, "main", clock=lambda: NOW_S)
    await writer.acquire_leadership(owner="a:1", lease_s=60)
    await write_some(writer)
    rule = documented_rule(user="laps-sd-reader")
    reader = Store(
        f"redis://laps-sd-reader:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{own_server.port}/0", "main"
    )
    async with redis_client.Redis.from_url(own_server.url, protocol=2) as operator:
        await operator.execute_command("ACL", "SETUSER", "laps-sd-reader", *rule)

        head, rows = await dumped(reader, tokens=True)
        assert (head["log_entries"], [row["request_id"] for row in rows]) == (1, ["r1", "r2"])
        with pytest.raises(StoreError):
            await reader.acquire_leadership(owner="reader:1", lease_s=60)
        async with redis_client.Redis(
            port=own_server.port or 0, username="laps-sd-reader", password=PASSWORD
        ) as user:
            for command in (("SET", writer.keys.leader(), "x"), ("DEL", writer.keys.log()), ("GET", "other")):
                with pytest.raises(redis_errors.NoPermissionError):
                    await user.execute_command(*command)

        for right in ("get", "hgetall", "zrangebyscore", "zcard", "xrange"):
            await operator.execute_command("ACL", "SETUSER", "laps-sd-reader", f"-{right}")
            with pytest.raises(StoreError, match=r"NOPERM|no permissions"):
                await dumped(reader)
            await operator.execute_command("ACL", "SETUSER", "laps-sd-reader", f"+{right}")
    await reader.close()
    await writer.close()


async def test_the_command_takes_the_settings_of_a_scheduler(store: Store, server: EmbeddedServer) -> None:
    await write_some(store)
    variables = {"LAPS_SD_REDIS_URL": server.url, "LAPS_SD_SHARD": store.keys.shard}

    text = laps_sd_record(**variables)
    as_json = laps_sd_record("--json", "--shard", store.keys.shard, LAPS_SD_REDIS_URL=server.url)

    assert (text.returncode, text.stderr) == (0, "")
    [r1] = [line.split() for line in text.stdout.splitlines() if line.startswith("r1 ")]
    assert r1[:-1] == ["r1", "acme", "leased", "w1", "1", "4", "9", "2"]
    head, *rows = map(json.loads, as_json.stdout.splitlines())
    assert head["unfinished"] == 2
    assert [(row["request_id"], row["committed_tokens"]) for row in rows] == [("r1", 4), ("r2", 0)]
    assert "100000" not in text.stdout + as_json.stdout, "an output is shown"


def test_an_error_is_one_sentence_and_an_exit_code() -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"

    away = laps_sd_record("--redis-url", nowhere)
    wrong = laps_sd_record("--redis-url", "http://x")
    apart = laps_sd_record("--tokens")

    assert (away.returncode, away.stdout) == (1, "")
    assert away.stderr.startswith("laps-sd record: the record cannot be reached: ")
    assert away.stderr.endswith("). --redis-url or LAPS_SD_REDIS_URL names another\n"), away.stderr
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert wrong.stderr.startswith("laps-sd record: LAPS_SD_REDIS_URL must be redis://")
    assert (apart.returncode, apart.stderr) == (2, "laps-sd record: --tokens needs --json.\n")
