"""A short forward for the Llama family: the same arithmetic as transformers' with a third of the operators.

At a few rows a small model's forward is mostly the cost of calling operators. Here query, key and value are
one product, gate and up are one, norms are a few operators and their weights part of the products after them,
and rotary embedding is one complex multiplication: the rows of the query and key weights are reordered so
that the two numbers which rotate together lie side by side (dot products of query and key do not notice). On
the CPU all layers are one call of `kernels`, and all numbers between products are in single precision,
whatever the type of the weights. Only used if `PackedModel.self_check` finds it equal to the plain forward.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from worker_svc.engine.cache.kv import KVPool
from worker_svc.engine.cpu import kernels
from worker_svc.engine.cpu.quantised import PANEL, Quantised, stacked
from worker_svc.engine.models.attention import attend_rows
from worker_svc.engine.models.hidden import HiddenRows
from worker_svc.engine.models.linears import KernelLinear, LinearStore, Product
from worker_svc.engine.models.memory import return_memory
from worker_svc.engine.models.plan import Plan

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# Bytes from which on an embedding with the weights of the output layer is not kept: a row of that layer's layout
# takes microseconds to collect, which is much for a small model. Our choice.
TIED_FROM_BYTES = 2**24
# Kinds of rotary embedding whose angles are a function of the position alone.
STATIC_ROPES = frozenset({"default", "linear", "llama3", "yarn"})


def _product(
    store: LinearStore,
    weight: torch.Tensor | Quantised,
    bias: torch.Tensor | None = None,
    *,
    single: bool,
    in_place: bool = False,
) -> Product:
    """Return x @ weight.T + bias as a function, in the layout that the store chose; `single`: in single
    precision; `in_place` as in `LinearStore.store`.
    """
    return _called(store.store(weight, bias, in_place=in_place), weight, bias, single=single)


def _called(
    layer: nn.Module | None, weight: torch.Tensor | Quantised, bias: torch.Tensor | None, *, single: bool
) -> Product:
    """Return a layer of a store as a function.

    It is not called as a module: that takes as long as a small product.
    """
    if single and isinstance(layer, KernelLinear):
        return layer.product
    if isinstance(weight, Quantised):
        assert layer is not None, "a store has a layer for each of these"
        return layer.forward
    product = partial(linear, weight=weight, bias=bias) if layer is None else layer.forward
    if single and weight.dtype != torch.float32:
        return lambda x: product(x).float()
    return product


def _together(weights: list[torch.Tensor | Quantised], dtype: torch.dtype) -> torch.Tensor | Quantised:
    """Return the rows of several weights as one; dequantised to `dtype` if they are of different kinds."""
    quantised = [weight for weight in weights if isinstance(weight, Quantised)]
    if len(quantised) == len(weights) and all(weight.alike(quantised[0]) for weight in quantised):
        return stacked(quantised)
    return torch.cat(
        [weight.dequantised().to(dtype) if isinstance(weight, Quantised) else weight for weight in weights]
    )


def _reordered(weight: torch.Tensor | Quantised, rows: torch.Tensor) -> torch.Tensor | Quantised:
    return weight.at(rows) if isinstance(weight, Quantised) else weight[rows]


class _Norm:
    """Root mean square norm. torch has no kernel for it on the CPU and takes fifteen operators; by hand it
    takes five, and a few more in half precision.
    """

    def __init__(self, norm: nn.Module) -> None:
        self.epsilon: float = norm.variance_epsilon  # type: ignore[assignment]
        self._torch_weight: torch.Tensor = norm.weight  # type: ignore[assignment]
        # None: it is part of the following product.
        self.weight: torch.Tensor | None = self._torch_weight.float()
        self._least = torch.tensor(self.epsilon, dtype=torch.float32)
        self._share = 1 / self._torch_weight.numel()

    def fold(self, weight: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
        """Return the weight [out, size] of the following product, which contains the norm's in single
        precision on the CPU, unless it is quantised.
        """
        if isinstance(weight, Quantised) or weight.device.type != "cpu" or weight.dtype != torch.float32:
            return weight
        self.weight = None
        return weight * self._torch_weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x` [rows, size]."""
        if x.device.type != "cpu":
            return rms_norm(x, (x.shape[-1],), self._torch_weight, self.epsilon)
        wide = x.float()
        squares = (wide * wide).sum(-1, keepdim=True)
        normed = wide * torch.add(self._least, squares, alpha=self._share).rsqrt_()
        return normed if self.weight is None else normed.to(x.dtype).mul_(self._torch_weight)


class _Layer:
    """The weights of one decoder layer, fused."""

    def __init__(
        self, layer: Any, store: LinearStore, heads: int, kv_heads: int, size: int, *, by_kernels: bool
    ) -> None:
        product = partial(_product, store, single=by_kernels)
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        turn = _side_by_side(size)
        weights = [part.weight for part in parts]
        biases = [part.bias for part in parts]
        for at, count in ((0, heads), (1, kv_heads)):  # values do not rotate
            rows = (torch.arange(count)[:, None] * size + turn).flatten()
            weights[at] = _reordered(weights[at], rows)
            if biases[at] is not None:
                biases[at] = biases[at][rows]
        self.before = _Norm(layer.input_layernorm)
        dtype = layer.input_layernorm.weight.dtype
        weight = self.before.fold(_together(weights, dtype))
        self.qkv = product(weight, None if biases[0] is None else torch.cat(biases), in_place=True)
        self.q_norm, self.k_norm = (
            None
            if norm is None
            else (norm.weight[turn].to(torch.float32 if by_kernels else dtype), norm.variance_epsilon)
            for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        )
        self.out = product(attention.o_proj.weight, attention.o_proj.bias)
        both = [mlp.gate_proj, mlp.up_proj]
        bias = None if both[0].bias is None else torch.cat([part.bias for part in both])
        weight = _together([part.weight for part in both], dtype)
        self.between = _Norm(layer.post_attention_layernorm)
        self.gate_up = product(self.between.fold(weight), bias, in_place=True)
        self.down = product(mlp.down_proj.weight, mlp.down_proj.bias)
        self.scale: float = attention.scaling

    @property
    def epsilons(self) -> set[float]:
        """Epsilons of the layer's norms."""
        heads = [norm[1] for norm in (self.q_norm, self.k_norm) if norm is not None]
        return {self.before.epsilon, self.between.epsilon, *heads}

    def for_kernels(self) -> kernels.LayerWeights | None:
        """Return the weights for `kernels.Decoder`.

        None if some product is not `kernels`', or not of whole panels.
        """
        qkv, out, gate_up, down = self.qkv, self.out, self.gate_up, self.down
        if not (
            isinstance(qkv, kernels.Product)
            and isinstance(out, kernels.Product)
            and isinstance(gate_up, kernels.Product)
            and isinstance(down, kernels.Product)
            and all(one.outputs == one.columns for one in (qkv, out, gate_up, down))
        ):
            return None
        q_norm, k_norm = (None if norm is None else norm[0] for norm in (self.q_norm, self.k_norm))
        return kernels.LayerWeights(
            self.before.weight, qkv, q_norm, k_norm, out, self.between.weight, gate_up, down
        )


class FusedLlama:
    """A model of the Llama family that runs on packed rows. `serves` is True for supported models.

    It takes the weights over: the model it is made from keeps its embedding and configuration, and cannot run
    any more.
    """

    def __init__(
        self,
        model: Any,
        store: LinearStore,
        *,
        heads: int,
        kv_heads: int,
        size: int,
        max_length: int,
        by_kernels: bool,
    ) -> None:
        self._heads, self._kv_heads, self._size = heads, kv_heads, size
        decoder = model.model
        # None: its rows are those of the output layer.
        self._embedding: torch.Tensor | None = decoder.embed_tokens.weight
        self._width, device = self._embedding.shape[1], self._embedding.device
        self._rows: kernels.Product | None = None
        self._head = self._take_head(model, store, single=by_kernels)
        widths = (decoder.config.hidden_size, decoder.config.intermediate_size)
        # True if all computation is by `kernels`, so that any number of rows will do.
        self.by_kernels = (
            by_kernels
            and isinstance(self._head, kernels.Product)
            and not any(width % kernels.GRAIN for width in widths)
        )
        layer_of = partial(_Layer, store=store, heads=heads, kv_heads=kv_heads, size=size)
        self._layers: list[_Layer] = []
        for_kernels = self._take_layers(decoder.layers, layer_of)
        self._norm = _Norm(decoder.norm)
        positions = torch.arange(max_length, device=device)
        # Of its first argument it takes the type and the device. [1, max_length, size], halves alike.
        both = decoder.rotary_emb(torch.empty(1, dtype=torch.float32, device=device), positions[None])
        cos, sin = (each[0, :, : size // 2].float() for each in both)
        self.decoder: kernels.Decoder | None = None  # if all is computed by `kernels`
        if self.by_kernels and isinstance(self._head, kernels.Product):
            (epsilon,) = {self._norm.epsilon}.union(*(layer.epsilons for layer in self._layers))
            (scale,) = {layer.scale for layer in self._layers}
            self.decoder = kernels.Decoder(
                self._embedding, for_kernels, self._norm.weight, self._head, kernels.rotations(cos, sin),
                heads=heads, kv_heads=kv_heads, size=size, epsilon=epsilon, scale=scale,
            )  # fmt: skip
        else:
            self._turns = _turns(cos, sin)
            # of each head: 0 turns, 1 stands still
            self._still = torch.tensor([0] * (heads + kv_heads) + [1] * kv_heads, device=device)

    def _take_head(self, model: Any, store: LinearStore, *, single: bool) -> Product:
        """Return the output layer. A large embedding of the same weight is read from there too."""
        weight, bias = model.lm_head.weight, model.lm_head.bias
        same = (
            not isinstance(weight, Quantised)
            and weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        )
        tied = same and weight.nbytes >= TIED_FROM_BYTES
        head = store.store(weight, bias, in_place=tied or not same)
        if tied and isinstance(head, KernelLinear):
            self._embedding, self._rows = None, head.product
            model.model.embed_tokens = nn.Identity()
        model.lm_head = nn.Identity()
        return _called(head, weight, bias, single=single)

    def _take_layers(self, layers: Any, layer_of: Callable[..., _Layer]) -> list[kernels.LayerWeights]:
        """Fill `_layers`, and return their weights for `kernels`, if these compute all."""
        for_kernels: list[kernels.LayerWeights] = []
        for at in range(len(layers)):  # one by one, so that the weights are never in memory twice
            layer = layer_of(layers[at], by_kernels=self.by_kernels)
            if self.by_kernels:
                weights = layer.for_kernels()
                if weights is not None:
                    for_kernels.append(weights)
                else:
                    assert at == 0, "layers are alike"
                    self.by_kernels = False
                    layer = layer_of(layers[at], by_kernels=False)
            self._layers.append(layer)
            layers[at] = nn.Identity()
            return_memory()
        return for_kernels

    @staticmethod
    def serves(model: Any) -> bool:
        """Return True if a model is of the family and has no part that this forward leaves out."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            type(model).__name__ in FAMILY
            and getattr(config, "hidden_act", None) == "silu"
            and rope.get("rope_type", "default") in STATIC_ROPES
            and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
        )

    @staticmethod
    def fits_kernels(model: Any, heads: int, kv_heads: int, size: int) -> bool:
        """Return True if `kernels` compute all of a model that is served, once they compute its attention."""
        hidden, inner = model.config.hidden_size, model.config.intermediate_size
        outputs = (hidden, 2 * inner, (heads + 2 * kv_heads) * size)
        whole = not any(count % PANEL for count in outputs)
        head = model.lm_head.weight
        served = isinstance(head, Quantised) or kernels.multiply(head)
        return whole and not inner % kernels.GRAIN and served

    def forward(
        self,
        ids: torch.Tensor,
        plan: Plan,
        pool: KVPool,
        logit_rows: torch.Tensor | None,
        hidden: HiddenRows | None = None,
    ) -> torch.Tensor:
        """Return logits [rows, vocab]; arguments as in `PackedModel.forward`."""
        if self.decoder is not None and plan.pieces is not None:
            wanted = torch.arange(plan.total) if logit_rows is None else logit_rows
            if hidden is None:
                return self.decoder(ids, plan.pieces, pool.layers, wanted)
            count = len(hidden.rows)
            states = array("f", bytes(4 * count * self._width))
            hidden.states = np.frombuffer(states, np.float32).reshape(count, self._width)
            copied = kernels.Copied(hidden.layer, array("q", hidden.rows), states)
            return self.decoder(ids, plan.pieces, pool.layers, wanted, copied)
        heads, size, total = self._heads, self._size, plan.total
        all_heads = heads + 2 * self._kv_heads
        turns = self._turns.index_select(0, plan.positions)
        turns = turns.index_select(1, self._still)  # [total, all_heads, size / 2]
        x = self._embedded(ids)
        own, first = total - plan.padding, plan.write_first
        for at, layer in enumerate(self._layers):
            if hidden is not None and at == hidden.layer:
                hidden.take(x)
            qkv = layer.qkv(layer.before(x)).view(total, all_heads, size)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = rms_norm(qkv[:, :heads], (size,), *layer.q_norm)
                k = rms_norm(qkv[:, heads : heads + self._kv_heads], (size,), *layer.k_norm)
                qkv = torch.cat([q, k, qkv[:, heads + self._kv_heads :]], 1)
            turned = torch.view_as_complex(qkv.float().view(total, all_heads, size // 2, 2)) * turns
            qkv = torch.view_as_real(turned).flatten(2).to(x.dtype)
            written = qkv[:, heads:].view(total, 2, self._kv_heads, size)
            if first is None:
                pool.layers[at].index_copy_(0, plan.write_rows, written)
            else:
                pool.layers[at][first : first + own] = written[:own] if plan.padding else written
            attended = attend_rows(qkv[:, :heads], pool, at, plan, layer.scale, 2 * self._kv_heads)
            x = x + layer.out(attended.reshape(total, heads * size))
            gate, up = layer.gate_up(layer.between(x)).chunk(2, -1)
            x = x + layer.down(silu(gate) * up)
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
        return self._head(self._norm(x))

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [total, hidden] of tokens [total]."""
        if self._embedding is not None:
            return self._embedding.index_select(0, ids)
        assert self._rows is not None
        return self._rows.rows(ids)


def _turns(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the factors [positions, 2, half] of queries and keys, and of values, from cosines and sines
    [positions, half].

    Values, which stand still, go through the same multiplication as keys, by one, so that both are written to
    the pool together.
    """
    turns = torch.complex(cos, sin)
    return torch.stack([turns, torch.ones_like(turns)], 1)


def _side_by_side(size: int) -> torch.Tensor:
    """Return the order of a head's numbers in which i and i + size / 2, which rotate together, are
    neighbours.
    """
    return torch.arange(size).view(2, size // 2).t().flatten()
