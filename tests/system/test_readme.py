"""The examples of the README work: its Python block runs, and the shipped pair completes its prompts well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack
from tests.helpers import wait_until
from tests.system.up import Up

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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


def result(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "bench" / "results" / name).read_text())["rows"]
    return rows


def test_its_figures_are_those_of_the_results() -> None:
    text = " ".join(README.split())
    [measured] = sorted((ROOT / "bench" / "results").glob("*-serve.json"))[-1:]
    for hints, before in (("none", "Requests without any hint"), ("0.3", "With length hints")):
        overload, burst, load = (
            row["ratio_fcfs"]
            for name in ("overload", "burst", "load-0.7")
            for row in result(measured.name)
            if (row.get("config"), row.get("hints"), row.get("policy")) == (name, hints, "laps-sd")
            and "ratio_fcfs" in row
        )
        figures = f"{overload:.2f} in overload, {burst:.2f} in a burst, {load:.2f} at a load of 0.7"
        assert figures in text[text.index(before) :]
    assert measured.name[: len("2026-11-25")] in text

    [policy] = sorted((ROOT / "bench" / "results").glob("*-policy.json"))[-1:]
    ours = [row for row in result(policy.name) if row["kind"] == "policy" and row["policy"] == "laps-sd"]
    simulated = {row["regime"]: row for row in ours}
    silent, hinted = (simulated[name]["ratio_fcfs"] for name in ("no-predictor", "chat"))
    assert f"has {silent:.2f} of the mean latency" in text and f"with hints {hinted:.2f}." in text
    p99 = sorted(row["p99_ratio_fcfs"] for row in ours)
    assert f"is {p99[0]:.2f} to {p99[-1]:.1f} times" in text


ON_A_GPU = (
    "LAPS-SD, no hint",
    "LAPS-SD, class and guess",
    "vLLM, priority by guess",
)


@pytest.mark.parametrize("mode", ON_A_GPU)
@pytest.mark.parametrize("page", ["README.md", "docs/overview.md", "docs/vllm.md"])
def test_the_figures_of_bursts_on_a_gpu_are_those_of_the_results(page: str, mode: str) -> None:
    [measured] = sorted((ROOT / "bench" / "results").glob("*-vllm-on-gpu.json"))[-1:]
    bursts = [
        row
        for row in result(measured.name)
        if row.get("measured") == "shape" and row["setting"] == "burst of 400"
    ]
    fcfs = {row["seed"]: row["mean"] for row in bursts if row["mode"] == "vLLM, fcfs"}
    ratios = [row["mean"] / fcfs[row["seed"]] for row in bursts if row["mode"] == mode]

    assert len(ratios) == 2
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" in (ROOT / page).read_text()


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
