"""Facts that several services read from a model directory, so that they agree: demo pair, longest context, ends of texts.

Standard library only. A gateway needs the target's tokenizer and limits, never its weights.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from laps_sd.service.tokenizer_match import vocabulary

__all__ = [
    "LONGEST_DEFAULT_TOKENS",
    "POSITIONS",
    "context_tokens",
    "demo_target_dir",
    "end_ids",
    "served_name",
    "stored_dtype",
]

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")
"""Names of a model's context limit in config.json: transformers' own, and those that the attribute maps of its
configurations translate. A test compares them with the installed transformers, which is not imported here."""

LONGEST_DEFAULT_TOKENS = 8192
"""Context limit, unless one is set, of models that allow more.

KV for every slot at 128k tokens rarely fits.
"""


def demo_target_dir() -> Path | None:
    """Return the target of the shipped demo pair; None if the package that holds it is not installed here."""
    found = importlib.util.find_spec("worker_svc")
    if found is None or found.origin is None:
        return None
    directory = Path(found.origin).parent / "demo" / "target"
    return directory if directory.is_dir() else None


def context_tokens(directory: Path | None, setting: int | None) -> int | None:
    """Return the most tokens of prompt and output together.

    This is the setting, else the limit in the model's config.json, up to the default. Gateway and worker both
    use this function: a request that a gateway admits and no worker can hold would wait without end. None:
    neither the setting nor a readable config.json contains a limit.
    """
    if setting is not None:
        return setting
    whole, text = _configs(directory)
    for name in POSITIONS:
        limit = (text or whole).get(name)
        if isinstance(limit, int) and limit >= 2:
            return min(limit, LONGEST_DEFAULT_TOKENS)
    return None


def end_ids(directory: Path) -> frozenset[int]:
    """Return the tokens that end an output.

    generation_config.json names them, else config.json (a negative number: none), else tokenizer_config.json by its
    eos_token. Gateway and worker both use this function: a worker ends at these tokens, and a gateway hides them.
    """
    whole, text = _configs(directory)
    for config in (_json_object(directory / "generation_config.json"), whole, text):
        named = config.get("eos_token_id")
        if named is not None:
            return frozenset(
                token for token in (named if isinstance(named, list) else [named]) if _is_token_id(token)
            )
    token = _json_object(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):  # with its properties
        token = token.get("content")
    if not isinstance(token, str):
        return frozenset()
    try:
        tokens = vocabulary(directory) or {}
    except ValueError:
        return frozenset()
    return frozenset(token_id for token_id, text_of in tokens.items() if text_of == token)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def stored_dtype(directory: Path) -> str:
    """Return the dtype that a model's config.json names, float32 if it names none.

    A directory without a readable config.json has none; the service that loads the model reports that.
    """
    whole, text = _configs(directory)
    config = {**whole, **text}
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else "float32"


def _configs(directory: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what config.json contains, and its part about a text model within a larger one; each is empty if it is
    missing or is no JSON object. The service that loads the model reports that.
    """
    whole = {} if directory is None else _json_object(directory / "config.json")
    text = whole.get("text_config")
    return whole, text if isinstance(text, dict) else {}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def served_name(named: Path) -> str:
    """Return the name under which a model is served unless one is given.

    That is its name on the Hugging Face hub without the revision, also of a directory in the hub's cache
    (`models--ORG--NAME/snapshots/REVISION`); otherwise the last part of the directory.
    """
    if not named.exists():
        return str(named).partition("@")[0]
    directory = named.resolve()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return directory.name
