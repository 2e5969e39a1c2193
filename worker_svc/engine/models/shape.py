"""The shape of a model, and whether its attention can be replaced by ours: read from one forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from worker_svc.engine.interface import ModelError
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.models.reach import FULL, MaskFunction, Reach, reach_of

RECORDING = "laps_sd_recording"
REFUSED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "position biases inside attention",
}
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
INSTEAD = "use --engine vllm"
# Lengths in a configuration after which layers do not see the whole context.
LENGTHS = ("sliding_window", "attention_chunk_size")
SHRUNK = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a model that the KV pool and the planner need."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    # Of each layer.
    reaches: tuple[Reach, ...]

    @property
    def limits(self) -> tuple[Reach, ...]:
        """The reaches that do not cover the whole context, each once."""
        return tuple(dict.fromkeys(reach for reach in self.reaches if reach != FULL))


@dataclass(slots=True)
class _Seen:
    """Arguments that the layers of one forward gave to their attention."""

    options: dict[int, dict[str, Any]]
    # Masks of that forward by the address of the tensor that was made for each.
    masks: dict[int, MaskFunction]
    held: list[torch.Tensor]  # these tensors, so that no address is used twice


# The forward that runs, for the mask function, which gets no arguments of ours.
_running: list[_Seen] = []


def _recorded_mask(
    *,
    mask_function: MaskFunction,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Record a mask, and return a tensor whose memory identifies it, also in the slices that a layer may take."""
    token = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    if _running:
        _running[-1].held.append(token)
        _running[-1].masks[token.untyped_storage().data_ptr()] = mask_function
    return token


def _recorded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    laps_sd_seen: _Seen | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Record the attention options of each layer, without computing attention."""
    if laps_sd_seen is not None:
        layer: int = getattr(module, "layer_idx", -1)
        shapes = {"query": tuple(query.shape), "key": tuple(key.shape), "value": tuple(value.shape)}
        laps_sd_seen.options[layer] = {**options, **shapes, "mask": attention_mask}
    batch, heads, rows, _ = query.shape
    return query.new_zeros((batch, rows, heads, value.shape[-1])), None


AttentionInterface.register(RECORDING, _recorded_attention)
AttentionMaskInterface.register(RECORDING, _recorded_mask)


@torch.inference_mode()
def shape_of(model: Any, *, role: str, max_length: int) -> Shape:
    """Return the model's shape from a forward that records its attention options; refuse unsupported
    ones.
    """
    who, config = f"the {role} model ({type(model).__name__})", model.config.get_text_config()
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{who} does not use the attention interface of transformers: {INSTEAD}")
    if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{who} is not a plain decoder (recurrent state or an encoder): {INSTEAD}")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise ModelError(f"{who} has layers of the type {kind}: {INSTEAD}")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and limit < max_length:
        raise ModelError(
            f"the {role} model has {limit} positions, fewer than the longest context of {max_length} tokens: set "
            f"LAPS_SD_CONTEXT_TOKENS to at most {limit}"
        )
    if getattr(config, "attn_temperature_tuning", False) and config.floor_scale <= max_length:
        raise ModelError(
            f"{who} scales attention by a row's place in the forward, not in the context, from "
            f"{config.floor_scale} tokens on: set LAPS_SD_CONTEXT_TOKENS to less, or {INSTEAD}"
        )
    switch = _rotation_switch(config)
    if switch is not None and switch < max_length:
        raise ModelError(
            f"{who} rotates all keys of a context by other angles from {switch} tokens on (longrope): set "
            f"LAPS_SD_CONTEXT_TOKENS to at most {switch}, or {INSTEAD}"
        )
    seen, vocab = _forward(model, who)
    layers = config.num_hidden_layers
    if sorted(seen.options) != list(range(layers)):
        raise ModelError(f"{who} has layers that are not attention over all tokens: {INSTEAD}")
    for options in seen.options.values():
        for name, words in REFUSED.items():
            if options.get(name) is not None:
                raise ModelError(f"{who} uses {words}: {INSTEAD}")
        if options["key"] != options["value"]:
            raise ModelError(
                f"{who} has keys and values of different sizes (multi-head latent attention): {INSTEAD}"
            )
    if len({(options["query"], options["key"]) for options in seen.options.values()}) != 1:
        raise ModelError(f"{who} has layers with different heads: {INSTEAD}")
    reaches = _reaches(seen, who, max_length, next(model.parameters()).device)
    _, heads, _, size = seen.options[0]["query"]
    kv_heads = seen.options[0]["key"][1]
    return Shape(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        vocab_size=vocab,
        reaches=tuple(reaches[layer] for layer in range(layers)),
    )


def lengths_within(model: Any, max_length: int) -> dict[str, int]:
    """Return those of LENGTHS that contexts of up to `max_length` tokens pass, by name."""
    config = model.config.get_text_config()
    found = {name: getattr(config, name, None) for name in LENGTHS}
    return {
        name: length
        for name, length in found.items()
        if isinstance(length, int) and SHRUNK < length < max_length
    }


@contextmanager
def shrunk(model: Any, names: tuple[str, ...]) -> Iterator[None]:
    """Let these lengths of the configuration be SHRUNK inside the context, so that a short text passes them."""
    holders = [model.config, model.config.get_text_config(), *model.modules()]
    before = [
        (holder, name, getattr(holder, name))
        for name in names
        for holder in {id(one): one for one in holders}.values()
        if isinstance(getattr(holder, name, None), int)
    ]
    for holder, name, _ in before:
        setattr(holder, name, SHRUNK)
    try:
        yield
    finally:
        for holder, name, length in before:
            setattr(holder, name, length)


def _rotation_switch(config: Any) -> int | None:
    """Return the tokens of context after which all positions rotate by other angles than before, if any."""
    rope = getattr(config, "rope_parameters", None) or {}
    per_kind = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    found = [
        each.get("original_max_position_embeddings")
        for each in per_kind
        if each.get("rope_type") == "longrope"
    ]
    return min((length for length in found if isinstance(length, int)), default=None)


def _forward(model: Any, who: str) -> tuple[_Seen, int]:
    """Return what the layers gave to attention in a forward of two tokens, and the number of logits."""
    seen = _Seen({}, {}, [])
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDING)
    _running.append(seen)
    try:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=next(model.parameters()).device)
        return seen, model(input_ids=ids, use_cache=False, laps_sd_seen=seen).logits.shape[-1]
    except (TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise ModelError(f"{who} cannot take our attention ({first_line(error)}): {INSTEAD}") from error
    finally:
        _running.pop()
        model.set_attn_implementation(before or "sdpa")


def _reaches(seen: _Seen, who: str, max_length: int, device: torch.device) -> dict[int, Reach]:
    """Return the reach of each layer."""
    by_address = {address: reach_of(function, max_length, device) for address, function in seen.masks.items()}
    found: dict[int, Reach] = {}
    for layer, options in seen.options.items():
        mask = options["mask"]
        reach = FULL if mask is None else by_address.get(mask.untyped_storage().data_ptr())
        if reach is None:
            raise ModelError(f"{who} hides keys by a mask of its own: {INSTEAD}")
        window = options.get("sliding_window")
        if window is not None and window < max_length and reach == FULL:
            raise ModelError(
                f"{who} has a sliding window of {window} tokens without a mask for it: {INSTEAD}"
            )
        found[layer] = reach
    return found
