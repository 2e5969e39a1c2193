"""Scripted gateways and workers that speak the real links to a real scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from laps_sd.keda import externalscaler_pb2_grpc
from laps_sd.service.config import load
from laps_sd.service.interceptor import CallGuard
from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.service.wire import server_options
from laps_sd.v1 import admin_pb2_grpc, gateway_link_pb2_grpc, worker_link_pb2_grpc
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc.__main__ import steady_unix_clock
from scheduler_svc.leader.leadership import Leadership
from scheduler_svc.rpc.admin import Admin
from scheduler_svc.rpc.autoscaling import ExternalScaler
from scheduler_svc.rpc.links import GatewayLink, WorkerLink
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.records import Limits
from scheduler_svc.store.store import Store


@dataclass
class SchedulerUnderTest:
    """One scheduler in this process: real server, real store."""

    settings: SchedulerSettings
    store: Store
    leadership: Leadership
    server: Any
    address: str
    leading: asyncio.Task[None]
    stopping: asyncio.Event

    async def wait_leading(self) -> None:
        while self.leadership.loop is None:
            if self.leading.done():
                self.leading.result()
            await asyncio.sleep(0.01)

    async def crash(self) -> None:
        """Stop as if the process died: no resignation, streams cut."""
        self.leading.cancel()
        await asyncio.gather(self.leading, return_exceptions=True)
        await self.server.stop(None)
        await self.store.close()


async def start_scheduler(
    redis_url: str, *, shard: str, clock: Callable[[], float] = steady_unix_clock, **overrides: Any
) -> SchedulerUnderTest:
    settings = load(
        SchedulerSettings,
        {"redis_url": redis_url, "shard": shard, "lease_s": 0.6, "policy": "fcfs", **overrides},
        environ={},
    )
    store = Store(
        redis_url,
        shard,
        limits=Limits(
            max_requests=settings.max_requests,
            max_prompt_tokens=settings.max_queued_tokens,
            max_requests_per_tenant=settings.max_requests_per_tenant,
        ),
        finished_ttl_s=settings.finished_ttl_s,
        clock=clock,
    )
    leadership = Leadership(settings, store, on_lead=lambda _: None)
    server = grpc.aio.server(interceptors=[CallGuard()], options=server_options())
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLink(leadership), server)
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLink(leadership), server)
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(leadership), server)
    stopping = asyncio.Event()
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(ExternalScaler(leadership, stopping), server)
    leadership.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    leading = asyncio.create_task(leadership.run())
    return SchedulerUnderTest(settings, store, leadership, server, leadership.address, leading, stopping)


class Peer:
    """One end of a link: sends the test's messages, keeps the received ones."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.heard: list[Any] = []
        self._news = asyncio.Event()
        self.ended = False
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for message in self.call:
                if message.WhichOneof("message") != "heartbeat":
                    self.received(message)
                    self.heard.append(message)
                    self._news.set()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended = True
            self._news.set()

    def received(self, message: Any) -> None:
        """Look at a message before it is kept."""

    async def send(self, message: Any) -> None:
        await self.call.write(message)

    async def wait_for(self, wanted: Callable[[Any], Any], description: str, *, stays: bool = False) -> Any:
        """Remove and return the first received message that fits; others stay, and it too with `stays`."""
        async with asyncio.timeout(15):
            while True:
                for index, message in enumerate(self.heard):
                    if wanted(message):
                        return message if stays else self.heard.pop(index)
                assert not self.ended, f"the stream ended before: {description}; heard {self.heard}"
                self._news.clear()
                await self._news.wait()

    async def next(self, kind: str) -> Any:
        """Return the next message of this kind."""
        message = await self.wait_for(lambda m: m.WhichOneof("message") == kind, kind)
        return getattr(message, kind)

    async def wait_ended(self) -> None:
        async with asyncio.timeout(15):
            await asyncio.gather(self._reading, return_exceptions=True)

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


class GatewayPeer(Peer):
    async def submit(
        self,
        request_id: str,
        *,
        prompt: tuple[int, ...] = (1, 2, 3),
        max_tokens: int = 8,
        attachment_id: str = "",
        submission_id: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        cache_salt: str = "",
        **fields: Any,
    ) -> gateway_pb.SubmitReply:
        specification = gateway_pb.Specification(
            request_id=request_id,
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, top_p=1.0, seed=7),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cache_salt=cache_salt,
        )
        submit = gateway_pb.Submit(
            submission_id=submission_id,
            request_id=request_id,
            tenant=fields.pop("tenant", "anonymous"),
            specification=specification,
            attachment_id=attachment_id or f"{request_id}-client",
            model="m",
            **fields,
        )
        await self.send(gateway_pb.GatewayMessage(submit=submit))
        reply = await self.wait_for(
            lambda m: (
                m.WhichOneof("message") == "submit_reply" and m.submit_reply.submission_id == submission_id
            ),
            "the answer to a submit",
        )
        return reply.submit_reply

    async def attach(
        self,
        request_id: str,
        *,
        from_token: int = 0,
        attachment_id: str = "late",
        tenant: str = "anonymous",
        wants_submission: bool = False,
    ) -> gateway_pb.AttachReply:
        attach = gateway_pb.Attach(
            attach_id=1,
            request_id=request_id,
            tenant=tenant,
            from_token=from_token,
            attachment_id=attachment_id,
            wants_submission=wants_submission,
        )
        await self.send(gateway_pb.GatewayMessage(attach=attach))
        return await self.next("attach_reply")

    async def detach(self, request_id: str, attachment_id: str) -> None:
        detach = gateway_pb.Detach(request_id=request_id, attachment_id=attachment_id)
        await self.send(gateway_pb.GatewayMessage(detach=detach))

    async def read(self, attachment_id: str, *, until: int | None = None) -> tuple[list[int], Any]:
        """Return the tokens delivered to this attachment, from its first position to the end (or to `until`
        tokens), and the end.
        """
        tokens: list[int] = []
        position: int | None = None

        def mine(message: Any) -> bool:
            return message.WhichOneof("message") == "deliveries" and any(
                d.attachment_id == attachment_id for d in all_deliveries(message)
            )

        while True:
            message = await self.wait_for(mine, f"deliveries to {attachment_id}")
            for delivery in all_deliveries(message):
                if delivery.attachment_id != attachment_id:
                    continue
                if position is not None:
                    assert delivery.first_token == position, "a gap or a repetition"
                position = delivery.first_token + len(delivery.token_ids)
                tokens += delivery.token_ids
                if delivery.HasField("end"):
                    return tokens, delivery.end
            if until is not None and len(tokens) >= until:
                return tokens, None


def all_deliveries(reply: gateway_pb.GatewayLinkReply) -> list[gateway_pb.Delivery]:
    """Return the deliveries of a message, with those in columns, which do not name their request."""
    plain = reply.deliveries.plain
    rows = zip(plain.attachment_ids, plain.first_tokens, plain.token_counts, strict=True)
    token_ids = iter(plain.token_ids)
    in_columns = [
        gateway_pb.Delivery(
            attachment_id=attachment_id,
            first_token=first_token,
            token_ids=itertools.islice(token_ids, count),
        )
        for attachment_id, first_token, count in rows
    ]
    assert not list(token_ids), "tokens of no attachment"
    return [*in_columns, *reply.deliveries.deliveries]


@dataclass
class Running:
    """State of one request at a scripted worker."""

    lease_epoch: int
    specification: gateway_pb.Specification
    tokens: list[int] = field(default_factory=list)


class WorkerPeer(Peer):
    """A worker that runs nothing by itself: the test sets how many tokens each request generates."""

    def __init__(self, call: Any, worker_id: str) -> None:
        super().__init__(call)
        self.worker_id = worker_id
        self.number = 0
        self._listed: dict[str, worker_pb.AssignmentEntry] = {}

    def received(self, message: Any) -> None:
        """Put the whole list in place of its changes."""
        if message.WhichOneof("message") == "assignment":
            assignment = message.assignment
            if not assignment.changes:
                self._listed.clear()
            for request_id in assignment.removed:
                del self._listed[request_id]
            self._listed.update({entry.request_id: entry for entry in assignment.entries})
            whole = list(self._listed.values())
            message.assignment.CopyFrom(worker_pb.Assignment(number=assignment.number, entries=whole))

    async def assigned(self, *request_ids: str) -> dict[str, Running]:
        """Wait until exactly these are listed; their specifications must have come before."""
        specifications: dict[str, Running] = {}

        def fits(message: Any) -> bool:
            return message.WhichOneof("message") == "assignment" and {
                entry.request_id for entry in message.assignment.entries
            } == set(request_ids)

        message = await self.wait_for(fits, f"{self.worker_id} is assigned {request_ids}")
        for heard in self.heard:
            if heard.WhichOneof("message") == "specifications":
                for leased in heard.specifications.specifications:
                    specifications[leased.specification.request_id] = Running(
                        leased.lease_epoch, leased.specification, list(leased.specification.committed_ids)
                    )
        for entry in message.assignment.entries:
            known = specifications.get(entry.request_id)
            if known is not None:
                known.lease_epoch = entry.lease_epoch
        return specifications

    def report(
        self,
        request_id: str,
        lease_epoch: int,
        position: int,
        tokens: list[int],
        *,
        end: gateway_pb.RequestEnd.Kind | None = None,
        number: int | None = None,
        columns: bool = False,
    ) -> worker_pb.RoundReport:
        if number is None:
            self.number += 1
            number = self.number
        plain = worker_pb.PlainProgress(
            request_ids=[request_id],
            lease_epochs=[lease_epoch],
            positions=[position],
            token_counts=[len(tokens)],
            token_ids=tokens,
            drafted=[4],
            accepted=[max(0, len(tokens) - 1)],
        )
        progress = worker_pb.RequestProgress(
            request_id=request_id,
            lease_epoch=lease_epoch,
            position=position,
            token_ids=tokens,
            drafted=4,
            accepted=max(0, len(tokens) - 1),
            end=end or gateway_pb.RequestEnd.KIND_UNSPECIFIED,
        )
        return worker_pb.RoundReport(
            number=number,
            progress=[] if columns else [progress],
            plain=plain if columns else None,
            draft_s=0.001,
            verify_s=0.01,
            total_s=0.011,
            free_target_blocks=100,
        )

    async def send_reports(self, *reports: worker_pb.RoundReport) -> None:
        await self.send(worker_pb.WorkerMessage(reports=worker_pb.RoundReports(reports=reports)))

    async def run_round(
        self,
        request_id: str,
        lease_epoch: int,
        position: int,
        tokens: list[int],
        *,
        end: gateway_pb.RequestEnd.Kind | None = None,
    ) -> None:
        """Report one round of one request, and wait for its acknowledgement."""
        report = self.report(request_id, lease_epoch, position, tokens, end=end)
        await self.send_reports(report)
        await self.acknowledged(report.number)

    async def acknowledged(self, number: int) -> None:
        await self.wait_for(
            lambda m: max(m.acknowledged_number, m.acknowledged.number) >= number,
            f"report {number} is acknowledged",
            stays=True,
        )


def worker_hello(worker_id: str, **fields: Any) -> worker_pb.WorkerHello:
    defaults: dict[str, Any] = {
        "worker_id": worker_id,
        "worker_name": fields.pop("worker_name", worker_id),
        "pool": "demo",
        "protocol_versions": PROTOCOL_VERSIONS,
        "fingerprint": "pair",
        "device": "none",
        "slots": 1,
        "target_blocks": 128,
        "draft_blocks": 128,
        "block_size": 16,
        "max_length": 1024,
        "max_draft_tokens": 4,
        "vocab_size": 1024,
    }
    return worker_pb.WorkerHello(**{**defaults, **fields})


@contextlib.asynccontextmanager
async def gateway(
    address: str, gateway_id: str = "g1", *, protocol_versions: Sequence[int] = PROTOCOL_VERSIONS
) -> AsyncIterator[GatewayPeer]:
    async with grpc.aio.insecure_channel(address) as channel:
        peer = GatewayPeer(gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect())
        hello = gateway_pb.GatewayHello(gateway_id=gateway_id, protocol_versions=protocol_versions)
        await peer.send(gateway_pb.GatewayMessage(hello=hello))
        try:
            yield peer
        finally:
            await peer.close()


@contextlib.asynccontextmanager
async def worker(address: str, worker_id: str = "w1", **hello: Any) -> AsyncIterator[WorkerPeer]:
    async with grpc.aio.insecure_channel(address) as channel:
        peer = WorkerPeer(worker_link_pb2_grpc.WorkerLinkStub(channel).Connect(), worker_id)
        await peer.send(worker_pb.WorkerMessage(hello=worker_hello(worker_id, **hello)))
        try:
            yield peer
        finally:
            await peer.close()


def data_dir(base: Path) -> Path:
    path = base / "valkey"
    path.mkdir(exist_ok=True)
    return path
