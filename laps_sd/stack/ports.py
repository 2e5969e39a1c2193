"""The ports of a stack: what is wanted, and what each component gets."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from dataclasses import dataclass

from laps_sd.errors import StartupError

__all__ = ["FREE_PORTS", "HOST", "PortPlan", "Ports", "free_port"]

HOST = "127.0.0.1"
LISTENING = range(20_000, 32_768)
"""Ports for listeners: systems give higher ones to outgoing connections (Linux from 32,768, macOS and Windows
from 49,152), and any connection may take such a port between its choice and the listener's start. Our
choice."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports to listen on; 0 takes a free port. Workers and further replicas always take free ones."""

    gateway: int = 50051
    http: int = 8000
    scheduler: int = 50052
    valkey: int = 0
    metrics: int | None = 9090
    """First of the metrics ports, one per process (gateways, schedulers, workers). None: free ones."""


FREE_PORTS = Ports(gateway=0, http=0, scheduler=0, valkey=0, metrics=None)

FLAGS = {
    "gateway": "--gateway-port",
    "http": "--http-port",
    "scheduler": "--scheduler-port",
    "metrics": "--metrics-port",
}


def free_port() -> int:
    """Return a port on which no process listens at this time."""
    with _bound_to_a_free_port() as probe:
        return int(probe.getsockname()[1])


def _bound_to_a_free_port() -> socket.socket:
    for _ in range(100):
        made = socket.socket()
        try:
            made.bind((HOST, LISTENING[secrets.randbelow(len(LISTENING))]))
        except OSError:  # a process listens there, or has reserved it
            made.close()
        else:
            return made
    made = socket.socket()
    made.bind((HOST, 0))  # nearly all are taken: any port at all
    return made


class PortPlan:
    """Allocation of ports.

    On Linux it reserves the free ports that it has allocated until `close`: a socket is bound to each without
    listening. Then neither another stack nor an outgoing connection takes a port before its component listens
    or while the component restarts. The component can listen: both sockets have SO_REUSEADDR, which Linux
    accepts while one of them listens at most. Other systems do not, so nothing is reserved there.
    """

    def __init__(self, wanted: Ports) -> None:
        self._wanted = wanted
        self._next_metrics = wanted.metrics
        self._given: set[int] = set()
        self._reserved = contextlib.ExitStack()

    def check(self) -> None:
        """Raise StartupError with the wanted ports that are in use, or wanted twice."""
        problems: list[str] = []
        flags: dict[int, str] = {}
        for what, flag in FLAGS.items():
            if port := getattr(self._wanted, what):
                if port in flags:
                    problems.append(f"{flags[port]} and {flag} are both {port}.")
                flags[port] = flag
                try:
                    self._check(what, port)
                except StartupError as error:
                    problems.append(str(error))
        if problems:
            raise StartupError("\n".join(problems))

    def take(self, what: str) -> int:
        """Return the wanted port for `what`, or a free one."""
        if what == "metrics":
            if self._next_metrics is None:
                return self.free()
            port, self._next_metrics = self._next_metrics, self._next_metrics + 1
            self._check("metrics", port)
        else:
            port = getattr(self._wanted, what) or self.free()
        self._given.add(port)
        return port

    def free(self) -> int:
        """Return a port on which no process listens and which was not allocated here before."""
        while True:
            bound = _bound_to_a_free_port()
            port = int(bound.getsockname()[1])
            if port in self._given:  # it was wanted
                bound.close()
                continue
            self._given.add(port)
            if sys.platform == "linux":
                # Set after the bind, which so fails beside another reservation.
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._reserved.enter_context(bound)
            else:  # pragma: no cover
                bound.close()
            return port

    def close(self) -> None:
        """Give the reserved ports back."""
        self._reserved.close()

    def _check(self, what: str, port: int) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                raise StartupError(
                    f"port {port} is in use: the {what} cannot listen there ({error.strerror}); "
                    f"choose another with {FLAGS[what]}."
                ) from None
