"""Weights in GGUF files, in one folder with the config.json and the tokenizer.json of their model.

Codes of 8 and 4 bits with a scale for 32 inputs (Q8_0, Q4_0) go to our layout as they are; others are dequantised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker_svc.engine.cpu.quantised import Quantised
from worker_svc.engine.interface import ModelError

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Name of the architecture in a GGUF file, by `model_type` of config.json."""
GROUP = 32
SCALE_BYTES = 2


class GgufFile:
    """The tensors of a GGUF file by their names in transformers."""

    def __init__(self, path: Path, config: Any) -> None:
        """Open a file. Raises ModelError, in words that follow "the model "."""
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                f"is stored in {path.name}, which needs a package: pip install 'laps-sd[gguf]'"
            ) from error
        self._gguf = gguf
        wanted = ARCHITECTURES.get(config.model_type)
        if wanted is None:
            served = ", ".join(ARCHITECTURES)
            raise ModelError(
                f"is stored in {path.name} and is a {config.model_type}: of GGUF files, {served} are served"
            )
        try:
            reader = gguf.GGUFReader(path)
            field = reader.get_field("general.architecture")
            architecture = None if field is None else field.contents()
        except (ValueError, OSError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
            raise ModelError(f"has a file {path.name} that is no GGUF file: {error}") from error
        if architecture != wanted:
            raise ModelError(
                f"has config.json of a {config.model_type}, and {path.name} is a {architecture}: they do not go together"
            )
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
        self._names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        # Files of this architecture have rows that rotate together next to each other.
        self._heads = (
            {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            if wanted == "llama"
            else {}
        )
        self.dequantised: set[str] = set()  # types of tensors that were not kept as they are

    def tensor(self, name: str) -> Quantised | torch.Tensor | None:
        """Return the tensor of this name in transformers; None if it is not in the file."""
        own = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = None if own is None else self._tensors.get(own)
        if tensor is None:
            return None
        found = self._read(tensor)
        heads = next((heads for part, heads in self._heads.items() if f".{part}." in name), 0)
        if not heads:
            return found
        order = torch.arange(found.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
        return found.at(order) if isinstance(found, Quantised) else found[order]

    def _read(self, tensor: Any) -> Quantised | torch.Tensor:
        kinds = self._gguf.GGMLQuantizationType
        if tensor.tensor_type in (kinds.Q8_0, kinds.Q4_0) and tensor.data.ndim == 2:
            rows = np.array(tensor.data)
            blocks = rows.reshape(
                rows.shape[0], -1, SCALE_BYTES + GROUP * (8 if tensor.tensor_type == kinds.Q8_0 else 4) // 8
            )
            scales = torch.from_numpy(blocks[..., :SCALE_BYTES].copy().view(np.float16)[..., 0])
            codes = torch.from_numpy(blocks[..., SCALE_BYTES:].copy())
            if tensor.tensor_type == kinds.Q8_0:
                numbers = codes.view(torch.int8)
                if int(numbers.min()) > -128:
                    return Quantised(8, numbers.flatten(1), scales)
            else:
                numbers = torch.cat([codes & 15, codes >> 4], -1).view(torch.int8) - 8
                return Quantised(4, numbers.flatten(1), scales)
        if tensor.tensor_type not in (kinds.F32, kinds.F16, kinds.BF16):
            self.dequantised.add(tensor.tensor_type.name)
        return torch.from_numpy(np.array(self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
