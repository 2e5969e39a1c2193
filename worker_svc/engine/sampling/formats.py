"""Output formats: the tokens that may come next so that the output can still match the requested format.

A format is compiled once and followed token by token by llguidance
(https://github.com/guidance-ai/llguidance), which needs no torch and no table of the vocabulary. The state of
a request is a function of its output: `follow` walks through committed tokens, so a request that comes back
from another worker, or from eviction, continues at the same state.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from laps_sd.contract import formats
from worker_svc.engine.interface import FormatKind, OutputFormat

KEPT_GRAMMARS = 32  # compiled ones, the most recently used


class FormatState:
    """The state of one request's output in its format.

    A step that would cost too much makes the library's matcher fail for good, and with it all copies of what it was
    copied from. The step may follow a draft token, or be another request's. So `restart` compiles the format again.
    """

    def __init__(
        self, matcher: Any, compile_again: Callable[[], Any], words: int, end_ids: tuple[int, ...]
    ) -> None:
        """`matcher` is the library's, before any output; `compile_again` returns one that shares nothing with
        it. `end_ids`: tokens that end an output. Where it may end, the library's mask has the first of them.
        """
        self._matcher = matcher
        self._compile_again = compile_again
        # Committed tokens, then draft tokens.
        self._tokens: list[int] = []
        # The matcher after this number of tokens, before draft tokens: the library's own rollback may leave one that
        # allows fewer tokens (1.9).
        self._before: tuple[int, Any] | None = None
        self._words = words
        self._end_ids = end_ids
        self.problem = ""

    def mask(self) -> torch.Tensor | None:
        """Return the tokens that may come next, as packed bits, int32 [words].

        None: there are none, and `problem` is the reason.
        """
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self.problem = (
                f"the output format cannot continue: {formats.first_line(self._matcher.get_error())}"
            )
            return None
        mask = torch.zeros(self._words, dtype=torch.int32)
        known = torch.frombuffer(bytearray(bits), dtype=torch.int32)[: self._words]
        mask[: known.numel()] = known
        if self._has(mask, self._end_ids[0]):
            for token in self._end_ids:  # a model may have several, and they mean the same
                mask[token // 32] |= _bit(token)
        if not bool(mask.any()):
            self.problem = "the output format allows no token of this model at this position"
            return None
        return mask

    def advance(self, token: int) -> bool:
        """Take in one more token.

        Returns False, and changes nothing, if the format does not allow it, or has ended or failed.
        """
        if token in self._end_ids or self._matcher.is_stopped():
            return False
        if self._before is None:
            self._before = len(self._tokens), self._matcher.deep_copy()
        if int(self._matcher.try_consume_tokens([token])) != 1:
            return False
        self._tokens.append(token)
        return True

    def valid(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that the format allows one after another."""
        until = next((at for at, token in enumerate(tokens) if token in self._end_ids), len(tokens))
        if self._matcher.is_stopped():
            return 0
        allowed = int(self._matcher.validate_tokens(list(tokens[:until])))
        self.rollback(0)
        return allowed

    def rollback(self, tokens: int) -> None:
        """Forget the last tokens, and a failure after them."""
        del self._tokens[len(self._tokens) - tokens :]
        before, self._before = self._before, None
        if self._matcher.is_error():  # so has the copy
            self.restart()
        elif tokens and before is not None and before[0] == len(self._tokens):
            self._matcher = before[1]
        elif tokens:
            self.restart()

    def follow(self, tokens: Iterable[int]) -> None:
        """Take in committed tokens."""
        committed = list(tokens)
        taken = next((at for at, token in enumerate(committed) if not self.advance(token)), len(committed))
        if self._matcher.is_error():
            self._tokens.extend(committed[taken:])
            self.restart()
        self._before = None

    def restart(self) -> None:
        """Follow all tokens again with another matcher."""
        self._matcher = self._compile_again()
        until = next((at for at, token in enumerate(self._tokens) if token in self._end_ids), None)
        self._matcher.try_consume_tokens(self._tokens[:until])

    @staticmethod
    def _has(mask: torch.Tensor, token: int) -> bool:
        return bool(int(mask[token // 32]) & _bit(token))


def _bit(token: int) -> int:
    """Return the bit of a token in its int32 word."""
    bit = 1 << (token % 32)
    return bit - 2**32 if bit >= 2**31 else bit


class Formats:
    """A compiler of formats for one vocabulary."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._file = tokenizer_file
        self._vocab = vocab_size
        self._end_ids = tuple(sorted(end_ids))
        self._tokenizer: Any = None
        self._compiled: dict[OutputFormat, Any] = {}

    def open(self, wanted: OutputFormat) -> FormatState:
        """Return the state of a new request. Raises ValueError in one sentence for an impossible format."""
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ValueError("format needs the package llguidance on the worker") from None
        if not self._end_ids:
            raise ValueError("format needs a model with an end-of-sequence token")
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._file.read_text(), n_vocab=self._vocab, eos_token=list(self._end_ids)
            )
        compiled = self._compiled.pop(wanted, None)
        if compiled is None:
            compiled = matcher_of(wanted, self._tokenizer)
        self._compiled[wanted] = compiled
        while len(self._compiled) > KEPT_GRAMMARS:
            del self._compiled[next(iter(self._compiled))]
        return FormatState(
            compiled.deep_copy(),
            functools.partial(self._compile_again, wanted),
            -(-self._vocab // 32),
            self._end_ids,
        )

    def _compile_again(self, wanted: OutputFormat) -> Any:
        self._compiled.pop(wanted, None)  # new requests must not share what has failed
        return matcher_of(wanted, self._tokenizer)


def matcher_of(wanted: OutputFormat, tokenizer: Any) -> Any:
    """Return the library's matcher at the start of a format. Raises ValueError."""
    kind: str = wanted.kind.value
    what: Any = wanted.text
    if wanted.kind is FormatKind.JSON_OBJECT:
        kind, what = "json_schema", {"type": "object"}
    elif wanted.kind is FormatKind.JSON_SCHEMA:
        try:
            what = json.loads(wanted.text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"format is not valid JSON: {error}") from None
    try:
        return formats.matcher_of(kind, what, tokenizer)
    except ValueError as error:
        raise ValueError(f"format {error}") from None
