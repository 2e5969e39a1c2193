"""Workers over vLLM: from the fields of a pool to the variables of its workers. Pure functions on dictionaries."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

ARGS = "LAPS_SD_VLLM_ARGS"
GPUS = re.compile(r"(nvidia|amd)\.com/(gpu|mig-)")
"""Names of resources that count GPUs begin with this."""

Object = Mapping[str, Any]


def engine_environment(spec: Object, resources: Object) -> dict[str, str]:
    """Return the variables that name the engine of a pool's workers and their models.

    `resources`: those of the container. An engine that the pool does not name is left to its template.
    """
    models = spec.get("model", {})
    given = {f"LAPS_SD_{role.upper()}": models[role] for role in ("target", "draft") if models.get(role)}
    if spec.get("engine"):
        given["LAPS_SD_ENGINE"] = spec["engine"]
    if spec.get("engine") == "vllm":
        args = copy.deepcopy(dict(spec.get("vllmArgs", {})))
        if "speculative_config" in args and models.get("draft"):
            args["speculative_config"]["model"] = models["draft"]
        if gpus := gpus_of(resources, spec.get("gpuResource", "")):
            args.setdefault("tensor_parallel_size", gpus // args.get("pipeline_parallel_size", 1))
        if args:
            given[ARGS] = json.dumps(args, sort_keys=True)
    return given


def gpus_of(resources: Object, gpu_resource: str = "") -> int:
    """Return the number of GPUs of a container that device plugins bring; Kubernetes refuses one that is not whole.

    `gpu_resource`: name of the resource that counts them; empty: any known one.
    """
    limits = resources.get("limits") or {}
    counts = (
        str(count)
        for name, count in limits.items()
        if name == gpu_resource or (not gpu_resource and GPUS.match(name))
    )
    return sum(int(count) for count in counts if count.isdecimal())


def unequal_ranks(template: Object, gpu_resource: str = "") -> str:
    """Return the problem if workers over vLLM have another number of GPUs than of ranks; empty if they agree.

    A template without readable arguments, or whose GPUs are claimed (DRA) or may be what an unknown device
    plugin brings, is left to the worker, which refuses what cannot be with a sentence.
    """
    worker = next(container for container in template["spec"]["containers"] if container["name"] == "worker")
    resources = worker.get("resources") or {}
    if gpu_resource and gpu_resource not in (resources.get("limits") or {}):
        return f"gpuResource is {gpu_resource}, and resources.limits of the workers does not have it"
    if resources.get("claims") or (not gpu_resource and _only_unknown_devices(resources)):
        return ""
    text = next((one.get("value", "") for one in worker.get("env", []) if one["name"] == ARGS), "")
    try:
        args = json.loads(text)
        ranks = int(args.get("tensor_parallel_size", 1)) * int(args.get("pipeline_parallel_size", 1))
        gpus = gpus_of(resources, gpu_resource)
    except (ValueError, TypeError, AttributeError):
        return ""
    if ranks == max(gpus, 1):
        return ""
    return f"workers have {gpus} GPUs, and vLLM makes {ranks} ranks: tensor_parallel_size must be the number of GPUs"


def _only_unknown_devices(resources: Object) -> bool:
    """Return whether a container has extended resources, of which none is known to count GPUs."""
    extended = [name for name in resources.get("limits") or {} if "/" in name]
    return bool(extended) and not any(GPUS.match(name) for name in extended)
