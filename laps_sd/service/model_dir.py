"""Facts that several services read from a model directory, so that they agree: demo pair, longest context.

Standard library only. A gateway needs the target's tokenizer and limits, never its weights.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

__all__ = [
    "LONGEST_DEFAULT_TOKENS",
    "POSITIONS",
    "context_tokens",
    "demo_target_dir",
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
    try:
        whole = json.loads((directory / "config.json").read_text()) if directory is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}, {}
    if not isinstance(whole, dict):
        return {}, {}
    text = whole.get("text_config")
    return whole, text if isinstance(text, dict) else {}


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
