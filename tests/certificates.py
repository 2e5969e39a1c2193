"""A CA, and a certificate of it for 127.0.0.1 that serves both ends: ca.pem, cert.pem and key.pem. And a stranger's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def write_certificates(folder: Path) -> Path:
    """Skips the test where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca", "-days", "2")
    run("req", *key, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=test")
    (folder / "extra").write_text("subjectAltName=IP:127.0.0.1")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
    run("x509", "-req", "-in", "request.pem", *signed, "-out", "cert.pem")
    return folder
