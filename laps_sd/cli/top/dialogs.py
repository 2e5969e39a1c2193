"""Questions and help over the screen of `laps-sd top`."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import Static

__all__ = ["HELP", "Confirm", "Help"]

HELP = """\
Tab        next table or panel    Up Down PgUp PgDn Home End  choose a row
s S        sort by next column, column before; or click a title
r          reverse the order
/          filter: every word must be in the row; level:2, state:queued,
           tenant:NAME look in one column; Enter keeps it, Esc ends it
e Enter    explain the chosen request: place, reasons, timeline
c          cancel the chosen request, after a question
d          drain the chosen worker, after a question
Esc        close the explanation, end the filter
q Ctrl-C   quit

Times in seconds. "#" is the place in the scheduler's order, "age s" the time
since arrival.
"free KV": blocks of the target's KV cache, free/all."""


class Confirm(ModalScreen[bool]):
    """A question that only `y` answers with yes."""

    BINDINGS: ClassVar = [
        Binding("y", "answer(True)", show=False),
        Binding("n,escape,q", "answer(False)", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Show the question."""
        yield Static(f"{self._question}\n\ny  yes     n  no", classes="dialog", markup=False)

    def action_answer(self, answer: bool) -> None:
        """End the question."""
        self.dismiss(answer)


class Help(ModalScreen[None]):
    """The keys. Any key closes it."""

    def compose(self) -> ComposeResult:
        """Show the keys."""
        yield Static(HELP, classes="dialog", markup=False)

    def on_key(self) -> None:
        """Close it."""
        self.dismiss()
