"""Settings that every service has: where it listens, logs and sends spans, and its TLS files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from laps_sd.service.config import Settings, field
from laps_sd.service.listening import available_host, is_loopback
from laps_sd.service.log import LogLevel, LogStyle
from laps_sd.service.wire import MAX_MESSAGE_BYTES, Tls


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """Settings of every service. A service overrides the default of `grpc_port` and adds its own fields."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "grpc_host": "Listening",
        "log_level": "Log",
        "max_message_bytes": "Calls and the stop",
        "otlp_endpoint": "Spans",
        "tls_cert": "TLS of the listener",
    }

    grpc_host: str = field(
        "127.0.0.1", help="Address to listen on; :: is every address of IPv6 and IPv4, for a container"
    )
    grpc_port: int = field(
        50051, help="Port of the gRPC server; 0 takes a free one", minimum=0, maximum=65535
    )
    metrics_port: int | None = field(
        9090,
        help="Port of the Prometheus endpoint, at LAPS_SD_GRPC_HOST; 0 takes a free one, empty serves none",
        minimum=0,
        maximum=65535,
    )
    health_port: int | None = field(
        None,
        help="Port of a plain-text gRPC server for health checks only, for probes without TLS; 0 takes a free "
        "one, empty serves none",
        minimum=0,
        maximum=65535,
    )
    log_level: LogLevel = field("info", help="Lowest severity that is logged")
    log_style: LogStyle = field(
        "auto", help="Format of log lines: JSON, console, or auto to choose by whether stderr is a terminal"
    )
    # Gateways and workers send up to MAX_MESSAGE_BYTES: a scheduler with less would end their streams again and again.
    max_message_bytes: int = field(
        MAX_MESSAGE_BYTES,
        help="Largest gRPC message in either direction",
        minimum=MAX_MESSAGE_BYTES,
        maximum=2**31 - 1,
    )
    drain_s: float = field(
        10.0,
        help="Time that calls in progress get to finish after the first signal",
        minimum=0.0,
        maximum=86400.0,
    )
    otlp_endpoint: str = field(
        "",
        help="Collector that receives spans, as http://host:4317 (OTLP over gRPC, needs laps-sd[otel]); the "
        "same for all services. Empty: no spans are sent",
    )
    tls_cert: Path | None = field(None, help="Certificate file of the gRPC server; none: plain text")
    tls_key: Path | None = field(None, help="Key of LAPS_SD_TLS_CERT")
    tls_client_ca: Path | None = field(
        None, help="CA file; callers must present a certificate of this CA (mutual TLS)"
    )

    def problems(self) -> Iterator[str]:
        """Yield a problem unless certificate and key are set together; a client CA needs them."""
        yield from super().problems()
        if (self.tls_cert is None) != (self.tls_key is None):
            yield "LAPS_SD_TLS_CERT and LAPS_SD_TLS_KEY must be set together."
        if self.tls_client_ca is not None and self.tls_cert is None:
            yield "LAPS_SD_TLS_CLIENT_CA needs LAPS_SD_TLS_CERT."

    @property
    def listen_host(self) -> str:
        """Return the address on which to listen, on this machine."""
        return available_host(self.grpc_host)

    @property
    def local_only(self) -> bool:
        """Return whether only this machine can call."""
        return is_loopback(self.grpc_host)

    @property
    def tls(self) -> Tls | None:
        """TLS files of the listener; None: plain text."""
        if self.tls_cert is None:
            return None
        return Tls(ca=self.tls_client_ca, cert=self.tls_cert, key=self.tls_key)
