"""The guarantee of `laps-sd up`: any child may be killed; it comes back, and running streams end as without a
fault.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
from rich.console import Console

from laps_sd.cli.up import _serve
from laps_sd.client import Client, Delta, Ended
from laps_sd.stack.local import LocalStack
from laps_sd.stack.log_watch import LogWatch
from laps_sd.stack.options import StackOptions
from laps_sd.stack.ports import FREE_PORTS as FREE
from laps_sd.stack.ports import free_port
from laps_sd.stack.supervisor import Pauses, Supervisor
from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from tests.helpers import wait_until
from tests.system.up import FREE_PORTS, Up


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with Up("--engine", "fake", environment={"LAPS_SD_FAKE_TIME_SCALE": "0.3"}) as running:
        yield running


PROMPT = "A story about a process:"
WANTED: dict[str, Any] = {"seed": 3, "max_tokens": 600, "ignore_eos": True}


@pytest.fixture(scope="module")
def undisturbed(up: Up) -> str:
    with Client(up.grpc("gateway-0")) as client:
        return client.generate(PROMPT, **WANTED).text


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0", "gateway-0", "valkey"])
def test_a_child_that_is_killed_comes_back_and_a_running_stream_ends_with_the_right_text(
    up: Up, undisturbed: str, victim: str
) -> None:
    before, ports = up.pid(victim), re.findall(r"127\.0\.0\.1:(\d+)", up.where(victim))
    with Client(up.grpc("gateway-0")) as client:
        text, end, tokens_at_the_kill = "", None, 0
        for event in client.stream(PROMPT, **WANTED):
            if isinstance(event, Delta):
                text += event.text
                if not tokens_at_the_kill:
                    tokens_at_the_kill = event.first_token + len(event.token_ids)
                    up.kill(victim)
            elif isinstance(event, Ended):
                end = event
        assert text == undisturbed
        assert end is not None
        assert end.usage.completion_tokens == 600
        assert tokens_at_the_kill < 300, "the kill came too late to show anything"

        [ready] = wait_until(lambda: up.said(rf"{victim} is ready again"), description="it is back")
        [died] = up.said(rf"{victim} \(process {before}\) was killed by SIGKILL: starting it again in 0.2 s")
        assert up.lines.index(died) < up.lines.index(ready)
        assert up.pid(victim) != before
        assert client.generate(PROMPT, **WANTED).text == undisturbed
    for port in ports:
        socket.create_connection(("127.0.0.1", int(port)), 5).close()  # where it was before


OF_600_TOKENS = ("--max-tokens", "600", "--seed", "7")


def generate(up: Up) -> subprocess.Popen[str]:
    """Start `laps-sd generate` with an answer that takes some seconds."""
    return subprocess.Popen(
        [sys.executable, "-m", "laps_sd", "generate", "Once", "--url", up.grpc("gateway-0"), *OF_600_TOKENS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_text_of_the_command_goes_on_when_its_gateway_is_killed(up: Up) -> None:
    with generate(up) as command:
        undisturbed, _ = command.communicate()
    with generate(up) as command:
        assert command.stdout is not None and command.stderr is not None
        text = command.stdout.read(1)
        deaths = len(up.said("gateway-0 .* was killed"))
        up.kill("gateway-0")
        text += command.stdout.read()
        summary = command.stderr.read()

    assert text == undisturbed
    assert summary.startswith("-- length: 600 tokens")
    assert command.returncode == 0
    wait_until(lambda: len(up.said("gateway-0 .* was killed")) > deaths, description="its death is shown")
    wait_until(lambda: len(up.said("gateway-0 is ready again")) > deaths, description="it is back")


def test_ctrl_c_ends_the_request_of_the_command(up: Up) -> None:
    with generate(up) as command:
        assert command.stdout is not None
        command.stdout.read(1)
        command.send_signal(signal.SIGINT)
        command.communicate()

    assert command.returncode == 130
    with grpc.insecure_channel(up.grpc("scheduler-0")) as channel:
        queue = admin_pb2_grpc.AdminStub(channel)
        wait_until(
            lambda: not queue.ListQueue(admin_pb2.ListQueueRequest()).entries,
            description="the request has ended",
            timeout_s=10,  # less than a stream without a client continues
        )


def test_ctrl_c_again_and_again_does_not_interrupt_the_stop() -> None:
    with Up("--engine", "fake", "--workers", "1") as up:

        def ended() -> bool:
            up.process.send_signal(signal.SIGINT)
            return up.process.poll() is not None

        wait_until(ended, description="it has ended", every_s=0.0)
    assert up.lines.count("stopping") == 1


def begun(at_hangup: signal.Handlers, **given: Any) -> Up:
    """Start a system that inherits what this process does at the end of its terminal."""
    before = signal.signal(signal.SIGHUP, at_hangup)
    try:
        return Up("--engine", "fake", **given)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_end_of_the_terminal_stops_everything_and_leaves_no_record(tmp_path: Path) -> None:
    with begun(signal.SIG_DFL, environment={"TMPDIR": str(tmp_path)}) as up:
        assert list(tmp_path.iterdir())
        up.process.send_signal(signal.SIGHUP)
        up.process.wait()
    assert up.lines[-1] == "stopping"
    assert not list(tmp_path.iterdir())


def test_a_system_that_nohup_started_outlives_its_terminal() -> None:
    with begun(signal.SIG_IGN) as up, Client(up.grpc("gateway-0")) as client:
        up.process.send_signal(signal.SIGHUP)
        up.kill("worker-0")
        wait_until(lambda: up.said("worker-0 is ready again"), description="it is back")
        assert client.generate("Once", seed=1, max_tokens=2).token_ids
        assert "stopping" not in up.lines


def test_a_child_comes_back_though_nobody_reads_the_terminal() -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "laps_sd", "up", "--no-demo", "--engine", "fake", *FREE_PORTS],
        stderr=writer,
        env=os.environ | {"COLUMNS": "80"},
    ) as process:
        os.close(writer)
        with os.fdopen(reader) as terminal:
            shown = "".join(iter(terminal.readline, "Ctrl-C stops everything.\n"))
        [worker] = re.findall(r"worker-0 +process (\d+)", shown)
        [gateway] = re.findall(r"gRPC ([\d.:]+), HTTP", shown)

        os.kill(int(worker), signal.SIGKILL)
        with Client(gateway, retry_s=20) as client:
            assert client.generate("Once", seed=1, max_tokens=2).token_ids
        assert process.poll() is None
        process.send_signal(signal.SIGINT)


def test_it_serves_where_its_directory_was_deleted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with contextlib.chdir(gone):
        gone.rmdir()
        starting = Up("--engine", "fake", "--workers", "0")
    with starting as up:
        assert any("other commands need the addresses below" in line for line in up.lines)
        assert f"workers --scheduler {up.grpc('scheduler-0')}" in up.terminal


def test_an_interrupt_at_the_end_of_the_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = list[LocalStack]()

    def interrupted(watch: LogWatch) -> None:
        if threading.current_thread() is threading.main_thread():
            started.append(watch._stack)
            assert [child.alive for child in started[0].children.values()] == [True] * 3
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LogWatch, "look", interrupted)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(KeyboardInterrupt):
            _serve(Console(), StackOptions(engine="fake", workers=0), FREE, demo=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert started
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    """Start a stack for supervisors that watch it in turn; every process lives after a test."""
    with LocalStack(engine="fake", workers=2) as running:
        yield running


def test_a_child_that_dies_at_once_again_and_again_is_started_after_pauses_that_grow_up_to_a_bound(
    stack: LocalStack,
) -> None:
    worker, lines = stack.children["worker-0"], list[str]()
    right = worker.environment["LAPS_SD_THREADS"]
    with Supervisor(
        stack, report=lines.append, pauses=lambda: Pauses(first_s=0.1, longest_s=0.4)
    ) as supervisor:
        worker.environment["LAPS_SD_THREADS"] = "many"
        stack.kill("worker-0")
        wait_until(lambda: len(lines) >= 5, description="it was started four times in vain")

        worker.environment["LAPS_SD_THREADS"] = right
        wait_until(lambda: "is ready again" in lines[-1], description="it is back")
        assert supervisor.failure is None

    assert [line.rpartition(" starting it again in ")[2] for line in lines[:5]] == [
        "0.1 s", "0.2 s", "0.4 s", "0.4 s", "0.4 s",
    ]  # fmt: skip
    assert "was killed by SIGKILL" in lines[0]
    assert "ended with exit code 2 (laps-sd worker: LAPS_SD_THREADS must" in lines[1]
    assert len([line for line in lines if not line.startswith("worker-0 ")]) == 0


def test_the_first_pause_comes_again_after_a_run_that_was_long_enough() -> None:
    pauses = Pauses(first_s=0.2, longest_s=30.0, steady_s=60.0)

    assert [pauses.after(0.0) for _ in range(10)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]
    assert pauses.after(59.9) == 30.0
    assert pauses.after(60.0) == 0.2
    assert pauses.after(1.0) == 0.4


def test_a_worker_that_was_drained_is_not_started_again(stack: LocalStack) -> None:
    lines: list[str] = []
    with Supervisor(stack, report=lines.append):
        stack.terminate("worker-0")
        wait_until(lambda: lines, description="it is said")
        stack.kill("worker-1")
        wait_until(lambda: "worker-1 is ready again" in lines[-1], description="the other one is back")

    assert "worker-0" in lines[0]
    assert lines[0].endswith(
        "ended with exit code 0: it was drained or asked to stop, and is not started again"
    )
    assert not stack.children["worker-0"].alive
    stack.restart("worker-0")


def test_it_starts_several_and_says_which_listens_where_and_keeps_the_record_to_its_owner(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    with Up("--engine", "fake", "--schedulers", "2", "--gateways", "2", "--data-dir", str(data)) as up:
        schedulers = [up.where(f"scheduler-{number}") for number in range(2)]
        assert sorted(line.rpartition(", ")[2] for line in schedulers) == ["leads", "stands by"]
        [leader] = [number for number in range(2) if schedulers[number].endswith("leads")]
        texts = set[str]()
        for number in range(2):
            name = f"gateway-{number}"
            with Client(up.grpc(name)) as client:
                texts.add(client.generate("Once", seed=1, max_tokens=8).text)
            [openai_url] = re.findall(r"HTTP \(OpenAI\) (http://\S+)/v1", up.where(name))
            with urllib.request.urlopen(f"{openai_url}/v1/models") as answer:
                assert answer.status == 200
            for line in (up.where(name), schedulers[number]):
                [metrics] = re.findall(r"metrics (http://\S+/metrics)", line)
                with urllib.request.urlopen(metrics) as answer:
                    assert b"laps_sd_" in answer.read()
        assert len(texts) == 1

        up.kill(f"scheduler-{leader}")
        with Client(up.grpc("gateway-0"), retry_s=20) as client:
            assert client.generate("Once", seed=1, max_tokens=8).text in texts
        [command] = re.findall(r"^  (\S*laps-sd workers.*)$", up.terminal, re.MULTILINE)
        shown = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert "worker-0" in shown.stdout, shown.stderr

        assert any(path.suffix == ".aof" for path in (data / "appendonlydir").iterdir())
        modes = {path: path.stat().st_mode & 0o777 for path in (data, *data.rglob("*"))}
    assert set(modes.values()) == {0o700, 0o600}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "laps_sd", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )


def test_no_command_needs_an_address_on_the_machine_of_one_system(tmp_path: Path) -> None:
    """The model is one of the hub that was downloaded; the tokens come from the fake engine."""
    target = Path(__file__).parents[2] / "worker_svc" / "demo" / "target"
    snapshot = tmp_path / "hub" / "models--acme--small" / "snapshots" / "abc123"
    shutil.copytree(target, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (snapshot / "model.safetensors").symlink_to(target / "model.safetensors")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc123")
    here = {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    with Up("acme/small", environment=here | hub) as up:
        assert up.said(r"worker-0  model: target acme/small \(LlamaForCausalLM, 4.7 M parameters\), float32")
        assert up.said(r"worker-0  engine: cpu, \d+ threads?, float32; .*; draft tokens: prompt lookup")
        assert up.said(r"worker-0  room: 2048 tokens of context, 8 slots")
        assert '"model": "acme/small"' in up.terminal

        generated = command("generate", "Once", "--max-tokens", "8", **here)
        assert generated.returncode == 0, generated.stderr
        [request_id] = re.findall(r"\[(s0\.\w+)\]", generated.stderr)
        assert request_id in command("explain", request_id, **here).stdout
        assert "0 requests" in command("queue", **here).stdout
        assert "worker-0" in command("workers", **here).stdout
        wait_until(
            lambda: up.said(rf"gateway-0  request ended  request_id={request_id} tenant=anonymous end="),
            description="the line of the request is on the terminal",
        )
        elsewhere = command("generate", "Once", "--url", "127.0.0.1:1", **here)
        assert "no server answers at the address" in elsewhere.stderr

        with Up("--engine", "fake", environment=here) as other:
            several = command("workers", **here)
            assert several.returncode == 1
            for each in (up, other):
                assert f"--scheduler {each.grpc('scheduler-0')}" in several.stderr
            assert f"workers --scheduler {other.grpc('scheduler-0')}" in other.terminal
        assert "drains" in command("drain", "worker-0", **here).stdout
        wait_until(lambda: up.said("worker-0 .*: it was drained"), description="the worker has left")
    assert not list((tmp_path / "runtime" / "laps-sd").iterdir())


def test_logs_that_are_wanted_are_kept_after_the_end_without_the_record(tmp_path: Path) -> None:
    with Up(
        "--engine", "fake", "--workers", "0", "--verbose", environment={"TMPDIR": str(tmp_path)}
    ) as running:
        pass

    shown = [line.removeprefix("Logs: ") for line in running.lines if line.startswith("Logs: ")]
    folder = Path(shown[0])
    assert shown == [str(folder)] * 2, "once while it runs and once at the end"
    assert folder.parent == tmp_path
    assert sorted(path.name for path in folder.iterdir()) == [
        "gateway-0.log",
        "scheduler-0.log",
        "valkey.log",
    ]
    assert "stopped" in (folder / "gateway-0.log").read_text()


def test_warnings_of_the_children_are_on_the_terminal(up: Up) -> None:
    before, ready = len(up.said("worker-0  warning:")), len(up.said("scheduler-0 is ready again"))
    up.kill("scheduler-0")

    wait_until(
        lambda: len(up.said("worker-0  warning:")) > before, description="the worker's warning is shown"
    )
    wait_until(lambda: len(up.said("scheduler-0 is ready again")) > ready, description="it is back")
    with Client(up.grpc("gateway-0"), retry_s=20) as client:
        client.generate("Once", seed=1, max_tokens=2)  # it leads


@contextlib.contextmanager
def frozen(valkey_pid: int, url: str) -> Iterator[str]:
    os.kill(valkey_pid, signal.SIGSTOP)
    try:
        yield "slow: the record did not answer"
    finally:
        os.kill(valkey_pid, signal.SIGCONT)


@contextlib.contextmanager
def out_of_memory(valkey_pid: int, url: str) -> Iterator[str]:
    with redis.Redis.from_url(url) as server:
        server.config_set("maxmemory", "1")
        try:
            yield "full: .*used memory > .maxmemory"
        finally:
            server.config_set("maxmemory", "0")


@contextlib.contextmanager
def out_of_disk(valkey_pid: int, url: str) -> Iterator[str]:
    """Limit the server's files so that none may grow: each write to its append-only file fails."""
    before = resource.prlimit(valkey_pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    try:
        yield "other: .*MISCONF Errors writing to the AOF file"
    finally:
        resource.prlimit(valkey_pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("fault", [frozen, out_of_memory, out_of_disk])
def test_a_record_that_cannot_be_written_is_on_the_terminal_and_in_queue_and_workers(
    up: Up, fault: Callable[[int, str], contextlib.AbstractContextManager[str]]
) -> None:
    """Nothing runs and no request comes: the fault must be noticed all the same."""
    shown_before = len(up.lines)

    def new(pattern: str) -> list[str]:
        return [line for line in up.said(pattern) if line in up.lines[shown_before:]]

    [url] = re.findall(r"redis://\S+", up.where("valkey"))
    with fault(up.pid("valkey"), url) as reason:
        begin = rf"the record cannot be written since \d\d:\d\d:\d\d \(\d+ s\), {reason}"
        wait_until(lambda: new(begin), description="the terminal shows the outage")
        for command in ("queue", "workers"):
            shown = subprocess.run(
                [sys.executable, "-m", "laps_sd", command, "--scheduler", up.grpc("scheduler-0")],
                capture_output=True,
                text=True,
            )
            assert shown.returncode == 0, shown.stderr
            assert re.match(begin, shown.stdout), shown.stdout
    wait_until(
        lambda: new("the record can be written again, after"), description="the terminal shows the end"
    )
    assert len(new("the record cannot be written")) == 1
    assert len(new("the record can be written again")) == 1
    with Client(up.grpc("gateway-0"), retry_s=20) as client:
        assert len(client.generate("Once", seed=1, max_tokens=8).token_ids) == 8


def test_a_directory_that_is_used_for_something_else_too_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").write_text("years of work")
    done = subprocess.run(
        [sys.executable, "-m", "laps_sd", "up", "--engine", "fake", *FREE_PORTS, "--data-dir", str(tmp_path)],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert f"other users can read the data directory {tmp_path}, and it holds more than" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_model_over_the_same_data_waits_for_the_requests_that_were_begun_and_says_so(
    tmp_path: Path,
) -> None:
    data = ("--data-dir", str(tmp_path / "record"))
    with (
        Up("--engine", "fake", *data, environment={"LAPS_SD_FAKE_TIME_SCALE": "3"}) as before,
        Client(before.grpc("gateway-0")) as client,
    ):
        assert any(isinstance(event, Delta) for event in client.stream(PROMPT, keep=True, **WANTED))
        before.kill("gateway-0")  # with everything else, before the request ends
        before.process.send_signal(signal.SIGINT)

    port = free_port()
    after = Up("--engine", "demo", *data, "--scheduler-port", str(port))
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(after.process.kill)
        [reason] = wait_until(
            lambda: after.said("worker-0 .* the scheduler refuses this worker for now"),
            description="the worker was refused",
        )
        assert "have begun unfinished requests (1), which no other pair may continue" in reason
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            [entry] = admin.ListQueue(admin_pb2.ListQueueRequest()).entries
            admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id=entry.request_id))
        with after, Client(after.grpc("gateway-0")) as client:
            assert client.generate(PROMPT, max_tokens=3, ignore_eos=True).end.usage.completion_tokens == 3
