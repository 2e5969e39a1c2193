"""`laps-sd top`: what it shows of shards, and what its keys do, without a terminal and against a running stack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from laps_sd.cli.leader import Leader
from laps_sd.cli.top import lines
from laps_sd.cli.top.screen import Top
from laps_sd.cli.top.source import Reading, Source
from laps_sd.cli.top.table import Table
from laps_sd.client import Accepted, Client
from laps_sd.service.wire import Tls
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2
from laps_sd.v1 import inference_pb2 as pb
from tests.helpers import wait_until_async

NOBODY = "127.0.0.1:1"


def entry(number: int, **fields: Any) -> admin_pb2.QueueEntry:
    named: dict[str, Any] = {
        "request_id": f"s0.{number:026d}",
        "tenant": f"tenant-{number % 3}",
        "state": pb.Explanation.STATE_QUEUED,
        "level": number % 4,
        "waiting_s": float(number),
        "emitted_tokens": number,
        "ordered_by": f"about {number} s left",
    }
    return admin_pb2.QueueEntry(**named | fields)


def reading(*entries: admin_pb2.QueueEntry, shard: str = "s0", **fields: Any) -> Reading:
    worker = admin_pb2.WorkerStatus(
        worker_id="w1",
        worker_name="worker-1",
        connected=True,
        slots=8,
        running=2,
        listed=5,
        target_blocks=100,
        free_target_blocks=40,
        acceptance=0.5,
        tokens_per_s=123.4,
    )
    return Reading(
        admin_pb2.GetShardResponse(shard=shard, policy="laps-sd", **fields),
        admin_pb2.ListWorkersResponse(workers=[worker]),
        admin_pb2.ListQueueResponse(entries=entries, total=len(entries)),
    )


class Prepared(Source):
    """A shard whose readings the test makes; nothing is called."""

    def __init__(self, now: Reading) -> None:
        super().__init__(Leader(NOBODY, Tls()), limit=10_000)
        self.now = now

    def read(self) -> Reading:
        return self.now


def of(stack: LocalStack) -> Source:
    return Source(Leader(stack.scheduler_address, Tls()), limit=1000)


@asynccontextmanager
async def running(
    *sources: Source, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """Run the application without a terminal; it has read each shard once."""
    app = Top(sources, every_s=0.05)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.query_one("#workers", Table).rows, "the first reading is shown")
        yield app, pilot


async def until(pilot: Pilot[None], predicate: Any, description: str) -> None:
    async def holds() -> Any:
        await pilot.pause()
        return predicate()

    await wait_until_async(holds, description=description)


def written(app: Top, place: str) -> str:
    return str(app.screen.query_one(place, Static).content)


def requests(app: Top) -> Table:
    return app.query_one("#requests", Table)


def drawn(table: Table) -> list[str]:
    """Return the lines of a table as they are on the screen."""
    return [table.render_line(y).text for y in range(table.size.height)]


def ids(app: Top) -> list[str]:
    return [row.key[1] for row in requests(app).rows]


# What it shows.


def test_the_totals_of_a_shard() -> None:
    error = admin_pb2.EstimateError(moment="arrival", count=9, median_ratio=1.04, p90_ratio=2.1)
    shown = lines.summary(
        [
            reading(
                entry(1),
                depth_by_level=[0, 7, 0, 12],
                backlog_s=34.25,
                preemptions=3,
                prompt_tokens=200,
                cached_prompt_tokens=50,
                estimate_errors=[error],
            )
        ]
    )

    assert shown == [
        "shard s0  1 request (2 running)  1 worker  123 tokens/s  policy laps-sd",
        "50% accepted  backlog 34.2 s  3 preemptions  25% of prompt tokens cached",
        "waiting by level  1: 7  3: 12",
        "actual/estimated time (p90)  arrival 1 (2.1)",
    ]


def test_several_shards_have_a_line_each_and_one_of_their_levels() -> None:
    shown = lines.summary([reading(depth_by_level=[1, 2]), reading(shard="s1", depth_by_level=[3])])

    assert [line.split("  ")[0] for line in shown] == ["shard s0", "shard s1", "waiting by level"]
    assert shown[-1] == "waiting by level  0: 4  1: 2"


def test_control_characters_of_clients_and_workers_do_not_reach_the_terminal() -> None:
    evil = "a\x1b[2Jb"
    rows = lines.requests(
        [(0, reading(entry(1, request_id=evil, tenant=evil, worker_id=evil, ordered_by=evil)))]
    )

    assert all(cell.isprintable() for cell in rows[0].cells)
    assert rows[0].key == (0, evil), "the id to cancel is the one that the scheduler knows"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", [1, 2, 3, 4, 10]),
        ("TENANT-1", [1, 4, 10]),
        ("tenant-1 about", [1, 4, 10]),
        ("level:2", [2, 10]),
        ("level:", [1, 2, 3, 4, 10]),
        ("tenant:1 level:2", [10]),
        ("state:running", []),
        ("nothing:here", []),
    ],
)
def test_a_filter_is_words_in_any_column_or_in_one(text: str, numbers: list[int]) -> None:
    rows = lines.requests([(0, reading(*(entry(number) for number in (1, 2, 3, 4, 10))))])

    found = lines.filtered(rows, lines.REQUESTS, text)

    assert [row.values[8] for row in found] == numbers


@pytest.mark.parametrize("width", [40, 80, 100, 160])
async def test_it_fits_the_terminal_and_no_id_is_cut(width: int) -> None:
    source = Prepared(reading(*(entry(number, ordered_by="a long reason " * 9) for number in range(30))))
    async with running(source, size=(width, 24)) as (app, _):
        titles, *shown = drawn(requests(app))

        assert all(len(line) <= width for line in [titles, *shown])
        assert all(f"s0.{number:026d}" in line for number, line in enumerate(shown))
        assert ("ordered by" in titles) == (width >= 100)


async def test_wide_characters_and_markup_of_names_are_shown_as_they_are() -> None:
    names = ["東京の部署", "[b]x[/b]"]
    source = Prepared(reading(*(entry(at, tenant=name) for at, name in enumerate(names))))
    async with running(source, size=(130, 40)) as (app, pilot):
        assert [name in line for name, line in zip(names, drawn(requests(app))[1:], strict=False)] == [
            True,
            True,
        ]

        source.now = reading(entry(1), shard="[b]s0[/b]")
        await until(pilot, lambda: "[b]s0[/b]" in written(app, "#summary"), "the name is shown")


async def test_only_what_changed_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a thousand requests has had more service: its line is drawn, and no other."""
    source = Prepared(reading(*(entry(number) for number in range(1000))))
    async with running(source, size=(130, 40)) as (app, pilot):
        table = requests(app)
        found: list[int] = []
        render_line = table.render_line
        monkeypatch.setattr(table, "render_line", lambda y: found.append(y) or render_line(y))
        source.now = reading(*(entry(number, attained_s=9.0 * (number == 3)) for number in range(1000)))
        await until(pilot, lambda: found, "the change is drawn")

        assert found == [4]


async def test_the_chosen_request_stays_chosen_where_it_moves() -> None:
    first, second, third = (entry(number) for number in range(3))
    source = Prepared(reading(first, second, third))
    async with running(source) as (app, pilot):
        await pilot.press("down")
        source.now = reading(third, first, second)
        await until(pilot, lambda: ids(app)[0] == third.request_id, "the new order is shown")
        assert (chosen := requests(app).chosen) and chosen.key[1] == second.request_id

        source.now = reading(third, first)
        await until(pilot, lambda: len(ids(app)) == 2, "it has ended")
        assert (chosen := requests(app).chosen) and chosen.key[1] == first.request_id


async def test_keys_sort_by_a_column_and_turn_it_round() -> None:
    entries = [entry(1, waiting_s=5.0), entry(2, waiting_s=30.0), entry(3, waiting_s=7.0)]
    async with running(Prepared(reading(*entries)), size=(130, 40)) as (app, pilot):
        table = requests(app)
        while lines.REQUESTS[table.sort_column].title != "age s":
            await pilot.press("s")
        assert [row.values[6] for row in table.rows] == [30.0, 7.0, 5.0]

        await pilot.press("r")
        assert [row.values[6] for row in table.rows] == [5.0, 7.0, 30.0]

        await pilot.click(table, offset=(0, 0))
        assert [row.values[0] for row in table.rows] == [1, 2, 3]


async def test_the_filter_holds_while_it_is_typed_and_until_it_is_ended() -> None:
    async with running(Prepared(reading(*(entry(number) for number in range(6))))) as (app, pilot):
        await pilot.press("/", *"tenant:1")
        assert len(ids(app)) == 2

        await pilot.press("enter")
        assert requests(app).has_focus
        assert "2 of 6 requests shown, filter: tenant:1" in written(app, "#status")

        await pilot.press("escape")
        assert len(ids(app)) == 6


async def test_help_lists_the_keys_on_80_columns() -> None:
    async with running(Prepared(reading(entry(1)))) as (app, pilot):
        await pilot.press("question_mark")
        dialog = app.screen.query_one(".dialog", Static)
        assert "cancel the chosen request" in str(dialog.content)
        assert dialog.region.width <= 80 and dialog.region.height <= 24

        await pilot.press("x")
        assert not app.screen.query(".dialog")


# Against a running stack.


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(engine="fake", workers=2, slots=2) as stack:
        yield stack


def begin(stack: LocalStack, *, many: int) -> list[str]:
    """Begin long requests, which continue without their client; return their ids."""
    begun = []
    with Client(stack.gateway_address) as client:
        for seed in range(many):
            events = client.stream("A long story", seed=seed, max_tokens=1900, ignore_eos=True, keep=True)
            accepted = next(events)
            assert isinstance(accepted, Accepted)
            begun.append(accepted.request_id)
            events.close()
    return begun


async def test_workers_and_requests_are_shown_explained_and_cancelled(stack: LocalStack) -> None:
    begun = await asyncio.to_thread(begin, stack, many=8)
    async with running(of(stack), size=(130, 40)) as (app, pilot):
        await until(pilot, lambda: set(ids(app)) == set(begun), "the requests are shown")
        names = [row.cells[0] for row in app.query_one("#workers", Table).rows]
        assert names == ["worker-0", "worker-1"]
        assert "8 requests" in written(app, "#summary")

        requests(app).choose((0, begun[0]))
        await pilot.press("e")
        await until(pilot, lambda: "arrived" in written(app, "#story"), "the timeline is shown")
        assert written(app, "#story").startswith(begun[0])

        await pilot.press("c")
        assert begun[0] in str(app.screen.query_one(".dialog", Static).content)
        await pilot.press("n")
        assert begun[0] in ids(app)

        await pilot.press("c", "y")
        await until(pilot, lambda: begun[0] not in ids(app), "the cancelled request has left the queue")
        await until(pilot, lambda: "ended, cancelled" in written(app, "#story"), "its end is shown")
        assert set(ids(app)) <= set(begun[1:]), "no other one ended by that key"


async def test_a_lost_scheduler_is_named_and_its_return_noticed(stack: LocalStack) -> None:
    await asyncio.to_thread(begin, stack, many=1)
    async with running(of(stack)) as (app, pilot):
        await asyncio.to_thread(stack.kill, "scheduler")
        await until(pilot, lambda: "no answer from" in written(app, "#status"), "the loss is shown")
        assert stack.scheduler_address in written(app, "#status")
        assert ids(app), "what was known is still shown"

        await asyncio.to_thread(stack.restart, "scheduler")
        await until(pilot, lambda: not written(app, "#status"), "it has answered again")


async def test_a_shard_that_cannot_be_reached_does_not_hide_another(stack: LocalStack) -> None:
    nobody = Source(Leader(NOBODY, Tls()), limit=10)
    async with running(nobody, of(stack), size=(130, 40)) as (app, pilot):
        await until(pilot, lambda: NOBODY in written(app, "#status"), "the shard without an answer is named")
        assert {row.cells[1] for row in app.query_one("#workers", Table).rows} == {"s0"}
        assert "shard" in drawn(app.query_one("#workers", Table))[0]


async def test_a_worker_is_drained(stack: LocalStack) -> None:
    async with running(of(stack)) as (app, pilot):
        # A scheduler that has just started has a worker's name from its hello, and its id before.
        workers = app.query_one("#workers", Table)
        await until(
            pilot, lambda: any("worker-0 " in line for line in drawn(workers)), "its worker is connected"
        )
        await pilot.press("d")
        assert "Drain worker worker-0?" in str(app.screen.query_one(".dialog", Static).content)
        await pilot.press("y")

        await wait_until_async(
            lambda: not stack.children["worker-0"].alive, description="the worker's process has ended"
        )
        assert stack.children["worker-0"].returncode == 0
