"""The fingerprint of a model: workers with equal ones give the same text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

HASHED_WHOLE_BYTES = 256 * 2**20  # larger weight files enter the fingerprint by samples
WEIGHTS = frozenset((".safetensors", ".bin", ".gguf"))
SAMPLES, SAMPLE_BYTES = 64, 2**20


def fingerprint(directory: Path, *, code: bool = False) -> str:
    """Return a hash of all that decides a model's logits and the meaning of its ids: configuration, tokenizer
    and weights; with `code` the Python files of the directory too, which may run then.
    """
    return fingerprint_of_files(directory, "config.json", suffixes={*WEIGHTS, *([".py"] if code else [])})


def fingerprint_of_files(directory: Path, config_name: str, *, suffixes: Collection[str] = WEIGHTS) -> str:
    """Return a hash of a configuration, of the files with these suffixes, and of a tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((directory / config_name).read_text())
    for name in ("_name_or_path", "base_model_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    files = sorted(p for p in directory.iterdir() if p.suffix in suffixes or p.name == "tokenizer.json")
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= HASHED_WHOLE_BYTES:
                while chunk := file.read(SAMPLE_BYTES):
                    digest.update(chunk)
            else:
                for sample in range(SAMPLES):
                    file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
