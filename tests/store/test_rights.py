"""The user of docs/security.md: the rights that the record needs, and nothing else. Also TLS, and a password
that changes."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio as redis_client
from redis import exceptions as redis_errors

from scheduler_svc.core.commands import Lease, Release
from scheduler_svc.store import scripts
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import StoreError, StoreUnavailable
from scheduler_svc.store.records import Limits
from scheduler_svc.store.servers import RedisTls
from scheduler_svc.store.store import Store
from tests.certificates import behind_tls, write_certificates
from tests.helpers import free_port
from tests.store.conftest import KINDS, binary_of
from tests.store.kit import OK, One, a_commit, a_finish, a_request, accept, fold, lease, read

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
PASSWORD = "correct horse battery staple"


def documented_rule(password: str = PASSWORD, user: str = "laps-sd") -> list[str]:
    """Return the rights of this user on the page."""
    found = re.search(rf"^user {user} (.*)$", PAGE.read_text(), re.MULTILINE)
    assert found is not None
    digest = hashlib.sha256(password.encode()).hexdigest()
    return found[1].replace("SHA256-OF-THE-PASSWORD", digest).split()


@pytest.fixture
async def operator(own_server: EmbeddedServer) -> AsyncIterator[redis_client.Redis]:
    client = redis_client.Redis.from_url(own_server.url, protocol=2)
    await client.execute_command("ACL", "SETUSER", "laps-sd", *documented_rule())
    yield client
    await client.aclose()


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return path


async def use_everything(store: Store) -> None:
    """Run every script, and every other command of a store."""
    await store.ping()
    assert await store.acquire_leadership(owner="a:1", lease_s=60)
    assert await store.leader()
    await accept(store, a_request("r1", idempotency_key="k"), a_request("r2"), a_request("r3"))
    [full] = await store.submit([a_request("r4", idempotency_key="k4")])
    assert full.status.value == "queue_full"
    await lease(store)
    assert await One(store).lease(Lease("r2", "w1", 1)) is OK
    assert await One(store).release(Release("r2", 1)) is OK
    assert await One(store).commit(a_commit()) is OK
    assert await One(store).commit(a_commit(position=3, tokens=(14,))) is OK
    again = a_commit(position=3, tokens=(14,))
    assert (await One(store).commit(again)).name == "ALREADY"
    await fold(store)
    held = await read(store)
    assert await One(store).finish(a_finish("r1")) is OK
    await store.settle_claims()
    await store.save_priors(b"{}")
    assert await store.load_priors() == b"{}"
    await store.save_probes(b"{}")
    assert await store.load_probes() == b"{}"
    assert await store.last_sequence() == 3
    assert await store.unfinished_ids() == ["r2", "r3"]
    assert [request async for chunk in store.load_unfinished() for request in chunk]
    assert await store.reached(["r1"]) == [(1, 4, 4, None)]
    assert await store.renew_leadership()
    await store.try_write()
    store.distrust()
    assert await store.reclaim_leadership(newest_sequence=3)
    await store.reclaimed()
    assert (await One(store).restore(held)).name == "GONE"
    assert await One(store).finish(a_finish("r2")) is OK
    assert await One(store).finish(a_finish("r3")) is OK
    await accept(store, a_request("r5"))
    assert await store.extend("r5", 7)
    assert await store.withdraw(["r5"]) == ["r5"]
    await store.resign()


async def test_the_documented_user_may_do_all_that_the_record_needs(
    own_server: EmbeddedServer, operator: redis_client.Redis, password_file: Path
) -> None:
    store = Store(
        f"redis://laps-sd@127.0.0.1:{own_server.port}/0",
        "main",
        limits=Limits(max_requests=3),
        password_file=password_file,
    )
    await use_everything(store)
    await store.close()


def test_every_command_of_the_scripts_is_on_the_page() -> None:
    allowed = {word[1:] for word in documented_rule() if word.startswith("+")}
    called = {
        name.lower() for script in scripts.ALL for name in re.findall(r"redis\.call\('(\w+)'", script.source)
    }

    assert {name if name != "xinfo" else "xinfo|stream" for name in called} <= allowed
    reading = {"get", "hgetall", "hmget", "zrangebyscore", "xrange"}
    connecting = {"evalsha", "script|load", "info", "exists", "wait", "ping", "select"}
    assert allowed == called - {"xinfo"} | {"xinfo|stream"} | reading | connecting


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "other"),
        ("SET", "laps", "x"),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("EVAL", "return 1", "0"),
        ("SUBSCRIBE", "laps-sd:x"),
        ("SCRIPT", "FLUSH"),
    ],
)
async def test_the_documented_user_may_do_nothing_else(
    own_server: EmbeddedServer, operator: redis_client.Redis, command: tuple[str, ...]
) -> None:
    async with redis_client.Redis(port=own_server.port or 0, username="laps-sd", password=PASSWORD) as user:
        with pytest.raises(redis_errors.NoPermissionError):
            await user.execute_command(*command)


async def test_a_password_is_changed_under_a_running_store(
    own_server: EmbeddedServer,
    operator: redis_client.Redis,
    password_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"redis://laps-sd@127.0.0.1:{own_server.port}/0"
    store = Store(url, "main", password_file=password_file)
    await store.ping()
    assert caplog.messages == []
    await operator.execute_command("ACL", "SETUSER", "laps-sd", "resetpass", ">another")
    await operator.execute_command("CLIENT", "KILL", "USER", "laps-sd")

    with pytest.raises(StoreUnavailable) as refused:
        await store.ping()
    assert PASSWORD not in str(refused.value)
    password_file.write_text("another")  # noqa: ASYNC240
    await store.ping()

    password_file.unlink()  # noqa: ASYNC240
    await operator.execute_command("CLIENT", "KILL", "USER", "laps-sd")
    with pytest.raises(StoreUnavailable, match=r"password file .* cannot be read: No such file"):
        await store.ping()
    await store.close()


@contextlib.contextmanager
def record_with_tls(folder: Path, kind: str, tls: RedisTls) -> Iterator[tuple[EmbeddedServer, int]]:
    """Return the server, and its port that requires a client certificate."""
    if kind == "embedded":
        with EmbeddedServer(folder).start() as server, behind_tls(server.port or 0, tls) as port:
            yield server, port
        return
    port = free_port()
    settings = ("--tls-port", str(port), "--tls-auth-clients", "yes", "--tls-ca-cert-file", str(tls.ca))
    settings += ("--tls-cert-file", str(tls.cert), "--tls-key-file", str(tls.key))
    with EmbeddedServer(folder, binary=binary_of(kind), settings=settings).start() as server:
        yield server, port


@pytest.mark.parametrize("kind", KINDS)
async def test_tls_and_client_certificates(tmp_path: Path, password_file: Path, kind: str) -> None:
    folder = write_certificates(tmp_path / "tls")
    ca, cert, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    tls = RedisTls(ca=ca, cert=cert, key=key)
    with record_with_tls(tmp_path / "data", kind, tls) as (server, port):
        async with redis_client.Redis.from_url(server.url) as operator:
            await operator.execute_command("ACL", "SETUSER", "laps-sd", *documented_rule())
        url = f"rediss://laps-sd@127.0.0.1:{port}/0"
        store = Store(url, "main", tls=tls, password_file=password_file, limits=Limits(max_requests=3))
        await use_everything(store)
        await store.close()

        for wrong in (RedisTls(ca=ca), RedisTls(cert=cert, key=key), None):
            stranger = Store(url, "main", tls=wrong, password_file=password_file)
            with pytest.raises(StoreUnavailable):
                await stranger.ping()
            await stranger.close()


async def test_a_user_who_may_not_wait_for_replicas_is_told(
    own_server: EmbeddedServer, operator: redis_client.Redis, password_file: Path
) -> None:
    await operator.execute_command("ACL", "SETUSER", "laps-sd", "-wait")
    url = f"redis://laps-sd@127.0.0.1:{own_server.port}/0"
    store = Store(url, "main", password_file=password_file, wait_replicas=1)
    await store.acquire_leadership(owner="a:1", lease_s=60)

    with pytest.raises(StoreError, match=r"NOPERM|no permissions"):
        await store.submit([a_request()])
        await One(store).lease(Lease("r1", "w1", 1))
    await store.close()
