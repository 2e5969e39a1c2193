"""The whole system on one machine: a record (embedded Valkey), scheduler, workers and gateway as child processes.

    with LocalStack(workers=2, engine="fake", ports=None) as stack:      # free ports: for tests
        channel = grpc.insecure_channel(stack.gateway_address)
        stack.kill("worker-0")                                           # SIGKILL
        stack.restart("worker-0")                                        # back, and ready
        print(stack.log("scheduler-0"))

Components are named valkey, scheduler-0, scheduler-1 …, worker-0 …, gateway-0 …; a name without a number
means number 0. With several shards the numbers continue across the shards, and `shard_of` returns the shard
of a scheduler or worker. This module launches the services by their names and depends on nothing else of
them: settings are passed in environment variables, readiness is read from their health service. All files are
in one temporary folder, which is deleted with the stack.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

from laps_sd.errors import StartupError
from laps_sd.service.config import PREFIX
from laps_sd.service.model_dir import demo_target_dir
from laps_sd.service.wire import Tls
from laps_sd.stack.children import Child, ChildDied
from laps_sd.stack.ports import FREE_PORTS, HOST, PortPlan, Ports
from laps_sd.stack.readiness import answers_ping, is_serving

__all__ = ["Front", "LocalStack", "NotReady", "Progress", "StackOptions"]

START_TIMEOUT_S = 90.0
"""A worker that loads a large model from a slow disk needs most of it; the demo pair needs three seconds."""
START_TIMEOUT_EACH_S = 3.0
"""Additional time for each component: they share the machine while they start."""
STOP_S = {"gateway": 1.4, "worker": 1.4, "scheduler": 1.2, "valkey": 0.7}
"""Seconds between SIGTERM and SIGKILL for each kind, in the order of the stop: less than 5 s in all."""
EVERY_S = 0.03
REDIS_PORT = 6379  # for a URL without a port
CONNECT_TIMEOUT_S = 5.0

Progress = Callable[[str, Literal["starting", "ready", "stopping"], float], None]
"""Callback with component, state and seconds since the start (or stop) began."""
Front = Callable[[str, str], str]
"""Function from a component's name and address to the address to dial instead; see `LocalStack`."""


def _direct(name: str, address: str) -> str:
    """Return the address itself: no proxy in between."""
    return address


def _silent(name: str, state: str, seconds: float) -> None:
    """Do nothing; the default progress callback."""


class NotReady(StartupError):
    """Error for a component that lives, but does not become ready."""


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """Components of a stack and their settings. A setting of None: the service's own default."""

    shards: int = 1
    """Number of shards, each with its own schedulers and workers."""
    workers: int = 1
    """Number of workers of each shard."""
    schedulers: int = 1
    """Number of schedulers of each shard: one leads, the others are standbys."""
    gateways: int = 1
    engine: Literal["auto", "demo", "fake"] = "auto"
    """auto: the target if one is given, else the demo pair."""
    policy: str | None = None
    shard: str = "s0"
    """Name of the first shard; further ones are s1, s2 …"""
    pool: str = "demo"
    model: str = "laps-sd-demo"
    target: Path | None = None
    """Model directories; None: the shipped demo pair."""
    draft: Path | None = None
    tokenizer_dir: Path | None = None
    """Directory of the tokenizer; None: the target's directory."""
    context_tokens: int | None = None
    """Most tokens of prompt and output of one request, in gateway and workers alike.

    None: the limit of the model, at most 8192.
    """
    device: str | None = None
    dtype: str | None = None
    slots: int | None = None
    redis_url: str | None = None
    """URL of the record; None: an embedded Valkey."""
    data_dir: Path | None = None
    """Directory of the embedded Valkey's record; None: in the temporary folder, deleted with the stack."""
    threads: int = 1
    """CPU threads of each worker. If their sum exceeds the cores, the workers slow each other down."""
    drain_s: float = 0.8
    """Longest time that a component drains.

    `stop` kills components that take much longer (STOP_S), `terminate` waits.
    """
    log_level: str = "info"
    log_style: Literal["json", "console"] = "console"
    tls: Tls | None = None
    """Mutual TLS on every gRPC link, with these files at both ends."""
    link_tls: Mapping[str, Tls] = dataclasses.field(default_factory=dict)
    """Files that a "gateway" or a "worker" presents to schedulers instead."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further variables for all services (LAPS_SD_…); the stack's own take precedence."""


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
        self._front: Front = front or _direct
        self._wanted = ports or FREE_PORTS
        self._began = 0.0
        self.dir = Path()
        self.children: dict[str, Child] = {}
        self.redis_url = ""
        self._addresses: dict[str, str] = {}
        self._shards: dict[str, str] = {}
        self._metrics: dict[str, str] = {}
        self._dialled: dict[str, str] = {}
        """Addresses at which the others dial each scheduler and the record."""
        self._http_ports: dict[str, int] = {}
        self._valkey_port = 0

    # -- addresses ----------------------------------------------------------------------------------------------

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
        return [address for name, address in self._addresses.items() if name.startswith("gateway-")]

    @property
    def scheduler_addresses(self) -> list[str]:
        """Addresses of all schedulers, leading or not."""
        return [address for name, address in self._addresses.items() if name.startswith("scheduler-")]

    @property
    def schedulers(self) -> dict[str, str]:
        """Shard of every scheduler, by the scheduler's name."""
        return {name: shard for name, shard in self._shards.items() if name.startswith("scheduler-")}

    def shard_of(self, name: str) -> str:
        """Return the shard of a scheduler or a worker."""
        return self._shards[self._full(name)]

    def of_shard(self, shard: str, kind: str) -> list[str]:
        """Return the names of the schedulers or workers of a shard; kind is "scheduler" or "worker"."""
        return [
            name for name, other in self._shards.items() if other == shard and name.startswith(f"{kind}-")
        ]

    def address(self, name: str) -> str:
        """Return host:port of a component's gRPC server."""
        return self._addresses[self._full(name)]

    @property
    def http_url(self) -> str:
        """The first gateway's HTTP server, for OpenAI's clients: http://host:port/v1."""
        return self.http_url_of("gateway-0")

    def http_url_of(self, gateway: str) -> str:
        """Return the URL at which a gateway serves OpenAI's clients."""
        return f"http://{HOST}:{self._http_ports[gateway]}/v1"

    def metrics_url(self, name: str) -> str:
        """Return the URL at which a component serves its metrics."""
        return f"http://{self._metrics[self._full(name)]}/metrics"

    def log(self, name: str) -> str:
        """Return the text that a component has logged so far."""
        return self.children[self._full(name)].log_text()

    def _full(self, name: str) -> str:
        return name if name in self.children else f"{name}-0"

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
        self._check_models()
        self._check_record()
        ports = PortPlan(self._wanted)
        self.dir = Path(tempfile.mkdtemp(prefix="laps-sd-"))
        try:
            self._plan(ports)
            # Workers first: they take the longest. The scheduler needs the record only.
            for name, child in self.children.items():
                if not name.startswith("scheduler-"):
                    self._launch(child)
            if "valkey" in self.children:
                self._wait_for({"valkey"})
            for name, child in self.children.items():
                if name.startswith("scheduler-"):
                    self._launch(child)
            self._wait_for(set(self.children) - {"valkey"})
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop gateways, workers, schedulers, then the record.

        Within 5 s all have ended and the folder is deleted.
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
        if self.dir != Path():
            shutil.rmtree(self.dir, ignore_errors=True)

    def check(self) -> None:
        """Raise ChildDied if a component has ended by itself; a drained worker may."""
        for name, child in self.children.items():
            drained = name.startswith("worker-") and child.returncode == 0
            if not child.alive and not drained:
                raise ChildDied(child, while_what="while it was serving")

    # -- faults -------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Send SIGKILL; the process has ended on return."""
        self.children[self._full(name)].kill()

    def pause(self, name: str) -> None:
        """Send SIGSTOP: the process is alive, but silent."""
        self.children[self._full(name)].signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Send SIGCONT."""
        self.children[self._full(name)].signal(signal.SIGCONT)

    def terminate(self, name: str, *, timeout_s: float = 20.0) -> None:
        """Send SIGTERM and wait for the end, as a rolling update does."""
        child = self.children[self._full(name)]
        child.request_stop()
        if not child.wait(timeout_s):
            raise NotReady(
                f"{child.name} did not stop within {timeout_s} s of SIGTERM. Its log:\n{child.log_tail()}"
            )

    def restart(self, name: str, *, wait: bool = True, **settings: object) -> None:
        """Start a component again, on the same ports and with the same settings except `settings`.

        Kill it before if it lives.
        """
        child = self.children[self._full(name)]
        child.kill()
        child.environment |= {PREFIX + key.upper(): str(value) for key, value in settings.items()}
        self._began = time.monotonic()
        self._launch(child)
        if wait:
            self.wait_ready(name)

    def add_worker(self, *, shard: str | None = None, wait: bool = True) -> str:
        """Add a worker, to the first shard by default, and return its name."""
        name = f"worker-{self._count('worker')}"
        self._plan_worker(name, shard or self.options.shard, PortPlan(FREE_PORTS))
        self._began = time.monotonic()
        self._launch(self.children[name])
        if wait:
            self.wait_ready(name)
        return name

    def _count(self, kind: str) -> int:
        return sum(1 for name in self._addresses if name.startswith(f"{kind}-"))

    def wait_ready(self, name: str) -> None:
        """Return once the component is ready."""
        self._wait_for({self._full(name)})

    def is_ready(self, name: str) -> bool:
        """Return whether the component is ready now."""
        name = self._full(name)
        if name == "valkey":
            return answers_ping(self._valkey_port)
        # Of several schedulers only the leader is ready; a gateway's readiness implies that there is a
        # leader.
        standby = name.startswith("scheduler-") and self.options.schedulers > 1
        return is_serving(self._addresses[name], "liveness" if standby else "readiness", tls=self.options.tls)

    def leads(self, scheduler: str) -> bool:
        """Return whether this scheduler leads its shard now."""
        return is_serving(self.address(scheduler), "readiness", tls=self.options.tls)

    # -- making -------------------------------------------------------------------------------------------------

    def _check_models(self) -> None:
        if self.options.target is not None and self.options.engine != "auto":
            raise StartupError(
                f"--engine {self.options.engine} brings its own model: leave out --engine or --target."
            )
        if self.options.draft is not None and self.options.target is None:
            raise StartupError("--draft needs --target, the model that it drafts for.")
        for what in ("target", "draft", "tokenizer_dir"):
            path: Path | None = getattr(self.options, what)
            if path is None:
                continue
            needed = path / ("tokenizer.json" if what == "tokenizer_dir" else "config.json")
            if not needed.is_file():
                flag = "--" + what.replace("_", "-")
                raise StartupError(
                    f"{flag} {path} is not a model directory: {needed} does not exist."
                    if path.is_dir()
                    else f"{flag} {path} does not exist; give the directory of a model (config.json, safetensors)."
                )

    def _check_record(self) -> None:
        """Raise StartupError if the record cannot be reached.

        Otherwise the start would wait for it until its timeout.
        """
        url = urlsplit(self.options.redis_url or "")
        if url.scheme not in ("redis", "rediss"):
            return  # embedded, a socket file, or something that the scheduler refuses
        try:
            host, port = url.hostname or "localhost", url.port or REDIS_PORT
            socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
        except ValueError:
            return
        except OSError as error:
            raise StartupError(
                f"no Redis answers at {host}:{port} ({error.strerror or error}): start one, name another with "
                "--redis-url, or leave that out for an embedded one."
            ) from None

    def _plan(self, ports: PortPlan) -> None:
        """Name every child and choose its ports; nothing runs yet."""
        options = self.options
        if options.redis_url is None:
            self._valkey_port = ports.take("valkey")
            self.redis_url = f"redis://{HOST}:{self._valkey_port}/0"
            self._dialled["valkey"] = f"redis://{self._front('valkey', f'{HOST}:{self._valkey_port}')}/0"
            data = options.data_dir or self.dir / "valkey"
            arguments = ("--port", str(self._valkey_port), "--data-dir", str(data))
            self._add("valkey", "scheduler_svc.store.embedded", arguments, {})
        else:
            self.redis_url = self._dialled["valkey"] = options.redis_url
        shards = [options.shard, *(f"s{number}" for number in range(1, options.shards))]
        schedulers = [f"scheduler-{number}" for number in range(options.shards * options.schedulers)]
        workers = [f"worker-{number}" for number in range(options.shards * options.workers)]
        gateways = [f"gateway-{number}" for number in range(options.gateways)]
        for name in schedulers:
            port = ports.take("scheduler") if name == schedulers[0] else ports.free()
            self._place_scheduler(name, port)
        for name in gateways:
            port = ports.take("gateway") if name == gateways[0] else ports.free()
            self._addresses[name] = f"{HOST}:{port}"
            self._front(name, self._addresses[name])
            self._http_ports[name] = ports.take("http") if name == gateways[0] else ports.free()
        for name in (*gateways, *schedulers, *workers):
            self._metrics[name] = f"{HOST}:{ports.take('metrics')}"
        for number, name in enumerate(schedulers):
            self._shards[name] = shards[number // options.schedulers]
        for number, name in enumerate(workers):
            self._plan_worker(name, shards[number // options.workers], ports)
        self._write_shards()
        for name in gateways:
            self._add_service(name, "gateway", options.shard, ports, self._gateway_settings(name))
        for name in schedulers:
            self._plan_scheduler(name, self._shards[name], ports)

    def _plan_scheduler(self, name: str, shard: str, ports: PortPlan) -> None:
        self._shards[name] = shard
        if name not in self._addresses:
            self._place_scheduler(name, ports.free())
        settings = {
            "redis_url": self._dialled["valkey"],
            "policy": self.options.policy,
            "advertise_address": self._dialled[name],
            "scheduler_address": self._dialled[name],
        }
        self._add_service(name, "scheduler_svc", shard, ports, settings)

    def _plan_worker(self, name: str, shard: str, ports: PortPlan) -> None:
        self._shards[name] = shard
        self._add_service(name, "worker_svc", shard, ports, self._worker_settings(name, shard))

    def _write_shards(self) -> None:
        """Write the file that gateways read; it is replaced as a whole, so that none reads half of it."""
        path = self.dir / "shards"
        lines = [f"{shard} {self._seeds(shard)}\n" for shard in dict.fromkeys(self._shards.values())]
        written = path.with_suffix(".new")
        written.write_text("".join(lines))
        written.replace(path)

    def _seeds(self, shard: str) -> str:
        return ",".join(self._dialled[name] for name in self.of_shard(shard, "scheduler"))

    def _place_scheduler(self, name: str, port: int) -> None:
        self._addresses[name] = f"{HOST}:{port}"
        self._dialled[name] = self._front(name, self._addresses[name])

    def _worker_settings(self, name: str, shard: str) -> dict[str, object]:
        options = self.options
        return {
            "worker_name": name,
            "engine": options.engine,
            "target": options.target,
            "draft": options.draft,
            "device": options.device,
            "dtype": options.dtype,
            "slots": options.slots,
            "threads": options.threads,
            "scheduler_seeds": self._seeds(shard),
        }

    def _gateway_settings(self, name: str) -> dict[str, object]:
        options = self.options
        return {
            "http_port": self._http_ports[name],
            "tokenizer_dir": options.tokenizer_dir or options.target or demo_target_dir(),
            "scheduler_seeds": self._seeds(options.shard),
            "shards_file": self.dir / "shards",
        }

    def _add_service(
        self, name: str, module: str, shard: str, ports: PortPlan, settings: Mapping[str, object]
    ) -> None:
        if name not in self._addresses:
            self._addresses[name] = f"{HOST}:{ports.free()}"
        if name not in self._metrics:
            self._metrics[name] = f"{HOST}:{ports.take('metrics')}"
        common: dict[str, object] = {
            "shard": shard,
            "pool": self.options.pool,
            "model": self.options.model,
            "context_tokens": self.options.context_tokens,
            "grpc_host": HOST,
            "grpc_port": self._addresses[name].rpartition(":")[2],
            "metrics_port": self._metrics[name].rpartition(":")[2],
            "log_level": self.options.log_level,
            "log_style": self.options.log_style,
            "drain_s": self.options.drain_s,
        }
        if (tls := self.options.tls) is not None:
            common |= {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.ca, "link_tls": "true"}
            link = self.options.link_tls.get(name.split("-")[0], tls)
            common |= {"link_tls_ca": link.ca, "link_tls_cert": link.cert, "link_tls_key": link.key}
        self._add(name, module, (), common | dict(settings))

    def _add(
        self, name: str, module: str, arguments: tuple[str, ...], settings: Mapping[str, object]
    ) -> None:
        # Variables of the caller's shell do not reach a stack unless the options contain them.
        environment = {key: text for key, text in os.environ.items() if not key.startswith(PREFIX)}
        environment |= {"OMP_NUM_THREADS": str(self.options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= self.options.environment
        environment |= {
            PREFIX + key.upper(): str(value) for key, value in settings.items() if value is not None
        }
        self.children[name] = Child(
            name, module, *arguments, environment=environment, log=self.dir / f"{name}.log"
        )

    def _launch(self, child: Child) -> None:
        self._progress(child.name, "starting", time.monotonic() - self._began)
        child.start()

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_for(self, names: set[str]) -> None:
        timeout_s = START_TIMEOUT_S + START_TIMEOUT_EACH_S * len(self.children)
        deadline = time.monotonic() + timeout_s
        waiting = sorted(names)
        while waiting:
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
