"""The one-machine stack: it starts, survives faults, and leaves nothing running."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import grpc
import pytest

from laps_sd.errors import StartupError
from laps_sd.stack.children import Child, ChildDied
from laps_sd.stack.local import LocalStack, delete_killed_stacks
from laps_sd.stack.ports import Ports
from laps_sd.stack.readiness import is_serving
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from scheduler_svc.store.embedded import EmbeddedServer
from tests.helpers import free_port, wait_until

ROOT = Path(__file__).parents[2]


def lives(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def workers_of(stack: LocalStack) -> dict[str, bool]:
    with grpc.insecure_channel(stack.scheduler_address) as channel:
        reply = admin_pb2_grpc.AdminStub(channel).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)
    return {worker.worker_name: worker.connected for worker in reply.workers}


def test_a_request_goes_through_every_process(fake_stack):
    with grpc.insecure_channel(fake_stack.gateway_address) as channel:
        reply = inference_pb2_grpc.InferenceStub(channel).Generate(
            inference_pb2.GenerateRequest(
                text="Once", sampling=inference_pb2.SamplingParams(max_tokens=8, seed=1)
            ),
            timeout=30,
        )

    assert len(reply.token_ids) == 8


def test_a_cleaner_of_temporary_files_skips_the_folder(fake_stack):
    """systemd-tmpfiles skips a folder, and all that is in it, on which it cannot have a lock."""
    folder = os.open(fake_stack.dir, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(folder)


def test_what_the_gateway_admits_a_worker_can_hold(fake_stack):
    with grpc.insecure_channel(fake_stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        context = stub.ListModels(inference_pb2.ListModelsRequest()).models[0].context_tokens
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6]))
        request.sampling.max_tokens = context - 2

        reply = stub.Generate(request, timeout=60)

    assert reply.end.usage.completion_tokens > 0


def test_every_component_is_a_process_with_a_log_and_metrics(fake_stack):
    assert list(fake_stack.children) == ["valkey", "worker-0", "worker-1", "gateway-0", "scheduler-0"]
    assert len({child.pid for child in fake_stack.children.values()}) == 5
    assert "listening" in fake_stack.log("scheduler")
    with socket.create_connection(
        ("127.0.0.1", int(fake_stack.metrics_url("gateway").split(":")[2].split("/")[0]))
    ):
        pass


def test_every_setting_that_a_stack_gives_its_components_is_known(fake_stack):
    warned = {name for name in fake_stack.children if "unknown LAPS_SD variables" in fake_stack.log(name)}

    assert warned == set()


@pytest.fixture(scope="module")
def stack():
    """Start a stack of one worker; every process lives after a test."""
    with LocalStack(engine="fake") as running:
        yield running


def test_a_killed_component_comes_back_under_its_name(stack):
    before = stack.children["worker-0"].pid

    stack.kill("worker")
    assert not lives(before)
    stack.restart("worker")

    assert stack.children["worker-0"].pid != before
    wait_until(lambda: workers_of(stack).get("worker-0"), description="the worker is connected again")


def test_workers_can_be_added_and_asked_to_leave(stack):
    assert stack.add_worker() == "worker-1"
    wait_until(lambda: workers_of(stack).get("worker-1"), description="the second worker is connected")
    stack.terminate("worker-1")

    assert stack.children["worker-1"].returncode == 0
    stack.check()  # a worker that left in order is not missed


def test_a_component_that_dies_is_noticed(stack):
    stack.kill("worker-0")

    with pytest.raises(ChildDied, match="worker-0 was killed by SIGKILL while it was serving"):
        stack.check()
    stack.restart("worker-0")


def test_a_stop_is_quick_and_leaves_nothing(make_stack):
    stack = make_stack(workers=1)
    folder, pids = stack.dir, [child.pid for child in stack.children.values()]
    stack.pause("worker-0")  # cannot answer SIGTERM by itself

    began = time.monotonic()
    stack.stop()

    assert (
        time.monotonic() - began < 5 + 1
    )  # the promise, and slack for a machine that is busy with other tests
    assert not folder.exists()
    assert not any(lives(pid) for pid in pids)


def test_a_stop_lets_every_component_end_by_itself(make_stack):
    stack = make_stack(workers=1)
    children = dict(stack.children)

    stack.stop()

    assert {name: child.returncode for name, child in children.items()} == dict.fromkeys(children, 0)


def test_a_component_that_cannot_start_is_named_with_its_last_words(make_stack, tmp_path):
    with pytest.raises(ChildDied) as caught:
        make_stack(workers=0, environment={"LAPS_SD_API_KEYS_FILE": str(tmp_path / "keys")})

    message = str(caught.value)
    assert message.startswith("gateway-0 ended with exit code 1 before it was ready. Its log ends:")
    assert str(tmp_path) in message


def test_a_log_that_is_empty_because_the_disk_is_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child("valkey-0", "this", environment=os.environ, log=tmp_path / "log", python=Path("/bin/false"))
    child.start()
    child.wait(30.0)

    assert str(ChildDied(child, while_what="early")).endswith("exit code 1 early. Its log is empty.")
    monkeypatch.setattr("shutil.disk_usage", lambda _: mock.Mock(free=4096))
    assert str(ChildDied(child, while_what="early")).endswith(
        f"Its log is empty: no space is left on the disk of {tmp_path}."
    )


def test_a_port_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        stack = LocalStack(ports=Ports(gateway=port, http=0, scheduler=0, metrics=None))

        with pytest.raises(
            StartupError, match=f"port {port} is in use: .*choose another with --gateway-port"
        ):
            stack.start()

    assert not stack.children


def test_a_model_directory_that_does_not_exist_is_said_before_anything_starts(tmp_path):
    with pytest.raises(StartupError, match=r"--target .* does not exist"):
        LocalStack(target=tmp_path / "nothing").start()


PROGRAM = """
import sys, time
from laps_sd.stack.local import LocalStack
stack = LocalStack(workers=1, engine="fake", keep_logs=%s).start()
print(stack.dir, *(child.pid for child in stack.children.values()), flush=True)
time.sleep(600)
"""


@contextmanager
def killed_stack(*, keep_logs: bool = False) -> Iterator[Path]:
    """Yield the folder of a stack whose process was killed, once its children are gone too."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM % keep_logs],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as parent:
        folder, *pids = parent.stdout.readline().split()
        assert len(pids) == 4
        parent.kill()
    try:
        wait_until(lambda: not any(lives(int(pid)) for pid in pids), description="every child is gone")
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_children_and_at_the_next_start_the_files_die_with_a_parent_that_was_killed(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # read by the process that is killed
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with killed_stack() as folder, killed_stack(keep_logs=True) as logs, LocalStack(engine="fake") as alive:
        assert not folder.exists()
        assert {path.suffix for path in logs.iterdir()} == {".log"}
        files = set(alive.dir.iterdir())
        with LocalStack(engine="fake"):
            assert set(alive.dir.iterdir()) == files
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_no_killed_stacks_are_left_alone(tmp_path, monkeypatch):
    """Those of a stack that is about to start, of another user, behind a symbolic link, and of other programs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("laps-sd-stack-killed", "elsewhere", "laps-sd-vllm-1000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shards").touch()
    (tmp_path / "laps-sd-stack-starting").mkdir()
    (tmp_path / "laps-sd-stack-link").symlink_to(tmp_path / "elsewhere")
    ours = os.geteuid()
    before = set(tmp_path.rglob("*"))

    with mock.patch.object(os, "geteuid", return_value=ours + 1):
        delete_killed_stacks()
    assert set(tmp_path.rglob("*")) == before

    delete_killed_stacks()
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"elsewhere", "laps-sd-vllm-1000", "laps-sd-stack-starting", "laps-sd-stack-link"}
    assert (tmp_path / "elsewhere" / "shards").exists()


def test_up_shows_the_demo_prompt_and_stops_on_ctrl_c():
    root = str(ROOT)
    gateway = free_port()
    command = [sys.executable, "-m", "laps_sd", "up", "--engine", "fake", "--gateway-port", str(gateway)]
    with subprocess.Popen(
        [*command, "--http-port", "0", "--scheduler-port", "0", "--metrics-port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Ctrl-C stops everything" in line:
                break
        assert is_serving(f"127.0.0.1:{gateway}")
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(10) == 0, said
        assert process.stdout.read().strip()
    shown = "".join(lines)
    assert "-- length: " in shown
    assert f"gRPC 127.0.0.1:{gateway}" in shown
    assert not is_serving(f"127.0.0.1:{gateway}")


def test_modules_of_the_user_in_the_current_directory_are_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gateway", "scheduler_svc", "worker_svc", "redis", "aiohttp"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a program of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with LocalStack(engine="fake") as stack:
        assert all(child.alive for child in stack.children.values())


def test_the_workers_run_with_the_interpreter_that_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh\necho "of another environment"\nexec {sys.executable} "$@"\n""")
    python.chmod(0o755)
    with LocalStack(engine="fake", worker_python=python) as stack:
        assert "of another environment" in stack.log("worker-0")
        assert not any("another environment" in stack.log(name) for name in ("gateway-0", "scheduler-0"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"worker_python": Path("/no/such/python")}, "--worker-python /no/such/python is not a program"),
        ({"worker_python": Path(__file__)}, f"--worker-python {__file__} is not a program that can be run"),
        ({"worker_python": Path("/")}, "--worker-python / is not a program that can be run"),
        (
            {"environment": {"LAPS_SD_TLS_CERT": "x.pem"}},
            "LAPS_SD_TLS_CERT is set, and `laps-sd up` uses no TLS",
        ),
        (
            {"environment": {"LAPS_SD_LINK_TLS": "true"}},
            "LAPS_SD_LINK_TLS is set, and `laps-sd up` uses no TLS",
        ),
        (
            {"engine": "vllm", "environment": {"LAPS_SD_VLLM_ARGS": '{"model": "x"}'}},
            "name it as `laps-sd up MODEL`, so that the gateway has its tokenizer",
        ),
        ({"engine": "fake", "target": Path("x")}, "--engine fake brings its own model"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(StartupError, match=words):
        LocalStack(**options).start()


def test_a_foreign_record_that_answers_on_the_port_is_not_taken_for_the_own_one(tmp_path: Path) -> None:
    """Another program took the free port before the record's process, which ends."""
    foreign = EmbeddedServer(tmp_path / "foreign").start()
    try:
        ports = Ports(gateway=0, http=0, scheduler=0, valkey=foreign.port, metrics=None)
        with pytest.raises(ChildDied, match="valkey ended with exit code 1"):
            LocalStack(engine="fake", ports=ports).start()
    finally:
        foreign.stop()
