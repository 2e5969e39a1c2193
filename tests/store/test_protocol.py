"""Leases, commits and leader epochs as a protocol: three schedulers and three workers, interleaved at every call of a script.

Any scheduler may be paused anywhere, wake up and go on; its lease may run out unnoticed; its answer may get lost, so that it
sends the same again after others have led. Workers report to whom they believe in, again when they are not acknowledged. The scripts and
the store are the real ones, on a real server; schedulers and workers here do what `scheduler_svc/loop.py` and `worker_svc/sync.py` do,
only less carefully: a report goes to the record whatever lease it came under.

A token says under which lease it was made, as if no two workers ever computed the same, so that a mixed-up output shows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
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

from scheduler_svc.core.commands import Commit, Finish, Lease, Rank, Release
from scheduler_svc.core.events import End
from scheduler_svc.store import Batch, Fenced, Pending, Store, SubmitStatus, TransitionStatus
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.records import StoredRequest
from tests.store.kit import (
    ALREADY,
    GONE,
    OK,
    a_commit,
    a_finish,
    a_request,
    a_standing,
    assert_nothing_leaks,
    keys_of,
    new_shard,
    unfinished,
)

T = TypeVar("T")

SCHEDULERS = WORKERS = 3
REQUESTS = 4
EPOCH = 1_000_000
"""A token is lease epoch × this + position."""


@dataclass
class Report:
    """What a worker did in a round, until it is acknowledged."""

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
    """A request as one scheduler believes it to be."""

    lease_epoch: int
    worker: str | None
    tokens: list[int]
    rounds: int


@dataclass
class Scheduler:
    """One process. `copies` is None while it stands by, `doubts` after it was fenced and until it has asked."""

    store: Store
    epoch: str = ""
    recovering: bool = False
    doubts: bool = False
    copies: dict[str, Copy] | None = None
    inbox: list[Report] = field(default_factory=list)
    batch: Batch | None = None
    asked: list[tuple[Any, Report | None]] = field(default_factory=list)
    answers: list[Pending[list[TransitionStatus]]] = field(default_factory=list)

    def step_down(self) -> None:
        self.epoch, self.recovering, self.doubts, self.copies = "", False, False, None
        self.inbox, self.batch, self.asked, self.answers = [], None, [], []


@dataclass
class Worker:
    name: str
    follows: Scheduler | None = None
    held: dict[str, Held] = field(default_factory=dict)
    kept: list[Report] = field(default_factory=list)


def copy_of(stored: StoredRequest) -> Copy:
    return Copy(stored.lease_epoch, stored.worker_id, list(stored.committed_ids), stored.standing.rounds)


def stands_by(scheduler: Scheduler) -> bool:
    return not scheduler.epoch


def believes(scheduler: Scheduler) -> bool:
    return bool(scheduler.epoch)


def recovers(scheduler: Scheduler) -> bool:
    return scheduler.recovering


def leads(scheduler: Scheduler) -> bool:
    """By its own lights."""
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
}
VERBS = {Commit: "commit", Lease: "lease", Release: "release", Finish: "finish", Rank: "rank"}


class Protocol(RuleBasedStateMachine):
    """See the top of the file."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        shard = self.shard = new_shard()
        self.schedulers = [Scheduler(Store.open(self.url, shard, timeout_s=60)) for _ in range(SCHEDULERS)]
        self.workers = {f"w{at}": Worker(f"w{at}") for at in range(WORKERS)}
        self.reader = Store.open(self.url, shard, timeout_s=60)
        self.client = redis_client.Redis.from_url(self.url, protocol=2)
        self.epochs: list[int] = []
        # What clients know.
        self.accepted: list[str] = []
        self.shown: dict[str, list[int]] = {}
        self.told: dict[str, End] = {}
        # What must stay so.
        self.before: dict[str, StoredRequest] = {}
        self.granted: dict[tuple[str, int], str] = {}
        self.acknowledged: list[Report] = []
        # One leads, and each worker has something to do: what is interesting lies behind this.
        self.acquire(0, recovers_at_once=True)
        for at in range(WORKERS):
            self.connect(0, at)
            self.submit(0, key=True, retried=False)
            self.decide(0, slot=at, worker=at, what=0, at_once=True)

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return self.runner.run(main())

    # -- the record, asked in a way that sees what must not happen --------------------------------------------------------

    def everything(self) -> dict[str, bytes]:
        keys = self.run(keys_of(self.client, self.reader.keys.prefix))
        return {key: self.run(self.client.dump(key)) for key in keys}

    def in_force(self, scheduler: Scheduler) -> bool:
        held = self.run(self.client.get(self.reader.keys.leader()))
        return held is not None and held.decode().split(" ")[0] == scheduler.epoch

    def write(self, scheduler: Scheduler, work: Awaitable[T]) -> T | None:
        """None: fenced, and then it was not in force and has changed nothing at all."""
        in_force = self.in_force(scheduler)
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

    # -- what happens next ----------------------------------------------------------------------------------------------

    @rule(
        action=st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
        data=st.data(),
    )
    def happens(self, action: str, data: st.DataObject) -> None:
        """One rule, so that hypothesis leaves none of the actions out for a whole run."""

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
            case "submit" if len(self.accepted) < REQUESTS and self.those(leads):
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

    # -- leadership -----------------------------------------------------------------------------------------------------

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
        if epoch is None:
            assert taken is not None, "nobody led, and nobody could"
            return
        assert taken is None, "two lead"
        assert epoch.number > max(self.epochs, default=0), "an epoch was used again"
        self.epochs.append(epoch.number)
        scheduler.epoch, scheduler.recovering = str(epoch), True
        if recovers_at_once:
            self.recover(0)

    def recover(self, draw: int) -> None:
        scheduler = pick(self.those(recovers), draw)
        scheduler.recovering = False
        scheduler.copies = {
            stored.request_id: copy_of(stored) for stored in self.run(unfinished(scheduler.store))
        }

    def renew(self, draw: int) -> None:
        """In time, late, or after it was fenced."""
        doubting = self.those(lambda scheduler: scheduler.doubts)
        scheduler = pick(doubting or self.those(believes), draw)
        leader = self.run(self.client.get(self.reader.keys.leader()))
        newest = int(scheduler.epoch.split(":")[0]) == self.epochs[-1]
        renewed = self.run(scheduler.store.renew_leadership())
        assert renewed == newest, "only the newest epoch may be renewed"
        assert renewed or self.run(self.client.get(self.reader.keys.leader())) == leader
        if renewed:
            scheduler.doubts = False
        else:
            scheduler.step_down()

    # -- clients --------------------------------------------------------------------------------------------------------

    def submit(self, draw: int, key: bool, retried: bool) -> None:
        scheduler = pick(self.those(leads), draw)
        request_id = f"r{len(self.accepted)}"
        # Keys are one for all shards, and each example has a shard of its own.
        new = a_request(request_id, idempotency_key=f"{self.shard} {request_id}" if key else "")
        results = self.write(scheduler, scheduler.store.submit([new]))
        if results is None:
            return
        if retried:
            results = self.write(scheduler, scheduler.store.submit([new]))
            assert results is not None
        [result] = results
        assert (result.status, result.request_id) == (SubmitStatus.ACCEPTED, request_id)
        self.accepted.append(request_id)
        self.shown[request_id] = []
        assert scheduler.copies is not None
        scheduler.copies[request_id] = Copy(0, None, [], 0)

    def show(self, request_id: str, tokens: Sequence[int]) -> None:
        shown = self.shown[request_id]
        both = min(len(shown), len(tokens))
        assert shown[:both] == list(tokens[:both]), "a client was shown other tokens before"
        shown += tokens[both:]

    def tell(self, request_id: str, end: End) -> None:
        assert self.told.setdefault(request_id, end) is end, "two ends"

    # -- a scheduler's turn: decide, send, hear -------------------------------------------------------------------------

    def decide(self, draw: int, slot: int, worker: int, what: int, at_once: bool) -> None:
        """All reports that came in, and perhaps one decision behind them, in one batch; sent at once, or who knows when."""
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
            choices += [Rank(request_id, worker % 3, float(slot)), a_finish(request_id, End.CANCELLED)]
            decision = pick(choices, what)
            if decision is not None:
                asked.append((decision, None))
        if not asked:
            return
        scheduler.asked, scheduler.batch = asked, scheduler.store.batch()
        scheduler.answers = [
            getattr(scheduler.batch, VERBS[kind])(list(run))
            for kind, run in itertools.groupby([command for command, _ in asked], type)
        ]
        if at_once:
            self.send_of(scheduler, answer_is_lost=False)

    def send(self, draw: int, answer_is_lost: bool) -> None:
        """For the first time, or again since the answer was lost or it was fenced: perhaps long after the decision."""
        self.send_of(pick(self.those(has_batch), draw), answer_is_lost=answer_is_lost)

    def send_of(self, scheduler: Scheduler, *, answer_is_lost: bool) -> None:
        async def execute() -> bool:
            assert scheduler.batch is not None
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
            if not isinstance(command, Rank):
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
                    self.tell(request_id, command.end)
                    scheduler.copies.pop(request_id, None)
            case Finish():
                self.tell(request_id, command.end)
                scheduler.copies.pop(request_id, None)
            case Lease():
                granted = self.granted.setdefault((request_id, command.lease_epoch), command.worker_id)
                assert granted == command.worker_id, "one lease epoch on two workers"
                if copy is not None and copy.lease_epoch < command.lease_epoch:
                    copy.lease_epoch, copy.worker = command.lease_epoch, command.worker_id
                    self.specify(scheduler, request_id, copy)
            case Release():
                if copy is not None:
                    copy.worker = None

    def read_again(self, scheduler: Scheduler, request_id: str) -> None:
        assert scheduler.copies is not None
        stored = self.run(scheduler.store.read(request_id))
        assert stored is not None, "an accepted request is gone"
        self.show(request_id, stored.committed_ids)
        if stored.end is not None:
            self.tell(request_id, stored.end)
            scheduler.copies.pop(request_id, None)
        else:
            scheduler.copies[request_id] = copy_of(stored)

    # -- workers --------------------------------------------------------------------------------------------------------

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
            self.acknowledged.append(report)
        kept = self.workers[report.worker].kept
        if report in kept:
            kept.remove(report)

    def connect(self, draw: int, name: int) -> None:
        """A hello to whoever says that it leads, with all that is held; what was not acknowledged is offered again."""
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
        """A round; its report reaches the scheduler, or gets lost, or comes twice."""
        worker, request_id, held = pick(self.busy(), draw)
        tokens = tuple(held.lease_epoch * EPOCH + at for at in range(held.outputs, held.outputs + count))
        end = End.STOP if ends else None
        report = Report(worker.name, request_id, held.lease_epoch, held.outputs, tokens, end)
        held.outputs += count
        held.ended = ends
        worker.kept.append(report)
        if worker.follows is not None and leads(worker.follows):
            worker.follows.inbox += [report] * told

    # -- what holds at every moment ---------------------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.the_log_only_grows_and_an_end_stays()
        self.the_books_balance()

    def the_log_only_grows_and_an_end_stays(self) -> None:
        for request_id in self.accepted:
            stored = self.run(self.reader.read(request_id))
            assert stored is not None, "an accepted request is not on the record"
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
            assert self.shown[request_id] == committed[: len(self.shown[request_id])], (
                "shown, and not committed"
            )
            assert self.told.get(request_id) in (None, stored.end), "told an end that is not on the record"
            if stored.worker_id is not None:
                lease = (request_id, stored.lease_epoch)
                assert self.granted.setdefault(lease, stored.worker_id) == stored.worker_id, (
                    "one lease on two workers"
                )
            self.before[request_id] = stored
        for report in self.acknowledged:
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
        # One may be on the record whose acceptance nobody has heard of yet.
        on_record = self.run(unfinished(self.reader))
        assert {stored.request_id for stored in alive} <= {stored.request_id for stored in on_record}
        assert sorted(id_.decode() for id_ in queue) == sorted(stored.request_id for stored in on_record)
        tenants = self.run(self.client.hget(keys.tenants(), "acme"))
        assert int(tenants or 0) == len(on_record)
        reserved = sum(len(stored.prompt_ids) + stored.max_tokens for stored in on_record)
        assert int(self.run(self.client.get(keys.reserved())) or 0) == reserved

    def teardown(self) -> None:
        """A last scheduler finds everything, and brings each request to the end that it lacks."""
        self.run(self.client.delete(self.reader.keys.leader()))
        last = self.reader
        assert self.run(last.acquire_leadership(owner="last:1", lease_s=600)) is not None
        left = self.run(unfinished(last))
        if left:
            batch = last.batch()
            answer = batch.finish([a_finish(stored.request_id) for stored in left])
            self.run(batch.execute())
            assert set(answer.result()) == {OK}
            again = last.batch()
            repeated = again.finish([a_finish(stored.request_id, End.ERROR) for stored in left])
            self.run(again.execute())
            assert set(repeated.result()) == {GONE}, "a second end"
        self.the_log_only_grows_and_an_end_stays()
        assert all(self.before[request_id].end is not None for request_id in self.accepted)
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
    check(server, examples=40, steps=60)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_interleaving_of_schedulers_and_workers_breaks_the_protocol_at_length(
    server: EmbeddedServer,
) -> None:
    check(server, examples=200, steps=80)
