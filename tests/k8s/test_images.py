"""The images: what their files promise, and, where they have been built (make images), that each starts."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laps_sd import __version__
from tests.helpers import wait_until
from tests.k8s.helm import ROOT

IMAGES = ROOT / "k8s" / "images"
FILES = ("Dockerfile", "operator.Dockerfile")
BUILDAH = ("buildah", "--storage-driver", "vfs")


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
    assert "\nENTRYPOINT [" in final
    assert "RUN" not in final.replace("RUN_", "")


@pytest.mark.parametrize("name", FILES)
def test_every_package_comes_by_hash_but_torch(name: str) -> None:
    text = (IMAGES / name).read_text(encoding="utf-8")

    installs = re.findall(r"pip install ([^\n\\&;]+)", text)
    open_ones = [one for one in installs if "--require-hashes" not in one and "--no-index" not in one]
    assert open_ones == (["--no-warn-conflicts ${TORCH}"] if name == "Dockerfile" else [])


@pytest.mark.parametrize("component", ["gateway", "scheduler", "operator"])
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


@pytest.mark.long
class TestBuilt:
    """Of the images that are there; the sizes are what `make images` prints."""

    @pytest.fixture
    def container(self, component: str) -> Iterator[str]:
        """Of the image."""
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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

                wait_until(lives, description=f"the {component} answers health", timeout_s=60)
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

    @pytest.mark.parametrize("component", ["gateway", "scheduler"])
    def test_torch_is_not_in_it(self, container: str, component: str) -> None:
        done = self.run(container, "python3", "-c", "import torch")

        assert "ModuleNotFoundError" in done.stderr

    @pytest.mark.parametrize("component", ["operator"])
    def test_the_operator_finds_all_it_needs(self, container: str, component: str) -> None:
        done = self.run(container, "python3", "-c", "import laps_sd_operator.__main__")

        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("component", ["scheduler"])
    def test_the_scheduler_brings_the_bundled_record(self, container: str, component: str) -> None:
        assert "Valkey server" in self.run(container, "valkey-server", "--version").stdout
