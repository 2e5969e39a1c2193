"""The operator as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from tests.helpers import free_port
from tests.k8s.helm import ROOT


class OperatorProcess:
    """`python -m laps_sd_operator`, as its account."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, pod: str = "operator-0") -> None:
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "k8s" / "operator")]),
            "KUBECONFIG": str(kubeconfig),
            "LAPS_SD_OPERATOR_NAMESPACE": namespace,
            "LAPS_SD_OPERATOR_HEALTH_PORT": str(free_port()),
            "LAPS_SD_OPERATOR_METRICS_PORT": str(free_port()),
            "POD_ID": pod,
        }
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def twin(self, **environment: str) -> OperatorProcess:
        """Return another pod of the same account; not started."""
        found = OperatorProcess(
            Path(self.environment["KUBECONFIG"]),
            self.environment["LAPS_SD_OPERATOR_NAMESPACE"],
            self.log.with_suffix(".twin.log"),
            pod="operator-1",
        )
        found.environment |= environment
        return found

    @property
    def pod(self) -> str:
        """Return its name in the election."""
        return self.environment["POD_ID"]

    def said(self) -> str:
        """Return its log."""
        return self.log.read_text(encoding="utf-8")

    def health(self, path: str = "/healthz") -> tuple[int, str]:
        """Return status and text that Kubernetes' probes get."""
        url = f"http://127.0.0.1:{self.environment['LAPS_SD_OPERATOR_HEALTH_PORT']}{path}"
        try:
            with urllib.request.urlopen(url) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def is_healthy(self) -> bool:
        """Return whether it is ready by its probe."""
        try:
            return self.health()[0] == 200
        except OSError:
            return False

    def metrics(self) -> str:
        """Return the text of its metrics."""
        with urllib.request.urlopen(self.metrics_url) as answer:
            return str(answer.read().decode())

    @property
    def metrics_url(self) -> str:
        """Return the address of its metrics."""
        return f"http://127.0.0.1:{self.environment['LAPS_SD_OPERATOR_METRICS_PORT']}/metrics"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "laps_sd_operator"], env=self.environment, stdout=log, stderr=log
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End the process as a lost node does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait until it ends by itself; return the exit code."""
        assert self._process is not None
        return self._process.wait(60)

    def stop(self) -> int:
        """Stop the process as Kubernetes does; return the exit code."""
        if self._process is None:
            return 0
        self._process.terminate()
        return self._process.wait(30)


def kubeconfig_of(url: str, path: Path) -> Path:
    """Write a kubeconfig of an API server that asks nobody who it is."""
    found = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path.write_text(yaml.safe_dump(found), encoding="utf-8")
    path.chmod(0o600)  # Helm warns of others
    return path
