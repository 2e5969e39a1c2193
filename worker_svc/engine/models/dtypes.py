"""The dtype that a model is computed in, where the settings leave it open."""

from __future__ import annotations

from pathlib import Path

import torch

from laps_sd.service.model_dir import stored_dtype
from worker_svc.engine.cpu import kernels

SERVED = ("float32", "bfloat16", "float16")


def dtype_for(setting: str, target: Path, device: torch.device) -> str:
    """Return the dtype of target and draft. Raises ValueError for a setting that there is not.

    `auto`: that of the target's config.json where the device computes in it without detours, else float32.
    """
    if setting in SERVED:
        return setting
    if setting != "auto":
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {setting!r}")
    stored = stored_dtype(target)
    return stored if stored in SERVED and _fast(stored, device) else "float32"


def _fast(dtype: str, device: torch.device) -> bool:
    """Return True if a device computes in this dtype at least as fast as in float32.

    Our kernels do in bfloat16 with AVX-512, whether or not it has instructions for it; with AVX2 they read half
    of the bytes, but a round of many rows takes longer (0.8 of float32 for one row, 1.4 for 16, 1.7 for 64).
    """
    if dtype == "float32" or device.type != "cpu":
        return True
    if dtype == "float16":
        return False
    return kernels.KIND >= kernels.AVX512 or torch.cpu._is_amx_tile_supported() or _torch_has_it()


def _torch_has_it() -> bool:
    """Return True if torch multiplies in bfloat16 by instructions of this CPU, of whatever kind it is."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
