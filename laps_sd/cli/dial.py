"""Addresses, credentials and channels of the command line."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import grpc
import typer

from laps_sd.client import Client
from laps_sd.client.request import credentials
from laps_sd.errors import LapsSdError, StartupError, describe
from laps_sd.service.leader_link import Candidates, named_leader
from laps_sd.service.wire import Tls, channel_options
from laps_sd.stack.running import Running, running

GATEWAY = "127.0.0.1:50051"
SCHEDULER = "127.0.0.1:50052"
PLAIN, SECURE = ("grpc", "http"), ("grpcs", "https")

CONNECTION = "Connection"
"""Title of the group of these options in --help."""

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="LAPS_SD_URL",
        help="Gateway as host:port; grpcs://host:port dials with TLS. Default: that of the running `laps-sd up`, else "
        f"{GATEWAY}.",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="LAPS_SD_API_KEY",
        help="Key that names the tenant.",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="LAPS_SD_TLS_CA",
        help="CA file that verifies the server, instead of the system's roots.",
        rich_help_panel=CONNECTION,
    ),
]
CertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        help="Certificate to show (mutual TLS).",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        help="Key of --tls-cert.",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
TlsNameOption = Annotated[
    str,
    typer.Option(
        "--tls-name",
        help="Name in the server's certificate, if it is not the host in --url (a port-forward).",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        envvar="LAPS_SD_SCHEDULER_SEEDS",
        help="Schedulers of the shard, host:port[,host:port ...]. Default: those of the running `laps-sd up`, else "
        f"{SCHEDULER}.",
        show_default=False,
        rich_help_panel=CONNECTION,
    ),
]
LinkCaOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        envvar="LAPS_SD_LINK_TLS_CA",
        help="CA file that verifies the scheduler: TLS.",
        rich_help_panel=CONNECTION,
    ),
]
LinkCertOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        envvar="LAPS_SD_LINK_TLS_CERT",
        help="Certificate to show (mutual TLS).",
        rich_help_panel=CONNECTION,
    ),
]
LinkKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        envvar="LAPS_SD_LINK_TLS_KEY",
        help="Key of --tls-cert.",
        rich_help_panel=CONNECTION,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

NOT_THE_LEADER = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
"""Status codes after which another scheduler may answer; the last: one that is paused, or whose network is broken."""

Reply = TypeVar("Reply")


def gateway(given: str | None) -> str:
    """Return the gateway to call: the given one, that of the running `laps-sd up`, or the default."""
    if given is not None:
        return given
    one = _only_running("--url", lambda one: one.gateway)
    return GATEWAY if one is None else one.gateway


def shards(given: Sequence[str]) -> list[str]:
    """Return the schedulers of each shard to call: the given ones, those of all shards of the running `laps-sd up`,
    or the default.
    """
    if given:
        return list(given)
    one = _only_running("--scheduler", _first_shard)
    every = [] if one is None else [",".join(seeds) for seeds in one.schedulers.values()]
    return every or [SCHEDULER]


def schedulers(given: str | None) -> str:
    """Return the schedulers of the shard to call: the given ones, those of the running `laps-sd up`, or the
    default.
    """
    if given is not None:
        return given
    one = _only_running("--scheduler", _first_shard)
    if one is None:
        return SCHEDULER
    if len(one.schedulers) > 1:
        every = "; ".join(f"{shard}: {','.join(seeds)}" for shard, seeds in one.schedulers.items())
        print(
            f"laps-sd: this is the first of several shards; --scheduler names another: {every}",
            file=sys.stderr,
        )
    return _first_shard(one)


def record() -> str | None:
    """Return the URL of the record of the running `laps-sd up`; None if none runs."""
    one = _only_running("--redis-url", lambda one: one.redis)
    return one.redis or None if one is not None else None


def _first_shard(one: Running) -> str:
    return ",".join(next(iter(one.schedulers.values()), [SCHEDULER]))


def _only_running(flag: str, address: Callable[[Running], str]) -> Running | None:
    """Return the `laps-sd up` that runs on this machine; None if none does. Raises StartupError for several."""
    found = running()
    if len(found) > 1:
        lines = [
            f"  {flag} {address(one)}  process {one.process}, model {one.model}, started in {one.folder}"
            for one in found
        ]
        raise StartupError(
            f"{len(found)} `laps-sd up` run on this machine; {flag} chooses one:\n" + "\n".join(lines)
        )
    return found[0] if found else None


def endpoint(url: str, files: Tls, name: str = "") -> tuple[str, Tls | None]:
    """Return host:port of a URL and how to dial it with TLS; None for plain text.

    The schemes grpcs and https mean TLS, and so does any file. `name`: see TlsNameOption.
    """
    scheme, _, address = url.rpartition("://")
    address = address.rstrip("/")
    host, _, port = address.rpartition(":")
    bare = ":" in host and not host.startswith("[")  # IPv6
    if scheme not in ("", *PLAIN, *SECURE) or not host or bare or not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(
            f"an address is host:port, as {GATEWAY}, or grpcs://host:port for TLS; got {url!r}"
        )
    secure = scheme in SECURE or files != Tls()
    return address, replace(files, server_name=name) if secure else None


@contextmanager
def client(
    url: str | None, files: Tls | None = None, *, name: str = "", api_key: str | None = None
) -> Iterator[Client]:
    """Open a client of a gateway (see `gateway`, `tls_files`). A call that fails before it is accepted is not
    repeated.
    """
    address, tls = endpoint(gateway(url), files or Tls(), name)
    with Client(address, tls=tls, metadata=metadata(api_key), retry_s=0.0) as made:
        yield made


def channel(url: str, files: Tls, name: str = "") -> grpc.Channel:
    """Open a channel to a server; see `tls_files`. `name`: see TlsNameOption."""
    address, secure = endpoint(url, files, name)
    options = channel_options(address)
    if secure is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(
        address, secure.channel_credentials(), options=[*options, *secure.channel_options()]
    )


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that authenticates a call. Raises typer.BadParameter."""
    try:
        return credentials(api_key, ())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--api-key or LAPS_SD_API_KEY") from None


def tls_files(ca: Path | None, cert: Path | None, key: Path | None) -> Tls:
    """Return how to dial a server. Any file means TLS."""
    if (cert is None) != (key is None):
        raise typer.BadParameter("--tls-cert and --tls-key come together")
    return Tls(ca=ca, cert=cert, key=key)


class Leader:
    """The leader of one shard. Its channel is kept from call to call; calls are made one at a time.

    Methods may be called from any thread.
    """

    def __init__(self, seeds: str, tls: Tls) -> None:
        """Take addresses of schedulers, host:port[,host:port ...]. Raises typer.BadParameter."""
        self._seeds = [address.strip() for address in seeds.split(",") if address.strip()]
        if not self._seeds:
            raise typer.BadParameter("give at least one scheduler as host:port")
        for address in self._seeds:
            endpoint(address, tls)
        self._tls = tls
        self._calling = threading.Lock()
        self._kept: tuple[str, grpc.Channel] | None = None
        self.closed = False

    @property
    def seeds(self) -> str:
        """Return the addresses to dial."""
        return ",".join(self._seeds)

    def call(self, call: Callable[[grpc.Channel], Reply]) -> Reply:
        """Call the leader: the last one, then each address in turn, and those that standbys refer to. One
        that does not answer in time is left for the next.

        Raises grpc.RpcError.
        """
        with self._calling:
            candidates = Candidates([*([self._kept[0]] if self._kept else []), *self._seeds])
            last: grpc.RpcError | None = None
            while (address := candidates.next_address()) is not None:
                try:
                    return call(self._channel_to(address))
                except typer.BadParameter:  # the seeds are addresses: a standby referred to something else
                    continue
                except grpc.RpcError as error:
                    code = error.code() if isinstance(error, grpc.Call) else None
                    if code not in NOT_THE_LEADER:
                        raise
                    last = error
                    if code is grpc.StatusCode.FAILED_PRECONDITION and isinstance(error, grpc.Call):
                        candidates.refer(named_leader(error.details() or ""))
            assert last is not None, "there is at least one address"
            raise last

    def _channel_to(self, address: str) -> grpc.Channel:
        if self._kept is None or self._kept[0] != address:
            before, self._kept = self._kept, (address, channel(address, self._tls))
            if before is not None:
                before[1].close()
            if self.closed:
                self._kept[1].close()
        return self._kept[1]

    def close(self) -> None:
        """Close the channel. A call that is under way ends with CANCELLED, later ones with ValueError."""
        self.closed = True
        kept = self._kept
        if kept is not None:
            kept[1].close()


def with_next_step(error: grpc.RpcError | LapsSdError) -> str:
    """Return what failed and, if the call reached the wrong server or none, what to do about it."""
    sentence = _sentence(error)
    if notes := getattr(error, "__notes__", ()):
        return f"{sentence}. {' '.join(notes)}"
    words = sentence.lower()
    if "handshake" in words or "ssl_error" in words:
        return (
            f"the TLS handshake at the address failed ({sentence}). If the server speaks plain text, leave out grpcs:// "
            "and --tls-ca, and unset LAPS_SD_TLS_CA or LAPS_SD_LINK_TLS_CA. --tls-ca names the CA of a private "
            "certificate."
        )
    if "hostname verification" in words:
        return f"the certificate of the server at the address is for another name ({sentence}): --tls-name gives it."
    if "socket closed" in words and "failed to connect" in words:
        return (
            f"the server at the address closed the connection ({sentence}). Does it need TLS (grpcs://), or a client "
            "certificate (--tls-cert)?"
        )
    if "failed parsing http/2" in words:
        return f"the server at the address does not speak gRPC ({sentence}). Is it an HTTP or metrics port?"
    if "failed to connect" in words:
        return (
            f"no server answers at the address ({sentence}). Is the system running? `laps-sd up` starts it."
        )
    code = _code_of(error)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the server did not answer in time ({sentence}). Its log shows what it waits for."
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the server at the address does not serve this call ({sentence}). A gateway (--url, usually port "
            "50051) serves generate, chat and explain; a scheduler (--scheduler, usually port 50052) queue, "
            "workers and drain."
        )
    return sentence


def _sentence(error: grpc.RpcError | LapsSdError) -> str:
    match error:
        case LapsSdError(__cause__=grpc.RpcError() as call):
            return describe(call)
        case LapsSdError():
            return f"{error.code.name}: {error}"
        case _:
            return describe(error)


def _code_of(error: grpc.RpcError | LapsSdError) -> grpc.StatusCode | None:
    if isinstance(error, LapsSdError):
        return error.code
    return error.code() if isinstance(error, grpc.Call) else None


@contextmanager
def within(timeout_s: float | None) -> Iterator[None]:
    """Add a note to the error of a call whose deadline, set by --timeout, has passed."""
    try:
        yield
    except (grpc.RpcError, LapsSdError) as error:
        if timeout_s is not None and _code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
            error.add_note(
                f"The deadline was --timeout {timeout_s:g} (seconds): give more, or --time-limit instead, "
                "which ends the text in time and counts as success."
            )
        raise
