"""Random pairs of given shapes, for what a shape decides and weights do not: the time of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int  # of the feed-forward part
    vocab: int
    tied: bool = True  # the output layer is the embedding

    @property
    def multiplied(self) -> int:
        """Return the number of weights that every token is multiplied with: all but the embedding, which is
        looked up.
        """
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.hidden * self.vocab

    def kv_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * item_bytes


PAIRS: dict[str, tuple[Shape, Shape]] = {
    # 287 M: larger than any cache, so that one token costs as much as several.
    "memory-bound": (
        Shape(layers=24, hidden=1024, heads=16, kv_heads=4, head_size=64, inner=2816, vocab=16384),
        Shape(layers=2, hidden=512, heads=8, kv_heads=2, head_size=64, inner=1408, vocab=16384),
    ),
    # 8.0 B and 0.5 B: Llama 3's shape, and that of a Qwen2 of its vocabulary.
    "8b": (
        Shape(
            layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, inner=14336, vocab=128256, tied=False
        ),
        Shape(layers=24, hidden=896, heads=14, kv_heads=2, head_size=64, inner=4864, vocab=128256),
    ),
    # 494 M: that of Qwen2.5-0.5B, without its biases; the draft is as small as its vocabulary allows.
    "qwen2.5-0.5b": (
        Shape(layers=24, hidden=896, heads=14, kv_heads=2, head_size=64, inner=4864, vocab=151936),
        Shape(layers=2, hidden=128, heads=2, kv_heads=1, head_size=64, inner=384, vocab=151936),
    ),
    "tiny": (
        Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, inner=128, vocab=256),
        Shape(layers=1, hidden=32, heads=2, kv_heads=1, head_size=16, inner=64, vocab=256),
    ),
    # Its heads are of a size that other engines take as well.
    "tiny-64": (
        Shape(layers=2, hidden=128, heads=2, kv_heads=1, head_size=64, inner=256, vocab=2048),
        Shape(layers=1, hidden=64, heads=1, kv_heads=1, head_size=64, inner=128, vocab=2048),
    ),
}


def config_of(shape: Shape, max_length: int, **more: Any) -> Any:
    """Return transformers' configuration of a decoder."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=max_length,
        tie_word_embeddings=shape.tied,
        **more,
    )


def random_model(shape: Shape, *, dtype: Any, device: str, seed: int, max_length: int) -> Any:
    """Return a transformers model with random weights, which never ends a text."""
    import torch
    from transformers import LlamaForCausalLM

    config = config_of(shape, max_length, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def write_pair(name: str, folder: Path, *, dtype: str, seed: int, max_length: int) -> tuple[Path, Path]:
    """Write directories of a random target and draft of this shape, as from the hub but
    without a tokenizer.
    """
    places = (folder / "target", folder / "draft")
    for at, (place, shape) in enumerate(zip(places, PAIRS[name], strict=True)):
        write_model(shape, place, dtype=dtype, seed=seed + at, max_length=max_length)
    return places


def write_model(shape: Shape, place: Path, *, dtype: str, seed: int, max_length: int) -> None:
    """Write the directory of a random model, as from the hub but without a tokenizer."""
    import torch

    model = random_model(shape, dtype=getattr(torch, dtype), device="cpu", seed=seed, max_length=max_length)
    model.save_pretrained(place)
