"""Models whose checkpoint is quantised: GPTQ and AWQ (named in config.json), and GGUF."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from worker_svc.engine.cpu.quantised import Quantised
from worker_svc.engine.interface import ModelError
from worker_svc.engine.quantisation import gptq
from worker_svc.engine.quantisation.gguf import GgufFile
from worker_svc.engine.quantisation.linear import QuantisedLinear

Weights = Callable[[str, tuple[int, ...]], "Quantised | torch.Tensor | None"]
"""Returns a weight of this name and shape; None if the checkpoint does not have it."""


def is_quantised(directory: Path) -> bool:
    """Return True if `load_quantised` reads this model, not transformers."""
    described = _config(directory).get("quantization_config")
    return described is not None or _gguf_file(directory) is not None


@torch.inference_mode()
def load_quantised(directory: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Return the model in a directory, with its linear layers as they are stored and the rest in `dtype`.

    Raises ModelError, in words that follow "the model ".
    """
    described = _config(directory).get("quantization_config")
    if described is not None:
        if not isinstance(described, dict):
            raise ModelError("has a quantization_config in config.json that is no object")
        gptq.check(described)
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # or transformers would look for a package that reads it
    with no_init_weights():  # memory that nothing has written is not taken yet
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        ).eval()
    with _weights(directory, config, described, dtype) as weights:
        missing = _fill(model, weights)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    if missing - tied:
        raise ModelError(f"lacks weights: {min(missing - tied)}")
    if missing:
        model.tie_weights()
    return model


def _fill(model: Any, weights: Weights) -> set[str]:
    """Give a model its weights, and the buffers that a checkpoint has; returns the names of those that this one does
    not have.
    """
    missing: set[str] = set()
    stored = model.state_dict().keys()
    for at, module in list(model.named_modules()):
        for name, own in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            full = f"{at}.{name}" if at else name
            if full not in stored:
                continue
            found = weights(full, tuple(own.shape))
            if found is None:
                missing.add(full)
            elif tuple(found.shape) != tuple(own.shape):
                raise ModelError(f"has weights of another shape: {full}")
            elif not isinstance(found, Quantised):
                own.copy_(found)
            elif type(module) is nn.Linear and name == "weight":
                parent, _, last = at.rpartition(".")
                setattr(model.get_submodule(parent), last, QuantisedLinear(found, module.bias))
            else:
                own.copy_(found.dequantised())
    return missing


@contextmanager
def _weights(
    directory: Path, config: Any, described: Mapping[str, Any] | None, dtype: torch.dtype
) -> Iterator[Weights]:
    log = logging.getLogger(__name__)
    path = _gguf_file(directory)
    if described is None and path is not None:
        file = GgufFile(path, config)
        yield lambda name, _: file.tensor(name)
        if file.dequantised:
            log.warning(
                "weights of type %s in %s are served as %s: set LAPS_SD_QUANTIZATION to quantise them again",
                ", ".join(sorted(file.dequantised)), path.name, dtype,
            )  # fmt: skip
        return
    assert described is not None
    with ExitStack() as opened:
        files = {}
        try:
            for one in sorted(directory.glob("*.safetensors")):
                file = opened.enter_context(safe_open(one, framework="pt"))
                files.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot be read: {error}") from error
        # AWQ divides the output of some activations by scales, as in StarCoder2 and GPT-NeoX.
        for name in sorted(files):
            if name.endswith(".scales") and f"{name.removesuffix('.scales')}.qweight" not in files:
                raise ModelError(
                    f"has scales that belong to no weight ({name}), which LAPS_SD_ENGINE=vllm serves"
                )
        dequantised = []

        def tensor(name: str) -> torch.Tensor | None:
            file = files.get(name)
            return None if file is None else file.get_tensor(name)

        def weight(name: str, shape: tuple[int, ...]) -> Quantised | torch.Tensor | None:
            layer = name.removesuffix(".weight")
            if f"{layer}.qweight" not in files:
                return tensor(name)
            try:
                found = gptq.read(lambda part: tensor(f"{layer}.{part}"), described, *shape)
            except ModelError as error:
                raise ModelError(f"{error} in {layer}") from error
            if not isinstance(found, Quantised):
                dequantised.append(layer)
            return found

        yield weight
        if dequantised:
            log.warning(
                "%d layers are served as %s, since their groups do not fit (8 bits, an order of inputs, or groups that "
                "are no multiples of 32): set LAPS_SD_QUANTIZATION to quantise them again",
                len(dequantised), dtype,
            )  # fmt: skip


def _config(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}  # the error of transformers is the better one
    return found if isinstance(found, dict) else {}


def _gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file of a directory; None if there is none, or there are other weights. Raises
    ModelError if there are several."""
    found = sorted(directory.glob("*.gguf"))
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelError(f"has {len(found)} GGUF files, and one is served: {found[0].name}, {found[1].name}")
    return found[0]
