"""All settings of the core, in one object. The defaults are the policy's (nothing tuned per workload)."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.rank import MAX_LEVELS


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Settings of the core. Raises ValueError with a sentence when a value makes no sense."""

    list_factor: int = 2
    """Length of a worker's list as a multiple of its slots, while the queue can fill it. Below 2 a worker may
    run dry between two messages; a large value spreads leases that later have to move."""
    list_margin: float = 0.5
    """Margin beyond the list's length, as a share of it, before a request is taken back. At 0 latencies are the
    same, but a request is leased 1.27 times on average in place of 1.02 (`bursty-b32`)."""
    resend_index_change: float = 0.05
    """Change of an index, as a share, above which a list is sent again. Larger: older ranks at the workers,
    smaller: more messages that change nothing."""
    priors_interval_s: float = 10.0
    """Seconds between two versions of the priors. With each version waiting requests are ranked again when
    they come into play: a small value costs time with many workers, a large one leaves old ranks in place."""
    reserved_share: bool = True
    """Give max(1, B/32) slots to the oldest requests of the shard, so that no request waits forever: our
    choice. With `tenant_fairness`, to the oldest of those whose tenant is not ahead.

    Bound, while no KV is latched and all workers can hold the same requests: with two slots or more, as many
    of the oldest requests as there are reserved slots in the shard are in every round; with one slot each, in
    32 of each 1024. So with two slots or more a request has ended when it has had its own rounds that way,
    after the rounds of the older ones divided by the number of reserved slots; with one, after the rounds of
    the older ones. With `tenant_fairness` this holds while its tenant is not ahead; `core/state/tenants.py`
    has the bound of that time."""
    tenant_fairness: bool = False
    """Keep tenants of one priority within the service of the longest request of each other while both have
    requests in the queue (`core/state/tenants.py`). A request may then be paused for another tenant's under
    every policy."""
    level_base_s: float = 1 / 128
    """Machine seconds up to which a request is in level 0. Levels are absolute and grow exponentially, so the
    base sets the finest distinction only; see `policies/laps_sd.py` for why it is not learnt."""
    level_factor: float = 4.0
    """Each level spans this many times the service of the one before."""
    level_count: int = 12
    """Levels in all; the last one is open-ended. 12 levels of factor 4 reach from 8 ms to 9 hours."""
    perceptible_spread: float = 10.0
    """A request is perceptible when the ends of the 80 % interval of its remaining service differ by no more
    than this factor: its level is then known up to a neighbour. A length predicted as well as predictors do
    passes at arrival (a factor of about 7), a class with chat-like lengths and nothing else does not (13). At
    4, the width of one level, such predictions did not pass either, which cost 24 % of the mean latency (one
    slot, load 0.8)."""
    predicted_spread: float = 20.0
    """The same factor for an estimate that rests on something about the request itself: a hint, its prompt,
    its limit or its worker's prediction. The order by such an estimate is better than by attained service
    even where it is wide. At 10 mean latencies are the same, but a request is paused 0.54 times in place of
    0.46 (`real-predictor`)."""
    perceived_levels: bool = False
    """`laps-sd-paper` only: a perceptible request is in the level of its remaining execution time. Off, it
    stays in that of its attained service, which is the literal reading."""

    def __post_init__(self) -> None:
        if self.list_factor < 1:
            raise ValueError(f"list_factor must be at least 1, not {self.list_factor}")
        if self.list_margin < 0:
            raise ValueError(f"list_margin must not be negative, not {self.list_margin}")
        if self.resend_index_change < 0:
            raise ValueError(f"resend_index_change must not be negative, not {self.resend_index_change}")
        if self.priors_interval_s < 0:
            raise ValueError(f"priors_interval_s must not be negative, not {self.priors_interval_s}")
        if self.level_base_s <= 0:
            raise ValueError(f"level_base_s must be more than 0 seconds, not {self.level_base_s}")
        if self.level_factor <= 1:
            raise ValueError(f"level_factor must be more than 1, not {self.level_factor}")
        if not 1 <= self.level_count <= MAX_LEVELS:
            raise ValueError(f"level_count must be from 1 to {MAX_LEVELS}, not {self.level_count}")
        if min(self.perceptible_spread, self.predicted_spread) < 1:
            raise ValueError("perceptible_spread and predicted_spread must be at least 1")
