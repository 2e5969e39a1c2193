"""Results of a simulation: of each job, and of the whole run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from scheduler_svc.core.estimates.errors import EstimateErrors
from scheduler_svc.core.estimates.priors import Priors
from simulator.jobs import Job


@dataclass(slots=True)
class Fate:
    """Result of one job."""

    job: Job
    arrival_s: float = 0.0
    """Time on the simulation's clock, as are the next two."""
    first_token_s: float = 0.0
    finished_s: float = 0.0
    running_s: float = 0.0
    """Time in the rounds of this request."""
    preemptions: int = 0
    evictions: int = 0
    perceptible_after: int | None = None
    """Rounds until the policy ranked it as perceptible; 0: at arrival; None: never."""

    @property
    def latency_s(self) -> float:
        """Return the time from arrival to end."""
        return self.finished_s - self.arrival_s

    @property
    def waited_s(self) -> float:
        """Return the total time in which it did not run."""
        return self.latency_s - self.running_s


@dataclass(slots=True)
class Outcome:
    """Result of one run."""

    fates: list[Fate]
    busy_s: float = 0.0
    """Time in rounds, all workers together."""
    end_s: float = 0.0
    swapped_tokens: int = 0
    prefilled_tokens: int = 0
    found_tokens: int = 0
    """Prompt tokens that were found in prefix caches, and not computed."""
    steps: int = 0
    level_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Machine seconds by the level of the requests when their round was reported; the total is `busy_s`."""
    level_requests: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids of the requests that ran in a level."""
    estimate_errors: EstimateErrors = field(default_factory=EstimateErrors)
    """Errors of the core's estimates of remaining service."""
    digest: str = ""
    """Digest of all commands, if requested: equal digests mean equal decisions."""
    priors: Priors = field(default_factory=Priors)
    """Learned priors at the end of the run."""
