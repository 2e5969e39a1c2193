"""Lower bounds of a forward: the device's bandwidth and peak rate."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from bench._shapes import Shape

DEVICES: dict[str, tuple[float, float]] = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100 80GB HBM3": (3.35e12, 989e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100 PCIe": (2.0e12, 756e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100-SXM4-40GB": (1.555e12, 312e12),
    "A100 80GB PCIe": (1.935e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
    "A10": (0.6e12, 125e12),
    "RTX 4090": (1.008e12, 165e12),
}
"""Bytes per second and dense bfloat16 operations per second, by a part of the device's name. From the makers'
data sheets."""


@dataclass(frozen=True)
class Limits:
    """Upper limits of the device."""

    bytes_per_s: float
    flops_per_s: float


def limits_of(name: str, options: argparse.Namespace) -> Limits | None:
    """Return the given limits, otherwise those of the longest name that occurs in the device's; None if it is
    unknown.
    """
    if options.bandwidth is not None:
        return Limits(options.bandwidth * 1e9, options.peak * 1e12)
    known = [part for part in DEVICES if part in name]
    return Limits(*DEVICES[max(known, key=len)]) if known else None


def least_s(shape: Shape, limits: Limits, *, item_bytes: int, rows: int, kv_tokens: int, batch: int) -> float:
    """Return the least seconds of one forward: `rows` tokens of `batch` sequences, which attend to
    `kv_tokens` in all.
    """
    moved = shape.multiplied * item_bytes + (kv_tokens + rows) * shape.kv_bytes(item_bytes)
    per_key = (
        4 * shape.layers * shape.heads * shape.head_size
    )  # a product with the key and one with the value
    done = 2 * shape.multiplied * rows + per_key * kv_tokens * rows / batch
    return max(moved / limits.bytes_per_s, done / limits.flops_per_s)
