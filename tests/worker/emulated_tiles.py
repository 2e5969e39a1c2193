"""Products by tiles on machines without AMX: the kernel's own code, with the instructions emulated."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from worker_svc.engine.cpu import kernels

SOURCE = Path(kernels.__file__).with_name("kernels_amx.c")


def use() -> bool:
    """Let the kernels for bfloat16, which must be in use, multiply by emulated tiles. Return False if this machine cannot run or
    build them.
    """
    if kernels._kernels.use(kernels.AVX512_BF16) < kernels.AVX512_BF16 or shutil.which("cc") is None:
        return False
    pointer = ctypes.c_void_p.in_dll(ctypes.CDLL(kernels._kernels.__file__), "by_tiles")
    pointer.value = ctypes.cast(_library().multiply_tiles, ctypes.c_void_p).value
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="laps-sd-tiles-") as folder:
        built = Path(folder) / "tiles.so"
        flags = os.environ.get("CFLAGS", "").split()
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O3", "-march=x86-64-v4", "-std=gnu11", *flags, "-DLAPS_EMULATE_AMX", SOURCE, "-o", built],
            check=True,
        )  # fmt: skip
        return ctypes.CDLL(str(built))
