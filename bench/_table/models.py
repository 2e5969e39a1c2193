"""Models of the table: made once, kept in the cache folder, also in the forms of other engines."""

from __future__ import annotations

import functools
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from bench._engine.cells import SEED
from bench._peers import convert
from bench._shapes import PAIRS, write_model
from bench._table.homes import REQUIREMENTS
from bench._table.plan import LONG_PROMPT_TOKENS, MAX_LENGTH, Entry, Model
from bench.report import progress
from worker_svc.engine.facts import stored_parameters
from worker_svc.loading import DEMO

CONVERSION = "2"
"""Enters the names of converted models: change it with the conversions of bench/_peer_engines."""
GROUPS = (128, 64, 32)
"""Weights with one scale in OpenVINO's int4: the first that divides the sizes of the model."""


def directory(model: Model, cache: Path) -> Path:
    """Return the directory of a model: the demo's target, or random weights of a shape, in bfloat16."""
    if model.name == "demo":
        return DEMO / "target"
    shape = PAIRS[model.name][0]

    def write(place: Path) -> None:
        progress(f"making the random weights of {model.name}")
        write_model(shape, place, dtype="bfloat16", seed=SEED, max_length=2 * MAX_LENGTH)

    return _once(cache / "models" / f"{model.name}-{SEED}", write)


def converted(source: Path, model: Model, entry: Entry, python: str, cache: Path) -> Path | None:
    """Return the model in the form of an engine; None if it reads the directory. Raise PeerFailed."""
    if entry.engine not in ("openvino", "llamacpp"):
        return None
    made_of = (CONVERSION, *REQUIREMENTS[entry.engine], _digest(source))
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]

    def write(place: Path) -> None:
        progress(f"converting {model.name} to {entry}")
        place.mkdir()
        convert(
            python,
            place,
            engine=entry.engine,
            models=[(source, place / "model.gguf" if entry.engine == "llamacpp" else place)],
            tokenizer=DEMO / "target",  # GenAI loads one; no text is read or written
            weights=entry.precision,
            group=group_of(source),
        )

    place = _once(cache / "converted" / f"{entry.engine}-{model.name}-{entry.precision}-{digest}", write)
    return place / "model.gguf" if entry.engine == "llamacpp" else place


def sizes(source: Path) -> dict[str, int]:
    """Return the number of weights of a model and the bytes of its files."""
    files = source.glob("*.safetensors")
    return {"parameters": stored_parameters(source) or 0, "bytes": sum(file.stat().st_size for file in files)}


def prompts(model: Model, source: Path, count: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of requests that decode, and the long one, as token ids."""
    if model.prompt_tokens is not None:
        rng, vocab = random.Random(SEED), PAIRS[model.name][0].vocab
        short = [[rng.randrange(vocab) for _ in range(model.prompt_tokens)] for _ in range(count)]
        return short, [rng.randrange(vocab) for _ in range(LONG_PROMPT_TOKENS)]
    from transformers import AutoTokenizer

    from demo.prompts import demo_prompts

    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = demo_prompts(None, max(count, LONG_PROMPT_TOKENS // 4), SEED)
    ids = [list(tokenizer(prompt.text)["input_ids"]) for prompt in texts]
    return ids[:count], [token for one in ids for token in one][:LONG_PROMPT_TOKENS]


def group_of(source: Path) -> int:
    """Return the number of inputs with one scale in OpenVINO's int4."""
    config = json.loads((source / "config.json").read_text())
    sizes = (config["hidden_size"], config["intermediate_size"])
    return next(group for group in GROUPS if not any(size % group for size in sizes))


@functools.cache
def _digest(source: Path) -> str:
    """Return a hash of the files of a model directory."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(source.iterdir()):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def _once(place: Path, write: Callable[[Path], None]) -> Path:
    """Write a folder unless it is there. One that was not finished is never taken for it."""
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f"{place.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        write(part)
        part.rename(place)
    return place
