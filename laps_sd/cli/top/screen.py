"""The application of `laps-sd top`: reads each shard once a second and draws what changed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import grpc
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from laps_sd.cli.failures import with_next_step
from laps_sd.cli.operate import explanation_lines, outage_sentence
from laps_sd.cli.top import lines
from laps_sd.cli.top.dialogs import Confirm, Help
from laps_sd.cli.top.lines import Key
from laps_sd.cli.top.source import Reading, Source
from laps_sd.cli.top.table import Table

__all__ = ["Top"]

EVERY_S = 1.0
"""Seconds between two readings of a shard."""
KEYS = "s sort  r reverse  / filter  e explain  c cancel  d drain  Tab  ? help  q quit"
MOST_WORKER_LINES = 8
ROOM_FOR_ALL = 36
"""Lines of a terminal with room for the workers and an explanation."""


@dataclass
class _Shard:
    """A shard as it was read last."""

    source: Source
    reading: Reading | None = None
    error: str = ""
    """Why it could not be read the last time; empty: it was."""
    failing_since_s: float = 0.0
    """Unix time of the first of these failures."""


class Top(App[None]):
    """Workers, levels and requests of shards, and what an operator does about them."""

    ENABLE_COMMAND_PALETTE = False
    # The terminal's own colours: readable on a dark and a light one.
    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    #summary, #status, #keys { height: auto; }
    #status { text-style: bold; max-height: 4; }
    * {
        scrollbar-color: ansi_default;
        scrollbar-background: ansi_default;
        scrollbar-background-hover: ansi_default;
        scrollbar-background-active: ansi_default;
    }
    #workers { height: auto; margin-top: 1; }
    #requests { height: 1fr; min-height: 4; margin-top: 1; }
    #explanation { height: 55%; border-top: solid ansi_default; display: none; background: ansi_default; }
    #explanation.shown { display: block; }
    #filter { display: none; border: none; height: 1; padding: 0; background: ansi_default; color: ansi_default; }
    #filter.shown { display: block; }
    ModalScreen { align: center middle; background: ansi_default; }
    .dialog { width: auto; max-width: 100%; height: auto; padding: 1 2; border: solid ansi_default; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", show=False),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("s", "sort(1)", show=False),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", show=False),
        Binding("slash", "filter", show=False),
        Binding("e,enter", "explain", show=False),
        Binding("c", "cancel", show=False),
        Binding("d", "drain", show=False),
        Binding("question_mark,h,f1", "help", show=False),
        Binding("escape", "close", show=False),
    ]

    def __init__(self, sources: Sequence[Source], *, every_s: float = EVERY_S) -> None:
        """`sources`: the shards to show; they are closed at the end."""
        super().__init__(ansi_color=True)
        self._shards = [_Shard(source) for source in sources]
        self._every_s = every_s
        self._explained: Key | None = None
        self._notice = ""
        """Result of the last action, until the next key."""

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="summary", markup=False)
        yield Table(lines.WORKERS, name="workers")
        yield Table(lines.REQUESTS, name="requests")
        with VerticalScroll(id="explanation"):
            yield Static(id="story", markup=False)
        yield Input(id="filter", placeholder="filter: words, or column:word", compact=True)
        yield Static(id="status", markup=False)
        yield Static(KEYS, id="keys", markup=False)

    def on_mount(self) -> None:
        """Begin to read."""
        self.theme = "ansi-dark"
        self._summary, self._story = self.query_one("#summary", Static), self.query_one("#story", Static)
        self._status, self._filter = self.query_one("#status", Static), self.query_one("#filter", Input)
        self._worker_table, self._request_table = (
            self.query_one("#workers", Table),
            self.query_one("#requests", Table),
        )
        self._texts: dict[Static, str] = {}
        self._request_table.focus()
        self._draw()
        if not self.is_headless:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(each, self.exit)
        for shard in self._shards:
            self.run_worker(self._read_again_and_again(shard))

    def on_unmount(self) -> None:
        """End the calls that are under way, for which the process would wait."""
        for shard in self._shards:
            shard.source.close()

    # Read.

    async def _read_again_and_again(self, shard: _Shard) -> None:
        while True:
            await self.read_once(shard)
            await asyncio.sleep(self._every_s)

    async def read_once(self, shard: _Shard) -> None:
        """Read a shard and draw it; an error is shown, with the last reading."""
        try:
            shard.reading = await asyncio.to_thread(shard.source.read)
        except (grpc.RpcError, ValueError) as error:
            if shard.source.closed:
                return
            shard.failing_since_s = shard.failing_since_s if shard.error else time.time()
            shard.error = with_next_step(error) if isinstance(error, grpc.RpcError) else str(error)
        else:
            shard.error = ""
        self._draw()
        await self._explain_again()

    async def _explain_again(self) -> None:
        if self._explained is None:
            return
        at, request_id = self._explained
        shard = self._shards[at]
        try:
            explanation = await asyncio.to_thread(shard.source.explain, request_id)
        except (grpc.RpcError, ValueError) as error:
            if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.NOT_FOUND:
                return  # the last explanation stays; the next reading fails as well, and the status line has why
            text = f"no request {request_id}: its record has expired"
        else:
            text = "\n".join(map(lines.plain, explanation_lines(explanation)))
        if self._explained == (at, request_id):
            self._write(self._story, text)

    # Draw.

    def _draw(self) -> None:
        """Draw what differs from what is shown."""
        read = [(at, shard.reading) for at, shard in enumerate(self._shards) if shard.reading is not None]
        readings = [reading for _, reading in read]
        self._write(self._summary, "\n".join(lines.summary(readings)))
        workers, requests = lines.workers(read), lines.requests(read)
        self._hide_empty_columns(requests)
        self._worker_table.styles.height = 1 + max(1, min(len(workers), MOST_WORKER_LINES))
        self._worker_table.show(workers)
        self._request_table.show(requests)
        self._draw_status()

    def _hide_empty_columns(self, requests: Sequence[lines.Row]) -> None:
        hidden = set() if len(self._shards) > 1 else {"shard"}
        self._worker_table.hidden = frozenset(hidden)
        for title in ("level", "tenant"):
            column = next(at for at, head in enumerate(lines.REQUESTS) if head.title == title)
            known = {row.cells[column] for row in requests}
            if known <= {""} or (title == "tenant" and len(known) < 2):  # one tenant: no difference to show
                hidden.add(title)
        self._request_table.hidden = frozenset(hidden)

    def _draw_status(self) -> None:
        parts = [self._notice] if self._notice else []
        for shard in self._shards:
            if shard.error:
                since = time.strftime("%H:%M:%S", time.localtime(shard.failing_since_s))
                parts.append(
                    f"no answer from {shard.source.seeds} since {since}, trying again: {shard.error}"
                )
            elif shard.reading is not None and shard.reading.queue.HasField("record_outage"):
                parts.append(outage_sentence(shard.reading.queue.record_outage))
        shown, total = (
            len(self._request_table.rows),
            sum(shard.reading.queue.total for shard in self._shards if shard.reading is not None),
        )
        if shown < total:
            of = f", filter: {self._request_table.filter}" if self._request_table.filter else ""
            parts.append(f"{shown} of {total} requests shown{of}")
        self._write(self._status, lines.plain(" · ".join(parts)))

    def _write(self, place: Static, text: str) -> None:
        if self._texts.get(place) != text:
            self._texts[place] = text
            place.update(text)

    def _show_notice(self, text: str) -> None:
        self._notice = text
        self._draw_status()

    # Keys.

    def on_key(self) -> None:
        """Remove the result of the last action."""
        if self._notice:
            self._show_notice("")

    @property
    def _table(self) -> Table:
        return self._worker_table if self._worker_table.has_focus else self._request_table

    def action_sort(self, step: int) -> None:
        """Sort the table that has the focus by another column."""
        self._table.sort_next(step)

    def action_reverse(self) -> None:
        """Reverse the order of the table that has the focus."""
        self._table.sort_by(self._table.sort_column)

    def action_filter(self) -> None:
        """Begin to type the filter."""
        self._filter.add_class("shown")
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter as typed."""
        self._request_table.filter = event.value
        self._request_table.rearrange()
        self._draw_status()

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self._filter.remove_class("shown")
        self._request_table.focus()

    def action_close(self) -> None:
        """End the filter if it is being typed, else the explanation, else the filter."""
        if self._filter.has_focus or (self._explained is None and self._request_table.filter):
            self._filter.value = ""
            self.on_input_submitted()
        else:
            self._explained = None
            self.query_one("#explanation").remove_class("shown")
            self._worker_table.display = True
            self._request_table.focus()

    async def action_explain(self) -> None:
        """Explain the chosen request, now and after each reading."""
        row = self._request_table.chosen
        if row is None:
            return
        self._explained = row.key
        self._write(self._story, f"{row.cells[1]} …")
        self.query_one("#explanation").add_class("shown")
        self._worker_table.display = self.size.height >= ROOM_FOR_ALL
        self.run_worker(self._explain_again())

    def action_cancel(self) -> None:
        """Cancel the chosen request, once that is confirmed."""
        row = self._request_table.chosen
        if row is None:
            return
        at, request_id = row.key
        tenant = dict(zip((head.title for head in lines.REQUESTS), row.cells, strict=True))["tenant"]

        def cancel() -> str:
            done = self._shards[at].source.cancel(request_id)
            return f"{request_id} is cancelled" if done else f"{request_id} had ended before"

        self._confirm(f"Cancel request {row.cells[1]} of tenant {tenant}?", cancel)

    def action_drain(self) -> None:
        """Drain the chosen worker, once that is confirmed."""
        row = self._worker_table.chosen
        if row is None:
            return
        at, worker_id = row.key

        def drain() -> str:
            self._shards[at].source.drain(worker_id)
            return f"{row.cells[0]} drains"

        self._confirm(f"Drain worker {row.cells[0]}? It takes no new work, and then ends.", drain)

    def _confirm(self, question: str, act: Callable[[], str]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._act(act))

        self.push_screen(Confirm(question), answered)

    async def _act(self, act: Callable[[], str]) -> None:
        try:
            self._show_notice(await asyncio.to_thread(act))
        except (grpc.RpcError, ValueError) as error:
            self._show_notice(with_next_step(error) if isinstance(error, grpc.RpcError) else str(error))

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())
