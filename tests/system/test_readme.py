"""What the README shows is true: its Python block runs, and its prompts are ones that the shipped pair does well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laps_sd.client import Client
from laps_sd.local import LocalStack
from tests.helpers import wait_until
from tests.system.up import Up

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_python_blocks_run_as_they_stand(
    demo_stack: LocalStack, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, openai = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(ours.replace("127.0.0.1:50051", demo_stack.gateway_address), {})

    printed = capsys.readouterr().out
    assert printed.lstrip().startswith("3, 4, 5, 6, 7, 8, 9, 10, 11, 12\n")
    assert re.search(r"accepted \d+ of \d+", printed)

    exec(openai.replace("http://127.0.0.1:8000/v1", demo_stack.http_url), {})
    assert capsys.readouterr().out.strip() == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"


def test_the_prompts_of_the_readme_get_the_answers_that_it_shows(demo_stack: LocalStack) -> None:
    shown = re.findall(r'laps-sd generate "([^"]+)" --temperature 0\n(.*?)\n--', README, re.S)
    assert shown
    with Client(demo_stack.gateway_address) as client:
        for prompt, answer in shown:
            chat = [{"role": "user", "content": prompt}]
            assert client.generate(chat, temperature=0).text.strip() == answer


def test_the_third_command_kills_a_worker_and_gets_its_answer() -> None:
    [(command, answer)] = re.findall(r"^\$ (kill -9 .*)\n(.*)\n-- stop: 32 tokens", README, re.M)
    with Up("--engine", "demo") as up:
        before = up.pid("worker-0")
        command = re.sub(r"kill -9 \d+", f"kill -9 {before}", command)
        command = command.replace(".venv/bin/laps-sd", f"{sys.executable} -m laps_sd")
        answered = subprocess.run(
            command,
            shell=True,
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"LAPS_SD_URL": up.grpc("gateway-0")},
        )
        assert answered.stdout == answer + "\n"
        assert "-- stop: 32 tokens" in answered.stderr
        for shown in re.findall(r"^\d\d:\d\d:\d\d  (worker-0 .*)$", README, re.M):
            line = re.sub(r"[\d.]+", r"[\\d.]+", re.escape(shown).replace(r"\.", "."))
            wait_until(lambda line=line: up.said(line), description=shown)
        assert up.pid("worker-0") != before
