"""Gumbel noise for (seed, position, token id) in torch. `counter` holds the definition and the reference in
plain integers.

The bits are exact and equal on every device; the two logarithms after them are single precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.engine.cpu import kernels
from worker_svc.engine.sampling import counter


def signed32(x: int) -> int:
    """Return the int32 with the same bits as the unsigned 32-bit integer x."""
    return x - 2**32 if x >= 2**31 else x


_MIX_A = signed32(counter.MIX_A)
_MIX_B = signed32(counter.MIX_B)


class Noise:
    """The generator for one vocabulary on one device."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        ids = torch.arange(vocab_size, dtype=torch.int64)
        weyl = (ids * counter.WEYL) & counter.M32
        # Two's complement: the upper half of the unsigned range becomes the negative half.
        self._weyl = torch.where(weyl >= 2**31, weyl - 2**32, weyl).to(torch.int32).to(device)  # [vocab]

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
        if kernels.USABLE and self._weyl.device.type == "cpu":
            return kernels.gumbel(keys, self._weyl)
        v = self.bits(keys).to(torch.float32)
        # Signed bits b represent the unsigned number b + 2**32 * (b < 0); as v only has to be uniform, 0 <= b
        # < 2**31 must still map to itself: that is where v is small and needs its resolution.
        v.mul_(2.0**-32).add_(2.0**-33)
        v.add_((v < 0).to(torch.float32)).clamp_(max=counter.V_MAX)
        return v.neg_().log1p_().neg_().log_().neg_()
