"""The line of the log about the load of a shard, every few seconds while it works."""

from __future__ import annotations

from scheduler_svc.core.views import Totals

__all__ = ["LoadLog"]


class LoadLog:
    """Sum of the workers' reports since the last line. Pure: it gets the time, and returns the fields of the line."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._drafted = self._accepted = self._tokens = 0
        self._preemptions = 0
        """Preemptions up to the last line."""

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """Count the tokens of a turn: drafted, accepted of these, and new output tokens."""
        self._drafted += drafted
        self._accepted += accepted
        self._tokens += tokens

    def fields(
        self, now_s: float, totals: Totals, *, workers: int, kv_usage: float
    ) -> dict[str, int | float] | None:
        """Return the fields of the line, and begin the next one; None while the shard is idle.

        `kv_usage`: share of the KV blocks in use. A shard that has requests is not idle, also if they get no token.
        """
        took_s = now_s - self._since_s
        waiting = totals.queued + totals.listed - totals.running
        found: dict[str, int | float] | None = None
        if self._tokens or waiting or totals.running:
            found = {
                "running": totals.running,
                "waiting": waiting,
                "workers": workers,
                "tokens_per_s": round(self._tokens / took_s, 1) if took_s > 0 else 0.0,
                "acceptance": round(self._accepted / self._drafted, 3) if self._drafted else 0.0,
                "kv_usage": round(kv_usage, 3),
                "preemptions": totals.preemptions - self._preemptions,
            }
        self._since_s, self._preemptions = now_s, totals.preemptions
        self._drafted = self._accepted = self._tokens = 0
        return found
