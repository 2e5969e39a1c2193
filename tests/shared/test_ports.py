"""Ports of a stack: what one stack has allocated, no other program takes."""

from __future__ import annotations

import socket
import sys

import pytest

from laps_sd.errors import StartupError
from laps_sd.stack.ports import FREE_PORTS, HOST, LISTENING, PortPlan, Ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ports are reserved on Linux alone")


def bound(port: int, *, reuse: bool = False) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        made.bind((HOST, port))
    except OSError:
        made.close()
        raise
    return made


@pytest.fixture
def ports():
    plan = PortPlan(FREE_PORTS)
    yield plan
    plan.close()


def test_nothing_else_can_take_an_allocated_port_before_its_component_listens(ports: PortPlan):
    port = ports.take("gateway")

    with pytest.raises(OSError, match="in use"):
        bound(port)


def test_the_component_itself_can_listen_and_listen_again_after_a_restart(ports: PortPlan):
    port = ports.free()

    for _ in range(2):
        with bound(port, reuse=True) as listener:
            listener.listen()
            with socket.create_connection((HOST, port)):
                pass


def test_all_wanted_ports_that_cannot_be_had_are_named_at_once(ports: PortPlan):
    one, other, twice = ports.free(), ports.free(), ports.free()
    with bound(one, reuse=True) as gateway, bound(other, reuse=True) as scheduler:
        gateway.listen()
        scheduler.listen()
        wanted = Ports(gateway=one, http=twice, scheduler=other, metrics=twice)

        with pytest.raises(StartupError) as refused:
            PortPlan(wanted).check()

    flags = ["--gateway-port", "--scheduler-port", f"--http-port and --metrics-port are both {twice}"]
    assert [flag in line for flag, line in zip(flags, str(refused.value).splitlines(), strict=True)] == [
        True
    ] * 3


def test_a_client_is_refused_while_the_component_is_away(ports: PortPlan):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, ports.free()))


def test_a_port_that_another_plan_has_allocated_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, ports: PortPlan
):
    taken = ports.free()
    other = PortPlan(FREE_PORTS)
    free = other.free()
    other.close()
    choices = iter([LISTENING.index(taken), LISTENING.index(free)])
    monkeypatch.setattr("laps_sd.stack.ports.secrets.randbelow", lambda _: next(choices))
    other = PortPlan(FREE_PORTS)

    try:
        assert other.free() == free
    finally:
        other.close()


def test_closing_gives_the_ports_back(ports: PortPlan):
    port = ports.free()

    ports.close()

    bound(port).close()
