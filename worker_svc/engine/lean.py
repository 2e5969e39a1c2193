"""A short forward for the Llama family: the same arithmetic as transformers' with a third of the operators.

At a few rows a small model's forward is mostly the cost of calling operators. Here query, key and value are one product, gate and up are one,
residuals are added inside the products where the layout allows it, and rotary embedding is one complex multiplication: the rows of
the query and key weights are reordered so that the two numbers which rotate together lie side by side (dot products of query and key do not
notice). Only taken when `PackedModel.self_check` finds it equal to the plain forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from worker_svc.engine.attention import Plan, attend_rows
from worker_svc.engine.kv import KVPool
from worker_svc.engine.linears import LinearStore

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
STATIC_ROPES = frozenset(
    {"default", "linear", "llama3", "yarn"}
)  # angles are a function of the position alone


class _Linear:
    """One product, in whatever layout the store chose."""

    def __init__(self, store: LinearStore, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._layer = store.store(weight, bias)
        self._weight = weight if self._layer is None else None
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._layer is not None:
            return self._layer(x)  # type: ignore[no-any-return]
        assert self._weight is not None
        return linear(x, self._weight, self._bias)


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
        self.qkv = _Linear(store, torch.cat(weights), None if biases[0] is None else torch.cat(biases))
        self.q_norm, self.k_norm = (
            None if norm is None else (norm.weight[turn].clone(), norm.variance_epsilon)
            for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        )
        self.out = _Linear(store, attention.o_proj.weight, attention.o_proj.bias)
        both = [mlp.gate_proj, mlp.up_proj]
        bias = None if both[0].bias is None else torch.cat([part.bias for part in both])
        self.gate_up = _Linear(store, torch.cat([part.weight for part in both]), bias)
        self.down = _Linear(store, mlp.down_proj.weight, mlp.down_proj.bias)
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.scale: float = attention.scaling


class LeanModel:
    """Runs a model of the Llama family on packed rows. `serves` says which.

    Takes the weights over: the model it is made from keeps its embedding and configuration, and cannot run any more.
    """

    def __init__(
        self, model: Any, store: LinearStore, *, heads: int, kv_heads: int, size: int, max_length: int
    ) -> None:
        self._heads, self._kv_heads, self._size = heads, kv_heads, size
        decoder = model.model
        self._embedding = decoder.embed_tokens.weight
        self._layers: list[_Layer] = []
        for at in range(len(decoder.layers)):  # one by one, so that the weights are never in memory twice
            self._layers.append(_Layer(decoder.layers[at], store, heads, kv_heads, size))
            decoder.layers[at] = nn.Identity()
        self._norm = decoder.norm
        self._head = _Linear(store, model.lm_head.weight, model.lm_head.bias)
        model.lm_head = nn.Identity()
        positions = torch.arange(max_length, device=self._embedding.device)
        cos, sin = decoder.rotary_emb(
            self._embedding.float(), positions[None]
        )  # [1, max_length, size], halves alike
        half = size // 2
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
        heads, size, total = self._heads, self._size, plan.total
        all_heads = heads + 2 * self._kv_heads
        turns = self._turns[plan.positions]  # [total, all_heads, size / 2]
        x = embedding(ids, self._embedding)  # [total, hidden]
        for at, layer in enumerate(self._layers):
            qkv = layer.qkv(_norm(layer.before, x)).view(total, all_heads, size)
            if layer.q_norm is not None and layer.k_norm is not None:
                q = rms_norm(qkv[:, :heads], (size,), *layer.q_norm)
                k = rms_norm(qkv[:, heads : heads + self._kv_heads], (size,), *layer.k_norm)
                qkv = torch.cat([q, k, qkv[:, heads + self._kv_heads :]], 1)
            turned = torch.view_as_complex(qkv.float().view(total, all_heads, size // 2, 2)) * turns
            qkv = torch.view_as_real(turned).flatten(2).to(x.dtype)
            pool.layers[at].index_copy_(
                0, plan.write_rows, qkv[:, heads:].view(total, 2, self._kv_heads, size)
            )
            attended = attend_rows(qkv[:, :heads], pool, at, plan, layer.scale)
            x = x + layer.out(attended.reshape(total, heads * size))
            gate, up = layer.gate_up(_norm(layer.between, x)).chunk(2, -1)
            x = x + layer.down(silu(gate) * up)
        if logit_rows is not None:
            x = x[logit_rows]
        return self._head(_norm(self._norm, x))


def _side_by_side(size: int) -> torch.Tensor:
    """Order of a head's numbers in which i and i + size / 2, which rotate together, are neighbours."""
    return torch.arange(size).view(2, size // 2).t().flatten()


def _norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = norm.weight  # type: ignore[assignment]
    return rms_norm(x, (x.shape[-1],), weight, norm.variance_epsilon)  # type: ignore[arg-type]
