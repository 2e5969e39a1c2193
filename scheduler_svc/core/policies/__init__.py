"""Policies: each computes a rank. docs/how-to/add-a-policy.md has the steps to add one.

A policy changes a rank only when it is called, that is when an event touches the request; it keeps no state
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.policies.fcfs import Fcfs
from scheduler_svc.core.policies.laps_sd import LapsSd
from scheduler_svc.core.policies.laps_sd_paper import LapsSdPaper
from scheduler_svc.core.policies.las import Las
from scheduler_svc.core.policies.mlfq import Mlfq
from scheduler_svc.core.policies.sd_index import SdIndex
from scheduler_svc.core.policies.sjf_length import SjfLength
from scheduler_svc.core.policies.srpt_length import SrptLength
from scheduler_svc.core.settings import CoreSettings

__all__ = ["POLICIES", "Policy", "PolicyName", "policy_named"]

PolicyName = Literal[
    "laps-sd", "laps-sd-paper", "sd-index", "srpt-length", "sjf-length", "las", "mlfq", "fcfs"
]
"""The names of `POLICIES`, for settings."""

POLICIES: dict[str, Callable[[CoreSettings], Policy]] = {
    policy.name: policy for policy in (LapsSd, LapsSdPaper, SdIndex, SrptLength, SjfLength, Las, Mlfq, Fcfs)
}


def policy_named(name: str, settings: CoreSettings) -> Policy:
    """Return the policy of that name; raise ValueError with all names if there is none."""
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, not {name!r}")
    return POLICIES[name](settings)
