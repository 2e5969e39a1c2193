"""The chart as a package: what is in it, and its page of values."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.values_page import page, read_values
from tests.k8s.conftest import missing
from tests.k8s.helm import CHART, helm3_program


def test_a_package_has_the_chart_and_nothing_else(tmp_path: Path) -> None:
    program = helm3_program()
    if program is None:
        missing("Helm 3")
    subprocess.run([str(program), "package", "--destination", str(tmp_path), str(CHART)], check=True)
    [package] = tmp_path.iterdir()

    with tarfile.open(package) as archive:
        names = {name.removeprefix("laps-sd/") for name in archive.getnames()}

    ours = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()} - {".helmignore"}
    assert names - {".helmignore"} == ours
    assert {"README.md", "values.schema.json", "crds/speculativepools.yaml", "values-local.yaml"} <= names


def test_the_page_has_every_value_with_its_default() -> None:
    def leaves(values: Any, path: str) -> list[str]:
        if isinstance(values, list) and values and isinstance(values[0], dict) and path == "pools":
            return leaves(values[0], "pools[]")
        if not isinstance(values, dict) or not values:
            return [path]
        return [
            leaf
            for name, inner in values.items()
            for leaf in leaves(inner, f"{path}.{name}" if path else name)
        ]

    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = [value for value in read_values(CHART / "values.yaml") if value.default]

    paths = [row.path for row in rows]
    lacking = [
        leaf
        for leaf in leaves(values, "")
        if not any(leaf == path or leaf.startswith(f"{path}.") for path in paths)
    ]
    assert lacking == []
    assert len(paths) == len(set(paths)) > 150
    assert next(row for row in rows if row.path == "gateway.service.port").default == "50051"


def test_a_comment_belongs_to_the_value_below_it(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("# A group.\na:\n  # -- First,\n  #    with | in it\n  b: 1\n\n  c: {}\n")

    assert [*read_values(path)] == [
        ("a", "", "A group."),
        ("a.b", "1", "First, with | in it"),
        ("a.c", "{}", ""),
    ]
    about = {"description": "", "version": "1", "appVersion": "1", "kubeVersion": ">=1.27.0-0"}
    assert "| `a.b` | `1` | First, with \\| in it |" in page(path, about)


def test_a_line_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("a: 1\n'quoted key': 2\n")

    with pytest.raises(ValueError, match=r"line 2 of values\.yaml is neither a comment nor a value"):
        [*read_values(path)]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_chart_that_contains_it_switches_it_on_and_off(helm3: Any, tmp_path: Path, enabled: bool) -> None:
    shutil.copytree(CHART, tmp_path / "charts" / "laps-sd")
    dependency = {"name": "laps-sd", "version": "*", "condition": "laps-sd.enabled"}
    parent = {"apiVersion": "v2", "name": "all", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent), encoding="utf-8")

    assert bool(helm3.render({"laps-sd": {"enabled": enabled}}, chart=tmp_path)) is enabled
