"""What several services read off a model directory, so that they agree: where the demo pair is, how long a context may be.

Standard library only. A gateway needs the target's tokenizer and limits, never its weights.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

__all__ = ["LONGEST_DEFAULT_TOKENS", "context_tokens", "demo_target_dir"]

LONGEST_DEFAULT_TOKENS = 8192
"""Context limit unless one is set, for models that could take more: KV for every slot at 128k tokens rarely fits."""


def demo_target_dir() -> Path | None:
    """The target of the shipped demo pair; None when the package that holds it is not installed here."""
    found = importlib.util.find_spec("worker_svc")
    if found is None or found.origin is None:
        return None
    directory = Path(found.origin).parent / "demo" / "target"
    return directory if directory.is_dir() else None


def context_tokens(directory: Path | None, setting: int | None) -> int | None:
    """Prompt and output together, at most: the setting, else what the model's config.json says, up to the default.

    Gateway and worker both ask here: what a gateway admits and no worker can hold would wait for ever. None: neither
    the setting nor a readable config.json tells.
    """
    if setting is not None:
        return setting
    try:
        config = json.loads((directory / "config.json").read_text()) if directory is not None else {}
    except (OSError, ValueError):
        return None  # whoever loads the model says what is wrong with it
    limit = config.get("text_config", config).get("max_position_embeddings")
    return min(limit, LONGEST_DEFAULT_TOKENS) if isinstance(limit, int) and limit >= 2 else None
