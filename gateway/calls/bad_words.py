"""Bad words as the token sequences that the tokenizer makes of them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.model.files import ModelFiles

__all__ = ["BadWords"]


class BadWords:
    """The bad words of the requests of one call as token sequences. Equal lists are tokenized once: that
    takes up to a tenth of a second, and a call may have a thousand outputs."""

    def __init__(self, model: ModelFiles) -> None:
        self._model = model
        self._found: dict[tuple[str, ...], list[tuple[int, ...]]] = {}

    def sequences_of(self, words: Iterable[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each word, as it is and after a blank, each once. A sequence that ends in
        another one is left out, since it cannot be completed without it."""
        key = tuple(words)
        if key not in self._found:
            self._found[key] = _sequences_of(key, self._model)
        return self._found[key]


def _sequences_of(words: Iterable[str], model: ModelFiles) -> list[tuple[int, ...]]:
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(model.encode_rendered(text))
            if ids:
                found[ids] = None
    lengths = sorted(set(map(len, found)))
    return [
        ids for ids in found if not any(ids[-length:] in found for length in lengths if length < len(ids))
    ]
