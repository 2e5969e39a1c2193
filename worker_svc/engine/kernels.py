"""Attention, products and the steps between them, in C (kernels_body.h): for one thread on the CPU, in single precision or bfloat16.

In bfloat16 are weights, what they are multiplied with, and the KV pool; all that is added up is in single precision.

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
AVX2, AVX512, AVX512_BF16 = 1, 2, 3  # kinds of kernels
USABLE = BUILT and _kernels.use(AVX512_BF16) > 0
GRAIN = 16  # sizes of heads and of norms are multiples of it
MOST_HEAD_SIZE = 256
PAIR = 2  # numbers in bfloat16 that are multiplied together
PANEL = 32  # outputs of a product whose weights lie together
PIECE_NUMBERS = 5  # of a piece in kernels.h
DTYPES = (torch.float32, torch.bfloat16)


def serve(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether attention of such a model is done here."""
    return (
        USABLE
        and device.type == "cpu"
        and dtype in DTYPES
        and head_size % GRAIN == 0
        and head_size <= MOST_HEAD_SIZE
        and torch.get_num_threads() == 1
    )


def multiply(weight: torch.Tensor) -> bool:
    """Whether `Product` takes this weight."""
    return (
        USABLE
        and weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.shape[0] % PANEL == 0
        and weight.shape[1] % PAIR == 0
        and not (
            weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        )  # torch has that multiply
        and torch.get_num_threads() == 1
    )


def attend(query: torch.Tensor, entries: torch.Tensor, pieces: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of packed rows: `query` [total, heads, size] to the same in the pool's type; of rows that are in no piece, zero.

    `entries` [pool rows, 2, key/value heads, size] is one layer of the pool, `pieces` [pieces, PIECE_NUMBERS] int64.
    """
    if query.dtype != torch.float32:
        query = query.float()
    total, heads, size = query.shape
    if query.stride(2) != 1 or query.stride(1) != size:
        query = query.contiguous()
    _, _, kv_heads, _ = entries.shape
    out = entries.new_zeros((total, heads, size))
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
    return out


class Product:
    """x @ weight.T + bias, added up in single precision: `weight` [out, in] of which `multiply` is true."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._columns, self._width = weight.shape
        self._half = weight.dtype == torch.bfloat16
        in_word = PAIR if self._half else 1  # neighbours of `in` that lie together
        panels = weight.reshape(self._columns // PANEL, PANEL, self._width // in_word, in_word)
        self._weight = panels.transpose(1, 2).contiguous()
        self._weight_at = self._weight.data_ptr()
        self._bias = None if bias is None else bias.float().contiguous()
        self._bias_at = 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] of the weight's type to float32 [..., out]."""
        if x.dim() != 2:
            return self(x.reshape(-1, self._width)).view(*x.shape[:-1], self._columns)
        if not x.is_contiguous():
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self._columns))
        _kernels.product(
            x.data_ptr(),
            rows,
            self._width,
            self._weight_at,
            self._bias_at,
            out.data_ptr(),
            self._columns,
            self._half,
        )
        return out


def turn(
    qkv: torch.Tensor, heads: int, pieces: torch.Tensor, turns: torch.Tensor, entries: torch.Tensor
) -> None:
    """Rotate the queries of `qkv` [total, heads + 2 * key/value heads, size] in place, and write rotated keys, and values, to the pool.

    `turns` [positions, 2, size]: see `rotations`. float32, but for `entries`; that and `pieces` as in `attend`.
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
        entries.dtype == torch.bfloat16,
    )


def rotations(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `turn` multiplies with, [positions, 2, size], from cosines and sines [positions, size / 2]."""
    signed = torch.stack([-sin, sin], -1).flatten(1)
    return torch.stack([cos.repeat_interleave(2, 1), signed], 1).contiguous()


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Add `y` to `x` [rows, size] in place, and return x divided by its root mean square, times `weight` [size], as `dtype`.

    All arguments float32, contiguous.
    """
    out = torch.empty_like(x, dtype=dtype)
    rows, size = x.shape
    _kernels.add_norm(
        x.data_ptr(),
        0 if y is None else y.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        dtype == torch.bfloat16,
        epsilon,
    )
    return out


def gated(both: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """silu(gate) * up: `both` [rows, 2 * size], gates first, float32, contiguous, to [rows, size] of `dtype`."""
    rows, size = both.shape
    out = torch.empty((rows, size // 2), dtype=dtype)
    _kernels.gated(both.data_ptr(), out.data_ptr(), rows, size // 2, dtype == torch.bfloat16)
    return out


def gumbel(keys: Sequence[int], weyl: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [rows, vocab]: `Noise.gumbel` in one pass. `weyl` [vocab] int32."""
    out = torch.empty((len(keys), weyl.shape[0]))
    held = array("Q", keys)
    _kernels.gumbel(held.buffer_info()[0], len(keys), weyl.data_ptr(), weyl.shape[0], out.data_ptr())
    return out
