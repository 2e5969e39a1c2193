"""The tokenizer of a model's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.errors import first_line


class Tokenizer:
    """A tokenizer's decoder; the fast library is enough for it and loads at once."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Fast

        try:
            self._fast = Fast.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the tokenizer in {directory} cannot be read: {first_line(error)}") from error

    def decode(self, ids: Any) -> str:
        """Return the text of the ids, special tokens left out."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def decode_all(self, ids: Any) -> str:
        """Return the text of the ids with that of special tokens."""
        return str(self._fast.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Return the tokenizer in a model's directory; None if there is none."""
    return Tokenizer(directory) if (directory / "tokenizer.json").is_file() else None
