"""The gateway's end of GatewayLink for one shard: finds the leader, stays connected, recovers after every
fault.

    link = ShardLink(settings, "s0", seeds=["scheduler-0:50052", "scheduler-1:50052"])
    run = asyncio.create_task(link.run())        # until cancelled
    stream = link.submit(submit, deadline=None)
    try:
        acceptance = await link.accepted(stream, wait_s=30)
        stream.on_news = ...                     # called when `stream.has_news` becomes true
        batch = link.take(stream, now)           # whatever waits; the last batch has an end
    finally:
        link.close(stream)                       # no await: works in a cancelled call, and in order after the Submit

`streams` decides without awaiting which messages must be sent. This module puts them in a queue that lives as
long as a connection; the messages in it when the connection breaks are rebuilt from the streams at the next
greeting.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import grpc.aio

from gateway import metrics
from gateway.links.admin import call_leader
from gateway.links.client_stream import Accepted, Batch, ClientStream
from gateway.links.greeting import Call, check_hello, exchange_hellos
from gateway.links.mismatches import Mismatches
from gateway.links.streams import Streams
from gateway.settings import GatewaySettings
from laps_sd.errors import NotFound, Unavailable
from laps_sd.service.leader_link import (
    BackOff,
    LeaderSearch,
    LinkBroken,
    Liveness,
    Visit,
    until_first_ends,
    watch,
)
from laps_sd.service.leader_stream import STREAM_ERRORS, denial, next_reply, reason_of
from laps_sd.service.log import get_logger
from laps_sd.service.wire import Tls, make_channel
from laps_sd.v1 import admin_pb2, gateway_link_pb2_grpc, inference_pb2
from laps_sd.v1 import gateway_link_pb2 as link_pb2

log = get_logger(__name__)

PATIENCE_ROUNDS = 8
"""Failed rounds of dialling before a warning: about 3 s, which a change of leader takes."""
EXPLAIN_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Survey:
    """The present state of a shard, by its leader."""

    queue: admin_pb2.ListQueueResponse
    workers: admin_pb2.ListWorkersResponse


class AcceptedStream(NamedTuple):
    """A stream whose request is accepted, and the link that it is closed by."""

    link: ShardLink
    stream: ClientStream
    acceptance: Accepted


class ShardLink:
    """The link to the leader of one shard, see the top of this file. One task runs `run`; everything else may
    be called from any task of the same loop."""

    def __init__(
        self,
        settings: GatewaySettings,
        shard: str,
        *,
        seeds: Sequence[str] | None = None,
        tls: Tls | None = None,
        vocabulary: bytes = b"",
    ) -> None:
        """`tls`: shared by all links of the gateway; None: plain text. `vocabulary`: see `Mismatches`."""
        self.shard = shard
        self.seeds = list(settings.scheduler_seeds if seeds is None else seeds)
        """Addresses of schedulers; each of them names the leader. May change at any time; the next round of
        dialling uses the new ones."""
        self.load: link_pb2.ShardLoad | None = None
        """Load in the leader's latest report; None without a leader."""
        self.submitted = 0
        """Number of new requests since the leader's latest report."""
        self.streams = Streams(buffer_tokens=settings.stream_buffer_tokens, restore_s=settings.restore_s)
        self.greeted = asyncio.Event()
        """Event that the first leader sets; it stays set."""
        self.gateway_id = f"gateway-{secrets.token_hex(8)}"
        self._settings = settings
        self._tls = tls
        self._mismatches = Mismatches(settings, shard, self.gateway_id, vocabulary)
        self._connected = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._leader_epoch = ""
        self._outbox: deque[link_pb2.GatewayMessage] = deque()
        self._outbox_filled = asyncio.Event()
        self._cancels: dict[int, tuple[link_pb2.GatewayMessage, asyncio.Future[link_pb2.CancelReply]]] = {}
        self._attachments = 0
        metrics.LINK_UP.labels(shard).set(0)

    @property
    def connected(self) -> bool:
        """Return whether a leader has greeted on the present connection."""
        return self._connected.is_set()

    @property
    def refusal(self) -> str:
        """Return the reason why the shard would refuse any new request now; empty if it would accept one."""
        if not self.connected:
            return f"no scheduler leads shard {self.shard}, or it cannot be reached"
        if self.load is not None and self.load.HasField("refuses"):
            return self.load.refuses.detail
        return ""

    def expected_wait_s(self, request_s: float) -> float:
        """Return the expected seconds until a new request would run, if each takes `request_s` of machine
        time. Infinite without a worker, and until the leader has reported its backlog."""
        if self.load is None or not self.load.workers:
            return math.inf
        # All gateways have received the same load report, and choose as this one does until the next report.
        since_s = self.submitted * max(1, self.load.gateways) * request_s
        return (self.load.backlog_s + since_s) / self.load.workers

    # ---- for calls

    def submit(self, submit: link_pb2.Submit, *, deadline: float | None) -> ClientStream:
        """Submit a request; without a leader it waits for one. `deadline` is in the loop's time. Close the
        stream."""
        stream, message = self.streams.submit(
            submit, attachment_id=self._new_attachment_id(), deadline=deadline, now=self._now()
        )
        self._send(message)
        self.submitted += 1
        return stream

    def attach(self, request_id: str, *, tenant: str) -> ClientStream:
        """Attach to a request from its first token. Close the stream."""
        stream, message = self.streams.attach(
            request_id, tenant=tenant, attachment_id=self._new_attachment_id(), now=self._now()
        )
        self._send(message)
        return stream

    async def accepted(self, stream: ClientStream, *, wait_s: float) -> Accepted:
        """Wait for the scheduler's answer to a new stream and return it. Raises its refusal, or Unavailable
        after `wait_s`."""
        answered = asyncio.Event()
        stream.on_news = answered.set
        try:
            async with asyncio.timeout(wait_s):
                while stream.acceptance is None and stream.failure is None:
                    await answered.wait()
                    answered.clear()
                    stream.has_news = False
        except TimeoutError:
            raise self._unreachable(wait_s) from None
        if stream.acceptance is None:
            assert stream.failure is not None, "the loop ended with one of the two"
            raise stream.failure
        stream.has_news = stream.over or bool(stream.waiting.token_ids)
        return stream.acceptance

    def take(self, stream: ClientStream, now: float) -> Batch:
        """Return everything that arrived since the last call; `now` is in the loop's time. Raises the
        stream's failure."""
        batch, messages = self.streams.take(stream, now)
        if messages:
            self._send(*messages)
        return batch

    def close(self, stream: ClientStream) -> None:
        """Close a stream whose client is gone or has everything. Idempotent."""
        self._send(*self.streams.close(stream))

    async def cancel(self, request_id: str, *, tenant: str, wait_s: float) -> bool:
        """End a request; return False if it had ended. Raises NotFound or Unavailable."""
        cancel_id = self.streams.new_id()
        message = link_pb2.GatewayMessage(
            cancel=link_pb2.CancelRequested(cancel_id=cancel_id, request_id=request_id, tenant=tenant)
        )
        answer: asyncio.Future[link_pb2.CancelReply] = asyncio.get_running_loop().create_future()
        self._cancels[cancel_id] = (message, answer)
        self._send(message)
        try:
            async with asyncio.timeout(wait_s):
                reply = await answer
        except TimeoutError:
            raise self._unreachable(wait_s) from None
        finally:
            del self._cancels[cancel_id]
        if not reply.found:
            raise NotFound(f"there is no request {request_id!r}")
        return reply.cancelled

    def cancel_soon(self, request_id: str, *, tenant: str) -> None:
        """End a request, unless the stream to the leader breaks before; nothing waits for the answer."""
        cancel = link_pb2.CancelRequested(
            cancel_id=self.streams.new_id(), request_id=request_id, tenant=tenant
        )
        self._send(link_pb2.GatewayMessage(cancel=cancel))

    async def explain(self, request_id: str, *, tenant: str, wait_s: float) -> inference_pb2.ExplainResponse:
        """Return the leader's explanation of a request's state. Raises NotFound or Unavailable."""
        request = admin_pb2.AdminExplainRequest(request_id=request_id, tenant=tenant)
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await self._connected.wait()
                    assert self._channel is not None, "connected means that there is a channel"
                    response = await call_leader(self._channel, lambda admin: admin.ExplainRequest(request))
                    if response is not None:
                        return response
                    await asyncio.sleep(EXPLAIN_PAUSE_S)
        except TimeoutError:
            raise self._unreachable(wait_s) from None
        except NotFound as error:
            raise NotFound(f"there is no request {request_id!r}") from error

    async def survey(self, *, most: int, wait_s: float) -> Survey:
        """Return the leader's queue, `most` requests at most, and its workers. Raises Unavailable, or the
        leader's refusal."""
        if self._channel is None:
            raise Unavailable(self.refusal, retry_after_s=1.0)
        wanted = admin_pb2.ListQueueRequest(limit=most)
        try:
            async with asyncio.timeout(wait_s):
                queue, workers = await asyncio.gather(
                    call_leader(self._channel, lambda admin: admin.ListQueue(wanted)),
                    call_leader(
                        self._channel, lambda admin: admin.ListWorkers(admin_pb2.ListWorkersRequest())
                    ),
                )
        except TimeoutError:
            raise self._unreachable(wait_s) from None
        if queue is None or workers is None:
            raise Unavailable(f"the leader of shard {self.shard} is changing", retry_after_s=1.0)
        return Survey(queue, workers)

    def _unreachable(self, wait_s: float) -> Unavailable:
        what = "did not answer" if self.connected else "could not be reached"
        return Unavailable(
            f"the scheduler of shard {self.shard!r} {what} within {wait_s:g} s", retry_after_s=1.0
        )

    # ---- the connection

    async def run(self) -> None:
        """Keep a connection to the shard's leader until cancelled."""
        back_off = BackOff(self._settings.backoff_min_s, self._settings.backoff_max_s)
        search = LeaderSearch(back_off, random.Random())
        while True:
            seeds = list(self.seeds)
            search.begin_round(seeds)
            while (address := search.next_address()) is not None:
                search.visited(address, await self._visit(address))
            pause_s = search.end_round_s()
            rounds = search.failed_rounds
            if rounds and rounds & (rounds - 1) == 0:  # the 1st, 2nd, 4th, 8th … failed round
                log_at_level = log.info if rounds < PATIENCE_ROUNDS else log.warning
                log_at_level("no scheduler leads", shard=self.shard, asked=seeds, rounds=rounds)
            await asyncio.sleep(pause_s)

    async def _visit(self, address: str) -> Visit:
        """Dial one scheduler, and stay connected as long as it leads and its messages arrive."""
        greeted = False
        leader = denied = ""
        try:
            async with make_channel(address, self._tls) as channel:
                connect = gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect
                call = connect()
                try:
                    hello = await exchange_hellos(
                        call, self.gateway_id, timeout_s=self._settings.dial_timeout_s
                    )
                except STREAM_ERRORS:
                    denied = await denial(call, connect)
                    raise
                self._on_hello(hello, address)
                greeted = True
                self._channel = channel
                self._connected.set()
                self.greeted.set()
                metrics.LINK_UP.labels(self.shard).set(1)
                await self._converse(call)
        except STREAM_ERRORS as error:
            leader = error.leader if isinstance(error, LinkBroken) else ""
            if greeted:
                log.warning("link broken", shard=self.shard, address=address, reason=reason_of(error))
            elif denied:
                log.error("the scheduler does not serve this gateway", address=address, reason=denied)
            else:
                log.debug("no leader there", shard=self.shard, address=address, reason=reason_of(error))
        finally:
            self._channel = None
            self.load = None
            self._connected.clear()
            self._outbox.clear()
            metrics.LINK_UP.labels(self.shard).set(0)
        return Visit(greeted, leader)

    async def _converse(self, call: Call[link_pb2.GatewayMessage, link_pb2.GatewayLinkReply]) -> None:
        """Receive and send until one of the two fails; raise that failure."""
        settings = self._settings
        liveness = Liveness(self._now(), heartbeat_s=settings.heartbeat_s, silence_s=settings.silence_s)
        await until_first_ends(
            self._read(call, liveness), self._write(call, liveness), watch(liveness, self._outbox_filled)
        )

    async def _read(
        self, call: Call[link_pb2.GatewayMessage, link_pb2.GatewayLinkReply], liveness: Liveness
    ) -> None:
        while True:
            reply, kind = await next_reply(call)
            liveness.received(self._now())
            self._on_reply(reply, kind)

    async def _write(
        self, call: Call[link_pb2.GatewayMessage, link_pb2.GatewayLinkReply], liveness: Liveness
    ) -> None:
        while True:
            if liveness.take_heartbeat():
                now = self._now()
                self._send(*self.streams.tick(now))
                await call.write(
                    link_pb2.GatewayMessage(heartbeat=link_pb2.Heartbeat(sent_ms=int(now * 1000)))
                )
            while self._outbox and not liveness.heartbeat_due:
                await call.write(self._outbox.popleft())
            if not self._outbox and not liveness.heartbeat_due:
                self._outbox_filled.clear()
                await self._outbox_filled.wait()

    # ---- decisions, without awaiting

    def _on_hello(self, reply: link_pb2.GatewayLinkReply, address: str = "") -> None:
        hello = check_hello(reply, self.shard)
        log.info(
            "greeted",
            address=address,
            leader_epoch=reply.leader_epoch,
            software_version=hello.software_version,
        )
        self._mismatches.warn_of_hello(hello, address)
        metrics.LINK_GREETINGS.labels(self.shard).inc()
        self._leader_epoch = reply.leader_epoch
        # A new leader does not know the messages sent to the previous one: everything is sent again.
        self._outbox.clear()
        self._outbox.extend(self.streams.reconnected(self._now()))
        self._outbox.extend(message for message, answer in self._cancels.values() if not answer.done())
        self._outbox_filled.set()

    def _on_reply(self, reply: link_pb2.GatewayLinkReply, kind: str | None) -> None:
        if kind == "hello":
            self._on_hello(reply)
            return
        if reply.leader_epoch != self._leader_epoch:
            metrics.LINK_STALE.labels(self.shard).inc()
            return
        if reply.HasField("load"):
            self.load, self.submitted = reply.load, 0
            self._mismatches.warn_of_load(reply.load)
        now = self._now()
        match kind:
            case "submit_reply":
                self._send(*self.streams.on_submit_reply(reply.submit_reply, now))
            case "attach_reply":
                self._send(*self.streams.on_attach_reply(reply.attach_reply, now))
            case "deliveries":
                for delivery in reply.deliveries.deliveries:
                    if messages := self.streams.on_delivery(delivery, now):
                        self._send(*messages)
                if messages := self.streams.on_plain_deliveries(reply.deliveries.plain, now):
                    self._send(*messages)
            case "cancel_reply":
                _, answer = self._cancels.get(reply.cancel_reply.cancel_id, (None, None))
                if answer is not None and not answer.done():
                    answer.set_result(reply.cancel_reply)
            case _:  # a heartbeat, or a message of a newer scheduler
                pass

    def _send(self, *messages: link_pb2.GatewayMessage) -> None:
        """Queue messages while a leader is connected; without one they are not needed, see
        `Streams.reconnected`."""
        if messages and self.connected:
            self._outbox.extend(messages)
            self._outbox_filled.set()

    def _new_attachment_id(self) -> str:
        self._attachments += 1
        return f"{self.gateway_id}/{self._attachments}"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
