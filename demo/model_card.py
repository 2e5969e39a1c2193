"""The figures of the model card: held-out loss and acceptance of the pair."""

import argparse
import json
import random
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, LlamaForCausalLM

from demo._tasks.task import is_held_out
from demo._tasks.tools import tool_chat
from demo.batches import Packer, batches
from demo.corpus import TOKEN_SHARES, Corpus, message_text, tool_prompt
from demo.evaluate import GAMMA, sample, summarise, table
from demo.pair import load_model, logits_of
from demo.prompts import KINDS, Prompt, demo_prompts

EVALUATION_SEED: Final = 7
TOOL_KINDS: Final = ("one call", "several calls", "reply to a result", "no call")


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, packer: Packer, n_batches: int) -> dict[str, float]:
    """Cross-entropy in nats per completion token, by kind."""
    kinds = list(TOKEN_SHARES)
    sums, counts = torch.zeros(len(kinds)), torch.zeros(len(kinds))
    for _, batch in zip(range(n_batches), batches(packer, 4096), strict=False):
        logits = logits_of(model, batch).flatten(0, 1).float()
        losses = nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        counted = batch.weights.flatten() == 1.0
        owners = batch.kinds.flatten()[counted]
        sums.index_add_(0, owners, losses[counted])
        counts.index_add_(0, owners, torch.ones(len(owners)))
    return {kind: float(sums[i] / counts[i]) for i, kind in enumerate(kinds)}


def tool_prompts(n: int) -> list[Prompt]:
    """n held-out chats with functions for each kind of next message."""
    rng = random.Random(f"tools/{EVALUATION_SEED}")
    chosen: dict[str, list[Prompt]] = {kind: [] for kind in TOOL_KINDS}
    while any(len(prompts) < n for prompts in chosen.values()):
        example = tool_chat(rng)
        if not example.functions or not is_held_out(example.question):
            continue
        calls = len(example.answer.calls)
        if calls:
            kind = "one call" if calls == 1 else "several calls"
        else:
            kind = "reply to a result" if example.turns[-1].role == "tool" else "no call"
        if len(chosen[kind]) < n:
            chosen[kind].append(Prompt(kind, tool_prompt(example), message_text(example.answer)))
    return [prompt for prompts in chosen.values() for prompt in prompts]


def evaluate(args: argparse.Namespace) -> None:
    """Print the tables of the model card; JSON with --json."""
    cpu = torch.device("cpu")
    out = Path(args.out)
    target, draft = load_model(out / "target", cpu).eval(), load_model(out / "draft", cpu).eval()
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    text_folder = Path(args.text) if args.text else None
    report: dict[str, Any] = {}

    losses: dict[str, dict[str, float]] = {}
    for name, model in (("target", target), ("draft", draft)):
        corpus = Corpus(EVALUATION_SEED, text_folder, held_out=True)
        packer = Packer(corpus, Tokenizer.from_file(str(out / "target" / "tokenizer.json")))
        losses[name] = held_out_loss(model, packer, n_batches=40)
    by_kind = {kind: {name: losses[name][kind] for name in losses} for kind in TOKEN_SHARES}
    print("Held-out cross-entropy, nats per completion token\n\n" + table(by_kind), flush=True)
    report["cross_entropy"] = by_kind

    prompts = demo_prompts(None, args.prompts_per_kind * len(KINDS), EVALUATION_SEED)
    for temperature in (0.0, 0.8, 1.0):
        samples = []
        for chat in (False, True):
            samples += sample(
                target,
                draft,
                tokenizer,
                prompts,
                temperature=temperature,
                max_new_tokens=256,
                seed=EVALUATION_SEED + chat,
                chat=chat,
            )
        rows = {kind: summarise([s for s in samples if s.prompt.kind == kind], tokenizer) for kind in KINDS}
        rows["all"] = summarise(samples, tokenizer)
        print(f"\nTemperature {temperature}, gamma {GAMMA}\n\n" + table(rows), flush=True)
        report[f"temperature_{temperature}"] = rows
    samples = sample(
        target, draft, tokenizer, tool_prompts(4 * args.prompts_per_kind), temperature=0.0, max_new_tokens=256
    )
    rows = {kind: summarise([s for s in samples if s.prompt.kind == kind], tokenizer) for kind in TOOL_KINDS}
    print(f"\nChats with tools, temperature 0, gamma {GAMMA}\n\n" + table(rows), flush=True)
    report["tools"] = rows
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
