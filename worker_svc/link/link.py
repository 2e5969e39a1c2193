"""The worker's end of WorkerLink: finds the leader, reports state and progress, and forwards commands.

There is one stream at a time, without end: seeds are dialled in turn until one leads. State that must survive
a stream is kept here or in the runner, never in the stream: reports are kept until acknowledged and offered
again, in order, after each hello.

Facts that the rest relies on
  * The answer to `HeldRequested` comes through the same queue as the reports, so a hello lists the requests
    held after a report that is kept here, and every later report follows it on the stream.
  * A leader's messages are ignored unless they carry the epoch of the newest SchedulerHello.
  * The runner's thread never waits for this one; a wake-up takes all outcomes that it delivered since.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from laps_sd.errors import StartupError
from laps_sd.service import wire
from laps_sd.service.leader_link import (
    PROTOCOL_VERSIONS,
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
from laps_sd.service.tracing import QUIET, Tracing
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as pb
from laps_sd.v1.worker_link_pb2_grpc import WorkerLinkStub
from worker_svc import metrics
from worker_svc.link.lists import AssignedList
from worker_svc.link.missing import MissingSpecifications
from worker_svc.link.outbox import Outbox
from worker_svc.link.replies import acknowledged_number, runner_messages
from worker_svc.link.seeds import SchedulerSeeds
from worker_svc.link.wire import hello, round_report, wire_probe
from worker_svc.runner.messages import (
    Failed,
    HeldNow,
    HeldRequested,
    Learnt,
    Missing,
    Outcome,
    Round,
    RunnerHandle,
)
from worker_svc.settings import WorkerSettings
from worker_svc.tracing import RoundTraces

__all__ = ["EngineFailed", "SchedulerLink"]

log = get_logger(__name__)


class EngineFailed(Exception):
    """An error of the engine outside of a single request (its exception is the cause), or a hanging engine.

    The process must end.
    """


class SchedulerLink:
    """The link to the scheduler; see the module's docstring. Made inside a running event loop.

    `run` returns when the worker has left, and raises when it cannot continue; `drain` leaves.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        runner: RunnerHandle,
        *,
        seeds: SchedulerSeeds | None = None,
        on_greeted: Callable[[], None] = lambda: None,
        on_drain_ordered: Callable[[], None] = lambda: None,
        tracing: Tracing = QUIET,
    ) -> None:
        self.settings = settings
        self._seeds = seeds or SchedulerSeeds(settings)
        self._tls = wire.link_tls(settings)
        self.worker_id = f"{settings.name}-{uuid.uuid4().hex[:8]}"
        self.runner = runner
        self.leader_epoch = ""
        self.connected = False
        """True once a leader has greeted the present stream."""
        self._refused_for_now = ""
        """Reason of the newest refusal that may pass, which is logged once; empty after a greeting."""
        self._version = 0
        """Protocol version of the present stream."""
        self._lists = AssignedList()
        self._on_greeted = on_greeted
        self._on_drain_ordered = on_drain_ordered
        self._traces = RoundTraces(tracing, self.worker_id)

        self._loop = asyncio.get_running_loop()
        self._delivered: deque[Outcome] = deque()
        self._notified = False
        self._held_now: asyncio.Future[HeldNow] | None = None
        self._over: asyncio.Future[None] = self._loop.create_future()
        """Set when the link must end: drained (None), refused or broken (an exception)."""

        self._outbox = Outbox()
        self._missing = MissingSpecifications()
        self._learnt: pb.LearntProbe | None = None
        """Learnt state of the probe that was not sent to a scheduler; None: it was."""
        self._wake = asyncio.Event()
        self._draining = False
        self._drain_sent = False

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `Drained`.

        Raises StartupError when the scheduler refuses this worker for good, EngineFailed when the engine is
        broken.
        """
        connecting = asyncio.create_task(self._keep_connected(), name="keep connected")
        self.runner.start(self._deliver)
        try:
            await asyncio.wait({connecting, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()  # it never ends by itself, so this raises
            self._over.result()
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await asyncio.to_thread(self.runner.stop)
            metrics.CONNECTED.set(0)
            self._traces.close()

    async def drain(self) -> None:
        """Request to leave, continue to work, and return when the scheduler reports the worker as drained."""
        log.info("draining", held_nothing=self.runner.holds_nothing)
        self._draining = True
        self._wake.set()
        self._leave_if_forgotten()
        await asyncio.wait({self._over})

    def _leave_if_forgotten(self) -> None:
        """End without a reachable scheduler if there is nothing to hand over."""
        if self._draining and not self.connected and self.runner.holds_nothing and not self._outbox:
            self._finish(None)

    def _finish(self, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    # -- from the runner -------------------------------------------------------------------------------------

    def _deliver(self, outcome: Outcome) -> None:
        """Queue an outcome of the runner's thread.

        One wake-up covers all that is delivered until the loop runs.
        """
        self._delivered.append(outcome)
        if not self._notified:
            self._notified = True
            self._loop.call_soon_threadsafe(self._take_delivered)

    def _take_delivered(self) -> None:
        self._notified = False  # before the queue is read: later outcomes cause another wake-up
        while self._delivered:
            outcome = self._delivered.popleft()
            match outcome:
                case Round():
                    self._keep(outcome)
                case Missing(request_ids):
                    self._missing.request(request_ids, time.monotonic())
                case HeldNow():
                    if self._held_now is not None and not self._held_now.done():
                        self._held_now.set_result(outcome)
                case Learnt(learnt):
                    self._learnt = wire_probe(learnt)
                case Failed(error):
                    failure = EngineFailed(f"the engine failed: {error!r}")
                    failure.__cause__ = error
                    log.error("the engine failed", exc_info=error)
                    self._finish(failure)
        self._wake.set()

    def _keep(self, outcome: Round) -> None:
        self._outbox.add(
            round_report(outcome), tokens=sum([len(step.tokens) for _, step in outcome.progress])
        )
        metrics.observe(outcome)
        self._traces.round(outcome, time.time())

    # -- connecting ------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        search = LeaderSearch(BackOff(), random.Random())
        while True:
            search.begin_round(self._seeds())
            while (address := search.next_address()) is not None:
                search.visited(address, await self._visit(address))
                self._leave_if_forgotten()
            await asyncio.sleep(search.end_round_s())

    async def _visit(self, address: str) -> Visit:
        """Dial one scheduler, and run the stream until it ends, for whatever reason."""
        greeted = False
        leader = ""
        channel = wire.make_channel(address, self._tls)
        connect = WorkerLinkStub(channel).Connect
        call: Any = None
        reason = ""
        try:
            async with asyncio.timeout(self.settings.silence_s):
                # A hello lists all held requests: it is made only for a scheduler that is listening.
                if not await wire.reach(channel):
                    raise LinkBroken("it cannot be reached")
                call = connect()
                await call.write(pb.WorkerMessage(hello=await self._hello()))
                greeting = await self._read_hello(call)
            self._greeted(greeting, address)
            greeted = True
            await self._converse(call)
        except STREAM_ERRORS as error:
            reason = reason_of(error)
            leader = error.leader if isinstance(error, LinkBroken) else ""
        finally:
            self.connected = False
            metrics.CONNECTED.set(0)
            denied = "" if greeted else await denial(call, connect)
            if call is not None:
                call.cancel()
            await channel.close()
        if greeted:
            log.warning("stream to the scheduler ended", address=address, reason=reason)
        elif denied:
            log.error("the scheduler does not serve this worker", address=address, reason=denied)
        else:
            log.debug("no leader there", address=address, reason=reason, leader=leader)
        return Visit(greeted, leader)

    async def _read_hello(self, call: Any) -> pb.WorkerLinkReply:
        while True:
            reply, kind = await self._next_reply(call)
            if kind == "hello":
                return reply
            metrics.IGNORED.inc()

    async def _next_reply(self, call: Any) -> tuple[pb.WorkerLinkReply, str | None]:
        """Return the next message of the scheduler and its kind. Raises LinkBroken as `next_reply` does, and
        if the scheduler refuses this worker."""
        reply, kind = await next_reply(call)
        if kind == "refused":
            self._refused(reply.refused)
            raise LinkBroken("it refuses this worker")
        return reply, kind

    async def _converse(self, call: Any) -> None:
        """Send and receive until one of the two fails; raise that failure."""
        self._outbox.offer_again()
        self._missing.clear()
        self._drain_sent = False
        self._wake.set()
        liveness = Liveness(
            self._loop.time(), heartbeat_s=self.settings.heartbeat_s, silence_s=self.settings.silence_s
        )
        await until_first_ends(
            self._read(call, liveness), self._write(call, liveness), watch(liveness, self._wake)
        )

    async def _hello(self) -> pb.WorkerHello:
        if self._held_now is None or self._held_now.done():
            self._held_now = self._loop.create_future()
            self.runner.put(HeldRequested())
            self._loop.call_later(self.settings.engine_silence_s, self._check_engine, self._held_now)
        # Shielded: each `HeldRequested` is answered once, so an abandoned attempt leaves the answer to the
        # next one.
        held = await asyncio.shield(self._held_now)
        return hello(
            self.settings,
            self.worker_id,
            self.runner.capacity,
            self.runner.fingerprint,
            held,
            probe=self.runner.probe_kind,
            draining=self._draining,
        )

    def _check_engine(self, answer: asyncio.Future[HeldNow]) -> None:
        """Fail the link if the engine has not answered, which it does between two rounds.

        The scheduler has given this worker up before, and assigns it no work without a hello, so that nothing
        is lost.
        """
        if not answer.done():
            failure = EngineFailed(
                f"the engine hangs: no round has ended for {self.settings.engine_silence_s:g} s"
            )
            log.error("the engine hangs", silent_s=self.settings.engine_silence_s)
            self._finish(failure)

    def _refused(self, refused: pb.WorkerRefused) -> None:
        reason = pb.WorkerRefused.Reason.Name(refused.reason).removeprefix("REASON_").lower()
        detail = refused.detail or f"reason: {reason}"
        if refused.temporary:
            if detail != self._refused_for_now:
                log.warning("the scheduler refuses this worker for now", reason=reason, detail=detail)
                self._refused_for_now = detail
            return
        log.error("the scheduler refuses this worker", reason=reason, detail=detail)
        self._finish(
            StartupError(f"The scheduler of pool {self.settings.pool!r} refuses this worker: {detail}")
        )

    def _greeted(self, reply: pb.WorkerLinkReply, address: str = "") -> None:
        version = reply.hello.protocol_version
        if version not in PROTOCOL_VERSIONS:
            self._finish(
                StartupError(
                    f"The scheduler chose protocol version {version}; this worker supports "
                    f"{', '.join(map(str, PROTOCOL_VERSIONS))}."
                )
            )
            return
        self._version, self._lists = version, AssignedList()
        self.leader_epoch = reply.leader_epoch
        self.connected = True
        self._refused_for_now = ""
        metrics.CONNECTED.set(1)
        metrics.CONNECTIONS.inc()
        log.info(
            "greeted",
            address=address,
            shard=reply.hello.shard,
            leader_epoch=reply.leader_epoch,
            worker_id=self.worker_id,
            reports_offered_again=len(self._outbox),
        )
        self._on_greeted()

    # -- up --------------------------------------------------------------------------------------------------

    async def _write(self, call: Any, liveness: Liveness) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._draining and not self._drain_sent:
                self._drain_sent = True
                await call.write(pb.WorkerMessage(drain=pb.DrainRequested()))
            if self._missing:
                await call.write(pb.WorkerMessage(missing=self._missing.next_message()))
            while self._outbox.unsent:
                await call.write(pb.WorkerMessage(reports=self._outbox.next_message(self._version)))
            if self._learnt is not None:
                learnt, self._learnt = self._learnt, None
                await call.write(pb.WorkerMessage(learnt_probe=learnt))
            if liveness.take_heartbeat():
                heartbeat = gateway_pb.Heartbeat(sent_ms=time.monotonic_ns() // 1_000_000)
                await call.write(pb.WorkerMessage(heartbeat=heartbeat))

    # -- down ------------------------------------------------------------------------------------------------

    async def _read(self, call: Any, liveness: Liveness) -> None:
        while True:
            reply, kind = await self._next_reply(call)
            liveness.received(self._loop.time())
            if kind == "hello":
                self._greeted(reply)
            elif reply.leader_epoch == self.leader_epoch:
                self._handle_reply(kind, reply)
            else:
                metrics.IGNORED.inc()

    def _handle_reply(self, kind: str | None, reply: pb.WorkerLinkReply) -> None:
        if number := acknowledged_number(reply):
            self._outbox.acknowledge(number)
        match kind:
            case "specifications":
                for leased in reply.specifications.specifications:
                    spec = leased.specification
                    self._missing.arrived(spec.request_id)
                    self._traces.specified(spec.request_id, leased.lease_epoch, spec.traceparent)
            case "drop":
                for request in reply.drop.requests:
                    self._traces.forget(request.request_id, request.lease_epoch)
            case "drain":
                log.info("the scheduler orders this worker to drain")
                self._draining = True
                self._wake.set()
                self._on_drain_ordered()
            case "drained":
                log.info("drained")
                self._finish(None)
            case _:  # a heartbeat, or a message of a later version
                pass
        if messages := runner_messages(kind, reply, self._lists):
            self.runner.put(*messages)
