"""Hashed words of a prompt, from which the scheduler predicts the length of the output.

A gateway sends them and the scheduler learns from them; neither sees the other's text. A feature is a number
below `FEATURES`: a word or a pair of neighbouring words, hashed to 15 bits. One set of start weights for the
scheduler thus serves every model. All of this is our choice.
"""

from __future__ import annotations

import hashlib
import random
import re
import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice

FEATURES = 1 << 15
MOST_FEATURES = 256
"""Most features of one request."""
LINES = (1, 2, 3, 5, 9, 17, 33)
"""A text has a feature for each of these numbers that its line breaks reach."""
MOST_MARKS = 9
MOST_WORDS = 120
"""Words that are read: each makes a feature of its own and one with the word before it. Of a longer text the
first and the last ones, because instructions stand before or after what they are about."""
_READ_CHARACTERS = 4 * MOST_WORDS
"""Characters at each end of a text in which these words are looked for."""
_ONE_BY_ONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Characters of Japanese, Chinese and Korean, which are written without spaces."""
_WORD = re.compile(rf"[{_ONE_BY_ONE}]|(?:[^\W\d_{_ONE_BY_ONE}]|')+|\d|[^\w\s]")
"""A word, a digit or a punctuation mark; of Chinese, Japanese and Korean a single character."""


class FeatureHash:
    """Hashes words under a key of the deployment. With another key the same word has another number, so that
    features mean nothing to those who do not have the key.
    """

    def __init__(self, key: str = "") -> None:
        """Take the secret that gateways and schedulers of one deployment share. Empty: the plain hash."""
        self.places: list[int] = list(range(FEATURES))
        """The feature of each plain hash."""
        if key:
            seed = hashlib.blake2b(key.encode(), person=b"laps-sd length").digest()
            random.Random(seed).shuffle(self.places)  # a permutation that both sides compute

    def features_of(self, text: str, marks: Iterable[str] = (), breaks: int | None = None) -> list[int]:
        """Return the features of a text, ascending, each once; at most `MOST_FEATURES`. `marks`: what else is
        known of it, up to `MOST_MARKS` strings with a feature each; `breaks`: its line breaks, if only parts of
        it are given (None: they are counted).
        """
        places, crc32 = self.places, zlib.crc32
        found = {
            places[crc32(b"\0" + mark.encode(errors="replace")) & (FEATURES - 1)]
            for mark in islice(marks, MOST_MARKS)
        }
        before = b""
        for word in words_of(text):
            encoded = word.encode(errors="replace")
            found.add(places[crc32(encoded) & (FEATURES - 1)])
            found.add(places[crc32(before + b" " + encoded) & (FEATURES - 1)])
            before = encoded
        found.update(self.features_of_lines(text.count("\n") if breaks is None else breaks))
        return sorted(found)

    def features_of_lines(self, breaks: int) -> list[int]:
        """Return the features of a text with this number of line breaks: one that brings along what it is
        about gets a shorter answer than a question does.
        """
        return [
            self.places[zlib.crc32(b"\n%d" % least) & (FEATURES - 1)] for least in LINES if breaks >= least
        ]


def key_digest(key: str) -> bytes:
    """Return what gateways and schedulers compare of their keys: of another key it differs, but for one in 65,536.

    It gives away 16 bits of the key at most, so that guesses cannot be confirmed by it.
    """
    return hashlib.blake2b(key.encode(), digest_size=2, person=b"laps-sd key").digest()


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case; of a long one `MOST_WORDS` from its two ends together."""
    if len(text) <= 2 * _READ_CHARACTERS:
        words = _WORD.findall(text.lower())
        if len(words) <= MOST_WORDS:
            return words
    half = MOST_WORDS // 2
    return [
        *_WORD.findall(text[:_READ_CHARACTERS].lower())[:half],
        *_WORD.findall(text[-_READ_CHARACTERS:].lower())[-half:],
    ]


def features_of_tokens(token_ids: Sequence[int]) -> list[int]:
    """Return the features of a prompt of token ids, where no text is at hand: as those of a text, with tokens
    for words.
    """
    half = MOST_WORDS // 2
    ids = token_ids if len(token_ids) <= MOST_WORDS else [*token_ids[:half], *token_ids[-half:]]
    found = set()
    before = 0
    for token in ids:
        found.add(_mixed(token + 1))
        found.add(_mixed(((before + 1) << 32) + token + 1))
        before = token + 1
    return sorted(found)


def _mixed(number: int) -> int:
    """Return the hash of a number below 2^64 (Fibonacci hashing, Knuth, The Art of Computer Programming, 6.4)."""
    return (number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 49


def packed(features: Iterable[int]) -> bytes:
    """Return features as two bytes each, little-endian: as requests keep them."""
    features = list(features)
    return struct.pack(f"<{len(features)}H", *features)


def unpacked(features: bytes) -> tuple[int, ...]:
    """Return the features that `packed` packed."""
    return struct.unpack(f"<{len(features) // 2}H", features)


def problem_of(features: Sequence[int]) -> str:
    """Return what is wrong with the features that a peer sent, as a sentence; empty if nothing."""
    if len(features) > MOST_FEATURES:
        return f"must be at most {MOST_FEATURES} features, got {len(features)}"
    before = -1
    for feature in features:
        if not before < feature < FEATURES:
            return f"must ascend and be below {FEATURES}, got {feature} after {before}"
        before = feature
    return ""
