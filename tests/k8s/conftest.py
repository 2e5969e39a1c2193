"""Both Helms, and values that between them use everything the chart has."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.helm import CHART, CRDS, ROOT, TOOLS, Helm3, Helm4, helm3_program, helm4_installed


def missing(what: str) -> None:
    """Skip the test on a laptop; fail in CI, where nothing may be missing."""
    reason = f"{what} is not installed: make setup k8s-tools"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def helm3() -> Helm3:
    program = helm3_program()
    if program is None:
        missing("Helm 3")
    assert program is not None
    return Helm3(program)


@pytest.fixture(scope="session")
def helm4() -> Iterator[Helm4]:
    if not helm4_installed():
        missing("Helm 4")
    helm = Helm4()
    yield helm
    helm.close()


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def kubernetes() -> None:
    """Check that the schemas of Kubernetes are there."""
    if not (TOOLS / "python" / "kubernetes_validate").is_dir():
        missing("kubernetes-validate")


@pytest.fixture(scope="session")
def first() -> list[str]:
    """Return the command before one that is to be the first process of a container: the kernel drops signals that it
    does not handle.
    """
    found = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which(found[0]) is None or subprocess.run([*found, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make namespaces")
    return found


def first_of(process: subprocess.Popen[Any]) -> int:
    """Return the id of the first process that the command of `first` has started."""
    (found,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(found)


ISSUER = {"mode": "certManager", "issuer": {"name": "ours", "kind": "ClusterIssuer"}}
GPU_POOL: dict[str, Any] = {
    "name": "llama",
    "model": "llama-3.1-8b",
    "target": {"repo": "meta-llama/Llama-3.1-8B-Instruct", "revision": "a" * 40},
    "draft": {"repo": "meta-llama/Llama-3.2-1B-Instruct", "revision": "b" * 40},
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
    "huggingFaceTokenSecret": "hub",
    "contextTokens": 16384,
    "workers": {
        "replicas": 0,
        "drainSeconds": 120,
        "settings": {"dtype": "bfloat16", "slots": 32, "kvMemoryBytes": 20_000_000_000},
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "64Gi"}},
        "maxSurge": 0,
        "maxUnavailable": 1,
        "runtimeClassName": "nvidia",
        "priorityClassName": "serving",
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "models"},
        "autoscaling": {"keda": "on", "maxReplicas": 8, "authenticationRef": "keda"},
    },
}
EVERYTHING: dict[str, Any] = {
    "image": {"registry": "registry.example.com/ai/", "tag": "1.2.3", "pullSecrets": [{"name": "pull"}]},
    "pools": [{"name": "demo", "model": "laps-sd-demo"}, GPU_POOL],
    "gateway": {
        "autoscaling": {"enabled": True},
        "settings": {"maxStreams": 200000, "schedulerWaitS": 45},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
        "nodeSelector": {"x": "y"},
        "tolerations": [{"key": "k", "operator": "Exists"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "models"},
        "priorityClassName": "serving",
    },
    "scheduler": {"replicas": 3, "settings": {"policy": "srpt-length"}, "podAnnotations": {"a": "b"}},
    "redis": {
        "bundled": {"enabled": False},
        "external": {
            "existingSecret": "redis",
            "caSecret": "redis-ca",
            "clientSecret": "redis-client",
            "passwordSecret": "redis-password",
            "ports": [6380],
        },
    },
    "tls": {"links": ISSUER, "public": ISSUER | {"dnsNames": ["models.example.com"]}},
    "networkPolicy": {
        "gatewayFrom": [{"namespaceSelector": {}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
    "serviceAccount": {"annotations": {"a": "b"}},
    "monitoring": {
        "podMonitor": "on",
        "rules": "on",
        "dashboard": True,
        "otlpEndpoint": "http://collector.monitoring:4317",
    },
}


def local_preset() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values-local.yaml").read_text(encoding="utf-8"))


EXAMPLES = ROOT / "k8s" / "examples"


def example(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))


def secrets_everywhere() -> dict[str, Any]:
    values = copy.deepcopy(EVERYTHING)
    values["tls"] = {
        "links": {"mode": "secrets", "secrets": {"scheduler": "a", "gateway": "b", "worker": "c"}},
        "public": {"mode": "secrets", "secret": "public"},
    }
    values["redis"] = {
        "bundled": {"enabled": False},
        "external": {"url": "rediss://redis.example.com:6379/0"},
    }
    return values


def operated() -> dict[str, Any]:
    return secrets_everywhere() | {
        "operator": {"enabled": True},
        "tls": {
            "links": {
                "mode": "secrets",
                "secrets": {"scheduler": "a", "gateway": "b", "worker": "c", "operator": "d"},
            }
        },
    }


def additions() -> dict[str, Any]:
    """Return values with all that users can add, at each component."""
    extra = {
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "initContainers": [
            {
                "name": "first",
                "image": "busybox",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {"limits": {"memory": "16Mi"}},
            }
        ],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "podLabels": {"team": "models"},
        "podAnnotations": {"a": "b"},
        "priorityClassName": "serving",
    }
    return {
        "pools": [
            {"name": "demo", "model": "laps-sd-demo", "hosts": ["demo.example.com"]},
            GPU_POOL
            | {
                "download": "job",
                "hosts": ["a.example.com", "b.example.com"],
                "grpcHosts": ["grpc.example.com"],
                "workers": extra,
            },
        ],
        "gateway": {
            **extra,
            "service": {
                "type": "LoadBalancer",
                "loadBalancerClass": "example.com/lb",
                "loadBalancerSourceRanges": ["10.0.0.0/8"],
                "externalTrafficPolicy": "Local",
            },
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"c": "d"},
                "tlsSecret": "doors",
            },
            "routes": {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}]},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        },
        "scheduler": extra,
        "operator": {"enabled": True, **extra},
        "redis": {"bundled": extra},
        "commonLabels": {"department": "ai"},
        "commonAnnotations": {"contact": "ai@example.com"},
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}
        ],
    }


MATRIX: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "defaults": ({}, ()),
    "defaults, everything installed in the cluster": ({}, CRDS),
    "local preset": (local_preset(), ()),
    "everything": (EVERYTHING, CRDS),
    "everything without what it needs in the cluster": (EVERYTHING, ()),
    "secrets instead of certificates": (secrets_everywhere(), CRDS),
    "operator": ({"operator": {"enabled": True}}, ()),
    "operator with certificates and KEDA": (operated(), CRDS),
    "several shards": (
        EVERYTHING | {"pools": [{"name": "demo", "model": "laps-sd-demo", "shards": 3}, GPU_POOL]},
        CRDS,
    ),
    "several shards with the operator": (
        {"operator": {"enabled": True}, "poolDefaults": {"shards": 3, "drainingShards": [2]}},
        (),
    ),
    "workers scaled by an adapter's metrics": (
        {"poolDefaults": {"workers": {"autoscaling": {"hpa": True}}}},
        (),
    ),
    "vLLM": (example("values-vllm-8b"), ()),
    "vLLM on several GPUs": (example("values-vllm-70b"), ()),
    "vLLM with the operator": (example("values-vllm-70b") | {"operator": {"enabled": True}}, ()),
    "model in a volume": (
        {
            "pools": [
                {
                    "name": "own",
                    "model": "own",
                    "target": {"path": "target"},
                    "modelVolume": {"hostPath": {"path": "/models"}},
                }
            ]
        },
        (),
    ),
    "doors, models by a Job, and what users add": (additions(), ()),
    "bundled record in memory, one scheduler, no policies": (
        {
            "redis": {"bundled": {"storage": ""}},
            "scheduler": {"replicas": 1},
            "networkPolicy": {"enabled": False},
            "podDisruptionBudget": {"enabled": False},
        },
        (),
    ),
}
