"""Names of the blocks that a prompt starts with, by which the scheduler knows what a worker has computed already.

A block is `BLOCK_TOKENS` tokens, whatever the block size of a worker's KV cache. Its name is a hash of its tokens,
of all tokens before them and of the salt: equal names mean an equal beginning under an equal salt. Names are 64 bits
long. Two beginnings with one name cost time and nothing else, because a worker compares with hashes of its own. All
of this is our choice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64
"""A prompt of 1,000 tokens has 15 names, computed in about 15 microseconds; blocks of 16 tokens would cost twice
that, and the scheduler four times the memory."""
NAME_BYTES = 8
MOST_BLOCKS = 1024
"""Most blocks of one prompt that are named; what follows is not known to be computed."""
MOST_CACHED_BLOCKS = 131_072
"""Most blocks that a worker reports as computed, about 8 million tokens: 1 MB in its hello."""
_TOKEN_BYTES = array("I").itemsize


def name_blocks(token_ids: Sequence[int], salt: str = "", before: bytes = b"") -> bytes:
    """Return the names of all full blocks of `token_ids`, `NAME_BYTES` each, at most `MOST_BLOCKS`.

    `salt`: what only those know who may share what is computed, such as the name of a tenant. `before`: the names of
    the first blocks, if they are known; they are returned again, followed by those of the other blocks.
    """
    first, last = len(before) // NAME_BYTES, min(len(token_ids) // BLOCK_TOKENS, MOST_BLOCKS)
    if first >= last:
        return before
    name = (
        before[-NAME_BYTES:]
        or blake2b(salt.encode(), digest_size=NAME_BYTES, person=b"laps-sd prompt").digest()
    )
    tokens = array("I", token_ids[first * BLOCK_TOKENS : last * BLOCK_TOKENS]).tobytes()
    step = BLOCK_TOKENS * _TOKEN_BYTES
    names = bytearray(before)
    for at in range(0, len(tokens), step):
        name = blake2b(name + tokens[at : at + step], digest_size=NAME_BYTES).digest()
        names += name
    return bytes(names)


def most_cached(kv_blocks: int, block_size: int) -> int:
    """Return how many blocks a KV cache of this size can hold the ends of, and a worker may thus report."""
    return min(kv_blocks * -(-block_size // BLOCK_TOKENS), MOST_CACHED_BLOCKS)


def numbers_of(names: bytes) -> Sequence[int]:
    """Return names as numbers below 2^64, without copying them."""
    return memoryview(names).cast("Q")


def problem_of(names: bytes, most: int = MOST_BLOCKS) -> str:
    """Return what is wrong with the names that another process sent; empty if nothing is."""
    if len(names) % NAME_BYTES:
        return f"must hold {NAME_BYTES} bytes for each block, not {len(names)} in all"
    if len(names) > most * NAME_BYTES:
        return f"must name at most {most} blocks, not {len(names) // NAME_BYTES}"
    return ""
