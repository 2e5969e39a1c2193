"""The memory that the benchmarks count for a component."""

from __future__ import annotations

import subprocess
import sys

from bench._memory import resident_by_group

MIB = 2**20
HOLDS = f"data = b'x' * {64 * MIB}; print('held', flush=True); input()"
"""Program that holds memory until its input ends."""
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS!r}])"
"""Program that starts it and waits, as a worker does with the process of its engine."""


def test_the_processes_that_a_component_started_count_with_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as component:
        assert component.stdout is not None
        assert component.stdout.readline() == b"held\n"
        resident_mib = resident_by_group()[component.pid]
        component.communicate(b"\n")

    assert resident_mib > 64
