"""Leases, commits and leader epochs as a protocol: three schedulers and three workers, interleaved at every
call of a script.

Any scheduler may be paused anywhere, wake up and continue; its lease may expire unnoticed; its reply may get
lost, so that it sends the same again after others have led. Workers report to the scheduler that they believe
leads, again when they are not acknowledged. The scripts and the store are the real ones, on a real server;
schedulers and workers here act like `scheduler_svc/leader/loop.py` and `worker_svc/link/link.py`, only less
carefully: a report is written to the record under any lease.

A token holds the lease under which it was made, as if no two workers ever computed the same, so that a
mixed-up output shows.

The record may lose its last writes: it is set back to a copy, as by a crash between two fsyncs or by a
replica that lags. If the newest leader lives, nothing may be missing once it has written back, and no standby
may lead before. If it died, exactly the data missing from the copy is lost: the expectations of clients and
workers go back to the moment of the copy too.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy as copies_of
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import redis.asyncio as redis_client
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Commit, Finish, Lease, Release
from scheduler_svc.store.batch import Batch, Pending
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import Fenced, RecordBehind
from scheduler_svc.store.records import StoredRequest, SubmitStatus, TransitionStatus
from scheduler_svc.store.store import Store
from tests.store.kit import (
    ALREADY,
    BLOCKS,
    FEATURES,
    GONE,
    OK,
    STALE,
    a_commit,
    a_finish,
    a_request,
    a_standing,
    assert_nothing_leaks,
    keys_of,
    losing_answers,
    new_shard,
    unfinished,
)

T = TypeVar("T")

SCHEDULERS = WORKERS = 3
REQUESTS = 4
EPOCH = 1_000_000
"""Factor of a token: lease epoch × this + position."""


@dataclass
class Report:
    """Work of a worker in a round, until it is acknowledged."""

    worker: str
    request_id: str
    lease_epoch: int
    position: int
    tokens: tuple[int, ...]
    end: End | None


@dataclass
class Held:
    """A request on a worker."""

    lease_epoch: int
    outputs: int
    ended: bool = False


@dataclass
class Copy:
    """State of a request, as one scheduler believes it to be."""

    lease_epoch: int
    worker: str | None
    tokens: list[int]
    rounds: int
    pair: str


@dataclass
class Scheduler:
    """One process. `copies` is None while it stands by, `doubts` from its fencing until it has read the
    record again, `distrusts` from a loss of the record until it has written that back."""

    store: Store
    epoch: str = ""
    recovering: bool = False
    doubts: bool = False
    distrusts: bool = False
    copies: dict[str, Copy] | None = None
    facts: dict[str, StoredRequest] = field(default_factory=dict)
    """Values that never change, of all requests that it has led."""
    ended: list[tuple[str, Copy, Commit]] = field(default_factory=list)
    inbox: list[Report] = field(default_factory=list)
    batch: Batch | None = None
    asked: list[tuple[Any, Report | None]] = field(default_factory=list)
    answers: list[Pending[list[TransitionStatus]]] = field(default_factory=list)

    def step_down(self) -> None:
        self.epoch, self.recovering, self.doubts, self.distrusts, self.copies = "", False, False, False, None
        self.facts, self.ended = {}, []
        self.inbox, self.batch, self.asked, self.answers = [], None, [], []


@dataclass
class Expected:
    """Facts that clients and workers rely on."""

    accepted: list[str] = field(default_factory=list)
    shown: dict[str, list[int]] = field(default_factory=dict)
    told: dict[str, End] = field(default_factory=dict)
    granted: dict[tuple[str, int], str] = field(default_factory=dict)
    acknowledged: list[Report] = field(default_factory=list)


@dataclass
class Worker:
    name: str
    follows: Scheduler | None = None
    held: dict[str, Held] = field(default_factory=dict)
    kept: list[Report] = field(default_factory=list)


def copy_of(stored: StoredRequest) -> Copy:
    return Copy(
        stored.lease_epoch, stored.worker_id, list(stored.committed_ids), stored.standing.rounds, stored.pair
    )


def pair_of(worker: str) -> str:
    """Return the model pair of a worker: as if each had its own, so that it shows which lease is on the record."""
    return f"pair of {worker}"


def stands_by(scheduler: Scheduler) -> bool:
    return not scheduler.epoch


def believes(scheduler: Scheduler) -> bool:
    return bool(scheduler.epoch)


def recovers(scheduler: Scheduler) -> bool:
    return scheduler.recovering


def leads(scheduler: Scheduler) -> bool:
    """Return whether it leads by its own knowledge."""
    return scheduler.copies is not None


def can_decide(scheduler: Scheduler) -> bool:
    return leads(scheduler) and scheduler.batch is None


def has_batch(scheduler: Scheduler) -> bool:
    return scheduler.batch is not None


def pick(those: Sequence[T], draw: int) -> T:
    return those[draw % len(those)]


WEIGHTS = {
    "work": 6,
    "connect": 4,
    "decide": 6,
    "send": 3,
    "submit": 1,
    "lease runs out": 1,
    "take over": 2,
    "recover": 1,
    "renew": 1,
    "sync": 1,
    "lose the tail": 1,
    "newest leader dies": 1,
}
NOTHING_MORE = 4
"""Draw with which `decide` decides nothing beside what workers have reported."""
VERBS = {Commit: "commit", Lease: "lease", Release: "release", Finish: "finish"}


def queued(batch: Batch, kind: type, commands: list[Any]) -> Pending[list[TransitionStatus]]:
    """Queue commands of one kind; at most one of them is a lease."""
    pair = [pair_of(command.worker_id) for command in commands if kind is Lease]
    answer: Pending[list[TransitionStatus]] = getattr(batch, VERBS[kind])(commands, *pair)
    return answer


class Protocol(RuleBasedStateMachine):
    """State machine of the protocol; see the module's docstring."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.shard = new_shard()
        self.now_s = 0.0
        self.schedulers = [Scheduler(self.open()) for _ in range(SCHEDULERS)]
        self.workers = {f"w{at}": Worker(f"w{at}") for at in range(WORKERS)}
        self.reader = self.open()
        self.client = redis_client.Redis.from_url(self.url, protocol=2)
        self.epochs: list[int] = []
        """Numbers of the epochs that the record, or a living leader, has."""
        self.used: set[str] = set()
        self.may_be_older = False
        self.expected = Expected()
        self.names = itertools.count()
        self.losses = itertools.count()
        # Invariants.
        self.before: dict[str, StoredRequest] = {}
        self.on_record: dict[tuple[str, int], str] = {}
        # Data that survives a crash of the record.
        self.synced: tuple[dict[str, tuple[bytes, int]], Expected] = ({}, Expected())
        # One scheduler leads, and each worker has work: the interesting states come after this.
        self.acquire(0, recovers_at_once=True)
        for at in range(WORKERS):
            self.connect(0, at)
            self.submit(0, key=True, retried=False)
            self.decide(0, slot=at, worker=at, what=0, at_once=True)
        # The log has rows of them in another order than that of their arrival.
        for at in reversed(range(WORKERS)):
            self.work(at, count=1, ends=False, told=1)
            self.decide(0, slot=at, worker=at, what=NOTHING_MORE, at_once=True)
        self.sync()

    def open(self) -> Store:
        return Store(self.url, self.shard, timeout_s=60, monotonic=lambda: self.now_s)

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return self.runner.run(main())

    # -- the record, read in a way that shows forbidden changes ----------------------------------------

    def everything(self) -> dict[str, bytes]:
        keys = self.run(keys_of(self.client, self.reader.keys.prefix))
        return {key: self.run(self.client.dump(key)) for key in keys}

    def in_force(self, scheduler: Scheduler) -> bool:
        held = self.run(self.client.get(self.reader.keys.leader()))
        return held is not None and held.decode().split(" ")[0] == scheduler.epoch

    def write(self, scheduler: Scheduler, work: Awaitable[T]) -> T | None:
        """Return the result, or None if the caller was fenced: then it was not in force and has changed
        nothing."""
        in_force = self.in_force(scheduler) and not scheduler.distrusts
        found = None if in_force else self.everything()
        try:
            answer = self.run(work)
        except Fenced:
            assert not in_force, "the leader was fenced"
            assert self.everything() == found, "a stale epoch changed something"
            scheduler.doubts = True
            return None
        assert in_force, "a stale epoch was let in"
        return answer

    # -- what happens next -----------------------------------------------------------------------------------

    @rule(
        action=st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
        data=st.data(),
    )
    def happens(self, action: str, data: st.DataObject) -> None:
        """Run one of the actions. There is one rule, so that hypothesis leaves none of them out for a whole
        run."""

        def draw() -> int:
            return data.draw(st.integers(0, 11))

        def perhaps() -> bool:
            return data.draw(st.booleans())

        match action:
            case "work" if self.busy():
                self.work(draw(), count=1 + draw() % 3, ends=draw() > 9, told=draw() % 3)
            case "connect" if self.those(leads):
                self.connect(draw(), draw())
            case "decide" if self.those(can_decide):
                self.decide(draw(), slot=draw(), worker=draw(), what=draw(), at_once=perhaps())
            case "send" if self.those(has_batch):
                self.send(draw(), answer_is_lost=draw() > 7)
            case "submit" if len(self.expected.accepted) < REQUESTS and self.those(leads):
                self.submit(draw(), key=perhaps(), retried=perhaps())
            case "lease runs out":
                self.the_lease_runs_out()
            case "take over" if self.those(stands_by):
                if perhaps():
                    self.the_lease_runs_out()
                self.acquire(draw(), recovers_at_once=perhaps())
            case "recover" if self.those(recovers):
                self.recover(draw())
            case "renew" if self.those(believes):
                self.renew(draw())
            case "sync" if not self.is_behind():
                self.sync()
            case "lose the tail":
                self.lose_the_tail()
            case "newest leader dies" if perhaps():
                self.the_newest_leader_dies()

    # -- leadership ------------------------------------------------------------------------------------------

    def those(self, fits: Callable[[Scheduler], bool]) -> list[Scheduler]:
        return [scheduler for scheduler in self.schedulers if fits(scheduler)]

    def the_lease_runs_out(self) -> None:
        self.run(self.client.delete(self.reader.keys.leader()))

    def acquire(self, draw: int, recovers_at_once: bool) -> None:
        scheduler = pick(self.those(stands_by), draw)
        taken = self.run(self.client.get(self.reader.keys.leader()))
        epoch = self.run(
            scheduler.store.acquire_leadership(owner=f"s{self.schedulers.index(scheduler)}:1", lease_s=600)
        )
        if epoch is None and taken is None:
            assert self.may_be_older, "no process led, and none could"
            if self.is_behind():
                return  # it leaves the record to the last leader, which is alive
            self.now_s += scheduler.store.patience_s(600)
            epoch = self.run(scheduler.store.acquire_leadership(owner="patient:1", lease_s=600))
            assert epoch is not None, "it waits for ever"
        if epoch is None:
            return
        assert not self.is_behind(), "it leads before the newest state is back"
        self.may_be_older = False
        assert taken is None, "two lead"
        assert epoch.number > max(self.epochs, default=0), "a number was used again that is on the record"
        assert str(epoch) not in self.used, "an epoch was used again"
        self.used.add(str(epoch))
        self.epochs.append(epoch.number)
        scheduler.epoch, scheduler.recovering = str(epoch), True
        if recovers_at_once:
            self.recover(0)

    def recover(self, draw: int) -> None:
        scheduler = pick(self.those(recovers), draw)
        scheduler.recovering = False
        found = self.run(unfinished(scheduler.store))
        scheduler.copies = {stored.request_id: copy_of(stored) for stored in found}
        scheduler.facts = {stored.request_id: stored for stored in found}

    def renew(self, draw: int) -> None:
        """Renew the lease in time, late, or after the scheduler was fenced."""
        doubting = self.those(lambda scheduler: scheduler.doubts)
        scheduler = pick(doubting or self.those(believes), draw)
        leader = self.run(self.client.get(self.reader.keys.leader()))
        newest = int(scheduler.epoch.split(":")[0]) == self.epochs[-1]
        try:
            renewed = self.run(scheduler.store.renew_leadership())
        except RecordBehind:
            assert scheduler.distrusts, "nothing was lost"
            self.write_back(scheduler)
            return
        assert renewed == newest, "only the newest epoch may be renewed"
        assert renewed or self.run(self.client.get(self.reader.keys.leader())) == leader
        if renewed:
            scheduler.doubts = False
        else:
            scheduler.step_down()

    # -- clients ---------------------------------------------------------------------------------------------

    def submit(self, draw: int, key: bool, retried: bool) -> None:
        """Submit one or two new requests in one call; with `key`, also another one under the first one's
        idempotency key.
        """
        scheduler = pick(self.those(leads), draw)
        first = f"r{next(self.names)}"
        # Keys are common to all shards, and each example has a shard of its own.
        idempotency_key = f"{self.shard} {first}" if key else ""
        news = [a_request(first, idempotency_key=idempotency_key)]
        if key:
            same_body = news[0].body_hash
            news.append(a_request(f"{first}-again", idempotency_key=idempotency_key, body_hash=same_body))
        if draw % 2 and len(self.expected.accepted) + 1 < REQUESTS:
            news.append(a_request(f"r{next(self.names)}"))
        results = self.write(scheduler, scheduler.store.submit(news))
        if results is None:
            return
        if retried:
            results = self.write(scheduler, scheduler.store.submit(news))
            assert results is not None
        for new, result in zip(news, results, strict=True):
            if new.request_id.endswith("-again"):
                assert (result.status, result.request_id) == (SubmitStatus.ATTACHED, first)
                continue
            request_id = new.request_id
            assert (result.status, result.request_id) == (SubmitStatus.ACCEPTED, request_id)
            self.expected.accepted.append(request_id)
            self.expected.shown[request_id] = []
            assert scheduler.copies is not None
            scheduler.copies[request_id] = Copy(0, None, [], 0, "")
            stored = self.run(scheduler.store.read(request_id))
            assert stored is not None
            scheduler.facts[request_id] = stored

    def show(self, request_id: str, tokens: Sequence[int]) -> None:
        shown = self.expected.shown[request_id]
        both = min(len(shown), len(tokens))
        assert shown[:both] == list(tokens[:both]), "a client was shown other tokens before"
        shown += tokens[both:]

    def tell(self, request_id: str, end: End) -> None:
        assert self.expected.told.setdefault(request_id, end) is end, "two ends"

    # -- the record crashes ----------------------------------------------------------------------------------

    def is_behind(self) -> bool:
        """Return whether the record lacks data that a living leader holds."""
        return any(scheduler.distrusts for scheduler in self.schedulers)

    def newest(self) -> Scheduler | None:
        """Return the newest leader, if it lives and has read the record."""
        return next(
            (one for one in self.those(leads) if int(one.epoch.split(":")[0]) == self.epochs[-1]), None
        )

    def sync(self) -> None:
        lasts_ms = {key: max(0, self.run(self.client.pttl(key))) for key in self.everything()}
        record = {key: (value, lasts_ms[key]) for key, value in self.everything().items()}
        self.synced = (record, copies_of.deepcopy(self.expected))

    def the_newest_leader_dies(self) -> None:
        newest = self.newest()
        if newest is None:
            return
        if newest.distrusts:
            self.expect_what_was_synced()
        self.run(newest.store.close())
        newest.step_down()
        newest.store = self.open()

    def lose_the_tail(self) -> None:
        """Restart the record after longer than the lease, with its synced data, in another process."""
        record, _ = self.synced
        keys = self.reader.keys
        for key in self.everything():
            self.run(self.client.delete(key))
        for key, (value, lasts_ms) in record.items():
            if key != keys.leader():
                self.run(self.client.restore(key, lasts_ms, value))
        # The server of these tests stays the same process, so each loss names another earlier one.
        self.run(self.client.set(keys.server(), f"earlier process {next(self.losses)}", keepttl=True))
        self.may_be_older = True
        newest = self.newest()
        for scheduler in self.those(believes):
            if scheduler is newest:
                scheduler.store.distrust()
                scheduler.distrusts = True
            else:
                # A leader that was paused before a takeover that is now lost would come up as the newest
                # (docs/guarantees.md).
                self.run(scheduler.store.close())
                scheduler.step_down()
                scheduler.store = self.open()
        self.before, self.on_record = {}, {}
        if newest is None:
            self.expect_what_was_synced()

    def expect_what_was_synced(self) -> None:
        """Set the expectations back to the synced copy: the last process with more data has died."""
        self.expected = copies_of.deepcopy(self.synced[1])
        # A standby that has not seen a lost epoch may lead under its number. The nonce is new, and the former
        # leader is dead.
        count = int(self.run(self.client.get(self.reader.keys.leader_count())) or 0)
        self.epochs = [number for number in self.epochs if number <= count]
        for worker in self.workers.values():
            worker.held, worker.kept, worker.follows = {}, [], None

    def write_back(self, leader: Scheduler) -> None:
        """Write back as the leader's loop does, while others try to lead."""
        assert leader.copies is not None
        assert self.run(leader.store.reclaim_leadership(newest_sequence=self.newest_sequence(leader)))
        self.others_cannot_lead(leader)
        copies = [self.stored(leader, request_id, copy) for request_id, copy in leader.copies.items()]
        batch = Batch(leader.store)
        answer = batch.restore(copies)
        self.run(batch.execute())
        for stored, status in zip(copies, answer.result(), strict=True):
            # A decision whose answer was lost may be on the record, ahead of this copy.
            allowed = (
                {OK, ALREADY, STALE, GONE} if stored.request_id in self.in_flight(leader) else {OK, ALREADY}
            )
            assert status in allowed
        for request_id, copy, commit in leader.ended:
            batch = Batch(leader.store)
            batch.restore([self.stored(leader, request_id, copy)])
            ended = batch.commit([commit])
            self.run(batch.execute())
            assert ended.result()[0] in (OK, ALREADY)
        self.end_what_it_does_not_know(leader)
        self.others_cannot_lead(leader)
        self.run(leader.store.reclaimed())
        leader.distrusts = leader.doubts = self.may_be_older = False

    def end_what_it_does_not_know(self, leader: Scheduler) -> None:
        """End requests that had ended before this leader read the record, and whose end the record lost:
        nothing knows any more which end it was.
        """
        assert leader.copies is not None
        known = set(leader.copies) | self.in_flight(leader)
        forgotten = [one for one in self.run(leader.store.unfinished_ids()) if one not in known]
        batch = Batch(leader.store)
        batch.finish([a_finish(request_id, End.ERROR) for request_id in forgotten])
        self.run(batch.execute())
        for request_id in forgotten:
            stored = self.run(self.reader.read(request_id))
            assert stored is not None
            self.expected.told[request_id] = End.ERROR
            del self.expected.shown[request_id][len(stored.committed_ids) :]
            self.expected.acknowledged = [
                report for report in self.expected.acknowledged if report.request_id != request_id
            ]

    def others_cannot_lead(self, leader: Scheduler) -> None:
        for scheduler in self.those(stands_by):
            assert self.run(scheduler.store.acquire_leadership(owner="too early:1", lease_s=600)) is None
        lease = self.run(self.client.get(self.reader.keys.leader()))
        self.the_lease_runs_out()
        for scheduler in self.those(stands_by):
            assert self.run(scheduler.store.acquire_leadership(owner="too early:1", lease_s=600)) is None
        self.run(self.client.set(self.reader.keys.leader(), lease))

    def stored(self, scheduler: Scheduler, request_id: str, copy: Copy) -> StoredRequest:
        return replace(
            scheduler.facts[request_id],
            committed_ids=tuple(copy.tokens),
            lease_epoch=copy.lease_epoch,
            worker_id=copy.worker,
            standing=a_standing(rounds=copy.rounds, attained_s=copy.rounds / 8),
            end=None,
            pair=copy.pair,
        )

    def newest_sequence(self, leader: Scheduler) -> int:
        return max((stored.sequence for stored in leader.facts.values()), default=0)

    def in_flight(self, leader: Scheduler) -> set[str]:
        """Return the decisions without a reply."""
        return {command.request_id for command, _ in leader.asked}

    # -- a scheduler's turn: decide, send, receive -----------------------------------------------------

    def decide(self, draw: int, slot: int, worker: int, what: int, at_once: bool) -> None:
        """Put all reports that came in, and perhaps one later decision, in one batch; send it at once, or at
        any later time."""
        scheduler = pick(self.those(can_decide), draw)
        assert scheduler.copies is not None
        asked: list[tuple[Any, Report | None]] = []
        reports, scheduler.inbox = scheduler.inbox, []
        for report in reports:
            known = scheduler.copies.get(report.request_id)
            if known is None:
                self.drop(scheduler, report)
                continue
            known.rounds += 1
            commit = a_commit(
                report.request_id,
                lease_epoch=report.lease_epoch,
                position=report.position,
                tokens=report.tokens,
                standing=a_standing(rounds=known.rounds, attained_s=known.rounds / 8),
                end=report.end,
            )
            asked.append((commit, report))
        if scheduler.copies:
            request_id = pick(sorted(scheduler.copies), slot)
            copy = scheduler.copies[request_id]
            others = [name for name in self.workers if name != copy.worker]
            choices: list[Any] = [Lease(request_id, pick(others, worker), copy.lease_epoch + 1)] * 4 + [
                None
            ] * 4
            if copy.worker is not None:
                choices += [Release(request_id, copy.lease_epoch)] * 2
            choices += [None, a_finish(request_id, End.CANCELLED)]
            decision = pick(choices, what)
            if decision is not None:
                asked.append((decision, None))
        if not asked:
            return
        scheduler.asked, scheduler.batch = asked, Batch(scheduler.store)
        scheduler.answers = [
            queued(scheduler.batch, kind, list(run))
            for kind, run in itertools.groupby([command for command, _ in asked], type)
        ]
        if at_once:
            self.send_of(scheduler, answer_is_lost=False)

    def send(self, draw: int, answer_is_lost: bool) -> None:
        """Send for the first time, or again after a lost reply or a fencing: perhaps long after the
        decision."""
        self.send_of(pick(self.those(has_batch), draw), answer_is_lost=answer_is_lost)

    def send_of(self, scheduler: Scheduler, *, answer_is_lost: bool) -> None:
        async def execute() -> bool:
            assert scheduler.batch is not None
            with losing_answers(scheduler.store) if answer_is_lost else contextlib.nullcontext():
                await scheduler.batch.execute()
            return True

        if self.write(scheduler, execute()) is None or answer_is_lost:
            return
        statuses = [status for answer in scheduler.answers for status in answer.result()]
        asked = scheduler.asked
        scheduler.batch, scheduler.asked, scheduler.answers = None, [], []
        for (command, report), status in zip(asked, statuses, strict=True):
            self.heard(scheduler, command, report, status)

    def heard(
        self, scheduler: Scheduler, command: Any, report: Report | None, status: TransitionStatus
    ) -> None:
        request_id = command.request_id
        assert scheduler.copies is not None
        copy = scheduler.copies.get(request_id)
        if report is not None:
            self.acknowledge(report, recorded=status in (OK, ALREADY))
        if status not in (OK, ALREADY):
            if report is not None:
                self.drop(scheduler, report)
            self.read_again(scheduler, request_id)
            return
        match command:
            case Commit():
                if copy is not None:
                    assert command.position <= len(copy.tokens), (
                        "its tokens are on the record, and those before are unknown"
                    )
                    copy.tokens += command.tokens[len(copy.tokens) - command.position :]
                    self.show(request_id, copy.tokens)
                if command.end is not None:
                    self.ended(scheduler, request_id, command.end)
            case Finish():
                self.ended(scheduler, request_id, command.end)
            case Lease():
                lease = (request_id, command.lease_epoch)
                granted = self.expected.granted.setdefault(lease, command.worker_id)
                assert granted == command.worker_id, "one lease epoch on two workers"
                if copy is not None and copy.lease_epoch < command.lease_epoch:
                    copy.lease_epoch, copy.worker = command.lease_epoch, command.worker_id
                    copy.pair = pair_of(command.worker_id)
                    self.specify(scheduler, request_id, copy)
            case Release():
                if copy is not None:
                    copy.worker = None

    def ended(self, scheduler: Scheduler, request_id: str, end: End) -> None:
        self.tell(request_id, end)
        assert scheduler.copies is not None
        copy = scheduler.copies.pop(request_id, None)
        if copy is not None:
            commit = a_commit(
                request_id, lease_epoch=copy.lease_epoch, position=len(copy.tokens), tokens=(), end=end
            )
            scheduler.ended.append((request_id, copy, commit))

    def read_again(self, scheduler: Scheduler, request_id: str) -> None:
        assert scheduler.copies is not None
        stored = self.run(scheduler.store.read(request_id))
        assert stored is not None, "an accepted request is gone"
        self.show(request_id, stored.committed_ids)
        if stored.end is not None:
            known = scheduler.copies.get(request_id)
            if known is not None:
                scheduler.copies[request_id] = copy_of(stored)
            self.ended(scheduler, request_id, stored.end)
        else:
            scheduler.copies[request_id] = copy_of(stored)

    # -- workers ---------------------------------------------------------------------------------------------

    def specify(self, scheduler: Scheduler, request_id: str, copy: Copy) -> None:
        worker = self.workers[copy.worker or ""]
        held = worker.held.get(request_id)
        if worker.follows is scheduler and (held is None or held.lease_epoch < copy.lease_epoch):
            worker.held[request_id] = Held(copy.lease_epoch, len(copy.tokens))

    def drop(self, scheduler: Scheduler, report: Report) -> None:
        worker = self.workers[report.worker]
        held = worker.held.get(report.request_id)
        if worker.follows is scheduler and held is not None and held.lease_epoch <= report.lease_epoch:
            del worker.held[report.request_id]

    def acknowledge(self, report: Report, *, recorded: bool) -> None:
        if recorded:
            self.expected.acknowledged.append(report)
        kept = self.workers[report.worker].kept
        if report in kept:
            kept.remove(report)

    def connect(self, draw: int, name: int) -> None:
        """Send a hello to any scheduler that claims to lead, with everything held; unacknowledged reports are
        offered again."""
        worker, scheduler = pick(list(self.workers.values()), name), pick(self.those(leads), draw)
        assert scheduler.copies is not None
        worker.follows = scheduler
        for request_id, held in list(worker.held.items()):
            known = scheduler.copies.get(request_id)
            if known is None or known.lease_epoch > held.lease_epoch:
                del worker.held[request_id]
        for request_id, known in scheduler.copies.items():
            if known.worker == worker.name:
                self.specify(scheduler, request_id, known)
        scheduler.inbox += worker.kept

    def busy(self) -> list[tuple[Worker, str, Held]]:
        return [
            (worker, request_id, held)
            for worker in self.workers.values()
            for request_id, held in sorted(worker.held.items())
            if not held.ended
        ]

    def work(self, draw: int, count: int, ends: bool, told: int) -> None:
        """Run a round; its report reaches the scheduler, or gets lost, or comes twice."""
        worker, request_id, held = pick(self.busy(), draw)
        tokens = tuple(held.lease_epoch * EPOCH + at for at in range(held.outputs, held.outputs + count))
        end = End.STOP if ends else None
        report = Report(worker.name, request_id, held.lease_epoch, held.outputs, tokens, end)
        held.outputs += count
        held.ended = ends
        worker.kept.append(report)
        if worker.follows is not None and leads(worker.follows):
            worker.follows.inbox += [report] * told

    # -- what holds at every moment --------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        if self.is_behind():
            return
        self.the_log_only_grows_and_an_end_stays()
        self.the_books_balance()
        self.leaders_have_unfolded_rows_in_order()

    def the_log_only_grows_and_an_end_stays(self) -> None:
        expected = self.expected
        for request_id in expected.accepted:
            stored = self.run(self.reader.read(request_id))
            assert stored is not None, "an accepted request is not on the record"
            assert stored.length_features == (FEATURES if stored.end is None else b""), (
                "the words of a prompt are kept until the end"
            )
            assert stored.prompt_blocks == (BLOCKS if stored.end is None else b""), (
                "the names of its blocks are kept as long"
            )
            committed, was = list(stored.committed_ids), self.before.get(request_id)
            if was is not None:
                assert committed[: len(was.committed_ids)] == list(was.committed_ids), (
                    "committed tokens changed"
                )
                assert stored.lease_epoch >= was.lease_epoch, "a lease epoch went back"
                fresh = committed[len(was.committed_ids) :]
                assert all(token // EPOCH >= was.lease_epoch for token in fresh), "a stale lease committed"
                if was.end is not None:
                    assert (stored.end, fresh) == (was.end, []), "an ended request changed"
            assert [token % EPOCH for token in committed] == list(range(len(committed))), (
                "a gap or a repetition"
            )
            shown = expected.shown[request_id]
            assert shown == committed[: len(shown)], "shown, and not committed"
            assert expected.told.get(request_id) in (None, stored.end), (
                "told an end that is not on the record"
            )
            if stored.worker_id is not None:
                lease = (request_id, stored.lease_epoch)
                holders = {stored.worker_id, self.on_record.setdefault(lease, stored.worker_id)}
                holders.add(expected.granted.get(lease, stored.worker_id))
                assert len(holders) == 1, "one lease on two workers"
            leased_to = self.on_record.get((request_id, stored.lease_epoch))
            assert leased_to is None or stored.pair == pair_of(leased_to), "the model pair of another lease"
            self.before[request_id] = stored
        for report in expected.acknowledged:
            stored = self.before[report.request_id]
            reached = report.position + len(report.tokens)
            assert stored.committed_ids[report.position : reached] == report.tokens, (
                "acknowledged, not recorded"
            )
            assert report.end in (None, stored.end), "an acknowledged end is not on the record"

    def the_books_balance(self) -> None:
        keys = self.reader.keys
        alive = [stored for stored in self.before.values() if stored.end is None]
        queue = self.run(self.client.zrange(keys.unfinished(), 0, -1))
        # The record may hold one whose acceptance no process has received yet.
        on_record = self.run(unfinished(self.reader))
        assert {stored.request_id for stored in alive} <= {stored.request_id for stored in on_record}
        assert sorted(id_.decode() for id_ in queue) == sorted(stored.request_id for stored in on_record)
        tenants = self.run(self.client.hget(keys.tenants(), "acme"))
        assert int(tenants or 0) == len(on_record)
        prompt_tokens = sum(len(stored.prompt_ids) for stored in on_record)
        assert int(self.run(self.client.get(keys.prompt_tokens())) or 0) == prompt_tokens

    def leaders_have_unfolded_rows_in_order(self) -> None:
        """The entry of the first one is where an append cuts the log."""
        for scheduler in self.those(leads):
            rows = [oldest.entry for oldest in scheduler.store.tails.unfolded.values()]
            assert rows == sorted(rows), "an append would remove rows that are needed"

    def teardown(self) -> None:
        """Bring each request to its missing end with a last scheduler, which finds everything."""
        newest = self.newest()
        if newest is not None and newest.distrusts:
            with pytest.raises(RecordBehind):
                self.run(newest.store.renew_leadership())
            self.write_back(newest)
        self.run(self.client.delete(self.reader.keys.leader()))
        last = self.reader
        if self.run(last.acquire_leadership(owner="last:1", lease_s=600)) is None:
            self.now_s += last.patience_s(600)
            assert self.run(last.acquire_leadership(owner="last:1", lease_s=600)) is not None
        left = self.run(unfinished(last))
        if left:
            batch = Batch(last)
            answer = batch.finish([a_finish(stored.request_id) for stored in left])
            self.run(batch.execute())
            assert set(answer.result()) == {OK}
            again = Batch(last)
            repeated = again.finish([a_finish(stored.request_id, End.ERROR) for stored in left])
            self.run(again.execute())
            assert set(repeated.result()) == {GONE}, "a second end"
        self.the_log_only_grows_and_an_end_stays()
        assert all(self.before[request_id].end is not None for request_id in self.expected.accepted)
        self.run(assert_nothing_leaks(self.client, last.keys.prefix))
        for scheduler in self.schedulers:
            self.run(scheduler.store.close())
        for closing in (self.reader.close(), self.client.aclose()):
            self.run(closing)
        self.runner.close()


def check(server: EmbeddedServer, *, examples: int, steps: int) -> None:
    machine = type("ProtocolOnThisServer", (Protocol,), {"url": server.url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def test_no_interleaving_of_schedulers_and_workers_breaks_the_protocol(server: EmbeddedServer) -> None:
    check(server, examples=12, steps=60)


@pytest.mark.long
def test_no_interleaving_of_schedulers_and_workers_breaks_the_protocol_at_length(
    server: EmbeddedServer,
) -> None:
    check(server, examples=200, steps=80)
