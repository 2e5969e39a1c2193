"""The command `laps-sd`. This file runs on old Pythons too, to report that they are too old."""

import os
import sys

NEEDED = (3, 11)


def main():  # type: () -> None
    """Entry point of the command."""
    if sys.version_info < NEEDED:
        sys.exit("laps-sd needs Python 3.11 or newer, this is %d.%d." % sys.version_info[:2])  # noqa: UP031
    _open_standard_streams()
    try:
        from laps_sd.cli.app import run  # takes a while, in which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        sys.exit(130)


def _open_standard_streams():  # type: () -> None
    """Open those that the caller has closed (`<&-`): sockets would get their numbers, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # it has the lowest free number, which is this one
            os.set_inheritable(opened, True)
            setattr(sys, name, open(number, "w" if number else "r"))  # noqa: PTH123, SIM115
