"""The whole system on one machine: a record (embedded Valkey), scheduler, workers and gateway as child
processes.

    with LocalStack(workers=2, engine="fake", ports=None) as stack:      # free ports: for tests
        channel = grpc.insecure_channel(stack.gateway_address)
        stack.kill("worker-0")                                           # SIGKILL
        stack.restart("worker-0")                                        # back, and ready
        print(stack.log("scheduler-0"))

Components are named valkey, scheduler-0, scheduler-1 …, worker-0 …, gateway-0 …; a name without a number
means number 0. With several shards the numbers continue across the shards, and `shard_of` returns the shard
of a scheduler or worker. This module launches the services by their names and depends on nothing else of
them: settings are passed in environment variables, readiness is read from their health service. All files are
in one temporary folder, which is deleted with the stack, except for logs that are to be kept. That of a stack
whose process was killed is deleted when the next one starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from laps_sd.errors import StartupError
from laps_sd.service.config import PREFIX
from laps_sd.stack.children import Child, ChildDied
from laps_sd.stack.options import StackOptions, check_models, check_record
from laps_sd.stack.plan import Front, StackPlan
from laps_sd.stack.ports import FREE_PORTS, HOST, PortPlan, Ports
from laps_sd.stack.readiness import answers_ping, is_serving

__all__ = ["LocalStack", "NotReady", "Progress", "delete_killed_stacks"]

START_TIMEOUT_S = 90.0
"""A worker that loads a large model from a slow disk needs most of it; the demo pair needs three seconds."""
VLLM_START_TIMEOUT_S = 900.0
"""The same with vLLM, which compiles at its first start."""
START_TIMEOUT_EACH_S = 3.0
"""Additional time for each component: they share the machine while they start."""
STOP_S = {"gateway": 1.4, "worker": 1.4, "scheduler": 1.2, "valkey": 0.7}
"""Seconds between SIGTERM and SIGKILL for each kind, in the order of the stop: less than 5 s in all."""
EVERY_S = 0.03
"""Seconds between two looks at whether the components are ready."""

FOLDERS = {False: "laps-sd-stack-", True: "laps-sd-logs-"}
"""Beginnings of the names of folders, by whether their logs are to be kept."""

Progress = Callable[[str, Literal["starting", "ready", "stopping"], float], None]
"""Callback with component, state and seconds since the start (or stop) began."""


def _direct(name: str, address: str) -> str:
    """Return the address itself: no proxy in between."""
    return address


def _silent(name: str, state: str, seconds: float) -> None:
    """Do nothing; the default progress callback."""


def delete_killed_stacks() -> None:
    """Delete what this user's killed stacks left in the temporary folder: their records hold prompts and outputs.

    A stack has its folder under a lock before it makes `shards` there, until it has deleted it.
    """
    for keep_logs, beginning in FOLDERS.items():
        for folder in Path(tempfile.gettempdir()).glob(f"{beginning}*"):
            with contextlib.suppress(OSError), contextlib.ExitStack() as held:
                opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                held.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(opened).st_uid == os.geteuid() and (folder / "shards").exists():
                    _delete(folder, keep_logs=keep_logs)


def _delete(folder: Path, *, keep_logs: bool) -> None:
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif ".log" not in path.suffixes:
            path.unlink()


class NotReady(StartupError):
    """Error for a component that lives, but does not become ready."""


class LocalStack:
    """Stack that starts on `start` or `with`, and stops on `stop` or at its end; see the top of this file."""

    def __init__(
        self,
        options: StackOptions | None = None,
        *,
        ports: Ports | None = None,
        progress: Progress | None = None,
        front: Front | None = None,
        **settings: object,
    ) -> None:
        """Prepare a stack. `settings` are fields of StackOptions; `ports=None` takes free ones.

        `front` is called with the name and host:port of each component that others dial (record, schedulers,
        gateways), before anything runs, and returns the address to dial instead: a place for a proxy.
        """
        base = options or StackOptions()
        self.options: StackOptions = dataclasses.replace(base, **settings)  # type: ignore[arg-type]
        self._progress: Progress = progress or _silent
        self._ports = PortPlan(ports or FREE_PORTS)
        self._began = 0.0
        self._lock: int | None = None
        self._plan = StackPlan(self.options, front or _direct)
        self.children = self._plan.children

    # -- addresses ----------------------------------------------------------------------------------------------

    @property
    def dir(self) -> Path:
        """Folder of all files of the stack."""
        return self._plan.dir

    @property
    def redis_url(self) -> str:
        """URL of the record."""
        return self._plan.redis_url

    @property
    def gateway_address(self) -> str:
        """host:port of the first gateway."""
        return self.address("gateway-0")

    @property
    def scheduler_address(self) -> str:
        """host:port of the first scheduler (the leader, unless it has died)."""
        return self.address("scheduler-0")

    @property
    def gateway_addresses(self) -> list[str]:
        """Addresses of all gateways."""
        return [address for name, address in self._plan.addresses.items() if name.startswith("gateway-")]

    @property
    def scheduler_addresses(self) -> list[str]:
        """Addresses of all schedulers, leading or not."""
        return [address for name, address in self._plan.addresses.items() if name.startswith("scheduler-")]

    @property
    def schedulers(self) -> dict[str, str]:
        """Shard of every scheduler, by the scheduler's name."""
        return {name: shard for name, shard in self._plan.shards.items() if name.startswith("scheduler-")}

    def shard_of(self, name: str) -> str:
        """Return the shard of a scheduler or a worker."""
        return self._plan.shards[self._plan.full_name(name)]

    def of_shard(self, shard: str, kind: str) -> list[str]:
        """Return the names of the schedulers or workers of a shard; kind is "scheduler" or "worker"."""
        return self._plan.of_shard(shard, kind)

    def address(self, name: str) -> str:
        """Return host:port of a component's gRPC server."""
        return self._plan.addresses[self._plan.full_name(name)]

    @property
    def http_url(self) -> str:
        """The first gateway's HTTP server, for OpenAI's clients: http://host:port/v1."""
        return self.http_url_of("gateway-0")

    def http_url_of(self, gateway: str) -> str:
        """Return the URL at which a gateway serves OpenAI's clients."""
        return f"http://{HOST}:{self._plan.http_ports[gateway]}/v1"

    def metrics_url(self, name: str) -> str:
        """Return the URL at which a component serves its metrics."""
        return f"http://{self._plan.metrics[self._plan.full_name(name)]}/metrics"

    def log(self, name: str) -> str:
        """Return the text that a component has logged so far."""
        return self.children[self._plan.full_name(name)].log_text()

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start all components and return when every one is ready.

        On failure everything is stopped and deleted.
        """
        self._began = time.monotonic()
        check_models(self.options)
        check_record(self.options)
        self._ports.check()
        delete_killed_stacks()
        self._plan.dir = Path(tempfile.mkdtemp(prefix=FOLDERS[self.options.keep_logs]))
        # Other stacks, and systemd-tmpfiles, delete what is old there, except for folders under a lock.
        self._lock = os.open(self.dir, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._plan.make(self._ports)
            # Workers first: they take the longest. The scheduler needs the record only.
            for name, child in self.children.items():
                if not name.startswith("scheduler-"):
                    self._launch(child)
            if "valkey" in self.children:
                self._wait_for({"valkey"})
            for name, child in self.children.items():
                if name.startswith("scheduler-"):
                    self._launch(child)
            self._wait_for(set(self.children) - {"valkey"}, ready={"valkey"} & self.children.keys())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop gateways, workers, schedulers, then the record.

        Within 5 s all have ended and the folder is deleted, except for the logs if they are to be kept.
        """
        began = self._began = time.monotonic()
        for kind, seconds in STOP_S.items():
            group = [child for name, child in self.children.items() if name.split("-")[0] == kind]
            for child in group:
                if child.alive:
                    self._progress(child.name, "stopping", time.monotonic() - began)
                child.request_stop()
            deadline = time.monotonic() + seconds
            for child in group:
                if not child.wait(deadline - time.monotonic()):
                    child.kill()
        self.children.clear()
        self._ports.close()
        if self.dir != Path():
            _delete(self.dir, keep_logs=self.options.keep_logs)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check(self) -> None:
        """Raise ChildDied if a component has ended by itself; a drained worker may."""
        for name, child in self.children.items():
            drained = name.startswith("worker-") and child.returncode == 0
            if not child.alive and not drained:
                raise ChildDied(child, while_what="while it was serving")

    # -- faults -------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Send SIGKILL; the process has ended on return."""
        self.children[self._plan.full_name(name)].kill()

    def pause(self, name: str) -> None:
        """Send SIGSTOP: the process is alive, but silent."""
        self.children[self._plan.full_name(name)].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Send SIGCONT."""
        self.children[self._plan.full_name(name)].signal(signal.SIGCONT)

    def terminate(self, name: str, *, timeout_s: float = 20.0) -> None:
        """Send SIGTERM and wait for the end, in which a component drains, as in a rolling update."""
        child = self.children[self._plan.full_name(name)]
        child.request_stop()
        if not child.wait(timeout_s):
            raise NotReady(
                f"{child.name} did not stop within {timeout_s} s of SIGTERM. Its log:\n{child.log_tail()}"
            )

    def restart(self, name: str, *, wait: bool = True, **settings: object) -> None:
        """Start a component again, on the same ports and with the same settings except `settings`.

        Kill it before if it lives.
        """
        child = self.children[self._plan.full_name(name)]
        child.kill()
        child.environment |= {PREFIX + key.upper(): str(value) for key, value in settings.items()}
        self._began = time.monotonic()
        self._launch(child)
        if wait:
            self.wait_ready(name)

    def add_worker(self, *, wait: bool = True) -> str:
        """Add a worker to the first shard, and return its name."""
        name = f"worker-{self._plan.count('worker')}"
        self._plan.add_worker(name, self.options.shard, self._ports)
        self._began = time.monotonic()
        self._launch(self.children[name])
        if wait:
            self.wait_ready(name)
        return name

    def wait_ready(self, name: str) -> None:
        """Return once the component is ready."""
        self._wait_for({self._plan.full_name(name)})

    def is_ready(self, name: str) -> bool:
        """Return whether the component is ready now."""
        name = self._plan.full_name(name)
        if name == "valkey":
            return answers_ping(self._plan.valkey_port)
        # Of several schedulers only the leader is ready; a gateway's readiness implies that there is a
        # leader.
        standby = name.startswith("scheduler-") and self.options.schedulers > 1
        return is_serving(
            self._plan.addresses[name], "liveness" if standby else "readiness", tls=self.options.tls
        )

    def leads(self, scheduler: str) -> bool:
        """Return whether this scheduler leads its shard now."""
        return is_serving(self.address(scheduler), "readiness", tls=self.options.tls)

    def _launch(self, child: Child) -> None:
        self._progress(child.name, "starting", time.monotonic() - self._began)
        child.start()

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_for(self, names: set[str], *, ready: AbstractSet[str] = frozenset()) -> None:
        """Wait until these components are ready. Raise ChildDied if one of them ends, or one of those that
        are `ready`: what answered for it may have been another program that took its port.
        """
        longest_s = VLLM_START_TIMEOUT_S if self.options.engine == "vllm" else START_TIMEOUT_S
        timeout_s = longest_s + START_TIMEOUT_EACH_S * len(self.children)
        deadline = time.monotonic() + timeout_s
        waiting = sorted(names)
        while waiting:
            for name in ready:
                if not self.children[name].alive:
                    raise ChildDied(self.children[name], while_what="while the others started")
            for name in list(waiting):
                child = self.children[name]
                # Before readiness, so that a child that answered and died is not taken for ready.
                if not child.alive:
                    raise ChildDied(child, while_what="before it was ready")
                if self.is_ready(name):
                    waiting.remove(name)
                    self._progress(name, "ready", time.monotonic() - self._began)
            if waiting and time.monotonic() > deadline:
                child = self.children[waiting[0]]
                raise NotReady(
                    f"{child.name} was not ready within {timeout_s:g} s. Its log ends:\n{child.log_tail()}"
                )
            if waiting:
                time.sleep(EVERY_S)
