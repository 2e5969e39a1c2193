"""Linear layers with quantised weights, and how a model gets them."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import nn

from worker_svc.engine.cpu.quantised import Quantised, group_of, quantise

Quantization = Literal["none", "int8", "int4"]
GROUPS: Final = {8: 128, 4: 64}
"""Largest group by bits (tried 32, 64 and 128). Of 4 bits, 32 is nearer to the model and slower from 16 rows on."""
HEAD_BITS: Final = 8
"""Bits of the output layer, whatever the others have: 4 bits there move the distribution by a third of what
all others do."""
MOST_LEFT_OUT: Final = 0.1
"""Share of a model's weights that may stay as they are: norms, biases, a router, layers without a group. Our choice."""
VERSION: Final = "absmax-1"
"""Enters the fingerprint of quantised models: change it with `quantise`, GROUPS and HEAD_BITS."""


class QuantisedLinear(nn.Module):
    """A linear layer whose weight is quantised. Its forward is the reference for the kernels: of the
    dequantised weight, in single precision."""

    def __init__(self, weight: Quantised, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product [..., out] of `x` [..., in], in its type."""
        out = self.weight.product(x)
        return (out if self.bias is None else out + self.bias.float()).to(x.dtype)


@torch.inference_mode()
def quantise_model(model: Any, quantization: Quantization) -> None:
    """Quantise the weights of all linear layers, in place, but those that are quantised and those without a group."""
    if quantization == "none":
        return
    head, bits = model.get_output_embeddings(), int(quantization.removeprefix("int"))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            own = HEAD_BITS if child is head else bits
            group = group_of(child.in_features, GROUPS[own])
            if group:
                setattr(parent, name, QuantisedLinear(quantise(child.weight, own, group), child.bias))


def left_out(model: Any) -> str | None:
    """Return the name of the largest weight that is not quantised; None if at most MOST_LEFT_OUT of all weights
    are not. Embeddings do not count, since a forward reads single rows of them.
    """
    read = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    left: dict[str, int] = {
        name: weight.numel() for name, weight in model.named_parameters() if id(weight) not in read
    }
    quantised = sum(layer.weight.numbers.numel() for layer in _layers(model))
    if sum(left.values()) <= MOST_LEFT_OUT * (quantised + sum(left.values())):
        return None
    return max(left, key=left.__getitem__)


def parameters_of(model: Any) -> int:
    """Return the number of a model's weights, those that are shared counted once."""
    found: int = sum(weight.numel() for weight in model.parameters())
    head = model.get_output_embeddings() if getattr(model.config, "tie_word_embeddings", False) else None
    return found + sum(layer.weight.numbers.numel() for layer in _layers(model) if layer is not head)


def kinds_of(model: Any) -> frozenset[str]:
    """Return the kinds of a model's quantised weights, in words."""
    return frozenset(layer.weight.name for layer in _layers(model))


def quantised_bytes(model: Any) -> int:
    """Return the bytes of a model's quantised weights, as the kernels have them."""
    return sum(layer.weight.nbytes for layer in _layers(model))


def _layers(model: Any) -> list[QuantisedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantisedLinear)]
