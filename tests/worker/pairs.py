"""Tiny random models for tests, written to disk as Hugging Face directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from worker_svc.engine.cpu import kernels
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.load import load_engine
from worker_svc.engine.options import LoadOptions

VOCAB = 128
MAX_LENGTH = 256

transformers_logging.disable_progress_bar()
transformers_logging.set_verbosity_error()


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**values, **changes})


def write_model(directory: Path, config: PretrainedConfig, *, seed: int, sharpen: float = 3.0) -> Path:
    """Write a random model. `sharpen` scales its output layer, so that its distributions are neither flat nor
    certain.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # The usual initialisation makes every layer a whisper on top of the embedding; louder ones make text
        # depend on context.
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(sharpen)
    model.save_pretrained(directory)
    return directory


def write_draft_of(target: Path, directory: Path, *, noise: float, seed: int) -> Path:
    """Write a draft that often agrees with a target: the same weights, disturbed."""
    model = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
    model.save_pretrained(directory)
    return directory


def bfloat16_by_kernels() -> bool:
    """Return True if the kernels multiply in bfloat16 here."""
    return kernels.multiply(torch.empty(kernels.GRAIN, kernels.GRAIN, dtype=torch.bfloat16))


def load_pair(target: Path, draft: Path | None = None, **options: Any) -> SpeculativeEngine:
    """Return the engine of a model pair, or of a target alone."""
    return load_engine(target, draft, LoadOptions(**options))


def with_own_code(model: Path, directory: Path, *, first: str = "", methods: str = "") -> Path:
    """Write a copy of a Llama whose code comes with it: `first` runs as it is imported, and `methods` are those of
    its class."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["Own"],
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Own"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(
        f"{first}from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'own'\n"
        f"class Own(LlamaForCausalLM):\n    config_class = Config\n{methods}"
    )
    return directory
