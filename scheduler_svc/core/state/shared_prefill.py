"""The rounds in which the context of a request is computed, where their time is limited."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.native import mypyc_attr


@mypyc_attr(acyclic=True)
@dataclass(slots=True)
class SharedPrefill:
    """A prefill that takes several rounds, so that other requests do not wait longer for their tokens."""

    rounds: int = 0
    tokens: int = 0
    """Context tokens computed in them."""
    limit_s: float = 0.0
    """Longest time of such a round."""
    others: int = 0
    """Largest number of requests that decoded in one of them."""

    def add(self, tokens: int, limit_s: float, others: int) -> None:
        """Add a round."""
        self.rounds += 1
        self.tokens += tokens
        self.limit_s = max(self.limit_s, limit_s)
        self.others = max(self.others, others)

    def __str__(self) -> str:
        """Describe them for people, without a name of another request."""
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        shared = (
            ""
            if not self.others
            else f", shared with {self.others} request" + ("s" if self.others > 1 else "")
        )
        return f"{self.tokens} tokens in {rounds} of at most {self.limit_s:.2g} s{shared}"
