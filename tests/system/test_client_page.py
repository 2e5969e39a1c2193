"""The page about the Python client is right: its blocks run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laps_sd.stack.local import LocalStack

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "python-client.md"


def test_the_blocks_of_the_page_run(fake_stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 6
    program = "\n".join(blocks).replace("127.0.0.1:50051", fake_stack.gateway_address)
    exec(compile(program, str(PAGE), "exec"), {})

    printed = capsys.readouterr().out
    assert "arrived\n" in printed
    assert "[5, 5, 5]\n" in printed
