"""The shape of a model, and whether its attention can be replaced by ours: read from one forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.errors import first_line

PROBE = "laps_sd_probe"
REFUSED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases inside attention",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model that the KV pool and the planner need."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    laps_sd_seen: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Record the attention options of each layer, without computing attention."""
    if laps_sd_seen is not None:
        layer: int = getattr(module, "layer_idx", -1)
        laps_sd_seen[layer] = {**options, "query": tuple(query.shape), "key": tuple(key.shape)}
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(PROBE, _probe_attention)


@torch.inference_mode()
def probe(model: Any, *, role: str, max_length: int) -> Shape:
    """Return the model's shape from a forward that records its attention options; refuse unsupported
    ones.
    """
    kind, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"the {role} model ({kind}) does not use the attention interface of transformers: not supported"
        )
    if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"the {role} model ({kind}) is not a plain decoder (recurrent state or an encoder): not supported"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < max_length:
        raise ModelError(f"the {role} model has {limit} positions, but max_length is {max_length}")
    seen: dict[int, dict[str, Any]] = {}
    before = model.config._attn_implementation
    model.set_attn_implementation(PROBE)
    try:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=next(model.parameters()).device)
        vocab = model(input_ids=ids, use_cache=False, laps_sd_seen=seen).logits.shape[-1]
    except (TypeError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"the {role} model ({kind}) cannot take our attention: {first_line(error)}"
        ) from error
    finally:
        model.set_attn_implementation(before or "sdpa")
    layers = config.num_hidden_layers
    if sorted(seen) != list(range(layers)):
        raise ModelError(
            f"the {role} model ({kind}) has layers that are not attention over all tokens: not supported"
        )
    for options in seen.values():
        for name, words in REFUSED.items():
            if options.get(name) is not None:
                raise ModelError(f"the {role} model ({kind}) uses {words}: not supported")
        window = options.get("sliding_window")
        if window is not None and window < max_length:
            raise ModelError(
                f"the {role} model ({kind}) has a sliding window of {window} tokens, shorter than max_length {max_length}"
            )
    if len({(options["query"], options["key"]) for options in seen.values()}) != 1:
        raise ModelError(f"the {role} model ({kind}) has layers with different heads: not supported")
    _, heads, _, size = seen[0]["query"]
    return Shape(layers=layers, heads=heads, kv_heads=seen[0]["key"][1], head_size=size, vocab_size=vocab)
