"""Runs a module as a child that never outlives its parent: `python -m laps_sd.stack.child PARENT_PID MODULE
[ARGUMENT …]`.

The kernel's parent-death signal is set before anything else runs, so that even a parent killed by SIGKILL
leaves no child running. Linux only; elsewhere the parent's own stop must suffice.

Ctrl-C of a terminal, which may reach the child too, is the parent's: the child ignores it unless the module handles it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and run the module in it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, module = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            sys.exit(1)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
