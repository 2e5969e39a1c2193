"""Writes what Kubernetes files repeat from elsewhere: settings into the chart's schema, and pinned packages
per image.

    python k8s/generate.py            # write
    python k8s/generate.py --check    # write nothing; exit 1 when something is out of date

* `definitions` of chart/values.schema.json: one property for each setting of the three services that a user
  of the chart may give. A field `max_draft_len` is LAPS_SD_MAX_DRAFT_LEN and `settings.maxDraftLen`. What the
  chart decides itself is in `OWNED`.
* chart/README.md: every value, from the comments of chart/values.yaml.
* images/requirements/*.txt: of constraints.txt, with its hashes, what each image needs and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gateway.settings import GatewaySettings
from k8s.values_page import page
from laps_sd.service import config
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

K8S = Path(__file__).parent
SERVICES: dict[str, type[config.Settings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}

_SERVING = {
    "grpc_host": "every address of the pod",
    "grpc_port": "fixed",
    "metrics_port": "fixed",
    "health_port": "fixed",
    "drain_s": "drainSeconds",
    "tls_cert": "tls",
    "tls_key": "tls",
    "tls_client_ca": "tls",
    "otlp_endpoint": "monitoring.otlpEndpoint",
}
_LINK = dict.fromkeys(("link_tls", "link_tls_ca", "link_tls_cert", "link_tls_key"), "tls.links") | {
    "scheduler_seeds": "names of the schedulers' pods"
}
_LENGTHS = {"predict_lengths": "lengths.predict", "length_key": "lengths.keySecret"}
OWNED: dict[str, dict[str, str]] = {
    "gateway": {
        **_SERVING,
        **_LINK,
        **_LENGTHS,
        "shard": "pools[].shards",
        "model": "pools[].model",
        "shards_file": "pools[].shards",
        "http_port": "fixed",
        "api_keys_file": "gateway.apiKeysSecret",
        "anonymous": "gateway.anonymous",
        "tokenizer_dir": "pools[].target",
        "adapters": "pools[].adapters",
        "context_tokens": "pools[].contextTokens",
    },
    "scheduler": {
        **_SERVING,
        **_LENGTHS,
        "redis_url": "redis",
        "redis_password_file": "redis.external.passwordSecret",
        "redis_sentinel_user": "redis.external.sentinelUser",
        "redis_sentinel_password_file": "redis.external.sentinelPasswordSecret",
        "redis_tls_ca": "redis.external.caSecret",
        "redis_tls_cert": "redis.external.clientSecret",
        "redis_tls_key": "redis.external.clientSecret",
        "shard": "pools[].shards",
        "pool": "pools[].name",
        "client_roles": "tls.links.roles",
        "advertise_address": "the pod's name",
    },
    "worker": {
        **_SERVING,
        **_LINK,
        "scheduler_seeds_file": "names of the schedulers' pods",
        "pool": "pools[].name",
        "worker_name": "the pod's name",
        "engine": "pools[].workers.engine",
        "vllm_args": "pools[].workers.vllmArgs",
        "target": "pools[].target",
        "draft": "pools[].draft",
        "adapters": "pools[].adapters",
        "context_tokens": "pools[].contextTokens",
    },
}
"""Settings that the chart decides, and from which value: giving them twice could contradict."""

IMAGE_EXTRAS = {
    "gateway": ("gateway", "otel"),
    "scheduler": ("scheduler", "otel"),
    "worker": ("worker", "otel", "gguf"),
    "worker-vllm": ("otel",),
    "operator": ("operator",),
}
FROM_ELSEWHERE = {"torch"}
"""Not in constraints.txt: its builds differ by machine. An image's build argument names it, its own needs are
listed."""


def camel(name: str) -> str:
    """max_draft_len as values.yaml spells it: maxDraftLen."""
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def schema() -> dict[str, Any]:
    """values.schema.json with the settings of today."""
    found: dict[str, Any] = json.loads((K8S / "chart" / "values.schema.json").read_text(encoding="utf-8"))
    for service, cls in SERVICES.items():
        found["definitions"][f"{service}Settings"] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                camel(field.name): property_of(cls, field)
                for field in dataclasses.fields(cls)
                if field.name not in OWNED[service]
            },
        }
    return found


def property_of(cls: type[config.Settings], field: dataclasses.Field[Any]) -> dict[str, Any]:
    """One setting as a JSON schema."""
    hint, optional = config.without_none(config.field_types(cls)[field.name])
    found: dict[str, Any]
    if get_origin(hint) is Literal:
        found = {"enum": list(get_args(hint))}
    elif get_origin(hint) is tuple:
        found = {"type": "array", "items": {"type": "string"}}
    else:
        found = {"type": {int: "integer", float: "number", bool: "boolean"}.get(hint, "string")}
    for bound in ("minimum", "maximum"):
        if field.metadata.get(bound) is not None:
            found[bound] = field.metadata[bound]
    if optional and found.get("type") != "string":
        found = {"anyOf": [found, {"const": ""}]}
    unit = config.unit(field)
    note = f" ({unit})" if unit else ""
    return {
        "description": config.variable(field.name) + note + ": " + field.metadata.get("help", ""),
        **found,
    }


def pinned() -> dict[str, str]:
    """Canonical name to its lines in constraints.txt."""
    blocks: dict[str, str] = {}
    name = ""
    for line in (K8S.parent / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            name = canonicalize_name(Requirement(line.removesuffix(" \\")).name)
            blocks[name] = ""
        blocks[name] += line + "\n"
    return blocks


def needed(texts: Sequence[str]) -> set[str]:
    """Canonical names of these packages and of all that they need on Linux, by the metadata of what is
    installed."""
    waiting = [Requirement(text) for text in texts]
    found: dict[str, set[str]] = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        fresh = {"", *requirement.extras} - found.get(name, set())
        if not fresh:
            continue
        found[name] = found.get(name, set()) | fresh
        more = TORCH_NEEDS if name in FROM_ELSEWHERE else requires(name)
        waiting += [
            dependency
            for dependency in map(Requirement, more)
            if (marker := dependency.marker) is None
            or any(marker.evaluate({"extra": e, **python}) for e in fresh for python in PYTHONS)
        ]
    return set(found) - FROM_ELSEWHERE


def requires(name: str) -> Sequence[str]:
    """Return the requirements in a package's metadata. A package for older Pythons is not installed here, and
    has none."""
    try:
        return distribution(name).requires or ()
    except PackageNotFoundError:
        return ()


PYTHONS: tuple[dict[str, str], ...] = ({}, {"python_version": "3.11", "python_full_version": "3.11.2"})
"""Python versions that an image may have: this one, and the oldest, Debian 12's."""
TORCH_NEEDS = ("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")
"""Requirements of every build of torch 2.13 on Linux; the CUDA builds need further packages."""


def requirements(image: str) -> str:
    """The file that an image's packages are installed from; "build": what its wheel is built with."""
    blocks = pinned()
    whole = tomllib.loads((K8S.parent / "pyproject.toml").read_text(encoding="utf-8"))
    project = whole["project"]
    if image == "build":
        # mypy brings mypyc, which compiles by the types of what is imported.
        types = [name for name in whole["dependency-groups"]["dev"] if name.startswith("types-")]
        names = needed(["setuptools", "mypy", *types])
    else:
        optional = [text for extra in IMAGE_EXTRAS[image] for text in project["optional-dependencies"][extra]]
        names = needed(project["dependencies"] + optional)
    missing = names - set(blocks)
    if missing:
        raise SystemExit(f"constraints.txt lacks {', '.join(sorted(missing))}, which the image {image} needs")
    head = "# Written by k8s/generate.py from constraints.txt: what the image needs, with hashes.\n"
    return head + "".join(blocks[name] for name in sorted(names))


def files() -> Iterator[tuple[Path, str]]:
    """Path and text of everything that is written here."""
    yield K8S / "chart" / "values.schema.json", json.dumps(schema(), indent=2) + "\n"
    about = yaml.safe_load((K8S / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    yield K8S / "chart" / "README.md", page(K8S / "chart" / "values.yaml", about)
    for image in ("build", *IMAGE_EXTRAS):
        yield K8S / "images" / "requirements" / f"{image}.txt", requirements(image)


def main(arguments: Sequence[str]) -> int:
    """Writes or checks; the exit code."""
    check = "--check" in arguments
    stale = [
        (path, text)
        for path, text in files()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        verb = "is out of date: run make docs" if check else "written"
        sys.stderr.write(f"{path.relative_to(K8S.parent)} {verb}\n")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
