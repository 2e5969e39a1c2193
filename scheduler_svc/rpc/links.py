"""The streams of gateways and workers. Nothing is decided here.

Both have the same shape. A reader hands each message to the loop; a writer sends what the session holds, and
a heartbeat each second. The first of the two to end ends the stream, and the loop always receives the end as
an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

import laps_sd
from laps_sd.contract.length_features import key_digest
from laps_sd.errors import FailedPrecondition, InvalidArgument, LapsSdError
from laps_sd.service.leader_link import (
    HEARTBEAT_S,
    PROTOCOL_VERSIONS,
    Liveness,
    PeerSilent,
    until_first_ends,
    watch,
)
from laps_sd.service.log import get_logger
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import gateway_link_pb2_grpc, worker_link_pb2_grpc
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc import metrics
from scheduler_svc.leader.leadership import Leadership
from scheduler_svc.leader.loop import Loop
from scheduler_svc.leader.queue_limits import RETRY_STORE_MS
from scheduler_svc.leader.sessions import GatewaySession, WorkerSession
from scheduler_svc.leader.turn import FromGateway, FromWorker, GatewayClosed, WorkerClosed, WorkerOpened
from scheduler_svc.wire import checks, replies
from scheduler_svc.wire.replies import Refusal

log = get_logger(__name__)

HELLO_TIMEOUT_S = 5.0
STORE_DOWN_DETAIL = "the record is unavailable; nothing is accepted until it is back"
MOST_REFUSED = 1000
"""Refused workers that are remembered; each restart of a worker is another one."""


class _Stream:
    """Stream of one connected peer: reads, writes, heartbeats."""

    def __init__(self, leadership: Leadership, context: Any, session: WorkerSession | GatewaySession) -> None:
        self.context = context
        self.session = session
        self.epoch = leadership.epoch
        self.silent = False
        """True if the stream ended because the peer was silent."""
        self._now_s = asyncio.get_running_loop().time
        self._liveness = Liveness(
            self._now_s(), heartbeat_s=HEARTBEAT_S, silence_s=leadership.settings.silence_s
        )

    async def run(self, take: Callable[[Any], Awaitable[None]], heartbeat: Callable[[], Any]) -> None:
        """Serve the stream until either side ends it, or the session is closed."""
        try:
            await until_first_ends(
                self._read(take), self._write(heartbeat), watch(self._liveness, self.session.wake)
            )
        except PeerSilent:
            self.silent = True
        except LapsSdError:
            raise
        except (grpc.RpcError, grpc.aio.BaseError, OSError) as error:
            log.debug("stream broken", reason=repr(error))
        except Exception as error:
            log.exception("stream broken by a fault of this scheduler", reason=repr(error))

    async def _read(self, take: Callable[[Any], Awaitable[None]]) -> None:
        while True:
            message = await self.context.read()
            if message is grpc.aio.EOF:
                return
            self._liveness.suspend()  # while this stream is held back, its peer is not silent
            await take(message)
            await self.session.room.wait()
            self._liveness.received(self._now_s())

    async def _write(self, heartbeat: Callable[[], Any]) -> None:
        session = self.session
        while not session.closed:
            for reply in session.take():
                reply.leader_epoch = self.epoch
                await self.context.write(reply)
            if self._liveness.take_heartbeat():
                await self.context.write(heartbeat())
            await session.wake.wait()


async def _hello(context: Any, kind: str) -> Any:
    """Return the first message of a stream, which must be a hello."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = await context.read()
    except TimeoutError:
        raise InvalidArgument("hello", f"must be the first message, within {HELLO_TIMEOUT_S:g} s") from None
    if message is grpc.aio.EOF or message.WhichOneof("message") != "hello":
        raise InvalidArgument("hello", f"must be the first message of a {kind}")
    return message.hello


def _not_leader(leadership: Leadership) -> gateway_pb.NotLeader:
    return gateway_pb.NotLeader(leader_address=leadership.leader_address)


def _version(offered: Any) -> int | None:
    """Return the newest protocol version that both sides support; None without one."""
    return max(set(offered) & set(PROTOCOL_VERSIONS), default=None)


def _not_spoken(offered: Any) -> str:
    return f"protocol versions {list(offered[:8])} are not supported, only {list(PROTOCOL_VERSIONS)}"


def _scheduler_hello(leadership: Leadership, version: int) -> gateway_pb.SchedulerHello:
    settings = leadership.settings
    return gateway_pb.SchedulerHello(
        shard=settings.shard,
        protocol_version=version,
        software_version=laps_sd.__version__,
        pool=settings.pool,
        length_key_digest=key_digest(settings.length_key) if settings.predict_lengths else b"",
        lease_s=settings.lease_s,
    )


def _heartbeat() -> gateway_pb.Heartbeat:
    return gateway_pb.Heartbeat(sent_ms=time.monotonic_ns() // 1_000_000)


class GatewayLink(gateway_link_pb2_grpc.GatewayLinkServicer):
    """The stream of each gateway."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    async def Connect(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes to the context
        self, request_iterator: Any, context: Any
    ) -> None:
        """See gateway_link.proto."""
        hello = await _hello(context, "gateway")
        checks.check_gateway_hello(hello)
        leadership = self._leadership
        loop = leadership.serving
        if loop is None:
            await context.write(gateway_pb.GatewayLinkReply(not_leader=_not_leader(leadership)))
            return
        version = _version(hello.protocol_versions)
        if version is None:
            raise FailedPrecondition(_not_spoken(hello.protocol_versions))
        session = GatewaySession(hello.gateway_id, protocol_version=version)
        stream = _Stream(leadership, context, session)
        leadership.sessions.add(session)
        log.info("gateway connected", gateway_id=hello.gateway_id)

        async def take(message: gateway_pb.GatewayMessage) -> None:
            kind = message.WhichOneof("message")
            if kind == "submit" and loop.outage.refuses(restores=message.submit.restores):
                refused = replies.refused(Refusal.STORE_UNAVAILABLE, STORE_DOWN_DETAIL, RETRY_STORE_MS)
                session.reply(replies.submission_refused(message.submit.submission_id, refused))
                metrics.SUBMISSIONS.labels("refused").inc()
            elif kind not in ("heartbeat", None):
                loop.put(FromGateway(session, message))
                await loop.room.wait()

        def beat() -> gateway_pb.GatewayLinkReply:
            gateways = sum(isinstance(other, GatewaySession) for other in leadership.sessions)
            load = loop.load(gateways=gateways)
            return gateway_pb.GatewayLinkReply(leader_epoch=stream.epoch, heartbeat=_heartbeat(), load=load)

        try:
            await context.write(
                gateway_pb.GatewayLinkReply(
                    leader_epoch=stream.epoch, hello=_scheduler_hello(leadership, version)
                )
            )
            await stream.run(take, beat)
        finally:
            leadership.sessions.discard(session)
            loop.put(GatewayClosed(session))
            log.info("gateway stream ended", gateway_id=hello.gateway_id, reason=session.close_reason)


class WorkerLink(worker_link_pb2_grpc.WorkerLinkServicer):
    """The stream of each worker."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self._refused_for_now: set[str] = set()
        """Workers whose refusal was logged, and which may be accepted later: until then each of them dials each second."""

    async def Connect(  # type: ignore[override]  # grpc.aio also takes a coroutine that writes to the context
        self, request_iterator: Any, context: Any
    ) -> None:
        """See worker_link.proto."""
        hello: worker_pb.WorkerHello = await _hello(context, "worker")
        leadership = self._leadership
        loop = leadership.serving
        if loop is None:
            await context.write(worker_pb.WorkerLinkReply(not_leader=_not_leader(leadership)))
            return
        version = _version(hello.protocol_versions)
        refused = self._refusal(loop, hello, version)
        if refused is not None:
            self._log_refusal(hello.worker_id, refused)
            await context.write(worker_pb.WorkerLinkReply(leader_epoch=leadership.epoch, refused=refused))
            return
        assert version is not None, "without one it is refused"
        self._refused_for_now.discard(hello.worker_id)
        session = WorkerSession(hello.worker_id, hello.worker_name, hello.device, protocol_version=version)
        stream = _Stream(leadership, context, session)
        leadership.sessions.add(session)

        async def take(message: worker_pb.WorkerMessage) -> None:
            if message.WhichOneof("message") not in ("heartbeat", None):
                loop.put(FromWorker(session, message))
                await loop.room.wait()

        try:
            await context.write(
                worker_pb.WorkerLinkReply(
                    leader_epoch=stream.epoch, hello=_scheduler_hello(leadership, version)
                )
            )
            loop.put(WorkerOpened(session, hello))
            await stream.run(
                take, lambda: worker_pb.WorkerLinkReply(leader_epoch=stream.epoch, heartbeat=_heartbeat())
            )
        finally:
            leadership.sessions.discard(session)
            loop.put(WorkerClosed(session, silent=stream.silent))

    def _log_refusal(self, worker_id: str, refused: worker_pb.WorkerRefused) -> None:
        known = self._refused_for_now
        if refused.temporary:
            if worker_id in known:
                return
            if len(known) >= MOST_REFUSED:
                known.clear()
            known.add(worker_id)
        log.error("worker refused", worker_id=worker_id, reason=refused.detail)

    def _refusal(
        self, loop: Loop, hello: worker_pb.WorkerHello, version: int | None
    ) -> worker_pb.WorkerRefused | None:
        reasons = worker_pb.WorkerRefused
        if version is None:
            return reasons(reason=reasons.REASON_PROTOCOL, detail=_not_spoken(hello.protocol_versions))
        pool = self._leadership.settings.pool
        if hello.pool != pool:
            detail = f"this shard serves pool {pool!r}, not {hello.pool!r}"
            return reasons(reason=reasons.REASON_POOL, detail=detail)
        try:
            checks.check_hello(hello)
        except InvalidArgument as error:
            return reasons(reason=reasons.REASON_CAPACITY, detail=error.message)
        accepted = any(isinstance(one, WorkerSession) and not one.closed for one in self._leadership.sessions)
        if loop.agrees(hello.fingerprint, has_accepted=accepted):
            return None
        temporary = not (accepted or loop.roster.connected)
        its, pools = hello.fingerprint[:16], loop.roster.fingerprint[:16]
        if temporary:
            detail = (
                f"its model pair has the fingerprint {its}…, and workers of the pair {pools}… have begun unfinished "
                f"requests ({loop.begun()}), which no other pair may continue: it is accepted once they have ended; start a "
                "worker of that pair to complete them, wait for their deadlines if they have any, or cancel them with "
                "laps-sd top (those without a client end by themselves, unless they are kept)"
            )
        else:
            detail = (
                f"its model pair has the fingerprint {its}…, the pool's is {pools}…: all workers of a pool must load the "
                "same weights, tokenizer and dtype (LAPS_SD_DTYPE, which auto chooses by the machine)"
            )
        return reasons(reason=reasons.REASON_FINGERPRINT, detail=detail, temporary=temporary)
