"""Hidden states that a forward copies out: the residual stream before one decoder layer, for a few rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn


@dataclass(slots=True)
class HiddenRows:
    """The rows whose hidden states are wanted; the forward fills in `states`."""

    # Decoder layers before them.
    layer: int
    # Packed rows.
    rows: list[int]
    # [rows, hidden]: on the model's device, or float32 on the host.
    states: torch.Tensor | NDArray[np.float32] = field(default_factory=lambda: torch.empty(0))

    def take(self, residual: torch.Tensor) -> None:
        """Copy the rows of the residual stream [total, hidden]."""
        self.states = residual[self.rows]

    def on_host(self) -> NDArray[np.float32]:
        """Return the states, float32 [rows, hidden]; on a GPU it waits for the forward."""
        if isinstance(self.states, np.ndarray):
            return self.states
        found: NDArray[np.float32] = self.states.float().cpu().numpy()
        return found


def hidden_size(model: Any) -> int | None:
    """Return the size of a model's hidden state if its layers are found, where `taken_from` reads it; else None."""
    size = getattr(model.config.get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) and _layers(model) is not None else None


@contextmanager
def taken_from(model: Any, hidden: HiddenRows) -> Iterator[None]:
    """Let a forward of transformers' model inside the context fill in `hidden`, if its layers get one state of each
    token: Gemma 3n's get several.
    """
    layers = _layers(model)
    assert layers is not None, "hidden_size is not None"

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if isinstance(states, torch.Tensor) and states.dim() == 3 and len(states) == 1:  # a batch of one
            hidden.take(states[0])

    handle = layers[hidden.layer].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _layers(model: Any) -> nn.ModuleList | None:
    """Return the list of a model's decoder layers, if it has one."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return None
