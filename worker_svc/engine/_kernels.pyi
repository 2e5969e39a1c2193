"""Of kernels.c. Tensors are addresses, sizes are counted in numbers; nothing is checked that kernels.py checks."""

def use(most: int, /) -> int: ...
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
def product(
    x: int, rows: int, width: int, weight: int, bias: int, out: int, columns: int, half: int, /
) -> None: ...
def turn(
    qkv: int,
    pieces: int,
    count: int,
    heads: int,
    kv_heads: int,
    size: int,
    turns: int,
    pool: int,
    half: int,
    /,
) -> None: ...
def decode(
    weights: int,
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    size: int,
    half: int,
    turns: int,
    x: int,
    rows: int,
    pieces: int,
    count: int,
    pool: int,
    pool_layer: int,
    wanted: int,
    many: int,
    norm: int,
    out: int,
    scratch: int,
    epsilon: float,
    scale: float,
    /,
) -> None: ...
def gumbel(keys: int, rows: int, weyl: int, vocabulary: int, out: int, /) -> None: ...
def add_norm(
    x: int, y: int, weight: int, out: int, rows: int, size: int, half: int, epsilon: float, /
) -> None: ...
def gated(both: int, out: int, rows: int, size: int, half: int, /) -> None: ...
