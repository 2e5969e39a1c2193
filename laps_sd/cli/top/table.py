"""A table of thousands of rows of which only the visible ones are drawn, and of those only the ones that changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from laps_sd.cli.top.lines import Head, Key, Row, filtered

__all__ = ["Table"]

HEAD, SORTED = Style(bold=True), Style(bold=True, underline=True)
CHOSEN, CHOSEN_ELSEWHERE = Style(reverse=True), Style(bold=True)
STATES = {
    "running": Style(color="green"),
    "up": Style(color="green"),
    "draining": Style(color="yellow"),
    "gone": Style(color="red"),
}
"""Colour of a row by its state, which is also written in it."""


class Table(ScrollView, can_focus=True):
    """Rows below a fixed line of titles, sorted by one column, with one row chosen.

    The chosen row stays chosen when it moves.
    """

    DEFAULT_CSS = "Table { overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }"
    BINDINGS: ClassVar = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    def __init__(self, heads: Sequence[Head], *, name: str) -> None:
        """`name`: its id on the screen."""
        super().__init__(id=name)
        self.heads = heads
        self.rows: Sequence[Row] = ()
        """The rows that pass the filter, in their order."""
        self.sort_column = 0
        self.descending = False
        self.filter = ""
        self.hidden: frozenset[str] = frozenset()
        """Titles of columns that would show nothing."""
        self._all: Sequence[Row] = ()
        self._at = 0
        self._layout: list[tuple[int, int]] = []
        """Index and width of each column that is shown, from left to right."""
        self._drawn: list[tuple[Row | None, bool]] = []
        """Rows that were drawn on the visible lines below the titles, and True for the chosen one."""

    # The chosen row.

    @property
    def chosen(self) -> Row | None:
        """Return the chosen row; None if there is no row."""
        return self.rows[self._at] if self.rows else None

    def choose(self, key: Key) -> None:
        """Choose a row, if it is shown."""
        at = next((at for at, row in enumerate(self.rows) if row.key == key), None)
        if at is not None:
            self._move_to(at)

    def action_move(self, rows: int) -> None:
        """Choose the row that is `rows` below the chosen one."""
        self._move_to(self._at + rows)

    def action_page(self, pages: int) -> None:
        """Choose the row that is `pages` screens below the chosen one."""
        self._move_to(self._at + pages * max(1, self._room - 1))

    def _move_to(self, at: int) -> None:
        self._at = max(0, min(at, len(self.rows) - 1))
        self._scroll_to_chosen()
        self._draw_changes()

    def _scroll_to_chosen(self) -> None:
        top = self.scroll_offset.y
        wanted = min(max(top, self._at - self._room + 1), self._at)
        if wanted != top:
            self.scroll_to(y=wanted, animate=False)

    # Content.

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows instead of those before."""
        self._all = rows
        self.rearrange()

    def rearrange(self) -> None:
        """Filter and sort the rows again, and draw what changed."""
        chosen = self.chosen
        rows = list(filtered(self._all, self.heads, self.filter))
        column = self.sort_column
        if column or self.descending:  # rows come in the order of the first column
            rows.sort(key=lambda row: row.values[column], reverse=self.descending)
        self.rows = rows
        if chosen is not None:
            same = next((at for at, row in enumerate(rows) if row.key == chosen.key), None)
            self._at = self._at if same is None else same
        self._at = max(0, min(self._at, len(rows) - 1))
        self.virtual_size = Size(self.size.width, len(rows) + 1)
        self._scroll_to_chosen()
        if self._fit():
            self.refresh()
        else:
            self._draw_changes()

    def sort_by(self, column: int) -> None:
        """Sort by a column; largest first if it has numbers, but for the place in the queue. The column that is sorted
        by already is turned round.
        """
        if column == self.sort_column:
            self.descending = not self.descending
        else:
            self.sort_column = column
            self.descending = self.heads[column].is_number and column > 0
        self.rearrange()
        self.refresh(Region(0, 0, self.size.width, 1))

    def sort_next(self, step: int) -> None:
        """Sort by the next column that is shown (`step` 1), or by the one before (-1)."""
        shown = [column for column, _ in self._layout] or [0]
        at = shown.index(self.sort_column) if self.sort_column in shown else 0
        self.sort_by(shown[(at + step) % len(shown)])

    # Drawing.

    @property
    def _room(self) -> int:
        """Return the number of rows that are visible at once."""
        return max(1, self.size.height - 1)

    def _fit(self) -> bool:
        """Choose the columns that fit; return whether that changed the layout. Columns do not become narrower while
        rows come and go.
        """
        width = self.scrollable_content_region.width
        known = dict(self._layout)
        widths = {}
        for at, head in enumerate(self.heads):
            if head.title not in self.hidden:
                longest = max((_width(row.cells[at]) for row in self.rows), default=0)
                widths[at] = max(longest, len(head.title), 0 if head.shortest else known.get(at, 0))
        while widths and (over := sum(widths.values()) + len(widths) - 1 - width) > 0:
            cut = next((at for at in reversed(widths) if self._slack(at, widths[at])), None)
            if cut is not None:
                widths[cut] -= min(over, self._slack(cut, widths[cut]))
                continue
            least = max(widths, key=lambda at: self.heads[at].rank)
            if not self.heads[least].rank:
                break
            del widths[least]
        before, self._layout = self._layout, list(widths.items())
        return self._layout != before

    def _slack(self, column: int, width: int) -> int:
        """Return the characters by which a column of this width may be cut."""
        head = self.heads[column]
        return 0 if head.shortest is None else max(0, width - max(head.shortest, len(head.title)))

    def _draw_changes(self) -> None:
        for line, what in enumerate(self._visible()):
            if line >= len(self._drawn) or what != self._drawn[line]:
                self.refresh(Region(0, line + 1, self.size.width, 1))

    def _visible(self) -> list[tuple[Row | None, bool]]:
        return [self._line(line) for line in range(self.size.height - 1)]

    def _line(self, line: int) -> tuple[Row | None, bool]:
        at = self.scroll_offset.y + line
        return (self.rows[at], at == self._at) if at < len(self.rows) else (None, False)

    def render_line(self, y: int) -> Strip:
        """Return one visible line."""
        width = self.scrollable_content_region.width
        if y == 0:
            return self._titles(width)
        line = y - 1
        what = row, is_chosen = self._line(line)
        self._drawn += [(None, False)] * (line + 1 - len(self._drawn))
        self._drawn[line] = what
        if row is None:
            return Strip.blank(width, self.rich_style)
        text = " ".join(self._cell(row.cells[column], column, wide) for column, wide in self._layout)
        style = self.rich_style + next(
            (style for cell in row.cells if (style := STATES.get(cell))), Style.null()
        )
        if is_chosen:
            style += CHOSEN if self.has_focus else CHOSEN_ELSEWHERE
        return Strip([Segment(set_cell_size(text, width), style)], width)

    def _cell(self, text: str, column: int, width: int) -> str:
        if self.heads[column].is_number:
            return text.rjust(width)
        if cell_len(text) > width and self.heads[column].shortest is not None:
            return set_cell_size(text, width - 1) + "…"
        return set_cell_size(text, width)

    def _titles(self, width: int) -> Strip:
        segments = []
        for column, wide in self._layout:
            head = self.heads[column]
            title = head.title.rjust(wide) if head.is_number else head.title.ljust(wide)
            segments += [Segment(title, self.rich_style + (SORTED if column == self.sort_column else HEAD))]
            segments += [Segment(" ", self.rich_style)]
        return Strip(segments).adjust_cell_length(width, self.rich_style)

    # Events.

    def on_resize(self, event: events.Resize) -> None:
        """Choose the columns again."""
        self._drawn.clear()
        self.rearrange()
        self.refresh()

    def on_focus(self) -> None:
        """Show that keys go here."""
        self.refresh()

    def on_blur(self) -> None:
        """Show that keys go elsewhere."""
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Choose a row, or sort by the column whose title was clicked."""
        if event.y:
            if self.scroll_offset.y + event.y - 1 < len(self.rows):
                self._move_to(self.scroll_offset.y + event.y - 1)
            return
        left = 0
        for column, wide in self._layout:
            if event.x <= left + wide:
                self.sort_by(column)
                return
            left += wide + 1


def _width(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return len(text) if text.isascii() else cell_len(text)
