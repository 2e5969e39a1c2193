"""`LAPS_SD_CLIENT_ROLES`: its syntax, the callers that it allows, and a role for every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laps_sd.errors import PermissionDenied
from laps_sd.keda import externalscaler_pb2
from laps_sd.service.config import ConfigError, load
from laps_sd.v1 import admin_pb2, gateway_link_pb2, inference_pb2, worker_link_pb2
from scheduler_svc.roles import ClientRoles, names_of, roles_of_method
from scheduler_svc.settings import SchedulerSettings

GIVEN = (
    "gateway=gateway.prod",
    "worker=*.worker.prod",
    "worker=spiffe://prod/Worker",
    "operator=ops.example",
)


def methods(*modules: Any) -> list[str]:
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


def test_every_method_of_the_port_has_been_decided_upon() -> None:
    admin = methods(admin_pb2)
    for_gateways = [
        f"/laps_sd.v1.Admin/{method}" for method in ("ExplainRequest", "ListQueue", "ListWorkers")
    ]

    assert {
        method: roles_of_method(method) for method in methods(gateway_link_pb2, worker_link_pb2, admin_pb2)
    } == {
        "/laps_sd.v1.GatewayLink/Connect": {"gateway"},
        "/laps_sd.v1.WorkerLink/Connect": {"worker"},
        **{method: {"operator"} for method in admin},
        **{method: {"gateway", "operator"} for method in for_gateways},
    }
    assert set(for_gateways) <= set(admin)
    assert {roles_of_method(method) for method in methods(externalscaler_pb2)} == {None}
    assert {roles_of_method(method) for method in methods(inference_pb2)} == {
        frozenset()
    }  # not listed: no caller


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("gateway.prod", {"gateway"}),
        ("GATEWAY.prod", {"gateway"}),
        ("a.worker.prod", {"worker"}),
        ("worker.prod", set()),
        ("a.b.worker.prod", set()),
        (".worker.prod", set()),
        ("a@b.worker.prod", set()),
        ("gateway.prod.example", set()),
        ("gatewayxprod", set()),
        ("gateway.prod\n", set()),
        ("spiffe://prod/Worker", {"worker"}),
        ("spiffe://prod/worker", set()),
        ("spiffe://prod/Worker/x", set()),
        ("*.worker.prod", set()),
        ("", set()),
    ],
)
def test_a_name_fits_as_a_whole(name: str, roles: set[str]) -> None:
    assert ClientRoles(GIVEN).of([name]) == roles


def test_only_verified_dns_names_and_uris_count() -> None:
    auth = {
        "x509_common_name": [b"gateway.prod"],
        "x509_subject_alternative_name": [b"gateway.prod"],
        "peer_email": [b"gateway.prod"],
        "peer_dns": [b"a.worker.prod", b"\xff"],
        "peer_uri": [b"spiffe://prod/Worker"],
    }

    assert names_of(auth) == ["a.worker.prod", "\ufffd", "spiffe://prod/Worker"]
    assert names_of({}) == []


class Call:
    """The part of a context that the check reads."""

    def __init__(self, *names: bytes) -> None:
        self._names = names

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"peer_dns": self._names}


def test_a_refusal_names_the_names_and_the_role() -> None:
    roles = ClientRoles(GIVEN)

    roles.check("/laps_sd.v1.WorkerLink/Connect", Call(b"a.worker.prod"))
    with pytest.raises(PermissionDenied, match=r"not act as gateway: .* \(a\.worker\.prod\)"):
        roles.check("/laps_sd.v1.GatewayLink/Connect", Call(b"a.worker.prod"))
    with pytest.raises(PermissionDenied, match=r"not act as operator: .* \(none\)"):
        roles.check("/laps_sd.v1.Admin/DrainWorker", Call())
    with pytest.raises(PermissionDenied, match="not act as anybody"):
        roles.check("/laps_sd.v1.Admin2/New", Call(b"ops.example"))


def test_without_the_setting_no_role_is_needed() -> None:
    ClientRoles(()).check("/laps_sd.v1.Admin/DrainWorker", Call())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gateway", "must be role=name with one of gateway, worker, operator, got 'gateway'"),
        ("root=x", "must be role=name with one of gateway, worker, operator, got 'root=x'"),
        ("gateway=a b", "must give a DNS name, with *. for one label, or a URI, got 'a b'"),
        ("gateway=*", "must give a DNS name"),
        ("gateway=a.*.b", "must give a DNS name"),
        ("gateway=", "must give a DNS name"),
        ("gateway=g.test", "names no worker: none could connect"),
        ("worker=w.test", "names no gateway: none could connect"),
    ],
)
def test_a_wrong_setting_is_a_sentence(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SchedulerSettings, {}, environ={"LAPS_SD_CLIENT_ROLES": given})

    assert f"LAPS_SD_CLIENT_ROLES {said}" in str(refused.value)


def test_roles_need_certificates(tmp_path: Path) -> None:
    environ = {"LAPS_SD_CLIENT_ROLES": ",".join(GIVEN)}
    with pytest.raises(ConfigError, match="LAPS_SD_CLIENT_ROLES needs LAPS_SD_TLS_CLIENT_CA"):
        load(SchedulerSettings, {}, environ=environ)

    mutual = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_client_ca")}
    assert load(SchedulerSettings, mutual, environ=environ).client_roles == GIVEN
