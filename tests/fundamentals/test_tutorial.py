"""`docs/tutorial.md` is correct: its blocks marked `run` run, and print the output on the page.

A console block is commands after `$ ` with their output. The python blocks share one interpreter, as if typed
into it; the text block after one is its output. In an output `…` matches anything in its line, and a line of
its own any lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from laps_sd.stack.local import LocalStack

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
NEXT_BLOCK = "\x1e"


@dataclass(frozen=True)
class Step:
    """Block to run, and its output; empty: any output."""

    source: str
    expected: str


def blocks() -> list[tuple[str, str]]:
    return [(found["info"], found["text"]) for found in FENCE.finditer(TUTORIAL.read_text(encoding="utf-8"))]


def commands() -> list[Step]:
    steps = []
    for info, text in blocks():
        if info == "console run":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                steps.append(Step(command, output))
    return steps


def programs() -> list[Step]:
    found = blocks()
    return [
        Step(text, after[1] if after[0] == "text" else "")
        for (info, text), after in zip(found, [*found[1:], ("", "")], strict=True)
        if info == "python run"
    ]


def agrees(expected: str, printed: str) -> bool:
    pattern = ""
    for line in expected.splitlines():
        anything = r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        pattern += anything
    return re.fullmatch(pattern, printed) is not None


def here(text: str, stack: LocalStack) -> str:
    """Replace the addresses of `make run` by those of this stack."""
    metrics_address = stack.metrics_url("gateway").removeprefix("http://").removesuffix("/metrics")
    text = text.replace("127.0.0.1:50051", stack.gateway_address)
    text = text.replace("http://127.0.0.1:8000/v1", stack.http_url)
    return text.replace("127.0.0.1:9090", metrics_address)


def environment(stack: LocalStack) -> dict[str, str]:
    mine = {key: value for key, value in os.environ.items() if not key.startswith("LAPS_SD_")}
    return mine | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "LAPS_SD_URL": stack.gateway_address,
        "LAPS_SD_SCHEDULER_SEEDS": stack.scheduler_address,
        "COLUMNS": "120",
    }


def test_the_commands_of_the_tutorial_print_what_it_says(demo_stack: LocalStack, tmp_path: Path) -> None:
    steps = commands()
    assert len(steps) >= 8
    for step in steps:
        done = subprocess.run(
            ["bash", "-c", here(step.source, demo_stack)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment(demo_stack),
            timeout=60,
        )
        assert done.returncode == 0, f"$ {step.source}\n{done.stdout}"
        if step.expected:
            assert agrees(step.expected, done.stdout), f"$ {step.source}\n{done.stdout}"


def test_the_programs_of_the_tutorial_print_what_it_says(demo_stack: LocalStack, tmp_path: Path) -> None:
    steps = programs()
    assert len(steps) >= 5
    program = f"print({NEXT_BLOCK!r})\n".join(step.source for step in steps)
    done = subprocess.run(
        [sys.executable, "-c", here(program, demo_stack)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(demo_stack),
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    for step, printed in zip(steps, done.stdout.split(NEXT_BLOCK + "\n"), strict=True):
        assert agrees(step.expected, printed), f"{step.source}\nprinted\n{printed}"


@pytest.mark.parametrize(
    ("expected", "printed", "answer"),
    [
        ("a … c\n", "a b c\n", True),
        ("a … c\n", "a b\n", False),
        ("a\n…\nc\n", "a\nb\nb\nc\n", True),
        ("a\n…\nc\n", "a\nc\n", True),
        ("a\n", "a\nb\n", False),
        ("(a)\n", "a\n", False),
    ],
)
def test_an_ellipsis_stands_for_what_differs(expected: str, printed: str, answer: bool) -> None:
    assert agrees(expected, printed) is answer
