"""EAGLE heads for the shipped target in the form that vLLM loads, trained in a minute.

A head is one decoder layer. At each position it reads the target's hidden state there and the token after it, and
proposes the token that follows that one; for further draft tokens it reads its own output instead of the target's state.
EAGLE reads the state after the last layer. EAGLE-3 reads those before three layers, and proposes from a vocabulary of its own.

    python -m tests.vllm.heads METHOD FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

from demo.batches import Batch, loaded_batches
from demo.pair import load_model
from demo.training import Optimizers
from worker_svc.demo import TARGET_DIR

__all__ = ["METHODS", "train"]

METHODS = ("eagle", "eagle3")
STEPS = 160
TOKENS = 512
"""Tokens of a step."""
DRAFTED = 3
"""Draft tokens that are trained."""
LAYERS = (1, 3, 5)
"""Layers of the target whose inputs EAGLE-3 reads."""
PROPOSED = 768
"""Tokens that EAGLE-3 can propose: the most frequent ones."""


class Head(nn.Module):
    """A head without embedding and logits; its parameters have the names that they have in a checkpoint."""

    def __init__(self, target: LlamaForCausalLM, *, eagle3: bool) -> None:
        super().__init__()
        shape = target.config.to_dict() | {
            "num_hidden_layers": 1,
            "intermediate_size": target.config.hidden_size,
            "tie_word_embeddings": False,
        }
        self.config = LlamaConfig(**shape)
        self.config._attn_implementation = "sdpa"
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.eagle3 = eagle3
        self.rotary = llama.LlamaRotaryEmbedding(self.config)
        layer: Any = nn.Module()
        layer.self_attn = llama.LlamaAttention(self.config, 0)
        layer.post_attention_layernorm = llama.LlamaRMSNorm(width, eps)
        layer.mlp = llama.LlamaMLP(self.config)
        if eagle3:
            self.fc = nn.Linear(len(LAYERS) * width, width, bias=False)
            for name in ("q_proj", "k_proj", "v_proj"):
                rows = getattr(layer.self_attn, name).out_features
                setattr(layer.self_attn, name, nn.Linear(2 * width, rows, bias=False))
            layer.input_layernorm = llama.LlamaRMSNorm(width, eps)
            layer.hidden_norm = llama.LlamaRMSNorm(width, eps)
            self.midlayer = layer
            self.norm = llama.LlamaRMSNorm(width, eps)
        else:
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.layers = nn.ModuleList([layer])

    def read(self, states: tuple[Tensor, ...]) -> Tensor:
        """Return what it reads of the target's hidden states, [rows, tokens, width]."""
        combined: Tensor = (
            self.fc(torch.cat([states[at] for at in LAYERS], -1)) if self.eagle3 else states[-1]
        )
        return combined

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states for logits and those to read for the next draft token, [rows, tokens, width]."""
        angles = self.rotary(hidden, batch.positions)
        if self.eagle3:
            layer: Any = self.midlayer
            residual = hidden
            read = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
        else:
            layer = self.layers[0]
            residual = read = self.fc(torch.cat((embedded, hidden), -1))
        residual = residual + layer.self_attn(read, angles, batch.mask())[0]
        output = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return (self.norm(output) if self.eagle3 else output), output


def train(method: str, folder: Path) -> None:
    """Train a head by this method of vLLM's on the corpus of the shipped pair, and write it to a folder."""
    torch.manual_seed(0)
    target = load_model(TARGET_DIR, torch.device("cpu")).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    stream = loaded_batches(0, None, tokenizer, tokens_per_batch=TOKENS)
    head = Head(target, eagle3=method == "eagle3")
    proposed = torch.arange(target.config.vocab_size)
    if head.eagle3:
        seen = torch.cat([next(stream).ids.flatten() for _ in range(50)])
        proposed = seen.bincount(minlength=len(proposed)).topk(PROPOSED).indices.sort().values
    embedding = target.model.embed_tokens
    optimizers = Optimizers(head, 1.0)
    for step in range(STEPS):
        batch = next(stream)
        with torch.no_grad():
            out = target(
                input_ids=batch.ids,
                attention_mask=batch.mask(),
                position_ids=batch.positions,
                output_hidden_states=True,
                use_cache=False,
            )
        # Place t of the head reads the token at t + 1; its goal is the target's distribution there.
        valid = (
            (batch.weights > 0)
            & (batch.weights.roll(-1, 1) > 0)
            & (batch.positions < batch.positions.roll(-1, 1))
        )
        goal = out.logits.roll(-1, 1)[valid][:, proposed].log_softmax(-1)
        embedded = embedding(batch.ids.roll(-1, 1))
        hidden = head.read(out.hidden_states)
        loss = torch.zeros(())
        for _ in range(DRAFTED):
            state, own = head(embedded, hidden, batch)
            logits = nn.functional.linear(state[valid], embedding.weight[proposed])
            loss += nn.functional.kl_div(logits.log_softmax(-1), goal, reduction="batchmean", log_target=True)
            # It reads for the next draft token what it returned one place before.
            hidden = torch.cat((hidden[:, :1], own[:, :-1]), 1)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizers.step(step / STEPS)
    _save(head, embedding.weight, proposed, folder)


def _save(head: Head, embedding: Tensor, proposed: Tensor, folder: Path) -> None:
    """Write a checkpoint. vLLM takes from the target what it lacks: the embedding, and EAGLE's logits."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in head.state_dict().items()}
    about = head.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    if head.eagle3:
        weights["lm_head.weight"] = embedding[proposed]
        # What is added to the number of a proposed token to get its id.
        weights["d2t"] = proposed - torch.arange(len(proposed))
        about |= {"draft_vocab_size": len(proposed), "eagle_aux_hidden_state_layer_ids": LAYERS}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
