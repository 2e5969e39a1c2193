"""`LAPS_SD_ADAPTERS`: the LoRA adapters that requests may name as their model.

Gateways and workers have the same value: a gateway serves the names, a worker over vLLM loads the directories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["adapter_directories", "adapter_names", "adapter_problems"]

MOST = 64
"""Most adapters: all of them stay loaded in a worker (our choice)."""
MOST_CHARACTERS = 128


def adapter_names(values: Sequence[str]) -> tuple[str, ...]:
    """Return the names."""
    return tuple(value.partition("=")[0] for value in values)


def adapter_directories(values: Sequence[str]) -> dict[str, Path]:
    """Return the directory of each adapter, or what names it on the Hugging Face hub."""
    return {name: Path(named) for name, _, named in (value.partition("=") for value in values)}


def adapter_problems(values: Sequence[str], *, with_directories: bool) -> Iterator[str]:
    """Yield what is wrong with the setting. `with_directories`: each adapter needs one."""
    names = adapter_names(values)
    if len(names) > MOST:
        yield f"LAPS_SD_ADAPTERS must name at most {MOST} adapters, got {len(names)}."
    for value, name in zip(values, names, strict=True):
        if not 1 <= len(name) <= MOST_CHARACTERS or not name.isprintable():
            yield f"LAPS_SD_ADAPTERS must have names of 1 to {MOST_CHARACTERS} characters, got {value[:MOST_CHARACTERS]!r}."
        elif with_directories and not value[len(name) + 1 :]:
            yield f"LAPS_SD_ADAPTERS must be a list of NAME=DIRECTORY, got {value!r}."
    if len({*names}) < len(names):
        yield "LAPS_SD_ADAPTERS names an adapter twice."
