"""The choice of a shard for a request, and shards that are added and removed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

import gateway.links.shards as shards_module
from gateway import metrics
from gateway.links.shards import ShardPlace, parse_shards
from laps_sd.errors import StartupError
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2 as pb
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import Running, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind

Refused = link_pb2.SubmitRefused


def load(backlog_s: float, *, requests: int = 10, workers: int = 1, gateways: int = 1) -> link_pb2.ShardLoad:
    return link_pb2.ShardLoad(backlog_s=backlog_s, requests=requests, workers=workers, gateways=gateways)


class Shop:
    """A gateway and its shards."""

    def __init__(self, path: Path, start_scheduler: StartGateway, start_gateway: StartGateway) -> None:
        self.path = path
        self.schedulers: dict[str, FakeScheduler] = {}
        self._start_scheduler = start_scheduler
        self._start_gateway = start_gateway
        self.running: Running

    async def add(self, shard: str, **script: Any) -> FakeScheduler:
        scheduler = self.schedulers[shard] = await self._start_scheduler(shard=shard)
        for name, value in script.items():
            setattr(scheduler, name, value)
        return scheduler

    def write(self, *lines: str) -> None:
        self.path.write_text("\n".join(lines))

    def line(self, shard: str) -> str:
        return f"{shard} {self.schedulers[shard].address}"

    async def open(self, **settings: Any) -> None:
        self.write(*(self.line(shard) for shard in self.schedulers))
        self.running = await self._start_gateway("127.0.0.1:1", shards_file=self.path, **settings)
        for shard in self.schedulers:
            await self.knows(shard)

    async def knows(self, shard: str) -> None:
        """Wait until the link is up and the load is known."""

        def known() -> bool:
            link = self.running.gateway.shards.links.get(shard)
            wanted = self.schedulers[shard].load
            return link is not None and link.connected and (wanted is None or link.load == wanted)

        await wait_until_async(known, description=f"shard {shard} is known", every_s=0.005)

    async def submit(self, **fields: Any) -> str:
        """Submit one request, wait until it is accepted, and return its shard. The stream stays open."""
        call = self.running.stub.GenerateStream(pb.GenerateRequest(text="hello", **fields))
        event = await call.read()
        self.calls.append(call)
        return shard_of_accepted(event.accepted)

    async def submit_all(self, n: int, **fields: Any) -> list[pb.Accepted]:
        """Submit one call for n outputs and wait until all are accepted. The stream stays open."""
        call = self.running.stub.GenerateStream(pb.GenerateRequest(text="hello", n=n, **fields))
        self.calls.append(call)
        return [(await call.read()).accepted for _ in range(n)]

    calls: list[Any]


def shard_of_accepted(accepted: pb.Accepted) -> str:
    return accepted.request_id.partition(".")[0]


@pytest.fixture
async def shop(tmp_path: Path, start_scheduler: StartGateway, start_gateway: StartGateway) -> Any:
    shop = Shop(tmp_path / "shards", start_scheduler, start_gateway)
    shop.calls = []
    yield shop
    for call in shop.calls:
        call.cancel()


class TestTheFile:
    def test_has_a_line_for_each_shard(self) -> None:
        text = "# all of pool demo\ns0 a:1,b:2\n\n s1  c:3 draining # soon gone\n"

        assert parse_shards(text) == [
            ShardPlace("s0", ("a:1", "b:2")),
            ShardPlace("s1", ("c:3",), draining=True),
        ]

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "must name at least one shard"),
            ("s0 a:1 draining", "must name at least one shard that is not draining"),
            ("s0", "line 1 must be NAME"),
            ("s0 a:1 b:2", "line 1 must be NAME"),
            ("s.0 a:1", "line 1: the name of a shard must be"),
            ("s0 a:1\ns0 b:2", "line 2: shard 's0' is there already"),
            ("s0 a", "line 1: the schedulers of shard 's0' must be host:port"),
            ("s0 a:0", "line 1: the schedulers of shard 's0' must be host:port"),
            ("s0 ,", "line 1: the schedulers of shard 's0' must name at least one"),
        ],
    )
    def test_says_what_is_wrong_with_it(self, text: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            parse_shards(text)

    async def test_stops_a_gateway_that_cannot_begin_with_it(
        self, tmp_path: Path, start_gateway: StartGateway
    ) -> None:
        with pytest.raises(StartupError, match="No such file"):
            await start_gateway("a:1", shards_file=tmp_path / "none")


async def test_an_output_without_max_tokens_fits_every_shard(shop: Shop) -> None:
    """What the context leaves is more than these workers have room for."""
    for shard, room in (("s0", 60), ("s1", 80), ("s2", 0)):
        await shop.add(shard, load=link_pb2.ShardLoad(workers=1, capacity_tokens=room))
    await shop.open()

    shard = await shop.submit()
    (submit,) = shop.schedulers[shard].all_heard("submit")
    specification = submit.specification
    assert len(specification.prompt_ids) + specification.sampling.max_tokens == 60


class TestTheChoice:
    async def test_is_the_least_expected_wait(self, shop: Shop) -> None:
        await shop.add("s0", load=load(backlog_s=30, workers=2))
        await shop.add("s1", load=load(backlog_s=40, workers=4))
        await shop.open()

        assert await shop.submit() == "s1"

    async def test_reckons_with_what_went_there_since_the_leader_spoke(self, shop: Shop) -> None:
        """Each request takes 1 s of one worker; s1 is 4 s behind s0 until four more wait at s0."""
        s0 = await shop.add("s0", load=load(backlog_s=10, requests=10))
        s1 = await shop.add("s1", load=load(backlog_s=14, requests=14))
        await shop.open()
        s0.heartbeats = s1.heartbeats = False
        for link in shop.running.gateway.shards.links.values():
            link.submitted = 0

        assert [await shop.submit() for _ in range(4)] == ["s0"] * 4
        assert Counter([await shop.submit() for _ in range(4)]) == {"s0": 2, "s1": 2}

    async def test_reckons_that_other_gateways_do_the_same(self, shop: Shop) -> None:
        s0 = await shop.add("s0", load=load(backlog_s=10, requests=10, gateways=8))
        s1 = await shop.add("s1", load=load(backlog_s=14, requests=14, gateways=8))
        await shop.open()
        s0.heartbeats = s1.heartbeats = False
        for link in shop.running.gateway.shards.links.values():
            link.submitted = 0

        assert [await shop.submit() for _ in range(2)] == ["s0", "s1"]

    async def test_is_made_for_each_output_of_a_call(self, shop: Shop) -> None:
        for shard in ("s0", "s1"):
            await shop.add(shard)
        await shop.open()

        assert Counter(map(shard_of_accepted, await shop.submit_all(4))) == {"s0": 2, "s1": 2}

    async def test_avoids_a_shard_without_workers(self, shop: Shop) -> None:
        await shop.add("s0", load=load(backlog_s=0, requests=0, workers=0))
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()

        assert {await shop.submit() for _ in range(3)} == {"s1"}

    async def test_spreads_evenly_where_nothing_is_known(self, shop: Shop) -> None:
        for shard in ("s0", "s1", "s2"):
            await shop.add(shard)
        await shop.open()

        assert Counter([await shop.submit() for _ in range(9)]) == {"s0": 3, "s1": 3, "s2": 3}

    async def test_avoids_a_shard_that_would_refuse(self, shop: Shop) -> None:
        """Its leader may take seconds to refuse, where its record does not answer."""
        refusing = load(backlog_s=0)
        refusing.refuses.detail = "the record cannot be written"
        s0 = await shop.add("s0", load=refusing)
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()

        assert await shop.submit() == "s1"
        assert s0.all_heard("submit") == []

        s0.load = load(backlog_s=0)
        await shop.knows("s0")
        assert await shop.submit() == "s0"

    async def test_avoids_a_shard_without_a_leader(self, shop: Shop) -> None:
        await shop.add("s0", load=load(backlog_s=0))
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()
        await shop.schedulers["s0"].kill()
        link = shop.running.gateway.shards.links["s0"]
        await wait_until_async(lambda: not link.connected, description="the link is broken", every_s=0.005)

        assert await shop.submit() == "s1"


async def test_the_workers_of_a_shard_whose_leader_is_lost_are_not_counted(shop: Shop) -> None:
    await shop.add("s0", load=load(backlog_s=0, workers=2))
    await shop.add("s1", load=load(backlog_s=0, workers=3))
    await shop.open()
    shards = shop.running.gateway.shards
    assert shards.workers == 5

    await shop.schedulers["s0"].kill()
    await wait_until_async(
        lambda: not shards.links["s0"].connected, description="the link is broken", every_s=0.005
    )

    assert shards.workers == 3


class TestARefusal:
    @pytest.mark.parametrize(
        "reason", [Refused.REASON_QUEUE_FULL, Refused.REASON_STORE_UNAVAILABLE, Refused.REASON_INVALID]
    )
    async def test_of_one_shard_leads_to_the_next(self, shop: Shop, reason: Any) -> None:
        await shop.add("s0", load=load(backlog_s=0), refuse=Refused(reason=reason))
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()

        assert await shop.submit() == "s1"
        assert len(shop.schedulers["s0"].all_heard("submit")) == 1
        streams = shop.running.gateway.shards.links["s0"].streams
        assert len(streams) == 0

    async def test_of_all_is_told_as_the_first_said_it(self, shop: Shop) -> None:
        for shard, detail in (("s0", "first"), ("s1", "second")):
            refuse = Refused(reason=Refused.REASON_QUEUE_FULL, detail=detail, retry_after_ms=500)
            await shop.add(shard, load=load(backlog_s=float(shard[1])), refuse=refuse)
        await shop.open()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await shop.running.stub.Generate(pb.GenerateRequest(text="hello"))

        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == "first"

    async def test_for_the_request_itself_ends_it(self, shop: Shop) -> None:
        refuse = Refused(reason=Refused.REASON_TENANT_FULL)
        await shop.add("s0", load=load(backlog_s=0), refuse=refuse)
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await shop.running.stub.Generate(pb.GenerateRequest(text="hello"))

        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert shop.schedulers["s1"].all_heard("submit") == []


class TestAnIdempotencyKey:
    async def test_leads_to_the_shard_that_has_it(self, shop: Shop) -> None:
        elsewhere = Refused(reason=Refused.REASON_KEY_ELSEWHERE, shard="s1")
        await shop.add("s0", load=load(backlog_s=0), refuse=elsewhere)
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()

        assert await shop.submit(idempotency_key="k") == "s1"

    async def test_leads_to_a_draining_shard_too(self, shop: Shop) -> None:
        elsewhere = Refused(reason=Refused.REASON_KEY_ELSEWHERE, shard="s1")
        await shop.add("s0", refuse=elsewhere)
        await shop.add("s1")
        await shop.open()
        shop.write(shop.line("s0"), shop.line("s1") + " draining")
        await wait_until_async(
            lambda: shop.running.gateway.shards._draining, description="s1 drains", every_s=0.02
        )

        assert await shop.submit(idempotency_key="k") == "s1"

    async def test_finds_every_output_at_the_shard_that_took_it(self, shop: Shop) -> None:
        s0 = await shop.add("s0")
        s1 = await shop.add("s1")
        s1.claims = s0.claims
        await shop.open()
        first = await shop.submit_all(4, idempotency_key="k")
        s0.load = load(backlog_s=1000)
        s1.load = load(backlog_s=0)
        for shard in shop.schedulers:
            await shop.knows(shard)
        again = await shop.submit_all(4, idempotency_key="k")

        assert {shard_of_accepted(one) for one in first} == {"s0", "s1"}
        assert [one.request_id for one in again] == [one.request_id for one in first]
        assert all(one.attached for one in again)

    async def test_of_a_shard_that_refuses_is_refused_for_the_reason_of_that_shard(self, shop: Shop) -> None:
        elsewhere = Refused(reason=Refused.REASON_KEY_ELSEWHERE, shard="s1")
        await shop.add("s0", load=load(backlog_s=0), refuse=elsewhere)
        await shop.add(
            "s1",
            load=load(backlog_s=1000),
            refuse=Refused(reason=Refused.REASON_KEY_CONFLICT, detail="another body"),
        )
        await shop.open()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await shop.running.stub.Generate(pb.GenerateRequest(text="hello", idempotency_key="k"))

        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS

    async def test_of_a_shard_that_is_not_known_here_has_to_come_again(self, shop: Shop) -> None:
        elsewhere = Refused(reason=Refused.REASON_KEY_ELSEWHERE, shard="s7")
        await shop.add("s0", refuse=elsewhere)
        await shop.open()

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await shop.running.stub.Generate(pb.GenerateRequest(text="hello", idempotency_key="k"))

        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "'s7'" in (refused.value.details() or "")


class TestShardsComeAndGo:
    async def test_a_new_line_is_a_new_shard(self, shop: Shop) -> None:
        await shop.add("s0", load=load(backlog_s=1000))
        await shop.open()
        await shop.add("s1", load=load(backlog_s=0))
        shop.write(shop.line("s0"), shop.line("s1"))
        await shop.knows("s1")

        assert await shop.submit() == "s1"

    async def test_a_request_that_another_gateway_put_there_is_found_before_the_file_is_read_again(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shards_module, "LOOK_EVERY_S", 3600.0)
        await shop.add("s0")
        await shop.open()
        await shop.add("s1")
        shop.write(shop.line("s0"), shop.line("s1"))

        assert shop.running.gateway.shards.link_of("s1." + "a" * 26).shard == "s1"

    async def test_a_request_of_a_shard_that_the_file_does_not_name_yet_may_exist(self, shop: Shop) -> None:
        await shop.add("s0")
        await shop.open()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await shop.running.stub.Explain(pb.ExplainRequest(request_id="s1." + "a" * 26))

        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "'s1'" in (error.value.details() or "")

    async def test_a_shard_that_is_taken_out_serves_its_streams_to_the_end(self, shop: Shop) -> None:
        s0 = await shop.add("s0", load=load(backlog_s=0))
        await shop.add("s1", load=load(backlog_s=1000))
        await shop.open()
        assert await shop.submit() == "s0"
        shop.write(shop.line("s1"))
        shards = shop.running.gateway.shards
        await wait_until_async(lambda: shards._draining, description="s0 drains", every_s=0.02)

        assert await shop.submit() == "s1"
        s0.commit(await s0.submitted(), [70], Kind.KIND_LENGTH)
        while (event := await shop.calls[0].read()) is not grpc.aio.EOF:
            last = event.WhichOneof("event")
        assert last == "end"
        await wait_until_async(lambda: "s0" not in shards.links, description="s0 is gone", every_s=0.02)
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await shop.running.stub.Explain(pb.ExplainRequest(request_id="s0.abc"))
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND

    async def test_a_shard_that_is_taken_out_is_no_longer_measured(self, shop: Shop) -> None:
        """An alert fires for every link that is measured as down."""
        await shop.add("s0")
        await shop.add("s1")
        await shop.open()

        def measured() -> set[str]:
            links = (metrics.LINK_UP, metrics.LINK_GREETINGS)
            return {sample.labels["shard"] for link in links for sample in link.collect()[0].samples}

        assert {"s0", "s1"} <= measured()
        shop.write(shop.line("s1"))
        await wait_until_async(lambda: "s0" not in measured(), description="s0 is gone", every_s=0.02)
        assert metrics.LINK_UP.labels("s1")._value.get() == 1

        shop.write(shop.line("s0"), shop.line("s1"))
        await shop.knows("s0")
        assert metrics.LINK_UP.labels("s0")._value.get() == 1

    async def test_a_shard_that_is_taken_out_and_added_at_once_is_connected(self, shop: Shop) -> None:
        await shop.add("s0")
        await shop.add("s1")
        await shop.open()
        shards = shop.running.gateway.shards
        before = shards.links["s0"]
        shop.write(shop.line("s1"))
        shards._look()
        shop.write(shop.line("s0"), shop.line("s1"))
        shards._look()

        assert shards.links["s0"] is not before
        await shop.knows("s0")

    async def test_a_file_that_cannot_be_used_changes_nothing(
        self, shop: Shop, capfd: pytest.CaptureFixture[str]
    ) -> None:
        await shop.add("s0")
        await shop.open()
        shards = shop.running.gateway.shards
        shop.write("s0 nonsense")
        await wait_until_async(lambda: "nonsense" in shards._text, description="it is read", every_s=0.02)

        assert await shop.submit() == "s0"
        shop.path.unlink()
        await wait_until_async(lambda: "unreadable" in shards._text, description="it is gone", every_s=0.02)
        assert await shop.submit() == "s0"
        logged = "".join(capfd.readouterr())
        assert "line 1: the schedulers of shard 's0' must be host:port" in logged
        assert "No such file" in logged

    async def test_schedulers_that_move_are_found(self, shop: Shop) -> None:
        await shop.add("s0")
        await shop.open()
        await shop.schedulers["s0"].kill()
        await shop.add("s0")
        shop.write(shop.line("s0"))
        await asyncio.wait_for(shop.schedulers["s0"].connected(), 10)

        assert await shop.submit() == "s0"

    async def test_a_gateway_that_began_with_the_wrong_shards_becomes_ready_with_the_right_ones(
        self, shop: Shop
    ) -> None:
        shop.write("s9 127.0.0.1:1")
        shop.running = await shop._start_gateway("127.0.0.1:1", shards_file=shop.path)
        await shop.add("s0")
        shop.write(shop.line("s0"))

        await asyncio.wait_for(shop.running.gateway.shards.greeted(), 10)

        assert await shop.submit() == "s0"


class TestHealth:
    async def test_is_ready_while_one_shard_would_accept_a_request(self, shop: Shop) -> None:
        full, away = load(0.0), load(0.0)
        full.refuses.detail, away.refuses.detail = (
            "the queue of shard a is full",
            "the record of shard b is away",
        )
        await shop.add("a", load=full)
        b = await shop.add("b", load=load(0.0))
        await shop.open()
        calls = shop.running.gateway.calls
        assert calls.refusal == ""

        b.load = away
        await shop.knows("b")
        assert calls.refusal == f"{full.refuses.detail}; {away.refuses.detail}"

        shop.schedulers["a"].load = load(0.0)
        await shop.knows("a")
        assert calls.refusal == ""

    async def test_a_shard_that_drains_makes_nothing_ready(self, shop: Shop) -> None:
        refusing = load(0.0)
        refusing.refuses.detail = "the queue of shard a is full"
        await shop.add("a", load=refusing)
        await shop.add("b", load=load(0.0))
        await shop.open()
        shop.write(shop.line("a"), shop.line("b") + " draining")

        await wait_until_async(
            lambda: shop.running.gateway.calls.refusal == refusing.refuses.detail,
            description="only the shard that refuses is left",
        )
