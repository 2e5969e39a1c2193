"""Directories of models that are named as on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from laps_sd.errors import StartupError

__all__ = ["is_hub_name", "local_model"]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model")
CODE_AND_WEIGHTS = ("*.py", "*.safetensors")
"""Code runs only if the service that loads the model may run it."""
STORED_AS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
"""Forms of weights that a snapshot may hold which was not downloaded here."""


def is_hub_name(named: Path) -> bool:
    """Return whether this is ORG/NAME or ORG/NAME@REVISION, and no directory of this machine."""
    return not named.exists() and HUB_NAME.fullmatch(str(named)) is not None


def local_model(named: Path, *, weights: bool = True) -> Path:
    """Return the directory of a model on this machine; any path that is not a hub name is returned unchanged.

    A model of the hub is downloaded unless it is here already, without its code and weights if `weights` is false. Raises
    StartupError with the command that downloads it.
    """
    if not is_hub_name(named):
        return named
    name, _, revision = str(named).partition("@")
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        from huggingface_hub import snapshot_download

        files = [*TOKENIZER_FILES, *CODE_AND_WEIGHTS] if weights else [*TOKENIZER_FILES]
        found = Path(snapshot_download(name, revision=revision or None, allow_patterns=files))
    except Exception as error:  # the library raises a dozen types; each means that the model is not available
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(
            f"There is no directory {named}, and the model {name} of the Hugging Face hub is not on this machine and "
            f"cannot be fetched: {reason.rstrip('.')}. Where there is a network, `{command}` downloads it."
        ) from error
    if weights and not any(path for form in STORED_AS for path in found.glob(form)):
        raise StartupError(
            f"The weights of the model {name} of the Hugging Face hub are not on this machine, and could not be fetched: "
            f"there is no network, or it has no safetensors. `{command}` downloads them."
        )
    return found
