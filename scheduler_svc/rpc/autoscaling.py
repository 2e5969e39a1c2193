"""The number of workers that a pool needs, for an autoscaler: KEDA's ExternalScaler, answered by a leader and by a standby.

There are two metrics, and Kubernetes takes the one that needs more workers:

    load      workers that the arriving work keeps busy: machine seconds per second over about two minutes. With a target
              of 0.9 each worker has work for 90 % of its time. It is there before a queue is.
    backlog   machine seconds that all unfinished requests still need. With a target of T seconds there are workers for a
              queue to be empty within T seconds: it follows bursts.

From zero the queue itself starts the first worker: requests are accepted and wait while none exists.

A leader reads its core. A standby counts the unfinished requests in the record, multiplies their number by the mean of one
request, and reports the load, both as its leader last saved them (our choice: exact enough for the seconds of a takeover, and
two small reads).
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
from scheduler_svc.leader.chores import ARRIVING_LOAD, MEAN_REQUEST_S
from scheduler_svc.leader.leadership import Leadership
from scheduler_svc.store.errors import StoreUnavailable

__all__ = ["ExternalScaler"]

DEFAULT_TARGET_LOAD = 0.9
"""Share of a worker's time that arriving work may take, where the trigger names none: chosen by `laps-sd bench autoscale`."""
DEFAULT_TARGET_S = 20.0
"""Machine seconds of work per worker, where the trigger names none; chosen in the same way."""
LEAST_TARGET = 0.001
"""KEDA writes targets in thousandths."""
METADATA = ("pool", "targetLoad", "targetBacklogSeconds")
OF_KEDA = ("scalerAddress", "enableTLS", "unsafeSsl", "caCert", "tlsClientCert", "tlsClientKey")
"""Keys of the metadata that KEDA itself reads, and passes on."""
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
        self._check_metadata(request)
        return pb.IsActiveResponse(result=await self._is_active())

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Yield the present answer at once, and again whenever it changes. A record that is away does not end
        the stream: KEDA would wait before it connects again.
        """
        self._check_metadata(request)
        reported: bool | None = None
        while not self._stopping.is_set():
            with contextlib.suppress(Unavailable):  # nothing new is known while the record is away
                active = await self._is_active()
                if active != reported:
                    reported = active
                    yield pb.IsActiveResponse(result=active)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        """Return both metrics; their targets come from the trigger's metadata."""
        self._check_metadata(request)
        targets = {
            self._load_name: _target(request, "targetLoad", DEFAULT_TARGET_LOAD, most=1.0),
            self._backlog_name: _target(request, "targetBacklogSeconds", DEFAULT_TARGET_S, most=1e6),
        }
        return pb.GetMetricSpecResponse(
            metricSpecs=[
                pb.MetricSpec(metricName=name, targetSize=max(1, math.ceil(target)), targetSizeFloat=target)
                for name, target in targets.items()
            ]
        )

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """Return the metric of this name; without a name, the backlog."""
        self._check_metadata(request.scaledObjectRef)
        name = request.metricName or self._backlog_name
        if name not in (self._load_name, self._backlog_name):
            raise InvalidArgument(
                "metric_name", f"must be {self._load_name!r} or {self._backlog_name!r}, got {name[:80]!r}"
            )
        found = await (self._load() if name == self._load_name else self._backlog_s())
        value = pb.MetricValue(metricName=name, metricValue=math.ceil(found), metricValueFloat=found)
        return pb.GetMetricsResponse(metricValues=[value])

    @property
    def _load_name(self) -> str:
        return f"laps-sd-load-{self._leadership.settings.pool}"

    @property
    def _backlog_name(self) -> str:
        return f"laps-sd-backlog-seconds-{self._leadership.settings.pool}"

    def _check_metadata(self, scaled: pb.ScaledObjectRef) -> None:
        for key in scaled.scalerMetadata:
            if key not in METADATA and key not in OF_KEDA:
                raise InvalidArgument(
                    "scalerMetadata", f"must have no key but {', '.join(METADATA)}, got {key[:80]!r}"
                )
        wanted, own = scaled.scalerMetadata.get("pool", ""), self._leadership.settings.pool
        if wanted and wanted != own:
            raise InvalidArgument(
                "scalerMetadata.pool", f"must be {own!r}, the pool of this scheduler, got {wanted[:80]!r}"
            )

    async def _is_active(self) -> bool:
        loop = self._leadership.loop
        if loop is not None:
            return bool(loop.working_copy.live)
        return await self._unfinished() > 0

    async def _backlog_s(self) -> float:
        loop = self._leadership.loop
        if loop is not None:
            return loop.core.totals().backlog_s
        unfinished = await self._unfinished()
        return unfinished * await self._saved(MEAN_REQUEST_S, UNKNOWN_REQUEST_S)

    async def _load(self) -> float:
        loop = self._leadership.loop
        if loop is not None:
            return loop.core.arriving_load(loop.clock())
        return await self._saved(ARRIVING_LOAD, 0.0)

    async def _saved(self, name: str, unknown: float) -> float:
        """Return what the leader last saved under this name."""
        try:
            blob = await self._leadership.store.load_priors()
        except StoreUnavailable as error:
            raise _away(error) from error
        learnt = json.loads(blob) if blob else {}
        return float(learnt.get(name, unknown))

    async def _unfinished(self) -> int:
        try:
            return await self._leadership.store.count_unfinished()
        except StoreUnavailable as error:
            raise _away(error) from error


def _target(scaled: pb.ScaledObjectRef, name: str, usual: float, *, most: float) -> float:
    text = scaled.scalerMetadata.get(name, "")
    if not text:
        return usual
    try:
        target = float(text)
    except ValueError:
        target = math.nan
    if not LEAST_TARGET <= target <= most:
        raise InvalidArgument(
            f"scalerMetadata.{name}", f"must be a number from {LEAST_TARGET} to {most:.7g}, got {text[:40]!r}"
        )
    return target


def _away(error: StoreUnavailable) -> Unavailable:
    return Unavailable(
        f"this scheduler does not lead, and the record cannot be read: {error}", retry_after_s=1.0
    )
