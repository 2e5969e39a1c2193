"""Programs for agents run unchanged against a stack with the shipped model pair: each file of tests/clients.

Their packages are not part of the development environment: `make clients` installs them separately.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laps_sd.stack.local import LocalStack

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = Path(os.environ.get("LAPS_SD_TEST_CLIENTS") or Path(sys.prefix) / "clients")
PROGRAMS = {
    "langchain_tools": "agents",
    "instructor_model": "agents",
    "openai_agents": "agents",
    "llamaindex_agent": "llamaindex",
}


def test_each_program_has_an_environment() -> None:
    folder = ROOT / "tests" / "clients"

    assert {path.stem for path in folder.glob("*_*.py")} - {"__init__"} == set(PROGRAMS)
    assert {path.stem for path in folder.glob("*.txt")} == set(PROGRAMS.values())


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_calls_its_tools(demo_stack: LocalStack, program: str) -> None:
    python = ENVIRONMENTS / PROGRAMS[program] / "bin" / "python"
    if not python.is_file():
        reason = f"{python} is missing: make clients"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        [python, "-m", f"tests.clients.{program}", demo_stack.http_url, "laps-sd-demo"],
        cwd=ROOT,
        env={**os.environ, "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
