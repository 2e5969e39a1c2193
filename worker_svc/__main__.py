"""A worker process: `python -m worker_svc`, settings from LAPS_SD_* (see `worker_svc.settings`)."""

from __future__ import annotations

from laps_sd.service.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import asyncio
import time

from laps_sd.errors import StartupError
from laps_sd.service.certificates import expose_expiry
from laps_sd.service.log import get_logger
from laps_sd.service.serving import ServiceApp, main
from worker_svc import metrics
from worker_svc.link.link import SchedulerLink
from worker_svc.link.seeds import SchedulerSeeds
from worker_svc.loading import load
from worker_svc.runner.messages import RunnerHandle
from worker_svc.runner.process import EngineLaunch
from worker_svc.runner.thread import EngineThread
from worker_svc.settings import WorkerSettings

log = get_logger(__name__)

ENGINE = "engine"
"""Health name that is SERVING once the engine is loaded, whether or not a scheduler has been reached."""


async def serve(settings: WorkerSettings) -> None:
    """Load the model, then work for the leading scheduler until drained.

    Signals are handled from the start.
    """
    app = ServiceApp("worker", settings)
    app.own_names.append(ENGINE)
    await app.start()
    expose_expiry("link", settings.link_tls_cert)
    link: SchedulerLink | None = None
    failure: StartupError | None = None

    async def work() -> None:
        nonlocal link, failure
        try:
            seeds = SchedulerSeeds(settings)  # before the load, which may take minutes
            runner = await _load(settings)
            await app.set_health(ENGINE)
            link = SchedulerLink(
                settings,
                runner,
                seeds=seeds,
                on_greeted=lambda: app.set_ready(True),
                on_drain_ordered=app.stop_soon,
                tracing=app.tracing,
            )
            await link.run()
        except StartupError as error:
            # One sentence for the user; any other exception is a fault with a traceback.
            failure = error
        app.stop_soon()

    async def drain() -> None:
        if link is not None and failure is None:
            await link.drain()

    app.spawn(work(), name="engine and scheduler link")
    await app.run(drain=drain)
    if failure is not None:
        raise failure


async def _load(settings: WorkerSettings) -> RunnerHandle:
    """Return the runner of an engine: a real one in its own process, the scripted one in this.

    Raises StartupError.
    """
    began_s = time.monotonic()
    runner: RunnerHandle
    if settings.engine == "fake":
        runner = EngineThread(await asyncio.to_thread(load, settings), settings)
    else:
        launch = EngineLaunch(settings)
        try:
            runner = await asyncio.to_thread(launch.result)
        except asyncio.CancelledError:
            # Large models load for minutes, and the end of this process waits for the thread.
            launch.abort()
            raise
    capacity = runner.capacity
    log.info(
        "engine ready",
        load_s=round(time.monotonic() - began_s, 3),
        device=capacity.device,
        slots=capacity.slots,
        target_blocks=capacity.target_blocks,
        draft_blocks=capacity.draft_blocks,
        fingerprint=runner.fingerprint,
    )
    for line in runner.facts:
        log.info(line)
    metrics.SLOTS.set(capacity.slots)
    metrics.set_free_blocks(capacity.target_blocks, capacity.draft_blocks)
    computed_by = runner.computed_by
    metrics.COMPUTED_BY.labels(computed_by.path, computed_by.dtype, str(computed_by.threads)).set(1)
    metrics.WEIGHT_BYTES.set(computed_by.weight_bytes_per_s)
    return runner


if __name__ == "__main__":
    main("worker", WorkerSettings, serve)
