"""Lifecycle of a gRPC server: health, reflection, errors, tasks, and a stop in two stages.

    class SchedulerSettings(ServingSettings): ...             # adds its own fields

    async def serve(settings: SchedulerSettings) -> None:     # scheduler_svc/__main__.py
        app = ServiceApp("scheduler", settings)
        add_AdminServicer_to_server(AdminService(...), app.server)
        app.names.append("laps_sd.v1.Admin")                  # for health and reflection
        await app.start()                                     # takes port and signals; health: NOT_SERVING
        app.spawn(loop.run(), name="scheduling loop")         # the service fails with any of its tasks
        app.set_ready(True)                                   # health: SERVING
        await app.run(drain=loop.drain)                       # until a signal; drains; stops

    if __name__ == "__main__":
        main("scheduler", SchedulerSettings, serve)           # settings, log, uvloop, exit codes

Inside handlers raise `laps_sd.errors`; `app.stopping` (an asyncio.Event) is set by the first signal.

Stop: the first SIGINT or SIGTERM makes the service not ready, calls `drain` (at most `drain_s`), accepts no
new calls, waits for those in progress for the rest of `drain_s`, and ends them. The second one exits at once
with 128 + signal. A signal after `stop_soon` is the first one: Kubernetes sends SIGTERM to a worker that
drains already. Liveness stays SERVING throughout.

Health names: "" and "readiness" and each service follow `set_ready`; "liveness" is SERVING while the event
loop runs; a service may add names of its own (`own_names`). Every setting is also a flag: `python -m
scheduler_svc --lease-s 5`; `--help` lists them, `--show-settings` prints the origin of each value. Exit
codes: 0 stopped by a signal; 1 cannot start or a task failed; 2 wrong settings; 128 + n by the second signal.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NoReturn, TypeVar

# This module reports a refused port in one sentence; gRPC's own lines about it would only hide that.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from laps_sd.errors import StartupError
from laps_sd.service import metrics
from laps_sd.service.certificates import ServedCertificate, expose_expiry
from laps_sd.service.config import ConfigError, load, unknown
from laps_sd.service.interceptor import (
    MAX_OPEN_MESSAGE_BYTES,
    OPEN_METHODS,
    Authorize,
    CallGuard,
    MessageTurns,
)
from laps_sd.service.log import configure, get_logger
from laps_sd.service.serving_settings import ServingSettings
from laps_sd.service.tracing import Tracing
from laps_sd.service.wire import Tls, server_options

__all__ = ["ServiceApp", "main"]

log = get_logger(__name__)

LAST_CALLS_S = 0.2
"""Seconds for a call to receive its end after the time to drain is over."""

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ServiceApp:
    """Server, tasks and stop of one service; see the top of this file."""

    def __init__(
        self,
        service: str,
        settings: ServingSettings,
        *,
        authorize: Authorize | None = None,
        message_turns: MessageTurns | None = None,
        open_methods: Sequence[str] = OPEN_METHODS,
        max_fields: int | None = None,
        max_sent_bytes: int | None = None,
        max_connection_age_s: float | None = None,
    ) -> None:
        """Create the server, not yet started. `authorize`, `message_turns`, `open_methods`, `max_fields`: see
        CallGuard; `max_sent_bytes`, `max_connection_age_s`: see `server_options`.

        Raises StartupError when OpenTelemetry is configured and missing.
        """
        self.settings = settings
        self.guard = CallGuard(authorize, message_turns, open_methods=open_methods, max_fields=max_fields)
        self.server = grpc.aio.server(
            interceptors=[self.guard],
            options=server_options(
                settings.max_message_bytes,
                max_sent_bytes,
                max_connection_age_s,
                receives_unread=message_turns is None,
            ),
        )
        self.names: list[str] = []
        """Full names of the gRPC services added to `server`."""
        self.own_names: list[str] = []
        """Health names besides the common ones, added before `start`: NOT_SERVING until `set_health`."""
        self.stopping = asyncio.Event()
        """Event that the first signal or `stop_soon` sets."""
        self.port = 0
        """The bound port, after `start`."""
        self.health_port = 0
        """The bound port of the server with health alone, after `start`; 0: there is none."""
        self.tracing = Tracing(service, settings.otlp_endpoint)
        self.closing = AsyncExitStack()
        """Resources that are closed after the service's calls and tasks have ended.

        The last added is closed first, the traces after all others.
        """
        self.closing.push_async_callback(asyncio.to_thread, self.tracing.close)
        self.metrics: metrics.MetricsServer | None = None
        self.ready = False
        self._signalled = False
        self._health = health.aio.HealthServicer()
        self._health_server: grpc.aio.Server | None = None
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Bind the ports, handle the signals and answer health checks; the service is not ready yet."""
        self._mind_signals(True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            [*self.names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )
        await self._health.set("liveness", SERVING)
        for name in self.own_names:
            await self._health.set(name, NOT_SERVING)
        await self._publish(NOT_SERVING)
        self.port = self._bind(self.server, self.settings.grpc_port, "gRPC", self.settings.tls)
        expose_expiry("server", self.settings.tls_cert)
        if self.settings.health_port is not None:
            # Not counted by the guard: a watch of health never ends by itself.
            self._health_server = grpc.aio.server(options=server_options(MAX_OPEN_MESSAGE_BYTES))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self.health_port = self._bind(self._health_server, self.settings.health_port, "health", None)
            await self._health_server.start()
        if self.settings.metrics_port is not None:
            self.metrics = metrics.serve_metrics(self.settings.metrics_port, self.settings.listen_host)
        await self.server.start()
        log.info(
            "listening",
            host=self.settings.listen_host,
            port=self.port,
            tls=self.settings.tls is not None,
            metrics_port=self.metrics.port if self.metrics else None,
        )

    def _bind(self, server: grpc.aio.Server, port: int, kind: str, tls: Tls | None) -> int:
        host = self.settings.listen_host
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            _probe(host, port)
            if tls is None:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, ServedCertificate(tls).grpc_credentials()))
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise StartupError(
                f"The {kind} port {port} on {host} cannot be opened: {reason}; "
                f"choose another with LAPS_SD_{kind.upper()}_PORT."
            ) from error

    def set_ready(self, ready: bool, reason: str = "") -> None:
        """Set the answer to health checks from now on. No effect once the stop has begun.

        `reason`: why the service is not ready, for the log.
        """
        if self.ready == ready or self.stopping.is_set():
            return
        self.ready = ready
        log.info("ready" if ready else "not ready", **({"reason": reason} if reason else {}))
        self.spawn(self._publish(SERVING if ready else NOT_SERVING), name="health update", may_end=True)

    async def set_health(self, name: str) -> None:
        """Answer SERVING for one of `own_names` from now on, until the stop."""
        if not self.stopping.is_set():
            await self._health.set(name, SERVING)

    async def _publish(self, status: Any) -> None:
        for name in ("", "readiness", *self.names):
            await self._health.set(name, status)

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str, may_end: bool = False) -> asyncio.Task[Any]:
        """Run a task that the service needs: its failure, or its end unless `may_end`, stops the service."""
        task: asyncio.Task[Any] = asyncio.create_task(work, name=name)
        self._tasks[task] = name

        def ended(task: asyncio.Task[Any]) -> None:
            self._tasks.pop(task, None)
            if task.cancelled() or (may_end and task.exception() is None):
                return
            error = task.exception()
            if error is None and self.stopping.is_set():
                return
            log.error("task ended", task=name, exc_info=error)
            if self._failure is None:
                self._failure = error if isinstance(error, StartupError) else TaskFailed(name, error)
            self.stopping.set()

        task.add_done_callback(ended)
        return task

    def stop_soon(self) -> None:
        """Begin the stop, as the first signal does."""
        self.stopping.set()

    async def run(self, drain: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Serve until the first signal or the failure of a task, then stop.

        Raise the error of the failed task.
        """
        async with self.closing:  # closes also if this is cancelled
            await self.stopping.wait()
            await self.stop(drain)
        if self._failure is not None:
            raise self._failure

    def _mind_signals(self, mind: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            # Python delivers signals to the main thread only; elsewhere the embedding code calls `stop`.
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if mind:
                loop.add_signal_handler(number, self._on_signal, number)
            else:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self._signalled:
            sys.stderr.flush()
            os._exit(128 + number)
        self._signalled = True
        self.stopping.set()
        log.info("stopping", signal=signal.Signals(number).name, active_calls=self.guard.active)

    async def stop(self, drain: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Drain and end everything; takes at most `drain_s` and a moment."""
        self.stopping.set()
        self.ready = False
        await self._publish(NOT_SERVING)
        for name in self.own_names:
            await self._health.set(name, NOT_SERVING)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.drain_s
        if drain is not None and self._failure is None:
            try:
                async with asyncio.timeout_at(deadline):
                    await drain()
            except TimeoutError:
                log.warning("drain took too long", drain_s=self.settings.drain_s)
            except Exception as error:
                log.error("drain failed", exc_info=error)
        # From here on no new call is accepted. A health watch never ends by itself, so the guard's count
        # shows when work is done.
        closing = asyncio.create_task(self.server.stop(self.settings.drain_s + LAST_CALLS_S))
        try:
            async with asyncio.timeout_at(max(deadline, loop.time() + LAST_CALLS_S)):
                await self.guard.wait_idle()
        except TimeoutError:
            log.warning("calls cut off", active_calls=self.guard.active)
        await self.server.stop(LAST_CALLS_S / 4)
        await closing
        await self._end_tasks()
        if self._health_server is not None:
            await self._health_server.stop(None)
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.close)
        await self.closing.aclose()
        self._mind_signals(False)
        log.info("stopped")

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TaskFailed(Exception):
    """Error for the end of a task that the service needs."""

    def __init__(self, name: str, error: BaseException | None) -> None:
        super().__init__(
            f"The task '{name}' ended" + (f": {error!r}." if error is not None else " unexpectedly.")
        )
        self.__cause__ = error


def _probe(host: str, port: int) -> None:
    """Raise the system's own error for a port that cannot be opened; gRPC's error gives no reason."""
    if port == 0:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


SettingsT = TypeVar("SettingsT", bound=ServingSettings)


def main(
    service: str, settings_type: type[SettingsT], serve: Callable[[SettingsT], Coroutine[Any, Any, None]]
) -> NoReturn:
    """Run a service's whole process: flags, settings, log, event loop, exit code."""
    if len(sys.argv) > 1:
        from laps_sd.service.flags import command_line

        command_line(service, settings_type, lambda overrides: _run(service, settings_type, serve, overrides))
    _run(service, settings_type, serve, {})


def _run(
    service: str,
    settings_type: type[SettingsT],
    serve: Callable[[SettingsT], Coroutine[Any, Any, None]],
    overrides: Mapping[str, Any],
) -> NoReturn:
    try:
        settings = load(settings_type, overrides)
        configure(service, level=settings.log_level, style=settings.log_style)
        if strangers := unknown():
            log.warning("unknown LAPS_SD variables, ignored", nearest_known=strangers)
        uvloop.run(serve(settings))
    except ConfigError as error:
        for problem in error.problems:
            print(f"laps-sd {service}: {problem}", file=sys.stderr)  # noqa: T201  before there is a log
        sys.exit(2)
    except StartupError as error:
        print(f"laps-sd {service}: {error}", file=sys.stderr)  # noqa: T201  one sentence for the operator
        sys.exit(1)
    except TaskFailed:
        sys.exit(1)  # logged with its traceback where it happened
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # The interpreter ends with collections of all that was imported: most of the time of a stop.
        gc.freeze()
    sys.exit(0)
