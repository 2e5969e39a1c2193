"""What pyproject.toml cannot say: the engine's kernels in C, and modules compiled ahead of time by mypyc. With
COMPILE_CORE=1 these are the scheduling core and the path of a report through its leader, for which mypy needs the
types of all that they import; with COMPILE_CORE=core the core alone, which imports the standard library and librt only. With
PURE_PYTHON=1 neither: the wheel then suits every Python and machine."""

import os
import platform
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

KERNELS = Extension(
    "worker_svc.engine.cpu._kernels",
    [
        f"worker_svc/engine/cpu/{name}.c"
        for name in ("kernels", "kernels_avx2", "kernels_avx512", "kernels_bf16", "kernels_amx", "threads")
    ],
    depends=[
        f"worker_svc/engine/cpu/{name}.h"
        for name in ("kernels", "kernels_body", "kernels_quantised", "kernels_choose", "threads")
    ],
    extra_compile_args=[
        "-O3",
        "-std=gnu11",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-psabi",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,  # without a C compiler the worker computes the same with torch's operators
)


PATH_OF_A_REPORT = (
    "scheduler_svc/leader/live.py",
    "scheduler_svc/leader/sessions.py",
    "scheduler_svc/store/codec.py",
    "scheduler_svc/store/log.py",
    "scheduler_svc/store/tails.py",
    "scheduler_svc/wire/replies.py",
    "scheduler_svc/wire/reports.py",
)
"""Modules of the leader that do something for each request of each report."""


def compiled_core() -> list[Any]:
    """The modules to compile; none unless asked for, since that takes a minute."""
    wanted = os.environ.get("COMPILE_CORE", "")
    if wanted not in ("1", "core"):
        return []
    from mypyc.build import mypycify

    interpreted = "__init__.py", "native.py"
    core = (path for path in Path("scheduler_svc/core").rglob("*.py") if path.name not in interpreted)
    inside_vllm = (Path(f"laps_vllm/{name}.py") for name in ("merged_steps", "one_worker"))
    return list(
        mypycify(
            [
                *map(str, sorted(core)),
                *(PATH_OF_A_REPORT if wanted == "1" else ()),
                "laps_sd/contract/choose.py",
                "laps_sd/contract/ends.py",
                # The scheduler's image is built without this package.
                *(str(path) for path in inside_vllm if path.exists()),
            ],
            opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3"),
        )
    )


X86 = platform.machine().lower() in ("x86_64", "amd64")

PURE = os.environ.get("PURE_PYTHON") == "1"

setup(ext_modules=[] if PURE else [*([KERNELS] if X86 else []), *compiled_core()])
