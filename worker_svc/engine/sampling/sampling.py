"""The target's choice at a position, given its logits and the noise there.

    scores = logits / temperature          (greedy: logits; the logits processors were applied before)
    choice = argmax of scores + Gumbel(seed, position) over the tokens that top_k, top_p and min_p keep (see
             `truncation`), of equals the smallest token id

The argmax of log-probabilities plus Gumbel noise is an exact sample of the softmax (the Gumbel-max trick),
and adding a constant to all scores changes nothing, so no softmax is needed where nothing is truncated. The
draft proposes by the same rule with the same noise on its own logits ("drafter-invariant" coupling, Daliri et
al. 2024), hence both agree often and the outcome is the target's alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from worker_svc.engine.interface import Sampling
from worker_svc.engine.sampling.truncation import kept

# Settings whose rows are kept from round to round.
ALIKE_KEPT = 64
# The nucleus is looked for among this many largest scores before everything is sorted.
NUCLEUS_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """Per-row settings of a batch of rows, on the device. Build once per round with `rows_for`."""

    inverse_temperature: torch.Tensor  # [rows, 1] float32; 1 for a greedy row
    noisy: torch.Tensor  # [rows, 1] float32; 0 for a greedy row, else 1
    top_k: torch.Tensor  # [rows, 1] int64; vocab where off
    top_p: torch.Tensor  # [rows, 1] float32; above 1 where off
    log_min_p: torch.Tensor  # [rows, 1] float32; -inf where off
    any_min_p: bool
    truncated: tuple[int, ...]  # rows with top_k or top_p; (0,) for all if `alike`
    truncated_index: torch.Tensor  # the same, int64
    sums: bool  # True if any row has top_p without top_k
    free: tuple[int, ...]  # rows with noise and without a restriction; (0,) for all if `alike`
    plain: bool  # all rows greedy: the tensors are empty and not looked at
    alike: bool  # all rows have the same settings: the tensors have one row for all

    @property
    def whole(self) -> bool:
        """True if every row chooses among all tokens."""
        return not (self.truncated or self.any_min_p)

    def select(self, rows: Sequence[int]) -> Rows:
        """Return the settings of some of the rows, in the given order."""
        if self.plain or self.alike:
            return self
        index = torch.tensor(rows, dtype=torch.int64, device=self.noisy.device)
        chosen = set(self.truncated)
        truncated = tuple(new for new, old in enumerate(rows) if old in chosen)
        free = set(self.free)
        return Rows(
            inverse_temperature=self.inverse_temperature[index],
            noisy=self.noisy[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            log_min_p=self.log_min_p[index],
            any_min_p=self.any_min_p,
            truncated=truncated,
            truncated_index=torch.tensor(truncated, dtype=torch.int64, device=self.noisy.device),
            sums=self.sums,
            free=tuple(new for new, old in enumerate(rows) if old in free),
            plain=False,
            alike=False,
        )


def rows_for(settings: Sequence[Sampling], vocab_size: int, device: torch.device | str) -> Rows:
    """Return the rows of `settings`, which has one entry per row of logits."""
    distinct = {id(s): s for s in settings}.values()  # a request has many rows and one `Sampling`
    if all(s.temperature == 0 for s in distinct):
        return _PLAIN
    if len({(s.temperature, s.top_k, s.top_p, s.min_p) for s in distinct}) == 1:
        one = settings[0]
        return _alike(one.temperature, one.top_k, one.top_p, one.min_p, vocab_size, torch.device(device))
    return _rows(settings, vocab_size, device, alike=False)


@lru_cache(maxsize=ALIKE_KEPT)
def _alike(
    temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int, device: torch.device
) -> Rows:
    """Return cached rows: most rounds have the settings of the round before."""
    return _rows(
        [Sampling(temperature, top_k=top_k, top_p=top_p, min_p=min_p)], vocab_size, device, alike=True
    )


def _rows(
    settings: Sequence[Sampling],
    vocab_size: int,
    device: torch.device | str,
    *,
    alike: bool,
) -> Rows:
    columns = [
        (
            1.0 / s.temperature if s.temperature > 0 else 1.0,
            float(s.temperature > 0),
            float(s.top_k if 0 < s.top_k < vocab_size else vocab_size),
            s.top_p if s.top_p < 1 else 2.0,
            math.log(s.min_p) if s.min_p > 0 and s.temperature > 0 else -math.inf,
        )
        for s in settings
    ]
    table = torch.tensor(columns, dtype=torch.float64).to(device)  # [rows, 5]
    noisy = [(row, s, 0 < s.top_k < vocab_size) for row, s in enumerate(settings) if s.temperature > 0]
    truncated = tuple(row for row, s, limited in noisy if limited or s.top_p < 1)
    return Rows(
        inverse_temperature=table[:, 0:1].float(),
        noisy=table[:, 1:2].float(),
        top_k=table[:, 2:3].long(),
        top_p=table[:, 3:4].float(),
        log_min_p=table[:, 4:5].float(),
        any_min_p=any(s.min_p > 0 for _, s, _ in noisy),
        truncated=truncated,
        truncated_index=torch.tensor(truncated, dtype=torch.int64, device=device),
        sums=any(s.top_p < 1 and not limited for _, s, limited in noisy),
        free=tuple(row for row, s, limited in noisy if not (limited or s.top_p < 1 or s.min_p > 0)),
        plain=False,
        alike=alike,
    )


_NOTHING = torch.empty((0, 1))
_PLAIN = Rows(
    _NOTHING,
    _NOTHING,
    _NOTHING,
    _NOTHING,
    _NOTHING,
    any_min_p=False,
    truncated=(),
    truncated_index=_NOTHING,
    sums=False,
    free=(),
    plain=True,
    alike=True,
)


def choose_tokens(logits: torch.Tensor, rows: Rows, noise: torch.Tensor | None) -> torch.Tensor:
    """Return the chosen token of each row, int64 [rows].

    `logits` [rows, vocab] in any floating type; `noise` [rows, vocab] float32, needed unless all rows are
    greedy.
    """
    if rows.plain:
        return logits.argmax(-1)
    assert noise is not None
    scores = logits.float() * rows.inverse_temperature  # [rows, vocab]
    if rows.alike and rows.truncated:
        return _truncated_choice(scores, noise, rows.top_k, rows.top_p, rows.log_min_p, sums=rows.sums)
    among = scores
    if rows.any_min_p:
        least = scores.amax(-1, keepdim=True) + rows.log_min_p
        among = scores.masked_fill(scores < least, -torch.inf)
    chosen = torch.addcmul(among, noise, rows.noisy).argmax(-1)
    if rows.truncated:
        at = rows.truncated_index
        chosen[at] = _truncated_choice(
            scores[at], noise[at], rows.top_k[at], rows.top_p[at], rows.log_min_p[at], sums=rows.sums
        )
    return chosen


def _truncated_choice(
    scores: torch.Tensor,
    noise: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    *,
    sums: bool,
) -> torch.Tensor:
    """Return argmax(scores + noise) over the kept tokens of each row: int64 [rows]."""
    vocab = scores.shape[-1]
    candidates = min(NUCLEUS_CANDIDATES, vocab)
    ordered, ids, keep, complete = kept(scores, top_k, top_p, log_min_p, candidates, whole=sums)
    if not complete:
        ordered, ids, keep, _ = kept(scores, top_k, top_p, log_min_p, vocab)
    noisy = (ordered + noise.gather(-1, ids)).masked_fill_(~keep, -torch.inf)
    winners = ids.masked_fill(noisy < noisy.amax(-1, keepdim=True), vocab)
    return winners.amin(-1)
