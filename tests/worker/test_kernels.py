"""The kernels in C: they compute what torch computes, and a row comes out the same bit for bit whatever is
computed along with it."""

from __future__ import annotations

import math
import shutil
import sysconfig
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from tests.worker import emulated_tiles
from worker_svc.engine.cache.kv import BlockTable, KVPool
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Sampling
from worker_svc.engine.models.plan import KernelPlanner, Piece, Plan
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sampling.sampling import Rows, choose_tokens, rows_for

# Where they could have been built and are not, these tests fail.
COULD_BE_BUILT = shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").exists()
pytestmark = pytest.mark.skipif(
    not kernels.USABLE and (kernels.BUILT or not COULD_BE_BUILT),
    reason="no AVX2, no C compiler, or no headers of Python",
)

CPU = torch.device("cpu")


@pytest.fixture(
    autouse=True,
    params=[kernels.AMX, None, kernels.AVX512_BF16, kernels.AVX512, kernels.AVX2],
    ids=["AMX", "AMX emulated", "AVX-512 BF16", "AVX-512", "AVX2"],
)
def width(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test for each kind of kernels that this machine has."""
    runs = (
        emulated_tiles.use()
        if request.param is None
        else kernels._kernels.use(request.param) == request.param
    )
    if not runs:
        pytest.skip("not on this machine")
    yield
    kernels._kernels.use(kernels.AMX)


ROUNDED = 1.02 * 2.0**-8  # of a number: what rounding it to bfloat16 may change
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
CONTEXTS = ((0, 1), (0, 7), (15, 1), (16, 2), (99, 5), (127, 3), (250, 17), (600, 40))  # start, tokens


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pool_for(kv_heads: int, size: int, dtype: torch.dtype, layers: int = 1) -> KVPool:
    pool = KVPool(
        layers=layers, heads=kv_heads, head_size=size, blocks=400, block_size=16, region_tokens=64, dtype=dtype, device=CPU
    )  # fmt: skip
    for entries in pool.layers:
        entries.copy_(random(*entries.shape))
    return pool


def places_for(pool: KVPool, *, scattered: bool) -> list[BlockTable]:
    """Return a place for each of CONTEXTS."""
    places = [pool.new_table() for _ in CONTEXTS]
    if not scattered:
        for place, (start, tokens) in zip(places, CONTEXTS, strict=True):
            blocks = -(-(start + tokens) // 16)
            pool.hold([(place, blocks, blocks)])
        return places
    free = torch.randperm(400, generator=torch.Generator().manual_seed(1)).tolist()
    for place, (start, tokens) in zip(places, CONTEXTS, strict=True):
        place.set_blocks([free.pop() for _ in range(-(-(start + tokens) // 16))])
    return places


def expected(
    query: torch.Tensor, pool: KVPool, places: list[BlockTable], plan: Plan, scale: float
) -> torch.Tensor:
    """Compute attention by its definition, in double precision."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // pool.layers[0].shape[2]
    for place, (start, tokens), row in zip(places, CONTEXTS, plan.first_row, strict=True):
        for token in range(tokens):
            entries = pool.layers[0][place.rows(CPU)[: start + token + 1]].double()
            for head in range(query.shape[1]):
                k, v = entries[:, 0, head // group], entries[:, 1, head // group]
                shares = torch.softmax(k @ query[row + token, head].double() * scale, 0)
                out[row + token, head] = shares @ v
    return out


@pytest.mark.parametrize("scattered", [False, True], ids=["in one run", "scattered"])
@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 16), (8, 2, 128), (6, 1, 80), (2, 1, 256)]
)
def test_attention_is_that_of_the_book(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, scattered: bool
) -> None:
    pool = pool_for(kv_heads, size, dtype)
    places = places_for(pool, scattered=scattered)
    plan = KernelPlanner(pool, min_rows=1, flat=False).plan(
        [Piece(place, *context) for place, context in zip(places, CONTEXTS, strict=True)]
    )
    assert plan.pieces is not None
    query = random(plan.total, heads, size, seed=2)
    out = kernels.attend(query, pool.layers[0], plan.pieces, size**-0.5)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(),
        expected(query, pool, places, plan, size**-0.5),
        rtol=1e-4 if dtype == torch.float32 else ROUNDED,
        atol=1e-5,
    )


@DTYPES
@pytest.mark.parametrize("size", [16, 48, 64, 256])
def test_a_row_of_attention_does_not_depend_on_others(size: int, dtype: torch.dtype) -> None:
    """Alone, in a batch, in pieces of another length, in blocks that lie elsewhere; few rows take another way than many."""
    pool = pool_for(2, size, dtype)
    together, apart = places_for(pool, scattered=False), pool.new_table()
    start, tokens = CONTEXTS[-1]
    blocks = len(together[-1].blocks)
    taken = {block for place in together for block in place.blocks}
    apart.set_blocks([block for block in range(399, 0, -1) if block not in taken][:blocks])
    pool.layers[0][apart.rows(CPU)] = pool.layers[0][together[-1].rows(CPU)]
    planner = KernelPlanner(pool, min_rows=1, flat=False)
    query = random(tokens, 4, size, seed=3)
    others = sum(count for _, count in CONTEXTS[:-1])

    def attend(pieces: list[Piece], queries: torch.Tensor) -> torch.Tensor:
        table = planner.plan(pieces).pieces
        assert table is not None
        return kernels.attend(queries, pool.layers[0], table, 0.125)

    alone = attend([Piece(together[-1], start, tokens)], query)
    batch = attend(
        [Piece(place, *context) for place, context in zip(together, CONTEXTS, strict=True)],
        torch.cat([random(others, 4, size), query]),
    )
    assert torch.equal(batch[others:], alone)
    assert torch.equal(attend([Piece(apart, start, tokens)], query), alone)
    for cut in (1, 2, 9, 17, 39):
        first = attend([Piece(together[-1], start, cut)], query[:cut])
        rest = attend([Piece(together[-1], start + cut, tokens - cut)], query[cut:])
        assert torch.equal(torch.cat([first, rest]), alone)


def test_attention_bears_scores_of_any_size() -> None:
    pool = pool_for(2, 64, torch.float32)
    pool.layers[0][:, 0] *= 1e4
    places = places_for(pool, scattered=False)
    pieces = [Piece(place, *context) for place, context in zip(places, CONTEXTS, strict=True)]
    plan = KernelPlanner(pool, min_rows=1, flat=False).plan(pieces)
    assert plan.pieces is not None
    query = random(plan.total, 4, 64, seed=4)
    out = kernels.attend(query, pool.layers[0], plan.pieces, 0.125)
    torch.testing.assert_close(out.double(), expected(query, pool, places, plan, 0.125), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_what_is_no_number_is_seen_by_those_who_read_it_and_by_no_other_sequence(
    broken: float, part: int
) -> None:
    pool = pool_for(2, 64, torch.float32)
    places = places_for(pool, scattered=False)
    plan = KernelPlanner(pool, min_rows=1, flat=False).plan(
        [Piece(place, *context) for place, context in zip(places, CONTEXTS, strict=True)]
    )
    assert plan.pieces is not None
    victim, seen_from = 7, 620  # the last context: rows from position 620 on see it
    pool.layers[0][places[victim].rows(CPU)[seen_from], part] = broken
    query = random(plan.total, 4, 64, seed=5).abs()
    out = kernels.attend(query, pool.layers[0], plan.pieces, 0.125)
    finite = out.isfinite().all(-1).all(-1)
    sees = plan.first_row[victim] + seen_from - CONTEXTS[victim][0]
    assert finite[: plan.first_row[victim]].all()
    assert not finite[sees:].any()


@DTYPES
@pytest.mark.parametrize("columns", [7, 32, 64, 96, 500, 512, 1056])
@pytest.mark.parametrize("inputs", [16, 100, 704])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_the_book_and_its_rows_are_independent(
    columns: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    weight, x = random(columns, inputs, seed=6).to(dtype), random(64, inputs, seed=7).to(dtype)
    bias = random(columns, seed=8).to(dtype) if biased else None
    product = kernels.Product(weight, bias)
    whole = product(x)
    book = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double(), book, rtol=1e-4, atol=1e-3)
    for rows in range(1, 40):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[-rows:]), whole[-rows:])
    assert torch.equal(product(x.view(4, 16, inputs)), whole.view(4, 16, columns))
    assert torch.equal(product(x[:, None].expand(-1, 2, -1)[:, 1]), whole)


@DTYPES
@pytest.mark.parametrize(
    "scale", [1e-20, 1e-38, 1e19], ids=["tiny products", "denormal inputs", "infinite sums"]
)
def test_a_row_alone_has_its_bits_among_others_at_the_ends_of_the_range(
    scale: float, dtype: torch.dtype
) -> None:
    small = random(96, 104, seed=6) * scale
    weight, x = small.to(dtype), (random(40, 104, seed=7) * max(scale, 1e-20)).to(dtype)
    product = kernels.Product(weight, None)
    whole = product(x)
    for row in range(40):
        torch.testing.assert_close(
            product(x[row : row + 1]), whole[row : row + 1], rtol=0, atol=0, equal_nan=True
        )
    doubled = torch.full((16,), 2.0**-130, dtype=torch.float32) * 2
    assert doubled.eq(2.0**-129).all(), "the arithmetic of the thread is as it was"


def test_a_weight_of_another_shape_or_type_is_left_to_others() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels.multiply(random(64, 48).to(dtype))
        assert kernels.multiply(random(48, 64).to(dtype)), "panels that are not whole are filled up"
        assert not kernels.multiply(random(64, 47).to(dtype)), "no whole number of pairs"
    assert not kernels.multiply(random(64, 48).half())


# Steps of a decoder, one by one.


def turn(
    qkv: torch.Tensor, heads: int, pieces: torch.Tensor, turns: torch.Tensor, entries: torch.Tensor
) -> None:
    """Rotate the queries of `qkv` [total, heads + 2 * key/value heads, size] in place, and write rotated
    keys, and values, to the pool.

    `turns` [positions, 2, size]: see `kernels.rotations`. float32, but for `entries`; that and `pieces` as in
    `kernels.attend`.
    """
    kernels._kernels.turn(
        qkv.data_ptr(),
        pieces.data_ptr(),
        pieces.shape[0],
        qkv.shape[0],
        heads,
        entries.shape[2],
        qkv.shape[2],
        turns.data_ptr(),
        entries.data_ptr(),
        entries.dtype == torch.bfloat16,
    )


def add_norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    epsilon: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Add `y` to `x` [rows, size] in place, and return x divided by its root mean square, times `weight`
    [size], as `dtype`.

    All arguments float32, contiguous.
    """
    out = torch.empty_like(x, dtype=dtype)
    rows, size = x.shape
    kernels._kernels.add_norm(
        x.data_ptr(),
        0 if y is None else y.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        dtype == torch.bfloat16,
        epsilon,
    )
    return out


def gated(both: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return silu(gate) * up: `both` [rows, 2 * size], gates first, float32, contiguous, to [rows, size] of
    `dtype`.
    """
    rows, size = both.shape
    out = torch.empty((rows, size // 2), dtype=dtype)
    kernels._kernels.gated(both.data_ptr(), out.data_ptr(), rows, size // 2, dtype == torch.bfloat16)
    return out


@DTYPES
def test_steps_between_products_are_those_of_torch(dtype: torch.dtype) -> None:
    rounded = 1e-5 if dtype == torch.float32 else ROUNDED
    x, y, weight = random(5, 96), random(5, 96, seed=1), random(96, seed=3)
    total = x + y
    normed = add_norm(x, y, None, 1e-5, dtype)
    assert normed.dtype == dtype
    assert torch.equal(x, total)
    torch.testing.assert_close(normed.float(), rms_norm(total, (96,), None, 1e-5), rtol=rounded, atol=1e-6)
    assert torch.equal(add_norm(x, None, None, 1e-5, dtype), normed)
    weighted = add_norm(x, None, weight, 1e-5, dtype)
    torch.testing.assert_close(
        weighted.float(), rms_norm(total, (96,), weight, 1e-5), rtol=rounded, atol=1e-6
    )
    both = random(5, 192, seed=2) * 40
    product = gated(both, dtype)
    assert product.dtype == dtype
    torch.testing.assert_close(product.float(), silu(both[:, :96]) * both[:, 96:], rtol=rounded, atol=1e-6)


class Model:
    """A small decoder of random weights: two kinds, with all optional parts and without."""

    heads, kv_heads, size, hidden, inner, tokens = 4, 2, 32, 96, 160, 203

    def __init__(self, dtype: torch.dtype, *, dressed: bool, layers: int = 3) -> None:
        self.dtype, self._dressed, self._seeds = dtype, dressed, iter(range(1000))
        heads, kv_heads, size, hidden, inner = self.heads, self.kv_heads, self.size, self.hidden, self.inner
        self.layers = [
            kernels.LayerWeights(
                before=self.norm(hidden),
                qkv=self.product((heads + 2 * kv_heads) * size, hidden),
                q_norm=self.norm(size),
                k_norm=self.norm(size),
                out=self.product(hidden, heads * size),
                between=self.norm(hidden),
                gate_up=self.product(2 * inner, hidden),
                down=self.product(hidden, inner),
            )
            for _ in range(layers)
        ]
        self.last, self.head = self.norm(hidden), self.product(self.tokens, hidden)
        self.embedding = random(self.tokens, hidden).to(dtype)
        angles = random(700, size // 2)
        self.turns, self.scale = kernels.rotations(angles.cos(), angles.sin()), size**-0.5
        self.decoder = kernels.Decoder(
            self.embedding, self.layers, self.last, self.head, self.turns,
            heads=heads, kv_heads=kv_heads, size=size, epsilon=1e-5, scale=self.scale,
        )  # fmt: skip
        self.pool = pool_for(kv_heads, size, dtype, layers=layers)
        self.planner = KernelPlanner(self.pool, min_rows=1, flat=False)
        self.places = places_for(self.pool, scattered=True)

    def number(self, *shape: int) -> torch.Tensor:
        return random(*shape, seed=next(self._seeds)) / self.hidden**0.5

    def product(self, out: int, width: int) -> kernels.Product:
        bias = self.number(out).to(self.dtype) if self._dressed else None
        return kernels.Product(self.number(out, width).to(self.dtype), bias)

    def norm(self, width: int) -> torch.Tensor | None:
        return 1 + self.number(width) if self._dressed else None

    def pieces(self) -> Plan:
        """Return the plan of all CONTEXTS."""
        return self.planner.plan(
            [Piece(place, *context) for place, context in zip(self.places, CONTEXTS, strict=True)]
        )

    def ids(self, count: int) -> torch.Tensor:
        return torch.randint(self.tokens, (count,), generator=torch.Generator().manual_seed(1))


@DTYPES
@pytest.mark.parametrize("dressed", [False, True], ids=["plain", "with biases and norms"])
def test_a_decoder_takes_its_steps_one_after_the_other(dressed: bool, dtype: torch.dtype) -> None:
    """Each step is as specified by the other tests here; all in one call give the same bits."""
    model = Model(dtype, dressed=dressed)
    pool, size, heads, kv_heads = model.pool, model.size, model.heads, model.kv_heads
    before = [entries.clone() for entries in pool.layers]
    plan = model.pieces()
    assert plan.pieces is not None
    ids = model.ids(plan.total)

    def normed_heads(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return add_norm(x.reshape(-1, size).contiguous(), None, weight, 1e-5).view(x.shape)

    x, y = model.embedding[ids].float(), None
    residuals = []
    for weights, entries in zip(model.layers, pool.layers, strict=True):
        qkv = weights.qkv(add_norm(x, y, weights.before, 1e-5, dtype)).view(plan.total, -1, size)
        residuals.append(x.clone())
        parts = qkv.split([heads, kv_heads, kv_heads], 1)
        qkv = torch.cat(
            [normed_heads(parts[0], weights.q_norm), normed_heads(parts[1], weights.k_norm), parts[2]], 1
        )
        turn(qkv, heads, plan.pieces, model.turns, entries)
        attended = kernels.attend(qkv[:, :heads], entries, plan.pieces, model.scale)
        y = weights.out(attended.view(plan.total, -1))
        y = weights.down(gated(weights.gate_up(add_norm(x, y, weights.between, 1e-5, dtype)), dtype))
    assert y is not None
    logits = model.head(add_norm(x, y, model.last, 1e-5, dtype))
    written = [entries.clone() for entries in pool.layers]

    for entries, old in zip(pool.layers, before, strict=True):
        entries.copy_(old)
    wanted = torch.tensor([plan.total - 1, 0, 5, 5])
    found = model.decoder(ids, plan.pieces, pool.layers, wanted)
    assert found.shape == (4, model.tokens) and bool(found.isfinite().all())
    assert torch.equal(found, logits[wanted])
    for entries, expected_entries in zip(pool.layers, written, strict=True):
        assert torch.equal(entries, expected_entries)
    rows = torch.tensor([3, plan.total - 1, 3])
    for layer, residual in enumerate(residuals):
        copied = kernels.Copied(layer, array("q", rows.tolist()), array("f", [math.nan] * 3 * model.hidden))
        again = model.decoder(ids, plan.pieces, pool.layers, wanted, copied)
        assert copied.to.tolist() == residual[rows].flatten().tolist()
        assert torch.equal(again, found)


@DTYPES
@pytest.mark.parametrize("layers", [1, 3])
def test_what_nobody_wants_of_the_last_layer_is_left_out_and_all_keys_are_written(
    layers: int, dtype: torch.dtype
) -> None:
    """The last layer's rows are needed where logits are wanted; bits are those of all rows."""
    model = Model(dtype, dressed=True, layers=layers)
    before = [entries.clone() for entries in model.pool.layers]
    plan = model.pieces()
    assert plan.pieces is not None
    ids = model.ids(plan.total)
    every = model.decoder(ids, plan.pieces, model.pool.layers, torch.arange(plan.total))
    written = [entries.clone() for entries in model.pool.layers]
    ends = [first + tokens - 1 for first, (_, tokens) in zip(plan.first_row, CONTEXTS, strict=True)]
    for wanted in (
        [],
        [0],
        ends,
        ends[::-1],
        ends[2:5],
        [ends[6] - 3, ends[6], ends[7] - 30, *ends[:2]],
        [3, 3, 3],
    ):
        for entries, old in zip(model.pool.layers, before, strict=True):
            entries.copy_(old)
        some = model.decoder(ids, plan.pieces, model.pool.layers, torch.tensor(wanted, dtype=torch.int64))
        assert torch.equal(some, every[wanted])
        for entries, expected_entries in zip(model.pool.layers, written, strict=True):
            assert torch.equal(entries, expected_entries)


def test_a_row_that_is_in_no_piece_has_no_logits() -> None:
    model = Model(torch.float32, dressed=False)
    plan = model.planner.plan([Piece(model.places[1], 0, 2)])
    assert plan.pieces is not None
    with pytest.raises(IndexError, match="row"):
        model.decoder(model.ids(3), plan.pieces, model.pool.layers, torch.tensor([2, 1]))


@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_a_row_that_there_is_not_cannot_be_copied(row: int) -> None:
    model = Model(torch.float32, dressed=False)
    plan = model.planner.plan([Piece(model.places[1], 0, 2)])
    assert plan.pieces is not None
    copied = kernels.Copied(0, array("q", [row]), array("f", bytes(4 * model.hidden)))
    with pytest.raises(IndexError, match="row"):
        model.decoder(model.ids(2), plan.pieces, model.pool.layers, torch.tensor([1]), copied)


@pytest.mark.parametrize("strange", [-1, Model.tokens, 2**40])
def test_a_token_that_a_decoder_does_not_have_is_refused(strange: int) -> None:
    model = Model(torch.float32, dressed=False, layers=1)
    plan = model.planner.plan([Piece(model.places[1], 0, 1)])
    assert plan.pieces is not None
    ids, first, wanted = torch.tensor([strange]), [kernels.Draft(0, 0, 1, False)], torch.tensor([0])
    with pytest.raises(IndexError, match="no such token"):
        model.decoder(ids, plan.pieces, model.pool.layers, wanted)
    with pytest.raises(IndexError, match="no such token"):
        model.decoder.propose(ids, plan.pieces, model.pool.layers, first, None, model.tokens, [])


SETTINGS = {
    "greedy": [Sampling(0.0)],
    "alike": [Sampling(0.7, seed=3)],
    "different": [Sampling(0.7), Sampling(0.0), Sampling(1.3), Sampling(0.1)],
}


def choosing_for(settings: list[Sampling], rows: int, vocabulary: int) -> tuple[Rows, torch.Tensor | None]:
    """Return settings and noise of choice rows, settings in turn."""
    found = rows_for([settings[row % len(settings)] for row in range(rows)], vocabulary, CPU)
    return found, None if found.plain else Noise(vocabulary).gumbel([7 * row + 1 for row in range(rows)])


def for_kernels(rows: Rows, noise: torch.Tensor | None) -> kernels.Choosing | None:
    return None if noise is None else kernels.Choosing(rows.inverse_temperature, rows.noisy, noise)


@pytest.mark.parametrize("vocabulary", [5, 16, 203, 4096])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_chosen_as_torch_chooses_them(settings: list[Sampling], vocabulary: int) -> None:
    """Bit by bit: whether all rows of a round can be chosen here depends on the other requests. Equal scores
    are many here."""
    logits = (random(60, vocabulary + 3) * 3).round()[:, :vocabulary]
    rows, noise = choosing_for(settings, 70, vocabulary)
    choices = torch.randperm(70, generator=torch.Generator().manual_seed(2))[:60].tolist()
    chosen = kernels.choose(logits, choices, for_kernels(rows, noise))
    own_noise = None if noise is None else noise[choices]
    assert chosen == choose_tokens(logits, rows.select(choices), own_noise).tolist()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_row_that_is_no_number_somewhere_has_no_choice(settings: list[Sampling], broken: float) -> None:
    rows, noise = choosing_for(settings, 8, 203)
    for at in (0, 17, 202):
        logits = random(8, 203)
        logits[5, at] = broken
        chosen = kernels.choose(logits, list(range(8)), for_kernels(rows, noise))
        assert [row for row, token in enumerate(chosen) if token < 0] == [5]


@DTYPES
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_draft_steps_in_one_call_are_those_taken_one_by_one(
    settings: list[Sampling], dtype: torch.dtype
) -> None:
    """Requests of which some only read, of different lengths, of which some stop at ends."""
    model, wishes, vocabulary = Model(dtype, dressed=True), [0, 3, 1, 5, 2, 5, 5, 0], 190
    pieces, places = model.pieces(), model.places
    for place, (start, tokens) in zip(places, CONTEXTS, strict=True):
        more = -(-(start + tokens + max(wishes)) // 16) - len(place.blocks)
        taken = {block for other in places for block in other.blocks}
        place.set_blocks(
            [*place.blocks, *[block for block in range(400) if block not in taken][: max(0, more)]]
        )
    pieces = model.pieces()
    assert pieces.pieces is not None
    before = [entries.clone() for entries in model.pool.layers]
    ids, every = model.ids(pieces.total), sum(wishes)
    rows, noise = choosing_for(settings, every, model.tokens)
    firsts = [sum(wishes[:at]) for at in range(len(wishes))]

    def restore() -> None:
        for entries, old in zip(model.pool.layers, before, strict=True):
            entries.copy_(old)

    def one_by_one(ends: list[int]) -> list[list[int]]:
        restore()
        found: list[list[int]] = [[] for _ in wishes]
        wanted = torch.tensor([first + count - 1 for first, (_, count) in zip(pieces.first_row, CONTEXTS, strict=True)])  # fmt: skip
        assert pieces.pieces is not None
        logits = model.decoder(ids, pieces.pieces, model.pool.layers, wanted)
        going = [at for at, wish in enumerate(wishes) if wish]
        logits = logits[going]
        while going:
            at_rows = [firsts[at] + len(found[at]) for at in going]
            own_noise = None if noise is None else noise[at_rows][:, :vocabulary]
            chosen = choose_tokens(logits[:, :vocabulary], rows.select(at_rows), own_noise).tolist()
            for at, token in zip(going, chosen, strict=True):
                found[at].append(token)
            going = [
                at for at in going if len(found[at]) < wishes[at] and not (at % 2 and found[at][-1] in ends)
            ]
            if not going:
                break
            plan = model.planner.plan(
                [Piece(places[at], sum(CONTEXTS[at]) + len(found[at]) - 1, 1) for at in going]
            )
            assert plan.pieces is not None
            logits = model.decoder(
                torch.tensor([found[at][-1] for at in going]), plan.pieces, model.pool.layers, torch.arange(len(going))
            )  # fmt: skip
        return found

    whole = one_by_one([])
    ends = [whole[3][1], whole[6][0]]  # of a request that stops, and of one that does not
    expected_drafts = one_by_one(ends)
    assert len(expected_drafts[3]) == 2 and len(expected_drafts[6]) == wishes[6]
    written = [entries.clone() for entries in model.pool.layers]
    restore()
    drafts = [kernels.Draft(at, firsts[at], wish, at % 2 == 1) for at, wish in enumerate(wishes) if wish]
    proposed = model.decoder.propose(
        ids, pieces.pieces, model.pool.layers, drafts, for_kernels(rows, noise), vocabulary, ends
    )
    assert proposed == [found for found in expected_drafts if found]
    for entries, expected_entries in zip(model.pool.layers, written, strict=True):
        assert torch.equal(entries, expected_entries)


def test_a_draft_that_is_no_number_goes_no_further() -> None:
    """It proposes one token, which the target refuses: so its acceptance falls."""
    model = Model(torch.float32, dressed=False)
    plan = model.planner.plan([Piece(model.places[1], 3, 1), Piece(model.places[3], 0, 2)])
    assert plan.pieces is not None
    model.pool.layers[0][model.places[1].rows(CPU)[1]] = float("nan")
    drafts = [kernels.Draft(0, 0, 3, True), kernels.Draft(1, 3, 2, True)]
    broken, sound = model.decoder.propose(
        model.ids(3), plan.pieces, model.pool.layers, drafts, None, model.tokens, []
    )
    assert len(broken) == 1 and len(sound) == 2


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them() -> None:
    """NaN stays NaN: a poisoned request must be visible."""
    tokens, size = 64, 32
    bits = torch.randint(-(2**31), 2**31, (tokens, 1, size), generator=torch.Generator().manual_seed(0)).int()
    special = [0x7FFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 0x7F7F8000, 0x3F808000, 0x3F818000, 1, 0]
    bits[0, 0, : len(special)] = torch.tensor(special, dtype=torch.int32)
    values = bits.view(torch.float32)
    entries = torch.empty((tokens, 2, 1, size), dtype=torch.bfloat16)
    one_piece = torch.tensor([[0, tokens, 0, 0, 0]])
    turn(torch.cat([values] * 3, 1), 1, one_piece, torch.zeros(tokens, 2, size), entries)
    written, by_torch = entries[:, 1].float(), values.bfloat16().float()
    assert torch.equal(written.isnan(), values.isnan())
    assert torch.equal(written.nan_to_num(0), by_torch.nan_to_num(0))


@DTYPES
def test_queries_and_keys_turn_and_keys_and_values_are_written(dtype: torch.dtype) -> None:
    heads, kv_heads, size = 4, 2, 32
    angles = random(700, size // 2)
    pool = pool_for(kv_heads, size, dtype)
    before = pool.layers[0].clone()
    for scattered in (False, True):
        pool.layers[0].copy_(before)
        pool.allocator = type(pool.allocator)(400, 4, together=True)
        places = places_for(pool, scattered=scattered)
        pieces = [Piece(place, *context) for place, context in zip(places, CONTEXTS, strict=True)]
        flat = KernelPlanner(pool, min_rows=1, flat=True).plan(pieces)
        assert flat.pieces is not None
        qkv = random(flat.total, heads + 2 * kv_heads, size, seed=1)
        turned = torch.view_as_real(
            torch.view_as_complex(qkv.view(flat.total, -1, size // 2, 2))
            * torch.polar(torch.ones(()), angles[flat.positions])[:, None]
        ).flatten(2)
        values = qkv[:, heads + kv_heads :].clone()
        turn(qkv, heads, flat.pieces, kernels.rotations(angles.cos(), angles.sin()), pool.layers[0])
        torch.testing.assert_close(qkv[:, :heads], turned[:, :heads])
        written = pool.layers[0][flat.write_rows]
        torch.testing.assert_close(
            written[:, 0].float(),
            turned[:, heads : heads + kv_heads],
            rtol=1e-5 if dtype == torch.float32 else ROUNDED,
            atol=1e-5,
        )
        assert torch.equal(written[:, 1], values.to(dtype))
        untouched = torch.ones(before.shape[0], dtype=torch.bool)
        untouched[flat.write_rows] = False
        assert torch.equal(pool.layers[0][untouched], before[untouched])
