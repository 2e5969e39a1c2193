"""An upgrade that would leave requests behind or could not end is refused with a sentence, unless its values accept it by name.

The objects of the release before are in an API server without schemas: an upgrade that is not refused ends after it was
rendered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.k8s.api_server import ApiServer
from tests.k8s.conftest import GPU_POOL, MATRIX
from tests.k8s.helm import Refused, find, objects
from tests.k8s.operator_process import kubeconfig_of

RENDERED = "unable to build kubernetes objects from release manifest"
"""Helm's error once everything is rendered."""
POOLS = [{"name": name, "model": "laps-sd-demo"} for name in ("a", "b")]
TWO_POOLS: dict[str, Any] = {"pools": POOLS}
TWO_SHARDS: dict[str, Any] = {"poolDefaults": {"shards": 2}}
DRAINING: dict[str, Any] = {"poolDefaults": {"shards": 2, "drainingShards": [1]}}
URL: dict[str, Any] = {
    "redis": {"bundled": {"enabled": False}, "external": {"url": "redis://one.example:6379/0"}}
}
SECRET: dict[str, Any] = {"redis": {"bundled": {"enabled": False}, "external": {"existingSecret": "redis"}}}
GPUS: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": 4}}}


def vllm_pool(*, args: dict[str, Any] | None = None, **workers: Any) -> dict[str, Any]:
    """Return values with a pool over vLLM that has these arguments of vLLM and values of its workers."""
    found = {"engine": "vllm", "vllmArgs": args or {}, "resources": {"limits": {"nvidia.com/gpu": 1}}}
    pool = {"name": "big", "model": "m", "target": {"path": "m"}, "modelVolume": {"emptyDir": {}}}
    return {"pools": [pool | {"workers": found | workers}]}


def gpu_pool(*, target: dict[str, Any] | None = None, **workers: Any) -> dict[str, Any]:
    """Return values with a pool of our own engine that has a worker, with this target and these values."""
    pool = GPU_POOL | {"target": GPU_POOL["target"] | (target or {})}
    more = {"replicas": 1, "autoscaling": {"keda": "off"}}
    return {"pools": [pool | {"workers": GPU_POOL["workers"] | more | workers}]}


@pytest.fixture
def upgrade(helm3: Any, tmp_path: Path) -> Any:
    def run(before: dict[str, Any], after: dict[str, Any], release: str = "demo") -> str:
        """Return why Helm ended: the chart's sentence, or RENDERED."""
        with ApiServer().serve_beside() as server:
            server.run(lambda: server.add_rendered(helm3.render(before)))
            config = kubeconfig_of(server.url, tmp_path / "config")
            with pytest.raises(Refused) as refused:
                helm3.upgrade(after, kubeconfig=config, release=release)
        return str(refused.value)

    return run


@pytest.mark.parametrize("name", MATRIX)
def test_an_upgrade_that_changes_nothing_goes_on(upgrade: Any, name: str) -> None:
    values, _ = MATRIX[name]

    assert RENDERED in upgrade(values, values)


@pytest.mark.parametrize(
    ("before", "after", "sentence", "accepted"),
    [
        pytest.param(
            TWO_POOLS,
            {"pools": POOLS[:1]},
            'The pool "b" is in the release and not in the values.',
            "pool/b",
            id="a pool is removed",
        ),
        pytest.param(
            TWO_POOLS,
            {"pools": [POOLS[0], POOLS[1] | {"name": "c"}]},
            'The pool "b" is in the release and not in the values.',
            "pool/b",
            id="a pool gets another name",
        ),
        pytest.param(
            TWO_SHARDS,
            {},
            'The shard "demo-s1" would be removed without having drained',
            "shard/demo-s1",
            id="a shard is removed that has not drained",
        ),
        pytest.param(
            {"poolDefaults": {"shards": 3, "drainingShards": [1]}},
            {},
            'The shard "demo-s2" would be removed without having drained',
            "shard/demo-s2",
            id="two shards are removed and one has drained",
        ),
        pytest.param(
            {}, URL, 'from "bundled" to "redis://one.example:6379/0"', "record", id="an external record"
        ),
        pytest.param(
            URL, {}, 'from "redis://one.example:6379/0" to "bundled"', "record", id="a bundled record"
        ),
        pytest.param(
            {},
            {"fullnameOverride": "other"},
            'from "demo-laps-sd-redis" to "other-redis", a server without data',
            "record",
            id="a bundled record of another name",
        ),
        pytest.param(
            URL, SECRET, 'from "redis://one.example:6379/0" to "secret redis"', "record", id="another record"
        ),
    ],
)
def test_what_loses_requests_must_be_meant(
    upgrade: Any, before: dict[str, Any], after: dict[str, Any], sentence: str, accepted: str
) -> None:
    refusal = upgrade(before, after)

    assert sentence in refusal
    assert f"set acceptLosses=[{accepted}]" in refusal
    assert sentence in upgrade(before, after | {"acceptLosses": ["pool/other", "shard/other"]})
    assert RENDERED in upgrade(before, after | {"acceptLosses": [accepted]})


def test_a_shard_that_has_drained_is_removed(upgrade: Any) -> None:
    assert RENDERED in upgrade(DRAINING, {})


def test_a_release_beside_it_is_no_matter(upgrade: Any) -> None:
    assert RENDERED in upgrade(TWO_POOLS, {}, release="other")


@pytest.mark.parametrize("size", ["8Gi", ""])
def test_a_claim_that_kubernetes_would_not_change_is_refused_before_anything_changes(
    upgrade: Any, size: str
) -> None:
    refusal = upgrade({}, {"redis": {"bundled": {"storage": size}}})

    assert 'differ from those of the StatefulSet demo-laps-sd-redis ("4Gi", "")' in refusal
    assert "--cascade=orphan" in refusal


def test_a_claim_whose_class_is_no_longer_named_is_refused_too(upgrade: Any) -> None:
    refusal = upgrade({"redis": {"bundled": {"storageClassName": "fast"}}}, {})

    assert 'differ from those of the StatefulSet demo-laps-sd-redis ("4Gi", "fast")' in refusal


def test_the_record_of_an_earlier_release_keeps_what_kubernetes_does_not_change(
    helm3: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "rendered.yaml"
    ordered = {"spec": {"podManagementPolicy": "OrderedReady"}}
    with ApiServer().serve_beside() as server:
        server.run(lambda: server.add_rendered(helm3.render({})))
        server.run(lambda: server.change("statefulsets", "demo-laps-sd-redis", ordered))
        config = kubeconfig_of(server.url, tmp_path / "config")
        with pytest.raises(Refused, match=RENDERED):
            helm3.upgrade({}, kubeconfig=config, release="demo", save=saved)

    record = find(objects(saved.read_text()), "StatefulSet", "redis")
    assert record["spec"]["podManagementPolicy"] == "OrderedReady"


@pytest.mark.parametrize(
    ("stored", "given"),
    [("4Gi", "4096Mi"), ("2560Mi", "2.5Gi"), ("2Ti", "2048Gi"), ("10G", "1e10"), ("2Pi", "2Pi")],
)
def test_a_size_is_the_same_in_the_form_in_which_kubernetes_stores_it(
    upgrade: Any, stored: str, given: str
) -> None:
    before, after = ({"redis": {"bundled": {"storage": size}}} for size in (stored, given))

    assert RENDERED in upgrade(before, after)


def test_a_name_that_would_be_cut_off_is_refused(upgrade: Any) -> None:
    refusal = upgrade({}, {}, release="a-release-of-a-long-name")

    assert '"a-release-of-a-long-name-laps-sd", is longer than 22 characters' in refusal
    assert 'For a release that exists already it is "a-release-of-a-long-na"' in refusal


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        pytest.param(
            gpu_pool(),
            gpu_pool(target={"revision": "c" * 40}),
            f"LAPS_SD_TARGET from /models/meta-llama--Llama-3.1-8B-Instruct-{'a' * 40}"
            f" to /models/meta-llama--Llama-3.1-8B-Instruct-{'c' * 40}",
            id="another revision of the target",
        ),
        pytest.param(
            gpu_pool(),
            gpu_pool(settings={"dtype": "float32"}),
            "LAPS_SD_DTYPE from bfloat16 to float32",
            id="another dtype",
        ),
        pytest.param(
            vllm_pool(),
            vllm_pool(args={"quantization": "fp8"}),
            'vllmArgs.quantization from none to "fp8"',
            id="quantised weights in vLLM",
        ),
        pytest.param(
            vllm_pool(),
            vllm_pool(**GPUS),
            "vllmArgs.tensor_parallel_size from 1 to 4",
            id="more GPUs",
        ),
    ],
)
def test_a_rolling_update_that_would_stop_at_its_first_pod_is_refused(
    upgrade: Any, before: dict[str, Any], after: dict[str, Any], change: str
) -> None:
    refusal = upgrade(before, after)
    pool = after["pools"][0]["name"]

    assert f'The workers of pool "{pool}" would get another model pair ({change})' in refusal
    assert change in upgrade(before, after | {"acceptLosses": ["pair/other"]})
    assert RENDERED in upgrade(before, after | {"acceptLosses": [f"pair/{pool}"]})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(gpu_pool(replicas=0), gpu_pool(settings={"dtype": "float32"}), id="no worker runs"),
        pytest.param(
            gpu_pool(), gpu_pool(settings={"dtype": "bfloat16", "slots": 8}), id="the pair is the same"
        ),
        pytest.param(
            vllm_pool(args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
            vllm_pool(
                args={
                    "gpu_memory_utilization": 0.8,
                    "speculative_config": {
                        "num_speculative_tokens": 3,
                        "method": "ngram",
                        "prompt_lookup_max": 4,
                    },
                }
            ),
            id="arguments of vLLM that choose no token",
        ),
    ],
)
def test_workers_that_keep_their_pair_or_are_gone_are_updated(
    upgrade: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert RENDERED in upgrade(before, after)


@pytest.mark.parametrize("release", ["1st", "a.b"])
def test_a_name_that_no_service_can_have_is_refused(upgrade: Any, release: str) -> None:
    refusal = upgrade({}, {}, release=release)

    assert f'"{release}-laps-sd", begins with a digit or has a dot' in refusal


AUTOSCALED: dict[str, Any] = {"poolDefaults": {"workers": {"autoscaling": {"hpa": True}}}}
OPERATED: dict[str, Any] = {"operator": {"enabled": True}}


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param({}, AUTOSCALED, "Deployment", id="autoscaling begins"),
        pytest.param(AUTOSCALED, AUTOSCALED, "Deployment", id="nothing changes"),
        pytest.param(AUTOSCALED | OPERATED, AUTOSCALED | OPERATED, "SpeculativePool", id="of the operator"),
        pytest.param(AUTOSCALED, AUTOSCALED | OPERATED, "SpeculativePool", id="the operator begins"),
    ],
)
def test_an_upgrade_keeps_the_number_that_an_autoscaler_has_set(
    helm3: Any, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], kind: str
) -> None:
    name, saved = "demo-laps-sd-demo-worker", tmp_path / "rendered.yaml"
    with ApiServer().serve_beside() as server:
        server.run(lambda: server.add_rendered(helm3.render(before)))
        scaled = "speculativepools" if "operator" in before else "deployments"
        server.run(lambda: server.change(scaled, name, {"spec": {"replicas": 5}}))
        config = kubeconfig_of(server.url, tmp_path / "config")
        with pytest.raises(Refused, match=RENDERED):
            helm3.upgrade(after, kubeconfig=config, release="demo", save=saved)

    assert find(objects(saved.read_text()), kind, "demo-worker")["spec"]["replicas"] == 5
