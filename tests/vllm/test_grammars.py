"""Formats of a worker over vLLM. `test_engine.py` has those of whole requests."""

from __future__ import annotations

import functools
import random

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

import torch
from llguidance import LLTokenizer

from tests.worker.test_format_rollback import NESTED, allowed, tokenizer_of_letters
from worker_svc.engine.sampling.formats import matcher_of
from worker_svc.engine.vllm.grammars import FollowedGrammar

TOKENS, END = 264, 2


def test_draft_tokens_that_are_taken_back_leave_nothing() -> None:
    """vLLM takes a step's draft tokens in and back, and then its committed ones in."""
    tokenizer = LLTokenizer(tokenizer_of_letters().to_str(), TOKENS, END)

    def begun(output: list[int]) -> FollowedGrammar:
        grammar = FollowedGrammar(functools.partial(matcher_of, NESTED, tokenizer), tokenizer, TOKENS)
        assert not output or grammar.accept_tokens("r", output)
        return grammar

    def next_of(grammar: FollowedGrammar) -> list[int]:
        bits = torch.zeros((1, -(-TOKENS // 32)), dtype=torch.int32)
        grammar.fill_bitmask(bits, 0)
        return [token for token in allowed(bits[0]) if token != END]

    for seed in range(40):
        rng = random.Random(seed)
        grammar, output = begun([]), list[int]()
        for _ in range(20):
            drafted = rng.randint(1, 4)
            for _ in range(drafted):
                assert grammar.accept_tokens("r", [rng.choice(next_of(grammar))])
            grammar.rollback(drafted)
            for _ in range(rng.randint(1, 3)):
                output.append(rng.choice(next_of(begun(output))))
                assert grammar.accept_tokens("r", output[-1:])
            assert next_of(grammar) == next_of(begun(output))
