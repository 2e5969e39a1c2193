"""The images: the guarantees of their files, and, where they have been built (make images),
that each starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laps_sd import __version__
from laps_sd.v1 import inference_pb2_grpc
from tests.conftest import StackMaker
from tests.helpers import free_port, wait_until
from tests.k8s.conftest import first_of
from tests.k8s.helm import ROOT
from tests.system.calls import seeded, stream

IMAGES = ROOT / "k8s" / "images"
FILES = ("Dockerfile", "operator.Dockerfile")
BUILDAH = ("buildah", "--storage-driver", "vfs")
LARGEST_MB = 250
"""Limit for a gateway and a scheduler: a node starts one in seconds."""


@pytest.mark.parametrize("name", FILES)
def test_an_image_keeps_the_promises(name: str) -> None:
    text = (IMAGES / name).read_text(encoding="utf-8")
    final = text.rpartition("\nFROM ")[2]

    assert re.search(r"^ARG BASE=", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    assert "\nUSER 10001:10001\n" in final
    assert "\nSTOPSIGNAL SIGTERM\n" in final
    assert "org.opencontainers.image.revision" in final
    assert '\nENTRYPOINT ["first.sh", ' in final
    assert "\nCOPY k8s/images/first.sh /opt/laps-sd/bin/\n" in final
    assert "RUN" not in final.replace("RUN_", "")


STARTS = "echo starts; exec sleep 600"
HANDLES = "trap 'echo handles; exit 7' TERM; echo starts; while :; do sleep 0.01; done"


@pytest.mark.parametrize(("program", "code"), [(STARTS, 143), (HANDLES, 7)])
def test_the_first_process_hands_on_a_signal_also_to_a_service_that_starts(
    first: list[str], program: str, code: int
) -> None:
    command = [*first, str(IMAGES / "first.sh"), "sh", "-c", program]

    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"starts\n"
        os.kill(first_of(process), signal.SIGTERM)
        try:
            assert process.wait(10) == code
        finally:
            process.kill()


@pytest.mark.parametrize("code", [0, 1, 143])
def test_the_first_process_ends_as_its_service_does(code: int) -> None:
    assert subprocess.run([IMAGES / "first.sh", "sh", "-c", f"exit {code}"]).returncode == code


@pytest.mark.parametrize("name", FILES)
def test_every_package_comes_by_hash_but_torch(name: str) -> None:
    text = (IMAGES / name).read_text(encoding="utf-8")

    installs = re.findall(r"pip install ([^\n\\&;]+)", text)
    open_ones = [one for one in installs if "--require-hashes" not in one and "--no-index" not in one]
    assert open_ones == (["--no-warn-conflicts ${TORCH}"] if name == "Dockerfile" else [])


def test_the_core_is_compiled_beside_the_types_of_what_it_imports() -> None:
    """mypyc ends with an error where mypy finds no types: those of the checkout, and the packages themselves."""
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["dev"]
    installed = re.findall(
        r"/build/bin/pip install .* -r /requirements/([a-z]+)[.]txt",
        (IMAGES / "Dockerfile").read_text(encoding="utf-8"),
    )
    packages = {
        package
        for name in installed
        for package in re.findall(
            r"^([a-z0-9-]+)==", (IMAGES / "requirements" / f"{name}.txt").read_text("utf-8"), re.MULTILINE
        )
    }

    assert {"grpcio", "opentelemetry-sdk", *(one for one in dev if one.startswith("types-"))} <= packages


def test_the_image_of_a_worker_reads_all_that_a_worker_reads() -> None:
    """Nothing can be installed in a pod later."""
    packages = re.findall(
        r"^([a-z0-9-]+)==", (IMAGES / "requirements" / "worker.txt").read_text("utf-8"), re.MULTILINE
    )

    assert {"gguf", "transformers", "huggingface-hub", "opentelemetry-sdk"} <= set(packages)


@pytest.mark.parametrize("component", ["gateway", "scheduler", "operator", "worker-vllm"])
def test_no_torch_where_nothing_is_computed(component: str) -> None:
    packages = re.findall(
        r"^([a-z0-9-]+)==", (IMAGES / "requirements" / f"{component}.txt").read_text("utf-8"), re.MULTILINE
    )

    assert "grpcio" in packages
    assert not {"torch", "transformers", "safetensors", "numpy"} & set(packages)


def test_the_pinned_packages_carry_hashes() -> None:
    for path in (IMAGES / "requirements").glob("*.txt"):
        entries = re.split(r"\n(?=[a-z])", path.read_text(encoding="utf-8"))[1:]
        assert entries
        assert [entry.partition("==")[0] for entry in entries if "--hash=sha256:" not in entry] == [], path


DEFAULT_BASE = "docker.io/library/python:3.11-slim-bookworm"
BASE_DIGEST = "sha256:" + "0123456789abcdef" * 4
SCRIPTED_BUILDAH = f"""#!/bin/sh
echo "$*" >> "$LOG"
case "$1" in
    from) echo base-working-container ;;
    inspect) echo {BASE_DIGEST} ;;
esac
"""
"""A script that prints a registry's possible answer, and records its arguments."""


def scripted_build(folder: Path, *components: str, **variables: str) -> tuple[list[str], list[list[str]]]:
    """Run build.sh without buildah; return what it printed, and the arguments of each call."""
    buildah, log = folder / "buildah", folder / "log"
    buildah.write_text(SCRIPTED_BUILDAH, encoding="utf-8")
    buildah.chmod(0o755)
    done = subprocess.run(
        [IMAGES / "build.sh", *components],
        env={"PATH": os.environ["PATH"], "BUILDAH": str(buildah), "LOG": str(log), **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), [line.split() for line in log.read_text(encoding="utf-8").splitlines()]


def test_a_build_records_the_vllm_that_a_worker_starts_from(tmp_path: Path) -> None:
    """And pulls it only when it is wanted: it has more than ten gigabytes."""
    given = "registry.example.com:5000/vllm-openai:v0.33.0"

    printed, calls = scripted_build(tmp_path, "gateway", "worker-vllm", VLLM_BASE=given)

    assert printed[1] == f"base {given} is registry.example.com:5000/vllm-openai@{BASE_DIGEST}"
    first, second = (call for call in calls if call[0] == "build")
    assert given not in " ".join(first)
    assert second[second.index("--file") + 1] == "k8s/images/worker-vllm.Dockerfile"
    assert {f"BASE={DEFAULT_BASE}", f"VLLM_BASE={given}"} <= set(second)
    assert labels_of(second) >= {
        "org.opencontainers.image.title=laps-sd-worker-vllm",
        f"org.opencontainers.image.base.name={given}",
        f"org.opencontainers.image.base.digest={BASE_DIGEST}",
    }


def labels_of(build: list[str]) -> set[str]:
    return {build[i + 1] for i, word in enumerate(build) if word == "--label"}


@pytest.mark.parametrize(
    ("base", "name"),
    [
        ("", "docker.io/library/python"),
        ("registry.example.com:5000/python:3.12", "registry.example.com:5000/python"),
        ("registry.example.com:5000/python", "registry.example.com:5000/python"),
        (f"registry.example.com/python@{BASE_DIGEST}", "registry.example.com/python"),
        (f"registry.example.com:5000/python:3.12@{BASE_DIGEST}", "registry.example.com:5000/python"),
        ("debian", "localhost/laps-sd-base"),
    ],
)
def test_a_build_prints_and_records_the_digest_of_its_base(tmp_path: Path, base: str, name: str) -> None:
    """`TestBuilt` looks at the labels of real images."""
    printed, calls = scripted_build(tmp_path, "gateway", "operator", BASE=base)

    given = {"": DEFAULT_BASE, "debian": name}.get(base, base)
    assert printed == [f"base {given} is {name}@{BASE_DIGEST}"]
    (pulled,) = (call for call in calls if call[0] == "from")
    assert pulled[-2:] == ["--pull-never" if base == "debian" else "--pull", given]
    builds = [call for call in calls if call[0] == "build"]
    assert len(builds) == 2
    for build, component in zip(builds, ("gateway", "operator"), strict=True):
        assert "--pull-never" in build, "what was looked at is what is built on"
        assert f"BASE={given}" in build
        assert labels_of(build) >= {
            f"org.opencontainers.image.title=laps-sd-{component}",
            f"org.opencontainers.image.base.name={given}",
            f"org.opencontainers.image.base.digest={BASE_DIGEST}",
        }


@pytest.mark.long
@pytest.mark.gpu
async def test_the_workers_entry_point_serves_on_a_gpu(make_stack: StackMaker) -> None:
    """The command of a worker's image, `laps-sd worker`, runs with the device that the chart gives it."""
    torch = pytest.importorskip("torch", reason="make setup")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    stack = make_stack(engine="demo", device="cuda")

    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        request = seeded("What is 7 plus 5?", seed=1, max_tokens=16, ignore_eos=True)
        outcome = await stream(inference_pb2_grpc.InferenceStub(channel), request)

    assert len(outcome.tokens) == 16
    (ready,) = (line for line in stack.log("worker").splitlines() if "engine ready" in line)
    assert "cuda" in ready


@pytest.mark.long
class TestBuilt:
    """Tests of the images that exist; the sizes are those that `make images` prints."""

    @pytest.fixture
    def container(self, component: str) -> Iterator[str]:
        """Start a container of the image."""
        if shutil.which("buildah") is None:
            pytest.skip("buildah is not installed")
        if os.geteuid() != 0:
            pytest.skip("images without a daemon need root")
        image = f"localhost/laps-sd-{component}:{__version__}"
        made = subprocess.run(
            [*BUILDAH, "from", "--pull-never", image], capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            pytest.skip(f"{image} is not built: make images")
        container = made.stdout.strip()
        yield container
        subprocess.run([*BUILDAH, "rm", container], capture_output=True, check=True)

    def run(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BUILDAH, "run", "--isolation=chroot", container, "--", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    @pytest.mark.parametrize("component", ["gateway", "scheduler", "worker"])
    def test_an_image_starts_and_says_that_it_lives(self, container: str, component: str) -> None:
        port = free_port()
        settings = ["--grpc-host", "127.0.0.1", "--grpc-port", "0", "--metrics-port", "0", "--drain-s", "1"]
        process = subprocess.Popen(
            [
                *BUILDAH,
                "run",
                "--isolation=chroot",
                container,
                "--",
                "serve",
                *settings,
                "--health-port",
                str(port),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)

                def lives() -> bool:
                    assert process.poll() is None, process.stdout and process.stdout.read()
                    try:
                        reply = stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=2)
                    except grpc.RpcError:
                        return False
                    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

                wait_until(lives, description=f"the {component} answers health")
        finally:
            process.terminate()
            process.wait(60)

    @pytest.mark.parametrize("component", ["gateway", "scheduler", "worker", "operator"])
    def test_it_runs_as_nobody_in_particular(self, container: str, component: str) -> None:
        shown = subprocess.run(
            [
                *BUILDAH,
                "inspect",
                "--format",
                "{{.OCIv1.Config.User}} {{.Docker.Config.StopSignal}}",
                container,
            ],
            capture_output=True,
            text=True,
            check=True,
        )

        assert shown.stdout.split() == ["10001:10001", "SIGTERM"]

    @pytest.mark.parametrize("component", ["gateway", "scheduler", "worker", "operator"])
    def test_it_records_what_it_was_built_from(self, container: str, component: str) -> None:
        shown = subprocess.run([*BUILDAH, "inspect", container], capture_output=True, text=True, check=True)

        labels = json.loads(shown.stdout)["OCIv1"]["config"]["Labels"]
        assert labels["org.opencontainers.image.title"] == f"laps-sd-{component}"
        assert labels["org.opencontainers.image.version"] == __version__
        assert labels["org.opencontainers.image.base.name"]
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", labels["org.opencontainers.image.base.digest"])

    @pytest.mark.parametrize("component", ["gateway", "scheduler"])
    def test_it_is_small(self, container: str, component: str) -> None:
        """The size is the one that `make images` prints: all that a node downloads and keeps, the base
        included.
        """
        image = f"localhost/laps-sd-{component}:{__version__}"
        shown = subprocess.run(
            [*BUILDAH, "images", "--json", image], capture_output=True, text=True, check=True
        )
        (found,) = json.loads(shown.stdout)
        number, unit = re.fullmatch(r"([\d.]+) ([KMG]B)", found["size"]).groups()  # type: ignore[union-attr]

        assert float(number) * {"KB": 1e-3, "MB": 1, "GB": 1e3}[unit] < LARGEST_MB

    @pytest.mark.parametrize("component", ["gateway", "scheduler", "operator"])
    def test_torch_is_not_in_it(self, container: str, component: str) -> None:
        done = self.run(container, "python3", "-c", "import torch")

        assert "ModuleNotFoundError" in done.stderr

    @pytest.mark.parametrize("component", ["operator"])
    def test_the_operator_starts_and_says_what_it_is_not_told(self, container: str, component: str) -> None:
        """By its entry point, with all that it imports; test_cluster.py runs it on an API server."""
        shown = subprocess.run(
            [*BUILDAH, "inspect", "--format", "{{.OCIv1.Config.Entrypoint}}", container],
            capture_output=True,
            text=True,
            check=True,
        )

        done = self.run(container, *shown.stdout.strip().strip("[]").split())

        assert "LAPS_SD_OPERATOR_NAMESPACE" in done.stderr, done.stderr

    @pytest.mark.parametrize("component", ["gateway", "scheduler", "worker", "operator"])
    def test_nothing_but_its_temporary_folder_can_be_written(self, container: str, component: str) -> None:
        """A read-only root therefore breaks nothing."""
        program = (
            "import os; print([p for p in ('/', '/opt', '/opt/laps-sd', '/usr', '/etc', '/home') "
            "if os.access(p, os.W_OK)], os.access('/tmp', os.W_OK))"
        )

        assert self.run(container, "python3", "-c", program).stdout.split() == ["[]", "True"]

    @pytest.mark.parametrize("component", ["scheduler"])
    def test_the_scheduler_brings_the_bundled_record(self, container: str, component: str) -> None:
        assert "Valkey server" in self.run(container, "valkey-server", "--version").stdout
