"""`--watch`: what a command prints, again every second until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from laps_sd.cli.failures import with_next_step

__all__ = ["EVERY_S", "show", "watch"]

EVERY_S = 1.0


def show(parts: Sequence[RenderableType]) -> None:
    """Print once. A table is as wide as it is: an id or a number that is cut off is of no use."""
    console = Console(highlight=False)
    options = console.options.update(max_width=10_000)
    console.width = max([console.width, *(console.measure(part, options=options).maximum for part in parts)])
    for part in parts:
        console.print(part)


def watch(read: Callable[[], Sequence[RenderableType]]) -> None:
    """Show what `read` returns, again and again until Ctrl-C; on a terminal in place, elsewhere one after the other.

    A scheduler that does not answer is shown as an error, and called again.
    """
    console = Console(highlight=False)
    try:
        if not console.is_terminal:
            while True:
                show(_tried(read))
                time.sleep(EVERY_S)
        with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                clock = Text(time.strftime("%H:%M:%S"), style="dim")
                live.update(Group(clock, *_tried(read)), refresh=True)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return


def _tried(read: Callable[[], Sequence[RenderableType]]) -> Sequence[RenderableType]:
    try:
        return read()
    except grpc.RpcError as error:
        return [Text(f"laps-sd: {with_next_step(error)}")]
