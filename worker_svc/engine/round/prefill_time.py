"""The seconds that context tokens add to a round, by the length of the context before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from worker_svc.engine.draft_lengths.cost_table import CostTable

# Least cost of a token, as a fraction of the measurement that it comes from: where the weights take longer to
# read than the tokens to compute, more tokens cost nothing measurable, and an estimate near 0 could not
# recover.
LEAST_SHARE = 1 / 256
# The same in seconds, where the clock does not advance in a measurement. A GPU takes longer.
LEAST_S = 1e-7


class Chunk(NamedTuple):
    """Context tokens of one request that a round computes."""

    start: int  # tokens of the context before it
    tokens: int


class PrefillTime:
    """Learns the cost of a context token as a function of the tokens before it, which it attends to.

    The cost is linear in these for attention over all of them, so two points describe it.
    """

    def __init__(self, token: CostTable | None = None) -> None:
        """`token`: seconds of a token by its position; None: a guess, until it is measured."""
        self.token = token or CostTable([1, 4096], [1e-4, 2e-4])

    def seconds(self, chunks: Sequence[Chunk]) -> float:
        """Return the expected seconds of these chunks together."""
        return sum([tokens * self.token(start + tokens // 2) for start, tokens in chunks])

    def fitting(self, seconds: float, start: int, most: int) -> int:
        """Return the tokens after `start` that fit into `seconds`, at most `most`.

        A few less than would fit: the last ones cost as much as those in the middle of the most that could.
        """
        upper = min(most, seconds / self.token(start))
        return max(0, min(most, int(seconds / self.token(start + int(upper / 2)))))

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Learn from the time that a round took because of these chunks."""
        tokens = sum([chunk.tokens for chunk in chunks])
        position = sum([chunk.tokens * (chunk.start + chunk.tokens // 2) for chunk in chunks]) / tokens
        self.token.observe(round(position), seconds / tokens)


def token_costs(tokens: int, plain_s: float, near_s: float, start: int, far_s: float, most: int) -> CostTable:
    """Return the seconds of a context token by its position, from measured forwards.

    `near_s`: `tokens` of them at the beginning of a context; `far_s`: the same after `start` tokens; `plain_s`: a
    round without any; `most`: longest context.
    """
    near = max(max(near_s - plain_s, near_s * LEAST_SHARE) / tokens, LEAST_S)
    slope = max(0.0, far_s - near_s) / tokens / start
    return CostTable([1, max(2, most)], [near, near + slope * max(2, most)])
