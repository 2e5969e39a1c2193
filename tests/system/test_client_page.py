"""The page about the Python client is right: its blocks run, one after the other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from laps_sd import errors
from laps_sd.client import AsyncClient, Client, Options
from laps_sd.stack.local import LocalStack

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "python-client.md"


def test_the_blocks_of_the_page_run(demo_stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 6
    program = "\n".join(blocks).replace("127.0.0.1:50051", demo_stack.gateway_address)
    exec(compile(program, str(PAGE), "exec"), {})

    printed = capsys.readouterr().out
    assert "arrived\n" in printed
    assert "[5, 5, 5]\n" in printed


def test_the_page_has_every_method_option_and_error() -> None:
    """Each stands in the first column of a table."""
    page = PAGE.read_text(encoding="utf-8")
    first_columns = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    named = set(re.findall(r"`(\w+)(?:\(.*?\))?`", " ".join(first_columns)))
    methods = {name for name in dir(AsyncClient) if not name.startswith("_")}
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.LapsSdError) and not name.startswith("_")
    }

    assert methods == {name for name in dir(Client) if not name.startswith("_")}
    assert named == {
        *methods,
        *inspect.signature(Client).parameters,
        *Options.__annotations__,
        *(kinds - {"LapsSdError"}),
    }
