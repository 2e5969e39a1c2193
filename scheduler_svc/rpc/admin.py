"""The calls of operators, and Explain. They only read; draining and cancelling are handed to the loop."""

from __future__ import annotations

from typing import Any

from laps_sd.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from laps_sd.service.log import get_logger
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import admin_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.views import WorkerView
from scheduler_svc.leader.leadership import Leadership
from scheduler_svc.leader.loop import Loop
from scheduler_svc.leader.roster import Roster
from scheduler_svc.leader.turn import CancelOrdered, DrainOrdered
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.wire import checks, views

log = get_logger(__name__)

DEFAULT_QUEUE_LIMIT = 100
MAX_QUEUE_LIMIT = 10_000


class Admin(admin_pb2_grpc.AdminServicer):
    """The Admin service of a scheduler; only a leader answers most of its calls."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership

    def _loop(self) -> Loop:
        loop = self._leadership.loop
        if loop is None:
            where = self._leadership.leader_address or "unknown"
            outage = self._leadership.outage.report()
            # Without the error's own text: callers look for the leader's address in this sentence.
            why = f"; it cannot use the record ({outage.fault}) for {outage.lasts_s:.0f} s" if outage else ""
            raise FailedPrecondition(
                f"this scheduler does not lead shard {self._leadership.settings.shard}; the leader is {where}{why}"
            )
        return loop

    def _outage(self) -> admin_pb.RecordOutage | None:
        outage = self._leadership.outage.report()
        if outage is None:
            return None
        return admin_pb.RecordOutage(fault=outage.fault, error=outage.error, lasts_s=outage.lasts_s)

    async def ExplainRequest(self, request: admin_pb.AdminExplainRequest, context: Any) -> pb.ExplainResponse:
        """See admin.proto."""
        loop = self._loop()
        checks.check_request_id(request.request_id)
        explanation = loop.core.explain(request.request_id, loop.clock())
        if explanation is not None:
            if request.tenant and explanation.tenant != request.tenant:
                raise _unknown(request.request_id)
            return pb.ExplainResponse(explanation=views.explanation(explanation))
        try:
            stored = await loop.store.read(request.request_id)
        except StoreUnavailable as error:
            detail = f"request {request.request_id} is not running, and its story cannot be read now: {error}"
            raise Unavailable(detail, retry_after_s=1.0) from error
        if stored is None or (request.tenant and stored.tenant != request.tenant):
            raise _unknown(request.request_id)
        return pb.ExplainResponse(
            explanation=views.stored_explanation(stored, self._leadership.settings.policy)
        )

    async def ListQueue(self, request: admin_pb.ListQueueRequest, context: Any) -> admin_pb.ListQueueResponse:
        """See admin.proto."""
        loop = self._loop()
        limit = request.limit or DEFAULT_QUEUE_LIMIT
        if limit > MAX_QUEUE_LIMIT:
            raise InvalidArgument("limit", f"must be at most {MAX_QUEUE_LIMIT}, got {limit}")
        entries = loop.core.queue(loop.clock(), limit)
        return admin_pb.ListQueueResponse(
            entries=[views.queue_entry(entry) for entry in entries],
            total=len(loop.working_copy.live),
            policy=self._leadership.settings.policy,
            record_outage=self._outage(),
        )

    async def ListWorkers(
        self, request: admin_pb.ListWorkersRequest, context: Any
    ) -> admin_pb.ListWorkersResponse:
        """See admin.proto."""
        loop = self._loop()
        return admin_pb.ListWorkersResponse(
            workers=[_worker_status(view, loop.roster) for view in loop.core.workers()],
            record_outage=self._outage(),
        )

    async def DrainWorker(
        self, request: admin_pb.DrainWorkerRequest, context: Any
    ) -> admin_pb.DrainWorkerResponse:
        """See admin.proto."""
        loop = self._loop()
        entry = loop.roster.named(request.worker)
        if entry is not None:
            loop.put(DrainOrdered(entry.worker_id))
            return admin_pb.DrainWorkerResponse(worker_id=entry.worker_id)
        raise NotFound(f"no worker {request.worker!r}; `laps-sd workers` lists them")

    async def CancelRequest(
        self, request: admin_pb.CancelRequestRequest, context: Any
    ) -> admin_pb.CancelRequestResponse:
        """See admin.proto."""
        loop = self._loop()
        request_id = request.request_id
        checks.check_request_id(request_id)
        if request_id in loop.working_copy.live:
            await loop.room.wait()  # as for messages of gateways: the inbox has a bound
            loop.put(CancelOrdered(request_id))
            log.info("an operator cancels a request", request_id=request_id)
            return admin_pb.CancelRequestResponse()
        try:
            stored = await loop.store.read(request_id)
        except StoreUnavailable as error:
            detail = f"request {request_id} is not running, and the record cannot be read now: {error}"
            raise Unavailable(detail, retry_after_s=1.0) from error
        if stored is None:
            raise _unknown(request_id)
        if stored.end is None:  # written a moment ago, or refused and about to be withdrawn
            raise Unavailable(f"request {request_id} is not in the queue yet", retry_after_s=1.0)
        return admin_pb.CancelRequestResponse(already_ended=True)

    async def NominateVictim(
        self, request: admin_pb.NominateVictimRequest, context: Any
    ) -> admin_pb.NominateVictimResponse:
        """See admin.proto. The victim is the worker with the lowest cost of a loss, which is the least to
        compute again; of equals the one with the shortest list.
        """
        loop = self._loop()
        staying = [view for view in loop.core.workers() if not view.draining]
        if not staying:
            raise NotFound("there is no worker that is not draining")
        victim = min(staying, key=lambda view: (view.moving_cost_s, view.listed, view.worker_id))
        return admin_pb.NominateVictimResponse(worker_id=victim.worker_id, cost_s=victim.moving_cost_s)

    async def GetShard(self, request: admin_pb.GetShardRequest, context: Any) -> admin_pb.GetShardResponse:
        """See admin.proto."""
        loop = self._loop()
        settings = self._leadership.settings
        return views.shard_status(
            loop.core.totals(),
            shard=settings.shard,
            pool=settings.pool,
            leader_epoch=self._leadership.epoch,
            policy=settings.policy,
            workers=len(loop.core.workers()),
            depth_by_level=loop.core.depth_by_level(),
            found=loop.core.found_tokens,
            errors=loop.core.estimate_errors,
        )

    async def GetRecord(self, request: admin_pb.GetRecordRequest, context: Any) -> admin_pb.GetRecordResponse:
        """See admin.proto."""
        return admin_pb.GetRecordResponse(record_outage=self._outage())


def _worker_status(view: WorkerView, roster: Roster) -> admin_pb.WorkerStatus:
    session = roster.session(view.worker_id)
    if session is None:
        name = entry.name if (entry := roster.workers.get(view.worker_id)) is not None else ""
        return views.worker_status(view, connected=False, name=name, device="")
    return views.worker_status(view, connected=True, name=session.worker_name, device=session.device)


def _unknown(request_id: str) -> NotFound:
    return NotFound(f"no request {request_id}: it is unknown, or has expired")
