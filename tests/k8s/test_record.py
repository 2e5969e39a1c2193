"""The chart's bundled record, started by the command that the chart renders."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from scheduler_svc.store.embedded import packaged_binary
from tests.helpers import free_port, wait_until
from tests.k8s.conftest import MATRIX
from tests.k8s.helm import find

PASSWORD = r'of "the" r@c/rd\ $HOME `id` #?%41'


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def record(helm3: Any, tmp_path: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "valkey-server").symlink_to(packaged_binary())
    [container] = find(helm3.render(*MATRIX["defaults"]), "StatefulSet", "redis")["spec"]["template"]["spec"][
        "containers"
    ]
    script = container["command"][2]
    (tmp_path / "password").write_text(PASSWORD)
    for ours, theirs in (
        ("/etc/laps-sd/redis-password/password", str(tmp_path / "password")),
        ("port 6379", f"port {port}"),
        ("dir /data", f"dir {tmp_path}"),
        ("bind * -::*", "bind 127.0.0.1"),
    ):
        assert ours in script
        script = script.replace(ours, theirs)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    server = subprocess.Popen(
        [*container["command"][:2], script],
        env={"PATH": path},
        stdout=subprocess.DEVNULL,
    )
    yield server
    server.terminate()
    assert server.wait(30) == 0, "the signal reaches the server and not a shell around it"


def test_it_needs_its_password_and_is_bounded_below_the_limit_of_its_container(
    record: subprocess.Popen[bytes], port: int
) -> None:
    with redis.Redis(port=port, password=PASSWORD, decode_responses=True) as client:

        def answers() -> bool:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        wait_until(answers, description="the record answers")
        assert client.config_get("maxmemory") == {"maxmemory": str(int(0.6 * 2**30))}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    assert PASSWORD not in Path(f"/proc/{record.pid}/cmdline").read_text()
