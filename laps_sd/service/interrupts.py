"""Ctrl-C while a program imports what it needs: before its event loop handles signals.

from laps_sd.service.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import ...                                   # all else, which takes up to a second
"""

import signal

__all__ = ["end_at_ctrl_c"]


def end_at_ctrl_c() -> None:
    """Make Ctrl-C end this process at once and without a traceback, until it has a handler of its own."""
    # The background job of a script starts with SIGINT ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
