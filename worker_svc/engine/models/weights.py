"""Reads a model of transformers from its directory, so that no weight is in memory twice.

transformers maps the files of weights into memory, and the parameters of a model may be views of these maps.
Whatever is made of such a view later, in another layout or type, comes on top of the file's pages, which stay
as long as any view does. Here each weight is read into memory of its own, and freed with its parameter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from worker_svc.engine.cpu.kernels import ALIGNED

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_model(directory: Path, *, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Return a model on the CPU, and transformers' report on its loading (`missing_keys` …).

    Raises what transformers, safetensors and json raise.
    """
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(directory, **options)
    weights = _weights(directory)
    if weights is None:  # in another format
        return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
            directory, config=config, dtype=dtype, output_loading_info=True, **options
        )
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return type(shell).from_pretrained(  # type: ignore[no-any-return]
        None, config=shell.config, state_dict=weights, dtype=dtype, output_loading_info=True
    )


def _weights(directory: Path) -> dict[str, Any] | None:
    """Return the weights by name, which are read when transformers takes them; None without safetensors files."""
    index = directory / INDEX
    # One file comes before an index, as in transformers: saving it leaves the index of earlier shards there.
    if (directory / SINGLE).is_file():
        files = [SINGLE]
    elif index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        return None
    opened: list[Any] = [safe_open(directory / file, framework="pt", backend="pread") for file in files]
    return {name: _Stored(file.get_slice(name)) for file in opened for name in file.keys()}  # noqa: SIM118


class _Stored:
    """A weight in a file, in the form that transformers takes: `[...]` reads it."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    def __getitem__(self, part: Any) -> torch.Tensor:
        read: torch.Tensor = self._weight[part]
        # At the start of a cache line, as torch allocates tensors: a layout may then be written over it.
        return read if read.data_ptr() % ALIGNED == 0 else read.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weight, name)
