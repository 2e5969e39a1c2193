"""Transitions that a leader sends together: one entry of the log, then one script call for each kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from scheduler_svc.core.commands import Commit, Finish, Lease, Release, Standing
from scheduler_svc.store import scripts
from scheduler_svc.store.codec import (
    Argument,
    check_level,
    pack_ids,
    progress_fields,
    safe_score,
    safe_seconds,
    story_json,
    submission_fields,
)
from scheduler_svc.store.errors import Fenced
from scheduler_svc.store.keys import SHARD_TTL_S
from scheduler_svc.store.log import number_of, pack_entry, pack_row
from scheduler_svc.store.records import (
    ON_RECORD,
    PackedPromptLogprobs,
    StoredRequest,
    TransitionStatus,
)
from scheduler_svc.store.scripts import MAX_ENTRIES, MAX_PROMPTS, Call, Script
from scheduler_svc.store.store import Store
from scheduler_svc.store.tails import Logged, Plan

T = TypeVar("T")

FOLD_AFTER_MS = 5000
"""Milliseconds that a row stays in the log before its request's own keys hold it."""
FOLD_AFTER_BYTES = 8 << 20
"""A row is folded earlier once this many bytes were appended after it: what 2,000 reports a second make in about a
second. This bounds the log, and the time to read it.
"""
FOLD_TOGETHER = 256
"""Most requests that one batch folds because of their age."""
_STATUS = {status.value: status for status in TransitionStatus}


class Pending(Generic[T]):
    """Answer that exists once the batch it belongs to has been executed."""

    __slots__ = ("_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None

    def set(self, value: T) -> None:
        """Set the answer; the batch calls this."""
        self._value, self.done = value, True

    def result(self) -> T:
        """Return the answer. Raises RuntimeError before the batch has been executed."""
        if not self.done:
            raise RuntimeError("the batch has not been executed")
        return self._value  # type: ignore[return-value]  # it is a T once done is set


@dataclass(slots=True)
class _Work:
    """One queueing call on a batch: its entries, how they are planned, where the answers go."""

    entries: Sequence[Any]
    plan: Callable[[_Encoder, _Work], None]
    pending: Pending[list[TransitionStatus]]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call, and what its answers are about: entries of queueing calls, by index, or folded requests. The one
    answer of an append is about all of its places.
    """

    call: Call
    places: Sequence[tuple[_Work, int] | str] = ()


@dataclass(slots=True)
class _Encoded:
    """A batch as it is sent, the same each time."""

    plan: Plan
    sent: list[_Sent]
    entry: int
    """Number of its entry in the log."""
    bytes: int = 0
    """Size of that entry."""
    known: list[tuple[_Work, int, TransitionStatus]] = field(default_factory=list)
    """Places whose answer is known without the record."""
    answered: bool = False


class Batch:
    """Transitions in the order they were queued. Nothing is sent before `execute`.

    A batch belongs to the leadership it was made under. After StoreUnavailable it is not known how much of it
    happened: execute the same batch again, and what had happened answers ALREADY.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leadership = store.leadership
        self._work: list[_Work] = []
        self._encoded: _Encoded | None = None
        self._generation = 0
        self.unfoldable: dict[str, TransitionStatus] = {}
        """Requests whose own keys lack what was on the record before, and the record's answer: it lost them."""

    def commit(self, commits: Sequence[Commit]) -> Pending[list[TransitionStatus]]:
        """Append tokens; with an end, finish in the same transition. STALE: other lease epoch or position."""
        return self._queue(commits, _Encoder.commit)

    def keep_prompt_logprobs(self, found: Sequence[PackedPromptLogprobs]) -> Pending[list[TransitionStatus]]:
        """Keep what workers have found of prompts, until the requests expire: before everything else of the batch, so
        that the record has it if it has the tokens that came with it. STALE: other lease epoch.
        """
        return self._queue(found, _Encoder.prompt_logprobs)

    def finish(self, finishes: Sequence[Finish]) -> Pending[list[TransitionStatus]]:
        """End requests, whichever worker holds them. ALREADY: ended this way; GONE: ended otherwise; STALE:
        the record has lost tokens.
        """
        return self._queue(finishes, _Encoder.finish)

    def lease(self, leases: Sequence[Lease], pair: str = "") -> Pending[list[TransitionStatus]]:
        """Give requests to workers with this model pair. STALE: the record's lease epoch is not the one before."""
        return self._queue(leases, functools.partial(_Encoder.lease, pair=pair))

    def release(self, releases: Sequence[Release]) -> Pending[list[TransitionStatus]]:
        """Take requests back from their workers. STALE: they are leased under another epoch."""
        return self._queue(releases, _Encoder.release)

    def restore(self, requests: Sequence[StoredRequest]) -> Pending[list[TransitionStatus]]:
        """Write unfinished requests of the working copy back into a record that lost them or the last of
        them.

        STALE: the record holds more, or other tokens. GONE: on the record the request has ended.
        """
        return self._queue(requests, _Encoder.restore)

    async def execute(self) -> None:
        """Send everything as one pipeline and fill the pending answers. An empty batch folds what is due, and
        clears a log that no request needs; after StoreUnavailable it may be forgotten.

        Raises Fenced (another leader epoch is in force: nothing that came after it has happened; or the log is
        not the one that this leader wrote), StoreUnavailable, and ValueError for a level outside
        0 … MAX_LEVELS − 1 or token ids that do not fit int32 (nothing was sent).
        """
        store = self._store
        if not store.tails_are_read and store.epoch is not None:
            await store.read_tails()
        if self._encoded is None or self._generation != store.generation:
            # Only once: a batch that is executed again has to send the very same data, unless the record was
            # written back in between.
            await self._learn_idempotency_keys()
            self._generation = store.generation
            self._encoded = _Encoder(store, self._leadership).encode(self._work)
        encoded = self._encoded
        replies = await store.run([one.call for one in encoded.sent], leading=True)
        answers = self._answers(encoded, replies)
        if not encoded.answered:
            self._apply(encoded, replies)
        for work in self._work:
            work.pending.set(answers[id(work)])
            if work.plan in (_Encoder.commit, _Encoder.finish):
                for entry, status in zip(work.entries, work.pending.result(), strict=True):
                    if entry.end is not None and status is not TransitionStatus.STALE:
                        store.claims.let_go(entry.request_id)

    def _answers(self, encoded: _Encoded, replies: Sequence[Any]) -> dict[int, list[TransitionStatus]]:
        """Return the answers to the entries of each queueing call, by its identity. Raises Fenced."""
        answers = {id(work): [TransitionStatus.OK] * len(work.entries) for work in self._work}
        for work, index, status in encoded.known:
            answers[id(work)][index] = status
        for one, reply in zip(encoded.sent, replies, strict=True):
            if one.call.script is scripts.APPEND and reply[0] == b"behind":
                self._store.distrust()
                raise Fenced("the log is not the one that this leader wrote")
            if one.call.script is scripts.APPEND and _STATUS[reply[0]] is TransitionStatus.OK:
                continue
            for place, status in _by_place(one, reply):
                if not isinstance(place, str):
                    answers[id(place[0])][place[1]] = status
        return answers

    def _apply(self, encoded: _Encoded, replies: Sequence[Any]) -> None:
        """Make what the record has answered the leader's copy of it."""
        plan = encoded.plan
        for one, reply in zip(encoded.sent, replies, strict=True):
            if one.call.script is scripts.APPEND:
                continue  # the plan has its rows
            for place, status in _by_place(one, reply):
                if isinstance(place, str):
                    if status not in ON_RECORD:
                        plan.unexpected(place)
                        self.unfoldable[place] = status
                    continue
                entry = place[0].entries[place[1]]
                if status not in ON_RECORD:
                    plan.unexpected(entry.request_id)
                elif one.call.script is scripts.COMMIT and status is TransitionStatus.OK:
                    plan.committed(entry)
            if one.call.script is scripts.CLEAR:
                self._store.tails.has_entries = False
        plan.apply(encoded.entry, encoded.bytes)
        encoded.answered = True

    def _queue(
        self, entries: Sequence[Any], plan: Callable[[_Encoder, _Work], None]
    ) -> Pending[list[TransitionStatus]]:
        if self._encoded is not None:
            raise RuntimeError("the batch has been executed; make another one")
        work = _Work(entries, plan, Pending())
        self._work.append(work)
        return work.pending

    async def _learn_idempotency_keys(self) -> None:
        ending = {
            entry.request_id
            for work in self._work
            if work.plan in (_Encoder.commit, _Encoder.finish)
            for entry in work.entries
            if entry.end is not None
        }
        if ending:
            await self._store.claims.learn(ending)


class _Encoder:
    """Makes the calls of a batch."""

    def __init__(self, store: Store, leadership: str) -> None:
        self._store = store
        self._leadership = leadership
        self._now_ms = int(store.clock() * 1000)
        self._rows: list[bytes] = []
        self._logged: list[tuple[_Work, int]] = []
        self._of_prompts: list[_Sent] = []
        self._encoded = _Encoded(Plan(store.tails, self._now_ms), [], number_of(store.tails.newest) + 1)
        self._plan = self._encoded.plan

    def encode(self, works: Iterable[_Work]) -> _Encoded:
        """Return the batch as it is sent."""
        for work in works:
            work.plan(self, work)
        tails = self._store.tails
        self._fold(tails.due(self._now_ms - FOLD_AFTER_MS, FOLD_AFTER_BYTES, FOLD_TOGETHER))
        if self._rows:
            keys = [self._store.keys.leader(), self._store.keys.log()]
            number = self._encoded.entry
            packed = pack_entry(self._now_ms, self._rows)
            self._encoded.bytes = len(packed)
            arguments: list[Argument] = [
                self._leadership,
                tails.newest,
                number,
                tails.oldest_entry(number),
                SHARD_TTL_S * 1000,
                packed,
            ]
            # First: what follows in the batch may fold its rows.
            self._encoded.sent.insert(0, _Sent(Call(scripts.APPEND, keys, arguments), self._logged))
        elif tails.has_entries and not tails.unfolded:
            keys = [self._store.keys.leader(), self._store.keys.log()]
            self._encoded.sent.append(_Sent(Call(scripts.CLEAR, keys, [self._leadership])))
        self._encoded.sent[:0] = self._of_prompts
        if self._encoded.known and not self._encoded.sent:
            # Only the record knows whether this process leads.
            call = Call(scripts.FOLD, [self._store.keys.leader()], [self._leadership])
            self._encoded.sent.append(_Sent(call))
        return self._encoded

    def commit(self, work: _Work) -> None:
        """Plan progress as rows of the log; ends, with the tokens that only the log holds, and what this copy
        does not expect, as script calls.
        """
        others: list[int] = []
        index = 0
        while True:
            first, index = index, self._plan.continues(work.entries, index, self._rows)
            self._logged += [(work, logged) for logged in range(first, index)]
            if index == len(work.entries):
                break
            self._commit_other(work, index, others)
            index += 1
        tails = self._tails_of_ends([work.entries[index] for index in others])
        self._fold(
            request_id for index in others if (request_id := work.entries[index].request_id) not in tails
        )
        for index in others:
            if work.entries[index].end is not None:
                self._plan.end(work.entries[index].request_id)
        names, expires_with = self._store.keys, self._store.claims.expires_with
        for some in _chunks(others, MAX_ENTRIES):
            keys = self._store.queue_keys.copy()
            arguments: list[Argument] = [self._leadership, self._now_ms, self._store.finished_ttl_ms]
            for index in some:
                commit = work.entries[index]
                request_id, tokens, position = commit.request_id, commit.tokens, commit.position
                logged, first_ms = 0, self._now_ms if position == 0 and tokens else None
                if (tail := tails.get(request_id)) is not None:
                    logged = len(tail.tokens)
                    position, tokens = tail.position, [*tail.tokens, *tokens]
                    first_ms = first_ms if tail.first_ms is None else tail.first_ms
                keys += (names.request(request_id), names.tokens(request_id))
                arguments += (
                    request_id,
                    commit.lease_epoch,
                    position,
                    len(tokens),
                    pack_ids(tokens),
                    *_standing(request_id, commit.standing),
                )
                if commit.end is None:
                    arguments.append("")
                else:
                    keys += (names.payload(request_id), expires_with[request_id])
                    arguments += (
                        commit.end.value,
                        commit.cut_characters,
                        commit.detail,
                        story_json(commit.story),
                        logged,
                        "" if first_ms is None else first_ms,
                    )
            self._send(scripts.COMMIT, keys, arguments, work, some)

    def _commit_other(self, work: _Work, index: int, others: list[int]) -> None:
        """Plan progress that may not continue its request in the log: add it to `others` where the record has to
        decide about it.
        """
        commit = work.entries[index]
        expected = self._plan.expects(commit)
        if expected is None:
            others.append(index)
            return
        if not expected:
            self._encoded.known.append((work, index, TransitionStatus.STALE))
            return
        sequence = self._plan.append(commit)
        if sequence is None:
            self._encoded.known.append((work, index, TransitionStatus.ALREADY))
            return
        self._rows.append(
            pack_row(commit.request_id, sequence, commit.position, commit.tokens, commit.standing)
        )
        self._logged.append((work, index))

    def _tails_of_ends(self, commits: Sequence[Commit]) -> dict[str, Logged]:
        """Return what only the log holds of the requests that end, where the end follows it and nothing else
        does.
        """
        progressed = {commit.request_id for commit in commits if commit.end is None}
        tails = {}
        for commit in commits:
            tail = None if commit.request_id in progressed else self._plan.tail_of(commit.request_id)
            if tail is not None and tail.position + len(tail.tokens) == commit.position:
                tails[commit.request_id] = tail
        return tails

    def prompt_logprobs(self, work: _Work) -> None:
        """Plan what is kept of prompts."""
        names = self._store.keys
        for some in _chunks(range(len(work.entries)), MAX_PROMPTS):
            keys = [names.leader()]
            arguments: list[Argument] = [self._leadership]
            for index in some:
                found = work.entries[index]
                keys += (names.request(found.request_id), names.payload(found.request_id))
                arguments += (found.lease_epoch, found.packed)
            call = Call(scripts.PROMPT_LOGPROBS, keys, arguments)
            self._of_prompts.append(_Sent(call, [(work, index) for index in some]))

    def finish(self, work: _Work) -> None:
        """Plan ends, each with the tokens that only the log holds."""
        names, expires_with = self._store.keys, self._store.claims.expires_with
        for some in _chunks(range(len(work.entries)), MAX_ENTRIES):
            keys = self._store.queue_keys.copy()
            arguments: list[Argument] = [self._leadership, self._now_ms, self._store.finished_ttl_ms]
            for index in some:
                finish = work.entries[index]
                request_id = finish.request_id
                tail = self._plan.tail_of(request_id)
                position, tokens = (tail.position, tail.tokens) if tail is not None else (0, [])
                keys += (names.request(request_id), names.tokens(request_id))
                keys += (names.payload(request_id), expires_with[request_id])
                arguments += (request_id, finish.end.value, finish.detail, story_json(finish.story))
                arguments += _standing(request_id, finish.standing)
                arguments += (position, len(tokens), pack_ids(tokens))
                self._plan.end(request_id)
            self._send(scripts.FINISH, keys, arguments, work, some)

    def lease(self, work: _Work, *, pair: str) -> None:
        """Plan leases to workers with this model pair."""
        for lease in work.entries:
            self._plan.lease(lease)
        self._on_requests(
            scripts.LEASE,
            work,
            lambda lease: (lease.worker_id, lease.lease_epoch - 1, lease.lease_epoch),
            pair,
        )

    def release(self, work: _Work) -> None:
        """Plan releases; the lease epoch stays."""
        self._on_requests(
            scripts.RELEASE,
            work,
            lambda release: (release.lease_epoch, release.deaths, release.death_round),
        )

    def restore(self, work: _Work) -> None:
        """Plan requests that are written back; rows of the log that they repeat do not count any more."""
        self._fold(request.request_id for request in work.entries)
        names = self._store.keys
        for some in _chunks(range(len(work.entries)), MAX_PROMPTS):
            keys = [*self._store.queue_keys, names.sequence()]
            arguments: list[Argument] = [self._leadership, SHARD_TTL_S * 1000]
            for index in some:
                request = work.entries[index]
                request_id = request.request_id
                check_level(request_id, request.standing.level)
                keys += (
                    names.request(request_id),
                    names.tokens(request_id),
                    names.payload(request_id),
                    self._store.claims.expire_together(request),
                )
                arguments += (
                    request_id,
                    request.tenant,
                    request.body_hash,
                    request.sequence,
                    len(request.prompt_ids),
                    request.lease_epoch,
                    pack_ids(request.committed_ids),
                    pack_ids(request.prompt_ids),
                    request.submission,
                    request.length_features,
                    request.prompt_blocks,
                    request.prompt_logprobs,
                )
                fields = progress_fields(request) + submission_fields(request)
                arguments += (len(fields), *fields)
                self._plan.restore(request)
            self._send(scripts.RESTORE, keys, arguments, work, some)

    def _fold(self, request_ids: Iterable[str]) -> None:
        """Plan that requests' own keys get what only the log holds."""
        names = self._store.keys
        tails = [
            (request_id, tail)
            for request_id in dict.fromkeys(request_ids)
            if (tail := self._plan.tail_of(request_id)) is not None
        ]
        for some in _chunks(tails, MAX_ENTRIES):
            keys = [names.leader()]
            arguments: list[Argument] = [self._leadership]
            for request_id, (position, tokens, standing, first_ms) in some:
                keys += (names.request(request_id), names.tokens(request_id))
                arguments += (position, len(tokens), pack_ids(tokens), "" if first_ms is None else first_ms)
                arguments += _standing(request_id, standing)
                self._plan.fold(request_id)
            call = Call(scripts.FOLD, keys, arguments)
            self._encoded.sent.append(_Sent(call, [request_id for request_id, _ in some]))

    def _on_requests(
        self,
        script: Script,
        work: _Work,
        arguments_of: Callable[[Any], tuple[Argument, ...]],
        *of_all: Argument,
    ) -> None:
        """Call a script that needs nothing but the requests' hashes. `of_all`: arguments before those of requests."""
        names = self._store.keys
        for some in _chunks(range(len(work.entries)), MAX_ENTRIES):
            keys = [names.leader()]
            arguments: list[Argument] = [self._leadership, *of_all]
            for index in some:
                keys.append(names.request(work.entries[index].request_id))
                arguments += arguments_of(work.entries[index])
            self._send(script, keys, arguments, work, some)

    def _send(
        self, script: Script, keys: list[str], arguments: list[Argument], work: _Work, some: Sequence[int]
    ) -> None:
        self._encoded.sent.append(_Sent(Call(script, keys, arguments), [(work, index) for index in some]))


def _by_place(one: _Sent, reply: list[Any]) -> Iterator[tuple[tuple[_Work, int] | str, TransitionStatus]]:
    """Yield the answers to a call with their places."""
    if one.call.script is scripts.APPEND:
        reply = reply * len(one.places)
    for place, answer in zip(one.places, reply, strict=True):
        yield place, _STATUS[answer]


def _chunks(entries: Iterable[T], size: int) -> Iterable[list[T]]:
    waiting = iter(entries)
    while some := list(itertools.islice(waiting, size)):
        yield some


def _standing(request_id: str, standing: Standing) -> tuple[Argument, ...]:
    return (
        standing.rounds,
        standing.drafts,
        standing.drafted,
        standing.accepted,
        safe_seconds(standing.attained_s),
        standing.preemptions,
        check_level(request_id, standing.level),
        safe_score(standing.score),
    )
