"""Checks of a scheduler's settings that need more than one setting, and the address that follows from them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from gateway.settings import GatewaySettings
from laps_sd.cli.leader import Leader
from laps_sd.service.config import ConfigError, load
from laps_sd.service.wire import Tls
from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from scheduler_svc.record import open_record
from scheduler_svc.record_settings import RecordSettings
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.embedded import EmbeddedServer
from tests.certificates import openssl, write_certificates
from tests.helpers import wait_until


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE": __file__},
            "needs a LAPS_SD_REDIS_URL that begins with redis+sentinel",
        ),
        (
            {"LAPS_SD_REDIS_SENTINEL_USER": "asker", "LAPS_SD_REDIS_URL": "redis+sentinel://s/main"},
            "LAPS_SD_REDIS_SENTINEL_USER needs LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE",
        ),
        (
            {"LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE": "/none", "LAPS_SD_REDIS_URL": "redis+sentinel://s/main"},
            "LAPS_SD_REDIS_SENTINEL_PASSWORD_FILE must name a file; /none is not a file",
        ),
        ({"LAPS_SD_SHARD": "_a"}, "LAPS_SD_SHARD must be 1 to 63 letters"),
        ({"LAPS_SD_SHARD": "a" * 64}, "LAPS_SD_SHARD must be 1 to 63 letters"),
        ({"LAPS_SD_POOL": "größe"}, "LAPS_SD_POOL must be 1 to 63 letters"),
        ({"LAPS_SD_MAX_MESSAGE_BYTES": "65536"}, "LAPS_SD_MAX_MESSAGE_BYTES must be at least 16777216"),
    ],
)
def test_a_setting_that_cannot_work_is_a_sentence(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SchedulerSettings, {}, environ=environ)

    assert said in str(refused.value)


def test_a_key_that_cannot_be_used_for_the_record_is_refused_at_the_start(tmp_path: Path) -> None:
    """OpenSSL would ask for the passphrase at the terminal, and the scheduler would wait for an answer."""
    folder = write_certificates(tmp_path / "pki")
    openssl(folder, "pkey", "-in", "key.pem", "-aes128", "-passout", "pass:secret", "-out", "encrypted.pem")
    environ = {
        "LAPS_SD_REDIS_URL": "rediss://127.0.0.1:6379",
        "LAPS_SD_REDIS_TLS_CERT": str(folder / "cert.pem"),
        "LAPS_SD_REDIS_TLS_KEY": str(folder / "encrypted.pem"),
    }
    with pytest.raises(ConfigError, match="LAPS_SD_REDIS_TLS_KEY cannot be used: the key is encrypted"):
        open_record(load(RecordSettings, {}, environ=environ))


@pytest.mark.parametrize(
    ("environ", "stranger"),
    [
        ({}, False),
        ({"LAPS_SD_GRPC_HOST": "localhost"}, False),
        ({"LAPS_SD_GRPC_HOST": "::1"}, False),
        ({"LAPS_SD_GRPC_HOST": "0.0.0.0"}, True),
        ({"LAPS_SD_GRPC_HOST": "scheduler.prod"}, True),
        ({"LAPS_SD_GRPC_HOST": "0.0.0.0", "LAPS_SD_TLS_CERT": "c", "LAPS_SD_TLS_KEY": "k"}, True),
        (
            {
                "LAPS_SD_GRPC_HOST": "0.0.0.0",
                "LAPS_SD_TLS_CERT": "c",
                "LAPS_SD_TLS_KEY": "k",
                "LAPS_SD_TLS_CLIENT_CA": "ca",
            },
            False,
        ),
    ],
)
def test_a_port_that_other_machines_reach_without_a_certificate_is_open_to_strangers(
    environ: dict[str, str], stranger: bool
) -> None:
    assert load(SchedulerSettings, {}, environ=environ).open_to_strangers is stranger


@pytest.mark.parametrize("address", ["leader", "leader:", "fd00::7:50052", "grpc://leader:50052"])
def test_an_address_that_peers_could_not_dial_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"LAPS_SD_ADVERTISE_ADDRESS must be host:port, got '{address}'"):
        SchedulerSettings(advertise_address=address)

    assert SchedulerSettings(advertise_address="[fd00::7]:50052").advertise_address


def test_times_that_the_record_cannot_hold_are_refused() -> None:
    """Redis refuses a longer one when the first request ends, and the leader would end with it."""
    with pytest.raises(ConfigError, match="LAPS_SD_FINISHED_TTL_S must be at most 315360000 s, got 1e"):
        SchedulerSettings(finished_ttl_s=1e17)
    with pytest.raises(ConfigError, match="LAPS_SD_GRACE_WITH_KEY_S must be at most 315360000 s, got 1"):
        GatewaySettings(grace_with_key_s=1e9)


def ipv6_ports(count: int) -> list[int]:
    try:
        probes = [socket.create_server(("::1", 0), family=socket.AF_INET6) for _ in range(count)]
    except OSError:
        pytest.skip("this machine has no IPv6")
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def test_a_standby_at_an_ipv6_address_refers_to_its_leader(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path).start() as server, contextlib.ExitStack() as processes:

        def total_by(port: int) -> int | None:
            leader = Leader(f"[::1]:{port}", Tls())
            try:
                return leader.call(
                    lambda channel: admin_pb2_grpc.AdminStub(channel).ListQueue(
                        admin_pb2.ListQueueRequest(limit=1), timeout=5
                    )
                ).total
            except grpc.RpcError:
                return None
            finally:
                leader.close()

        for port in ipv6_ports(2):  # the first one leads
            variables = {
                "LAPS_SD_REDIS_URL": server.url,
                "LAPS_SD_GRPC_HOST": "::1",
                "LAPS_SD_GRPC_PORT": str(port),
                "LAPS_SD_METRICS_PORT": "",
            }
            process = subprocess.Popen([sys.executable, "-m", "scheduler_svc"], env=os.environ | variables)
            processes.callback(process.wait)
            processes.callback(process.terminate)
            wait_until(lambda port=port: total_by(port) == 0, description="the leader answers")
