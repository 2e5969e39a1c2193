"""The result of `make release`, installed with each extra alone, as for a user without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run outside the checkout, so that the installed package is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LAPS_SD_", "PYTHON"))}
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment | {"COLUMNS": "200"},
        timeout=120,
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # -o: the environment these tests run in is already there.
    variables = (f"DIST={folder}", f"BIN={Path(sys.executable).parent}")
    done = run("make", "-o", "setup", "release", *variables, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def extras_of(wheel: Path) -> dict[str, list[Requirement]]:
    """Return the requirements in the wheel's metadata: without an extra (""), and with each of them."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    names = ["", *(line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: "))]
    return {
        extra: [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]
        for extra in names
    }


def with_all_they_need(requirements: list[Requirement]) -> dict[str, metadata.Distribution]:
    """Return the distributions that an installer would add, found among those installed here."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(requirements)
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        distribution = found.setdefault(name, metadata.distribution(name))
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                waiting.append(needed)
    return found


class Installed:
    """Environment with the wheel, one extra, and nothing else."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        self.extra = extra
        venv.create(folder / "venv", with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        done = run(
            *(sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check"),
            *("install", "--no-deps", "--no-index", "--no-compile", wheel),
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        site = Path(self.run_code("import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        self.brought = with_all_they_need(extras_of(wheel)[extra])
        # Links to the distributions installed here replace a download: the same files an installer would put
        # there.
        for distribution in self.brought.values():
            for file in distribution.files or ():
                if ".." in file.parts or "__pycache__" in file.parts:
                    continue
                place = site / file
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    place.symlink_to(Path(str(distribution.locate_file(file))).resolve())

    def run_code(self, code: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, "-c", code, cwd=self.folder)

    def laps_sd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(self.python.parent / "laps-sd", *arguments, cwd=self.folder)


@pytest.fixture(scope="module", params=["", "gateway", "scheduler", "worker"])
def installed(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel, request.param)


IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {packages}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                # The engine over vLLM is for an environment that has vLLM, `laps-sd top` for one with the extra `top`.
                lacks = {{"vllm": "worker_svc.engine.vllm.", "textual": "laps_sd.cli.top."}}
                if error.name not in lacks or not module.name.startswith(lacks[error.name]):
                    raise
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_every_module_of_a_service_imports_with_its_extra_alone(installed: Installed) -> None:
    service = {"gateway": "gateway", "scheduler": "scheduler_svc"}.get(installed.extra)
    if installed.extra == "worker":
        # Not all: its trainer is for a checkout.
        packages = ["laps_sd", "worker_svc.engine"]
    else:
        packages = ["laps_sd", *([service] if service else [])]

    done = installed.run_code(IMPORT_ALL.format(packages=packages))

    assert done.returncode == 0, done.stderr
    if installed.extra != "worker":
        assert done.stdout == "[]\n"
        assert not {"torch", "transformers"} & set(installed.brought)
        assert installed.run_code("import torch").returncode != 0


def test_a_service_says_its_settings_with_its_extra_alone(installed: Installed) -> None:
    commands = [[installed.extra, "--help"], ["config", installed.extra]] if installed.extra else [["--help"]]
    for command in commands:
        done = installed.laps_sd(*command)

        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_the_type_marker_stubs_scripts_and_models_are_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())

    needed = {"laps_sd/py.typed", "laps_sd/v1/inference_pb2.pyi", "laps_sd/v1/inference_pb2_grpc.pyi"}
    for pattern in (
        "laps_sd/v1/*.py*",
        "scheduler_svc/store/lua/*.lua",
        "worker_svc/demo/target/*",
        "worker_svc/demo/draft/*",
        "gateway/api/console/static/*",
    ):
        matching = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern) if path.is_file()}
        assert matching, pattern
        needed |= matching
    assert needed <= inside, sorted(needed - inside)


def test_the_wheel_holds_the_five_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "laps_sd",
        "gateway",
        "scheduler_svc",
        "worker_svc",
        "laps_vllm",
    }


def test_the_wheel_is_small_enough_for_an_index(wheel: Path) -> None:
    assert wheel.stat().st_size < 60 * 2**20  # PyPI takes 100 MB


def test_the_sdist_holds_what_the_wheel_is_built_from(dist: Path, wheel: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as built:
        files = {name for name in built.namelist() if ".dist-info/" not in name}

    compiled = {name for name in files if name.endswith((".so", ".pyd"))}
    assert files - compiled <= sources
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= sources
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("worker_svc/engine/kernels*")} <= sources
    protos = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("protos/**/*.proto")}
    assert "protos/laps_sd/v1/inference.proto" in protos <= sources


def test_the_license_comes_with_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (license_file,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert b"Apache License" in archive.read(license_file)
