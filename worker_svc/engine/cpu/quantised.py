"""Weights of 8 or 4 bits: how they are made of others, and how the kernels in C have them.

The inputs of an output are divided into groups of equally many. A weight is scale * (number - offset), with
one scale and one offset for each output and group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

PANEL = 32  # outputs of a product whose weights lie together; of kernels.h
LINE = 64  # bytes; of kernels.h
GROUP_GRAIN, MOST_GROUP = 32, 256  # groups are multiples of the first, and not larger than the second
LARGEST = {8: 127, 4: 7}  # number by bits; the least is its negative, and -8
# Shares of the range that numbers of 4 bits cover; the one with the least squared error is taken.
SHRINKS = (1.0, 0.93, 0.86, 0.79)
WEIGHTS_AT_ONCE = 2**17  # that are in single precision at a time: their copies stay in the cache


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight [out, in] of `bits` bits."""

    bits: int  # 8 or 4
    numbers: torch.Tensor  # int8 [out, in]: -127 .. 127 or -8 .. 7
    scales: torch.Tensor  # float16 [out, groups]
    offsets: torch.Tensor | None = None  # float16 [out, groups]; None: all 0

    @property
    def shape(self) -> torch.Size:
        """Return (out, in)."""
        return self.numbers.shape

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.numbers.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Return its bytes, two numbers of 4 bits in one."""
        scales = self.scales.nbytes + (0 if self.offsets is None else self.offsets.nbytes)
        return self.numbers.numel() * self.bits // 8 + scales

    @property
    def name(self) -> str:
        """Return the kind in words."""
        return f"int{self.bits} in groups of {self.group}"

    def dequantised(self) -> torch.Tensor:
        """Return the weight in single precision, [out, in]."""
        numbers = self.numbers.view(self.shape[0], -1, self.group).float()
        if self.offsets is not None:
            numbers -= self.offsets.float()[..., None]
        numbers *= self.scales.float()[..., None]
        return numbers.flatten(1)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., in] times the dequantised weight, [..., out] in single precision: the reference,
        which is slow."""
        parts = self.split(_rows_at_once(self.shape[1]))
        return torch.cat([x.float() @ part.dequantised().T for part in parts], -1)

    def split(self, rows: int) -> list[Quantised]:
        """Return the weight in parts of `rows` rows, which share its numbers."""
        firsts = range(0, self.shape[0], rows)
        return [self.at(slice(first, first + rows)) for first in firsts]

    def at(self, rows: torch.Tensor | slice) -> Quantised:
        """Return these rows of the weight, in their order."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return Quantised(self.bits, self.numbers[rows], self.scales[rows], offsets)

    def alike(self, other: Quantised) -> bool:
        """Return True if both can be rows of one weight."""
        return (self.bits, self.group, self.offsets is None) == (
            other.bits,
            other.group,
            other.offsets is None,
        ) and self.shape[1] == other.shape[1]


def stacked(parts: Sequence[Quantised]) -> Quantised:
    """Return the rows of several weights, which are alike, as one."""
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Quantised(
        parts[0].bits,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(offsets) if offsets else None,
    )


def group_of(width: int, largest: int) -> int:
    """Return the largest group of at most `largest` inputs that divides `width`; 0: there is none."""
    return next((size for size in range(largest, 0, -GROUP_GRAIN) if width % size == 0), 0)


def quantise(weight: torch.Tensor, bits: int, group: int) -> Quantised:
    """Return the nearest weight of `bits` bits, [out, in] as the given one; `group` divides `in`."""
    quantised, rows = _quantised_8 if bits == 8 else _quantised_4, _rows_at_once(weight.shape[1])
    parts = []
    for first in range(0, weight.shape[0], rows):
        part = weight[first : first + rows].float()
        parts.append(quantised(part.view(part.shape[0], -1, group)))
    numbers, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Quantised(bits, numbers, scales)


def _quantised_8(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers [out, in] and the scales [out, groups] of a weight [out, groups, inputs]."""
    scales = (grouped.abs().amax(-1, keepdim=True) / LARGEST[8]).half()
    return _rounded(grouped, scales, -LARGEST[8], LARGEST[8]).to(torch.int8).flatten(1), scales.squeeze(-1)


def _quantised_4(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same; of the SHRINKS, each group has the one with the least squared error."""
    # The number farthest from 0 is -8, so that is what the largest weight becomes, whatever its sign.
    least, most = grouped.aminmax(dim=-1, keepdim=True)
    largest = torch.where(most > -least, most, least) / -8
    best, scales = torch.full_like(largest, torch.inf), largest.half()
    for shrink in SHRINKS:
        tried = (largest * shrink).half()
        error = (
            _rounded(grouped, tried, -8, LARGEST[4])
            .mul_(tried.float())
            .sub_(grouped)
            .square_()
            .sum(-1, keepdim=True)
        )
        scales = torch.where(error < best, tried, scales)
        best = torch.minimum(error, best)
    return _rounded(grouped, scales, -8, LARGEST[4]).to(torch.int8).flatten(1), scales.squeeze(-1)


def _rounded(grouped: torch.Tensor, scales: torch.Tensor, least: int, most: int) -> torch.Tensor:
    wide = scales.float()
    return (grouped * torch.where(wide == 0, 0, 1 / wide)).round_().clamp_(least, most)


def _rows_at_once(width: int) -> int:
    return max(1, WEIGHTS_AT_ONCE // width)


def blocks(weight: Quantised) -> torch.Tensor:
    """Return what the kernels read, uint8 [panels, groups, bytes of a block]: see kernels_quantised.h.

    Rows are padded with zeros to whole panels.
    """
    rows = -(-_rows_at_once(weight.shape[1]) // PANEL) * PANEL
    return torch.cat([_blocks(part) for part in weight.split(rows)])


def _blocks(weight: Quantised) -> torch.Tensor:
    outputs, width = weight.shape
    padding = -outputs % PANEL
    panels, groups = (outputs + padding) // PANEL, width // weight.group
    numbers = pad(weight.numbers, (0, 0, 0, padding)).view(panels, PANEL, groups, weight.group)
    headers = [
        pad(values, (0, 0, 0, padding)).view(panels, PANEL, groups).transpose(1, 2).contiguous()
        for values in (weight.scales, weight.offsets)
        if values is not None
    ]
    codes = _codes_8(numbers) if weight.bits == 8 else _codes_4(numbers)
    return torch.cat([*(header.view(torch.uint8) for header in headers), codes.flatten(2)], -1)


def _codes_8(numbers: torch.Tensor) -> torch.Tensor:
    """Return bytes [panels, groups, lines, LINE] of numbers [panels, PANEL, groups, inputs]: the magnitude,
    and the sign in the highest bit."""
    codes = numbers.abs().view(torch.uint8) | (numbers < 0).to(torch.uint8) << 7
    panels, _, groups, group = codes.shape
    pairs = codes.view(torch.int16)  # of inputs
    # output: half of the panel, four of it, in four; input: line
    pairs = pairs.view(panels, 2, 4, 4, groups, group // 2).permute(0, 4, 5, 2, 1, 3).contiguous()
    return pairs.view(torch.uint8).view(panels, groups, group // 2, LINE)


def _codes_4(numbers: torch.Tensor) -> torch.Tensor:
    """Return bytes [panels, groups, lines, LINE] of numbers [panels, PANEL, groups, inputs]: four nibbles in
    16 bits."""
    codes = (numbers + 8).view(torch.uint8)
    panels, _, groups, group = codes.shape
    halves = codes.view(panels, 2, PANEL // 2, groups, group // 4, 2, 2)
    # output in half; input: line, pair, in pair. The bytes of a word are those of the pairs.
    codes = halves[:, 0] | halves[:, 1] << 4
    return codes.permute(0, 2, 3, 1, 5, 4).reshape(panels, groups, group // 4, LINE)
