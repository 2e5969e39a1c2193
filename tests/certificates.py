"""A CA, and a certificate of it for 127.0.0.1 that serves both ends: ca.pem, cert.pem and key.pem. And others with names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from laps_sd.wire import Tls


def write_certificates(folder: Path) -> Path:
    """Skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(
        folder,
        "req",
        "-x509",
        *_KEY,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=test ca",
        "-days",
        "2",
    )
    shown = certificate(folder, "test", "IP:127.0.0.1")
    assert shown.cert is not None and shown.key is not None
    shown.cert.rename(folder / "cert.pem")
    shown.key.rename(folder / "key.pem")
    return folder


def certificate(folder: Path, common_name: str, *alternatives: str) -> Tls:
    """One more of the CA in this folder, with these subject alternative names ("DNS:x.test", "URI:…", "IP:…")."""
    name = common_name.replace(" ", "-")
    request = ("-keyout", f"{name}.key", "-out", f"{name}.request", "-subj", f"/CN={common_name}")
    _openssl(folder, "req", *_KEY, *request)
    (folder / "extra").write_text(f"subjectAltName={','.join(alternatives)}" if alternatives else "")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
    _openssl(folder, "x509", "-req", "-in", f"{name}.request", *signed, "-out", f"{name}.pem")
    return Tls(ca=folder / "ca.pem", cert=folder / f"{name}.pem", key=folder / f"{name}.key")


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
