"""The README of the chart: every value with its default and its meaning, from the comments of values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

KEY = re.compile(r"^(?P<indent> *)(?P<item>- )?(?P<name>[A-Za-z][\w.-]*):(?: (?P<value>.*))?$")
MARK = "# -- "
OPEN = {
    "podSecurityContext",
    "containerSecurityContext",
    "resources",
    "modelVolume",
    "cacheVolume",
    "issuer",
    "schedulerFrom",
    "ports",
    "apiServerPorts",
}
"""Values that are shown whole, like those in one line: what is in them is Kubernetes'."""


class Value(NamedTuple):
    """One row: `poolDefaults.workers.replicas`, its default, and its comment (empty: the one above it is for both).

    A group of values has a row if it has a comment, and no default.
    """

    path: str
    default: str
    meaning: str


def read_values(path: Path) -> Iterator[Value]:
    """Yield all values in the order of the file. Raises ValueError for a line that cannot be read."""
    text = path.read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    stack: list[tuple[int, str]] = []
    comment: list[str] = []
    closed_at: int | None = None  # indentation of an open value, whose content is skipped
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip().removeprefix("- ").strip() if line.strip().startswith("- #") else line.strip()
        if not stripped:
            comment = []
            continue
        if stripped.startswith("#"):
            if stripped.startswith(MARK):
                comment = []
            comment.append(stripped.removeprefix("#").strip().removeprefix("-- "))
            continue
        found = KEY.match(line)
        if found is None:
            if closed_at is not None:
                continue
            raise ValueError(f"line {number} of {path.name} is neither a comment nor a value: {line!r}")
        indent = len(found["indent"]) + (2 if found["item"] else 0)
        if closed_at is not None and indent > closed_at:
            continue
        closed_at = None
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, found["name"]))
        names = [name for _, name in stack]
        default = _at(defaults, names)
        shown = found["name"] in OPEN or (found["value"] or "").startswith("{")
        if shown or not isinstance(default, dict | list) or not default:
            yield Value(_path(names), json.dumps(default, ensure_ascii=False), " ".join(comment))
        elif comment:
            yield Value(_path(names), "", " ".join(comment))
        if shown:
            closed_at = indent
        comment = []


def _at(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[0] if isinstance(values, list) else values
        values = values[name]
    return values


def _path(names: list[str]) -> str:
    return ".".join("pools[]" if name == "pools" and len(names) > 1 else name for name in names)


def page(values: Path, chart: dict[str, Any]) -> str:
    """Return the README."""
    rows = []
    for value in read_values(values):
        default = f"`{value.default}`" if value.default else ""
        rows.append(f"| `{value.path}` | {default} | {value.meaning.replace('|', chr(92) + '|')} |")
    return f"""<!-- Written by k8s/generate.py from values.yaml. Change that, then run it again. -->
# The chart of LAPS-SD

{chart["description"]}

```console
$ helm install demo . -f values-local.yaml     # one of everything on the CPU, with the model pair in the images
$ helm test demo --logs
```

Chart {chart["version"]}, LAPS-SD {chart["appVersion"]}, Kubernetes {chart["kubeVersion"].removesuffix("-0")}, Helm 3.10 or newer. Helm installs the definition of
SpeculativePool (for `operator.enabled`) and never changes it; before an upgrade of the chart:

```console
$ helm show crds CHART | kubectl apply --server-side --force-conflicts -f -
```

docs/kubernetes.md of the project explains installation, sizes, upgrades, access from outside, network policies and alerts.

## Values

`settings` take every setting of a service in camel case (docs/settings.md of the project): `maxDraftLen` is `LAPS_SD_MAX_DRAFT_LEN`.

| value | default | meaning |
|---|---|---|
{chr(10).join(rows)}
"""
