"""Comparison of the tokenizers of a target and its draft, before any model is loaded, and of a gateway and its workers.

Standard library only: `tokenizer.json` holds the whole vocabulary. The target decides every token in any case, so a
few ids of another meaning, or ids that only one of the two has, cost draft tokens and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

__all__ = ["SAME_TOKENS", "TokenizersDiffer", "check_tokenizers", "vocabulary", "vocabulary_digest"]

SAME_TOKENS = 0.95
"""Least fraction of the smaller vocabulary whose ids mean the same to both (our choice)."""
MAX_SHOWN_CHARACTERS = 40


class TokenizersDiffer(ValueError):
    """Raised when token ids mean something else to the draft. The message is one sentence."""


def check_tokenizers(target: Path, draft: Path) -> str:
    """Compare the tokenizers in two model directories; return a note on differences that only cost draft tokens.

    The note is empty if there are none, or if one of the directories has no `tokenizer.json`. Raises
    TokenizersDiffer with the first token that differs, and ValueError for a file that cannot be read.
    """
    ours, theirs = vocabulary(target), vocabulary(draft)
    if ours is None or theirs is None:
        return ""
    first = min((each for each in ours.keys() & theirs.keys() if ours[each] != theirs[each]), default=None)
    if first is None:
        return ""
    common = sum(theirs.get(each) == token for each, token in ours.items())
    example = (
        f"the first that differs is id {first}: {_shown(ours[first])} in the target, {_shown(theirs[first])} in the "
        "draft"
    )
    if common < SAME_TOKENS * min(len(ours), len(theirs)):
        raise TokenizersDiffer(
            f"target and draft have different tokenizers: of {len(ours)} and {len(theirs)} token ids {common} mean "
            f"the same to both, and {example}; leave the draft out, and the worker looks proposals up in the context"
        )
    differ = len(ours.keys() & theirs.keys()) - common
    return (
        f"{differ} token ids mean something else to the draft, and draft tokens with them are lost; {example}"
    )


def vocabulary(directory: Path) -> dict[int, str] | None:
    """Return the token of each id, special and added tokens included; None if there is no `tokenizer.json`.

    Raises ValueError if the file is not one of the tokenizers library.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        tokens = _model_tokens(body["model"]["vocab"])
        tokens |= {int(each["id"]): str(each["content"]) for each in body.get("added_tokens") or ()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the tokenizer {path} cannot be read: {type(error).__name__}: {error}") from error
    return tokens


def vocabulary_digest(directory: Path) -> bytes:
    """Return 8 bytes that are equal where all ids have equal tokens; empty without a `tokenizer.json` that can be read."""
    try:
        tokens = vocabulary(directory)
    except ValueError:
        return b""
    if tokens is None:
        return b""
    text = json.dumps(sorted(tokens.items()))
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"laps-sd vocab").digest()


def _model_tokens(found: Any) -> dict[int, str]:
    if isinstance(found, list):  # Unigram: (token, score) in the order of the ids
        return {number: str(entry[0]) for number, entry in enumerate(found)}
    return {int(number): str(token) for token, number in found.items()}


def _shown(token: str) -> str:
    return repr(token if len(token) <= MAX_SHOWN_CHARACTERS else token[:MAX_SHOWN_CHARACTERS] + "…")
