"""Train the demo pair: a tokenizer, a small Llama target, and a draft distilled from it.

python -m demo.train --out DIR [--text FOLDER] [--steps N] [--device cpu|cuda] [--seed N]
python -m demo.train --evaluate [--out DIR]
"""

import argparse
import math
import os
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from demo.batches import loaded_batches
from demo.corpus import TOKEN_SHARES, Corpus
from demo.model_card import evaluate
from demo.pair import DRAFT_SHAPE, TARGET_SHAPE, load_model, new_model, save_model
from demo.tokenizer import train_tokenizer
from demo.training import TrainSettings, train_model
from worker_svc.demo import TARGET_DIR


def _train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    out, device = Path(args.out), torch.device(args.device)
    out.mkdir(parents=True, exist_ok=True)
    text_folder = Path(args.text) if args.text else None
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(args.tokenizer)
    else:
        tokenizer = train_tokenizer(Corpus(args.seed, text_folder))
    stream = loaded_batches(
        args.seed,
        text_folder,
        tokenizer,
        tokens_per_batch=args.tokens_per_batch,
        shares=TOKEN_SHARES | dict(args.share),
        loaders=args.loaders,
    )

    def settings(label: str, steps: int, minutes: float, peak: float) -> TrainSettings:
        return TrainSettings(
            label=label,
            steps=max(1, steps),
            limit_s=minutes * 60,
            peak=peak,
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
        train_model(target, stream, settings("target", args.steps, args.minutes, args.peak), teacher=None)
        save_model(target, tokenizer, out / "target")
    draft = new_model(DRAFT_SHAPE, tokenizer)
    if args.draft_init:
        draft.load_state_dict(load_file(args.draft_init), strict=False)
    train_model(
        draft,
        stream,
        settings("draft", args.draft_steps, args.draft_minutes, args.draft_peak),
        teacher=target,
    )
    save_model(draft, tokenizer, out / "draft")


def _share(text: str) -> tuple[str, float]:
    """Parse KIND=SHARE. Raises argparse.ArgumentTypeError."""
    kind, _, share = text.partition("=")
    try:
        if kind in TOKEN_SHARES and float(share) > 0:
            return kind, float(share)
    except ValueError:
        pass
    kinds = ", ".join(TOKEN_SHARES)
    raise argparse.ArgumentTypeError(f"must be KIND=SHARE with a share above 0, of {kinds}; got {text!r}")


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
    parser.add_argument("--draft-init", help="a checkpoint that the draft goes on from")
    parser.add_argument("--peak", type=float, default=1.0, help="factor on the target's learning rates")
    parser.add_argument("--draft-peak", type=float, default=1.0, help="the same for the draft")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument(
        "--share",
        type=_share,
        action="append",
        default=[],
        metavar="KIND=SHARE",
        help="another share of the tokens for a kind, relative to the others (repeatable)",
    )
    parser.add_argument(
        "--loaders", type=int, default=0, help="processes that write and pack the corpus (default: this one)"
    )
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
        evaluate(args)
    elif args.out is None:
        parser.error("--out is needed to train")
    else:
        _train(args)


if __name__ == "__main__":
    main()
