"""Attention, and the steps between products, in C (kernels_body.h): for one thread on the CPU.

What a row comes to depends on its own sequence alone, bit for bit: not on other rows, on how many there are, nor on where blocks lie. Where this does
not serve (other devices, CPUs without AVX2, more threads, heads of odd sizes, no C compiler when the package was built), torch's operators do.
"""

from __future__ import annotations

import platform
from array import array
from collections.abc import Sequence

import torch

try:
    from worker_svc.engine import _kernels
except ImportError:  # built without a C compiler
    _kernels = None  # type: ignore[assignment]

BUILT = _kernels is not None
MISSED = not BUILT and platform.machine().lower() in ("x86_64", "amd64")  # they could have been built
USABLE = BUILT and _kernels.use(16) > 0  # the widest vectors that this machine has
GRAIN = 16  # sizes of heads and of norms are multiples of it
MOST_HEAD_SIZE = 256
PANEL = 32  # outputs of a product whose weights lie together
PIECE_NUMBERS = 5  # of a piece in kernels.h


def serve(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether attention of such a model is done here."""
    return (
        USABLE
        and device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and head_size % GRAIN == 0
        and head_size <= MOST_HEAD_SIZE
        and torch.get_num_threads() == 1
    )


def multiply(weight: torch.Tensor) -> bool:
    """Whether `Product` takes this weight."""
    return (
        USABLE
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[0] % PANEL == 0
        and torch.get_num_threads() == 1
    )


def attend(query: torch.Tensor, entries: torch.Tensor, pieces: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of packed rows: `query` [total, heads, size] to [total, heads, size]; of rows that are in no piece, zero.

    `entries` [pool rows, 2, key/value heads, size] is one layer of the pool, `pieces` [pieces, PIECE_NUMBERS] int64.
    """
    dtype = query.dtype
    if dtype != torch.float32:
        query = query.float()
    total, heads, size = query.shape
    if query.stride(2) != 1 or query.stride(1) != size:
        query = query.contiguous()
    _, _, kv_heads, _ = entries.shape
    out = query.new_zeros((total, heads, size))
    _kernels.attend(
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        entries.data_ptr(),
        pieces.data_ptr(),
        pieces.shape[0],
        heads,
        kv_heads,
        size,
        entries.dtype == torch.bfloat16,
        scale,
    )
    return out if dtype == torch.float32 else out.to(dtype)


class Product:
    """x @ weight.T + bias in single precision, for weights of whole panels of outputs: `weight` [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._columns, self._width = weight.shape
        panels = weight.reshape(self._columns // PANEL, PANEL, self._width)
        self._weight = panels.transpose(1, 2).contiguous()
        self._weight_at = self._weight.data_ptr()
        self._bias = None if bias is None else bias.contiguous()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] to [..., out]."""
        if x.dim() != 2:
            return self(x.reshape(-1, self._width)).view(*x.shape[:-1], self._columns)
        if not x.is_contiguous():
            x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty((rows, self._columns))
        _kernels.product(
            x.data_ptr(), rows, self._width, self._weight_at, self._bias_at, out.data_ptr(), self._columns
        )
        return out


def turn(
    qkv: torch.Tensor, heads: int, pieces: torch.Tensor, turns: torch.Tensor, entries: torch.Tensor
) -> None:
    """Rotate the queries of `qkv` [total, heads + 2 * key/value heads, size] in place, and write rotated keys, and values, to the pool.

    `turns` [positions, 2, size]: see `rotations`. All float32; `pieces` and `entries` as in `attend`.
    """
    _kernels.turn(
        qkv.data_ptr(),
        pieces.data_ptr(),
        pieces.shape[0],
        heads,
        entries.shape[2],
        qkv.shape[2],
        turns.data_ptr(),
        entries.data_ptr(),
    )


def rotations(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `turn` multiplies with, [positions, 2, size], from cosines and sines [positions, size / 2]."""
    signed = torch.stack([-sin, sin], -1).flatten(1)
    return torch.stack([cos.repeat_interleave(2, 1), signed], 1).contiguous()


def add_norm(x: torch.Tensor, y: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Add `y` to `x` [rows, size] in place, and return x divided by its root mean square. float32, contiguous."""
    out = torch.empty_like(x)
    rows, size = x.shape
    _kernels.add_norm(x.data_ptr(), 0 if y is None else y.data_ptr(), out.data_ptr(), rows, size, epsilon)
    return out


def gated(both: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: `both` [rows, 2 * size], gates first, to [rows, size]. float32, contiguous."""
    rows, size = both.shape
    out = both.new_empty((rows, size // 2))
    _kernels.gated(both.data_ptr(), out.data_ptr(), rows, size // 2)
    return out


def gumbel(keys: Sequence[int], weyl: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, vocab]: `Noise.gumbel` in one pass. `weyl` [vocab] int32."""
    out = torch.empty((len(keys), weyl.shape[0]))
    held = array("Q", keys)
    _kernels.gumbel(held.buffer_info()[0], len(keys), weyl.data_ptr(), weyl.shape[0], out.data_ptr())
    return out
