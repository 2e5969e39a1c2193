"""Any sequence of transitions by two processes, valid and invalid ones, against a model in plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import redis.asyncio as redis_client
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Lease, Release
from scheduler_svc.store.batch import Batch, Pending
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import Fenced
from scheduler_svc.store.records import Limits, SubmitStatus, TransitionStatus
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
    end_everything,
    fold,
    forget_claims,
    new_shard,
    unfinished,
)

T = TypeVar("T")

MAX_REQUESTS = 3

a_slot = st.integers(0, 4)
an_end = st.sampled_from([End.STOP, End.CANCELLED])
a_level = st.integers(0, 2)


@dataclass
class Modelled:
    """Expected content of the record for one request."""

    key: str
    body: str
    tokens: list[int] = field(default_factory=list)
    lease_epoch: int = 0
    worker_id: str | None = None
    leased_to: str | None = None
    released_epoch: int = 0
    rounds: int = 0
    level: int = 0
    score: float = 0.0
    end: End | None = None

    def lease(self, worker_id: str, lease_epoch: int) -> TransitionStatus:
        if (lease_epoch, worker_id) == (self.lease_epoch, self.leased_to):
            return ALREADY
        if self.end is not None:
            return GONE
        if lease_epoch != self.lease_epoch + 1:
            return STALE
        self.lease_epoch, self.worker_id, self.leased_to = lease_epoch, worker_id, worker_id
        return OK

    def release(self, lease_epoch: int) -> TransitionStatus:
        if lease_epoch <= self.released_epoch:
            return ALREADY
        if self.end is not None:
            return GONE
        if lease_epoch != self.lease_epoch:
            return STALE
        self.worker_id, self.released_epoch = None, lease_epoch
        return OK

    def commit(
        self,
        lease_epoch: int,
        position: int,
        tokens: tuple[int, ...],
        rounds: int,
        level: int,
        end: End | None,
    ) -> TransitionStatus:
        reached = position + len(tokens)
        held = self.tokens[position:reached] == list(tokens) and lease_epoch <= self.lease_epoch
        if self.end is not None:
            return ALREADY if held and end in (None, self.end) else GONE
        if (lease_epoch, position) != (self.lease_epoch, len(self.tokens)):
            return ALREADY if held and end is None else STALE
        self.tokens += tokens
        self.rounds, self.level, self.score = rounds, level, 1.5
        if end is not None:
            self.end, self.worker_id = end, None
        return OK

    def finish(self, end: End) -> TransitionStatus:
        if self.end is not None:
            return ALREADY if end is self.end else GONE
        self.end, self.worker_id, self.rounds, self.level, self.score = end, None, 1, 0, 1.5
        return OK


class TwoProcesses(RuleBasedStateMachine):
    """One process leads, the other still believes that it leads."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        shard = new_shard()
        limits = Limits(max_requests=MAX_REQUESTS)
        self.leading, self.fenced, self.reader = (Store(self.url, shard, limits=limits) for _ in range(3))
        self.client = redis_client.Redis.from_url(self.url, protocol=2)
        self.model: dict[str, Modelled] = {}
        self.by_key: dict[str, str] = {}
        self.last: tuple[Batch, Pending[list[TransitionStatus]]] | None = None
        self.run(self.leading.acquire_leadership(owner="b:1", lease_s=600))
        self.take_over()

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await work

        return self.runner.run(main())

    @rule()
    def take_over(self) -> None:
        """Let the leader's lease expire unnoticed, and the other process get its own."""
        self.run(self.client.delete(self.leading.keys.leader()))
        self.leading, self.fenced = self.fenced, self.leading
        old = self.leading.epoch
        new = self.run(self.leading.acquire_leadership(owner="a:1", lease_s=600))
        assert new is not None
        assert new != old
        self.last = None

    @rule(key=st.sampled_from(["", "k1", "k2"]), body=st.sampled_from(["b1", "b2"]))
    def submit(self, key: str, body: str) -> None:
        request_id = f"r{len(self.model)}"
        self.last = None  # it may have queried the request that exists from now on
        [result] = self.run(self.leading.submit([a_request(request_id, idempotency_key=key, body_hash=body)]))
        known = self.by_key.get(key) if key else None
        if known is not None:
            same = self.model[known].body == body
            assert (result.status, result.request_id) == (
                SubmitStatus.ATTACHED if same else SubmitStatus.CONFLICT,
                known,
            )
        elif sum(request.end is None for request in self.model.values()) >= MAX_REQUESTS:
            assert result.status is SubmitStatus.QUEUE_FULL
        else:
            assert (result.status, result.sequence) == (SubmitStatus.ACCEPTED, len(self.model) + 1)
            self.model[request_id] = Modelled(key, body, score=float(result.sequence))
            if key:
                self.by_key[key] = request_id

    @rule(slot=a_slot, worker_id=st.sampled_from(["w1", "w2"]), ahead=st.sampled_from([0, 1, 1, 1, 2]))
    def lease(self, slot: int, worker_id: str, ahead: int) -> None:
        request_id, known = self.pick(slot)
        lease_epoch = known.lease_epoch + ahead
        expected = known.lease(worker_id, lease_epoch) if request_id in self.model else GONE
        self.check("lease", Lease(request_id, worker_id, lease_epoch), expected)

    @rule(slot=a_slot, behind=st.sampled_from([0, 0, 1, -1]))
    def release(self, slot: int, behind: int) -> None:
        request_id, known = self.pick(slot)
        lease_epoch = known.lease_epoch - behind
        expected = known.release(lease_epoch) if request_id in self.model else GONE
        self.check("release", Release(request_id, lease_epoch), expected)

    @rule(
        slot=a_slot,
        behind=st.sampled_from([0, 0, 0, 1, -1]),
        back=st.sampled_from([0, 0, 0, 1, 2, -1]),
        count=st.integers(1, 3),
        first=st.integers(0, 1),
        level=a_level,
        end=st.none() | st.none() | an_end,
    )
    def commit(
        self, slot: int, behind: int, back: int, count: int, first: int, level: int, end: End | None
    ) -> None:
        request_id, known = self.pick(slot)
        lease_epoch, position = known.lease_epoch - behind, max(0, len(known.tokens) - back)
        # The token at a position is nearly always the same, so that overlaps and repeats are met often.
        tokens = tuple(first + at for at in range(position, position + count))
        rounds = known.rounds + 1
        missing = request_id not in self.model
        place_again = (
            not missing
            and known.end is None
            and lease_epoch == known.lease_epoch
            and position + count == len(known.tokens)
        )
        expected = GONE if missing else known.commit(lease_epoch, position, tokens, rounds, level, end)
        if expected is ALREADY and place_again:
            known.level, known.score = level, 1.5
        commit = a_commit(
            request_id,
            lease_epoch=lease_epoch,
            position=position,
            tokens=tokens,
            standing=a_standing(rounds=rounds, level=level),
            end=end,
        )
        self.check("commit", commit, expected)

    @rule(slot=a_slot, end=an_end)
    def finish(self, slot: int, end: End) -> None:
        request_id, known = self.pick(slot)
        expected = known.finish(end) if request_id in self.model else GONE
        self.check("finish", a_finish(request_id, end), expected)

    @rule()
    def fold(self) -> None:
        """A second passes: what only the log holds goes into the requests' own keys."""
        self.run(fold(self.leading))
        self.last = None

    @precondition(lambda self: self.last is not None)
    @rule()
    def send_the_last_batch_again(self) -> None:
        assert self.last is not None
        batch, pending = self.last
        before = pending.result()
        self.run(batch.execute())
        assert pending.result() == [ALREADY if status is OK else status for status in before]

    @invariant()
    def the_record_is_what_the_model_says(self) -> None:
        alive = {request_id for request_id, known in self.model.items() if known.end is None}
        assert {request.request_id for request in self.run(unfinished(self.leading))} == alive
        for request_id, known in self.model.items():
            stored = self.run(self.leading.read(request_id))
            assert stored is not None
            assert list(stored.committed_ids) == known.tokens
            assert (stored.lease_epoch, stored.worker_id, stored.end) == (
                known.lease_epoch,
                known.worker_id,
                known.end,
            )
            assert stored.length_features == (FEATURES if known.end is None else b"")
            assert stored.prompt_blocks == (BLOCKS if known.end is None else b"")
            standing = stored.standing
            assert (standing.rounds, standing.level, standing.score) == (
                known.rounds,
                known.level,
                known.score,
            )

    @invariant()
    def what_is_folded_and_what_is_logged_are_everything(self) -> None:
        """Another process reads the same from the server as the leader that wrote it."""
        for request_id in self.model:
            assert self.run(self.reader.read(request_id)) == self.run(self.leading.read(request_id))

    def teardown(self) -> None:
        self.run(end_everything(self.leading))
        self.run(assert_nothing_leaks(self.client, self.leading.keys.prefix))
        self.run(forget_claims(self.client))
        for closing in (self.leading.close(), self.fenced.close(), self.reader.close(), self.client.aclose()):
            self.run(closing)
        self.runner.close()

    def pick(self, slot: int) -> tuple[str, Modelled]:
        """Return a request id and its model, which is empty for a missing request."""
        request_id = f"r{slot}"
        return request_id, self.model.get(request_id) or Modelled("", "")

    def check(self, verb: str, command: object, expected: TransitionStatus) -> None:
        """Assert that the fenced process is refused, and that the leader then gets the result of the
        model."""
        try:
            self.run(self.queue(self.fenced, verb, command)[0].execute())
        except Fenced:
            pass
        else:
            raise AssertionError("an old leader was let in")
        batch, pending = self.last = self.queue(self.leading, verb, command)
        self.run(batch.execute())
        assert pending.result() == [expected]

    @staticmethod
    def queue(store: Store, verb: str, command: object) -> tuple[Batch, Pending[list[TransitionStatus]]]:
        batch = Batch(store)
        put: Callable[[list[object]], Pending[list[TransitionStatus]]] = getattr(batch, verb)
        return batch, put([command])


def test_any_sequence_of_transitions_leaves_what_the_model_says(server: EmbeddedServer) -> None:
    machine = type("TwoProcessesOnThisServer", (TwoProcesses,), {"url": server.url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
