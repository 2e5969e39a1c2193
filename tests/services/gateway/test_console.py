"""The console's page and data: who sees which requests, what bounds it, and what it costs the scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.api.console import routes
from gateway.api.console.snapshots import MAX_REQUESTS
from laps_sd.service.keys import digest_of
from laps_sd.v1.admin_pb2 import QueueEntry, WorkerStatus
from laps_sd.v1.inference_pb2 import Explanation
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import Served, Start
from tests.services.gateway.test_http import TEXT

KEYS = {"acme": "laps-sd-" + "a" * 40, "rival": "laps-sd-" + "b" * 40, "oncall": "laps-sd-" + "c" * 40}
QUEUE = [
    QueueEntry(
        request_id="s0.one",
        tenant="acme",
        state=Explanation.STATE_RUNNING,
        level=2,
        worker_id="w0",
        waiting_s=1.5,
    ),
    QueueEntry(request_id="s0.two", tenant="rival", state=Explanation.STATE_QUEUED, perceptible=True),
]
WORKER = WorkerStatus(
    worker_id="w0", worker_name="gpu-0", slots=4, running=1, acceptance=0.75, tokens_per_s=90
)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    lines = [f'[tenants.{name}]\nkeys = ["{digest_of(key)}"]' for name, key in KEYS.items()]
    path.write_text("\n".join([*lines, "operator = true\n"]))
    return path


@pytest.fixture
async def keyed(serve: Start, keys_file: Path) -> Served:
    served = await serve(api_keys_file=keys_file, trust_tenant_metadata=False)
    served.scheduler.queue = list(QUEUE)
    served.scheduler.workers = [WORKER]
    return served


@pytest.fixture
async def single(serve: Start) -> Served:
    """Return a gateway that all callers of one machine use as one tenant."""
    return await serve(trust_tenant_metadata=False)


def as_(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


@asynccontextmanager
async def watching(served: Served, headers: Any = None) -> AsyncIterator[Any]:
    """Open the stream of snapshots; yields a function that returns the next one, or raises EOFError."""
    async with served.session.get(served.url + "/console/api/events", headers=headers) as response:
        assert response.status == 200, await response.text()

        async def following() -> Any:
            event = await response.content.readuntil(b"\n\n")
            if not event:
                raise EOFError
            return json.loads(event.removeprefix(b"data: "))

        yield following


async def snapshot(served: Served, headers: Any = None) -> Any:
    async with watching(served, headers) as following:
        return await following()


async def get(served: Served, path: str, headers: Any = None) -> tuple[int, Any]:
    async with served.session.get(served.url + path, headers=headers) as response:
        return response.status, await response.json()


class TestWhoSeesWhat:
    async def test_a_tenant_sees_its_own_requests_and_no_worker(self, keyed: Served) -> None:
        seen = await snapshot(keyed, as_("acme"))
        (shard,) = seen["shards"]
        row = dict(zip(seen["columns"], shard["requests"][0], strict=True))
        assert row == {
            "id": "s0.one", "tenant": "acme", "priority": 0, "state": "running", "level": 2, "perceptible": None,
            "age_s": 1.5, "attained_s": 0.0, "tokens": 0, "worker": "w0",
        }  # fmt: skip
        assert len(shard["requests"]) == 1
        assert (seen["sees_all"], shard["policy"]) == (False, "laps-sd")
        assert not {"total", "workers"} & shard.keys()
        assert "rival" not in json.dumps(seen) and "s0.two" not in json.dumps(seen)

    async def test_an_operator_sees_all_requests_and_the_workers(self, keyed: Served) -> None:
        seen = await snapshot(keyed, as_("oncall"))
        (shard,) = seen["shards"]
        assert [row[0] for row in shard["requests"]] == ["s0.one", "s0.two"]
        assert (seen["sees_all"], shard["total"], shard["complete"]) == (True, 2, True)
        (worker,) = shard["workers"]
        assert (worker["name"], worker["acceptance"], worker["tokens_per_s"]) == ("gpu-0", 0.75, 90)

    async def test_the_only_tenant_of_a_machine_sees_all(self, single: Served) -> None:
        single.scheduler.workers = [WORKER]
        seen = await snapshot(single)
        assert seen["sees_all"] and len(seen["shards"][0]["workers"]) == 1

    @pytest.mark.parametrize("path", ["events", "requests/s0.one"])
    async def test_without_a_known_key_nothing_is_shown(self, keyed: Served, path: str) -> None:
        for headers in (None, {"Authorization": "Bearer laps-sd-wrong"}):
            status, answer = await get(keyed, f"/console/api/{path}", headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")

    @pytest.mark.parametrize("path", ["events", "requests/s0.one"])
    async def test_strangers_at_an_open_gateway_see_nothing(self, serve: Start, path: str) -> None:
        """They are one tenant, and could cancel each other's requests by their ids."""
        served = await serve(grpc_host="0.0.0.0", anonymous="yes", trust_tenant_metadata=False)
        status, answer = await get(served, f"/console/api/{path}")
        assert status == 401 and "needs a key" in answer["error"]["message"]

    async def test_a_page_whose_name_resolves_to_this_machine_sees_nothing(self, single: Served) -> None:
        for host in ("evil.example", "127.0.0.1.evil.example", ""):
            status, _ = await get(single, "/console/api/events", {"Host": host})
            assert status == 403
        for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
            await snapshot(single, {"Host": host})

    async def test_a_tenant_of_a_proxy_sees_its_own_requests(self, serve: Start) -> None:
        served = await serve()
        served.scheduler.queue = list(QUEUE)
        seen = await snapshot(served, {"laps-sd-tenant": "rival"})
        assert [row[0] for row in seen["shards"][0]["requests"]] == ["s0.two"]

    async def test_a_stream_ends_when_its_key_is_withdrawn(self, keyed: Served, keys_file: Path) -> None:
        async with watching(keyed, as_("acme")) as following:
            await following()
            await asyncio.to_thread(keys_file.write_text, "")
            assert keyed.running.gateway.tenants.maybe_reload()
            with pytest.raises(EOFError):
                while True:
                    await following()


class TestExplanations:
    async def test_of_an_own_request_only_unless_an_operator_asks(self, keyed: Served) -> None:
        call = asyncio.create_task(keyed.post("/v1/completions", TEXT, headers=as_("acme")))
        request_id = await keyed.scheduler.submitted()
        path = f"/console/api/requests/{request_id}"
        assert (await get(keyed, path, as_("rival")))[0] == 404
        for tenant in ("acme", "oncall"):
            status, answer = await get(keyed, path, as_(tenant))
            assert (status, answer["request_id"], answer["policy"]) == (200, request_id, "fcfs")
            assert answer["story"] == []
        await keyed.finished()
        await call

    @pytest.mark.parametrize("request_id", ["s9.x", "x" * 300, "%00"])
    async def test_of_an_id_that_is_none(self, single: Served, request_id: str) -> None:
        status, _ = await get(single, f"/console/api/requests/{request_id}")
        assert status in (400, 404)


class TestCost:
    async def test_all_viewers_of_a_second_cost_one_query(self, keyed: Served) -> None:
        await asyncio.gather(*(snapshot(keyed, as_(tenant)) for tenant in KEYS for _ in range(5)))
        assert len(keyed.scheduler.queue_limits) <= 2  # a second may pass between them
        assert set(keyed.scheduler.queue_limits) == {MAX_REQUESTS}

    async def test_without_viewers_no_query_is_made(self, single: Served) -> None:
        await snapshot(single)
        made = len(single.scheduler.queue_limits)
        hellos = len(single.scheduler.heard)
        await wait_until_async(
            lambda: len(single.scheduler.heard) > hellos + 30, description="1.5 s of heartbeats"
        )
        assert len(single.scheduler.queue_limits) == made

    async def test_a_long_queue_is_cut_and_says_so(self, single: Served) -> None:
        single.scheduler.queue = [QueueEntry(request_id=f"s0.{number}") for number in range(MAX_REQUESTS + 1)]
        (shard,) = (await snapshot(single))["shards"]
        assert (len(shard["requests"]), shard["total"], shard["complete"]) == (
            MAX_REQUESTS,
            MAX_REQUESTS + 1,
            False,
        )

    async def test_more_viewers_than_allowed_are_refused(
        self, single: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(routes, "MAX_VIEWERS", 1)
        async with watching(single) as following:
            await following()
            status, answer = await get(single, "/console/api/events")
            assert status == 429 and "consoles are open" in answer["error"]["message"]

        async def is_open() -> bool:
            async with single.session.get(single.url + "/console/api/events") as response:
                return response.status == 200

        async with asyncio.timeout(10):
            while not await is_open():  # the gateway notices that a client has left
                pass

    async def test_the_viewers_of_a_tenant_leave_room_for_others(
        self, keyed: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(routes, "MAX_VIEWERS", 2)
        monkeypatch.setattr(routes, "MAX_VIEWERS_OF_TENANT", 1)
        async with watching(keyed, as_("acme")) as following:
            await following()
            status, answer = await get(keyed, "/console/api/events", as_("acme"))
            assert status == 429 and "1 of this tenant" in answer["error"]["message"]
            await snapshot(keyed, as_("oncall"))

    async def test_opening_it_counts_as_a_call_of_the_tenant(self, serve: Start, keys_file: Path) -> None:
        with keys_file.open("a") as file:
            file.write("requests_per_minute = 1\n")
        served = await serve(api_keys_file=keys_file, trust_tenant_metadata=False)
        for _ in range(10):
            await snapshot(served, as_("oncall"))
        status, _ = await get(served, "/console/api/events", as_("oncall"))
        assert status == 429


class TestFaults:
    async def test_a_shard_without_a_leader_is_named(self, single: Served) -> None:
        await single.scheduler.kill()
        async with watching(single) as following:
            while "problem" not in (shard := (await following())["shards"][0]):
                pass
        assert shard["requests"] == []

    async def test_a_scheduler_that_refuses_the_query_is_named(self, single: Served) -> None:
        single.scheduler.denies_surveys = True
        (shard,) = (await snapshot(single))["shards"]
        assert "may not act as operator" in shard["problem"]

    async def test_numbers_that_json_lacks_are_zero(self, single: Served) -> None:
        single.scheduler.queue = [
            QueueEntry(request_id="s0.a", waiting_s=float("nan"), attained_s=float("inf"))
        ]
        (shard,) = (await snapshot(single))["shards"]
        assert shard["requests"][0][6:8] == [0, 0]

    async def test_a_stopping_gateway_ends_the_streams(self, single: Served) -> None:
        async with watching(single) as following:
            await following()
            stopping = asyncio.create_task(single.running.gateway.stop())
            with pytest.raises(EOFError):
                while True:
                    await following()
            await stopping


class TestThePage:
    @pytest.mark.parametrize("path", ["/console", "/console/demo"])
    async def test_is_served_without_a_key_and_loads_nothing_from_elsewhere(
        self, keyed: Served, path: str
    ) -> None:
        async with keyed.session.get(keyed.url + path) as response:
            page = await response.text()
            assert (response.status, response.content_type) == (200, "text/html")
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert "://" not in page

    async def test_assets_are_kept_by_browsers(self, single: Served) -> None:
        url = single.url + "/console/assets/console.js"
        async with single.session.get(url) as response:
            assert (response.status, response.content_type) == (200, "text/javascript")
        async with single.session.get(url, headers={"If-None-Match": response.headers["ETag"]}) as again:
            assert (again.status, await again.read()) == (304, b"")

    @pytest.mark.parametrize("name", ["nothing.js", "..%2f__init__.py", "%2e%2e%2froutes.py"])
    async def test_only_assets_are_served(self, single: Served, name: str) -> None:
        assert (await get(single, f"/console/assets/{name}"))[0] == 404

    async def test_it_can_be_turned_off(self, serve: Start) -> None:
        served = await serve(console=False, trust_tenant_metadata=False)
        for path in ("", "/demo", "/assets/console.js", "/api/events"):
            assert (await get(served, f"/console{path}"))[0] == 404
