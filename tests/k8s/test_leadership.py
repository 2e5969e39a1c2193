"""The election of the operator that acts, over real HTTP to a server that keeps one Lease as Kubernetes does;
test_cluster.py has a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="make setup")

from aiohttp import web
from kubernetes_asyncio import client
from laps_sd_operator import leadership
from laps_sd_operator.leadership import LEASE, Leadership
from structlog.testing import capture_logs

from tests.helpers import wait_until_async

LEASE_S, RENEW_S, RETRY_S = 4.0, 3.0, 0.1
PATH = "/apis/coordination.k8s.io/v1/namespaces/models/leases"


MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
"""The only form in which Kubernetes takes the times of a Lease."""


class Leases:
    """A server with create, read and replace, with the conflicts of Kubernetes. `away`: nothing gets an
    answer; `garbled`: an invalid one; `forbids`: this many calls are refused. `takes_s`: time of each
    answer; `reads`: answers to reads.
    """

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = self.garbled = False
        self.forbids = 0
        self.takes_s = 0.0
        self.reads = 0
        self.answers = asyncio.Event()
        self.renewed = asyncio.Event()
        self._version = 0

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        spec: dict[str, Any] = self.lease["spec"]
        return spec

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        if self.away:
            await self.answers.wait()
        await asyncio.sleep(self.takes_s)
        if self.forbids:
            self.forbids -= 1
            return self._answer(403)
        if self.garbled:
            return web.Response(text="<html>the proxy is starting</html>", content_type="application/json")
        if body is not None and not all(
            MICRO_TIME.fullmatch(body["spec"][name]) for name in ("acquireTime", "renewTime")
        ):
            return self._answer(400)
        if request.method == "GET":
            self.reads += 1
            return self._answer(404 if self.lease is None else 200)
        if request.method == "POST":
            if self.lease is not None:
                return self._answer(409)
        elif self.lease is None or body["metadata"]["resourceVersion"] != str(self._version):
            return self._answer(409)
        self._version += 1
        self.renewed.set()
        self.lease = {**body, "metadata": {"name": LEASE, "resourceVersion": str(self._version)}}
        return self._answer(200)

    def _answer(self, status: int) -> web.Response:
        body = self.lease if status == 200 else {"kind": "Status", "code": status}
        return web.json_response(text=json.dumps(body), status=status)


class Candidate:
    """A candidate that records whether it leads."""

    def __init__(self, api: client.ApiClient, name: str) -> None:
        self.terms = 0
        self.leads = False
        self.leadership = Leadership(api, "models", name, lease_s=LEASE_S, renew_s=RENEW_S, retry_s=RETRY_S)
        self._task = asyncio.create_task(self.leadership.run(self._lead))

    async def _lead(self) -> None:
        self.leads, self.terms = True, self.terms + 1
        try:
            await asyncio.Event().wait()
        finally:
            self.leads = False

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def leases() -> AsyncIterator[tuple[Leases, str]]:
    found = Leases()
    application = web.Application()
    application.router.add_route("*", PATH, found.handle)
    application.router.add_route("*", f"{PATH}/{LEASE}", found.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    (listener,) = site._server.sockets  # type: ignore[attr-defined]
    yield found, f"http://127.0.0.1:{listener.getsockname()[1]}"
    found.answers.set()
    await runner.cleanup()


@contextlib.asynccontextmanager
async def candidate(url: str, name: str) -> AsyncIterator[Candidate]:
    async with client.ApiClient(client.Configuration(host=url)) as api:
        found = Candidate(api, name)
        try:
            yield found
        finally:
            await found.stop()


async def test_one_of_two_leads_and_the_lease_names_it(leases: tuple[Leases, str]) -> None:
    server, url = leases
    async with candidate(url, "a") as a, candidate(url, "b") as b:
        await wait_until_async(lambda: a.leads or b.leads, description="one leads")
        for _ in range(5):
            server.renewed.clear()
            await server.renewed.wait()
            assert a.leads != b.leads
            assert server.spec["holderIdentity"] == ("a" if a.leads else "b")
        assert a.terms + b.terms == 1


async def test_a_released_lease_is_taken_at_once(leases: tuple[Leases, str]) -> None:
    server, url = leases
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
        async with candidate(url, "b") as b:
            await a.stop()
            assert not a.leads
            await a.leadership.release()
            assert not a.leadership.held()
            assert server.spec["holderIdentity"] in (None, "b")
            await wait_until_async(lambda: b.leads, description="b leads")
            assert server.spec["leaseTransitions"] == 1
            await a.leadership.release()  # not its own any more
            assert server.spec["holderIdentity"] == "b"


async def test_who_died_is_succeeded_when_the_lease_has_run_out(
    leases: tuple[Leases, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = leases
    now_s = 1000.0
    monkeypatch.setattr(leadership, "_now_s", lambda: now_s)

    async def read_again() -> None:
        before = server.reads
        await wait_until_async(lambda: server.reads >= before + 3, description="b has looked twice at least")

    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
    async with candidate(url, "b") as b:
        await read_again()
        now_s += LEASE_S - 0.1
        await read_again()
        assert server.spec["holderIdentity"] == "a"
        now_s += 0.2
        await wait_until_async(lambda: b.leads, description="b leads")
        assert server.spec["holderIdentity"] == "b"


async def test_the_same_pod_goes_on_at_once_after_its_container_died(leases: tuple[Leases, str]) -> None:
    server, url = leases
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
    async with candidate(url, "a") as again:
        await wait_until_async(lambda: again.leads, description="it leads again")
    assert server.spec["leaseTransitions"] == 0


async def test_a_term_that_began_with_a_whole_second_is_renewed_as_any_other(
    leases: tuple[Leases, str],
) -> None:
    """Kubernetes takes no time without its fraction, and Python writes none where it is zero."""
    server, url = leases
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
    server.spec["acquireTime"] = began = "2026-11-22T10:00:00.000000Z"
    server.spec["strategy"] = "of a newer Kubernetes"
    async with candidate(url, "a") as again:
        await wait_until_async(lambda: again.leads, description="it leads again")
        assert server.spec["acquireTime"] == began
        assert server.spec["strategy"] == "of a newer Kubernetes"


async def test_an_answer_that_nobody_expected_ends_a_term_and_not_the_candidacy(
    leases: tuple[Leases, str],
) -> None:
    server, url = leases
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
        server.garbled = True
        await wait_until_async(lambda: not a.leads, description="a stops")
        server.garbled = False
        await wait_until_async(lambda: a.leads, description="a leads again")


async def test_who_cannot_renew_stops_before_anybody_else_begins(leases: tuple[Leases, str]) -> None:
    server, url = leases
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
        server.away = True
        await wait_until_async(lambda: not a.leads, description="a stops")
        assert not a.leadership.held()

        server.away = False
        server.answers.set()
        await wait_until_async(lambda: a.leads, description="a leads again")
        assert a.terms == 2


async def test_a_slow_server_keeps_nobody_from_leading(leases: tuple[Leases, str]) -> None:
    server, url = leases
    server.takes_s = RENEW_S / 6  # twice that for each renewal, many times what lies between two
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
        for _ in range(3):
            server.renewed.clear()
            await server.renewed.wait()
            assert a.leads
        assert a.terms == 1


async def test_who_stood_still_knows_that_it_lost_before_it_acts(
    leases: tuple[Leases, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was paused: its clock has gone on, and none of its tasks has run."""
    _, url = leases
    async with candidate(url, "a") as a:
        await wait_until_async(lambda: a.leads, description="a leads")
        loop = asyncio.get_running_loop()
        now = loop.time
        with monkeypatch.context() as later:
            later.setattr(loop, "time", lambda: now() + RENEW_S)
            assert not a.leadership.held()
        assert a.leads


async def test_a_conflict_is_somebody_elses_win_and_no_fault(leases: tuple[Leases, str]) -> None:
    server, url = leases
    with capture_logs() as said:
        async with contextlib.AsyncExitStack() as stack:
            many = [await stack.enter_async_context(candidate(url, f"c{number}")) for number in range(8)]
            await wait_until_async(lambda: any(one.leads for one in many), description="one leads")
            assert sum(one.leads for one in many) == 1
            assert server.spec["leaseTransitions"] == 0
    assert not [one for one in said if one["log_level"] not in ("debug", "info")]


async def test_what_is_in_the_way_is_said_once(leases: tuple[Leases, str]) -> None:
    server, url = leases
    server.forbids = 3
    with capture_logs() as said:
        async with candidate(url, "a") as a:
            await wait_until_async(lambda: a.leads, description="a leads")
    (told,) = [one for one in said if one["event"] == "the lease cannot be had or renewed"]
    assert "403" in told["error"] and server.forbids == 0
