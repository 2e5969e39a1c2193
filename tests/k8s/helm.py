"""The chart rendered by Helm 3 and by Helm 4, as Python objects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "k8s" / "chart"
TOOLS = Path(sys.prefix) / "k8s-tools"
NAMESPACE = "models"
CRDS = ("monitoring.coreos.com/v1", "keda.sh/v1alpha1", "cert-manager.io/v1", "laps-sd.dev/v1alpha1")


class Refused(Exception):
    """Failure of Helm to render, with its reason."""


def objects(text: str) -> list[dict[str, Any]]:
    return [found for found in yaml.load_all(text, Loader=_LOADER) if found]


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find(rendered: Sequence[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """Return one object; the name without the release's prefix."""
    wanted = f"demo-laps-sd-{name}" if name else "demo-laps-sd"
    for found in rendered:
        if found["kind"] == kind and found["metadata"]["name"] == wanted:
            return found
    names = [f"{found['kind']}/{found['metadata']['name']}" for found in rendered]
    raise LookupError(f"no {kind}/{wanted} among {', '.join(names)}")


class Helm3:
    """The command line of Helm 3."""

    name = "helm 3"

    def __init__(self, program: str) -> None:
        self._program = program

    def _run(self, *arguments: str, values: dict[str, Any]) -> str:
        done = subprocess.run(
            [self._program, *arguments, "--values", "-"],
            input=json.dumps(values),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise Refused(done.stderr + done.stdout)
        return done.stdout

    def render(
        self,
        values: dict[str, Any],
        crds: Sequence[str] = (),
        chart: Path = CHART,
        kubernetes: str = "1.30",
        release: str = "demo",
        namespace: str = NAMESPACE,
    ) -> list[dict[str, Any]]:
        more = [part for crd in crds for part in ("--api-versions", crd)]
        version = ("--kube-version", f"{kubernetes}.0")
        text = self._run(
            "template", release, str(chart), *version, "--namespace", namespace, *more, values=values
        )
        return objects(text)

    def upgrade(
        self, values: dict[str, Any], *, kubeconfig: Path, release: str, save: Path | None = None
    ) -> None:
        """Upgrade or install a release of the cluster, and save what was rendered for it. Refused if the chart or
        the cluster refuses.
        """
        where = ("--namespace", NAMESPACE, "--kubeconfig", str(kubeconfig))
        saving: tuple[str, ...] = ()
        if save is not None:
            program = save.with_suffix(".sh")
            program.write_text(f"#!/bin/sh\nexec tee {save}\n")
            program.chmod(0o755)
            saving = ("--post-renderer", str(program))
        self._run("upgrade", "--install", "--skip-crds", release, str(CHART), *where, *saving, values=values)

    def lint(self, values: dict[str, Any]) -> None:
        self._run("lint", str(CHART), "--strict", values=values)

    def close(self) -> None:
        pass


class Helm4:
    """The library, in a process of its own. It knows no extra API versions offline: objects that are `auto`
    are not rendered.
    """

    name = "helm 4"

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("helm4.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(TOOLS / "python")},
        )

    def _ask(self, do: str, values: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"do": do, "chart": str(CHART), "values": values, "namespace": NAMESPACE}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "refused" in said:
            raise Refused(said["refused"])
        return said

    def render(self, values: dict[str, Any], crds: Sequence[str] = ()) -> list[dict[str, Any]]:
        return objects(self._ask("render", values)["manifests"])

    def notes(self, values: dict[str, Any]) -> str:
        """Return the notes after an installation. The command line shows them only with a cluster."""
        return str(self._ask("render", values)["notes"])

    def lint(self, values: dict[str, Any]) -> None:
        messages = self._ask("lint", values)["messages"]
        if messages:
            raise Refused("\n".join(messages))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def helm3_program() -> str | None:
    """Return the program of `make k8s-tools`, or the one in the path."""
    own = TOOLS / "helm"
    return str(own) if own.exists() else shutil.which("helm")


def helm4_installed() -> bool:
    return (TOOLS / "python" / "helm_python").is_dir()
