"""GuideLLM, a load generator made for OpenAI's API, runs unchanged: with the exact command of
docs/how-to/openai.md.

It is not part of the development environment: `make guidellm` installs it separately, with torch and
transformers from there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from laps_sd.stack.local import LocalStack

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "openai.md"
PACKAGES = Path(sys.prefix) / "guidellm"
REQUESTS = 10
OUTPUT_TOKENS = 30


def command() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\$ (guidellm run .*)$", text, re.MULTILINE)
    return shlex.split(line)


def test_the_command_of_the_page_asks_for_what_this_test_expects() -> None:
    words = command()

    assert f"kind=max_requests,count={REQUESTS}" in words
    assert any(f"output_tokens={OUTPUT_TOKENS}" in word for word in words)


@pytest.mark.long
def test_guidellm_measures_a_stack(fake_stack: LocalStack, tmp_path: Path) -> None:
    if not (PACKAGES / "guidellm").is_dir():
        reason = "GuideLLM is not installed: make guidellm"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    report = tmp_path / "report.json"
    base = fake_stack.http_url.removesuffix("/v1")
    words = [word.replace("http://127.0.0.1:8000", base) for word in command()[1:]]

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "guidellm",
            *words,
            "--output",
            f"kind=json,path={report}",
            "--disable-console-interactive",
        ],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    assert totals["successful"] >= REQUESTS - 1, "which of those that it sent it counts is its own affair"
    measured = benchmark["requests"]["successful"]
    assert {one["output_tokens"] for one in measured} == {OUTPUT_TOKENS}
