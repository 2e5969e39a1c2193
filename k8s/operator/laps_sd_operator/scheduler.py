"""Calls from the operator to the scheduler of a pool."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from laps_sd.service.leader_link import Candidates, named_leader
from laps_sd.service.wire import Tls, make_channel
from laps_sd.v1 import admin_pb2 as pb
from laps_sd.v1 import admin_pb2_grpc
from laps_sd_operator.objects import Shard
from laps_sd_operator.reconcile import Worker

TIMEOUT_S = 3.0
Reply = TypeVar("Reply")


class NoScheduler(Exception):
    """Failure to reach a scheduler that leads the pool."""


async def shard(address: str, tls: Tls | None) -> Shard:
    """Return the workers, the queue and the cheapest worker to remove. Raises NoScheduler."""

    async def call(stub: Any) -> Shard:
        state = await stub.GetShard(pb.GetShardRequest(), timeout=TIMEOUT_S)
        workers = (await stub.ListWorkers(pb.ListWorkersRequest(), timeout=TIMEOUT_S)).workers
        try:
            cheapest = (await stub.NominateVictim(pb.NominateVictimRequest(), timeout=TIMEOUT_S)).worker_id
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:  # the pool has no worker
                raise
            cheapest = ""
        names = {worker.worker_id: worker.worker_name for worker in workers}
        speeds = [worker.tokens_per_s for worker in workers]
        weighed = sum(worker.acceptance * worker.tokens_per_s for worker in workers)
        return Shard(
            workers=tuple(
                Worker(name=worker.worker_name, draining=worker.draining, requests=worker.listed)
                for worker in workers
            ),
            cheapest=names.get(cheapest),
            queued=state.queued,
            backlog_s=state.backlog_s,
            acceptance=weighed / sum(speeds) if sum(speeds) else 0.0,
            tokens_per_s=sum(speeds),
            policy=state.policy,
        )

    return await _call_leader(address, tls, call)


async def drain(address: str, tls: Tls | None, worker: str) -> None:
    """Drain a worker; a missing worker has already left. Raises NoScheduler."""

    async def call(stub: Any) -> None:
        try:
            await stub.DrainWorker(pb.DrainWorkerRequest(worker=worker), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    await _call_leader(address, tls, call)


async def _call_leader(address: str, tls: Tls | None, call: Callable[[Any], Awaitable[Reply]]) -> Reply:
    """Call any scheduler, then the leader that a standby names. Raises NoScheduler."""
    candidates = Candidates([address])
    failure = ""
    while (dialled := candidates.next_address()) is not None:
        async with make_channel(dialled, tls) as channel:
            try:
                return await call(admin_pb2_grpc.AdminStub(channel))
            except grpc.aio.AioRpcError as error:
                detail = error.details() or error.code().name
                failure = f"{dialled}: {detail}"
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    candidates.refer(named_leader(detail))
    raise NoScheduler(failure)
