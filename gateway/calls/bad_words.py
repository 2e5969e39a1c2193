"""Bad words as the token sequences that the tokenizer makes of them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.model.tokenizer import ModelFiles

__all__ = ["sequences_of"]


def sequences_of(words: Iterable[str], model: ModelFiles) -> list[tuple[int, ...]]:
    """Return the token ids of each word, as it is and after a blank, each once. A sequence that holds another one
    is left out, since it cannot be completed without it."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip(" ")):
            ids = tuple(model.encode_rendered(text))
            if ids:
                found[ids] = None
    return [ids for ids in found if not any(other != ids and _ends_in(ids, other) for other in found)]


def _ends_in(ids: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(other) < len(ids) and ids[-len(other) :] == other
