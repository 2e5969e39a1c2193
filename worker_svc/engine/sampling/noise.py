"""Gumbel noise for (seed, position, token id) in torch. `counter` holds the definition and the reference in
plain integers.

The bits are exact and equal on every device; the two logarithms after them are single precision.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from worker_svc.engine.cpu import kernels
from worker_svc.engine.sampling import counter


def signed32(x: int) -> int:
    """Return the int32 with the same bits as the unsigned 32-bit integer x."""
    return x - 2**32 if x >= 2**31 else x


_MIX_A = signed32(counter.MIX_A)
_MIX_B = signed32(counter.MIX_B)


def weyl_of(vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """Return id * WEYL modulo 2**32 of each token id, int32 [vocab]."""
    weyl = (torch.arange(vocab_size, dtype=torch.int64) * counter.WEYL) & counter.M32
    # Two's complement: the upper half of the unsigned range becomes the negative half.
    return torch.where(weyl >= 2**31, weyl - 2**32, weyl).to(torch.int32).to(device)


class Noise:
    """The generator for one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._weyl = weyl_of(vocab_size, device)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._weyl.shape[0]

    @property
    def by_kernels(self) -> bool:
        """True if `kernels` generates it."""
        return kernels.USABLE and self._weyl.device.type == "cpu"

    def bits(self, keys: Sequence[int]) -> torch.Tensor:
        """Return the 32 uniform bits of every token under each key, as int32 [rows, vocab]."""
        halves = [(signed32(key & counter.M32), signed32(key >> 32)) for key in keys]
        half = torch.tensor(halves, dtype=torch.int32, device=self._weyl.device)  # [rows, 2]
        x = self._weyl ^ half[:, :1]  # [rows, vocab]
        # >> is arithmetic on signed integers; the mask makes it logical.
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
        x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).add_(half[:, 1:])
        x.mul_(_MIX_B)
        return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))

    def gumbel(self, keys: Sequence[int]) -> torch.Tensor:
        """Return standard Gumbel noise, float32 [rows, vocab]; `keys` are those of `counter.row_key`."""
        if self.by_kernels:
            return kernels.gumbel(keys, self._weyl)
        v = self.bits(keys).to(torch.float32)
        # Signed bits b represent the unsigned number b + 2**32 * (b < 0); as v only has to be uniform, 0 <= b
        # < 2**31 must still map to itself: that is where v is small and needs its resolution.
        v.mul_(2.0**-32).add_(2.0**-33)
        v.add_((v < 0).to(torch.float32)).clamp_(max=counter.V_MAX)
        return v.neg_().log1p_().neg_().log_().neg_()

    def fill(self, keys: array[int], rows: Sequence[int], out: torch.Tensor) -> None:
        """Write the noise of some rows of `out`, float32 [rows, vocab], `by_kernels`; `keys`: of all rows."""
        kernels.gumbel_rows(keys, rows, self._weyl, out)


class NoiseOfRows:
    """The noise of the choice rows of a round. On the CPU a row's is generated when it is needed first: a row
    whose choice is restricted needs it for a few tokens only."""

    def __init__(self, noise: Noise, keys: Sequence[int]) -> None:
        """`keys`: of each row, those of `counter.row_key`."""
        self.keys = array("Q", keys)
        self._noise = noise
        self._filled: torch.Tensor | None = None
        # Rows of it that are not generated yet.
        self._missing: set[int] = set()

    def of(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Return float32 [all rows, vocab], in which these rows (None: all) are valid."""
        if self._filled is None and (rows is None or not self._noise.by_kernels):
            self._filled, self._missing = self._noise.gumbel(self.keys), set()
        elif self._filled is None:
            self._filled = torch.empty((len(self.keys), self._noise.vocab_size))
            self._missing = set(range(len(self.keys)))
        if self._missing:
            wanted = self._missing.intersection(range(len(self.keys)) if rows is None else rows)
            if wanted:
                self._noise.fill(self.keys, sorted(wanted), self._filled)
                self._missing -= wanted
        return self._filled
