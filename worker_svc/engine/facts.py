"""The three lines that a worker logs at its start, about its models, its engine and its room.

Standard library only. The lines begin as `laps_sd.service.log.FACTS` has it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from laps_sd.service.model_dir import served_name
from worker_svc.engine.interface import Capacity

__all__ = ["facts", "model_words", "stored_parameters"]

MAX_HEADER_BYTES = 100 * 2**20


def facts(
    models: str, engine: str, capacity: Capacity, *, bytes_per_token: int | None = None
) -> tuple[str, ...]:
    """Return the three lines. `bytes_per_token`: KV of target and draft; None: not known."""
    tokens = capacity.target_blocks * capacity.block_size
    size = "" if bytes_per_token is None else f", {_bytes(tokens * bytes_per_token)}"
    whole = tokens / capacity.max_length
    room = (
        f"room: {capacity.max_length} tokens of context, {capacity.slots} slots, KV for {tokens} tokens "
        f"({capacity.target_blocks} blocks of {capacity.block_size}{size}): {whole:.1f} whole contexts"
    )
    return f"model: {models}", f"engine: {engine}", room


def model_words(role: str, directory: Path, architecture: str, parameters: int | None) -> str:
    """Return a model in words: its name, architecture and number of parameters."""
    size = "" if parameters is None else f", {_count(parameters)} parameters"
    name = served_name(directory)
    return f"{role if name == role else f'{role} {name}'} ({architecture}{size})"


def stored_parameters(directory: Path) -> int | None:
    """Return the number of weights in a directory's safetensors files, by their headers; None if there are none.

    Of a quantized model these are the stored numbers.
    """
    found = 0
    try:
        for path in directory.glob("*.safetensors"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, MAX_HEADER_BYTES)))
            found += sum(
                math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
            )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found or None


def _count(number: int) -> str:
    for size, word in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 10**9:.1f} GB" if number >= 10**9 else f"{number / 10**6:.0f} MB"
