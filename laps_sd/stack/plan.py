"""The components of a stack before anything runs: their names, addresses and settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from laps_sd.service.config import PREFIX
from laps_sd.service.model_dir import demo_target_dir
from laps_sd.stack.children import Child, safe_path
from laps_sd.stack.options import StackOptions
from laps_sd.stack.ports import HOST, PortPlan

WORKER = "worker_svc"
"""Module of the workers."""
Front = Callable[[str, str], str]
"""Function from a component's name and address to the address to dial instead; see `LocalStack`."""


class StackPlan:
    """The components of a stack by name, with the processes to start in `children`."""

    def __init__(self, options: StackOptions, front: Front) -> None:
        self.dir = Path()
        """Folder of all files; set it before `make`."""
        self.children: dict[str, Child] = {}
        self.redis_url = ""
        self.valkey_port = 0
        self.addresses: dict[str, str] = {}
        """host:port of each component's gRPC server."""
        self.shards: dict[str, str] = {}
        """Shard of each scheduler and worker."""
        self.metrics: dict[str, str] = {}
        """host:port of each component's metrics."""
        self.http_ports: dict[str, int] = {}
        """Port of each gateway's HTTP server."""
        self._dialled: dict[str, str] = {}
        """Addresses at which the others dial each scheduler and the record."""
        self._options = options
        self._front = front

    def full_name(self, name: str) -> str:
        """Return the name of a component; without a number it is number 0."""
        return name if name in self.children else f"{name}-0"

    def of_shard(self, shard: str, kind: str) -> list[str]:
        """Return the names of the schedulers or workers of a shard; kind is "scheduler" or "worker"."""
        return [name for name, other in self.shards.items() if other == shard and name.startswith(f"{kind}-")]

    def count(self, kind: str) -> int:
        """Return the number of components of a kind."""
        return sum(1 for name in self.addresses if name.startswith(f"{kind}-"))

    def make(self, ports: PortPlan) -> None:
        """Name every child and choose its ports; nothing runs yet."""
        options = self._options
        if options.redis_url is None:
            self.valkey_port = ports.take("valkey")
            self.redis_url = f"redis://{HOST}:{self.valkey_port}/0"
            self._dialled["valkey"] = f"redis://{self._front('valkey', f'{HOST}:{self.valkey_port}')}/0"
            data = options.data_dir or self.dir / "valkey"
            arguments = ("--port", str(self.valkey_port), "--data-dir", str(data))
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
            self.addresses[name] = f"{HOST}:{port}"
            self._front(name, self.addresses[name])
            self.http_ports[name] = ports.take("http") if name == gateways[0] else ports.free()
        for name in (*gateways, *schedulers, *workers):
            self.metrics[name] = f"{HOST}:{ports.take('metrics')}"
        for number, name in enumerate(schedulers):
            self.shards[name] = shards[number // options.schedulers]
        for number, name in enumerate(workers):
            self.add_worker(name, shards[number // options.workers], ports)
        self.write_shards()
        for name in gateways:
            self._add_service(name, "gateway", options.shard, ports, self._gateway_settings(name))
        for name in schedulers:
            self.add_scheduler(name, self.shards[name], ports)

    def add_scheduler(self, name: str, shard: str, ports: PortPlan) -> None:
        """Add a scheduler to a shard; it takes a free port unless it has an address."""
        self.shards[name] = shard
        if name not in self.addresses:
            self._place_scheduler(name, ports.free())
        settings = {
            "redis_url": self._dialled["valkey"],
            "policy": self._options.policy,
            "advertise_address": self._dialled[name],
        }
        self._add_service(name, "scheduler_svc", shard, ports, settings)

    def add_worker(self, name: str, shard: str, ports: PortPlan) -> None:
        """Add a worker to a shard whose schedulers are planned."""
        self.shards[name] = shard
        self._add_service(name, WORKER, shard, ports, self._worker_settings(name, shard))

    def write_shards(self) -> None:
        """Write the file that gateways read; it is replaced as a whole, so that none reads half of it."""
        path = self.dir / "shards"
        lines = [f"{shard} {self._seeds(shard)}\n" for shard in dict.fromkeys(self.shards.values())]
        written = path.with_suffix(".new")
        written.write_text("".join(lines))
        written.replace(path)

    def _seeds(self, shard: str) -> str:
        return ",".join(self._dialled[name] for name in self.of_shard(shard, "scheduler"))

    def _place_scheduler(self, name: str, port: int) -> None:
        self.addresses[name] = f"{HOST}:{port}"
        self._dialled[name] = self._front(name, self.addresses[name])

    def _worker_settings(self, name: str, shard: str) -> dict[str, object]:
        options = self._options
        return {
            "worker_name": name,
            "engine": options.engine,
            "target": options.target,
            "draft": options.draft,
            "device": options.device,
            "dtype": options.dtype,
            "quantization": options.quantization,
            "slots": options.slots,
            "threads": options.threads,
            "scheduler_seeds": self._seeds(shard),
        }

    def _gateway_settings(self, name: str) -> dict[str, object]:
        options = self._options
        return {
            "http_port": self.http_ports[name],
            "tokenizer_dir": options.target or demo_target_dir(),
            "scheduler_seeds": self._seeds(options.shard),
            "shards_file": self.dir / "shards",
        }

    def _add_service(
        self, name: str, module: str, shard: str, ports: PortPlan, settings: Mapping[str, object]
    ) -> None:
        if name not in self.addresses:
            self.addresses[name] = f"{HOST}:{ports.free()}"
        if name not in self.metrics:
            self.metrics[name] = f"{HOST}:{ports.take('metrics')}"
        common: dict[str, object] = {
            "shard": shard,
            "pool": self._options.pool,
            "model": self._options.model,
            "context_tokens": self._options.context_tokens,
            "grpc_host": HOST,
            "grpc_port": self.addresses[name].rpartition(":")[2],
            "metrics_port": self.metrics[name].rpartition(":")[2],
            "log_level": self._options.log_level,
            "log_style": "console",
            "drain_s": self._options.drain_s,
        }
        if (tls := self._options.tls) is not None:
            common |= {"tls_cert": tls.cert, "tls_key": tls.key, "tls_client_ca": tls.ca, "link_tls": "true"}
            link = self._options.link_tls.get(name.split("-")[0], tls)
            common |= {"link_tls_ca": link.ca, "link_tls_cert": link.cert, "link_tls_key": link.key}
        self._add(name, module, (), common | dict(settings))

    def _add(
        self, name: str, module: str, arguments: tuple[str, ...], settings: Mapping[str, object]
    ) -> None:
        # Variables of the caller's shell do not reach a stack unless the options contain them.
        environment = {key: text for key, text in os.environ.items() if not key.startswith(PREFIX)}
        environment |= {"OMP_NUM_THREADS": str(self._options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        environment |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"} | safe_path()
        environment |= self._options.environment
        environment |= {
            PREFIX + key.upper(): str(value) for key, value in settings.items() if value is not None
        }
        self.children[name] = Child(
            name,
            module,
            *arguments,
            environment=environment,
            log=self.dir / f"{name}.log",
            python=self._options.worker_python if module == WORKER else None,
        )
