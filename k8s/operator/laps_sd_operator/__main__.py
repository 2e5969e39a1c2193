"""Process of the operator: `python -m laps_sd_operator`. It ends by SIGTERM or SIGINT (exit code 0), and with a
sentence and exit code 1 if it cannot do its work: the namespace or the definition of SpeculativePool is missing, or a
port is taken.

Environment: LAPS_SD_OPERATOR_NAMESPACE (required), LAPS_SD_OPERATOR_HEALTH_PORT (8080),
LAPS_SD_OPERATOR_METRICS_PORT (9090), POD_ID (its identity in the election; default: the host and the process), and
LAPS_SD_LINK_TLS… as for a worker.
"""

from __future__ import annotations

from laps_sd.service.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any

from laps_sd.errors import StartupError
from laps_sd.service.certificates import expose_expiry
from laps_sd.service.config import load
from laps_sd.service.listening import EVERY_ADDRESS, available_host
from laps_sd.service.log import configure, get_logger
from laps_sd.service.metrics import MetricsServer, serve_metrics
from laps_sd.service.wire import LinkSettings, link_tls
from laps_sd_operator.api import Api, connect
from laps_sd_operator.health import PORT as HEALTH_PORT
from laps_sd_operator.health import serve_health
from laps_sd_operator.leadership import Leadership
from laps_sd_operator.operator import Operator
from laps_sd_operator.watching import NotDefined

METRICS_PORT = "LAPS_SD_OPERATOR_METRICS_PORT"
NOT_DEFINED = (
    "The API server does not serve SpeculativePools (laps-sd.dev/v1alpha1): install their definition with "
    "`kubectl apply --server-side -f k8s/chart/crds`. Helm installs it with the chart's first release, and not "
    "with --skip-crds."
)

log = get_logger("operator")


async def serve(namespace: str, health_port: int, metrics_port: int) -> str:
    """Run until a signal; return why the operator cannot run, or an empty string. Raises StartupError."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with contextlib.AsyncExitStack() as closing:
        connection = await connect()
        closing.push_async_callback(connection.close)
        identity = os.environ.get("POD_ID") or f"{socket.gethostname()}-{os.getpid()}"
        leadership = Leadership(connection, namespace, identity)
        tls = link_tls(load(LinkSettings))
        if tls is not None:
            expose_expiry("link", tls.cert)
        operator = Operator(Api(connection), namespace, tls, leadership)
        closing.push_async_callback(asyncio.to_thread, open_metrics(metrics_port).close)
        closing.push_async_callback((await serve_health(operator, health_port)).cleanup)
        closing.push_async_callback(leadership.release)
        running = asyncio.create_task(operator.run())
        stopping = asyncio.create_task(stopped.wait())
        closing.push_async_callback(end, running, stopping)
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return reason_of(running.exception())
        log.info("stopping")
    return ""


def open_metrics(port: int) -> MetricsServer:
    """Serve the metrics. Raises StartupError."""
    try:
        return serve_metrics(port, available_host(EVERY_ADDRESS))
    except StartupError as error:
        raise StartupError(str(error).replace("LAPS_SD_METRICS_PORT", METRICS_PORT)) from error


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def reason_of(error: BaseException | None) -> str:
    """Return the sentence about an error that ended the operator; raise one that has no sentence."""
    if isinstance(error, BaseExceptionGroup) and error.subgroup(NotDefined):
        return NOT_DEFINED
    raise error or AssertionError("the operator ended by itself")


def port_of(variable: str, default: int) -> int:
    """Return the port that a variable names. Raises StartupError."""
    text = os.environ.get(variable) or str(default)
    if not text.isdecimal() or int(text) > 65535:
        raise StartupError(f"{variable} must be a port from 0 to 65535, and is {text}.")
    return int(text)


def main() -> None:
    """Run until a signal."""
    namespace = os.environ.get("LAPS_SD_OPERATOR_NAMESPACE")
    if not namespace:
        sys.exit("LAPS_SD_OPERATOR_NAMESPACE must name the namespace whose pools are looked after.")
    configure("operator", level="info")
    try:
        reason = asyncio.run(serve(namespace, port_of(HEALTH_PORT, 8080), port_of(METRICS_PORT, 9090)))
    except StartupError as error:
        reason = str(error)
    if reason:
        sys.exit(reason)


if __name__ == "__main__":
    main()
