"""Writes quantised checkpoints of small random models, in the formats of GPTQ, AWQ and GGUF, and their dequantised models for
transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

Packer = Callable[[torch.Tensor, torch.Generator], tuple[dict[str, torch.Tensor], torch.Tensor]]
"""Returns the tensors of a layer with such a weight [out, in], and the dequantised weight."""


def words(codes: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """Pack codes [rows, columns] along columns: within each word of 32 bits, code n goes to place `places[n]`."""
    per_word = 32 // bits
    grouped = codes.long().unflatten(1, (-1, per_word))
    packed = sum(grouped[..., n] << bits * places[n] for n in range(per_word))
    return (packed + 2**31).remainder(2**32).sub(2**31).to(torch.int32).contiguous()  # type: ignore[union-attr]


def gptq(
    group: int, *, bits: int = 4, symmetric: bool = True, stored_less: int = 1, order: bool = False
) -> Packer:
    """Codes along inputs, zero points along outputs; `stored_less`: 1 in the first version of the format."""

    def pack(
        weight: torch.Tensor, generator: torch.Generator
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        width = weight.shape[1]
        size = width if group == -1 else group
        groups, in_order = width // size, tuple(range(32 // bits))
        g_idx = torch.arange(width) // size
        if order:
            g_idx = g_idx[torch.randperm(width, generator=generator)]
        codes, zeros, scales, dequantised = _quantised(
            weight, bits, groups, g_idx, generator, symmetric=symmetric
        )
        tensors = {
            "qweight": words(codes, bits, in_order).T.contiguous(),
            "qzeros": words(zeros.T - stored_less, bits, in_order),
            "scales": scales.T.contiguous(),
            "g_idx": g_idx.to(torch.int32),
        }
        return tensors, dequantised

    return pack


def awq(group: int) -> Packer:
    """Codes and zero points along outputs, even ones first."""
    places = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7

    def pack(
        weight: torch.Tensor, generator: torch.Generator
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        width = weight.shape[1]
        codes, zeros, scales, dequantised = _quantised(
            weight, 4, width // group, torch.arange(width) // group, generator, symmetric=False
        )
        tensors = {
            "qweight": words(codes.T, 4, places),
            "qzeros": words(zeros.T, 4, places),
            "scales": scales.T.contiguous(),
        }
        return tensors, dequantised

    return pack


def _quantised(
    weight: torch.Tensor,
    bits: int,
    groups: int,
    g_idx: torch.Tensor,
    generator: torch.Generator,
    *,
    symmetric: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [out, in], zero points and scales [out, groups], and the dequantised weight."""
    half = 2 ** (bits - 1)
    scales = (
        weight.abs().max()
        / (half - 1)
        * (0.8 + 0.4 * torch.rand(weight.shape[0], groups, generator=generator))
    ).half()
    zeros = torch.full(scales.shape, half)
    if not symmetric:
        zeros = torch.randint(half - 3, half + 4, scales.shape, generator=generator)
    own, zero = scales.float()[:, g_idx], zeros[:, g_idx]
    codes = ((weight / own).round() + zero).clamp(0, 2 * half - 1).long()
    return codes, zeros, scales, (codes - zero) * own


def write_packed(
    source: Path, directory: Path, packer: Packer, described: dict[str, Any]
) -> tuple[Path, Path]:
    """Write the model in `source` with packed layers, all but the output layer, and its dequantised form; returns both
    directories."""
    generator = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name != "lm_head":
            packed, dequantised = packer(module.weight.data, generator)
            tensors |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
            module.weight.data = dequantised
    for name, value in model.state_dict().items():
        if f"{name.removesuffix('.weight')}.qweight" not in tensors:
            tensors[name] = value.clone()
    model.save_pretrained(directory / "dequantised")
    packed_dir = directory / "packed"
    packed_dir.mkdir()
    save_file(tensors, packed_dir / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (packed_dir / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    return packed_dir, directory / "dequantised"


def write_gguf(source: Path, directory: Path, kind: str) -> tuple[Path, Path]:
    """Write the model in `source`, a Llama, as GGUF with weights of this type, and its dequantised form."""
    import gguf

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, stored = model.config, gguf.GGMLQuantizationType[kind]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    packed_dir = directory / "packed"
    packed_dir.mkdir()
    writer = gguf.GGUFWriter(packed_dir / "model.gguf", "llama")
    for name, parameter in model.named_parameters():
        value = parameter.data
        count = next((count for part, count in heads.items() if part in name), None)
        if count:  # llama.cpp rotates neighbours
            value = value.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        data = value.contiguous().numpy()
        own = names.get_name(name, try_suffixes=(".weight",))
        if value.dim() == 1:
            writer.add_tensor(own, data)
            continue
        quantised = gguf.quants.quantize(data, stored)
        writer.add_tensor(own, quantised, raw_dtype=stored)
        value = torch.from_numpy(gguf.quants.dequantize(quantised, stored).copy())
        if count:
            value = value.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
        parameter.data = value
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (packed_dir / "config.json").write_text((source / "config.json").read_text())
    model.save_pretrained(directory / "dequantised")
    return packed_dir, directory / "dequantised"
