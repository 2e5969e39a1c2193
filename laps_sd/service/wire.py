"""Options of channels and servers, and TLS: both ends of every link take them from here, so that they agree.

settings = load(WorkerSettings)                       # has the fields of LinkSettings
async with make_channel("scheduler:50052", link_tls(settings)) as channel:
    stub = WorkerLinkStub(channel)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import grpc
import grpc.aio

from laps_sd.errors import StartupError
from laps_sd.service.config import Settings, field
from laps_sd.service.listening import is_loopback
from laps_sd.service.log import get_logger

__all__ = [
    "MAX_MESSAGE_BYTES",
    "LinkSettings",
    "Tls",
    "channel_options",
    "link_tls",
    "make_channel",
    "reach",
    "seed_problems",
    "server_options",
]

log = get_logger(__name__)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message that either side accepts unless configured otherwise."""

KEEPALIVE_MS = 20_000
"""Interval of the pings on an idle stream, so that middleboxes keep it and a dead peer is noticed."""
KEEPALIVE_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 2_000
HANDSHAKE_TIMEOUT_MS = 10_000
"""Longest time until a new connection has spoken TLS, if that is on, and HTTP/2. Our choice; gRPC's own limit is two minutes,
in which a peer that sends nothing keeps a file descriptor."""
LEAST_PING_INTERVAL_MS = 5_000
"""Shortest interval of a client's pings; a client that pings more often is cut off (ENHANCE_YOUR_CALM)."""
MAX_WAITING_CALLS = 20_000
"""Calls of a server that may wait until its event loop takes them; each costs 9 KiB, and one more ends with CANCELLED. Our
choice: twice the streams of a gateway. gRPC's own limit ends some calls from 1,000 on, and all from 3,000 on: after a
failover more than these come together.
"""


def _common_options(max_message_bytes: int, max_sent_bytes: int | None = None) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_sent_bytes or max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own ping (it probes the bandwidth) replaces a ping for keepalive, and without this option
        # waits a minute for its answer.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ]


def server_options(
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_sent_bytes: int | None = None,
    max_connection_age_s: float | None = None,
    *,
    receives_unread: bool = True,
) -> list[tuple[str, int]]:
    """Return the options for `grpc.aio.server`. `max_sent_bytes`: the limit of its answers, if it is another one.
    `max_connection_age_s`: age at which the peer of a connection is asked to make its next calls over a new one;
    gRPC varies it by a tenth. Calls in progress go on, because there is no grace after which they would be cut.
    `receives_unread`: whether up to 4 MiB of a message are received before its call reads it, or 64 KiB.

    A port belongs to one process: a second one gets an error, instead of a share of the calls.
    """
    return [
        *_common_options(max_message_bytes, max_sent_bytes),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PING_INTERVAL_MS),
        ("grpc.server.max_pending_requests", MAX_WAITING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_WAITING_CALLS),
        ("grpc.so_reuseport", 0),
        *(
            []
            if max_connection_age_s is None
            else [("grpc.max_connection_age_ms", round(1000 * max_connection_age_s))]
        ),
        # Where gRPC estimates the bandwidth, the window of each stream begins at 4 MiB.
        *([] if receives_unread else [("grpc.http2.bdp_probe", 0)]),
    ]


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return the options for a channel to `host:port`.

    Reconnects start after 0.1 s and back off to 2 s. This machine itself is dialled directly, also if an
    environment variable (http_proxy, https_proxy) names a proxy, which gRPC would use for it too.
    """
    return [
        *_common_options(MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also bounds one attempt to connect, its TLS handshake included.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A channel per attempt: pauses between attempts are the dialler's, not those of an earlier channel.
        ("grpc.use_local_subchannel_pool", 1),
        *([("grpc.enable_http_proxy", 0)] if is_loopback(address.rpartition(":")[0].strip("[]")) else []),
    ]


@dataclass(slots=True)
class _Read:
    """Credentials that a dialler has read last, and the reason why it could not read them since."""

    credentials: grpc.ChannelCredentials | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of one end. `ca` verifies the peer; with a certificate and key this end identifies itself."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """Name that the server's certificate must have, if it is not the host of the address that is dialled."""
    _last: _Read = dataclasses.field(default_factory=_Read, init=False, repr=False, compare=False)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a dialler, from the files as they are now; without `ca` the system's
        roots verify the server.

        If a file cannot be read any more, or is empty (while a renewal replaces it), the credentials that
        were read last stay, and that is logged once. Raises StartupError if none were read before.
        """
        last = self._last
        try:
            last.credentials = grpc.ssl_channel_credentials(
                root_certificates=_read(self.ca),
                private_key=_read(self.key),
                certificate_chain=_read(self.cert),
            )
            last.problem = ""
        except StartupError as error:
            if last.credentials is None:
                raise
            if last.problem != str(error):
                last.problem = str(error)
                log.error("the TLS files cannot be used: the old ones stay", error=last.problem)
        return last.credentials

    def channel_options(self) -> list[tuple[str, str]]:
        """Return the options of a dialler's channel that belong to its TLS."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        octets = path.read_bytes()
    except OSError as error:
        raise StartupError(f"The TLS file {path} cannot be read: {error.strerror}.") from error
    if not octets:  # gRPC would abort the process
        raise StartupError(f"The TLS file {path} is empty.")
    return octets


@dataclass(frozen=True, kw_only=True)
class LinkSettings(Settings):
    """Settings of the link to the schedulers. Mix into the settings of gateway and worker."""

    GROUPS: ClassVar[Mapping[str, str]] = {"scheduler_seeds": "Link to the scheduler"}

    scheduler_seeds: tuple[str, ...] = field(
        ("127.0.0.1:50052",),
        help="Schedulers of the shard as host:port,host:port; any of them names the leader",
    )
    link_tls: bool = field(False, help="Dial the scheduler with TLS")
    link_tls_ca: Path | None = field(
        None, help="CA file that verifies the scheduler; none: the system's roots"
    )
    link_tls_cert: Path | None = field(
        None, help="Certificate that this service presents to the scheduler (mutual TLS)"
    )
    link_tls_key: Path | None = field(None, help="Key of LAPS_SD_LINK_TLS_CERT")

    def problems(self) -> Iterator[str]:
        """Yield problems: no address to dial; certificate without key or the reverse; files without TLS."""
        yield from super().problems()
        for problem in seed_problems(self.scheduler_seeds):
            yield f"LAPS_SD_SCHEDULER_SEEDS {problem}."
        if (self.link_tls_cert is None) != (self.link_tls_key is None):
            yield "LAPS_SD_LINK_TLS_CERT and LAPS_SD_LINK_TLS_KEY must be set together."
        if not self.link_tls and (self.link_tls_ca or self.link_tls_cert):
            yield "LAPS_SD_LINK_TLS_CA and LAPS_SD_LINK_TLS_CERT need LAPS_SD_LINK_TLS=true."


def seed_problems(seeds: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the addresses of a shard's schedulers, each as the end of a sentence."""
    if not seeds:
        yield "must name at least one scheduler as host:port"
    for seed in seeds:
        host, _, port = seed.rpartition(":")
        bare = ":" in host and not host.startswith("[")  # IPv6
        if not host or bare or not port.isdecimal() or not 0 < int(port) <= 65535:
            yield f"must be host:port or [IPv6]:port, separated by commas, got {seed!r}"


def link_tls(settings: LinkSettings) -> Tls | None:
    """Return the TLS files of the dialler's side of a link, to be kept for all its connections; None: plain text."""
    if not settings.link_tls:
        return None
    return Tls(ca=settings.link_tls_ca, cert=settings.link_tls_cert, key=settings.link_tls_key)


def make_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Return a channel to `host:port`."""
    options = channel_options(address)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address, tls.channel_credentials(), options=[*options, *tls.channel_options()]
    )


async def reach(channel: grpc.aio.Channel) -> bool:
    """Wait for a channel to connect; return False at its first failure."""
    state = channel.get_state(try_to_connect=True)
    while state is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return True
