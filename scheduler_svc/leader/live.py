"""The scheduler's copy of the record: token ids, attachments and times of the requests it leads.

The core knows numbers only; everything that must be *sent* to a worker or a client is kept here. Tokens are
appended after the record has them, so everything in `Live.committed` may be shown.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laps_sd.contract.acceptance import mean_acceptance_length
from laps_sd.contract.ends import End
from laps_sd.service import ends
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.commands import Standing, StoryLine
from scheduler_svc.core.events import Recovered, RequestFacts
from scheduler_svc.store.records import NewRequest, StoredRequest

if TYPE_CHECKING:
    from scheduler_svc.leader.sessions import GatewaySession
    from scheduler_svc.leader.tracing import RequestTrace
    from scheduler_svc.leader.turn import Timer

UNKNOWN_LOGPROBS = pb.TokenLogprobs(unknown=True)
MAX_COUNT = 2**32 - 1
"""Largest value of a counter on the wire."""


@dataclass(eq=False, slots=True)
class Attachment:
    """One client stream, through one gateway, with the position up to which it has been sent."""

    attachment_id: str
    session: GatewaySession
    live: Live
    next_token: int


@dataclass(eq=False, slots=True)
class Live:
    """One request. Unfinished requests are in the loop's table; an ended one is kept until it is
    delivered.
    """

    facts: RequestFacts
    model: str
    specification: gateway_pb.Specification
    """Specification without `committed_ids`; those are in `committed`."""
    idempotency_key: str
    body_hash: str
    keep: bool
    grace_s: float
    """Seconds that the request lives without an attached client."""
    deadline_s: float | None
    """Hard deadline and soft limit, on the loop's clock."""
    time_limit_s: float | None
    most_logprobs: int | None
    """Most alternatives per token, as the client requested them; None without logprobs."""
    standing: Standing
    """Progress as the record has it; as are the next five fields."""
    lease_epoch: int = 0
    worker_id: str | None = None
    deaths: int = 0
    death_round: int = 0
    """Deaths of its workers, and its rounds at the last one; as in `Request`, and as the record has them."""
    committed: array[int] = field(default_factory=lambda: array("i"))
    attachments: dict[str, Attachment] = field(default_factory=dict)
    limits: tuple[Timer, ...] = ()
    """Timers of its deadline and its time limit."""
    grace: Timer | None = None
    """Timer that ends the request unless a client attaches in time."""
    started_s: float | None = None
    first_token_s: float | None = None
    cached_prompt_tokens: int = 0
    logprobs: dict[int, pb.TokenLogprobs] = field(default_factory=dict)
    """Logprobs by position, if requested, as workers reported them. Not on the record."""
    end: gateway_pb.RequestEnd | None = None
    trace: RequestTrace | None = None
    """Trace to emit of the request; None where its trace is not recorded."""

    @property
    def request_id(self) -> str:
        """Return the id that names the request everywhere."""
        return self.facts.request_id

    def stop_grace(self) -> None:
        """Cancel the grace timer: a client is attached, or the request has ended."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    def stop_timers(self) -> None:
        """Cancel all timers of an ended request, so that none of them holds memory until its time."""
        self.stop_grace()
        for timer in self.limits:
            timer.cancel()
        self.limits = ()

    def lease(self, lease_epoch: int, worker_id: str | None, now_s: float) -> None:
        """Set the worker that leases the request on the record; None: no worker."""
        self.lease_epoch, self.worker_id = lease_epoch, worker_id
        if self.trace is not None:
            self.trace.leased(lease_epoch, worker_id, now_s)

    def tell_logprobs(self, position: int, told: Sequence[pb.TokenLogprobs]) -> None:
        """Keep the logprobs that a worker reported for the tokens from `position` on, as far as the
        client requested them.
        """
        if self.most_logprobs is None:
            return
        for at, one in enumerate(told, position):
            if at < self.facts.max_tokens and len(one.top) <= self.most_logprobs:
                self.logprobs[at] = one

    def logprobs_of(self, first: int, count: int) -> list[pb.TokenLogprobs]:
        """Return the logprobs of committed tokens, for a request with logprobs."""
        return [self.logprobs.get(at, UNKNOWN_LOGPROBS) for at in range(first, first + count)]

    def append(self, position: int, tokens: tuple[int, ...], now_s: float) -> None:
        """Append what the record has just taken: `tokens` from `position` on. A repeat adds nothing."""
        fresh = tokens[len(self.committed) - position :]
        if fresh and self.first_token_s is None:
            self.first_token_s = now_s
        self.committed.extend(fresh)

    def finish(self, end: End, detail: str, cut_characters: int, now_s: float) -> None:
        """Store the one end of the request; it is delivered with everything that its attachments have not
        been sent.
        """
        standing = self.standing
        accepted_at_s = self.facts.arrival_s
        self.end = gateway_pb.RequestEnd(
            kind=ends.KINDS[end],
            detail=detail,
            cut_characters=cut_characters,
            cached_prompt_tokens=self.cached_prompt_tokens,
            speculation=pb.SpeculationSummary(
                rounds=min(standing.rounds, MAX_COUNT),
                drafted=min(standing.drafted, MAX_COUNT),
                accepted=min(standing.accepted, MAX_COUNT),
                mean_acceptance_length=mean_acceptance_length(standing.accepted, standing.drafts),
                drafts=min(standing.drafts, MAX_COUNT),
            ),
            timing=pb.Timing(
                queued_s=_since(accepted_at_s, self.started_s, now_s),
                first_token_s=_since(accepted_at_s, self.first_token_s, now_s),
                total_s=max(0.0, now_s - accepted_at_s),
                preemptions=standing.preemptions,
            ),
        )

    def to_record(self) -> StoredRequest:
        """Return what the record should hold of the unfinished request: the inverse of `from_record`."""
        facts = self.facts
        arrival_unix_ms = round(facts.arrival_s * 1000)
        submission = gateway_pb.Specification()
        submission.CopyFrom(self.specification)
        submission.ClearField("prompt_ids")
        return StoredRequest(
            request_id=facts.request_id,
            tenant=facts.tenant,
            model=self.model,
            priority=facts.priority,
            workload_class=facts.workload_class,
            arrival_unix_ms=arrival_unix_ms,
            prompt_ids=self.specification.prompt_ids,
            max_tokens=facts.max_tokens,
            expected_output_tokens=facts.expected_output_tokens,
            deadline_unix_ms=_unix_ms(self.deadline_s),
            time_limit_ms=None
            if self.time_limit_s is None
            else round((self.time_limit_s - facts.arrival_s) * 1000),
            keep=self.keep,
            grace_ms=-1 if self.keep else round(self.grace_s * 1000),
            idempotency_key=self.idempotency_key,
            body_hash=self.body_hash,
            seed=self.specification.seed,
            submission=submission.SerializeToString(deterministic=True),
            sequence=facts.sequence,
            committed_ids=tuple(self.committed),
            lease_epoch=self.lease_epoch,
            worker_id=self.worker_id,
            standing=self.standing,
            end=None,
            cut_characters=0,
            detail="",
            story=(),
            ended_unix_ms=None,
            first_token_unix_ms=_unix_ms(self.first_token_s),
            deaths=self.deaths,
            death_round=self.death_round,
        )

    def specification_with_outputs(
        self, origin: gateway_pb.Origin, lease_epoch: int
    ) -> gateway_pb.Specification:
        """Return what a worker needs to continue after the committed tokens, and what it keeps for a
        scheduler that needs it.
        """
        specification = gateway_pb.Specification()
        specification.CopyFrom(self.specification)
        specification.committed_ids.extend(self.committed)
        specification.origin = origin.SerializeToString()
        if self.trace is not None:
            specification.traceparent = self.trace.run(lease_epoch).traceparent
        return specification

    def origin(self, now_s: float, incarnation: str) -> gateway_pb.Origin:
        """Return everything that the worker's hello would lack to restore the request."""
        submit = self.submission(now_s)
        submit.specification.ClearField("prompt_ids")
        return gateway_pb.Origin(submit=submit, written_unix_ms=round(now_s * 1000), incarnation=incarnation)

    def submission(self, now_s: float) -> gateway_pb.Submit:
        """Return the request as it was submitted, with the rest of its times; without outputs."""
        facts = self.facts
        submit = gateway_pb.Submit(
            request_id=facts.request_id,
            tenant=facts.tenant,
            idempotency_key=self.idempotency_key,
            body_hash=bytes.fromhex(self.body_hash),
            priority=facts.priority,
            workload_class=facts.workload_class,
            expected_output_tokens=facts.expected_output_tokens,
            deadline_in_ms=_ms_from(now_s, self.deadline_s),
            time_limit_ms=_ms_from(now_s, self.time_limit_s),
            keep=self.keep,
            grace_ms=round(self.grace_s * 1000),
            model=self.model,
            traceparent=self.specification.traceparent,
        )
        submit.specification.CopyFrom(self.specification)
        return submit


def _since(accepted_at_s: float, moment_s: float | None, now_s: float) -> float:
    return max(0.0, (now_s if moment_s is None else moment_s) - accepted_at_s)


def _ms_from(now_s: float, moment_s: float | None) -> int | None:
    return None if moment_s is None else max(0, round((moment_s - now_s) * 1000))


def _unix_ms(moment_s: float | None) -> int | None:
    return None if moment_s is None else round(moment_s * 1000)


def from_submission(new: NewRequest, sequence: int, submitted: gateway_pb.Specification) -> Live:
    """Return the working copy of a request that the record has just accepted."""
    arrival_s = new.arrival_unix_ms / 1000.0
    specification = gateway_pb.Specification()
    specification.CopyFrom(submitted)
    specification.ClearField("committed_ids")
    specification.ClearField("origin")
    specification.request_id = new.request_id
    return Live(
        facts=_facts(new, sequence),
        model=new.model,
        specification=specification,
        idempotency_key=new.idempotency_key,
        body_hash=new.body_hash,
        keep=new.keep,
        grace_s=max(0, new.grace_ms) / 1000.0,
        deadline_s=None if new.deadline_unix_ms is None else new.deadline_unix_ms / 1000.0,
        time_limit_s=None if new.time_limit_ms is None else arrival_s + new.time_limit_ms / 1000.0,
        most_logprobs=specification.logprobs if specification.HasField("logprobs") else None,
        standing=Standing(
            rounds=0,
            drafts=0,
            drafted=0,
            accepted=0,
            attained_s=0.0,
            preemptions=0,
            level=0,
            score=float(sequence),
        ),
    )


def _facts(request: NewRequest, sequence: int) -> RequestFacts:
    return RequestFacts(
        request_id=request.request_id,
        sequence=sequence,
        arrival_s=request.arrival_unix_ms / 1000.0,
        tenant=request.tenant,
        priority=request.priority,
        workload_class=request.workload_class,
        prompt_tokens=len(request.prompt_ids),
        max_tokens=request.max_tokens,
        expected_output_tokens=request.expected_output_tokens,
    )


def from_record(stored: StoredRequest) -> Live:
    """Rebuild the working copy of one request, unfinished or ended, from the record."""
    submitted = gateway_pb.Specification.FromString(stored.submission)
    submitted.prompt_ids.extend(stored.prompt_ids)
    live = from_submission(stored, stored.sequence, submitted)
    live.committed.extend(stored.committed_ids)
    live.standing = stored.standing
    live.lease_epoch, live.worker_id = stored.lease_epoch, stored.worker_id
    live.deaths, live.death_round = stored.deaths, stored.death_round
    arrival_s = live.facts.arrival_s
    if stored.first_token_unix_ms is not None:
        live.first_token_s = stored.first_token_unix_ms / 1000.0
        live.started_s = started_from_story(stored.story, arrival_s) or live.first_token_s
    if stored.end is not None:
        ended_s = (stored.ended_unix_ms or stored.arrival_unix_ms) / 1000.0
        live.finish(stored.end, stored.detail, stored.cut_characters, ended_s)
    return live


def recovered(live: Live) -> Recovered:
    """Return the event that passes a request on the record, and its progress, to a core."""
    standing = live.standing
    return Recovered(
        facts=live.facts,
        emitted=len(live.committed),
        rounds=standing.rounds,
        drafted=standing.drafted,
        accepted=standing.accepted,
        attained_s=standing.attained_s,
        preemptions=standing.preemptions,
        worker_id=live.worker_id,
        lease_epoch=live.lease_epoch,
        deaths=live.deaths,
        death_round=live.death_round,
        drafts=standing.drafts,
    )


def started_from_story(story: tuple[StoryLine, ...], arrival_s: float) -> float | None:
    """Return when its first round was; None if the timeline does not have it."""
    for line in story:
        if line.what == "started":
            return max(line.at_s, arrival_s)
    return None
