"""Draft heads for the shipped target in the form that vLLM loads, trained in a minute.

A head is one decoder layer. At each position it reads the target's hidden state there and the token after it, and
proposes the token that follows that one; for further draft tokens it reads its own output instead of the target's state.
EAGLE reads the state after the last layer. EAGLE-3 reads those before three layers, and proposes from a vocabulary of its own.
A head for multi-token prediction (MTP) is a part of the target's checkpoint, which here is one of MiMo: its layers are
those of Qwen 2, which with biases of zero are those of the shipped target. It reads the state before the last norm.

    python -m tests.vllm.heads METHOD FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
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

STEPS = 160
TOKENS = 512
"""Tokens of a step."""
DRAFTED = 3
"""Draft tokens that are trained."""
LAYERS = (1, 3, 5)
"""Layers of the target whose inputs EAGLE-3 reads."""
PROPOSED = 768
"""Tokens that EAGLE-3 can propose: the most frequent ones."""


@dataclass(frozen=True)
class States:
    """Hidden states of the target, [rows, tokens, width]."""

    of_layers: tuple[Tensor, ...]
    """Before each layer, and last of all after the last norm."""
    before_norm: Tensor
    """After the last layer, before the last norm."""


class Head(nn.Module):
    """A head without embedding and logits; its parameters have the names that they have in a checkpoint."""

    def __init__(self, target: LlamaForCausalLM, inner: int) -> None:
        super().__init__()
        shape = target.config.to_dict() | {
            "num_hidden_layers": 1,
            "intermediate_size": inner,
            "tie_word_embeddings": False,
        }
        self.config = LlamaConfig(**shape)
        self.config._attn_implementation = "sdpa"
        self.width = self.config.hidden_size
        self.rotary = llama.LlamaRotaryEmbedding(self.config)

    def norm_of_width(self) -> nn.Module:
        return llama.LlamaRMSNorm(self.width, self.config.rms_norm_eps)

    def new_layer(self) -> Any:
        """Return a decoder layer without a norm of its input."""
        layer: Any = nn.Module()
        layer.self_attn = llama.LlamaAttention(self.config, 0)
        layer.post_attention_layernorm = self.norm_of_width()
        layer.mlp = llama.LlamaMLP(self.config)
        return layer

    def through(self, layer: Any, residual: Tensor, read: Tensor, batch: Batch) -> Tensor:
        """Return the output of a layer whose attention reads `read`."""
        angles = self.rotary(residual, batch.positions)
        residual = residual + layer.self_attn(read, angles, batch.mask())[0]
        output: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
        return output

    def read(self, states: States) -> Tensor:
        """Return what it reads of the target's hidden states, [rows, tokens, width]."""
        raise NotImplementedError

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states for logits and those to read for the next draft token, [rows, tokens, width]."""
        raise NotImplementedError


class Eagle(Head):
    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__(target, target.config.hidden_size)
        self.fc = nn.Linear(2 * self.width, self.width, bias=False)
        self.layers = nn.ModuleList([self.new_layer()])

    def read(self, states: States) -> Tensor:
        return states.of_layers[-1]

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        read = self.fc(torch.cat((embedded, hidden), -1))
        output = self.through(self.layers[0], read, read, batch)
        return output, output


class Eagle3(Head):
    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__(target, target.config.hidden_size)
        self.fc = nn.Linear(len(LAYERS) * self.width, self.width, bias=False)
        layer = self.new_layer()
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(layer.self_attn, name).out_features
            setattr(layer.self_attn, name, nn.Linear(2 * self.width, rows, bias=False))
        layer.input_layernorm = self.norm_of_width()
        layer.hidden_norm = self.norm_of_width()
        self.midlayer = layer
        self.norm = self.norm_of_width()

    def read(self, states: States) -> Tensor:
        combined: Tensor = self.fc(torch.cat([states.of_layers[at] for at in LAYERS], -1))
        return combined

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        layer: Any = self.midlayer
        read = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
        output = self.through(layer, hidden, read, batch)
        return self.norm(output), output


class Mtp(Head):
    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__(target, target.config.intermediate_size)
        layer = self.new_layer()
        layer.input_layernorm = self.norm_of_width()
        self.layer = layer
        self.token_layernorm = self.norm_of_width()
        self.hidden_layernorm = self.norm_of_width()
        self.input_proj = nn.Linear(2 * self.width, self.width, bias=False)
        self.final_layernorm = self.norm_of_width()

    def read(self, states: States) -> Tensor:
        return states.before_norm

    def forward(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        embedded = embedded.where(batch.positions.unsqueeze(-1) > 0, 0.0)  # as in vLLM
        both = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), -1)
        residual = self.input_proj(both)
        layer: Any = self.layer
        output = self.final_layernorm(self.through(layer, residual, layer.input_layernorm(residual), batch))
        return output, output


METHODS: dict[str, type[Head]] = {"eagle": Eagle, "eagle3": Eagle3, "mtp": Mtp}


def train(method: str, folder: Path) -> None:
    """Train a head by this method of vLLM's on the corpus of the shipped pair, and write it to a folder."""
    torch.manual_seed(0)
    target = load_model(TARGET_DIR, torch.device("cpu")).eval().requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    stream = loaded_batches(0, None, tokenizer, tokens_per_batch=TOKENS)
    head = METHODS[method](target)
    proposed = torch.arange(target.config.vocab_size)
    if isinstance(head, Eagle3):
        seen = torch.cat([next(stream).ids.flatten() for _ in range(50)])
        proposed = seen.bincount(minlength=len(proposed)).topk(PROPOSED).indices.sort().values
    embedding = target.model.embed_tokens
    before_norm = torch.zeros(())

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal before_norm
        before_norm = inputs[0]

    target.model.norm.register_forward_pre_hook(keep)
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
        hidden = head.read(States(out.hidden_states, before_norm))
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
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(head, Mtp):
        _save_with_target(head, target, folder)
    else:
        _save(head, embedding.weight, proposed, folder)


def _save(head: Head, embedding: Tensor, proposed: Tensor, folder: Path) -> None:
    """Write a checkpoint. vLLM takes from the target what it lacks: the embedding, and EAGLE's logits."""
    weights = {name: value.contiguous() for name, value in head.state_dict().items()}
    about = head.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    if isinstance(head, Eagle3):
        weights["lm_head.weight"] = embedding[proposed]
        # What is added to the number of a proposed token to get its id.
        weights["d2t"] = proposed - torch.arange(len(proposed))
        about |= {"draft_vocab_size": len(proposed), "eagle_aux_hidden_state_layer_ids": LAYERS}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))


def _save_with_target(head: Mtp, target: LlamaForCausalLM, folder: Path) -> None:
    """Write a checkpoint of the target as a model of MiMo, with the head in it."""
    mtp = "model.mtp_layers.0."
    weights = {
        mtp + name.removeprefix("layer."): value.contiguous() for name, value in head.state_dict().items()
    }
    weights |= {name: value.contiguous() for name, value in target.state_dict().items()}
    weights["lm_head.weight"] = target.lm_head.weight.clone()
    for name in [
        name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    ]:
        weights[name.replace(".weight", ".bias")] = torch.zeros(len(weights[name]))
    about = target.config.to_dict() | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))
    for path in TARGET_DIR.glob("tokenizer*"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]))
