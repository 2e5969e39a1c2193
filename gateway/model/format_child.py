"""The child process of `gateway.model.formats`. It reads one format per line, writes an empty line to confirm
receipt, and then writes the problem of the format.

The process may end while it handles a format; the empty line shows the parent which format caused that.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from laps_sd.contract.formats import first_line, matcher_of

# All are our choice. A format that exceeds one of these limits is refused.
CPU_S = 0.5
"""Processor time for one format, in seconds. The largest formats within the limits of
`laps_sd.contract.formats` take 0.2 s."""
MEMORY_BYTES = 512 << 20
"""Limit of the address space; the interpreter takes 30 MiB of it."""
STACK_BYTES = 4 << 20
"""Stack limit, half of a worker's: a format that overflows a worker's stack ends the child first."""


def judge(kind: str, text: str) -> str:
    """Return the verdict on a format. May take long, or end the process."""
    wanted = text
    if kind == "json_schema":
        try:
            wanted = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"must be JSON: {error}"
    try:
        from llguidance import LLTokenizer

        # Compile as a worker does, but with another vocabulary: single bytes accept the same expressions and
        # rules.
        matcher = matcher_of(kind, wanted, LLTokenizer("byte"))
    except ImportError:
        return "cannot be used: this gateway is without the package llguidance"
    except ValueError as error:
        return str(error)
    matcher.compute_bitmask()
    return f"cannot be used: {first_line(matcher.get_error())}" if matcher.is_error() else ""


def main() -> None:
    """Judge the incoming formats, line by line, until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a terminal sends these signals to all processes; the parent decides
        signal.signal(number, signal.SIG_IGN)
    for limit, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_STACK, STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(b"\n")
        sys.stdout.buffer.flush()
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        verdict = judge(kind, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(verdict).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
