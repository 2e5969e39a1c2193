"""The command `laps-sd`. This file runs on old Pythons too, to say that they are too old."""

import sys

NEEDED = (3, 11)


def main():  # type: () -> None
    """Entry point of the command."""
    if sys.version_info < NEEDED:
        sys.exit("laps-sd needs Python 3.11 or newer, this is %d.%d." % sys.version_info[:2])  # noqa: UP031
    from laps_sd.cli.app import run

    run()
