"""A short forward for the Llama family: the same arithmetic as transformers' with a third of the operators.

At a few rows a small model's forward is mostly the cost of calling operators. Here query, key and value are one product, gate and up are one,
norms are a few operators and their weights part of the products behind them, and rotary embedding is one complex multiplication: the rows of
the query and key weights are reordered so that the two numbers which rotate together lie side by side (dot products of query and key do not
notice). In single precision on the CPU what lies between products is `kernels`', one call each. Only taken when `PackedModel.self_check` finds it equal to the plain forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from worker_svc.engine import kernels
from worker_svc.engine.attention import Plan, attend_rows
from worker_svc.engine.kv import KVPool
from worker_svc.engine.linears import LinearStore, Product

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
STATIC_ROPES = frozenset(
    {"default", "linear", "llama3", "yarn"}
)  # angles are a function of the position alone


def _product(store: LinearStore, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """x @ weight.T + bias, in whatever layout the store chose. Not called as a module: that takes as long as a small product."""
    layer = store.store(weight, bias)
    return partial(linear, weight=weight, bias=bias) if layer is None else layer.forward


class _Norm:
    """Root mean square norm. torch has no kernel for it on the CPU and takes fifteen operators; by hand it takes five, and a few more
    in half precision.
    """

    def __init__(self, norm: nn.Module) -> None:
        self._weight: torch.Tensor = norm.weight  # type: ignore[assignment]
        self._epsilon: float = norm.variance_epsilon  # type: ignore[assignment]
        self._by_hand = self._weight.device.type == "cpu"
        self._least = torch.tensor(self._epsilon, dtype=torch.float32)
        self._share = 1 / self._weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [rows, size], normed."""
        if not self._by_hand:
            return rms_norm(x, (x.shape[-1],), self._weight, self._epsilon)  # type: ignore[no-any-return]
        return self._unweighted(x.float()).to(x.dtype).mul_(self._weight)

    def before(self, weight: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
        """What to call ahead of a product with `weight` [out, size], and what its weight is to be: in single precision ours goes into it."""
        if self._by_hand and weight.dtype == torch.float32:
            return self._unweighted, weight * self._weight
        return self, weight

    def _unweighted(self, x: torch.Tensor) -> torch.Tensor:
        squares = (x * x).sum(-1, keepdim=True)
        return x * torch.add(self._least, squares, alpha=self._share).rsqrt_()


class _Layer:
    """The weights of one decoder layer, fused."""

    def __init__(self, layer: Any, store: LinearStore, heads: int, kv_heads: int, size: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        turn = _side_by_side(size)
        weights = [part.weight for part in parts]
        biases = [part.bias for part in parts]
        for at, count in ((0, heads), (1, kv_heads)):  # values do not rotate
            weights[at] = weights[at].view(count, size, -1)[:, turn].flatten(0, 1)
            if biases[at] is not None:
                biases[at] = biases[at].view(count, size)[:, turn].flatten()
        self.before, weight = _Norm(layer.input_layernorm).before(torch.cat(weights))
        self.qkv = _product(store, weight, None if biases[0] is None else torch.cat(biases))
        self.q_norm, self.k_norm = (
            None if norm is None else (norm.weight[turn].clone(), norm.variance_epsilon)
            for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        )
        self.out = _product(store, attention.o_proj.weight, attention.o_proj.bias)
        both = [mlp.gate_proj, mlp.up_proj]
        bias = None if both[0].bias is None else torch.cat([part.bias for part in both])
        weight = torch.cat([part.weight for part in both])
        self.between, weight = _Norm(layer.post_attention_layernorm).before(weight)
        self.gate_up = _product(store, weight, bias)
        self.down = _product(store, mlp.down_proj.weight, mlp.down_proj.bias)
        self.scale: float = attention.scaling
        self.epsilon: float = layer.input_layernorm.variance_epsilon


class LeanModel:
    """Runs a model of the Llama family on packed rows. `serves` says which.

    Takes the weights over: the model it is made from keeps its embedding and configuration, and cannot run any more.
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
        self._embedding = decoder.embed_tokens.weight
        self._layers: list[_Layer] = []
        for at in range(len(decoder.layers)):  # one by one, so that the weights are never in memory twice
            self._layers.append(_Layer(decoder.layers[at], store, heads, kv_heads, size))
            decoder.layers[at] = nn.Identity()
        self._norm = _Norm(decoder.norm)
        self._head = _product(store, model.lm_head.weight, model.lm_head.bias)
        model.lm_head = nn.Identity()
        positions = torch.arange(max_length, device=self._embedding.device)
        cos, sin = decoder.rotary_emb(
            self._embedding.float(), positions[None]
        )  # [1, max_length, size], halves alike
        half = size // 2
        widths = (decoder.config.hidden_size, decoder.config.intermediate_size)
        # Whether all that is computed is `kernels`', so that any number of rows will do.
        self.by_kernels = (
            by_kernels
            and self._embedding.dtype == torch.float32
            and not any(width % kernels.GRAIN for width in widths)
        )
        if self.by_kernels:
            self._rotations = kernels.rotations(cos[0, :, :half].float(), sin[0, :, :half].float())
            return
        turns = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[
            :, None
        ]  # [max_length, 1, half]
        still = torch.ones_like(turns)
        # Values go through the same multiplication, by one, so that keys and values are written to the pool together.
        self._turns = torch.cat(
            [turns.expand(-1, heads + kv_heads, -1), still.expand(-1, kv_heads, -1)], 1
        ).contiguous()

    @staticmethod
    def serves(model: Any) -> bool:
        """Whether a model is of the family and has nothing that this forward leaves out."""
        config = model.config
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            type(model).__name__ in FAMILY
            and getattr(config, "hidden_act", None) == "silu"
            and rope.get("rope_type", "default") in STATIC_ROPES
            and float(rope.get("partial_rotary_factor", 1.0)) == 1.0
        )

    def forward(
        self, ids: torch.Tensor, plan: Plan, pool: KVPool, logit_rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits [rows, vocab]; arguments as in `PackedModel.forward`."""
        if self.by_kernels and plan.pieces is not None:
            return self._forward_by_kernels(ids, plan, plan.pieces, pool, logit_rows)
        heads, size, total = self._heads, self._size, plan.total
        all_heads = heads + 2 * self._kv_heads
        turns = self._turns.index_select(0, plan.positions)  # [total, all_heads, size / 2]
        x = self._embedding.index_select(0, ids)  # [total, hidden]
        own, first = total - plan.padding, plan.write_first
        for at, layer in enumerate(self._layers):
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

    def _forward_by_kernels(
        self,
        ids: torch.Tensor,
        plan: Plan,
        pieces: torch.Tensor,
        pool: KVPool,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        heads, size, total = self._heads, self._size, plan.total
        x = self._embedding.index_select(0, ids)  # [total, hidden]
        y: torch.Tensor | None = None
        for at, layer in enumerate(self._layers):
            qkv = layer.qkv(kernels.add_norm(x, y, layer.epsilon)).view(total, -1, size)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = rms_norm(qkv[:, :heads], (size,), *layer.q_norm)
                k = rms_norm(qkv[:, heads : heads + self._kv_heads], (size,), *layer.k_norm)
                qkv = torch.cat([q, k, qkv[:, heads + self._kv_heads :]], 1)
            kernels.turn(qkv, heads, pieces, self._rotations, pool.layers[at])
            attended = kernels.attend(qkv[:, :heads], pool.layers[at], pieces, layer.scale)
            normed = kernels.add_norm(x, layer.out(attended.view(total, heads * size)), layer.epsilon)
            y = layer.down(kernels.gated(layer.gate_up(normed)))
        if y is not None:
            x += y
        if logit_rows is not None:
            x = x.index_select(0, logit_rows)
        return self._head(self._norm(x))


def _side_by_side(size: int) -> torch.Tensor:
    """Order of a head's numbers in which i and i + size / 2, which rotate together, are neighbours."""
    return torch.arange(size).view(2, size // 2).t().flatten()
