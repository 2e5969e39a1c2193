"""Weights in the formats of GPTQ and AWQ, whose codes go to our layout as they are.

Both have codes of 4 bits in words of 32, and a scale and a zero point for each output and group of inputs:
weight = scale * (code - zero point). Ours are code - 8 and zero point - 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker_svc.engine.cpu.quantised import GROUP_GRAIN, MOST_GROUP, Quantised, group_of
from worker_svc.engine.interface import ModelError

Part = Callable[[str], torch.Tensor | None]
"""Returns a tensor of one linear layer by the last part of its name; None: it is not stored."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each nibble of a word, lowest nibble first
SERVED_BITS = {"gptq": (4, 8), "awq": (4,)}


def check(described: Mapping[str, Any]) -> None:
    """Raise ModelError, in words that follow "the model ", unless layers of this `quantization_config` can be read."""
    method, bits = described.get("quant_method"), described.get("bits", described.get("w_bit"))
    if method not in SERVED_BITS:
        raise ModelError(
            f"is quantised by {method!r}: of the methods in config.json, gptq and awq are served; "
            "LAPS_SD_ENGINE=vllm serves more"
        )
    if bits not in SERVED_BITS[method]:
        served = " and ".join(map(str, SERVED_BITS[method]))
        raise ModelError(f"has {method} weights of {bits} bits: {served} bits are served")
    version = described.get("version", "gemm")
    if method == "awq" and str(version).lower() != "gemm":
        raise ModelError(f"has awq weights of version {version!r}: gemm is served")


def read(part: Part, described: Mapping[str, Any], out: int, width: int) -> Quantised | torch.Tensor:
    """Return the weight of one layer; dequantised, in single precision, where its groups do not fit our layout.

    Raises ModelError if tensors are missing or of other shapes.
    """
    bits = int(described.get("bits", described.get("w_bit", 4)))
    awq = described.get("quant_method") == "awq"
    per_word = 32 // bits
    scales, packed, packed_zeros, order = (part(name) for name in ("scales", "qweight", "qzeros", "g_idx"))
    if scales is None or packed is None or packed_zeros is None:
        raise ModelError("lacks scales, qweight or qzeros")
    groups = scales.shape[0]
    expected = (width, out // per_word) if awq else (width // per_word, out)
    if (
        groups < 1
        or width % groups
        or scales.shape != (groups, out)
        or packed.shape != expected
        or packed_zeros.shape != (groups, out // per_word)
        or (order is not None and order.shape != (width,))
    ):
        raise ModelError(
            f"has {tuple(packed.shape)} words and {tuple(scales.shape)} scales for {out} outputs of {width} inputs"
        )
    columns = _unpacked(packed_zeros, bits, order=AWQ_ORDER if awq else None)
    if awq:
        codes = _unpacked(packed, bits, order=AWQ_ORDER).T
    else:
        codes = _unpacked(packed.T, bits)
        if described.get("checkpoint_format", "gptq") == "gptq":
            columns = columns + 1  # what this format stores is one less
    group = width // groups
    in_order = order is None or torch.equal(order.long(), torch.arange(width) // group)
    if bits != 4 or group % GROUP_GRAIN or not in_order:
        of_input = torch.arange(width) // group if order is None else order.long()
        if int(of_input.min()) < 0 or int(of_input.max()) >= groups:
            raise ModelError(f"has inputs in groups that do not exist: g_idx is not within 0 .. {groups - 1}")
        return (codes - columns.T[:, of_input]).float() * scales.float().T[:, of_input]
    half = 2 ** (bits - 1)
    offsets = (columns - half).T
    apart = group // (group if group <= MOST_GROUP else group_of(group, MOST_GROUP))
    return Quantised(
        bits,
        (codes - half).to(torch.int8),
        scales.T.repeat_interleave(apart, 1).half().contiguous(),
        offsets.repeat_interleave(apart, 1).half().contiguous() if bool(offsets.any()) else None,
    )


def _unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the codes [rows, columns * codes of a word] of int32 words [rows, columns]; `order`: place of
    each code within its word's."""
    places = range(32 // bits) if order is None else [order.index(place) for place in range(len(order))]
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
    codes: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(1).to(torch.int16)
