"""A real `vllm serve` of the demo pair with LAPS-SD as its scheduler: the processes and pages that users have. Once with
the draft model, and once with an EAGLE-3 head.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from tests.helpers import free_port, wait_until
from tests.vllm.one_core import EQUAL_ARITHMETIC, KV_BYTES, MEMORY_SHARE, ON_CPU

DEMO = Path(__file__).parents[2] / "worker_svc" / "demo"
START_S = 600.0
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Server:
    method: str
    url: str
    log: Path
    learnt: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 60} | fields
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return dict(json.load(answer))


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, head_of: Callable[[str], Path]
) -> Iterator[Server]:
    method = request.param
    draft = DEMO / "draft" if method == "draft_model" else head_of(method)
    folder = tmp_path_factory.mktemp("vllm")
    port = free_port()
    server = Server(method, f"http://127.0.0.1:{port}", folder / "log", folder / "learnt.json")
    speculative = {"method": method, "model": str(draft), "num_speculative_tokens": 4}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(DEMO / "target")),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", "--dtype", "float32"),
        *("--max-model-len", "512", "--max-num-seqs", "16", "--max-num-active-seqs", "2", "--enforce-eager"),
        *("--scheduler-cls", "laps_vllm.scheduler.LapsScheduler"),
        *("--speculative-config", json.dumps(speculative)),
        *("--gpu-memory-utilization", str(MEMORY_SHARE), "--kv-cache-memory-bytes", str(KV_BYTES)),
    ]
    environ = {
        "LAPS_SD_LEARNT_FILE": str(server.learnt),
        "OMP_NUM_THREADS": "1",
    }
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environ, start_new_session=True
        )
    try:
        wait_until(lambda: is_up(server, process), timeout_s=START_S, description="vLLM is up")
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_up(server: Server, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, server.log.read_text()[-4000:]
    try:
        server.get("/health")
    except OSError:
        return False
    return True


def value(page: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_it_says_at_start_what_is_on(server: Server) -> None:
    log = server.log.read_text()

    assert re.search(r"LAPS-SD \S+: policy laps-sd, steps of 2 requests, 16 resident, \w+ core", log)
    faulty = "a known fault of this version with a draft model on a CPU"
    assert ("samples wrong tokens" in log) == ON_CPU, faulty
    assert f"{'synchronous' if ON_CPU else 'async'} scheduling, up to 4 draft tokens" in log


def test_requests_with_and_without_hints_get_the_same_texts_and_metrics_show_it(server: Server) -> None:
    prompts = [f"Count from {at} to {at + 6}:" for at in range(8)]
    hints = {"workload_class": "count", "expected_output_tokens": 20}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(server.complete, prompt) for prompt in prompts]
        hinted = [pool.submit(server.complete, prompt, vllm_xargs=hints) for prompt in prompts]
        bad = pool.submit(server.complete, prompts[0], vllm_xargs={"expected_output_tokens": -1})
        texts = [[each.result()["choices"][0]["text"] for each in group] for group in (plain, hinted)]
        found = bad.result()["choices"][0]["text"]

    if EQUAL_ARITHMETIC:
        assert texts[0] == texts[1]
        assert found == texts[0][0]
    else:
        assert sum(plain == hinted for plain, hinted in zip(*texts, strict=True)) >= 6
    assert texts[0][3].split(",")[0].strip() == "3"
    ended = 'laps_sd_vllm_estimate_error_ratio_count{basis="client_prompt",engine="0",moment="arrival"}'
    wait_until(
        lambda: value(server.get("/metrics"), ended) == 8.0, description="the engine has written its metrics"
    )
    page = server.get("/metrics")
    assert value(page, 'laps_sd_vllm_ignored_hints_total{engine="0",hint="expected_output_tokens"}') == 1.0
    assert value(page, 'laps_sd_vllm_decision_seconds_count{engine="0"}') > 0
    assert 'laps_sd_vllm_queue_depth{engine="0",level="0"} 0.0' in page
    assert "vllm:num_requests_running" in page
    assert "_created" not in "".join(line for line in page.splitlines() if line.startswith("laps_sd"))


def test_what_was_learnt_is_written_when_no_request_is_left(server: Server) -> None:
    server.complete("Count from 1 to 5:", vllm_xargs={"workload_class": "learnt"})

    def written() -> bool:
        return server.learnt.exists() and "learnt" in json.loads(server.learnt.read_text())["classes"]

    wait_until(written, description="the file has the class")


def test_draft_tokens_are_accepted(server: Server) -> None:
    """A scheduler that loses them shows no error."""
    server.complete("Count from 1 to 30:", max_tokens=100)
    page = server.get("/metrics")
    labels = '{engine="0",model_name="demo"'
    rounds = value(page, f"vllm:spec_decode_num_drafts_total{labels}}}")
    accepted = value(page, f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="0"}}')

    assert rounds > 10
    assert accepted > 0.3 * rounds
