"""The commands find the `laps-sd up` of this machine by the file that it writes."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from laps_sd.cli import dial
from laps_sd.cli.up_output import own_command
from laps_sd.errors import StartupError
from laps_sd.stack.running import Running, directory, published, running

ONE = Running(
    process=4711,
    gateway="127.0.0.1:21001",
    schedulers={"s0": ["127.0.0.1:21002", "127.0.0.1:21003"]},
    model="small",
    folder="/home/me",
)
OTHER = dataclasses.replace(ONE, process=4712, gateway="127.0.0.1:22001", model="large")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "laps-sd"


def test_addresses_are_published_for_this_user_alone_and_gone_at_the_end(runtime: Path) -> None:
    with published(ONE):
        [file] = runtime.iterdir()
        assert [oct(path.stat().st_mode & 0o777) for path in (runtime, file)] == ["0o700", "0o600"]
        assert running() == [dataclasses.replace(ONE, host=socket.gethostname())]
    assert not list(runtime.iterdir())
    assert running() == []


def test_without_a_runtime_directory_the_file_is_in_the_state_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert directory() == tmp_path / ".local" / "state" / "laps-sd"


def test_a_user_without_a_home_finds_no_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user id without an entry

    assert running() == []
    with pytest.raises(OSError, match="home"), published(ONE):
        pass


def test_the_file_of_a_process_that_was_killed_is_stale_and_removed(runtime: Path) -> None:
    program = (
        "import os, signal, sys; from laps_sd.stack.running import Running, published\n"
        "with published(Running(os.getpid(), 'here:1', {'s0': ['here:2']}, 'small', '/')):\n"
        "    print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [one.process for one in running()] == [process.pid]
        process.kill()
        process.wait()
    assert len(list(runtime.iterdir())) == 1, "it had no time to remove its file"

    assert running() == []
    assert not list(runtime.iterdir())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"process": 1}', "\x00"])
def test_a_file_that_is_none_is_not_read(runtime: Path, text: str) -> None:
    runtime.mkdir()
    (runtime / "up-1.json").write_text(text)

    assert running() == []


def test_the_file_of_another_machine_is_left_alone(runtime: Path) -> None:
    runtime.mkdir()
    there = dataclasses.asdict(ONE) | {"host": "elsewhere"}
    (runtime / "up-1.json").write_text(json.dumps(there))

    assert running() == []
    assert (runtime / "up-1.json").exists()


def test_what_the_user_names_wins_then_what_runs_then_the_default() -> None:
    assert (dial.gateway(None), dial.schedulers(None)) == (dial.GATEWAY, dial.SCHEDULER)
    with published(ONE):
        assert dial.gateway(None) == "127.0.0.1:21001"
        assert dial.schedulers(None) == "127.0.0.1:21002,127.0.0.1:21003"
        assert dial.gateway("other:1") == dial.schedulers("other:1") == "other:1"


def test_of_several_shards_the_first_is_taken_and_the_others_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with published(dataclasses.replace(ONE, schedulers={"s0": ["a:1"], "s1": ["b:1", "b:2"]})):
        assert dial.schedulers(None) == "a:1"
    assert "--scheduler names another: s0: a:1; s1: b:1,b:2" in capsys.readouterr().err


def test_of_several_systems_the_user_chooses() -> None:
    with published(ONE), published(OTHER):
        with pytest.raises(StartupError) as refused:
            dial.gateway(None)
        assert dial.gateway("127.0.0.1:22001") == "127.0.0.1:22001"

    lines = str(refused.value).splitlines()
    assert lines == [
        "2 `laps-sd up` run on this machine; --url chooses one:",
        "  --url 127.0.0.1:21001  process 4711, model small, started in /home/me",
        "  --url 127.0.0.1:22001  process 4712, model large, started in /home/me",
    ]


def test_the_record_of_the_running_system_is_found_too(runtime: Path) -> None:
    """Nothing listens at this address: the error of `laps-sd record` shows which one it dials."""
    with published(dataclasses.replace(ONE, redis="redis://127.0.0.1:1/0")):
        done = subprocess.run(
            [sys.executable, "-m", "laps_sd", "record"],
            env=dict(os.environ, XDG_RUNTIME_DIR=str(runtime.parent)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        with (
            published(OTHER),
            pytest.raises(StartupError, match=r"--redis-url redis://127\.0\.0\.1:1/0  process 4711"),
        ):
            dial.record()

    assert (done.returncode, done.stdout) == (1, "")
    assert "127.0.0.1:1." in done.stderr
    assert dial.record() is None


def test_the_commands_that_are_printed_work_where_the_user_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "my project" / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path / "my project")
    assert own_command() == ".venv/bin/python -m laps_sd"

    (programs / "laps-sd").touch(mode=0o755)
    assert own_command() == ".venv/bin/laps-sd"
    monkeypatch.chdir(programs)
    assert own_command() == "./laps-sd"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert own_command() == f"'{programs / 'laps-sd'}'"
    monkeypatch.setenv("PATH", str(programs))
    assert own_command() == "laps-sd"
