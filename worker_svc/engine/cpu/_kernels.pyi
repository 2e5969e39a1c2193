"""Of kernels.c. Tensors are addresses, sizes are counted in numbers; nothing is checked that kernels.py checks."""

from typing import TypeAlias

# weights, layers, hidden, inner, heads, kv_heads, size, embedding, tokens, turns, norm, head, half, epsilon, scale
Decoder: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int, float, float]
Packed: TypeAlias = tuple[int, int, int, int, int, int]  # ids, rows, pieces, count, pool, pool_layer
# inverse_temperature, noisy, apart, noise, noise_row, vocabulary, top_k, top_p, log_min_p, keys
Choosing: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]

Copied: TypeAlias = tuple[int, int, int, int]  # layer, rows, count, to

def use(most: int, /) -> int: ...
def use_threads(threads: int, cores: tuple[int, ...], /) -> None: ...
def attend(
    query: int,
    query_row: int,
    out: int,
    pool: int,
    pieces: int,
    count: int,
    heads: int,
    kv_heads: int,
    size: int,
    half: int,
    scale: float,
    /,
) -> None: ...
def product(matrix: int, x: int, rows: int, out: int, /) -> None: ...
def turn(
    qkv: int,
    pieces: int,
    count: int,
    rows: int,
    heads: int,
    kv_heads: int,
    size: int,
    turns: int,
    pool: int,
    half: int,
    /,
) -> None: ...
def forward(
    decoder: Decoder, packed: Packed, wanted: int, many: int, logits: int, scratch: int, copied: Copied, /
) -> None: ...
def choose(
    choosing: Choosing, logits: int, logits_row: int, rows: int, choices: int, chosen: int, /
) -> None: ...
def propose(
    decoder: Decoder,
    packed: Packed,
    choosing: Choosing,
    drafts: int,
    many: int,
    ends: int,
    ends_count: int,
    proposed: int,
    depth: int,
    scratch: int,
    work: int,
    /,
) -> None: ...
def gumbel(keys: int, rows: int, count: int, weyl: int, vocabulary: int, out: int, /) -> None: ...
def add_norm(
    x: int, y: int, weight: int, out: int, rows: int, size: int, half: int, epsilon: float, /
) -> None: ...
def gated(both: int, out: int, rows: int, size: int, half: int, /) -> None: ...
