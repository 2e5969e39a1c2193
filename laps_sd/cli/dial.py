"""Addresses, credentials and channels of the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import grpc
import typer

from laps_sd.client import Client
from laps_sd.client.request import credentials
from laps_sd.errors import StartupError
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
