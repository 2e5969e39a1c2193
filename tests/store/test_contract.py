"""Contract of the store, on every server that it supports."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from array import array
from dataclasses import asdict, replace
from typing import Any, ClassVar

import pytest
import redis.asyncio as redis_client

from laps_sd.contract.ends import End
from laps_sd.contract.length_features import MOST_FEATURES, packed
from scheduler_svc.core.commands import Commit, Finish, Lease, Release
from scheduler_svc.core.rank import MAX_LEVELS
from scheduler_svc.store import scripts
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.errors import Fenced, RecordBehind, SchemaMismatch, StoreError, StoreUnavailable
from scheduler_svc.store.keys import SHARD_TTL_S
from scheduler_svc.store.reading import READ_CHUNK
from scheduler_svc.store.records import (
    Leader,
    LeaderEpoch,
    Limits,
    PackedPromptLogprobs,
    StoredRequest,
    SubmitResult,
    SubmitStatus,
    TransitionStatus,
)
from scheduler_svc.store.store import Store
from scheduler_svc.store.transport import Transport
from tests.helpers import wait_until_async
from tests.store.conftest import OpenStore
from tests.store.kit import (
    ALREADY,
    BLOCKS,
    FEATURES,
    GONE,
    NOW_S,
    OK,
    STALE,
    STORY,
    One,
    a_commit,
    a_finish,
    a_request,
    a_standing,
    accept,
    end_everything,
    fold,
    keys_of,
    lease,
    losing_answers,
    read,
    take_over,
    ttls_ms,
    unfinished,
)

ENDS = list(End)


async def unreachable(*_: object, **__: object) -> None:
    raise StoreUnavailable("cut off")


class Waiting:
    """Standby, with its clock."""

    LEASE_S = 60.0

    def __init__(self, open_store: OpenStore) -> None:
        self.now_s = 0.0
        self.store = open_store(monotonic=lambda: self.now_s)

    async def takes_over(self) -> LeaderEpoch | None:
        return await self.store.acquire_leadership(owner="standby:1", lease_s=self.LEASE_S)

    async def waits(self, *, briefly: bool = False) -> None:
        """Assert that the standby does not take over before its patience has passed."""
        assert await self.takes_over() is None
        self.now_s += self.store.patience_s(self.LEASE_S) - 1.0
        assert await self.takes_over() is None
        if not briefly:
            self.now_s += 1.0


class TestSubmit:
    async def test_what_was_submitted_is_what_is_read(self, store: Store) -> None:
        request = a_request(
            tenant="acme: {west}",
            model="demo/ü",
            priority=-3,
            workload_class="code",
            prompt_ids=array("i", [0, 1, 2**31 - 1]),
            expected_output_tokens=0,
            deadline_unix_ms=1_700_000_060_000,
            time_limit_ms=500,
            keep=True,
            grace_ms=-1,
            idempotency_key="key with spaces",
            seed=2**64 - 1,
            submission=bytes(range(256)),
            length_features=packed(range(2**15 - MOST_FEATURES, 2**15)),
            prompt_blocks=bytes(range(256)) * 32,
        )
        await accept(store, request)

        stored = await read(store)
        assert asdict(request).items() <= asdict(stored).items()
        assert stored.sequence == 1
        assert stored.committed_ids == ()
        assert (stored.lease_epoch, stored.worker_id) == (0, None)
        assert stored.standing == a_standing(
            rounds=0, drafts=0, drafted=0, accepted=0, attained_s=0.0, level=0, score=1.0
        )
        assert (stored.end, stored.story, stored.ended_unix_ms, stored.first_token_unix_ms) == (
            None,
            (),
            None,
            None,
        )

    async def test_sequence_numbers_follow_the_order_of_submission(self, store: Store) -> None:
        results = await store.submit([a_request(f"r{n}") for n in range(1, 4)])

        assert [SubmitResult(SubmitStatus.ACCEPTED, f"r{n}", n) for n in range(1, 4)] == results

    async def test_the_counter_expires_from_its_first_use(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())

        assert await client.pttl(store.keys.sequence()) > 0

    async def test_submitting_the_same_request_again_is_a_retry(self, store: Store) -> None:
        first = await store.submit([a_request(idempotency_key="k")])
        again = await store.submit([a_request(idempotency_key="k")])

        assert first == again == [SubmitResult(SubmitStatus.ACCEPTED, "r1", 1)]
        assert len(await unfinished(store)) == 1

    async def test_another_body_under_the_same_request_id_is_refused(self, store: Store) -> None:
        await accept(store, a_request())
        results = await store.submit([a_request(body_hash="other")])

        assert [result.status for result in results] == [SubmitStatus.CONFLICT]

    async def test_the_same_key_and_body_attach_to_the_request_that_exists(self, store: Store) -> None:
        await accept(store, a_request("r0"), a_request("r1", idempotency_key="k", body_hash="b"))
        results = await store.submit([a_request("r2", idempotency_key="k", body_hash="b")])

        assert [SubmitResult(SubmitStatus.ATTACHED, "r1", 2)] == results
        assert await store.read("r2") is None

    async def test_the_same_key_with_another_body_conflicts(self, store: Store) -> None:
        await accept(store, a_request("r1", idempotency_key="k", body_hash="b"))
        results = await store.submit([a_request("r2", idempotency_key="k", body_hash="c")])

        assert [SubmitResult(SubmitStatus.CONFLICT, "r1", 1)] == results

    async def test_keys_of_different_tenants_never_meet(self, store: Store) -> None:
        """Keys are not confused either when a tenant's name holds the separator."""
        await accept(
            store,
            a_request("r1", tenant="a", idempotency_key="b:c"),
            a_request("r2", tenant="a:b", idempotency_key="c"),
            a_request("r3", tenant="a%3Ab", idempotency_key="c"),
        )

    async def test_a_key_attaches_to_a_finished_request_until_that_expires(self, store: Store) -> None:
        await accept(store, a_request("r1", idempotency_key="k", body_hash="b"))
        await One(store).finish(a_finish("r1"))
        results = await store.submit([a_request("r2", idempotency_key="k", body_hash="b")])

        assert [SubmitResult(SubmitStatus.ATTACHED, "r1", 1)] == results

    async def test_the_queue_is_full_at_its_limit(self, open_store: OpenStore) -> None:
        store = open_store(limits=Limits(max_requests=2))
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        results = await store.submit([a_request(f"r{n}") for n in range(3)])

        assert [result.status.value for result in results] == ["accepted", "accepted", "queue_full"]
        assert results[2] == SubmitResult(SubmitStatus.QUEUE_FULL, "r2", 0)
        assert await store.read("r2") is None

    async def test_an_end_makes_room(self, open_store: OpenStore) -> None:
        store = open_store(limits=Limits(max_requests=1, max_prompt_tokens=3, max_requests_per_tenant=1))
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        await accept(store, a_request("r1"))
        await One(store).finish(a_finish("r1"))

        await accept(store, a_request("r2"))

    async def test_tokens_of_prompts_are_counted_and_those_of_outputs_are_not(
        self, open_store: OpenStore
    ) -> None:
        """Most clients give no max_tokens, which then is all that the context leaves."""
        store = open_store(limits=Limits(max_prompt_tokens=5))
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        results = await store.submit(
            [
                a_request("r1", prompt_ids=(1, 2, 3), max_tokens=32_768),
                a_request("r2", prompt_ids=(1, 2, 3), max_tokens=1),
                a_request("r3", prompt_ids=(1, 2), max_tokens=32_768),
            ]
        )

        assert [result.status.value for result in results] == ["accepted", "queue_full", "accepted"]

    async def test_a_tenant_has_its_own_limit(self, open_store: OpenStore) -> None:
        store = open_store(limits=Limits(max_requests_per_tenant=1))
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        results = await store.submit([a_request("r1"), a_request("r2"), a_request("r3", tenant="other")])

        assert [result.status.value for result in results] == ["accepted", "tenant_full", "accepted"]

    async def test_of_one_call_see_those_before_them(self, store: Store) -> None:
        results = await store.submit(
            [
                a_request("r1", idempotency_key="k", body_hash="b"),
                a_request("r2"),
                a_request("r3", idempotency_key="k", body_hash="b"),
                a_request("r4", idempotency_key="k", body_hash="c"),
                a_request("r2"),
                a_request("r5", tenant="other"),
            ]
        )

        assert results == [
            SubmitResult(SubmitStatus.ACCEPTED, "r1", 1),
            SubmitResult(SubmitStatus.ACCEPTED, "r2", 2),
            SubmitResult(SubmitStatus.ATTACHED, "r1", 1),
            SubmitResult(SubmitStatus.CONFLICT, "r1", 1),
            SubmitResult(SubmitStatus.ACCEPTED, "r2", 2),
            SubmitResult(SubmitStatus.ACCEPTED, "r5", 3),
        ]
        assert [request.request_id for request in await unfinished(store)] == ["r1", "r2", "r5"]

    async def test_of_one_call_are_counted_one_by_one(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """More of them than one call of the script takes."""
        await accept(store, a_request("r0"))
        await accept(store, *(a_request(f"r{n}", tenant=f"t{n % 3}") for n in range(1, 71)))
        await store.submit([a_request(f"r{n}", tenant=f"t{n % 3}") for n in range(1, 71)])

        found = await client.hgetall(store.keys.tenants())
        assert found == {b"acme": b"1", b"t0": b"23", b"t1": b"24", b"t2": b"23"}
        assert await client.get(store.keys.prompt_tokens()) == str(71 * 3).encode()
        assert [request.sequence for request in await unfinished(store)] == list(range(1, 72))
        await end_everything(store)
        assert await client.exists(store.keys.tenants(), store.keys.prompt_tokens()) == 0

    async def test_concurrent_submits_cannot_exceed_a_limit_together(self, open_store: OpenStore) -> None:
        store = open_store(limits=Limits(max_requests=10))
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        results = await asyncio.gather(
            *(store.submit([a_request(f"r{n}-{m}") for m in range(4)]) for n in range(12))
        )

        assert sum(result.status is SubmitStatus.ACCEPTED for some in results for result in some) == 10
        assert len(await unfinished(store)) == 10

    @pytest.mark.parametrize("request_id", ["", "two words", "line\nbreak"])
    async def test_a_request_id_holds_no_white_space(self, store: Store, request_id: str) -> None:
        with pytest.raises(ValueError, match="request id"):
            await store.submit([a_request(request_id)])

    async def test_token_ids_that_do_not_fit_are_refused_before_anything_is_sent(self, store: Store) -> None:
        with pytest.raises(ValueError, match="token ids"):
            await store.submit([a_request("r1"), a_request("r2", prompt_ids=(2**31,))])

        assert await unfinished(store) == []


class TestLease:
    async def test_a_lease_names_the_worker_and_raises_the_epoch(self, store: Store) -> None:
        await accept(store, a_request())

        assert await One(store).lease(Lease("r1", "w1", 1)) is OK
        assert ((await read(store)).worker_id, (await read(store)).lease_epoch) == ("w1", 1)

    async def test_stealing_is_a_lease_at_the_next_epoch(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)

        assert await One(store).lease(Lease("r1", "w2", 2)) is OK
        assert ((await read(store)).worker_id, (await read(store)).lease_epoch) == ("w2", 2)

    async def test_the_same_lease_again_is_already_there(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)

        assert await One(store).lease(Lease("r1", "w1", 1)) is ALREADY

    @pytest.mark.parametrize(("worker_id", "lease_epoch"), [("w2", 1), ("w1", 3), ("w1", 0)])
    async def test_a_lease_from_another_epoch_is_stale(
        self, store: Store, worker_id: str, lease_epoch: int
    ) -> None:
        await accept(store, a_request())
        await lease(store)

        assert await One(store).lease(Lease("r1", worker_id, lease_epoch)) is STALE
        assert ((await read(store)).worker_id, (await read(store)).lease_epoch) == ("w1", 1)
        assert (await read(store)).pair == "a pair"

    async def test_a_request_names_the_model_pair_of_its_newest_lease(self, store: Store) -> None:
        await accept(store, a_request("r1"), a_request("r2"), a_request("r3"))
        batch = Batch(store)
        batch.lease([Lease("r1", "w1", 1), Lease("r2", "w1", 1)], "a pair")
        await batch.execute()
        await lease(store, "r2", "w2", 2, pair="another pair")
        await One(store).release(Release("r1", 1))

        assert {one.request_id: one.pair for one in await unfinished(store)} == {
            "r1": "a pair",
            "r2": "another pair",
            "r3": "",
        }

    async def test_the_model_pair_of_a_request_of_an_earlier_version_is_not_known(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await client.hdel(store.keys.request("r1"), "pair")

        assert (await read(store)).pair == ""

    async def test_what_is_missing_or_has_ended_is_gone(self, store: Store) -> None:
        await accept(store, a_request())
        await One(store).finish(a_finish())

        assert await One(store).many("lease", [Lease("r1", "w1", 1), Lease("no such", "w1", 1)]) == [
            GONE,
            GONE,
        ]
        assert await store.read("no such") is None


class TestRelease:
    async def test_a_released_request_keeps_its_epoch(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)

        assert await One(store).release(Release("r1", 1)) is OK
        assert ((await read(store)).worker_id, (await read(store)).lease_epoch) == (None, 1)

    async def test_a_worker_may_still_commit_until_the_next_lease(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).release(Release("r1", 1))

        assert await One(store).commit(a_commit()) is OK

    async def test_a_released_request_is_already_released(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).release(Release("r1", 1))

        assert await One(store).release(Release("r1", 1)) is ALREADY
        await lease(store, "r1", "w2", 2)
        assert await One(store).release(Release("r1", 1)) is ALREADY
        await One(store).finish(a_finish())
        assert await One(store).release(Release("r1", 1)) is ALREADY

    async def test_the_deaths_of_its_workers_are_kept_through_leases_and_its_end(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        assert ((await read(store)).deaths, (await read(store)).death_round) == (0, 0)
        await One(store).release(Release("r1", 1, deaths=1, death_round=5))
        await lease(store, "r1", "w2", 2)
        assert ((await read(store)).deaths, (await read(store)).death_round) == (1, 5)

        assert await One(store).release(Release("r1", 2, deaths=4, death_round=6)) is OK
        await One(store).finish(a_finish())
        assert ((await read(store)).deaths, (await read(store)).death_round) == (4, 6)

    async def test_of_a_request_of_an_earlier_version_every_round_counts_as_one_that_drafted(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit(standing=a_standing(rounds=3, drafts=2)))
        assert (await read(store)).standing.drafts == 2

        await fold(store)
        await client.hdel(store.keys.request("r1"), "drafts")
        assert (await read(store)).standing.drafts == 3

    async def test_another_epoch_is_stale(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await lease(store, "r1", "w2", 2)

        assert await One(store).many("release", [Release("r1", 1), Release("r1", 3)]) == [STALE, STALE]
        assert (await read(store)).worker_id == "w2"

    async def test_what_is_missing_or_has_ended_is_gone(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).finish(a_finish())

        assert await One(store).many("release", [Release("r1", 1), Release("no such", 1)]) == [GONE, GONE]


class TestCommit:
    async def test_tokens_are_appended_and_the_standing_is_kept(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        later = a_standing(
            rounds=2, drafted=10, accepted=4, attained_s=1e-7, preemptions=3, level=4, score=-2.5
        )

        assert await One(store).commit(a_commit()) is OK
        assert await One(store).commit(a_commit(position=3, tokens=(14,), standing=later)) is OK
        stored = await read(store)
        assert stored.committed_ids == (11, 12, 13, 14)
        assert later == stored.standing
        assert stored.end is None

    async def test_the_first_token_is_timed(self, open_store: OpenStore) -> None:
        now_s = NOW_S
        store = open_store(clock=lambda: now_s)
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit(tokens=()))
        assert (await read(store)).first_token_unix_ms is None
        await One(store).commit(a_commit(standing=a_standing(rounds=2)))
        now_s += 9
        await One(store).commit(a_commit(position=3))

        assert int(NOW_S * 1000) == (await read(store)).first_token_unix_ms

    async def test_the_same_commit_again_is_already_there(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await One(store).commit(a_commit(position=3, tokens=(14, 15)))

        assert await One(store).commit(a_commit()) is ALREADY
        assert await One(store).commit(a_commit(position=3, tokens=(14, 15))) is ALREADY
        assert (await read(store)).committed_ids == (11, 12, 13, 14, 15)

    async def test_a_round_without_tokens_moves_only_the_standing(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        prefill = a_commit(tokens=(), standing=a_standing(rounds=0, attained_s=0.125))

        assert await One(store).commit(prefill) is OK
        assert await One(store).commit(prefill) is ALREADY
        assert (await read(store)).standing.attained_s == 0.125

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"lease_epoch": 1, "position": 3}, id="older lease"),
            pytest.param({"lease_epoch": 3, "position": 3}, id="newer lease"),
            pytest.param({"lease_epoch": 2, "position": 4}, id="gap"),
            pytest.param({"lease_epoch": 2, "position": 1}, id="overlap"),
            pytest.param({"lease_epoch": 2, "position": 0, "tokens": (11, 12, 99)}, id="other tokens"),
            pytest.param(
                {"lease_epoch": 2, "position": 0, "tokens": (11, 12, 13), "end": End.STOP},
                id="an end that is not there",
            ),
            pytest.param(
                {"lease_epoch": 3, "position": 0, "tokens": (11, 12, 13)},
                id="same tokens, lease that never was",
            ),
        ],
    )
    async def test_another_lease_or_position_is_stale(self, store: Store, changes: dict[str, Any]) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await lease(store, "r1", "w2", 2)
        before = await read(store)

        stale = a_commit(**({"tokens": (14, 15, 16), "standing": a_standing(level=9, rounds=9)} | changes))
        assert await One(store).commit(stale) is STALE
        assert before == await read(store)

    async def test_what_is_missing_or_has_ended_is_gone(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).finish(a_finish())

        assert await One(store).many("commit", [a_commit(), a_commit("no such")]) == [GONE, GONE]
        assert await store.read("no such") is None

    async def test_one_stale_entry_does_not_fail_its_batch(self, store: Store) -> None:
        await accept(store, *(a_request(f"r{n}") for n in range(3)))
        for n in range(3):
            await lease(store, f"r{n}")
        commits = [a_commit("r0"), a_commit("r1", lease_epoch=8), a_commit("r2"), a_commit("no such")]

        assert await One(store).many("commit", commits) == [OK, STALE, OK, GONE]

    @pytest.mark.parametrize("level", [-1, MAX_LEVELS])
    async def test_a_level_without_a_key_is_refused_before_anything_is_sent(
        self, store: Store, level: int
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        batch = Batch(store)
        batch.commit([a_commit(), a_commit(position=3, standing=a_standing(level=level))])

        with pytest.raises(ValueError, match="level"):
            await batch.execute()
        assert (await read(store)).committed_ids == ()

    async def test_numbers_that_are_none_do_no_harm(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)

        assert (
            await One(store).commit(a_commit(standing=a_standing(attained_s=math.nan, score=math.nan))) is OK
        )
        standing = (await read(store)).standing
        assert (0.0, math.inf) == (standing.attained_s, standing.score)
        infinite = a_commit(position=3, standing=a_standing(attained_s=math.inf, score=math.inf))
        assert await One(store).commit(infinite) is OK
        assert math.isfinite((await read(store)).standing.attained_s)


class TestEnd:
    @pytest.mark.parametrize("end", ENDS, ids=lambda end: end.value)
    async def test_commit_and_finish_are_one_transition(self, store: Store, end: End) -> None:
        await accept(store, a_request())
        await lease(store)
        last = a_commit(end=end, cut_characters=4, detail="why", story=STORY, standing=a_standing(level=3))

        assert await One(store).commit(last) is OK
        stored = await read(store)
        assert stored.committed_ids == (11, 12, 13)
        assert (end, 4, "why", STORY) == (stored.end, stored.cut_characters, stored.detail, stored.story)
        assert (None, 1, a_standing(level=3)) == (stored.worker_id, stored.lease_epoch, stored.standing)
        assert int(NOW_S * 1000) == stored.ended_unix_ms == stored.first_token_unix_ms
        assert await unfinished(store) == []

    async def test_the_same_last_commit_again_is_already_there(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        last = a_commit(position=3, tokens=(14,), end=End.LENGTH)
        await One(store).commit(last)

        assert await One(store).many("commit", [a_commit(), last]) == [ALREADY, ALREADY]
        assert await One(store).commit(replace(last, end=End.STOP)) is GONE
        assert (await read(store)).committed_ids == (11, 12, 13, 14)

    async def test_a_last_round_may_bring_no_token(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        last = a_commit(tokens=(), end=End.TIME_LIMIT)

        assert await One(store).commit(last) is OK
        assert await One(store).commit(last) is ALREADY
        assert (await read(store)).committed_ids == ()

    @pytest.mark.parametrize("leased", [False, True])
    async def test_finish_ends_whoever_holds_it(self, store: Store, leased: bool) -> None:
        await accept(store, a_request())
        if leased:
            await lease(store)
            await One(store).commit(a_commit())

        assert await One(store).finish(a_finish()) is OK
        stored = await read(store)
        assert (stored.end, stored.detail, stored.story) == (End.CANCELLED, "the client left", STORY)
        assert (a_standing(), None) == (stored.standing, stored.worker_id)
        assert ((11, 12, 13) if leased else ()) == stored.committed_ids

    async def test_finished_this_way_is_already_there_and_otherwise_gone(self, store: Store) -> None:
        """The request is removed, so that later reads return its actual end."""
        await accept(store, a_request())
        await One(store).finish(a_finish(end=End.DEADLINE))

        assert await One(store).finish(a_finish(end=End.DEADLINE)) is ALREADY
        assert await One(store).finish(a_finish(end=End.CANCELLED)) is GONE
        assert await One(store).finish(a_finish("no such")) is GONE
        assert End.DEADLINE is (await read(store)).end

    async def test_all_that_belongs_to_a_finished_request_expires_together(
        self, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        store = open_store(finished_ttl_s=300)
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        await accept(store, a_request(idempotency_key="k"), a_request("r2"))
        of_one = [
            store.keys.request("r1"),
            store.keys.tokens("r1"),
            store.keys.payload("r1"),
            store.keys.idempotency("acme", "k"),
        ]
        await lease(store)
        await One(store).commit(a_commit())
        await fold(store)
        assert await ttls_ms(client, of_one) == [-1] * 4
        await One(store).commit(a_commit(position=3, end=End.STOP))
        await One(store).finish(a_finish("r2"))

        assert all(290_000 < ttl_ms <= 300_000 for ttl_ms in await ttls_ms(client, of_one))

    @pytest.mark.parametrize("verb", ["commit", "finish"])
    @pytest.mark.parametrize("end", ENDS, ids=lambda end: end.value)
    async def test_words_and_blocks_of_a_prompt_leave_the_record_with_the_end(
        self, store: Store, client: redis_client.Redis, end: End, verb: str
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        kept = await read(store)
        assert (kept.length_features, kept.prompt_blocks) == (FEATURES, BLOCKS)
        last = a_commit(position=3, end=end) if verb == "commit" else a_finish(end=end)

        assert await One(store).many(verb, [last]) == [OK]
        assert await client.hkeys(store.keys.payload("r1")) == [b"prompt", b"submission", b"story"]
        ended = await read(store)
        assert (ended.length_features, ended.prompt_blocks) == (b"", b"")

    async def test_log_probabilities_of_a_prompt_stay_until_the_request_expires(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        batch = Batch(store)
        tokens = batch.commit([a_commit()])
        kept = batch.keep_prompt_logprobs([PackedPromptLogprobs("r1", 1, b"values")])
        await batch.execute()

        assert (kept.result(), tokens.result()) == ([OK], [OK])
        assert (await read(store)).prompt_logprobs == b"values"
        assert await One(store).finish(a_finish()) is OK
        assert (await read(store)).prompt_logprobs == b"values"
        assert await client.pttl(store.keys.payload("r1")) > 0

    async def test_log_probabilities_of_a_prompt_are_written_before_its_tokens(self, store: Store) -> None:
        """A server that loses the last of what was written then loses the tokens too."""
        await accept(store, a_request())
        await lease(store)
        with losing_answers(store) as sent:
            batch = Batch(store)
            batch.commit([a_commit()])
            batch.keep_prompt_logprobs([PackedPromptLogprobs("r1", 1, b"values")])
            await batch.execute()
        [calls] = sent
        assert [call.script.name for call in calls] == ["prompt_logprobs", "append"]
        await batch.execute()
        assert (await read(store)).committed_ids == a_commit().tokens

    @pytest.mark.parametrize(
        ("request_id", "lease_epoch", "answer"),
        [("r1", 2, STALE), ("r2", 1, GONE)],
        ids=["other lease", "unknown"],
    )
    async def test_log_probabilities_of_another_lease_change_nothing(
        self, store: Store, request_id: str, lease_epoch: int, answer: TransitionStatus
    ) -> None:
        await accept(store, a_request())
        await lease(store)

        found = PackedPromptLogprobs(request_id, lease_epoch, b"values")
        assert await One(store).keep_prompt_logprobs(found) is answer
        assert (await read(store)).prompt_logprobs == b""

    async def test_log_probabilities_of_an_ended_prompt_change_nothing(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        assert await One(store).finish(a_finish()) is OK

        assert await One(store).keep_prompt_logprobs(PackedPromptLogprobs("r1", 1, b"values")) is GONE
        assert (await read(store)).prompt_logprobs == b""

    async def test_log_probabilities_of_a_prompt_are_written_back(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await fold(store)
        lost = replace(await read(store), prompt_logprobs=b"values", committed_ids=(11, 12, 13, 14))

        assert await One(store).restore(lost) is OK
        assert (await read(store)).prompt_logprobs == b"values"

    async def test_a_process_that_never_saw_the_submission_lets_its_key_expire_too(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request(idempotency_key="k"))
        other = await take_over(open_store, store)
        await One(other).finish(a_finish())

        assert await client.pttl(store.keys.idempotency("acme", "k")) > 0

    async def test_a_finished_request_can_be_read_until_it_expires(
        self, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        store = open_store(finished_ttl_s=0.05)
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        await accept(store, a_request(idempotency_key="k"))
        await One(store).finish(a_finish())

        async def is_forgotten() -> bool:
            return await store.read("r1") is None

        await wait_until_async(is_forgotten, description="r1 expires")
        left = await keys_of(client, store.keys.prefix)
        assert not [key for key in left if "r1" in key or "idempotency" in key]


class TestTheKeyOfWhatHasEnded:
    """A deadline belongs to the caller, and is not part of the content of an idempotency key."""

    KEYED: ClassVar[dict[str, str]] = {"idempotency_key": "k", "body_hash": "b"}

    @pytest.mark.parametrize("end", list(End))
    @pytest.mark.parametrize("verb", ["finish", "commit"])
    async def test_a_deadline_lets_it_go_and_every_other_end_keeps_it(
        self, store: Store, end: End, verb: str
    ) -> None:
        await accept(store, a_request(**self.KEYED))
        await lease(store)
        if verb == "finish":
            assert await One(store).finish(a_finish(end=end)) is OK
        else:
            assert await One(store).commit(a_commit(end=end)) is OK
        [retry] = await store.submit([a_request("r2", **self.KEYED)])

        if end is End.DEADLINE:
            assert (retry.status, retry.request_id) == (SubmitStatus.ACCEPTED, "r2")
        else:
            assert (retry.status, retry.request_id) == (SubmitStatus.ATTACHED, "r1")

    async def test_the_end_of_the_first_one_repeated_takes_nothing_from_the_retry(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request(**self.KEYED))
        await One(store).finish(a_finish(end=End.DEADLINE))
        await accept(store, a_request("r2", **self.KEYED))
        assert await One(store).finish(a_finish(end=End.DEADLINE)) is ALREADY

        [again] = await store.submit([a_request("r3", **self.KEYED)])
        assert (again.status, again.request_id) == (SubmitStatus.ATTACHED, "r2")
        assert await client.pttl(store.keys.idempotency("acme", "k")) == -1

    @pytest.mark.parametrize("first", ["the older one", "the newer one"])
    async def test_in_a_record_that_is_written_back_the_newest_has_it(
        self, store: Store, client: redis_client.Redis, first: str
    ) -> None:
        await accept(store, a_request(**self.KEYED))
        older = await read(store)
        await One(store).finish(a_finish(end=End.DEADLINE))
        await accept(store, a_request("r2", **self.KEYED))
        newer = await read(store, "r2")
        await client.delete(*await keys_of(client, store.keys.prefix))
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        for request in (older, newer) if first == "the older one" else (newer, older):
            assert await One(store).restore(request) is OK
        assert await One(store).finish(a_finish(end=End.DEADLINE)) is OK

        [again] = await store.submit([a_request("r3", **self.KEYED)])
        assert (again.status, again.request_id) == (SubmitStatus.ATTACHED, "r2")


class TestWithdrawal:
    KEYED: ClassVar[dict[str, str]] = {"idempotency_key": "k", "body_hash": "b"}

    async def test_a_withdrawn_request_leaves_nothing(self, store: Store, client: redis_client.Redis) -> None:
        before = await keys_of(client, store.keys.prefix)
        await accept(store, a_request(**self.KEYED))

        assert await store.withdraw(["r1", "no such"]) == ["r1"]
        left = set(await keys_of(client, store.keys.prefix)) - set(before)
        assert left <= {store.keys.sequence()}
        [retry] = await store.submit([a_request("r2", **self.KEYED)])
        assert (retry.status, retry.request_id) == (SubmitStatus.ACCEPTED, "r2")

    async def test_it_takes_nothing_from_a_newer_request(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request(**self.KEYED))
        await client.delete(store.keys.idempotency("acme", "k"))
        await accept(store, a_request("r2", **self.KEYED))

        assert await store.withdraw(["r1"]) == ["r1"]
        [again] = await store.submit([a_request("r3", **self.KEYED)])
        assert (again.status, again.request_id) == (SubmitStatus.ATTACHED, "r2")
        assert await store.unfinished_ids() == ["r2"]

    async def test_one_that_the_server_executes_late_leaves_a_request_submitted_again(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was sent on a connection that the server reads later."""
        await accept(store, a_request(**self.KEYED))
        run = store.run
        sent: list[Any] = []

        async def hold(calls: Any, *, leading: bool) -> Any:
            monkeypatch.undo()
            sent.append(calls)
            raise StoreUnavailable("no answer")

        monkeypatch.setattr(store, "run", hold)
        with pytest.raises(StoreUnavailable):
            await store.withdraw(["r1"])
        assert await store.withdraw(["r1"]) == ["r1"]
        await accept(store, a_request(**self.KEYED))
        await run(*sent, leading=True)

        assert await store.unfinished_ids() == ["r1"]

    async def test_a_request_that_has_ended_stays(self, store: Store) -> None:
        await accept(store, a_request(**self.KEYED))
        await One(store).finish(a_finish(end=End.STOP))

        assert await store.withdraw(["r1"]) == []
        assert (await read(store)).end is End.STOP

    async def test_any_number_is_withdrawn(self, store: Store) -> None:
        names = [f"r{at}" for at in range(scripts.MAX_ENTRIES + 1)]
        await accept(store, *(a_request(name) for name in names))

        assert await store.withdraw(names) == names
        assert await store.unfinished_ids() == []


class TestMoreTime:
    async def test_an_unfinished_request_gets_another_deadline_or_none(self, store: Store) -> None:
        await accept(store, a_request(deadline_unix_ms=5))
        assert await store.extend("r1", 7)
        assert (await read(store)).deadline_unix_ms == 7
        assert await store.extend("r1", None)
        assert (await read(store)).deadline_unix_ms is None

    async def test_one_that_has_ended_or_is_missing_gets_none(self, store: Store) -> None:
        await accept(store, a_request(deadline_unix_ms=5))
        await One(store).finish(a_finish())
        assert not await store.extend("r1", 7)
        assert not await store.extend("no such", 7)
        assert (await read(store)).deadline_unix_ms == 5


class TestQueue:
    async def test_an_operator_reads_requests_with_plain_commands(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request(prompt_ids=range(1000)))
        await lease(store)
        await One(store).commit(a_commit(standing=a_standing(level=2)))
        await fold(store)
        found = await client.hgetall(store.keys.request("r1"))
        shown = {field.decode(): value.decode() for field, value in found.items()}  # nothing binary in it

        expected = {
            "state": "leased",
            "worker": "w1",
            "lease_epoch": "1",
            "level": "2",
            "tenant": "acme",
            "priority": "0",
            "committed": "3",
            "rounds": "1",
            "drafts": "1",
            "drafted": "5",
            "accepted": "3",
            "attained_s": "0.25",
            "prompt_tokens": "1000",
        }
        assert expected.items() <= shown.items()
        assert await client.hgetall(store.keys.tenants()) == {b"acme": b"1"}
        assert await client.get(store.keys.prompt_tokens()) == b"1000"
        await One(store).release(Release("r1", 1))
        assert await client.hget(store.keys.request("r1"), "state") == b"queued"
        await One(store).finish(a_finish())
        assert await client.hget(store.keys.request("r1"), "state") == b"ended"

    async def test_an_empty_queue_leaves_no_key(self, store: Store, client: redis_client.Redis) -> None:
        await accept(store, a_request("r1"), a_request("r2", tenant="other", max_tokens=99))
        await end_everything(store)
        queue = [store.keys.unfinished(), store.keys.tenants(), store.keys.prompt_tokens()]

        assert await client.exists(*queue) == 0


class TestLeadership:
    async def test_there_is_one_leader(self, store: Store, open_store: OpenStore) -> None:
        standby = open_store()

        assert await standby.acquire_leadership(owner="standby:1", lease_s=60) is None
        assert standby.epoch is None
        assert Leader("leader:1", store.epoch or LeaderEpoch("")) == await standby.leader()

    async def test_nobody_leads_at_first(self, open_store: OpenStore) -> None:
        assert await open_store().leader() is None
        assert open_store().incarnation is None

    async def test_a_standby_takes_over_when_the_lease_runs_out(self, open_store: OpenStore) -> None:
        first, second = open_store(), open_store()
        old = await first.acquire_leadership(owner="a:1", lease_s=0.05)

        async def try_it() -> LeaderEpoch | None:
            return await second.acquire_leadership(owner="b:1", lease_s=60)

        new = await wait_until_async(try_it, description="the lease of the first leader runs out")
        assert old is not None
        assert new is not None
        assert new.number == old.number + 1
        assert new.partition(":")[2] != old.partition(":")[2]
        assert await first.renew_leadership() is False
        assert first.epoch is None

    async def test_a_lease_that_the_servers_clock_has_lengthened_is_cut(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """Set back by an hour, the clock would keep the lease of a dead leader for an hour more."""
        standby = open_store()
        for left_ms, kept_ms in ((3_600_000, 60_000), (5_000, 5_000)):
            await client.pexpire(store.keys.leader(), left_ms)

            assert await standby.acquire_leadership(owner="standby:1", lease_s=60) is None
            assert await client.pttl(store.keys.leader()) <= kept_ms
        assert await store.renew_leadership() is True, "a leader that lives keeps leading"

    async def test_resigning_hands_over_at_once(self, store: Store, open_store: OpenStore) -> None:
        await take_over(open_store, store)

        assert await store.renew_leadership() is False
        await store.resign()
        assert (await store.leader() or Leader("", LeaderEpoch("0:"))).owner == "other:1"

    async def test_an_old_leader_that_resigns_harms_nobody(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await client.delete(store.keys.leader())
        other = open_store()
        await other.acquire_leadership(owner="other:1", lease_s=60)
        await store.resign()

        assert await other.renew_leadership() is True
        assert await other.leader() == Leader("other:1", other.epoch or LeaderEpoch(""))

    async def test_acquiring_again_keeps_the_epoch(self, store: Store) -> None:
        assert store.epoch == await store.acquire_leadership(owner="leader:1", lease_s=60)

    async def test_renewing_extends_the_lease_and_what_belongs_to_the_shard(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        lasting = [store.keys.leader_count(), store.keys.schema_version(), store.keys.incarnation()]
        for key in [store.keys.leader(), *lasting]:
            await client.pexpire(key, 5000)

        assert await store.renew_leadership() is True
        assert await client.pttl(store.keys.leader()) > 5000
        assert min(await ttls_ms(client, lasting)) > 29 * 24 * 3600 * 1000

    async def test_a_lease_that_ran_out_is_renewed_while_nobody_has_led_since(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        """The server stood still for longer than the lease."""
        epoch = store.epoch
        await client.delete(store.keys.leader())

        assert await store.renew_leadership() is True
        assert epoch == store.epoch
        await accept(store, a_request())

    async def test_not_when_somebody_has(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await client.delete(store.keys.leader())
        other = open_store()
        await other.acquire_leadership(owner="other:1", lease_s=60)
        await other.resign()

        assert await store.renew_leadership() is False

    async def test_the_last_leader_reclaims_an_emptied_record_under_its_epoch(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        epoch, incarnation = store.epoch, store.incarnation
        await client.delete(*await keys_of(client, store.keys.prefix))

        with pytest.raises(RecordBehind):
            await store.renew_leadership()
        with pytest.raises(Fenced):  # until it confirms it
            await store.submit([a_request()])
        assert await store.reclaim_leadership(newest_sequence=41) is True
        assert epoch == store.epoch
        assert incarnation != store.incarnation
        assert await store.renew_leadership() is True
        [result] = await store.submit([a_request()])
        assert result.sequence == 42
        assert -1 not in await ttls_ms(client, [store.keys.sequence(), store.keys.incarnation()])

    async def test_reclaiming_twice_is_reclaiming_once(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        """The reply to the first call was lost."""
        await client.delete(*await keys_of(client, store.keys.prefix))
        await store.reclaim_leadership(newest_sequence=3)
        incarnation = store.incarnation

        assert await store.reclaim_leadership(newest_sequence=3) is True
        assert incarnation == store.incarnation
        assert await store.last_sequence() == 3

    async def test_a_record_that_was_set_back_to_an_older_leader_is_behind(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        other = await take_over(open_store, store)
        await client.delete(store.keys.leader())
        await client.set(store.keys.leader_count(), 1)

        with pytest.raises(RecordBehind):
            await other.renew_leadership()
        assert await other.reclaim_leadership(newest_sequence=0) is True
        assert await other.renew_leadership() is True

    async def test_reclaiming_yields_to_whoever_leads(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await client.delete(*await keys_of(client, store.keys.prefix))
        other = open_store()
        await other.acquire_leadership(owner="other:1", lease_s=60)

        assert await store.reclaim_leadership(newest_sequence=0) is False
        assert store.epoch is None
        assert await other.renew_leadership() is True

    async def test_a_standby_leaves_an_emptied_record_to_the_last_leader_first(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        standby = Waiting(open_store)
        assert await standby.takes_over() is None
        await client.delete(*await keys_of(client, store.keys.prefix))

        await standby.waits()
        assert standby.store.waits_for_last_leader
        assert await standby.takes_over() is not None
        assert not standby.store.waits_for_last_leader
        assert await store.reclaim_leadership(newest_sequence=0) is False

    async def test_a_standby_leaves_a_record_that_lacks_an_epoch_to_the_last_leader_first(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """The record went back to before the newest leader: its count is smaller than the count that the
        standby saw."""
        standby = Waiting(open_store)
        newest = await take_over(open_store, store)
        assert await standby.takes_over() is None
        assert await standby.store.leader() is not None
        await client.delete(store.keys.leader())
        await client.set(store.keys.leader_count(), 1)

        await standby.waits()
        epoch = await standby.takes_over()
        assert epoch is not None
        assert epoch.number == 3
        assert await newest.renew_leadership() is False

    async def test_a_standby_that_could_not_reach_the_record_leaves_it_to_the_last_leader_first(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        standby = Waiting(open_store)
        with monkeypatch.context() as cut:
            cut.setattr(standby.store.transport, "_send", unreachable)
            with pytest.raises(StoreUnavailable):
                await standby.takes_over()
        await client.delete(store.keys.leader())

        await standby.waits()
        assert await store.renew_leadership() is True
        assert await standby.takes_over() is None
        await client.delete(store.keys.leader())
        assert await standby.takes_over() is not None, "it has seen the leader since"

    async def test_a_standby_waits_anew_after_each_time_it_could_not_reach_the_record(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A leader that started during the wait, unseen by the standby, needs as much time as the one
        before."""
        standby = Waiting(open_store)
        await client.set(store.keys.server(), "an earlier process")
        await client.delete(store.keys.leader())
        await standby.waits(briefly=True)
        with monkeypatch.context() as cut:
            cut.setattr(standby.store.transport, "_send", unreachable)
            with pytest.raises(StoreUnavailable):
                await standby.takes_over()

        await standby.waits()
        assert await standby.takes_over() is not None

    async def test_a_wait_holds_for_one_loss(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """A standby that was paused sees neither the leader between two losses nor the second outage."""
        standby = Waiting(open_store)
        await client.set(store.keys.server(), "an earlier process")
        await client.delete(store.keys.leader())
        await standby.waits(briefly=True)
        await client.set(store.keys.server(), "a later process, which is gone too")

        await standby.waits()
        assert await standby.takes_over() is not None

    async def test_while_the_last_leader_writes_back_no_standby_leads(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """The lease can expire during the call."""
        await client.delete(*await keys_of(client, store.keys.prefix))
        assert await store.reclaim_leadership(newest_sequence=0) is True
        assert await store.renew_leadership() is True
        await client.delete(store.keys.leader())
        standby = Waiting(open_store)

        await standby.waits(briefly=True)
        with pytest.raises(RecordBehind):
            await store.renew_leadership()
        assert await store.reclaim_leadership(newest_sequence=0) is True
        await store.reclaimed()
        await client.delete(store.keys.leader())
        assert await standby.takes_over() is not None, "everything is written back"

    async def test_what_was_not_confirmed_is_written_back_again(
        self, store: Store, client: redis_client.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await client.delete(*await keys_of(client, store.keys.prefix))
        assert await store.reclaim_leadership(newest_sequence=0) is True
        with monkeypatch.context() as cut:
            cut.setattr(store.transport, "_send", unreachable)
            with pytest.raises(StoreUnavailable):
                await store.reclaimed()

        with pytest.raises(RecordBehind):
            await store.renew_leadership()

    async def test_an_older_leader_on_older_data_does_not_end_the_newest(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """The record lost the takeover itself, and the leader before it, paused until now, came up first."""
        newest = open_store()
        await client.delete(store.keys.leader())
        await newest.acquire_leadership(owner="newest:1", lease_s=60)
        await client.set(store.keys.leader(), f"{store.epoch} leader:1")
        await client.set(store.keys.leader_count(), 1)
        assert await store.renew_leadership() is True

        with pytest.raises(RecordBehind):
            await newest.renew_leadership()
        assert await newest.reclaim_leadership(newest_sequence=0) is True
        await newest.reclaimed()
        assert await store.renew_leadership() is False
        assert await newest.renew_leadership() is True

    async def test_an_attempt_whose_answer_was_lost_has_led_since(
        self, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise it would stand by for its own lease until that expired."""
        store = open_store()

        async def lost(*_: object, **__: object) -> None:
            await send(*_, **__)
            raise StoreUnavailable("cut off")

        send = store.transport._send
        monkeypatch.setattr(store.transport, "_send", lost)
        with pytest.raises(StoreUnavailable):
            await store.acquire_leadership(owner="a:1", lease_s=60)
        monkeypatch.undo()
        epoch = await store.acquire_leadership(owner="a:1", lease_s=60)
        assert epoch is not None
        assert epoch.number == 1

    async def test_resigning_without_leading_changes_nothing(
        self, store: Store, open_store: OpenStore
    ) -> None:
        await open_store().resign()

        assert await store.renew_leadership() is True

    async def test_a_number_that_comes_again_after_the_data_was_lost_is_another_epoch(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await client.delete(*await keys_of(client, store.keys.prefix))
        other = open_store()  # it has no number to continue from
        epoch = await other.acquire_leadership(owner="leader:1", lease_s=60)
        assert (epoch or LeaderEpoch("0:")).number == (store.epoch or LeaderEpoch("9:")).number

        with pytest.raises(Fenced):
            await store.submit([a_request()])
        await other.resign()
        assert await store.renew_leadership() is False

    async def test_every_transition_of_an_old_leader_is_fenced(
        self, store: Store, open_store: OpenStore
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        stored = await read(store)
        old_batches = {
            "commit": a_commit(),
            "finish": a_finish(),
            "lease": Lease("r1", "w2", 2),
            "release": Release("r1", 1),
            "restore": replace(stored, committed_ids=(1, 2)),
            "keep_prompt_logprobs": PackedPromptLogprobs("r1", 1, b"values"),
        }
        batches = []
        for verb, command in old_batches.items():
            batch = Batch(store)
            getattr(batch, verb)([command])
            batches.append(batch)
        await take_over(open_store, store)

        for batch in batches:
            with pytest.raises(Fenced):
                await batch.execute()
        with pytest.raises(Fenced):
            await store.submit([a_request("r2")])
        with pytest.raises(Fenced):
            await store.save_priors(b"old")
        with pytest.raises(Fenced):
            await store.save_probes(b"old")
        with pytest.raises(Fenced):
            await store.extend("r1", 7)
        with pytest.raises(Fenced):
            await store.withdraw(["r1"])
        assert stored == await read(store)
        assert await store.load_priors() is None
        assert await store.load_probes() is None

    async def test_who_never_led_is_fenced(self, open_store: OpenStore) -> None:
        with pytest.raises(Fenced):
            await open_store().submit([a_request()])

    async def test_a_batch_belongs_to_the_leadership_it_was_made_under(
        self, store: Store, open_store: OpenStore
    ) -> None:
        """Another leader in between may have changed anything, so the old batch must not be applied under a
        new epoch."""
        await accept(store, a_request())
        batch = Batch(store)
        batch.lease([Lease("r1", "w1", 1)])
        other = await take_over(open_store, store)
        await other.resign()
        await store.acquire_leadership(owner="leader:1", lease_s=60)

        with pytest.raises(Fenced):
            await batch.execute()

    async def test_another_schema_is_refused(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await store.resign()
        await client.set(store.keys.schema_version(), "99", keepttl=True)

        with pytest.raises(SchemaMismatch, match="99"):
            await open_store().acquire_leadership(owner="other:1", lease_s=60)

    async def test_priors_are_kept_for_the_next_leader(self, store: Store, open_store: OpenStore) -> None:
        assert await store.load_priors() is None
        await store.save_priors(b"\x00learnt")
        other = await take_over(open_store, store)

        assert await other.load_priors() == b"\x00learnt"

    async def test_probes_are_kept_for_the_next_leader_beside_the_priors(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        assert await store.load_probes() is None
        await store.save_priors(b"priors")
        await store.save_probes(b"\x00probes")
        other = await take_over(open_store, store)

        assert await other.load_probes() == b"\x00probes"
        assert await other.load_priors() == b"priors"
        assert 0 < await client.ttl(store.keys.probes()) <= SHARD_TTL_S


class TestRecovery:
    async def test_what_words_and_blocks_a_prompt_had_reaches_a_new_leader(
        self, store: Store, open_store: OpenStore
    ) -> None:
        await accept(store, a_request("r1"), a_request("r2", length_features=b"", prompt_blocks=b""))
        found = await unfinished(await take_over(open_store, store))

        assert [request.length_features for request in found] == [FEATURES, b""]
        assert [request.prompt_blocks for request in found] == [BLOCKS, b""]

    async def test_a_request_without_words_and_blocks_is_as_an_earlier_release_wrote_it(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request(length_features=b"", prompt_blocks=b""))
        assert await client.hkeys(store.keys.payload("r1")) == [b"prompt", b"submission"]

        other = await take_over(open_store, store)
        [found] = await unfinished(other)
        assert (found.length_features, found.prompt_blocks) == (b"", b"")
        assert await One(other).finish(a_finish()) is OK

    async def test_reading_may_stop_after_some(self, store: Store) -> None:
        """The next chunk is on its way by then."""
        await accept(store, *(a_request(f"r{n}") for n in range(2 * READ_CHUNK + 1)))
        tasks = asyncio.all_tasks()
        chunks = store.load_unfinished()
        some = await anext(chunks)
        await chunks.aclose()

        assert len(some) == READ_CHUNK
        assert asyncio.all_tasks() == tasks
        assert len(await unfinished(store)) == 2 * READ_CHUNK + 1

    async def test_a_new_leader_finds_what_was_written(self, store: Store, open_store: OpenStore) -> None:
        await accept(store, *(a_request(f"r{n}", idempotency_key=f"k{n}") for n in range(5)))
        await lease(store, "r1")
        await One(store).commit(a_commit("r1", standing=a_standing(level=2)))
        await lease(store, "r2")
        await One(store).release(Release("r2", 1))
        await One(store).finish(a_finish("r3"))
        written = [await read(store, f"r{n}") for n in (0, 1, 2, 4)]
        other = await take_over(open_store, store)

        assert written == await unfinished(other)
        assert [(request.committed_ids, request.worker_id) for request in written] == [
            ((), None),
            ((11, 12, 13), "w1"),
            ((), None),
            ((), None),
        ]

    async def test_few_long_prompts_are_read_together(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is read takes time to handle, while the timeout of the next read runs."""
        monkeypatch.setattr("scheduler_svc.store.reading.READ_TOKENS", 6)
        lengths = [3, 3, 3, 20, 1, 1, 1]
        await accept(
            store, *(a_request(f"r{n}", prompt_ids=tuple(range(count))) for n, count in enumerate(lengths))
        )
        await lease(store, "r4")
        await One(store).commit(a_commit("r4"))
        await fold(store)
        chunks = [
            [(len(one.prompt_ids), len(one.committed_ids)) for one in chunk]
            async for chunk in store.load_unfinished()
        ]

        assert chunks == [[(3, 0), (3, 0)], [(3, 0)], [(20, 0)], [(1, 3), (1, 0), (1, 0)]]
        assert list(await store.read_all([f"r{n}" for n in range(7)])) == [f"r{n}" for n in range(7)]

    async def test_many_requests_come_in_chunks_in_the_order_of_arrival(self, store: Store) -> None:
        await accept(store, *(a_request(f"r{n}") for n in range(300)))
        chunks = [chunk async for chunk in store.load_unfinished()]

        assert len(chunks) > 1
        assert [f"r{n}" for n in range(300)] == [request.request_id for chunk in chunks for request in chunk]

    async def test_an_index_entry_whose_request_was_deleted_by_hand_is_passed_over(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request("r1"), a_request("r2"))
        await client.delete(store.keys.request("r1"))

        assert [request.request_id for request in await unfinished(store)] == ["r2"]
        await client.zrem(store.keys.unfinished(), "r1")
        await client.delete(store.keys.payload("r1"))
        await end_everything(store)
        await client.delete(store.keys.tenants(), store.keys.prompt_tokens())

    async def test_an_index_of_deleted_requests_only_is_an_empty_queue(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await end_everything(store)
        await client.zadd(store.keys.unfinished(), {"r9": 9})

        assert [chunk async for chunk in store.load_unfinished()] == []
        await client.delete(store.keys.unfinished())

    async def test_a_request_that_lost_its_tokens_is_not_there(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        """The keys of a request expire one by one: half a request counts as none."""
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit(end=End.STOP, story=STORY))
        await client.delete(store.keys.tokens("r1"))

        assert await store.read("r1") is None

    async def test_a_new_leader_learns_the_number_of_the_newest_arrival(
        self, store: Store, open_store: OpenStore
    ) -> None:
        assert await store.last_sequence() == 0
        await accept(store, a_request("r1"), a_request("r2"))
        await end_everything(store)

        assert await (await take_over(open_store, store)).last_sequence() == 2

    async def test_a_hash_that_this_code_did_not_write_is_an_error(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await client.set(store.keys.request("r1"), "not a hash", ex=60)

        with pytest.raises(StoreError):
            await store.read("r1")
        with pytest.raises(StoreError):
            await One(store).lease(Lease("r1", "w1", 1))


class TestRestore:
    async def write_some(self, store: Store) -> list[StoredRequest]:
        await accept(
            store,
            a_request("r0", idempotency_key="k", body_hash="b"),
            a_request("r1", prompt_blocks=b""),
            a_request("r2", length_features=b""),
        )
        await lease(store, "r1")
        await One(store).commit(a_commit("r1", standing=a_standing(level=2)))
        await lease(store, "r2")
        await One(store).release(Release("r2", 1, deaths=3, death_round=7))
        return await unfinished(store)

    async def test_an_emptied_record_is_written_back(
        self, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        store = open_store(limits=Limits(max_requests=2, max_requests_per_tenant=2, max_prompt_tokens=1))
        store._limits = Limits()  # what was accepted under other limits is still written back
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        working_copy = await self.write_some(store)
        same = [store.keys.tenants(), store.keys.prompt_tokens()]
        same += [store.keys.payload(f"r{n}") for n in range(3)]
        before = [await client.dump(key) for key in same]
        await client.delete(*await keys_of(client, store.keys.prefix))
        await store.acquire_leadership(owner="leader:1", lease_s=60)

        assert await One(store).many("restore", working_copy) == [OK, OK, OK]
        assert working_copy == await unfinished(store)
        assert before == [await client.dump(key) for key in same]
        assert await One(store).many("restore", working_copy) == [ALREADY] * 3
        results = await store.submit([a_request("r9", idempotency_key="k", body_hash="b"), a_request("r10")])
        assert [
            SubmitResult(SubmitStatus.ATTACHED, "r0", 1),
            SubmitResult(SubmitStatus.ACCEPTED, "r10", 4),
        ] == results
        assert await One(store).release(Release("r2", 1)) is ALREADY
        assert await One(store).commit(a_commit("r1", position=3)) is OK

    async def test_a_record_that_lost_its_last_second_catches_up(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        behind = await read(store)
        ahead = replace(
            behind,
            committed_ids=(11, 12, 13, 14),
            standing=a_standing(level=3),
            lease_epoch=2,
            worker_id="w2",
            pair="another pair",
        )

        assert await One(store).restore(ahead) is OK
        assert ahead == await read(store)

    async def test_a_record_that_holds_more_stays(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        behind = await read(store)
        await One(store).commit(a_commit())
        now = await read(store)

        assert await One(store).restore(behind) is STALE
        assert await One(store).restore(replace(now, committed_ids=(1, 2, 3, 4))) is STALE
        assert await One(store).restore(replace(now, lease_epoch=0, committed_ids=(11, 12, 13, 14))) is STALE
        assert now == await read(store)

    async def test_what_has_ended_stays_ended(self, store: Store) -> None:
        await accept(store, a_request())
        live = await read(store)
        await One(store).finish(a_finish())

        assert await One(store).restore(live) is GONE
        assert await unfinished(store) == []


class TestBatch:
    async def test_different_transitions_travel_in_the_order_they_were_queued(self, store: Store) -> None:
        await accept(store, a_request())
        batch = Batch(store)
        answers = [
            batch.lease([Lease("r1", "w1", 1)]),
            batch.commit([a_commit()]),
            batch.release([Release("r1", 1)]),
            batch.lease([Lease("r1", "w2", 2)]),
            batch.commit([a_commit(lease_epoch=2, position=3, end=End.STOP, story=STORY)]),
            batch.finish([a_finish()]),
        ]
        await batch.execute()

        assert [answer.result() for answer in answers] == [[OK], [OK], [OK], [OK], [OK], [GONE]]

    async def test_answers_exist_only_after_execution(self, store: Store) -> None:
        pending = Batch(store).lease([Lease("r1", "w1", 1)])

        assert not pending.done
        with pytest.raises(RuntimeError, match="not been executed"):
            pending.result()

    async def test_an_executed_batch_takes_nothing_more(self, store: Store) -> None:
        batch = Batch(store)
        await batch.execute()

        with pytest.raises(RuntimeError, match="has been executed"):
            batch.lease([])

    async def test_empty_lists_have_empty_answers(self, store: Store) -> None:
        batch = Batch(store)
        answers = [batch.commit([]), batch.finish([]), batch.lease([]), batch.release([])]
        await batch.execute()

        assert [answer.result() for answer in answers] == [[]] * 4

    async def test_sending_a_whole_batch_twice_changes_nothing_more(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, *(a_request(f"r{n}", idempotency_key=f"k{n}") for n in range(6)))
        for n in range(3):
            await lease(store, f"r{n}")
        batch = Batch(store)
        answers = [
            batch.commit(
                [
                    a_commit("r0", standing=a_standing(level=1)),
                    a_commit(
                        "r0", position=3, tokens=(14,), standing=a_standing(rounds=2, level=2, score=0.5)
                    ),
                    a_commit("r1", end=End.STOP, story=STORY),
                    a_commit("r2", tokens=(), standing=a_standing(rounds=0)),
                ]
            ),
            batch.finish([a_finish("r3")]),
            batch.release([Release("r0", 1), Release("r2", 1)]),
            batch.lease([Lease("r0", "w9", 2), Lease("r4", "w9", 1)]),
        ]
        await batch.execute()
        assert {OK} == {status for answer in answers for status in answer.result()}
        after_once = [await read(store, f"r{n}") for n in range(6)]
        keys = await keys_of(client, store.keys.prefix)
        await batch.execute()

        assert {ALREADY} == {status for answer in answers for status in answer.result()}
        assert after_once == [await read(store, f"r{n}") for n in range(6)]
        assert keys == await keys_of(client, store.keys.prefix)

    async def test_long_lists_are_sent_256_at_a_time_and_answered_in_order(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, *(a_request(f"r{n}") for n in range(600)))
        leases = [Lease(f"r{n}", "w1", 1 if n not in (255, 256, 599) else 5) for n in range(600)]
        before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        statuses = await One(store).many("lease", leases)
        after = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]

        assert after - before == 3
        assert [STALE if n in (255, 256, 599) else OK for n in range(600)] == statuses

    async def test_scripts_that_the_server_forgot_are_loaded_again(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await client.script_flush()
        batch = Batch(store)
        leased, committed = batch.lease([Lease("r1", "w1", 1)]), batch.commit([a_commit()])
        await batch.execute()

        assert leased.result() + committed.result() == [OK, OK]

    async def test_scripts_that_are_lost_while_they_are_loaded_leave_the_record_unavailable(
        self, store: Store, client: redis_client.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that starts twice, or an operator who flushes scripts, is no reason for a scheduler to end."""
        await accept(store, a_request())
        send = Transport._send

        async def send_and_forget(
            transport: Transport, packed: list[bytes], *more: Any, **options: Any
        ) -> Any:
            replies = await send(transport, packed, *more, **options)
            if any(b"LOAD" in command for command in packed):
                await client.script_flush()
            return replies

        with monkeypatch.context() as patch:
            patch.setattr(Transport, "_send", send_and_forget)
            await client.script_flush()
            with pytest.raises(StoreUnavailable, match="scripts"):
                await One(store).lease(Lease("r1", "w1", 1))

        assert await One(store).lease(Lease("r1", "w1", 1)) is OK

    async def test_ends_of_many_tenants_in_one_call(self, store: Store, client: redis_client.Redis) -> None:
        await accept(
            store, *(a_request(f"r{n}", tenant=f"t{n % 3}", idempotency_key=f"k{n}") for n in range(30))
        )
        finishes: list[Finish] = [a_finish(f"r{n}") for n in range(0, 30, 3)]

        assert {OK} == set(await One(store).many("finish", finishes))
        assert await client.hgetall(store.keys.tenants()) == {b"t1": b"10", b"t2": b"10"}
        assert await client.get(store.keys.prompt_tokens()) == b"60"


async def test_commits_of_one_batch_see_each_other(store: Store) -> None:
    """Two reports of one request may arrive together."""
    await accept(store, a_request())
    await lease(store)
    commits: list[Commit] = [a_commit(), a_commit(position=3, tokens=(14,)), a_commit(position=9)]

    assert await One(store).many("commit", commits) == [OK, OK, STALE]


async def test_a_batch_goes_as_soon_as_nobody_holds_it(store: Store) -> None:
    """The object carries a turn's commands: left to the search for cycles, such objects would pile up and be
    searched."""
    await accept(store, a_request())
    await lease(store)
    gc.disable()
    try:
        batch = Batch(store)
        batch.commit([a_commit()])
        await batch.execute()
        gone = weakref.ref(batch)
        del batch

        assert gone() is None
    finally:
        gc.enable()
