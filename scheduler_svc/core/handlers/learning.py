"""Lessons of a round: what reports and ends show of costs, acceptance and lengths goes to the priors."""

from __future__ import annotations

import math
from typing import Final

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.estimates.cost import ENOUGH_ROUNDS, OUTLIER
from scheduler_svc.core.estimates.errors import EstimateErrors
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import Progress, RoundReported
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker

NEWEST_WEIGHT: Final = 0.02
"""Weight of the newest round in a worker's recent figures."""
SLOWNESS_STEP: Final = 0.10
"""Change of a worker's recent slowness, as a share, that placement takes notice of. Our choice: rounds of equal
workers differ by less in the mean, and one outlier changes it by less."""
FIRST_OUTLIVED: Final = 16
"""Output tokens after which it is first learnt that a request runs on, and again at 32, 64 and so on. With 8 or 32
predictions are as good. Our choice."""
OUTLIVED_UNTIL: Final = 1000.0
"""Ended requests until which the predictor learns from those that run too. Later the order of ends hardly matters, and a tenant
that words long requests like short ones would gain from it: 23 % in place of 8 % in `prompts-crafty`. Our choice."""
OWN_ENDS: Final = frozenset({End.STOP, End.LENGTH, End.STOP_SEQUENCE})
"""Ends that are observations of the length of a class: the length itself, and with LENGTH a lower bound. The
others cut a request short."""


class Learner:
    """Adds observations to the priors, and judges past estimates."""

    def __init__(self, priors: Priors, estimate_errors: EstimateErrors, shard: Shard) -> None:
        self._priors = priors
        self._estimate_errors = estimate_errors
        self._shard = shard
        self._mean_slowness = 1.0
        """Mean over recent rounds of the slowness of their workers (decayed)."""

    def learn_round(
        self,
        report: RoundReported,
        verified: int,
        prefilled: int,
        present: list[tuple[Progress, Request]],
        worker: Worker,
    ) -> None:
        """Learn the costs of a round from its report (`verified`, `prefilled`: as it counts them) and from the
        requests that are `present` in the shard. Of rounds that were merged their mean is learnt, and the
        sequences are counted in each of them.
        """
        seconds = report.draft_s + report.verify_s
        drafted_by_all = sum([progress.drafted for progress in report.progress if progress.rounds])
        context = tokens = drafted = accepted = 0
        for progress, request in present:
            if progress.rounds:
                context += request.context_tokens * progress.rounds
                tokens += len(progress.tokens)
            drafted += progress.drafted
            accepted += progress.accepted
        if verified:
            n = report.rounds
            self._learn_cost(
                worker, n, verified / n, (drafted_by_all + verified) / n, context / n, seconds / n
            )
        if prefilled:
            # A round that verifies nothing is all prefill, whatever it calls its parts.
            self._priors.cost.observe_prefill(prefilled, report.prefill_s + (0.0 if verified else seconds))
        if report.swap_s > 0:
            self._learn_swap(report, present, worker)
        worker.reports += 1
        worker.rounds += report.rounds
        worker.tokens += tokens
        weight = min(1.0, NEWEST_WEIGHT * report.rounds)
        worker.drafted += weight * (drafted / report.rounds - worker.drafted)
        worker.accepted += weight * (accepted / report.rounds - worker.accepted)
        if report.total_s > 0:
            worker.tokens_per_s += weight * (tokens / report.total_s - worker.tokens_per_s)

    def _learn_cost(
        self, worker: Worker, rounds: int, batch: float, tokens: float, context: float, seconds: float
    ) -> None:
        """Learn the cost of a round of a mean worker, and how much slower this one is.

        Slowness is relative to the mean of the workers that report, so that the cost model follows when faster
        ones replace all of them.
        """
        cost = self._priors.cost
        if cost.rounds > ENOUGH_ROUNDS and seconds > 0:
            times = seconds / cost.round_s(batch, tokens, context)
            times = min(OUTLIER, max(1 / OUTLIER, times))
            weight = min(1.0, NEWEST_WEIGHT * rounds)
            worker.recent_slowness += weight * (times - worker.recent_slowness)
            if abs(worker.recent_slowness - worker.slowness) > SLOWNESS_STEP * worker.slowness:
                self._shard.set_slowness(worker, worker.recent_slowness)
            self._mean_slowness += weight * (worker.slowness - self._mean_slowness)
        cost.observe_round(batch, tokens, context, seconds * self._mean_slowness / worker.slowness)

    def learn_running(self, request: Request, emitted_before: int) -> None:
        """Learn from the words of a request that it runs on, whenever its output is twice as long as the last time, while
        little is known.

        From then on its own prediction stays as it is, until it is judged: one that knew how far the request has come would seem
        to have found that in the words.
        """
        emitted, facts = request.emitted, request.facts
        doubled = emitted.bit_length() > emitted_before.bit_length()
        if not doubled or emitted < FIRST_OUTLIVED or facts.runs_to_limit or not facts.length_features:
            return
        prompts, guesses = self._priors.prompts, request.guesses
        if prompts.learned >= OUTLIVED_UNTIL or not self._priors.has_class(facts.workload_class):
            return
        predicted = prompts.outlived(facts.length_features, facts.workload_class, facts.tenant, emitted)
        if guesses.predicted_again_at < math.inf:
            guesses.prompt = predicted
            guesses.predicted_again_at = math.inf

    def learn_end(self, end: End, request: Request) -> None:
        """Learn from a request that ended: its acceptance, and its length if it was not cut short."""
        workload_class, tenant = request.facts.workload_class, request.facts.tenant
        if request.seen_rounds:
            self._priors.observe_acceptance(
                workload_class, request.seen_rounds, request.seen_tokens, request.seen_squares, tenant
            )
        # Estimates end at the limit too, so they can be judged by a request that reached it.
        if end in OWN_ENDS and request.kept_estimates is not None:
            self._estimate_errors.judge(request.kept_estimates, request.attained_s)
        # A request that can only run to its limit shows nothing of how long others become.
        if end in OWN_ENDS and request.emitted and not request.facts.runs_to_limit:
            prompts, features, cut = self._priors.prompts, request.facts.length_features, end is End.LENGTH
            # What is judged is the predictor as it was until it learned from this request: of a burst all were predicted
            # before it had learned from any.
            predicted = prompts.learn(features, workload_class, tenant, request.emitted, cut)
            if request.guesses.predicted_again_at < math.inf:
                request.guesses.prompt = predicted
            self._priors.observe_length(workload_class, request.emitted, request.guesses, tenant, cut=cut)

    def _learn_swap(
        self, report: RoundReported, present: list[tuple[Progress, Request]], worker: Worker
    ) -> None:
        """Learn the cost of swaps. Context that came back from the host ran in this round; moves to the host
        are reported with it.
        """
        moved = sum(request.context_tokens for _, request in present if request.residency is Residency.HOST)
        for change in report.residency:
            member = worker.members.get(change.request_id)
            if (
                change.residency is Residency.HOST
                and member is not None
                and member.lease_epoch == change.lease_epoch
            ):
                moved += member.context_tokens
        if moved:
            self._priors.cost.observe_swap(moved, report.swap_s)
