"""Layouts of linear layers' weights on the CPU: the fastest one whose rows do not depend on each other.

Row r of x @ W.T should not depend on the number of rows of x, or a request's text would depend on its batch.
The libraries' layouts (x86 with AVX-512, torch 2.13, one thread; ratios from there):

    as loaded     float32: result changes with the number of rows up to about 16; the slowest at 4 to 64 rows
    transposed    the same numbers as a [in, out] array: independent from 2 rows on for matrices up to about
                  1 M elements; fastest for single rows of these, and for the smallest
    packed        oneDNN's own layout: independent at any number of rows in float32; a forward of 4 to 128
                  rows takes 0.85 of what it does transposed; fastest for large matrices
    kernel        our own (kernels_body.h): independent at any number of rows, in bfloat16 too. float32: a
                  forward of the demo's target takes 0.3 (1 row), 0.4 (4), 0.7 (16), 0.9 (64) and 1.0 (200)
                  of what it does packed. bfloat16, 1024 x 2816: 0.8 (1, 4), 0.6 (8), 0.8 (16), 0.9 (64),
                  1.0 (256); on machines without an instruction for it 0.7, 0.3, 0.2, 0.3, 0.4, 0.5

`packed` uses operators that are private to torch, so each layout is tested at run time, and one that fails is
not used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from worker_svc.engine.cpu import kernels
from worker_svc.engine.cpu.quantised import Quantised
from worker_svc.engine.models.memory import return_memory
from worker_svc.engine.quantisation.linear import QuantisedLinear

# Elements of a float32 weight. A deterministic model has four rows at least, a draft of one request has one.
TRANSPOSED_UP_TO = 2**16
TRANSPOSED_ROW_UP_TO = 2**20
ROW_COUNTS = (4, 5, 7, 8, 11, 12, 16, 17, 33, 64, 80, 129, 320, 515)
TRIED_OUTPUTS = 2048  # of a weight with more, in the layout of the kernels
CHECK_UP_TO = 2**31  # multiplications that the check of one weight may cost per row count

Product = Callable[[torch.Tensor], torch.Tensor]


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's layout. Inference only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
        # the attribute look-up is more expensive than the call
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out] of `x` [..., in]."""
        out: torch.Tensor = self._product(x, self._packed, self._bias, "none", [], "")
        return out


class TransposedLinear(nn.Module):
    """A linear layer that keeps its weight as [in, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._columns = weight.t().contiguous()
        self._weight = self._columns.t()
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out] of `x` [..., in]."""
        if x.dim() == 2 and self._bias is None:  # the call that `linear` makes in the end
            return torch.mm(x, self._columns)
        return linear(x, self._weight, self._bias)


class KernelLinear(nn.Module):
    """A linear layer whose product is our own."""

    def __init__(
        self,
        weight: torch.Tensor | Quantised,
        bias: torch.Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.product = kernels.Product(weight, bias, dtype, in_place=in_place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out] of `x` [..., in]."""
        return self.product(x).to(x.dtype).contiguous()


class LinearStore:
    """A chooser of layouts: one choice for each shape of weight."""

    def __init__(self, *, deterministic: bool, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of what weights are multiplied with, and of those that are not quantised."""
        self._deterministic = deterministic
        self._dtype = dtype
        self._chosen: dict[tuple[object, ...], type[nn.Module] | None] = {}
        self.independent = True  # False once some weight has no layout whose rows are independent
        self.least_rows = 1  # rows from which on they are independent, whatever the weight

    @torch.inference_mode()
    def store(
        self, weight: torch.Tensor | Quantised, bias: torch.Tensor | None = None, *, in_place: bool = False
    ) -> nn.Module | None:
        """Return a layer for this weight, or None to leave it as it is (other devices, or no better layout is
        sound). `in_place`: the layout may be written over the weight, which has no other use.
        """
        if isinstance(weight, Quantised):
            return self._store_quantised(weight, bias)
        if weight.device.type != "cpu":
            return None
        key = (weight.shape[0], weight.shape[1], weight.dtype)
        if key not in self._chosen:
            self._chosen[key] = self._choose(weight)
        kind = self._chosen[key]
        if kind is KernelLinear:
            return KernelLinear(weight, bias, in_place=in_place)
        return None if kind is None else kind(weight, bias)

    @torch.inference_mode()
    def apply(self, model: nn.Module) -> None:
        """Give every linear layer of a model its layout, in place. Tied weights are copied."""
        uses = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, QuantisedLinear):
                    stored = self.store(child.weight, child.bias)
                elif type(child) is nn.Linear:
                    alone = uses[child.weight.data_ptr()] == 1
                    stored = self.store(child.weight, child.bias, in_place=alone)
                else:
                    continue
                if stored is not None:
                    setattr(parent, name, stored)
                    del child
                    return_memory()
        if self._deterministic and any(map(_has_untested_product, model.modules())):
            self.independent = False

    def _store_quantised(self, weight: Quantised, bias: torch.Tensor | None) -> nn.Module:
        """Return a layer of the kernels; of torch's operators, which are slow, if that is not sound."""
        key = (*weight.shape, weight.name, weight.offsets is None)
        if key not in self._chosen:
            layer = KernelLinear(weight, None, self._dtype)
            x = _rows(5, weight.shape[1], self._dtype)
            expected = weight.product(x)
            # Both add up in single precision, whatever the type of x.
            close = (layer.product(x) - expected).abs().max() <= 1e-5 * (expected.abs().max() + 1e-6)
            sound = bool(close) and (
                not self._deterministic or rows_are_independent(layer, weight.shape, self._dtype, 1)
            )
            self._chosen[key] = KernelLinear if sound else None
            if not sound:
                logging.getLogger(__name__).warning(
                    "weights of %d x %d in %s are multiplied by torch's operators, many times slower: the kernels compute something else",
                    *weight.shape, weight.name,
                )  # fmt: skip
        if self._chosen[key] is not None:
            return KernelLinear(weight, bias, self._dtype)
        self.independent = False
        return QuantisedLinear(weight, bias)

    def _choose(self, weight: torch.Tensor) -> type[nn.Module] | None:
        limit = TRANSPOSED_UP_TO if self._deterministic else TRANSPOSED_ROW_UP_TO
        small = weight.dtype == torch.float32 and weight.numel() <= limit
        order = (TransposedLinear, PackedLinear) if small else (PackedLinear, TransposedLinear)
        kinds: tuple[type[nn.Module], ...] = (KernelLinear, *order) if kernels.multiply(weight) else order
        for kind in kinds:
            least_rows = 1 if kind is KernelLinear else ROW_COUNTS[0]
            # The kernels compute panel by panel: a test of some outputs is enough, and needs no copy of all.
            tried = weight[:TRIED_OUTPUTS] if kind is KernelLinear else weight
            try:
                layer = kind(tried, None)
                sound = self._close(layer, tried) and (
                    not self._deterministic
                    or rows_are_independent(layer, tried.shape, tried.dtype, least_rows)
                )
            except (RuntimeError, NotImplementedError, AttributeError):
                continue  # this build of torch has no such operator
            if sound:
                self.least_rows = max(self.least_rows, least_rows)
                return kind
        self.least_rows = ROW_COUNTS[0]
        if self._deterministic and not rows_are_independent(
            lambda x: linear(x, weight), weight.shape, weight.dtype
        ):
            self.independent = False
        return None

    @staticmethod
    def _close(layer: Product, weight: torch.Tensor) -> bool:
        x = _rows(5, weight.shape[1], weight.dtype)
        ours, expected = layer(x).float(), linear(x, weight).float()
        tolerance = (1e-5 if weight.dtype == torch.float32 else 2e-2) * float(expected.abs().max() + 1e-6)
        return bool((ours - expected).abs().max() <= tolerance)


def replace_conv1d(model: nn.Module) -> None:
    """Make linear layers of GPT-2's Conv1D, which is the same product with the weight transposed."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Conv1D):
                layer = nn.Linear(child.nx, child.nf, device="meta")
                layer.weight = nn.Parameter(child.weight.detach().t().contiguous())
                layer.bias = child.bias
                setattr(parent, name, layer)
                del child
                return_memory()


def _has_untested_product(module: nn.Module) -> bool:
    """Return True if a module has a matrix that is in no layer of the store: embeddings are read, and norms
    multiply number by number.
    """
    if isinstance(module, nn.Embedding) or type(module) is nn.Linear or "Norm" in type(module).__name__:
        return False
    return any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def rows_are_independent(
    product: Product, shape: torch.Size, dtype: torch.dtype, least: int = ROW_COUNTS[0]
) -> bool:
    """Return True if the first and last rows of a product with a weight of this shape, of rows in `dtype`, are bit
    for bit the same for any number of rows from `least` on.
    """
    tried = (*range(least, ROW_COUNTS[0]), *ROW_COUNTS)
    counts = [n for n in tried if n * shape.numel() <= CHECK_UP_TO] or list(tried[:3])
    x = _rows(counts[-1], shape[1], dtype)
    whole = product(x)
    return all(
        torch.equal(product(x[:n]), whole[:n]) and torch.equal(product(x[-n:]), whole[-n:]) for n in counts
    )


def _rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0)).to(dtype)
