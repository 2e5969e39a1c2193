"""A copy of objects that follows the API server by lists and watches, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="make setup")

from kubernetes_asyncio import client
from laps_sd_operator.api import Api
from laps_sd_operator.kubernetes import pods_path, pools_path
from laps_sd_operator.objects import POOL_LABEL
from laps_sd_operator.watching import NotDefined, Watched
from structlog.testing import capture_logs

from tests.helpers import wait_until_async
from tests.k8s.api_server import NAMESPACE, ApiServer, Refusal


class Copy:
    """A copy of the pods that are a pool's, and each change that it reported."""

    def __init__(self, api: Api, path: str = pods_path(NAMESPACE)) -> None:
        self.changes: list[tuple[str, str]] = []
        self.now_s = 0.0
        self.watched = Watched(
            api,
            path,
            changed=self._changed,
            first_pause_s=0.01,
            longest_pause_s=0.05,
            clock=lambda: self.now_s,
            labelSelector=POOL_LABEL,
        )
        self.task = asyncio.create_task(self.watched.run())

    def _changed(self, before: Any, after: Any) -> None:
        what = "changed" if before and after else "added" if after else "deleted"
        self.changes.append((what, (after or before)["metadata"]["name"]))

    def names(self) -> list[str]:
        return sorted(self.watched.objects)


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().serve() as found:
        yield found


@contextlib.asynccontextmanager
async def copied(server: ApiServer, path: str = pods_path(NAMESPACE)) -> AsyncIterator[Copy]:
    async with client.ApiClient(client.Configuration(host=server.url)) as connection:
        found = Copy(Api(connection), path)
        try:
            yield found
        finally:
            found.task.cancel()
            await asyncio.gather(found.task, return_exceptions=True)


def pod(name: str, pool: str | None = "p") -> dict[str, Any]:
    labels = {POOL_LABEL: pool} if pool else {}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": {"phase": "Running"}}


async def has(copy: Copy, *names: str) -> None:
    await wait_until_async(lambda: copy.names() == sorted(names), description=f"the copy has {names}")


def count(server: ApiServer, verb: str) -> int:
    return server.calls.count(("pods", verb))


async def test_it_follows_one_list_by_one_watch(server: ApiServer) -> None:
    server.add("pods", pod("a"))
    server.add("pods", pod("other", pool=None))
    async with copied(server) as copy:
        await has(copy, "a")
        await wait_until_async(lambda: count(server, "watch"), description="it watches")
        server.add("pods", pod("b"))
        server.change("pods", "a", {"status": {"phase": "Failed"}})
        server.add("pods", pod("another", pool=None))
        server.delete("pods", "b")

        await wait_until_async(lambda: copy.changes[-1:] == [("deleted", "b")], description="b is gone")

        assert copy.changes == [("added", "a"), ("added", "b"), ("changed", "a"), ("deleted", "b")]
        assert copy.watched.objects["a"]["status"] == {"phase": "Failed"}
        assert (count(server, "list"), count(server, "watch")) == (1, 1)


async def test_a_broken_connection_is_continued_from_its_version(server: ApiServer) -> None:
    async with copied(server) as copy:
        for name in ("a", "b", "c"):
            await wait_until_async(lambda: count(server, "watch"), description="it watches")
            server.end_watches()
            server.add("pods", pod(name))
        await has(copy, "a", "b", "c")
        assert count(server, "list") == 1
        assert [what for what, _ in copy.changes] == ["added"] * 3, "nothing is missed or repeated"


async def test_an_expired_version_needs_a_new_list_which_shows_what_was_missed(server: ApiServer) -> None:
    server.add("pods", pod("a"))
    server.add("pods", pod("b"))
    async with copied(server) as copy:
        await wait_until_async(lambda: count(server, "watch"), description="it watches")
        server.refusals["pods", "watch"] = Refusal(503, "starting")
        server.end_watches()
        await wait_until_async(lambda: count(server, "watch") > 1, description="it tries again")
        server.delete("pods", "a")
        server.change("pods", "b", {"status": {"phase": "Failed"}})
        server.add("pods", pod("c"))
        server.compact()
        del server.refusals["pods", "watch"]

        await has(copy, "b", "c")

        assert set(copy.changes[2:]) == {("deleted", "a"), ("changed", "b"), ("added", "c")}


async def test_a_bookmark_moves_the_version_and_saves_the_list(server: ApiServer) -> None:
    async with copied(server) as copy:
        await wait_until_async(lambda: count(server, "watch"), description="it watches")
        server.add("events", {"metadata": {"name": "of-another-kind"}})
        server.bookmark("pods")
        server.add("pods", pod("a"))
        await has(copy, "a")
        server.compact()
        server.bookmark("pods")
        server.end_watches()
        server.add("pods", pod("b"))
        await has(copy, "a", "b")
        assert count(server, "list") == 1


@pytest.mark.parametrize(
    "message",
    [
        {"type": "ADDED"},
        {"type": "NEWS", "object": {"metadata": {"name": "a", "resourceVersion": "1"}}},
        {"type": "ADDED", "object": {"metadata": {"name": "a"}}},
        [],
        {"type": "ERROR", "object": {"code": 500, "reason": "InternalError", "message": "m"}},
    ],
    ids=["no object", "no such type", "no version", "no message", "an error"],
)
async def test_a_message_that_makes_no_sense_costs_a_new_list_and_no_more(
    server: ApiServer, message: Any
) -> None:
    async with copied(server) as copy:
        await wait_until_async(lambda: count(server, "watch"), description="it watches")
        with capture_logs() as said:
            server.send("pods", message)
            await wait_until_async(lambda: count(server, "list") == 2, description="it lists again")
        server.add("pods", pod("a"))
        await has(copy, "a")
    assert [one["event"] for one in said if one["log_level"] == "warning"] == ["cannot watch; tries again"]


async def test_what_is_in_the_way_is_logged_once_and_its_end_too(server: ApiServer) -> None:
    server.refusals["pods", "list"] = Refusal(403, "may not list pods")
    with capture_logs() as said:
        async with copied(server) as copy:
            await wait_until_async(lambda: count(server, "list") > 3, description="it tries again and again")
            assert not copy.watched.listed.is_set()
            del server.refusals["pods", "list"]
            await copy.watched.listed.wait()
    events = [one["event"] for one in said]
    assert events == ["cannot watch; tries again", "watches again"]
    assert "may not list pods" in said[0]["error"]


async def test_the_age_starts_again_with_every_sign_of_the_server(server: ApiServer) -> None:
    async with copied(server) as copy:
        await copy.watched.listed.wait()
        server.add("pods", pod("a"))
        await has(copy, "a")
        copy.now_s = 60.0
        assert copy.watched.age_s() == 60.0
        server.bookmark("pods")
        await wait_until_async(lambda: copy.watched.age_s() == 0.0, description="a bookmark is a sign")


async def test_a_kind_that_is_not_defined_ends_it(server: ApiServer) -> None:
    server.defined = False
    async with copied(server, pools_path(NAMESPACE)) as copy:
        with pytest.raises(NotDefined):
            await copy.task


async def test_a_definition_that_is_deleted_ends_it_too(server: ApiServer) -> None:
    async with copied(server, pools_path(NAMESPACE)) as copy:
        await copy.watched.listed.wait()
        server.defined = False
        server.end_watches()
        with pytest.raises(NotDefined):
            await copy.task


def test_pauses_double_up_to_their_limit() -> None:
    watched = Watched(None, "/pods", changed=lambda *_: None, first_pause_s=1.0, longest_pause_s=10.0)  # type: ignore[arg-type]
    pauses = watched._pauses()

    for limit_s in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        assert limit_s / 2 <= next(pauses) <= limit_s
