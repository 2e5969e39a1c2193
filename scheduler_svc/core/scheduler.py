"""The scheduler: a function of events and time that returns which request runs where.

Invariants
  * No I/O, no clock, no randomness: the same events at the same times give the same commands.
  * Every accepted request ends in exactly one way, and leaves the core in the step that returns its end.
  * A lease is on the record before a request enters any worker's list, and no request is in two lists.
  * Only the lease epoch decides whether a report counts: with another one it changes nothing.
  * Ranks change by events only, so a step costs O(log n) in queued requests for each event.

The caller's part is the contract at the top of `core/commands.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import assert_never

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Command, Commit, Finish, Rank, StoryLine
from scheduler_svc.core.estimates.errors import EstimateErrors
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    Progress,
    Recovered,
    Refused,
    RequestFacts,
    RoundReported,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.placement.placement import has_room_for, place
from scheduler_svc.core.policies.base import Policy, resume_cost_s
from scheduler_svc.core.policies.ranker import Ranker
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import ALONE_AFTER, MOST_DEATHS, SURVIVED_ROUNDS, Request, order_key_of
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker
from scheduler_svc.core.views import Explanation, QueueEntry, RequestState, Totals, WorkerView

OF_LATE = 0.02
"""Weight of the newest round in a worker's recent figures."""
FIRST_GAP_S = 0.25
GAP_GROWTH = 1.25
"""Seconds between two versions of the priors: at first, and how they grow up to `priors_interval_s`."""
LOOKED_AT_PER_ARRIVAL = 4
"""Requests of which those that wait are ranked again at each arrival; running and parked ones count too, so
that the cost of an arrival does not grow with the shard. Our choice: with 4 and 8 identical requests wait as
under `fcfs`, without any up to five times as long. At each round instead, 200 requests that come at once take
1 % longer in the mean.
"""
MOST_LOST = 256
"""Lost workers whose requests are remembered, in case one dials again. Our choice."""
GIVEN_UP = "{} workers died in a row while they ran this request, {} of them while they ran nothing else: it is not tried again"
NO_BLOCKS = "no KV blocks left for it"
OWN_ENDS = frozenset({End.STOP, End.LENGTH, End.STOP_SEQUENCE})
"""Ends that are observations of the length of a class; the others cut a request short."""


class Scheduler:
    """The whole core. Not thread-safe; one task owns it."""

    def __init__(self, policy: Policy, settings: CoreSettings, priors: Priors) -> None:
        self.policy = policy
        self.settings = settings
        self.priors = priors
        self.estimate_errors = EstimateErrors()
        self._ranker = Ranker(policy, priors)
        self._died_with: dict[str, tuple[str, ...]] = {}
        """Requests that the death of a lost worker was counted for, by worker; the oldest worker first."""
        self._publish_at_s = 0.0
        self._publish_gap_s = FIRST_GAP_S
        self._to_refresh: Iterator[Request] = iter(())
        """Requests to be ranked again next, if they wait by then."""
        self._shard = Shard(settings.list_factor, settings.reserved_share, settings.tenant_fairness)

    def step(self, now_s: float, events: Iterable[Event]) -> list[Command]:
        """Apply the events since the last step; return the commands that follow, in the order of the
        contract.
        """
        ledger = Ledger(self._shard, self._ranker, now_s)
        self.estimate_errors.begin_step()
        for event in events:
            self._apply(event, ledger)
        self._publish(now_s)
        self._shard.take_turns()
        place(self._shard, ledger, self.settings)
        return ledger.commands(self.settings)

    def _publish(self, now_s: float) -> None:
        """Apply the learnt priors to waiting requests, at intervals: often at first, when every round changes
        them much.
        """
        if now_s >= self._publish_at_s:
            self.priors.publish()
            self._publish_at_s = now_s + self._publish_gap_s
            self._publish_gap_s = min(self._publish_gap_s * GAP_GROWTH, self.settings.priors_interval_s)

    def _refresh_waiting(self, ledger: Ledger) -> None:
        """Rank some waiting requests again, in turn from the oldest to the youngest, before an arrival is
        ranked. Otherwise it would overtake others that are no worse whenever the estimates of its kind have
        fallen a little.
        """
        next_ones = list(islice(self._to_refresh, LOOKED_AT_PER_ARRIVAL))
        for request in next_ones:
            if self._shard.waits(request):
                ledger.rerank(request)
        if len(next_ones) < LOOKED_AT_PER_ARRIVAL:
            self._to_refresh = iter(list(self._shard.requests.values()))

    def _apply(self, event: Event, ledger: Ledger) -> None:
        match event:
            case Arrived(facts):
                self._arrived(facts, ledger)
            case Recovered():
                self._recovered(event, ledger)
            case RoundReported():
                self._round_reported(event, ledger)
            case EndRequested(request_id, end, detail):
                self._end_requested(request_id, end, detail, ledger)
            case WorkerUp():
                self._worker_up(event, ledger)
            case WorkerLost():
                self._worker_lost(event, ledger)
            case WorkerDraining(worker_id):
                self._worker_draining(worker_id, ledger)
            case Refused(request_id):
                # Gone or stale: either way the core's state is wrong. The shell reads the record again and
                # sends the request that it finds as `Recovered`.
                self._forget(request_id, ledger)
            case _:  # pragma: no cover  # mypy proves that nothing is left
                assert_never(event)

    # Requests come and go.

    def _arrived(self, facts: RequestFacts, ledger: Ledger) -> None:
        if facts.request_id in self._shard.requests:
            return
        self._refresh_waiting(ledger)
        request = Request(facts, expected_total=_guess(facts.expected_output_tokens), said={})
        request.record_event(ledger.now_s, "arrived")
        self._enter(request)
        request.remember_estimate()
        ledger.write(Rank(request.request_id, request.rank.level, request.order_key[1]))

    def _recovered(self, event: Recovered, ledger: Ledger) -> None:
        self._forget(event.facts.request_id, ledger)
        request = Request(
            event.facts,
            lease_epoch=event.lease_epoch,
            worker=event.worker_id,
            emitted=event.emitted,
            rounds=event.rounds,
            drafts=event.drafts,
            drafted=event.drafted,
            accepted=event.accepted,
            attained_s=event.attained_s,
            preemptions=event.preemptions,
            deaths=event.deaths,
            death_round=event.death_round,
            started=event.rounds > 0,
            expected_total=_guess(event.facts.expected_output_tokens),
        )
        if request.has_survived:
            request.deaths = 0
        request.record_event(event.facts.arrival_s, "arrived")
        reached = f"{event.emitted} tokens, {event.rounds} rounds, {event.preemptions} preemptions before"
        request.record_event(ledger.now_s, "recovered", f"from the record: {reached}")
        self._enter(request)

    def _enter(self, request: Request) -> None:
        request.set_rank(self._ranker.rank(request))
        self._shard.enter(request)

    def _end_requested(self, request_id: str, end: End, detail: str, ledger: Ledger) -> None:
        request = self._shard.requests.get(request_id)
        if request is None:
            return
        request.record_event(ledger.now_s, "ended", end.value)
        ledger.write(Finish(request_id, end, detail, request.standing, tuple(request.story)))
        self._forget(request_id, ledger)

    def _forget(self, request_id: str, ledger: Ledger) -> None:
        request = self._shard.requests.get(request_id)
        if request is None:
            return
        if request.worker is not None:
            ledger.take_off(request)
        self._shard.leave(request)

    # Workers come and go.

    def _worker_up(self, event: WorkerUp, ledger: Ledger) -> None:
        worker = self._shard.worker_up(event.facts)
        worker.must_send = True  # the list that it still has is replaced by ours
        worker.told_drained = False
        worker.free_target_blocks = event.facts.target_blocks
        worker.free_draft_blocks = event.facts.draft_blocks
        self._take_deaths_back(worker.worker_id, ledger)
        held: dict[str, Residency] = {}
        for item in event.held:
            request = worker.members.get(item.request_id)
            if request is not None and request.lease_epoch == item.lease_epoch:
                held[item.request_id] = item.residency
            else:
                ledger.drop(worker.worker_id, item.request_id, item.lease_epoch)
        for request in list(worker.members.values()):
            self._stop_running(request, worker)
            if request.request_id not in held:
                request.ran_here = False
            self._reside(request, held.get(request.request_id, Residency.NONE))

    def _worker_lost(self, event: WorkerLost, ledger: Ledger) -> None:
        worker_id = event.worker_id
        worker = self._shard.workers.get(worker_id)
        if worker is None:
            return
        members = list(worker.members.values())
        self._count_death(worker, event.hung, ledger)
        self._shard.worker_lost(worker)
        for request in members:
            ledger.release(request, tell_worker=False)
            if request.deaths >= MOST_DEATHS:
                detail = GIVEN_UP.format(request.deaths, request.deaths - ALONE_AFTER)
                request.record_event(ledger.now_s, "given up", f"worker {worker_id} was lost: {detail}")
                self._end_requested(request.request_id, End.ERROR, detail, ledger)
            else:
                alone = f", alone: {request.deaths} workers died with it" if request.runs_alone else ""
                why = f"worker {worker_id} was lost; continues from its committed tokens{alone}"
                request.record_event(ledger.now_s, "requeued", why)

    def _count_death(self, worker: Worker, hung: bool, ledger: Ledger) -> None:
        if worker.draining:
            return  # it was ordered to end, and does so when its time is over, whatever it runs
        died_with = [request for request in worker.members.values() if request.may_have_run]
        is_certain = len(worker.members) == 1
        for request_id in worker.taken_off:
            left = self._shard.requests.get(request_id)
            if left is not None and left.worker != worker.worker_id:
                died_with.append(left)
                is_certain = False
        for request in died_with:
            ran_alone = request.runs_alone
            request.deaths += is_certain or not ran_alone
            request.death_round = request.rounds
            if request.runs_alone and not ran_alone and request.worker != worker.worker_id:
                self._isolate(request, worker, ledger)
        if died_with and not hung:
            self._died_with[worker.worker_id] = tuple([request.request_id for request in died_with])
            if len(self._died_with) > MOST_LOST:
                del self._died_with[next(iter(self._died_with))]

    def _isolate(self, request: Request, lost: Worker, ledger: Ledger) -> None:
        """Make a request run alone, after the death of a worker that it had just left: it waits for a worker
        of its own from now on.
        """
        if request.worker is None:
            self._shard.requeue(request)
        else:
            ledger.release(request, tell_worker=True)
        why = f"worker {lost.worker_id} was lost, which it had just left; runs alone: {request.deaths} workers died with it"
        request.record_event(ledger.now_s, "requeued", why)

    def _take_deaths_back(self, worker_id: str, ledger: Ledger) -> None:
        """Clear the requests of a worker that was given up and dials again: it did not die. The record gets
        the lower count with the next release; if the leader changes before, such a request runs alone for a
        while.
        """
        for request_id in self._died_with.pop(worker_id, ()):
            request = self._shard.requests.get(request_id)
            if request is not None and request.deaths:
                request.record_event(ledger.now_s, "cleared", f"worker {worker_id} is alive")
                self._lower_deaths(request, request.deaths - 1)

    def _lower_deaths(self, request: Request, deaths: int) -> None:
        ran_alone = request.runs_alone
        request.deaths = deaths
        if ran_alone and not request.runs_alone:
            self._shard.shared_again(request)

    def _worker_draining(self, worker_id: str, ledger: Ledger) -> None:
        worker = self._shard.workers.get(worker_id)
        if worker is None or worker.draining:
            return
        worker.draining = True
        self._shard.worker_changed(worker)
        for request in list(worker.members.values()):
            if not request.running:
                self._move_from_draining(request, ledger)

    def _move_from_draining(self, request: Request, ledger: Ledger) -> None:
        worker_id = request.worker
        ledger.release(request, tell_worker=True)
        request.record_event(ledger.now_s, "requeued", f"worker {worker_id} is leaving")

    # A round.

    def _round_reported(self, report: RoundReported, ledger: Ledger) -> None:
        worker = self._shard.workers.get(report.worker_id)
        members = worker.members if worker is not None else {}
        present: list[tuple[Progress, Request]] = []
        for progress in report.progress:
            request = members.get(progress.request_id)
            if request is None or request.lease_epoch != progress.lease_epoch:
                ledger.drop(report.worker_id, progress.request_id, progress.lease_epoch)
            elif progress.position > request.emitted:
                # It has tokens that neither the record nor this core has: its state cannot be trusted.
                ledger.release(request, tell_worker=True)
                request.record_event(ledger.now_s, "requeued", "its worker was ahead of the record")
            elif _is_duplicate(progress, request):
                # The record answers "already", and the report can be acknowledged.
                ledger.write(_commit(progress, request, progress.position, progress.tokens, ()))
            else:
                present.append((progress, request))
        if worker is None:
            return
        worker.taken_off.clear()
        worker.free_target_blocks = report.free_target_blocks
        worker.free_draft_blocks = report.free_draft_blocks
        if present:
            prefilled = sum([progress.prefilled for progress in report.progress])
            verified = self._learn_round(report, prefilled, present, worker)
            self._who_ran(present, worker, ledger)
            worker.charge_reserve()
            for progress, request in present:
                self._charge(progress, request, report, prefilled, verified)
                self._progressed(progress, request, verified, ledger)
        for change in report.residency:
            member = worker.members.get(change.request_id)
            if member is not None and member.lease_epoch == change.lease_epoch:
                self._moved_memory(member, change.residency, worker, ledger)
        if worker.draining:
            self._move_running(worker, ledger)

    def _moved_memory(self, request: Request, residency: Residency, worker: Worker, ledger: Ledger) -> None:
        if request.running and residency is not Residency.DEVICE:
            self._pause(request, worker, NO_BLOCKS, ledger)
        level = request.rank.level
        self._reside(request, residency, ledger)
        if request.rank.level != level:
            ledger.write(Rank(request.request_id, request.rank.level, request.order_key[1]))

    def _learn_round(
        self, report: RoundReported, prefilled: int, present: list[tuple[Progress, Request]], worker: Worker
    ) -> int:
        """Return how many sequences the round verified; the others only had context computed."""
        seconds = report.draft_s + report.verify_s
        verified = drafted_by_all = 0
        for progress in report.progress:
            if progress.tokens:
                verified += 1
                drafted_by_all += progress.drafted
        context = tokens = drafted = accepted = 0
        for progress, request in present:
            if progress.tokens:
                context += request.context_tokens
                tokens += len(progress.tokens)
            drafted += progress.drafted
            accepted += progress.accepted
        if verified:
            self.priors.observe_round(verified, drafted_by_all + verified, context, seconds)
        if prefilled:
            # A round that verifies nothing is all prefill, whatever it calls its parts.
            self.priors.observe_prefill(prefilled, report.prefill_s + (0.0 if verified else seconds))
        if report.swap_s > 0:
            self._learn_swap(report, present, worker)
        worker.rounds += 1
        worker.tokens += tokens
        worker.drafted += OF_LATE * (drafted - worker.drafted)
        worker.accepted += OF_LATE * (accepted - worker.accepted)
        if report.total_s > 0:
            worker.tokens_per_s += OF_LATE * (tokens / report.total_s - worker.tokens_per_s)
        return verified

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
            self.priors.observe_swap(moved, report.swap_s)

    def _who_ran(self, present: list[tuple[Progress, Request]], worker: Worker, ledger: Ledger) -> None:
        """Update which members run: starts, pauses, resumptions."""
        this, newcomers = worker.rounds, []
        for _, request in present:
            if not request.running and request.last_round != this:
                newcomers.append(request)
            request.last_round = this
        best = min(newcomers, key=order_key_of, default=None)
        version = self.priors.version
        if worker.priors_version != version:
            worker.priors_version = version
            for request in worker.members.values():
                if request.last_round != this:  # requests that ran are ranked again in any case
                    ledger.refresh(request)
        for request in [request for request in worker.running.values() if request.last_round != this]:
            self._pause(request, worker, self._why_paused(request, best), ledger)
        for request in newcomers:
            request.record_event(
                ledger.now_s, "resumed" if request.started else "started", f"on worker {worker.worker_id}"
            )
            self._shard.set_running(request, True)
            worker.running[request.request_id] = request
            request.started = request.ran_here = True
        if worker.waiting_for_blocks:
            self._shard.short_of_blocks[worker.worker_id] = worker
        else:
            self._shard.short_of_blocks.pop(worker.worker_id, None)

    def _pause(self, request: Request, worker: Worker, why: str, ledger: Ledger) -> None:
        self._stop_running(request, worker)
        request.preemptions += 1
        request.record_event(ledger.now_s, "paused", why)

    def _why_paused(self, request: Request, newcomer: Request | None) -> str:
        """Return the reason of a pause. It names no other request: ranks and estimates only."""
        if newcomer is None:
            return NO_BLOCKS
        if newcomer.reserved and newcomer.order_key > request.order_key:
            return "the reserved share went to an older request"
        if request.tenant_ahead and not newcomer.tenant_ahead:
            return "its tenant is ahead of others that wait"
        theirs, its = self.policy.ordered_by(newcomer), self.policy.ordered_by(request)
        return f"outranked by a request with {theirs}; this one has {its}"

    def _stop_running(self, request: Request, worker: Worker) -> None:
        if request.running:
            self._shard.set_running(request, False)
            del worker.running[request.request_id]
            self._shard.touched[worker.worker_id] = worker

    def _progressed(self, progress: Progress, request: Request, verified: int, ledger: Ledger) -> None:
        tokens = progress.tokens[request.emitted - progress.position :]
        position = request.emitted
        request.emitted += len(tokens)
        request.speculated(progress.drafted, progress.accepted, self.policy.looks_back)
        workload_class = request.facts.workload_class
        if tokens:
            request.rounds += 1
            if request.deaths and request.has_survived:
                request.record_event(
                    ledger.now_s, "cleared", f"{SURVIVED_ROUNDS} rounds since a worker died with it"
                )
                self._lower_deaths(request, 0)
            request.seen_rounds += 1
            request.seen_tokens += len(tokens)
            request.seen_squares += len(tokens) ** 2
            self.priors.observe_tokens(
                workload_class,
                len(tokens),
                progress.drafted,
                progress.tested_by_position,
                progress.accepted_by_position,
                request.facts.tenant,
            )
        if progress.predicted_remaining_tokens is not None:
            request.expected_total = max(1.0, request.emitted + progress.predicted_remaining_tokens)
            request.predicted_by_worker = True
            request.first_prediction = request.first_prediction or request.expected_total
        if progress.end is None:
            self._reside(request, Residency.DEVICE, ledger)
            request.remember_estimate()
            ledger.write(_commit(progress, request, position, tokens, ()))
        else:
            request.record_event(ledger.now_s, "ended", progress.end.value)
            ledger.write(_commit(progress, request, position, tokens, tuple(request.story)))
            self._learn_end(progress.end, request)
            self._shard.leave(request)

    def _charge(
        self, progress: Progress, request: Request, report: RoundReported, prefilled: int, verified: int
    ) -> None:
        """Charge the attained service: an equal share of the round to all requests that it verified (to all
        that took part, if it verified nothing), and a share of the prefill by the tokens computed.
        """
        seconds = 0.0
        if progress.tokens or not verified:
            seconds = (report.draft_s + report.verify_s) / (verified or len(report.progress))
        if progress.prefilled:
            seconds += report.prefill_s * progress.prefilled / prefilled
        request.attained_s += seconds
        if request.account is not None:
            self._shard.charge(request.account, seconds, request.attained_s)

    def _learn_end(self, end: End, request: Request) -> None:
        workload_class, tenant = request.facts.workload_class, request.facts.tenant
        if request.seen_rounds:
            self.priors.observe_acceptance(
                workload_class, request.seen_rounds, request.seen_tokens, request.seen_squares, tenant
            )
        if end in OWN_ENDS and request.said is not None:
            self.estimate_errors.judge(request.said, request.attained_s)
        if end in OWN_ENDS and request.emitted:
            self.priors.observe_length(
                workload_class,
                request.emitted,
                _guess(request.facts.expected_output_tokens),
                request.first_prediction,
                tenant,
            )

    def _reside(self, request: Request, residency: Residency, ledger: Ledger | None = None) -> None:
        """Set where the KV of a request lies, and rank it again; with a ledger, add changes to its story."""
        before = request.rank
        request.residency = residency
        rank = self._ranker.rank(request)
        self._shard.rerank(request, rank)
        if ledger is None:
            return
        if rank.level != before.level:
            request.record_event(ledger.now_s, "level", f"from {before.level} to {rank.level}")
        if rank.perceptible != before.perceptible:
            request.record_event(
                ledger.now_s,
                "perceptible" if rank.perceptible else "non-perceptible",
                self.policy.ordered_by(request),
            )

    def _move_running(self, worker: Worker, ledger: Ledger) -> None:
        """Move the requests of a draining worker at a round boundary: those that run, when there is room
        elsewhere and the move costs less than finishing here; the others in any case.
        """
        for request in list(worker.members.values()):
            worth_it = request.rank.remaining.mean_s > resume_cost_s(request, self.priors)
            if not request.running or (worth_it and has_room_for(self._shard, request)):
                self._move_from_draining(request, ledger)

    # Queries. They change nothing.

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Return everything about one request; None when it is not here (any more)."""
        request = self._shard.requests.get(request_id)
        if request is None:
            return None
        rank = request.rank
        return Explanation(
            request_id=request_id,
            tenant=request.facts.tenant,
            priority=request.facts.priority,
            state=_state_of(request),
            policy=self.policy.name,
            level=rank.level if self.policy.has_levels else None,
            ordered_by=self.policy.ordered_by(request),
            index_s=request.order_key[1],
            ahead=self._shard.ahead_of(request),
            perceptible=rank.perceptible,
            remaining_s=rank.remaining.mean_s,
            remaining_low_s=rank.remaining.low_s,
            remaining_high_s=rank.remaining.high_s,
            basis=rank.remaining.basis,
            worker_id=request.worker,
            lease_epoch=request.lease_epoch,
            reserved=request.reserved,
            tenant_ahead=request.tenant_ahead,
            waits_for=self._waits_for(request),
            waiting_s=now_s - request.facts.arrival_s,
            attained_s=request.attained_s,
            rounds=request.rounds,
            drafted=request.drafted,
            accepted=request.accepted,
            emitted=request.emitted,
            preemptions=request.preemptions,
            arrival_s=request.facts.arrival_s,
            story=tuple(request.story),
        )

    def _waits_for(self, request: Request) -> str:
        if request.request_id in self._shard.suspects:
            return f"a worker of its own: {request.deaths} workers died with it"
        if request.request_id not in self._shard.parked:
            return ""
        room = self._shard.capacity_tokens
        if room == 0:
            return "a worker: none takes work now"
        return f"a worker that can hold its {request.longest_tokens} tokens: the largest now holds {room}"

    def rank_of(self, request_id: str) -> RankKey | None:
        """Return its present rank; None when it is not here (any more)."""
        request = self._shard.requests.get(request_id)
        return None if request is None else request.rank

    def queue(self, now_s: float, limit: int) -> list[QueueEntry]:
        """Return unfinished requests, best first, at most `limit`."""
        return [
            QueueEntry(
                request_id=request.request_id,
                tenant=request.facts.tenant,
                priority=request.facts.priority,
                state=_state_of(request),
                level=request.rank.level if self.policy.has_levels else None,
                ordered_by=self.policy.ordered_by(request),
                index_s=request.order_key[1],
                perceptible=request.rank.perceptible,
                waiting_s=now_s - request.facts.arrival_s,
                attained_s=request.attained_s,
                emitted=request.emitted,
                worker_id=request.worker,
            )
            for request in islice(self._shard.in_order(), limit)
        ]

    def workers(self) -> list[WorkerView]:
        """Return all workers, including those that only the record's leases name."""
        workers = self._shard.workers
        return [_view(workers[worker_id], self.priors) for worker_id in sorted(workers)]

    def depth_by_level(self) -> list[int]:
        """Return the number of waiting requests (queued, or listed and not running), by level, up to the
        highest level ever used.
        """
        return [self._shard.depth[level] for level in range(max(self._shard.depth, default=-1) + 1)]

    @property
    def has_suspects(self) -> bool:
        """Return whether requests wait to run alone. If so, time alone may bring one of them forward, and a
        step is due every second.
        """
        return bool(self._shard.suspects)

    @property
    def capacity_tokens(self) -> int:
        """Return the largest sum of prompt and output tokens that some worker that takes work could hold; 0
        without any.
        """
        return self._shard.capacity_tokens

    def totals(self) -> Totals:
        """Return the shard in numbers."""
        queued = len(self._shard.queued) + len(self._shard.parked) + len(self._shard.suspects)
        slots = [worker.slots for worker in self._shard.workers.values() if worker.facts is not None]
        full = self.priors.cost.full_share(sum(slots) / len(slots)) if slots else 1.0
        return Totals(
            queued=queued,
            listed=len(self._shard.requests) - queued,
            running=self._shard.running,
            backlog_s=max(0.0, self._shard.backlog_s) * full,
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; for tests."""
        self._shard.check()


def _guess(tokens: int | None) -> float | None:
    return None if tokens is None else float(max(1, tokens))


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


def _state_of(request: Request) -> RequestState:
    if request.worker is None:
        return RequestState.QUEUED
    return RequestState.RUNNING if request.running else RequestState.LISTED


def _view(worker: Worker, priors: Priors) -> WorkerView:
    facts = worker.facts
    return WorkerView(
        worker_id=worker.worker_id,
        up=facts is not None,
        draining=worker.draining,
        slots=worker.slots,
        running=len(worker.running),
        listed=len(worker.members),
        target_blocks=facts.target_blocks if facts else 0,
        draft_blocks=facts.draft_blocks if facts else 0,
        free_target_blocks=worker.free_target_blocks,
        free_draft_blocks=worker.free_draft_blocks,
        rounds=worker.rounds,
        tokens=worker.tokens,
        acceptance=worker.accepted / worker.drafted if worker.drafted else 0.0,
        tokens_per_s=worker.tokens_per_s,
        moving_cost_s=sum(
            resume_cost_s(request, priors) for request in worker.members.values() if request.ran_here
        ),
    )
