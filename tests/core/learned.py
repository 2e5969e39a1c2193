"""What priors have learned, beyond the estimates that policies use."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors


def tokens_by_draft_length(priors: Priors, workload_class: str, draft_length: float) -> float:
    """Return the tokens per round of this class with `draft_length` draft tokens, whatever its history
    drafted; at 0 exactly 1.
    """
    return priors._of(workload_class).positions.tokens(draft_length)
