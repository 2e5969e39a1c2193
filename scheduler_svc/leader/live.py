"""The scheduler's copy of the record: token ids, attachments and times of the requests it leads.

The core knows numbers only; everything that must be *sent* to a worker or a client is kept here. Tokens are
appended after the record has them, so everything in `Live.committed` may be shown.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Commit, Standing, StoryLine
from scheduler_svc.core.events import Progress, Recovered, RequestFacts, RoundReported
from scheduler_svc.leader.tracing import RequestTrace
from scheduler_svc.store.records import NewRequest, StoredRequest, standing_at_arrival
from scheduler_svc.wire import replies, reports, requests
from scheduler_svc.wire.requests import AcceptedRequest


class Recipient(Protocol):
    """Stream of a gateway, as an attachment needs it."""

    def mark_dirty(self, attachment: Attachment) -> None:
        """Mark an attachment whose request has tokens or an end that it has not been sent."""

    def forget(self, attachment_id: str) -> None:
        """Remove an attachment; nothing more is sent to it."""


class Cancellable(Protocol):
    """Timer that can be cancelled."""

    def cancel(self) -> None:
        """Cancel the timer. It may have run, or be cancelled already."""


@dataclass(eq=False, slots=True)
class Attachment:
    """One client stream, through one gateway, with the position up to which it has been sent."""

    attachment_id: str
    session: Recipient
    live: Live
    next_token: int


@dataclass(eq=False, slots=True)
class Live:
    """One request. Unfinished requests are in the loop's table; an ended one is kept until it is
    delivered.
    """

    request: AcceptedRequest
    """The request as it was submitted."""
    deadline_s: float | None
    """Hard deadline, on the loop's clock."""
    time_limit_s: float | None
    """When its soft limit ends it, on the loop's clock."""
    standing: Standing
    """Its progress; also of tokens that are being written."""
    lease_epoch: int = 0
    """As the record has it, like the next four."""
    worker_id: str | None = None
    pair: str = ""
    """Fingerprint of the model pair of its newest lease; empty: unknown."""
    deaths: int = 0
    """As in `Request`, like the next one."""
    death_round: int = 0
    committed: array[int] = field(default_factory=lambda: array("i"))
    """Tokens that the record has."""
    taken: int = 0
    """Number of these, and of those that are decided or being written."""
    settling: bool = False
    """Whether another transition of it is decided and not on the record. Until then no reported tokens are
    taken: the core decides about them.
    """
    attachments: dict[str, Attachment] = field(default_factory=dict)
    limits: tuple[Cancellable, ...] = ()
    """Timers of its deadline and its time limit."""
    grace: Cancellable | None = None
    """Timer that ends the request unless a client attaches in time."""
    started_s: float | None = None
    first_token_s: float | None = None
    cached_prompt_tokens: int = 0
    logprobs: dict[int, bytes] = field(default_factory=dict)
    """Logprobs by position, if requested, as workers reported them. Not on the record. Serialized, since a part of a
    worker's message keeps all of that message in memory, with the reports of other requests.
    """
    prompt_logprobs: replies.PromptLogprobs | None = None
    """Logprobs of the prompt, if requested, as a worker reported them with the first token. On the record before that
    token is."""
    end: End | None = None
    """How it ended; None while it has not."""
    end_message: replies.RequestEnd | None = None
    """The end as its clients receive it."""
    trace: RequestTrace | None = None
    """Trace to emit of the request; None where its trace is not recorded."""

    @property
    def facts(self) -> RequestFacts:
        """Return the facts of its submission that the core needs."""
        return self.request.facts

    @property
    def request_id(self) -> str:
        """Return the id that names the request everywhere."""
        return self.facts.request_id

    @property
    def has_begun(self) -> bool:
        """Return whether a worker holds it, or it has outputs: then it belongs to that worker's model pair."""
        return self.taken > 0 or self.worker_id is not None

    @property
    def deadline_unix_ms(self) -> int | None:
        """Return its hard deadline as the record has it."""
        return _unix_ms(self.deadline_s)

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
        if not self.committed:
            self.prompt_logprobs = None  # another worker reports them again
        if self.trace is not None:
            self.trace.leased(lease_epoch, worker_id, now_s)

    def record_logprobs(self, position: int, logprobs: Sequence[replies.TokenLogprobs]) -> None:
        """Keep the logprobs that a worker reported for the tokens from `position` on, as far as the
        client requested them.
        """
        most = self.request.most_logprobs
        if most is None:
            return
        for at, one in enumerate(logprobs, position):
            if at < self.facts.max_tokens and reports.alternatives(one) <= most:
                self.logprobs[at] = one.SerializeToString()

    def logprobs_of(self, first: int, count: int) -> list[bytes]:
        """Return the serialized logprobs of committed tokens, for a request with logprobs."""
        return [self.logprobs.get(at, replies.UNKNOWN_LOGPROBS) for at in range(first, first + count)]

    def record_prompt_logprobs(self, found: replies.PromptLogprobs | None) -> bytes:
        """Keep the logprobs that a worker reported for the prompt, once. Return what the record must have before it
        has the tokens that came with them; empty: nothing.
        """
        most = self.request.prompt_logprobs
        if found is None or most is None or self.prompt_logprobs is not None:
            return b""
        if not reports.are_whole(found, self.facts.prompt_tokens, most):
            return b""
        packed = found.SerializeToString()
        self.prompt_logprobs = replies.PromptLogprobs.FromString(packed)  # no part of the worker's message
        return packed

    def takes(self, progress: Progress, worker_id: str) -> bool:
        """Return whether reported tokens continue it, so that they can be written before the core has them."""
        return (
            progress.position == self.taken
            and progress.lease_epoch == self.lease_epoch
            and worker_id == self.worker_id
            and progress.end is None
            and bool(progress.tokens)
            and not self.settling
            and self.taken + len(progress.tokens) <= self.facts.max_tokens
        )

    def take(self, progress: Progress, service_s: float) -> Commit:
        """Return the transition that writes the tokens of a report, which it takes. `service_s`: machine seconds
        that it attained in that round.
        """
        was = self.standing
        now = self.standing = Standing(
            was.rounds + progress.rounds,
            was.drafts + progress.drafts,
            was.drafted + progress.drafted,
            was.accepted + progress.accepted,
            was.attained_s + service_s,
            was.preemptions,
            was.level,
            was.score,
        )
        self.taken += len(progress.tokens)
        return Commit(
            progress.request_id,
            progress.lease_epoch,
            progress.position,
            progress.tokens,
            now,
            end=None,
            cut_characters=0,
            detail="",
            story=(),
        )

    def recorded(self, commit: Commit, now_s: float) -> None:
        """Take over progress that the record has just taken. Its clients are sent it next."""
        if commit.standing.rounds >= self.standing.rounds:
            self.standing = commit.standing
        self.append(commit.position, commit.tokens, now_s)
        if commit.end is None:
            self.mark_dirty()

    def mark_dirty(self) -> None:
        """Mark tokens or an end that its attachments have not been sent."""
        for attachment in self.attachments.values():
            attachment.session.mark_dirty(attachment)

    def append(self, position: int, tokens: tuple[int, ...], now_s: float) -> None:
        """Append what the record has just taken: `tokens` from `position` on. A repeat adds nothing."""
        fresh = tokens[len(self.committed) - position :]
        if fresh and self.first_token_s is None:
            self.first_token_s = now_s
        self.committed.fromlist(list(fresh))  # `extend` takes twice as long for a few of them
        self.taken = max(self.taken, len(self.committed))

    def read_again(self, stored: StoredRequest | None, now_s: float) -> None:
        """Take over what the record has, after it refused a transition; None: it has nothing. No tokens are
        removed: what the record lacks is written back.
        """
        if stored is not None:
            self.append(len(self.committed), stored.committed_ids[len(self.committed) :], now_s)
            self.standing = stored.standing
            self.lease(stored.lease_epoch, stored.worker_id, now_s)
            self.pair = stored.pair
            self.deaths, self.death_round = stored.deaths, stored.death_round
        self.taken = len(self.committed)

    def finish(self, end: End, detail: str, cut_characters: int, now_s: float) -> None:
        """Store the one end of the request; it is delivered with everything that its attachments have not
        been sent.
        """
        self.end = end
        self.end_message = replies.request_end(
            end,
            detail=detail,
            cut_characters=cut_characters,
            cached_prompt_tokens=self.cached_prompt_tokens,
            standing=self.standing,
            arrival_s=self.facts.arrival_s,
            started_s=self.started_s,
            first_token_s=self.first_token_s,
            ended_s=now_s,
        )

    def to_record(self) -> StoredRequest:
        """Return what the record should hold of the unfinished request: the inverse of `from_record`."""
        request, facts = self.request, self.facts
        arrival_unix_ms = round(facts.arrival_s * 1000)
        return StoredRequest(
            request_id=facts.request_id,
            tenant=facts.tenant,
            model=request.model,
            priority=facts.priority,
            workload_class=facts.workload_class,
            arrival_unix_ms=arrival_unix_ms,
            prompt_ids=request.prompt_ids,
            max_tokens=facts.max_tokens,
            expected_output_tokens=facts.expected_output_tokens,
            deadline_unix_ms=self.deadline_unix_ms,
            time_limit_ms=None
            if self.time_limit_s is None
            else round((self.time_limit_s - facts.arrival_s) * 1000),
            keep=request.keep,
            grace_ms=-1 if request.keep else round(request.grace_s * 1000),
            idempotency_key=request.idempotency_key,
            body_hash=request.body_hash,
            seed=request.seed,
            submission=request.submission,
            length_features=facts.length_features,
            prompt_blocks=facts.prompt_blocks,
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
            prompt_logprobs=b"" if self.prompt_logprobs is None else self.prompt_logprobs.SerializeToString(),
            pair=self.pair,
        )

    @property
    def specification_tokens(self) -> int:
        """Return the size of its specification for a worker, in token ids."""
        return self.facts.prompt_tokens + len(self.committed) + self.request.settings_tokens

    def specify(
        self, message: requests.LeasedSpecification, lease_epoch: int, *, now_s: float, incarnation: str
    ) -> None:
        """Write into an empty message what a worker needs to continue after the committed tokens under this lease, and
        what it keeps for a scheduler that needs it, if the record (its `incarnation`) is lost.
        """
        requests.specify(
            self.request,
            message,
            lease_epoch=lease_epoch,
            committed=self.committed,
            traceparent=self.trace.run(lease_epoch).traceparent if self.trace is not None else None,
            origin=requests.origin(
                self.request,
                deadline_s=self.deadline_s,
                time_limit_s=self.time_limit_s,
                now_s=now_s,
                incarnation=incarnation,
            ),
        )


def take_reported(
    requests: dict[str, Live], report: RoundReported, now_s: float, taken: list[Commit]
) -> bool:
    """Take the reported tokens that continue their requests, and add the transitions that write them to `taken`.
    Return whether that is all there is to be written of the report.
    """
    verified, prefilled, complete = report.verified, report.prefilled, True
    for progress in report.progress:
        live = requests.get(progress.request_id)
        if live is None:
            continue
        if live.started_s is None:
            live.started_s = max(live.facts.arrival_s, now_s - report.total_s)
        if live.takes(progress, report.worker_id):
            taken.append(live.take(progress, report.service_s(progress, verified, prefilled)))
            progress.recorded = True
        else:
            complete = False
    return complete


def all_recorded(requests: dict[str, Live], commits: Sequence[Commit], now_s: float) -> None:
    """Apply progress without ends that the record has just taken."""
    for commit in commits:
        live = requests.get(commit.request_id)
        if live is not None:
            live.recorded(commit, now_s)


def _unix_ms(moment_s: float | None) -> int | None:
    return None if moment_s is None else round(moment_s * 1000)


def from_submission(new: NewRequest, request: AcceptedRequest) -> Live:
    """Return the working copy of a request that the record has just accepted."""
    return Live(
        request=request,
        deadline_s=None if new.deadline_unix_ms is None else new.deadline_unix_ms / 1000.0,
        time_limit_s=None
        if new.time_limit_ms is None
        else request.facts.arrival_s + new.time_limit_ms / 1000.0,
        standing=standing_at_arrival(request.facts.sequence),
    )


def from_record(stored: StoredRequest) -> Live:
    """Rebuild the working copy of one request, unfinished or ended, from the record."""
    live = from_submission(stored, requests.accepted(stored, stored.sequence))
    live.committed.extend(stored.committed_ids)
    live.taken = len(live.committed)
    live.standing = stored.standing
    live.lease_epoch, live.worker_id, live.pair = stored.lease_epoch, stored.worker_id, stored.pair
    live.deaths, live.death_round = stored.deaths, stored.death_round
    arrival_s = live.facts.arrival_s
    if stored.first_token_unix_ms is not None:
        live.first_token_s = stored.first_token_unix_ms / 1000.0
        live.started_s = started_from_story(stored.story, arrival_s) or live.first_token_s
    if stored.prompt_logprobs:
        live.prompt_logprobs = replies.PromptLogprobs.FromString(stored.prompt_logprobs)
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
