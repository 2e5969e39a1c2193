"""Problems of a pool, and their kinds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_MESSAGE = 500
"""Largest number of characters of a message."""


class Reason(StrEnum):
    """Kind of a problem: the reason of the condition Ready and of Events, and a label of metrics."""

    TURN_FAILED = "TurnFailed"
    """The operator itself failed, or the API server did not answer."""
    REFUSED = "RefusedByKubernetes"
    """The API server refuses a write: a field of the template, a quota, a right."""
    NOT_OWNED = "DeploymentNotOwned"
    NO_PODS = "PodsNotCreated"
    PAUSED = "DeploymentPaused"
    CHANGED = "DeploymentChanged"
    """Another writer changes the Deployment again and again."""
    NO_SCHEDULER = "SchedulerUnreachable"
    RANKS = "RanksDifferFromGpus"
    POLICY = "PolicyDiffers"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a pool, as its status, its condition and its Events show it."""

    reason: Reason
    message: str

    def __str__(self) -> str:
        return self.message[:MAX_MESSAGE]
