"""Logits processors: output format, restrictions, bias and penalties of requests, applied before a token is chosen.

    tokens that the output format excludes      -> -inf
    tokens that a restriction excludes          -> -inf
    logit_bias                                  added
    repetition penalty                          logits of tokens in prompt or output: / it if positive, * it otherwise
                                                [Keskar et al. 2019, as in transformers and vLLM]
    frequency, presence penalty                 logit -= frequency * times in the output + presence * (in the output)

The choice row of a draft token depends on the draft tokens before it, so counts, formats and bad words follow the
draft step by step. They are a function of tokens alone, hence a row's result is that of plain decoding at the same
position. The only state that survives the round can be rebuilt from committed tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from worker_svc.engine.sampling.formats import FormatState
from worker_svc.engine.sampling.restricted import restricted
from worker_svc.engine.sampling.restrictions import Restrictions
from worker_svc.engine.sampling.tally import Tally
from worker_svc.engine.sequence import Sequence


@dataclass(slots=True)
class _Member:
    """A request with a logits processor, and its choice rows in this round."""

    sequence: Sequence
    # Its first choice row, and the number of its choice rows.
    first: int
    count: int
    # Its first row of `Adjustments._counts`; -1 without penalties.
    counted: int
    # Restrictions that may exclude a token in this round.
    restrictions: Restrictions | None = None
    # The last tokens before the newest row that has any, as its bad words need them.
    tail: tuple[int, ...] = ()
    # Draft tokens that its format has taken in.
    steps: int = 0
    # A draft token left its format: later rows do not matter.
    lost: bool = False


def _tail(sequence: Sequence, reach: int) -> tuple[int, ...]:
    """Return the last output tokens of a request, `reach` of them or as many as there are."""
    return tuple(sequence.tokens[max(len(sequence.spec.prompt_ids), len(sequence.tokens) - reach) :])


class Adjustments:
    """The logits processors of one round. Call `proposed` after each draft step, `close` after the last."""

    def __init__(
        self, requests: Iterable[tuple[Sequence, int, int]], vocab_size: int, device: torch.device
    ) -> None:
        """Prepare the processors of `requests`: (request, its first choice row, number of its choice rows)."""
        self._device = device
        self._vocab = vocab_size
        self._members: list[_Member] = []
        self._by_row: dict[int, _Member] = {}
        # By choice row: packed bits of the tokens that are allowed.
        self._masks: dict[int, torch.Tensor] = {}
        # By first choice row of a request: the reason why its format cannot continue.
        self.failed: dict[int, str] = {}
        # The same: number of choice rows before the one at which its format allows nothing.
        self.usable: dict[int, int] = {}
        # By choice row: the tokens before it, of requests with bad words.
        self._tails: dict[int, tuple[int, ...]] = {}
        counted: list[_Member] = []
        rows = 0
        for sequence, first, count in requests:
            sampling = sequence.spec.sampling
            restrictions = sequence.restrictions
            if restrictions is not None and not restrictions.applies(sequence.output_length):
                restrictions = None
            if not count or not (
                sampling.penalises or sampling.logit_bias or sequence.format is not None or restrictions
            ):
                continue
            member = _Member(sequence, first, count, rows if sampling.penalises else -1, restrictions)
            self._members.append(member)
            if restrictions is not None and restrictions.reach:
                member.tail = self._tails[first] = _tail(sequence, restrictions.reach)
            self._by_row.update((row, member) for row in range(first, first + count))
            if sampling.penalises:
                rows += count
                counted.append(member)
            if sequence.format is not None:
                self._mask(member, first, sequence.format)
        if rows:
            self._counts = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
            for member in counted:
                self._counts[member.counted : member.counted + member.count] = self._tally(
                    member.sequence
                ).output

    @property
    def wanted(self) -> bool:
        """True if any request has a logits processor."""
        return bool(self._members)

    @property
    def rows(self) -> Collection[int]:
        """The choice rows whose logits are adjusted."""
        return self._by_row.keys()

    def apply(self, logits: torch.Tensor, choice_rows: SequenceOf[int]) -> torch.Tensor:
        """Return adjusted `logits` [rows, vocabulary of the model] of these choice rows.

        The argument is not changed.
        """
        touched = [(at, row) for at, row in enumerate(choice_rows) if row in self._by_row]
        if not touched:
            return logits
        adjusted = logits.float() if logits.dtype != torch.float32 else logits.clone()
        width = logits.shape[-1]
        masked = [(at, self._masks[row]) for at, row in touched if row in self._masks]
        if masked:
            bits = torch.stack([mask for _, mask in masked]).to(self._device)  # [n, words]
            shifts = torch.arange(32, dtype=torch.int32, device=self._device)
            allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, :width].bool()
            index = torch.tensor([at for at, _ in masked], device=self._device)
            adjusted[index] = adjusted[index].masked_fill(~allowed, -torch.inf)
        for at, row in touched:
            member = self._by_row[row]
            sampling = member.sequence.spec.sampling
            if member.restrictions is not None:
                position = member.sequence.output_length + row - member.first
                adjusted[at] = restricted(
                    adjusted[at], member.restrictions, position, self._tails.get(row, ())
                )
            if sampling.logit_bias:
                ids, values = self._bias(member.sequence, width)
                adjusted[at, ids] += values
            if sampling.penalises:
                counts = self._counts[member.counted + row - member.first, :width]
                assert member.sequence.tally is not None
                adjusted[at] = member.sequence.tally.penalised(adjusted[at], counts, sampling)
        return adjusted

    def proposed(self, choice_rows: SequenceOf[int], tokens: torch.Tensor) -> None:
        """Take in the draft `tokens` [rows] proposed for these choice rows: one step of some requests."""
        if not self.wanted:
            return
        at_rows: list[int] = []
        of_tokens: list[int] = []
        host: list[int] | None = None
        for at, row in enumerate(choice_rows):
            member = self._by_row.get(row)
            if member is None:
                continue
            step = row - member.first
            if member.counted >= 0:
                later = range(step + 1, member.count)
                at_rows.extend(member.counted + j for j in later)
                of_tokens.extend([at] * len(later))
            if row in self._tails and step + 1 < member.count:
                assert member.restrictions is not None
                host = tokens.tolist() if host is None else host
                member.tail = (*member.tail, host[at])[-member.restrictions.reach :]
                self._tails[row + 1] = member.tail
            state = member.sequence.format
            if state is not None and not member.lost:
                host = tokens.tolist() if host is None else host
                if state.advance(host[at]):
                    member.steps += 1
                    if step + 1 < member.count:
                        self._mask(member, row + 1, state)
                else:
                    member.lost = True
        if at_rows:
            rows = torch.tensor(at_rows, device=self._device)
            chosen = tokens[torch.tensor(of_tokens, device=self._device)]
            self._counts.index_put_(
                (rows, chosen), torch.ones_like(chosen, dtype=torch.float32), accumulate=True
            )

    def close(self) -> None:
        """Remove the draft tokens from the formats: the commit adds the committed tokens to them."""
        for member in self._members:
            if member.sequence.format is not None and member.first not in self.failed:
                member.sequence.format.rollback(member.steps)
                member.steps = 0

    def _mask(self, member: _Member, row: int, state: FormatState) -> None:
        mask = state.mask()
        if mask is None and row == member.first:
            state.restart()  # what failed may be a step of another request
            mask = state.mask()
        if mask is not None:
            self._masks[row] = mask
            return
        member.lost = True
        self.usable[member.first] = row - member.first
        if row == member.first:
            self.failed[row] = state.problem

    def _tally(self, sequence: Sequence) -> Tally:
        if sequence.tally is None:
            sequence.tally = Tally(sequence.spec.prompt_ids, self._vocab, self._device)
        sequence.tally.follow(sequence.tokens, len(sequence.spec.prompt_ids))
        return sequence.tally

    def _bias(self, sequence: Sequence, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        known = {token: value for token, value in sequence.spec.sampling.logit_bias if token < width}
        return (
            torch.tensor(list(known), dtype=torch.int64, device=self._device),
            torch.tensor(list(known.values()), dtype=torch.float32, device=self._device),
        )
