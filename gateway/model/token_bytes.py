"""The bytes of single tokens, for cases where the decoded text of one token would lose some: part of a
character, a blank at the start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

__all__ = ["TokenBytes"]

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters() -> dict[str, int]:
    """Return GPT-2's alphabet: each byte as a printable character, unprintable bytes from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


LETTERS = _letters()


class TokenBytes:
    """The bytes of tokens. `bytes_of(token_id)` of all tokens of a text, joined, is the text's UTF-8, except
    for the characters that a decoder strips at its ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        steps = list(_steps(tokenizer))
        kinds = {step["type"] for step in steps}
        self._by_letter = "ByteLevel" in kinds
        self.joins = [step["type"] for step in steps] == ["ByteLevel"]
        """The tokenizer's decoder joins the bytes of tokens and does nothing else, as those of Llama 3 and Qwen do."""
        self._by_byte = "ByteFallback" in kinds
        self._blanks = [blank for step in steps if (blank := _blank(step))]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._by_letter and all(letter in LETTERS for letter in piece):
            return bytes(LETTERS[letter] for letter in piece)
        if self._by_byte and (byte := BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if not self._blanks:
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text.encode()
        for written, meant in self._blanks:
            piece = piece.replace(written, meant)
        return piece.encode()


def _steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the steps of the decoder in a tokenizer.json, in order."""
    if tokenizer.decoder is None:
        return
    waiting = [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        yield step
        waiting = step.get("decoders", []) + waiting


def _blank(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return how a step writes a blank: (in the vocabulary, in a text)."""
    match step:
        case {"type": "Metaspace", "replacement": str(written)}:
            return written, " "
        case {"type": "Replace", "pattern": {"String": str(written)}, "content": str(meant)}:
            return written, meant
        case _:
            return None
