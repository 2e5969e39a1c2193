"""The amount of waiting work, for an autoscaler: KEDA's ExternalScaler, answered by a leader and by a
standby.

The metric is machine seconds: the estimated remaining time of all unfinished requests of the pool. With a
target of T seconds per worker, Kubernetes starts `backlog / T` workers, rounded up: with these the queue
would be empty within T seconds. From zero the queue itself starts the first worker: requests are accepted and
wait while none exists.

A leader reads its core. A standby counts the unfinished requests in the record and multiplies their number by
the mean of one request when its leader last saved what it had learnt (our choice: exact enough for the
seconds of a takeover, and one small read).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from typing import Any

from laps_sd.errors import InvalidArgument, Unavailable
from laps_sd.keda import externalscaler_pb2 as pb
from laps_sd.keda import externalscaler_pb2_grpc
from scheduler_svc.leader.chores import MEAN_REQUEST_S
from scheduler_svc.leader.leadership import Leadership
from scheduler_svc.store.errors import StoreUnavailable

__all__ = ["ExternalScaler"]

DEFAULT_TARGET_S = 30.0
"""Machine seconds of work per worker, where the trigger names none."""
UNKNOWN_REQUEST_S = 1.0
"""Machine seconds of one request before anything was learnt of the pool's requests: our choice."""
LOOK_S = 1.0
"""Seconds between two checks of a stream for work."""


class ExternalScaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """ExternalScaler for the pool of this scheduler's shard. `stopping`: set when the process is to end,
    which ends the streams.
    """

    def __init__(self, leadership: Leadership, stopping: asyncio.Event) -> None:
        self._leadership = leadership
        self._stopping = stopping

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        """Return True if any request is unfinished."""
        self._check_pool(request)
        return pb.IsActiveResponse(result=await self._is_active())

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Yield the present answer at once, and again whenever it changes. A record that is away does not end
        the stream: KEDA would wait before it connects again.
        """
        self._check_pool(request)
        reported: bool | None = None
        while not self._stopping.is_set():
            with contextlib.suppress(Unavailable):  # nothing new is known while the record is away
                active = await self._is_active()
                if active != reported:
                    reported = active
                    yield pb.IsActiveResponse(result=active)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOOK_S)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        """Return the one metric; its target comes from the trigger's metadata."""
        self._check_pool(request)
        target_s = _target_s(request)
        spec = pb.MetricSpec(
            metricName=self._metric_name, targetSize=max(1, math.ceil(target_s)), targetSizeFloat=target_s
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """Return the backlog in machine seconds."""
        self._check_pool(request.scaledObjectRef)
        backlog_s = await self._backlog_s()
        value = pb.MetricValue(
            metricName=request.metricName or self._metric_name,
            metricValue=math.ceil(backlog_s),
            metricValueFloat=backlog_s,
        )
        return pb.GetMetricsResponse(metricValues=[value])

    @property
    def _metric_name(self) -> str:
        return f"laps-sd-backlog-seconds-{self._leadership.settings.pool}"

    def _check_pool(self, scaled: pb.ScaledObjectRef) -> None:
        wanted, own = scaled.scalerMetadata.get("pool", ""), self._leadership.settings.pool
        if wanted and wanted != own:
            raise InvalidArgument(
                "scalerMetadata.pool", f"must be {own!r}, the pool of this scheduler, got {wanted[:80]!r}"
            )

    async def _is_active(self) -> bool:
        loop = self._leadership.loop
        if loop is not None:
            return bool(loop.clients.live)
        return await self._unfinished() > 0

    async def _backlog_s(self) -> float:
        loop = self._leadership.loop
        if loop is not None:
            return loop.core.totals().backlog_s
        unfinished = await self._unfinished()
        try:
            blob = await self._leadership.store.load_priors()
        except StoreUnavailable as error:
            raise _away(error) from error
        learnt = json.loads(blob) if blob else {}
        return unfinished * float(learnt.get(MEAN_REQUEST_S, UNKNOWN_REQUEST_S))

    async def _unfinished(self) -> int:
        try:
            return await self._leadership.store.count_unfinished()
        except StoreUnavailable as error:
            raise _away(error) from error


def _target_s(scaled: pb.ScaledObjectRef) -> float:
    text = scaled.scalerMetadata.get("targetBacklogSeconds", "")
    if not text:
        return DEFAULT_TARGET_S
    try:
        target_s = float(text)
    except ValueError:
        target_s = math.nan
    if not 0.0 < target_s <= 1e6:
        raise InvalidArgument(
            "scalerMetadata.targetBacklogSeconds",
            f"must be a number of seconds, more than 0 and at most 1000000, got {text[:40]!r}",
        )
    return target_s


def _away(error: StoreUnavailable) -> Unavailable:
    return Unavailable(
        f"this scheduler does not lead, and the record cannot be read: {error}", retry_after_s=1.0
    )
