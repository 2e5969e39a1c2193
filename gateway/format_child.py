"""The child of `gateway.formats`: reads a format in each line, writes an empty line that it has it, and then what is wrong with it.

May end over any of them; the empty line tells the parent over which.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from laps_sd.formats import first_line, matcher_of

# All our choice. A format that takes more is refused.
CPU_S = 0.5
"""Processor time for one format. The largest within the limits of `laps_sd.formats` take 0.2 s."""
MEMORY_BYTES = 512 << 20
"""Address space; the interpreter has 30 MiB of it."""
STACK_BYTES = 4 << 20
"""Half of what a worker has: what overflows a worker's ends the child first."""


def judge(kind: str, text: str) -> str:
    """The verdict. May take long, or end the process."""
    wanted = text
    if kind == "json_schema":
        try:
            wanted = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"must be JSON: {error}"
    try:
        from llguidance import LLTokenizer

        # As a worker will, with a vocabulary of its own: single bytes take the same expressions and rules.
        matcher = matcher_of(kind, wanted, LLTokenizer("byte"))
    except ImportError:
        return "cannot be used: this gateway is without the package llguidance"
    except ValueError as error:
        return str(error)
    matcher.compute_bitmask()
    return f"cannot be used: {first_line(matcher.get_error())}" if matcher.is_error() else ""


def main() -> None:
    """Judges what comes in, line by line, until the pipe ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to everybody; the parent decides
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
