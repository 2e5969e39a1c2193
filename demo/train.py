"""Train the demo pair: a tokenizer, a small Llama target, and a draft distilled from it.

    python -m demo.train --out DIR [--text FOLDER] [--steps N] [--device cpu|cuda] [--seed N]
    python -m demo.train --evaluate [--out DIR]

One batch is a rectangle of packed documents. A document sees only itself: the attention mask is block-diagonal and
positions start again at every document. Completions carry the loss; what stands before them counts a tenth.
"""

import argparse
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo.corpus import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    TOKEN_SHARES,
    Corpus,
    Document,
)
from demo.evaluate import GAMMA, sample, summarise, table
from demo.prompts import KINDS, demo_prompts
from worker_svc.demo import TARGET_DIR

VOCAB_SIZE: Final = 1024
MAX_POSITIONS: Final = 2048
PROMPT_LOSS_WEIGHT: Final = 0.1
SHORT_ROW_TOKENS: Final = 256
LONG_ROW_TOKENS: Final = 1024
TOKENIZER_DOCUMENTS_PER_KIND: Final = 3000
EVALUATION_SEED: Final = 7
MUON_LR: Final = 0.02
ADAMW_LR: Final = 3e-3
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


@dataclass(frozen=True, slots=True)
class Batch:
    """A rectangle of packed documents."""

    ids: Tensor  # [rows, tokens] int64
    positions: Tensor  # [rows, tokens] int64, from 0 in every document
    mask: Tensor  # [rows, 1, tokens, tokens] bool, True where the query (third) may see the key (fourth)
    labels: Tensor  # [rows, tokens] int64, the next token of the same document
    weights: Tensor  # [rows, tokens] float32, 0 where there is no next token
    kinds: Tensor  # [rows, tokens] int64, index into the kinds of TOKEN_SHARES, -1 for padding

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        fields = (self.ids, self.positions, self.mask, self.labels, self.weights, self.kinds)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in fields))


@dataclass(frozen=True, slots=True)
class _Encoded:
    kind: int
    ids: list[int]
    prompt_tokens: int


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer lacks the special token {token}")
    return int(token_id)


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own, so that arithmetic and counting see places."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for kind, stream in corpus.streams.items():
            n = round(TOKENIZER_DOCUMENTS_PER_KIND * (2.0 if kind in ("prose", "source") else 1.0))
            for _, document in zip(range(n), stream, strict=False):
                text = document.prompt + document.completion
                for special in SPECIAL_TOKENS:
                    text = text.replace(special, "")
                yield text

    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    bos_id = _special_id(tokenizer, BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, bos_id)]
            ),
        ]
    )
    return tokenizer


class Packer:
    """Turns the corpus into batches whose token shares follow TOKEN_SHARES exactly over time."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._kinds = list(corpus.streams)
        self._tokens_drawn = dict.fromkeys(self._kinds, 0)
        self._ready: dict[str, deque[_Encoded]] = {kind: deque() for kind in self._kinds}
        self._waiting_long: deque[_Encoded] = deque()
        self._eos_id = _special_id(tokenizer, EOS)
        self._pad_id = _special_id(tokenizer, PAD)

    def encode(self, documents: list[Document]) -> list[_Encoded]:
        """Prompt and completion are encoded apart, as they are when a model continues a prompt."""
        prompts = self._tokenizer.encode_batch([d.prompt for d in documents], add_special_tokens=False)
        completions = self._tokenizer.encode_batch(
            [d.completion for d in documents], add_special_tokens=False
        )
        encoded = []
        for document, prompt, completion in zip(documents, prompts, completions, strict=True):
            ids = [*prompt.ids, *completion.ids, self._eos_id][: LONG_ROW_TOKENS - 1]
            encoded.append(_Encoded(self._kinds.index(document.kind), ids, len(prompt.ids)))
        return encoded

    @property
    def waiting_tokens(self) -> int:
        """Tokens of documents too long for a short row."""
        return sum(len(document.ids) for document in self._waiting_long)

    def _next_document(self) -> _Encoded:
        """A document of the kind that is furthest behind its share."""
        kind = min(self._kinds, key=lambda k: self._tokens_drawn[k] / TOKEN_SHARES[k])
        ready = self._ready[kind]
        if not ready:
            stream = self._corpus.streams[kind]
            ready.extend(self.encode([next(stream) for _ in range(128)]))
        document = ready.popleft()
        self._tokens_drawn[kind] += len(document.ids)
        return document

    def batch(self, *, row_tokens: int, rows: int) -> Batch:
        """Fill rows first-fit until four documents in a row found no room."""
        placed: list[list[_Encoded]] = [[] for _ in range(rows)]
        room = [row_tokens] * rows

        def place(document: _Encoded) -> bool:
            for row in range(rows):
                if len(document.ids) <= room[row]:
                    placed[row].append(document)
                    room[row] -= len(document.ids)
                    return True
            return False

        misses = 0
        while misses < 4:
            takes_long = row_tokens > SHORT_ROW_TOKENS and self._waiting_long
            document = self._waiting_long.popleft() if takes_long else self._next_document()
            if len(document.ids) > row_tokens or not place(document):
                misses += row_tokens >= len(document.ids)
                self._waiting_long.append(document)
                if takes_long:
                    break
        return self._collate(placed, row_tokens)

    def _collate(self, placed: list[list[_Encoded]], row_tokens: int) -> Batch:
        shape = (len(placed), row_tokens)
        ids = torch.full(shape, self._pad_id)
        positions = torch.zeros(shape, dtype=torch.int64)
        owners = torch.full(shape, -1)
        labels = torch.zeros(shape, dtype=torch.int64)
        weights = torch.zeros(shape)
        kinds = torch.full(shape, -1)
        for row, documents in enumerate(placed):
            start = 0
            for number, document in enumerate(documents):
                n = len(document.ids)
                span = slice(start, start + n)
                tokens = torch.tensor(document.ids)
                ids[row, span] = tokens
                positions[row, span] = torch.arange(n)
                owners[row, span] = number
                kinds[row, span] = document.kind
                labels[row, start : start + n - 1] = tokens[1:]
                first_loss = max(document.prompt_tokens - 1, 0)
                weights[row, start : start + min(first_loss, n - 1)] = PROMPT_LOSS_WEIGHT
                weights[row, start + first_loss : start + n - 1] = 1.0
                start += n
        causal = torch.ones(row_tokens, row_tokens, dtype=torch.bool).tril()
        mask = (owners[:, :, None] == owners[:, None, :]) & causal
        return Batch(ids, positions, mask[:, None], labels, weights, kinds)


def batches(packer: Packer, tokens_per_batch: int) -> Iterator[Batch]:
    """Short rows; long ones as soon as long documents fill them. Attention costs by the square of the row."""
    while True:
        row_tokens = LONG_ROW_TOKENS if packer.waiting_tokens >= tokens_per_batch else SHORT_ROW_TOKENS
        yield packer.batch(row_tokens=row_tokens, rows=max(1, tokens_per_batch // row_tokens))


def new_model(shape: dict[str, int], tokenizer: Tokenizer) -> LlamaForCausalLM:
    """A Llama with random weights, in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=_special_id(tokenizer, BOS),
        eos_token_id=_special_id(tokenizer, EOS),
        pad_token_id=_special_id(tokenizer, PAD),
        **shape,
    )
    return LlamaForCausalLM(config)


def logits_of(model: Callable[..., Any], batch: Batch) -> Tensor:
    """[rows, tokens, vocabulary]"""
    out = model(input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False)
    logits: Tensor = out.logits
    return logits


class Optimizers:
    """Muon for the matrices of the layers, AdamW for embeddings and norms; one schedule for both."""

    def __init__(self, model: nn.Module, peak: float) -> None:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
        self._peak = peak
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
        ]

    @staticmethod
    def rate_factor(progress: float) -> float:
        """Warm-up, a plateau, then linear to zero over the last six tenths."""
        return min(1.0, progress / 0.02 + 0.02, max(0.0, (1.0 - progress) / 0.6))

    def step(self, progress: float) -> None:
        """Apply the gradients; progress runs from 0 to 1 over the training."""
        for optimizer, peak in zip(self._optimizers, (MUON_LR, ADAMW_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self._peak * self.rate_factor(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """One training, of the target or of the draft."""

    label: str
    steps: int
    limit_s: float  # where the machine is too slow for `steps`, the schedule reaches its end by this time
    peak: float  # factor on the learning rates
    tokens_per_batch: int
    device: torch.device
    compiled: bool
    checkpoint: Path


def train_model(
    model: LlamaForCausalLM, packer: Packer, settings: TrainSettings, *, teacher: LlamaForCausalLM | None
) -> int:
    """Cross-entropy on the corpus or, with a teacher, forward KL divergence to its distribution. Returns the steps."""
    device = settings.device
    forward: Callable[..., Any] = model.to(device).train()
    guide: Callable[..., Any] | None = teacher.to(device).eval() if teacher is not None else None
    if settings.compiled:
        forward = torch.compile(forward, dynamic=False)
        guide = torch.compile(guide, dynamic=False) if guide is not None else None
    optimizers = Optimizers(model, settings.peak)
    stream = batches(packer, settings.tokens_per_batch)
    started_s = time.monotonic()
    running, seen_tokens, step, progress = 0.0, 0, 0, 0.0
    while progress < 1.0:
        batch = next(stream).to(device)
        keep = batch.weights.flatten() > 0
        weights = batch.weights.flatten()[keep]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = logits_of(forward, batch).flatten(0, 1)[keep]
        if guide is None:
            losses = nn.functional.cross_entropy(
                logits.float(), batch.labels.flatten()[keep], reduction="none"
            )
        else:
            with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
                goal = logits_of(guide, batch).flatten(0, 1)[keep].float().log_softmax(-1)
            losses = nn.functional.kl_div(
                logits.float().log_softmax(-1), goal, reduction="none", log_target=True
            ).sum(-1)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step(progress)
        step += 1
        seen_tokens += int((batch.kinds >= 0).sum())
        elapsed_s = time.monotonic() - started_s
        progress = max(step / settings.steps, elapsed_s / settings.limit_s)
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if step % 20 == 0 or progress >= 1.0:
            print(
                f"{settings.label} step {step}/{settings.steps} loss {running:.3f} tokens {seen_tokens / 1e6:.2f}M "
                f"{seen_tokens / elapsed_s:.0f} tok/s {elapsed_s:.0f} s",
                flush=True,
            )
        if step % 200 == 0:
            save_file(
                {name: p.detach().contiguous() for name, p in model.named_parameters()}, settings.checkpoint
            )
    return step


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, and a tokenizer_config.json that holds the chat template as well."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write plain Hugging Face files in bf16. Training continues in float32, so the model itself does not change."""
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
    for file in folder.iterdir():
        file.chmod(0o644)


def load_model(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """A saved model, widened to float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    return model.to(device)


def _train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    out, device = Path(args.out), torch.device(args.device)
    out.mkdir(parents=True, exist_ok=True)
    text_folder = Path(args.text) if args.text else None
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    else:
        tokenizer = train_tokenizer(Corpus(args.seed, text_folder))
    packer = Packer(Corpus(args.seed, text_folder), tokenizer)

    def settings(label: str, steps: int, minutes: float, peak: float) -> TrainSettings:
        return TrainSettings(
            label=label,
            steps=max(1, steps),
            limit_s=minutes * 60,
            peak=peak,
            tokens_per_batch=args.tokens_per_batch,
            device=device,
            compiled=args.compile,
            checkpoint=out / f"{label}.checkpoint.safetensors",
        )

    if args.only_draft:
        target = load_model(out / "target", device)
    else:
        target = new_model(TARGET_SHAPE, tokenizer)
        if args.init:
            target.load_state_dict(load_file(args.init), strict=False)  # the head is tied to the embedding
        train_model(target, packer, settings("target", args.steps, args.minutes, args.peak), teacher=None)
        save_model(target, tokenizer, out / "target")
    draft = new_model(DRAFT_SHAPE, tokenizer)
    train_model(draft, packer, settings("draft", args.draft_steps, args.draft_minutes, 1.0), teacher=target)
    save_model(draft, tokenizer, out / "draft")


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


def _evaluate(args: argparse.Namespace) -> None:
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
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Parse the command line, then train or evaluate."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.train", description="Train or evaluate the demo pair."
    )
    parser.add_argument(
        "--out", help="folder of target/ and draft/ (with --evaluate, by default the shipped pair)"
    )
    parser.add_argument("--text", help="folder with .txt and .txt.gz files to train on as well")
    parser.add_argument("--tokenizer", help="a tokenizer.json to keep, instead of training one")
    parser.add_argument("--steps", type=int, default=4200, help="steps of the target")
    parser.add_argument("--draft-steps", type=int, default=2000, help="distillation steps of the draft")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end the target's schedule by then")
    parser.add_argument(
        "--draft-minutes", type=float, default=math.inf, help="end the draft's schedule by then"
    )
    parser.add_argument("--init", help="a checkpoint that the target goes on from")
    parser.add_argument("--peak", type=float, default=1.0, help="factor on the target's learning rates")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--only-draft", action="store_true", help="keep the target that is in --out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile: a slower start, then a third faster"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="measure the pair instead of training one")
    parser.add_argument(
        "--prompts-per-kind", type=int, default=16, help="each is asked plainly and as a chat"
    )
    parser.add_argument("--json", help="write the measured figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.evaluate:
        args.out = args.out or str(TARGET_DIR.parent)
        _evaluate(args)
    elif args.out is None:
        parser.error("--out is needed to train")
    else:
        _train(args)


if __name__ == "__main__":
    main()
