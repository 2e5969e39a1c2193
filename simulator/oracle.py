"""Policy with knowledge of the true machine share that a request still needs; no real scheduler has it."""

from __future__ import annotations

from collections.abc import Mapping

from laps_sd.contract.choose import Residency
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Estimate, Policy, rank_key
from scheduler_svc.core.rank import RankKey, Remaining
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request
from simulator.jobs import Job
from simulator.machine import Machine


class Oracle(Policy):
    """Shortest true remaining machine share first, with preemption."""

    name = "oracle"

    def __init__(self, settings: CoreSettings, jobs: Mapping[str, Job], machine: Machine) -> None:
        super().__init__(settings)
        self._jobs = jobs
        self._machine = machine

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank by the job's own future and the machine's true cost."""
        machine = self._machine
        left_s = machine.left_s(self._jobs[request.request_id], request.rounds, request.emitted)
        on_host = request.residency is Residency.HOST
        per_token_s = machine.swap_token_s if on_host else machine.prefill_token_s
        resume_s = per_token_s * request.context_tokens
        total_s = left_s if request.residency is Residency.DEVICE else left_s + resume_s
        found = Estimate(left_s, resume_s, Remaining(total_s, total_s, total_s, Basis.CLASS))
        return rank_key(request, found, left_s, counts_resuming=True)
