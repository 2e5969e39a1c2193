"""Tables that fit a terminal: the least important columns are shortened, then left out; no id is ever cut."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "fitted", "output_width"]

WIDEST = 10_000
"""Columns that a table without a limit may have."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    cells: Sequence[str]
    rank: int = 0
    """0: always shown, never cut. Of the others the one with the highest rank is left out first."""
    shortest: int | None = None
    """Characters to which its cells may be shortened; None: it is shown whole or not at all."""

    def shortened(self) -> Column:
        """Return the column with cells of at most `shortest` characters."""
        if self.shortest is None:
            return self
        most = max(self.shortest, len(self.title))
        cells = [cell if len(cell) <= most else cell[: most - 1] + "…" for cell in self.cells]
        return Column(self.title, cells, self.rank)


def output_width() -> int | None:
    """Return the columns of the terminal, or those that COLUMNS names; None: the output has no width."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fitted(columns: Sequence[Column], width: int | None) -> Table:
    """Return a table that is at most `width` wide, if that is possible without its most important columns."""
    shown = list(columns)
    console = Console(width=WIDEST)
    while True:
        table = _table(shown)
        if width is None or console.measure(table).maximum <= width:
            return table
        shortened = [column.shortened() for column in shown]
        if shortened != shown:
            shown = shortened
            continue
        least = max(shown, key=lambda column: column.rank)
        if not least.rank:
            return table
        shown.remove(least)


def _table(columns: Sequence[Column]) -> Table:
    """Narrow: nothing but a line below the heads."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in columns:
        table.add_column(column.title, no_wrap=True, overflow="ignore")
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))  # a text as it is: Rich would read "[gpu]" in a name as markup
    return table
