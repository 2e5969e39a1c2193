"""The files that the gateway ships are what the console's sources make."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "console"
SHIPPED = ROOT / "gateway/api/console/static"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.skipif(
    shutil.which("node") is None or not (SOURCES / "node_modules").is_dir(),
    reason="there is no node, or its packages are not installed: make console",
)
def test_the_shipped_files_are_a_fresh_build(tmp_path: Path) -> None:
    subprocess.run(["npx", "tsc", "--noEmit"], cwd=SOURCES, check=True)
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=SOURCES, check=True)
    assert files_of(SHIPPED) == files_of(tmp_path), "run make console"


def test_the_shipped_files_are_small_and_name_no_other_server() -> None:
    files = files_of(SHIPPED)
    assert files.keys() == {"index.html", "console.js", "console.css", "recording.json"}
    assert sum(map(len, files.values())) < 150_000
    for name, octets in files.items():
        text = octets.decode().replace("http://www.w3.org/", "")  # names of XML, which nothing loads
        assert "://" not in text, name
