"""The gateway as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helpers import free_port, wait_until

ROOT = Path(__file__).parents[3]


def test_it_answers_health_without_a_scheduler_and_ends_on_the_first_signal(model_dir: Path) -> None:
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LAPS_SD_")} | {
        "LAPS_SD_GRPC_PORT": str(port),
        "LAPS_SD_METRICS_PORT": "0",
        "LAPS_SD_HTTP_PORT": "0",
        "LAPS_SD_TOKENIZER_DIR": str(model_dir),
        "LAPS_SD_SCHEDULER_SEEDS": f"127.0.0.1:{free_port()}",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway"], env=environment, cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def status(name: str) -> int | None:
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=1)
                except grpc.RpcError:
                    return None
                return int(answer.status)

            wait_until(
                lambda: status("liveness") == health_pb2.HealthCheckResponse.SERVING,
                description="a live gateway",
            )
            assert status("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
        process.send_signal(signal.SIGTERM)

        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()


def test_it_says_in_one_sentence_why_it_cannot_start(tmp_path: Path) -> None:
    environment = {**os.environ, "LAPS_SD_TOKENIZER_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "gateway"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1
    assert "tokenizer.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, gateway.app; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"
