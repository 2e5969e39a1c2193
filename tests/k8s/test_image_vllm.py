"""The image of a worker over vLLM. It cannot be built here: its file, its wheel, and how the two are joined."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from laps_vllm.versions import SUPPORTED, check_version
from tests.k8s.helm import ROOT

IMAGES = ROOT / "k8s" / "images"
TEXT = (IMAGES / "worker-vllm.Dockerfile").read_text(encoding="utf-8")
BUILD, FINAL = TEXT.split("\nFROM ")[1:]
NEVER = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "llguidance", "vllm"}
"""Packages that are vLLM's to choose."""


@pytest.fixture(scope="module")
def join() -> ModuleType:
    spec = importlib.util.spec_from_file_location("join", IMAGES / "join.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from the sources that the file copies, by its own command."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for given, to in re.findall(r"^COPY (?!k8s)(.+) (/source/\S*)$", BUILD, re.MULTILINE):
        for one in given.split():
            copy = shutil.copytree if (ROOT / one).is_dir() else shutil.copy
            copy(ROOT / one, source / to.removeprefix("/source/") if (ROOT / one).is_dir() else source)
    (options,) = re.findall(r"PURE_PYTHON=1 /build/bin/pip (wheel .+) --wheel-dir", BUILD)
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *options.split(), "--wheel-dir", str(dist), "."],
        cwd=source,
        env={"PATH": "", "PURE_PYTHON": "1"},
        check=True,
        capture_output=True,
    )
    (found,) = dist.iterdir()
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


class TestFile:
    def test_it_starts_from_a_vllm_that_is_supported(self) -> None:
        (base,) = re.findall(r"^ARG VLLM_BASE=(\S+)", TEXT, re.MULTILINE)
        name, _, tag = base.rpartition(":v")

        assert name == "docker.io/vllm/vllm-openai"
        check_version(tag, {})
        assert all(one in TEXT.partition("ARG VLLM_BASE")[0].splitlines()[-1] for one in SUPPORTED)

    def test_it_keeps_the_promises_of_the_other_images(self) -> None:
        assert re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE) == ["${BASE}", "${VLLM_BASE}"]
        assert re.findall(r"^USER (\S+)", FINAL, re.MULTILINE)[-1] == "10001:10001"
        assert re.findall(r"^WORKDIR (\S+)", FINAL, re.MULTILINE)[-1] == "/tmp"
        assert "\nSTOPSIGNAL SIGTERM\n" in FINAL
        assert "org.opencontainers.image.revision" in FINAL
        assert TEXT.count("PIP_COMPILE=0") == 2
        assert TEXT.endswith('ENTRYPOINT ["first.sh", "laps-sd", "worker", "--engine", "vllm"]\n')

    def test_it_says_that_it_has_not_been_built(self) -> None:
        said = " ".join(TEXT.replace("#", "").split())

        assert "NOT TESTED: over vLLM's image this has never been built and never run on a GPU by us" in said

    def test_the_user_has_a_name_and_all_caches_are_in_one_volume(self) -> None:
        """torch and others look the user up; without an entry that is a KeyError."""
        environment = dict(re.findall(r"([A-Z_]+)=(\S+)", FINAL.partition("\nENV ")[2]))

        assert "useradd --uid 10001 --gid 10001" in FINAL
        assert "--home-dir /cache" in FINAL
        assert "chown 10001:10001 /cache" in FINAL
        for name in ("HOME", "VLLM_CACHE_ROOT", "HF_HOME"):
            assert environment[name].split("/")[1] == "cache", name

    def test_every_package_comes_by_hash_or_from_a_file(self) -> None:
        installs = re.findall(r"pip install ([^\n\\&;]+)", TEXT)

        assert [one for one in installs if "--require-hashes" not in one] == []

    def test_what_it_copies_reaches_the_builder(self) -> None:
        allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE):
            for one in line.split():
                parents = [one, *map(str, Path(one).parents)]
                assert any(f"!{parent}" in allowed for parent in parents), one


class TestWheel:
    def test_it_suits_every_python(self, wheel: Path) -> None:
        assert wheel.name.endswith("-py3-none-any.whl")

    def test_it_has_the_worker_the_scheduler_for_vllm_and_its_core(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())

        assert {
            "worker_svc/__main__.py",
            "laps_vllm/scheduler.py",
            "scheduler_svc/core/scheduler.py",
        } <= names

    def test_the_pins_are_what_it_needs_and_nothing_of_vllms(
        self, join: ModuleType, metadata: Message
    ) -> None:
        pins = {
            name: Requirement(block.partition(" \\")[0])
            for name, block in join.pinned((IMAGES / "requirements" / "worker-vllm.txt").read_text()).items()
        }
        needed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
        own = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": "otel"})]

        assert len(own) > 8
        for one in own:
            (pin,) = pins[canonicalize_name(one.name)].specifier
            assert pin.version in one.specifier, one
        assert not NEVER & set(pins)

    def test_it_requires_the_grpc_and_protobuf_of_its_stubs(self, metadata: Message) -> None:
        """A lower version in vLLM's image would count as good enough, and fail at the first import."""
        (protobuf,) = set(
            re.findall(
                r"# Protobuf Python Version: (\S+)",
                "".join(path.read_text() for path in (ROOT / "laps_sd" / "v1").glob("*_pb2.py")),
            )
        )
        (grpcio,) = set(
            re.findall(
                r"GRPC_GENERATED_VERSION = '(\S+)'",
                "".join(path.read_text() for path in (ROOT / "laps_sd" / "v1").glob("*_pb2_grpc.py")),
            )
        )
        lowest = {
            one.name: [Version(part.version) for part in one.specifier if part.operator == ">="]
            for one in map(Requirement, metadata.get_all("Requires-Dist", []))
        }

        assert (lowest["grpcio"], lowest["protobuf"]) == ([Version(grpcio)], [Version(protobuf)])


Packages = Mapping[str, tuple[str, Sequence[str]]]


class TestJoin:
    """`lacking` for made-up environments: version and requirements of each package."""

    def lacking(self, join: ModuleType, here: Packages, *texts: str) -> set[str]:
        found: set[str] = join.lacking(texts, ("otel",), here.get)
        return found

    def test_what_is_there_and_allowed_stays(self, join: ModuleType) -> None:
        here = {"rich": ("14.1", ["pygments>=2.13"]), "pygments": ("2.19", [])}

        assert self.lacking(join, here, "rich>=14") == set()

    def test_what_is_missing_is_lacking(self, join: ModuleType) -> None:
        assert self.lacking(join, {}, "structlog>=25", "uvloop>=0.21") == {"structlog", "uvloop"}

    def test_what_is_excluded_is_lacking(self, join: ModuleType) -> None:
        here: Packages = {"protobuf": ("6.33.5", []), "grpcio": ("1.90.0.dev1", [])}

        assert self.lacking(join, here, "protobuf>=7.35.1,<8", "grpcio>=1.85.1") == {"protobuf"}

    def test_so_is_what_a_package_that_stays_needs(self, join: ModuleType) -> None:
        here: Packages = {"typer": ("0.20", ["Rich>=10", "shellingham"]), "rich": ("9.0", [])}

        assert self.lacking(join, here, "typer>=0.19") == {"rich", "shellingham"}

    def test_other_extras_and_other_systems_count_for_nothing(self, join: ModuleType) -> None:
        texts = ('torch>=2; extra == "worker"', 'a; extra == "otel"', 'b; platform_system == "Windows"')

        assert self.lacking(join, {}, *texts) == {"a"}

    def test_packages_that_need_each_other_end(self, join: ModuleType) -> None:
        here = {"a": ("1", ["b"]), "b": ("1", ["a"])}

        assert self.lacking(join, here, "a") == set()

    def test_pins_are_read_with_their_hashes(self, join: ModuleType) -> None:
        pins = join.pinned((IMAGES / "requirements" / "worker-vllm.txt").read_text(encoding="utf-8"))

        assert pins["grpcio"].startswith("grpcio==")
        assert all("--hash=sha256:" in block for block in pins.values())

    def test_nothing_is_lacking_here(self, join: ModuleType, wheel: Path) -> None:
        assert join.lacking(join.requirements_of(str(wheel)), ("otel",)) == set()
