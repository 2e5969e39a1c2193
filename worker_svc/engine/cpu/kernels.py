"""Attention, products, the steps between them, and the choice of tokens, in C (kernels_body.h,
kernels_choose.h): on threads of the CPU (threads.h), in single precision or bfloat16.

In bfloat16 are the weights, their factors, and the KV pool; all sums are in single precision.

The result of a row depends on its own sequence alone, bit for bit: not on other rows, their number, the
location of blocks, or the number of threads. Where these kernels cannot be used (other devices, CPUs without
AVX2, heads of odd sizes, no C compiler when the package was built), torch's operators are.
"""

from __future__ import annotations

import platform
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from worker_svc.engine.cpu.quantised import PANEL, Quantised, blocks

try:
    from worker_svc.engine.cpu import _kernels
except ImportError:  # built without a C compiler
    _kernels = None  # type: ignore[assignment]

BUILT = _kernels is not None
MISSED = not BUILT and platform.machine().lower() in ("x86_64", "amd64")  # they could have been built
AVX2, AVX512, AVX512_BF16, AMX = 1, 2, 3, 4  # kinds of kernels
KIND = _kernels.use(AMX) if BUILT else 0  # that this CPU can run; 0: none
USABLE = KIND > 0
GRAIN = 16  # sizes of heads and of norms are multiples of it
MOST_HEAD_SIZE = 256
PAIR = 2  # numbers in bfloat16 that are multiplied together
PIECE_NUMBERS = 5  # of a piece in kernels.h
ALIGNED = 64  # bytes, of a cache line: weights that begin elsewhere are slower to read
RELAID_TOGETHER = 64  # panels, of which a copy is made
MOST_TOP_K = 1024  # a greater top_k, less than the vocabulary, is left to torch
DTYPES = (torch.float32, torch.bfloat16)
KINDS = {torch.float32: 0, torch.bfloat16: 1}  # of a matrix in kernels.h


def serve(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if attention of such a model is computed here."""
    return not why_not(device, dtype, head_size)


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Return why attention of such a model is not computed here; empty if it is."""
    if device.type != "cpu":
        return "they are for CPUs"
    if not BUILT:
        return "this package was built without a C compiler" if MISSED else "they are for x86 CPUs"
    if not USABLE:
        return "this CPU has no AVX2"
    if dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_size % GRAIN or head_size > MOST_HEAD_SIZE:
        return f"they take heads of a multiple of {GRAIN} numbers up to {MOST_HEAD_SIZE}, and a head has {head_size}"
    return ""


def multiply(weight: torch.Tensor) -> bool:
    """Return True if `Product` supports this weight."""
    return USABLE and weight.device.type == "cpu" and weight.dtype in DTYPES and weight.shape[1] % PAIR == 0


def use_threads(threads: int, cores: Sequence[int] = ()) -> None:
    """Compute with this number of threads from now on, 1 to `cores.MOST_THREADS`, the caller's among them.

    `cores`: one for each thread, which those after the caller's then stay on; empty: any. Bits are the same
    for any number of threads. Threads that have started already stay where they are.
    """
    if BUILT:
        _kernels.use_threads(threads, tuple(cores))


def attend(query: torch.Tensor, entries: torch.Tensor, pieces: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the attention of packed rows: `query` [total, heads, size] to the same in the pool's type; zero
    for rows in no piece.

    `entries` [pool rows, 2, key/value heads, size] is one layer of the pool, `pieces` [pieces, PIECE_NUMBERS]
    int64.
    """
    if query.dtype != torch.float32:
        query = query.float()
    total, heads, size = query.shape
    if query.stride(2) != 1 or query.stride(1) != size:
        query = query.contiguous()
    _, _, kv_heads, _ = entries.shape
    out = entries.new_zeros((total, heads, size))
    _kernels.attend(
        query.data_ptr(),
        query.stride(0),
        out.data_ptr(),
        entries.data_ptr(),
        pieces.data_ptr(),
        pieces.shape[0],
        heads,
        kv_heads,
        size,
        entries.dtype == torch.bfloat16,
        scale,
    )
    return out


class Product:
    """x @ weight.T + bias, added up in single precision: `weight` [out, in] of which `multiply` is true, or a
    quantised one.

    `dtype` is the type of x where the weight is quantised; otherwise it is the weight's.
    """

    def __init__(
        self,
        weight: torch.Tensor | Quantised,
        bias: torch.Tensor | None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        in_place: bool = False,
    ) -> None:
        """Take the weights. `in_place`: the layout may be written over `weight`, which has no other use."""
        self.outputs, self.width = weight.shape
        self.columns = -(-self.outputs // PANEL) * PANEL  # padded with zeros, so that panels are whole
        if not isinstance(weight, Quantised):
            dtype = weight.dtype
        self.half = dtype == torch.bfloat16
        padding = self.columns - self.outputs
        quantised = (0, 0, 0)
        if isinstance(weight, Quantised):
            self._weight = blocks(weight)
            quantised = (weight.bits, weight.group, int(weight.offsets is not None))
        else:
            in_word = PAIR if self.half else 1  # neighbours of `in` that lie together
            if padding:
                weight = pad(weight, (0, 0, 0, padding))
            panels = weight.detach().reshape(self.columns // PANEL, PANEL, self.width // in_word, in_word)
            if in_place and weight.is_contiguous() and weight.data_ptr() % ALIGNED == 0:
                self._weight = _relaid(panels)
            else:
                self._weight = panels.transpose(1, 2).contiguous()
        self._bias = None if bias is None else pad(bias.float(), (0, padding)).contiguous()
        # A matrix of kernels.h, as numbers and in memory.
        self.matrix = (
            self._weight.data_ptr(), _at(self._bias), self.columns, self.width, KINDS[dtype], *quantised,
        )  # fmt: skip
        self._matrix = array("q", self.matrix)
        self.matrix_at = self._matrix.buffer_info()[0]

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the weight's rows [n, in] of these outputs [n] int64."""
        rows = self._weight[outputs // PANEL, :, outputs % PANEL]  # [n, in / in_word, in_word]
        return rows.flatten(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 [..., out] of `x` [..., in], which has the weight's type."""
        if x.dim() != 2:
            return self(x.reshape(-1, self.width)).reshape(*x.shape[:-1], self.outputs)
        if not x.is_contiguous():
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self.columns))
        _kernels.product(self.matrix_at, x.data_ptr(), rows, out.data_ptr())
        return out[:, : self.outputs]


def _relaid(panels: torch.Tensor) -> torch.Tensor:
    """Return `panels` [panels, PANEL, words, in_word] with the middle dimensions exchanged, in the same memory.

    A panel takes the same bytes before and after.
    """
    count, _, words, in_word = panels.shape
    relaid = panels.view(count, words, PANEL, in_word)
    for first in range(0, count, RELAID_TOGETHER):
        part = panels[first : first + RELAID_TOGETHER].transpose(1, 2).contiguous()
        relaid[first : first + RELAID_TOGETHER] = part
    return relaid


def rotations(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the factors of `turn`, [positions, 2, size], from cosines and sines [positions, size / 2]."""
    signed = torch.stack([-sin, sin], -1).flatten(1)
    return torch.stack([cos.repeat_interleave(2, 1), signed], 1).contiguous()


class LayerWeights(NamedTuple):
    """Weights of one decoder layer.

    Norms are float32 [hidden], those of heads [size]; None where the following product contains the weight,
    or there is no norm of heads.
    """

    before: torch.Tensor | None
    qkv: Product  # to queries, keys and values, heads one after the other
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Product
    between: torch.Tensor | None
    gate_up: Product
    down: Product


class Truncation(NamedTuple):
    """top_k, top_p and min_p of choice rows, as in `truncation.kept`, and the keys of their noise."""

    # int64 [choice rows, 1], or [1, 1] for all; 1 .. MOST_TOP_K, or the vocabulary or more.
    top_k: torch.Tensor
    top_p: torch.Tensor  # float32, the same
    log_min_p: torch.Tensor
    keys: array[int]  # of the noise of each choice row, "Q"


class Choosing(NamedTuple):
    """Settings of the choice at choice rows: greatest of logits * inverse_temperature + noisy * noise."""

    inverse_temperature: torch.Tensor  # float32 [choice rows, 1], or [1, 1] for all
    noisy: torch.Tensor  # the same, 0 or 1
    noise: torch.Tensor | None  # float32 [choice rows, vocabulary]; not read for rows that are truncated
    truncation: Truncation | None = None  # None: no row has any


class Draft(NamedTuple):
    """A request whose draft proposes."""

    piece: int  # index of its piece
    choice: int  # choice row of its first proposal
    most: int  # proposals, at most; 1 or more
    stops: bool  # True if it stops after a token that ends a text


class Copied(NamedTuple):
    """Rows of the residual stream that a forward copies out."""

    layer: int  # decoder layers before it: 0 .. layers - 1
    rows: array[int]  # packed rows, int64
    to: array[float]  # float32 [rows, hidden]


class Decoder:
    """A model of the Llama family, from tokens to logits in one call: at a few rows, calling takes as long as
    computing."""

    def __init__(
        self,
        embedding: torch.Tensor | None,
        layers: Sequence[LayerWeights],
        norm: torch.Tensor | None,
        head: Product,
        turns: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        size: int,
        epsilon: float,
        scale: float,
    ) -> None:
        """Take the weights of a model.

        `embedding` [tokens, hidden] of the products' type, contiguous; None: the weight of `head`; `norm`:
        weight of the last norm; `turns`: from `rotations`; `epsilon` of all norms; `scale` of attention.
        """
        hidden, inner = layers[0].out.columns, layers[0].down.width
        self._held = (embedding, layers, norm, head, turns)  # their memory
        weights = [
            number
            for one in layers
            for number in (
                _at(one.before), _at(one.q_norm), _at(one.k_norm), _at(one.between),
                *one.qkv.matrix, *one.out.matrix, *one.gate_up.matrix, *one.down.matrix,
            )
        ]  # fmt: skip
        self._weights = array("q", weights)
        self._head, self._hidden = head, hidden
        self._row = (
            max((heads + 2 * kv_heads) * size, 2 * inner) + 2 * hidden + max(hidden, heads * size, inner)
        )
        self._scratch = torch.empty(0)
        self._decoder = (
            self._weights.buffer_info()[0], len(layers), hidden, inner, heads, kv_heads, size, _at(embedding),
            head.outputs if embedding is None else embedding.shape[0],
            turns.data_ptr(), _at(norm), head.matrix_at, head.half, epsilon, scale,
        )  # fmt: skip

    def __call__(
        self,
        ids: torch.Tensor,
        pieces: torch.Tensor,
        pools: Sequence[torch.Tensor],
        wanted: torch.Tensor,
        copied: Copied | None = None,
    ) -> torch.Tensor:
        """Return logits [wanted, outputs] float32 of these packed rows [wanted] int64; keys and values of all
        go to the pool, and what is `copied` to its place.

        `ids` [total] int64; `pools`: `entries` of each layer as in `attend`, equally far apart; `pieces` as
        there. Raises IndexError for a token that the model does not have, for a wanted row that is in no
        piece, and for a copied row that there is not.
        """
        rows, many = ids.shape[0], wanted.shape[0]
        logits = torch.empty((many, self._head.columns))
        _kernels.forward(
            self._decoder, _packed(ids, pieces, pools), wanted.data_ptr(), many, logits.data_ptr(), self._scratch_at(rows, many, len(pieces)),
            _copied(copied),
        )  # fmt: skip
        return logits[:, : self._head.outputs]

    def propose(
        self,
        ids: torch.Tensor,
        pieces: torch.Tensor,
        pools: Sequence[torch.Tensor],
        drafts: Sequence[Draft],
        choosing: Choosing | None,
        vocabulary: int,
        ends: Sequence[int],
    ) -> list[list[int]]:
        """Run one forward, choose at the last row of each draft's piece among the first `vocabulary` tokens,
        and continue with the chosen tokens.

        Arguments as in `__call__`; `choosing`: None for the greatest logits; `ends`: tokens that end a text.
        Returns the draft tokens of each draft: at least one, and at most `most`; fewer at an end or at
        logits that are not finite.
        """
        many, depth = len(drafts), max(draft.most for draft in drafts)
        table = array("q", [number for draft in drafts for number in draft])
        ended, proposed = array("q", ends), array("q", bytes(8 * many * depth))
        work = array("q", bytes(8 * many * (4 + PIECE_NUMBERS)))
        _kernels.propose(
            self._decoder, _packed(ids, pieces, pools), _choosing(choosing, vocabulary),
            table.buffer_info()[0], many, ended.buffer_info()[0], len(ended), proposed.buffer_info()[0], depth,
            self._scratch_at(ids.shape[0], many, len(pieces), many * self._head.columns), work.buffer_info()[0],
        )  # fmt: skip
        rows = (proposed[at : at + depth].tolist() for at in range(0, many * depth, depth))
        return [row[: row.index(-1)] if row[-1] < 0 else row for row in rows]

    def _scratch_at(self, rows: int, many: int, pieces: int, more: int = 0) -> int:
        """Return the address of the floats that a forward needs, and of `more` floats after them."""
        needed = rows * self._row + many * (self._hidden + 2) + pieces * 2 * PIECE_NUMBERS + more
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed)
        return self._scratch.data_ptr()


def _packed(
    ids: torch.Tensor, pieces: torch.Tensor, pools: Sequence[torch.Tensor]
) -> tuple[int, int, int, int, int, int]:
    first = pools[0].data_ptr()
    apart = pools[1].data_ptr() - first if len(pools) > 1 else 0
    return ids.data_ptr(), ids.shape[0], pieces.data_ptr(), pieces.shape[0], first, apart


def _copied(what: Copied | None) -> tuple[int, int, int, int]:
    if what is None:
        return 0, 0, 0, 0
    layer, rows, to = what
    return layer, rows.buffer_info()[0], len(rows), to.buffer_info()[0]


def _choosing(
    how: Choosing | None, vocabulary: int
) -> tuple[int, int, int, int, int, int, int, int, int, int]:
    if how is None:
        return 0, 0, 0, 0, 0, vocabulary, 0, 0, 0, 0
    inverse, noisy, noise, truncation = how
    noise_row = 0 if noise is None else noise.stride(0)
    limits = (0, 0, 0, 0)
    if truncation is not None:
        top_k, top_p, log_min_p, keys = truncation
        limits = top_k.data_ptr(), top_p.data_ptr(), log_min_p.data_ptr(), keys.buffer_info()[0]
    return (
        inverse.data_ptr(), noisy.data_ptr(), int(inverse.shape[0] > 1), _at(noise), noise_row, vocabulary, *limits
    )  # fmt: skip


def choose_of(logits: torch.Tensor) -> bool:
    """Return True if `choose` supports these logits."""
    return USABLE and logits.device.type == "cpu" and logits.dtype == torch.float32


def choose(logits: torch.Tensor, choices: Sequence[int], choosing: Choosing | None) -> list[int]:
    """Return the token of each row of `logits` [rows, vocabulary] float32 on the CPU.

    It is the first of the greatest; -1 where they are not all finite.

    `choices`: the choice row of each, with settings and noise in `choosing`; `choosing` None: greedy.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, chosen = array("q", choices), array("q", bytes(8 * len(choices)))
    _kernels.choose(
        _choosing(choosing, logits.shape[1]), logits.data_ptr(), logits.stride(0), len(rows), rows.buffer_info()[0], chosen.buffer_info()[0]
    )  # fmt: skip
    return chosen.tolist()


def int64s(numbers: Sequence[int]) -> torch.Tensor:
    """Return one or more numbers as a tensor on the CPU, in a third of the time that `torch.tensor` takes."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def gumbel(keys: Sequence[int], weyl: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [rows, vocab]: `Noise.gumbel` in one pass.

    `weyl` [vocab] int32.
    """
    out = torch.empty((len(keys), weyl.shape[0]))
    held = array("Q", keys)
    _kernels.gumbel(held.buffer_info()[0], 0, len(keys), weyl.data_ptr(), weyl.shape[0], out.data_ptr())
    return out


def gumbel_rows(keys: array[int], rows: Sequence[int], weyl: torch.Tensor, out: torch.Tensor) -> None:
    """Write the noise of some rows of `out` [rows, vocab] float32; `keys`: of all rows."""
    wanted = array("q", rows)
    _kernels.gumbel(
        keys.buffer_info()[0], wanted.buffer_info()[0], len(wanted), weyl.data_ptr(), weyl.shape[0], out.data_ptr()
    )  # fmt: skip
