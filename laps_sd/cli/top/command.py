"""The command `laps-sd top`."""

from __future__ import annotations

import importlib.util
import sys
from typing import Annotated

import typer

from laps_sd.cli import dial
from laps_sd.cli.leader import Leader
from laps_sd.cli.top.source import Source
from laps_sd.errors import StartupError

__all__ = ["top"]


def top(
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler",
            envvar="LAPS_SD_SCHEDULER_SEEDS",
            help="Schedulers of a shard, host:port[,host:port ...]; once for each shard. Default: all shards of the "
            f"running `laps-sd up`, else {dial.SCHEDULER}.",
            show_default=False,
            rich_help_panel=dial.CONNECTION,
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Requests of each shard to show at most, best first.")
    ] = 1000,
    tls_ca: dial.LinkCaOption = None,
    tls_cert: dial.LinkCertOption = None,
    tls_key: dial.LinkKeyOption = None,
) -> None:
    """Show shards live: workers, levels and requests; sort, filter, explain, cancel and drain by key.

    `?` shows the keys. It needs the package textual, which the extra `top` brings.
    """
    if importlib.util.find_spec("textual") is None:
        raise StartupError("`laps-sd top` needs the package textual: pip install 'laps-sd[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise StartupError(
            "`laps-sd top` needs a terminal; `laps-sd queue --watch --json` prints lines without one"
        )
    tls = dial.tls_files(tls_ca, tls_cert, tls_key)
    sources = [Source(Leader(seeds, tls), limit=limit) for seeds in dial.shards(scheduler or [])]

    from laps_sd.cli.top.screen import Top  # textual is not installed everywhere, and takes a while to import

    Top(sources).run()
