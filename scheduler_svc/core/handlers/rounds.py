"""Reports of rounds: progress, starts and pauses, attained service, ends."""

from __future__ import annotations

from dataclasses import replace

from laps_sd.contract.choose import ON_DEVICE, Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Commit, StoryLine
from scheduler_svc.core.events import Progress, RoundReported
from scheduler_svc.core.handlers.deaths import Deaths
from scheduler_svc.core.handlers.draining import move_running
from scheduler_svc.core.handlers.learning import Learner
from scheduler_svc.core.handlers.requests import Requests
from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.policies.ranker import Ranker
from scheduler_svc.core.rank import OrderKey
from scheduler_svc.core.state.request import SURVIVED_ROUNDS, Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.shared_prefill import SharedPrefill
from scheduler_svc.core.state.worker import Worker

NO_BLOCKS = "no KV blocks left for it"


class Rounds:
    """Applies the reports of rounds to the shard."""

    def __init__(
        self, shard: Shard, ranker: Ranker, requests: Requests, learner: Learner, deaths: Deaths
    ) -> None:
        self._shard = shard
        self._ranker = ranker
        self._policy = ranker.policy
        self._priors = ranker.priors
        self._requests = requests
        self._learner = learner
        self._deaths = deaths

    def reported(self, report: RoundReported, ledger: Ledger) -> None:
        """Apply one report. What names another lease epoch is dropped, and counts only if it is on the record."""
        worker = self._shard.workers.get(report.worker_id)
        members = worker.members if worker is not None else {}
        present: list[tuple[Progress, Request]] = []
        verified, prefilled = report.verified, report.prefilled
        for progress in report.progress:
            request = members.get(progress.request_id)
            if request is None or request.lease_epoch != progress.lease_epoch:
                if progress.recorded:
                    self._left(progress, report, verified, prefilled, ledger)
                ledger.drop(report.worker_id, progress.request_id, progress.lease_epoch)
            elif progress.position > request.emitted:
                # It has tokens that neither the record nor this core has: its state cannot be trusted.
                ledger.release(request, send_drop=True)
                request.record_event(ledger.now_s, "requeued", "its worker was ahead of the record")
            elif _is_duplicate(progress, request):
                # The record answers "already", and the report can be acknowledged.
                ledger.write(_commit(progress, request, progress.position, progress.tokens, ()))
            else:
                if progress.position + len(progress.tokens) > request.facts.max_tokens:
                    progress = _cut_at_limit(progress, request, ledger)
                present.append((progress, request))
        if worker is None:
            return
        worker.taken_off.clear()
        worker.free_target_blocks = report.free_target_blocks
        worker.free_draft_blocks = report.free_draft_blocks
        if present:
            self._learner.learn_round(report, verified, prefilled, present, worker)
            self._who_ran(present, worker, ledger)
            worker.charge_reserve(report.rounds)
            for progress, request in present:
                self._computed(progress, request, worker)
                _share_prefill(progress, request, report, verified, ledger.now_s)
                self._charge(progress, request, report, verified, prefilled)
                self._progressed(progress, request, ledger)
        for change in report.residency:
            member = worker.members.get(change.request_id)
            if member is not None and member.lease_epoch == change.lease_epoch:
                self._moved_memory(member, change.residency, worker, ledger)
        if worker.draining:
            move_running(worker, self._shard, self._priors, ledger)

    def _who_ran(self, present: list[tuple[Progress, Request]], worker: Worker, ledger: Ledger) -> None:
        """Update which members run: starts, pauses, resumptions. They are reported for the newest round."""
        this, newcomers = worker.reports, []
        for _, request in present:
            if not request.running and request.last_report != this:
                newcomers.append(request)
            request.last_report = this
        best = min(newcomers, key=_chosen_by, default=None)
        version = self._priors.version
        if worker.priors_version != version:
            worker.priors_version = version
            for request in worker.members.values():
                if request.last_report != this:  # requests that ran are ranked again in any case
                    ledger.refresh(request)
        for request in [request for request in worker.running.values() if request.last_report != this]:
            self._pause(request, worker, self._why_paused(request, best), ledger)
            ledger.rank(request)
        for request in newcomers:
            request.record_event(
                ledger.now_s, "resumed" if request.started else "started", f"on worker {worker.worker_id}"
            )
            self._shard.start_running(request, worker)
            request.started = request.ran_here = True
        if len(worker.running) >= worker.slots:
            worker.full_at = this
        if worker.waiting_for_blocks:
            self._shard.short_of_blocks[worker.worker_id] = worker
        else:
            self._shard.short_of_blocks.pop(worker.worker_id, None)

    def _pause(self, request: Request, worker: Worker, why: str, ledger: Ledger) -> None:
        self._shard.stop_running(request, worker)
        request.preemptions += 1
        self._shard.preemptions += 1
        request.record_event(ledger.now_s, "paused", why)

    def _why_paused(self, request: Request, newcomer: Request | None) -> str:
        """Return the reason of a pause. It names no other request: ranks and estimates only."""
        if newcomer is None:
            return NO_BLOCKS
        if _chosen_by(newcomer) > _chosen_by(request):
            return "the reserved share went to an older request" if newcomer.reserved else NO_BLOCKS
        if request.tenant_ahead and not newcomer.tenant_ahead:
            return "its tenant is ahead of others that wait"
        if newcomer.tenant_behind and not request.tenant_behind:
            return "a tenant that waits has had less service than its own"
        theirs, its = self._policy.ordered_by(newcomer), self._policy.ordered_by(request)
        return f"outranked by a request with {theirs}; this one has {its}"

    def _computed(self, progress: Progress, request: Request, worker: Worker) -> None:
        """Count the context tokens that a worker found and computed for a request."""
        missing = request.missing_tokens
        if request.residency is Residency.NONE:
            self._shard.caches.found.count(
                request.facts.prompt_tokens, request.cached_tokens, progress.cached
            )
            missing = request.context_tokens - progress.cached
        if missing:  # rarely: most rounds only verify
            left = 0 if progress.tokens else max(0, missing - progress.prefilled)
            worker.set_missing(request, left)

    def _charge(
        self, progress: Progress, request: Request, report: RoundReported, verified: int, prefilled: int
    ) -> None:
        seconds = report.service_s(progress, verified, prefilled)
        request.attained_s += seconds
        if request.account is not None:
            self._shard.charge(request.account, seconds, request.attained_s)

    def _left(
        self, progress: Progress, report: RoundReported, verified: int, prefilled: int, ledger: Ledger
    ) -> None:
        """Count tokens that the record took of a request before the request left the worker."""
        request = self._shard.requests.get(progress.request_id)
        reached = progress.position + len(progress.tokens)
        if request is not None and progress.position <= request.emitted < reached:
            self._charge(progress, request, report, verified, prefilled)
            self._count(progress, request, ledger)
            ledger.rerank(request)

    def _progressed(self, progress: Progress, request: Request, ledger: Ledger) -> None:
        position = request.emitted
        tokens = self._count(progress, request, ledger)
        if progress.end is None:
            level = request.rank.level
            self._reside(request, ON_DEVICE, ledger)
            request.remember_estimate()
            if not progress.recorded:
                ledger.write(_commit(progress, request, position, tokens, ()))
            elif request.rank.level != level:
                ledger.rank(request)
        else:
            request.record_event(ledger.now_s, "ended", progress.end.value)
            ledger.write(_commit(progress, request, position, tokens, tuple(request.story)))
            self._learner.learn_end(progress.end, request)
            if request.worker is not None:
                self._shard.caches.ended(request, request.worker)
            self._shard.leave(request)

    def _count(self, progress: Progress, request: Request, ledger: Ledger) -> tuple[int, ...]:
        """Count the progress of a request, and learn from it. Return its new tokens."""
        before = request.emitted
        tokens = progress.tokens[before - progress.position :]
        request.emitted += len(tokens)
        request.speculated(progress.drafts, progress.drafted, progress.accepted, self._policy.looks_back)
        if tokens:
            request.rounds += progress.rounds
            if request.deaths and request.has_survived:
                request.record_event(
                    ledger.now_s, "cleared", f"{SURVIVED_ROUNDS} rounds since a worker died with it"
                )
                self._deaths.lower(request, 0)
            request.seen_rounds += progress.rounds
            request.seen_tokens += len(tokens)
            request.seen_squares += progress.squares(len(tokens))
            self._priors.observe_tokens(
                request.facts.workload_class, len(tokens), request.facts.tenant, progress.rounds
            )
            if progress.end is None:
                self._learner.learn_running(request, before)
        if progress.predicted_remaining_tokens is not None:
            self._requests.predicted(request, progress.predicted_remaining_tokens, request.emitted)
        return tokens

    def _moved_memory(self, request: Request, residency: Residency, worker: Worker, ledger: Ledger) -> None:
        paused = request.running and residency is not ON_DEVICE
        if paused:
            self._pause(request, worker, NO_BLOCKS, ledger)
        level = request.rank.level
        self._reside(request, residency, ledger)
        if paused or request.rank.level != level:
            ledger.rank(request)

    def _reside(self, request: Request, residency: Residency, ledger: Ledger) -> None:
        """Set where the KV of a request lies, rank it again, and add changes to its story."""
        before = request.rank
        request.residency = residency
        if residency is Residency.NONE:
            request.shared_prefill = None
            self._shard.look_up(request)
        rank = self._ranker.rank(request)
        self._shard.rerank(request, rank)
        if rank.level != before.level:
            request.record_event(ledger.now_s, "level", f"from {before.level} to {rank.level}")
        if rank.perceptible != before.perceptible:
            request.record_event(
                ledger.now_s,
                "perceptible" if rank.perceptible else "non-perceptible",
                self._policy.ordered_by(request),
            )


def _chosen_by(request: Request) -> OrderKey:
    """Return the order key by which its worker chooses it: of the newest list that it was sent, if any."""
    sent = request.sent
    if sent is None:
        return request.order_key
    cost = sent.index_s if request.residency is ON_DEVICE else sent.index_s + sent.resume_cost_s
    return (sent.rank_class, cost, request.request_id)


def _share_prefill(
    progress: Progress, request: Request, report: RoundReported, verified: int, now_s: float
) -> None:
    """Note a round that left a part of a context for later because of its time; add an event when the context is
    complete.
    """
    shared = request.shared_prefill
    if not progress.tokens and report.limit_s > 0:
        if shared is None:
            shared = request.shared_prefill = SharedPrefill()
        shared.add(progress.prefilled, report.limit_s, verified)
    elif progress.tokens and shared is not None:
        shared.add(progress.prefilled, 0.0, max(0, verified - 1))
        request.record_event(now_s, "prefilled", str(shared))
        request.shared_prefill = None


def _cut_at_limit(progress: Progress, request: Request, ledger: Ledger) -> Progress:
    """Return the progress up to the limit of the output, where the request ends. Its worker has generated more: it
    did not end the request itself, and is to drop it.
    """
    assert request.worker is not None
    ledger.drop(request.worker, progress.request_id, progress.lease_epoch)
    return replace(
        progress,
        tokens=progress.tokens[: request.facts.max_tokens - progress.position],
        end=End.LENGTH,
        cut_characters=0,
        error="",
        predicted_remaining_tokens=None,
        recorded=False,
    )


def _is_duplicate(progress: Progress, request: Request) -> bool:
    """Return whether all tokens of a report were committed before. A round without tokens (a prefill) cannot
    be distinguished from its repetition unless tokens came after it; counting it twice only charges it twice.
    """
    return (
        progress.end is None
        and progress.position < request.emitted
        and progress.position + len(progress.tokens) <= request.emitted
    )


def _commit(
    progress: Progress,
    request: Request,
    position: int,
    tokens: tuple[int, ...],
    story: tuple[StoryLine, ...],
) -> Commit:
    return Commit(
        progress.request_id,
        progress.lease_epoch,
        position,
        tokens,
        request.standing,
        progress.end,
        progress.cut_characters,
        progress.error,
        story,
    )
