"""The command line against a running stack, as a person types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import free_port

ROOT = Path(__file__).parents[2]


def laps_sd(*arguments: str, cwd: Path = ROOT, text: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LAPS_SD_")}
    return subprocess.run(
        [sys.executable, "-m", "laps_sd", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        timeout=60,
        input=text,
    )


def test_generate_streams_text_and_says_what_speculation_did(fake_stack):
    done = laps_sd(
        "generate", "Once", "--url", fake_stack.gateway_address, "--max-tokens", "12", "--seed", "1"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert re.search(r"^-- length: 12 tokens in \d+ rounds, drafted \d+, accepted \d+", done.stderr)


def test_generate_reads_standard_input_and_repeats_itself_with_a_seed(fake_stack):
    arguments = ("--url", fake_stack.gateway_address, "--max-tokens", "12", "--seed", "7")

    first = laps_sd("generate", "-", *arguments, text="Once upon")
    second = laps_sd("generate", "Once upon", *arguments)

    assert first.stdout == second.stdout != ""


def test_generate_json_is_one_message_a_line(fake_stack):
    done = laps_sd("generate", "Once", "--json", "--url", fake_stack.gateway_address, "--max-tokens", "4")

    messages = [json.loads(line) for line in done.stdout.splitlines()]
    assert next(iter(messages[0])) == "accepted"
    assert messages[-1]["end"]["usage"]["completion_tokens"] == 4


def test_explain_tells_the_story_of_a_request(fake_stack):
    done = laps_sd("generate", "Once", "--url", fake_stack.gateway_address, "--max-tokens", "4")
    request_id = re.search(r"\[(\S+)\]", done.stderr).group(1)

    told = laps_sd("explain", request_id, "--url", fake_stack.gateway_address)

    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"{request_id}  ended, length")


def test_queue_and_workers_show_the_shard(fake_stack):
    queue = laps_sd("queue", "--scheduler", fake_stack.scheduler_address)
    workers = laps_sd("workers", "--scheduler", fake_stack.scheduler_address)

    assert "0 requests" in queue.stdout, queue.stderr
    assert "worker-0" in workers.stdout, workers.stderr
    assert "worker-1" in workers.stdout
    as_json = laps_sd("workers", "--json", "--scheduler", fake_stack.scheduler_address)
    assert len(json.loads(as_json.stdout)["workers"]) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "Once", "--max-tokens", "-3"), "max-tokens"),
        (("bench", "nonsense"), "There is no benchmark 'nonsense'"),
        (("up", "--target", "/nowhere"), "--target /nowhere does not exist"),
    ],
)
def test_a_mistake_is_a_sentence_and_a_non_zero_exit(arguments, sentence):
    done = laps_sd(*arguments)

    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_at_the_address_says_how_to_start_the_system():
    done = laps_sd("generate", "Once", "--url", f"127.0.0.1:{free_port()}")

    assert done.returncode == 1
    assert "`laps-sd up` starts it" in done.stderr


def test_an_unknown_request_is_not_found(fake_stack):
    done = laps_sd("explain", "s0.nothing", "--url", fake_stack.gateway_address)

    assert done.returncode == 1
    assert done.stderr.startswith("laps-sd: NOT_FOUND: ")


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_a_service_lists_its_settings(service):
    done = laps_sd(service, "--help")

    assert done.returncode == 0, done.stderr
    assert "LAPS_SD_GRPC_PORT" in done.stdout
    assert "--drain-s" in done.stdout


def test_a_service_shows_where_its_settings_come_from():
    done = laps_sd("scheduler", "--lease-s", "5", "--show-settings")

    assert re.search(r"^LAPS_SD_LEASE_S +5.0 s +override$", done.stdout, re.MULTILINE), done.stderr


def test_version_names_the_release():
    from laps_sd import __version__

    assert laps_sd("version").stdout.splitlines()[0] == f"laps-sd {__version__}"


def test_bench_runs_a_file_of_the_checkout_with_the_remaining_arguments(tmp_path):
    (tmp_path / "laps_sd" / "cli").mkdir(parents=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "hello_world.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")

    done = laps_sd("bench", "hello-world", "--json", "x", cwd=tmp_path)

    assert (done.stdout, done.returncode) == ("['--json', 'x']\n", 3), done.stderr
