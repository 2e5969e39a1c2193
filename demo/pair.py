"""The models of the demo pair: shapes, and files as Hugging Face has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo.batches import Batch
from demo.corpus import BOS, EOS, PAD
from demo.tokenizer import MAX_POSITIONS, VOCAB_SIZE, save_tokenizer, special_id

TARGET_SHAPE: Final = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
DRAFT_SHAPE: Final = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}


def new_model(shape: dict[str, int], tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama with random weights, in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=special_id(tokenizer, BOS),
        eos_token_id=special_id(tokenizer, EOS),
        pad_token_id=special_id(tokenizer, PAD),
        **shape,
    )
    return LlamaForCausalLM(config)


def logits_of(model: Callable[..., Any], batch: Batch) -> Tensor:
    """[rows, tokens, vocabulary]"""
    out = model(
        input_ids=batch.ids, attention_mask=batch.mask(), position_ids=batch.positions, use_cache=False
    )
    logits: Tensor = out.logits
    return logits


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write plain Hugging Face files in bf16. Training continues in float32, so the model itself does not
    change."""
    save_tokenizer(tokenizer, folder)
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(
        {name: value.to("cpu", torch.bfloat16) for name, value in model.state_dict().items()}
    )
    half.generation_config = GenerationConfig(
        bos_token_id=half.config.bos_token_id,
        eos_token_id=half.config.eos_token_id,
        pad_token_id=half.config.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    half.save_pretrained(folder)
    # Workers compute the pair in float32, so that its texts are the same on every kind of machine.
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))
    for file in folder.iterdir():
        file.chmod(0o644)


def load_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """A saved model, widened to float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.to(device)
