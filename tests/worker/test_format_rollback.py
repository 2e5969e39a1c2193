"""The state of a format after draft tokens were taken back is that of its tokens alone."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from worker_svc.engine.interface import FormatKind, OutputFormat
from worker_svc.engine.sampling.formats import Formats

NESTED = OutputFormat(FormatKind.GRAMMAR, 'start: item+\nitem: "a" | "b" item "c"\n')


def allowed(mask: torch.Tensor | None) -> list[int]:
    assert mask is not None
    return [token for token in range(32 * len(mask)) if int(mask[token // 32]) >> token % 32 & 1]


def tokenizer_of_letters() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=264, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=letters
    )
    tokenizer.train_from_iterator(["aaa bbb abab aac"] * 9, trainer)
    return tokenizer


def test_tokens_that_are_taken_back_leave_nothing(tmp_path: Path) -> None:
    tokenizer_of_letters().save(str(tmp_path / "tokenizer.json"))
    formats = Formats(tmp_path / "tokenizer.json", 264, frozenset({2}))
    for seed in range(40):
        rng = random.Random(seed)
        state, output = formats.open(NESTED), []
        for _ in range(20):
            drafted = 0
            state.valid([rng.randrange(264) for _ in range(3)])
            state.valid([rng.choice(allowed(state.mask())) for _ in range(3)])
            for _ in range(rng.randint(1, 4)):
                drafted += state.advance(rng.choice(allowed(state.mask())))
            state.rollback(drafted)
            for _ in range(rng.randint(1, 3)):
                fresh = formats.open(NESTED)
                fresh.follow(output)
                output.append(rng.choice([one for one in allowed(fresh.mask()) if one != 2]))
                state.follow(output[-1:])
            fresh = formats.open(NESTED)
            fresh.follow(output)
            assert allowed(state.mask()) == allowed(fresh.mask())
