"""The counter-based noise generator in plain integers: the reference, and part of the public contract.

Noise for a token is a function of three integers and nothing else:

    seed      unsigned 64 bits, the request's
    position  of the output token, 0 for the first after the prompt
    token id  0 .. 2**31 - 1

    key  = mix64(mix64(seed) + position * GOLDEN)        splitmix64's finaliser [Steele, Lea, Flood 2014]
    bits = mix32(id * WEYL, key)                         "lowbias32" [Wellons 2018], keyed with the two halves of `key`
    v    = (bits + 0.5) / 2**32, at most 1 - 2**-24      0 < v < 1
    E    = -log(1 - v)                                   standard exponential
    G    = -log(E)                                       standard Gumbel

Every step up to `bits` is exact modulo 2**64 or 2**32, so a key is the same on every machine. The steps after
it are single precision in the engine, so G agrees to a few units in the last place. Small v means large G:
the winning end of the range has the full resolution of 2**-32.

Why two hashes: one key per row is cheap in plain integers, while the hash over the vocabulary is what costs;
in 32 bits it is twice as fast as splitmix64 in 64.
"""

from __future__ import annotations

import math

M64 = 2**64 - 1
M32 = 2**32 - 1
GOLDEN = 0x9E3779B97F4A7C15
WEYL = 0x9E3779B1  # odd: id -> id * WEYL is one to one modulo 2**32
MIX64_A = 0xBF58476D1CE4E5B9
MIX64_B = 0x94D049BB133111EB
MIX_A = 0x7FEB352D
MIX_B = 0x846CA68B
V_MAX = 1.0 - 2.0**-24


def mix64(x: int) -> int:
    """Return splitmix64's output function of one unsigned 64-bit integer."""
    x = (x + GOLDEN) & M64
    x = ((x ^ (x >> 30)) * MIX64_A) & M64
    x = ((x ^ (x >> 27)) * MIX64_B) & M64
    return x ^ (x >> 31)


def row_key(seed: int, position: int) -> int:
    """Return the 64-bit key of one output position of one request."""
    return mix64((mix64(seed & M64) + position * GOLDEN) & M64)


def token_bits(key: int, token_id: int) -> int:
    """Return 32 uniform bits for one token under one key."""
    low, high = key & M32, key >> 32
    x = ((token_id * WEYL) & M32) ^ low
    x = ((x ^ (x >> 16)) * MIX_A) & M32
    x = ((x ^ (x >> 15)) + high) & M32
    x = (x * MIX_B) & M32
    return x ^ (x >> 16)


def uniform(key: int, token_id: int) -> float:
    """Return v of the module's docstring, in (0, 1)."""
    return min((token_bits(key, token_id) + 0.5) / 2.0**32, V_MAX)


def gumbel(seed: int, position: int, token_id: int) -> float:
    """Return the standard Gumbel noise of one token at one position."""
    return -math.log(-math.log1p(-uniform(row_key(seed, position), token_id)))
