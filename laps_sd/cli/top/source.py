"""Calls of an operator to a shard, by the Admin service of its leader."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from laps_sd.cli.leader import Leader
from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb

__all__ = ["Reading", "Source"]

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A shard at one moment."""

    shard: admin_pb2.GetShardResponse
    workers: admin_pb2.ListWorkersResponse
    queue: admin_pb2.ListQueueResponse


class Source:
    """One shard. Every method waits for its leader, at most TIMEOUT_S for each scheduler that it calls, and raises
    grpc.RpcError.
    """

    def __init__(self, leader: Leader, *, limit: int) -> None:
        """`limit`: requests of the queue to read at most, 1 to 10,000."""
        self._leader = leader
        self._limit = limit

    @property
    def seeds(self) -> str:
        """Return the addresses of its schedulers."""
        return self._leader.seeds

    @property
    def closed(self) -> bool:
        """Return whether it is closed: errors mean nothing then."""
        return self._leader.closed

    def read(self) -> Reading:
        """Return the shard as it is now."""

        def call(channel: grpc.Channel) -> Reading:
            admin = admin_pb2_grpc.AdminStub(channel)
            return Reading(
                admin.GetShard(admin_pb2.GetShardRequest(), timeout=TIMEOUT_S),
                admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=TIMEOUT_S),
                admin.ListQueue(admin_pb2.ListQueueRequest(limit=self._limit), timeout=TIMEOUT_S),
            )

        return self._leader.call(call)

    def explain(self, request_id: str) -> pb.Explanation:
        """Return all about one request, also after its end."""
        request = admin_pb2.AdminExplainRequest(request_id=request_id)
        reply = self._leader.call(
            lambda channel: admin_pb2_grpc.AdminStub(channel).ExplainRequest(request, timeout=TIMEOUT_S)
        )
        return reply.explanation

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; return False if it had ended before."""
        request = admin_pb2.CancelRequestRequest(request_id=request_id)
        reply = self._leader.call(
            lambda channel: admin_pb2_grpc.AdminStub(channel).CancelRequest(request, timeout=TIMEOUT_S)
        )
        return not reply.already_ended

    def drain(self, worker_id: str) -> None:
        """Drain a worker."""
        request = admin_pb2.DrainWorkerRequest(worker=worker_id)
        self._leader.call(
            lambda channel: admin_pb2_grpc.AdminStub(channel).DrainWorker(request, timeout=TIMEOUT_S)
        )

    def close(self) -> None:
        """End the call that is under way, and all later ones."""
        self._leader.close()
