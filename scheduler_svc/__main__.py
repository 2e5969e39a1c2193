"""Runs one scheduler process: `python -m scheduler_svc`, settings from LAPS_SD_*."""

from __future__ import annotations

from laps_sd.service.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import gc
import time

from laps_sd.errors import StartupError
from laps_sd.keda import externalscaler_pb2_grpc
from laps_sd.service.certificates import expose_expiry
from laps_sd.service.extras import needs
from laps_sd.service.log import get_logger
from laps_sd.service.serving import ServiceApp, main
from laps_sd.v1 import admin_pb2_grpc, gateway_link_pb2_grpc, worker_link_pb2_grpc

with needs("scheduler"):
    from scheduler_svc.leader.leadership import Leadership
    from scheduler_svc.record import open_record
    from scheduler_svc.roles import ClientRoles
    from scheduler_svc.rpc.admin import Admin
    from scheduler_svc.rpc.autoscaling import ExternalScaler
    from scheduler_svc.rpc.links import GatewayLink, WorkerLink
    from scheduler_svc.settings import SchedulerSettings
    from scheduler_svc.store.errors import SchemaMismatch
    from scheduler_svc.store.records import Limits

log = get_logger(__name__)

YOUNG_CONTAINERS = 50_000
"""Number of additional containers that must exist before Python looks for cycles among them. Python's own 700
is less than what one turn makes, so it would go through everything that this process leads again and again,
for cycles that requests and messages do not form.
"""


def steady_unix_clock() -> float:
    """Return Unix seconds that never step: the core must not see a clock go back."""
    return _STARTED_UNIX_S + time.monotonic()


_STARTED_UNIX_S = time.time() - time.monotonic()


async def serve(settings: SchedulerSettings) -> None:
    """Wire store, leadership and servicers; serve until a signal."""
    app = ServiceApp("scheduler", settings, authorize=ClientRoles(settings.client_roles).check)
    store = open_record(
        settings,
        limits=Limits(
            max_requests=settings.max_requests,
            max_prompt_tokens=settings.max_queued_tokens,
            max_requests_per_tenant=settings.max_requests_per_tenant,
        ),
        finished_ttl_s=settings.finished_ttl_s,
        wait_replicas=settings.redis_wait_replicas,
        clock=steady_unix_clock,
    )
    leadership = Leadership(settings, store, on_lead=app.set_ready, tracing=app.tracing)
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(GatewayLink(leadership), app.server)
    worker_link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLink(leadership), app.server)
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(leadership), app.server)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(
        ExternalScaler(leadership, app.stopping), app.server
    )
    app.names += ["laps_sd.v1.GatewayLink", "laps_sd.v1.WorkerLink", "laps_sd.v1.Admin"]
    app.names.append("externalscaler.ExternalScaler")
    await app.start()
    expose_expiry("redis", settings.redis_tls_cert)
    if not leadership.address:
        host = "127.0.0.1" if settings.grpc_host in ("0.0.0.0", "::") else settings.grpc_host  # noqa: S104
        leadership.address = f"[{host}]:{app.port}" if ":" in host else f"{host}:{app.port}"
    if settings.open_to_strangers:
        log.warning(
            "any caller that reaches this port may act as a gateway, a worker or an operator: LAPS_SD_TLS_CLIENT_CA and "
            "LAPS_SD_CLIENT_ROLES decide who may",
            host=settings.grpc_host,
            port=app.port,
        )
    failure: StartupError | None = None

    async def lead() -> None:
        nonlocal failure
        try:
            await leadership.run()
        except SchemaMismatch as error:  # this release cannot lead such a record, now or later
            failure = StartupError(f"Shard {settings.shard!r} cannot be led: {error}.")
            app.stop_soon()

    leading = app.spawn(lead(), name="leadership")

    async def drain() -> None:
        await leadership.write_back()
        leading.cancel()
        await leadership.resign()

    app.closing.push_async_callback(store.close)
    await app.run(drain=drain)
    if failure is not None:
        raise failure


def look_for_cycles_seldom() -> None:
    """Set up the garbage collector: the first action of a process that leads."""
    gc.freeze()  # imported objects stay for the life of the process
    gc.set_threshold(YOUNG_CONTAINERS)


if __name__ == "__main__":
    look_for_cycles_seldom()
    main("scheduler", SchedulerSettings, serve)
