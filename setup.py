"""What pyproject.toml cannot say: with COMPILE_CORE=1 the scheduling core is compiled ahead of time, by mypyc."""

import os
from pathlib import Path
from typing import Any

from setuptools import setup


def extensions() -> list[Any]:
    """The core's modules; none unless asked for, since that takes a C compiler and gives a wheel for this machine only."""
    if os.environ.get("COMPILE_CORE") != "1":
        return []
    from mypyc.build import mypycify

    core = (path for path in Path("scheduler_svc/core").rglob("*.py") if path.name != "__init__.py")
    return list(
        mypycify(
            [*map(str, sorted(core)), "laps_sd/choose.py"], opt_level=os.environ.get("MYPYC_OPT_LEVEL", "3")
        )
    )


setup(ext_modules=extensions())
