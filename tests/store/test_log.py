"""The log of the record: one entry a turn, what a new leader reads from it, and when it goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import redis.asyncio as redis_client

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Commit, Lease, Release
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.errors import Fenced, RecordBehind
from scheduler_svc.store.log import Log, Row, pack_entry, pack_row, read_log, unpack_entry
from scheduler_svc.store.store import Store
from tests.store.conftest import OpenStore
from tests.store.kit import (
    ALREADY,
    GONE,
    NOW_S,
    OK,
    STALE,
    One,
    a_commit,
    a_finish,
    a_request,
    a_standing,
    accept,
    fold,
    keys_of,
    lease,
    losing_answers,
    read,
    take_over,
    ttls_ms,
    unfinished,
)


async def entries(store: Store, client: redis_client.Redis) -> list[str]:
    return [entry_id.decode() for entry_id, _ in await client.xrange(store.keys.log())]


async def folded_tokens(store: Store, client: redis_client.Redis, request_id: str = "r1") -> int:
    """Return the tokens that the request's own keys hold."""
    return int(await client.hget(store.keys.request(request_id), "committed") or 0)


class TestEntry:
    def test_holds_rows_of_many_requests_in_their_order(self) -> None:
        first = a_standing(rounds=3, level=31, attained_s=1 / 3, score=float("inf"))
        entry = pack_entry(
            1_700_000_000_000,
            [pack_row("a", 1, 0, (7, -8), first), pack_row("b", 2**40, 9, (), a_standing())],
        )

        assert list(unpack_entry(5, entry)) == [
            (1, Row(1_700_000_000_000, 5, 0, (7, -8), first)),
            (2**40, Row(1_700_000_000_000, 5, 9, (), a_standing())),
        ]

    @pytest.mark.parametrize("changes", [{"rounds": 2**32}, {"rounds": -1}, {"level": 32}, {"accepted": -1}])
    def test_takes_no_progress_that_does_not_fit(self, changes: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="request a"):
            pack_row("a", 1, 0, (), a_standing(**changes))

    async def test_rows_count_as_far_as_they_continue_the_tokens(self, store: Store) -> None:
        await accept(store, a_request())

        def log(*rows: tuple[int, tuple[int, ...]]) -> Log:
            packed = [pack_row("r1", 1, *row, a_standing(rounds=9)) for row in rows]
            return read_log([(b"1-0", {b"p": pack_entry(6, packed)})])

        stored = replace(await read(store), committed_ids=(1, 2, 3))
        assert log((3, (4,)), (4, (5, 6))).continued(stored).committed_ids == (1, 2, 3, 4, 5, 6)
        assert log((0, (1, 2)), (2, (3, 4))).continued(stored).committed_ids == (1, 2, 3, 4)
        assert log((4, (5,))).continued(stored) == stored, "a gap"
        assert log((2, (9, 4))).continued(stored) == stored, "other tokens"
        assert log((3, ())).continued(stored).standing.rounds == 9
        assert log((3, (4,))).continued(replace(stored, sequence=2)) == replace(stored, sequence=2)


async def test_a_turn_is_one_entry(store: Store, client: redis_client.Redis) -> None:
    await accept(store, *(a_request(f"r{n}") for n in range(500)))
    await One(store).many("lease", [Lease(f"r{n}", "w1", 1) for n in range(500)])
    before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert await One(store).many("commit", [a_commit(f"r{n}") for n in range(500)]) == [OK] * 500
    after = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]

    assert after - before == 1
    assert await entries(store, client) == ["1-0"]
    assert await folded_tokens(store, client) == 0
    assert (await read(store, "r499")).committed_ids == (11, 12, 13)


async def test_another_process_reads_what_only_the_log_has(
    store: Store, open_store: OpenStore, client: redis_client.Redis
) -> None:
    await accept(store, a_request("r1"), a_request("r2"))
    await lease(store)
    await One(store).commit(a_commit())
    await One(store).commit(a_commit(position=3, tokens=(14,), standing=a_standing(rounds=2, level=4)))
    known = await read(store)
    assert known.first_token_unix_ms == NOW_S * 1000
    assert known == await read(open_store())
    other = await take_over(open_store, store)

    assert [known, await read(store, "r2")] == await unfinished(other)
    assert await One(other).commit(a_commit(position=4, tokens=(15,))) is OK
    assert (await read(other)).committed_ids == (11, 12, 13, 14, 15)
    assert await entries(store, client) == ["1-0", "2-0", "3-0"]


async def test_a_new_leader_that_has_read_nothing_reads_before_it_writes(
    store: Store, open_store: OpenStore, client: redis_client.Redis
) -> None:
    await accept(store, a_request())
    await lease(store)
    await One(store).commit(a_commit())
    other = await take_over(open_store, store)

    assert await One(other).commit(a_commit()) is ALREADY
    assert await One(other).commit(a_commit(position=3)) is OK


async def test_a_new_leader_keeps_the_rows_of_a_request_that_arrived_later(
    open_store: OpenStore, client: redis_client.Redis
) -> None:
    """Requests arrive in another order than that of their first rows. Two changes of leader come before anything is
    folded.
    """
    now = [NOW_S]
    first = open_store(clock=lambda: now[0])
    await first.acquire_leadership(owner="a:1", lease_s=60)
    await accept(first, a_request("r1"), a_request("r2"))
    await lease(first, "r1")
    await lease(first, "r2")
    await One(first).commit(a_commit("r2"))
    now[0] += 3
    await One(first).commit(a_commit("r1"))
    await first.resign()

    second = open_store(clock=lambda: now[0])
    await second.acquire_leadership(owner="b:1", lease_s=60)
    assert len(await unfinished(second)) == 2
    await One(second).commit(a_commit("r1", position=3))
    assert await entries(second, client) == ["1-0", "2-0", "3-0"], "r2 needs its own"
    now[0] += 2.1
    await One(second).commit(a_commit("r1", position=6))
    assert await folded_tokens(second, client, "r2") == 3, "it is due before r1"
    assert await folded_tokens(second, client, "r1") == 0

    third = await take_over(open_store, second)
    assert [len(stored.committed_ids) for stored in await unfinished(third)] == [9, 3]


class TestFolding:
    async def test_comes_five_seconds_later_and_then_the_entries_go(
        self, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        now = [NOW_S]
        store = open_store(clock=lambda: now[0])
        await store.acquire_leadership(owner="a:1", lease_s=60)
        await accept(store, a_request("r1"), a_request("r2"))
        await lease(store, "r1")
        await lease(store, "r2")
        await One(store).commit(a_commit("r1"))
        now[0] += 3
        await One(store).commit(a_commit("r2"))
        assert (await folded_tokens(store, client), len(await entries(store, client))) == (0, 2)
        now[0] += 2.1
        await One(store).commit(a_commit("r2", position=3))
        assert (await folded_tokens(store, client), len(await entries(store, client))) == (3, 3)
        assert (
            await client.hget(store.keys.request("r1"), "first_token_unix_ms")
            == str(int(NOW_S * 1000)).encode()
        )
        await One(store).commit(a_commit("r2", position=6))

        assert await entries(store, client) == ["2-0", "3-0", "4-0"], "r2 still needs its own"
        assert await folded_tokens(store, client, "r2") == 0

    async def test_does_not_wait_for_a_clock_that_was_set_back(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request(max_tokens=100))
        await lease(store)
        with patch("scheduler_svc.store.batch.FOLD_AFTER_BYTES", 300):
            for position in range(20):
                await One(store).commit(a_commit(position=position, tokens=(position,)))

        assert await folded_tokens(store, client) > 10
        assert len(await entries(store, client)) <= 7
        assert (await read(store)).committed_ids == tuple(range(20))

    @pytest.mark.parametrize("verb", ["commit", "finish"])
    async def test_comes_before_an_end(self, store: Store, client: redis_client.Redis, verb: str) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        end = a_commit(position=3, tokens=(), end=End.STOP) if verb == "commit" else a_finish()
        assert await getattr(One(store), verb)(end) is OK

        await client.delete(store.keys.log())
        assert (await read(store)).committed_ids == (11, 12, 13)
        assert (await ttls_ms(client, [store.keys.tokens("r1")]))[0] > 0

    async def test_over_tokens_that_the_record_lost_changes_nothing(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await fold(store)
        await client.hset(store.keys.request("r1"), "committed", "1")
        await client.set(store.keys.tokens("r1"), bytes(4))
        await One(store).commit(a_commit(position=3))
        with patch("scheduler_svc.store.batch.FOLD_AFTER_MS", -1):
            batch = Batch(store)
            await batch.execute()

        assert batch.unfoldable == {"r1": STALE}
        assert await folded_tokens(store, client) == 1

    async def test_over_other_tokens_changes_nothing(self, store: Store, client: redis_client.Redis) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await client.hset(store.keys.request("r1"), "committed", "2")
        await client.set(store.keys.tokens("r1"), bytes(8))
        with patch("scheduler_svc.store.batch.FOLD_AFTER_MS", -1):
            batch = Batch(store)
            await batch.execute()

        assert batch.unfoldable == {"r1": STALE}
        assert await client.get(store.keys.tokens("r1")) == bytes(8)

    async def test_adds_only_what_the_keys_lack(self, store: Store, client: redis_client.Redis) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        packed = b"".join(token.to_bytes(4, "little") for token in (11, 12, 13))
        await client.hset(store.keys.request("r1"), "committed", "2")
        await client.set(store.keys.tokens("r1"), packed[:8])
        await fold(store)

        assert await client.get(store.keys.tokens("r1")) == packed
        assert await folded_tokens(store, client) == 3

    async def test_of_everything_clears_the_log_and_appends_go_on(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """The log keeps no outputs after the end of their requests."""
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await fold(store)
        assert await entries(store, client) == ["1-0"]
        await Batch(store).execute()
        assert await entries(store, client) == []
        await Batch(store).execute()
        assert await One(store).commit(a_commit(position=3)) is OK
        assert await entries(store, client) == ["2-0"]
        await fold(store)

        other = open_store()
        await client.delete(store.keys.leader())
        await other.acquire_leadership(owner="other:1", lease_s=60)
        assert await One(other).commit(a_commit(position=6)) is OK
        with pytest.raises(Fenced):
            await Batch(store).execute()
        assert await entries(store, client) == ["2-0", "3-0"]

    async def test_that_arrives_after_the_end_changes_nothing(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        with losing_answers(store) as late:
            await fold(store)
        await One(store).finish(a_finish(standing=a_standing(rounds=1)))
        before = await read(store)
        await client.hset(store.keys.request("r1"), "committed", "2")
        await client.set(store.keys.tokens("r1"), (await client.get(store.keys.tokens("r1")))[:8], ex=60)

        assert [list(reply) for reply in await store.run(late[0], leading=True)] == [[GONE.value]]
        assert before.committed_ids == (11, 12, 13)
        assert (await read(store)).committed_ids == (11, 12)

    async def test_at_an_end_adds_only_what_the_keys_lack(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request("r1"), a_request("r2"))
        await lease(store, "r1")
        await lease(store, "r2")
        await One(store).commit(a_commit("r1"))
        await One(store).commit(a_commit("r2"))
        packed = (11).to_bytes(4, "little") + (12).to_bytes(4, "little")
        await client.hset(store.keys.request("r1"), "committed", "2")
        await client.set(store.keys.tokens("r1"), packed)
        assert await One(store).finish(a_finish("r1")) is OK
        assert (await read(store, "r1")).committed_ids == (11, 12, 13)

        await fold(store)
        await One(store).commit(a_commit("r2", position=3))
        await client.hset(store.keys.request("r2"), "committed", "1")
        assert await One(store).finish(a_finish("r2")) is STALE, "the record has lost tokens"
        await client.hset(store.keys.request("r2"), "committed", "3")

    async def test_of_progress_without_tokens(self, store: Store, client: redis_client.Redis) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit(tokens=(), standing=a_standing(rounds=4)))
        assert (await read(store)).standing.rounds == 4
        await fold(store)

        assert await client.hget(store.keys.request("r1"), "rounds") == b"4"
        assert (await read(store)).first_token_unix_ms is None
        assert store.tails.unfolded == {}

    @pytest.mark.parametrize("apart", [True, False], ids=["a turn each", "one turn"])
    async def test_of_tokens_with_progress_without_tokens_after_them(self, store: Store, apart: bool) -> None:
        """Two reports about one request, a round and then a prefill, may come in one turn."""
        await accept(store, a_request())
        await lease(store)
        round_, prefill = (
            a_commit(tokens=(7, 8)),
            a_commit(position=2, tokens=(), standing=a_standing(rounds=9)),
        )
        for commits in [[round_], [prefill]] if apart else [[round_, prefill]]:
            batch = Batch(store)
            answer = batch.commit(commits)
            await batch.execute()
            assert set(answer.result()) == {OK}

        batch = Batch(store)
        batch.commit([a_commit(position=2, tokens=(9,), end=End.STOP)])
        await batch.execute()

        assert (await read(store)).committed_ids == (7, 8, 9)

    async def test_that_arrives_long_after_it_was_sent_changes_nothing(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        with losing_answers(store) as late:
            await fold(store)
        await One(store).commit(a_commit(position=3, standing=a_standing(rounds=2)))
        await fold(store)
        before = await client.hgetall(store.keys.request("r1"))
        await store.run(late[0], leading=True)

        assert await client.hgetall(store.keys.request("r1")) == before
        assert (await read(store)).committed_ids == (11, 12, 13) * 2


class TestEnd:
    """The end that a report brings takes what only the log holds with it, in one call."""

    async def test_brings_the_tokens_of_the_log_along(self, store: Store, client: redis_client.Redis) -> None:
        await reported(store, "r1")
        before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
        assert await One(store).commit(an_end("r1", standing=a_standing(rounds=2))) is OK
        after = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]

        found = await read(store)
        assert after - before == 1
        assert (found.committed_ids, found.end) == ((11, 12, 13, 14), End.STOP)
        assert (found.first_token_unix_ms, found.standing.rounds) == (NOW_S * 1000, 2)

    async def test_of_a_request_without_rows_has_its_first_token_now(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        assert await One(store).commit(an_end("r1", position=0)) is OK

        found = await read(store)
        assert (found.committed_ids, found.first_token_unix_ms) == ((14,), NOW_S * 1000)

    @pytest.mark.parametrize("written", [0, 1, 2, 3])
    async def test_after_a_fold_whose_answer_was_lost_adds_what_the_keys_lack(
        self, store: Store, client: redis_client.Redis, written: int
    ) -> None:
        await reported(store, "r1")
        packed = b"".join(token.to_bytes(4, "little") for token in (11, 12, 13)[:written])
        await client.hset(store.keys.request("r1"), "committed", written)
        await client.set(store.keys.tokens("r1"), packed)
        assert await One(store).commit(an_end("r1")) is OK

        assert (await read(store)).committed_ids == (11, 12, 13, 14)

    async def test_of_one_request_does_not_depend_on_those_of_others(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        """One whose keys hold other tokens, one whose keys hold more than was ever reported, one that has
        lost tokens, one that is gone.
        """
        names = [f"r{n}" for n in range(7)]
        await reported(store, *names)
        await fold(store)
        await One(store).many("commit", [a_commit(name, position=3) for name in names])
        await client.hset(store.keys.request("r1"), "committed", "4")
        await client.append(store.keys.tokens("r1"), (99).to_bytes(4, "little"))
        await client.hset(store.keys.request("r2"), "committed", "7")
        await client.hset(store.keys.request("r4"), "committed", "2")
        await client.delete(store.keys.request("r5"))
        answers = await One(store).many("commit", [an_end(name, position=6) for name in names])

        assert answers == [OK, STALE, STALE, OK, STALE, GONE, OK]
        for name in ("r0", "r3", "r6"):
            found = await read(store, name)
            assert (found.committed_ids, found.end) == ((11, 12, 13, 11, 12, 13, 14), End.STOP)
        assert await client.zcard(store.keys.unfinished()) == 4
        assert await client.hget(store.keys.tenants(), "acme") == b"4"
        for name in ("r1", "r2", "r4"):
            assert await client.hget(store.keys.request(name), "state") == b"leased"
        await client.delete(*await keys_of(client, store.keys.prefix))

    async def test_under_an_old_lease_leaves_the_log_as_it_was(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await reported(store, "r1")
        await lease(store, worker_id="w2", lease_epoch=2)
        assert await One(store).commit(an_end("r1")) is STALE
        assert (await read(store)).committed_ids == (11, 12, 13)
        assert await One(store).commit(an_end("r1", lease_epoch=2)) is OK

        assert (await read(store)).committed_ids == (11, 12, 13, 14)

    async def test_after_progress_in_the_same_batch_that_the_record_decides_about(self, store: Store) -> None:
        await reported(store, "r1")
        batch = Batch(store)
        batch.lease([Lease("r1", "w2", 2)])
        answers = batch.commit(
            [a_commit(lease_epoch=2, position=3, tokens=(7, 8)), an_end("r1", lease_epoch=2, position=5)]
        )
        await batch.execute()

        assert answers.result() == [OK, OK]
        assert (await read(store)).committed_ids == (11, 12, 13, 7, 8, 14)

    async def test_whose_answer_was_lost_is_known(self, store: Store) -> None:
        await reported(store, "r1", "r2")
        batch = Batch(store)
        ends = batch.commit([an_end("r1"), an_end("r2")])
        with losing_answers(store):
            await batch.execute()
        await batch.execute()

        assert ends.result() == [ALREADY, ALREADY]
        assert (await read(store)).committed_ids == (11, 12, 13, 14)
        other = Batch(store)
        answer = other.commit([an_end("r1", end=End.LENGTH), an_end("r2", tokens=(15,))])
        await other.execute()
        assert answer.result() == [GONE, GONE]


class TestProgressAfterSomethingElseInTheSameBatch:
    """Only the record knows whether it continues the request: it depends on the answer to what comes before."""

    async def test_under_the_lease_before(self, store: Store) -> None:
        await reported(store, "r1")
        batch = Batch(store)
        answers = batch.lease([Lease("r1", "w2", 2)]), batch.commit([a_commit(position=3)])
        await batch.execute()

        assert [answer.result() for answer in answers] == [[OK], [STALE]]
        assert (await read(store)).committed_ids == (11, 12, 13)

    async def test_under_a_lease_that_is_refused(self, store: Store, client: redis_client.Redis) -> None:
        await reported(store, "r1")
        await client.hset(store.keys.request("r1"), "lease_epoch", 7)
        batch = Batch(store)
        answers = batch.lease([Lease("r1", "w2", 2)]), batch.commit([a_commit(lease_epoch=2, position=3)])
        await batch.execute()

        assert [answer.result() for answer in answers] == [[STALE], [STALE]]
        assert (await read(store)).committed_ids == (11, 12, 13)

    async def test_after_progress_under_a_lease_that_only_the_record_knows(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await reported(store, "r1")
        await client.hset(store.keys.request("r1"), "lease_epoch", 2)
        batch = Batch(store)
        answers = batch.commit(
            [a_commit(lease_epoch=2, position=3, tokens=(7,)), a_commit(position=3, tokens=(8,))]
        )
        await batch.execute()

        assert answers.result() == [OK, STALE]
        assert (await read(store)).committed_ids == (11, 12, 13, 7)


async def reported(store: Store, *request_ids: str) -> None:
    """Lease requests, and report three tokens of each."""
    await accept(store, *(a_request(request_id) for request_id in request_ids))
    await One(store).many("lease", [Lease(request_id, "w1", 1) for request_id in request_ids])
    await One(store).many("commit", [a_commit(request_id) for request_id in request_ids])


def an_end(request_id: str, **changes: Any) -> Commit:
    """Return the end after the tokens of `reported`, with one more token."""
    return a_commit(request_id, **({"position": 3, "tokens": (14,), "end": End.STOP} | changes))


class TestRepetition:
    async def test_of_an_entry_whose_answer_was_lost_adds_nothing(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request("r1"), a_request("r2"))
        await lease(store)
        batch = Batch(store)
        answers = [batch.commit([a_commit()]), batch.lease([Lease("r2", "w1", 1)])]
        with losing_answers(store):
            await batch.execute()
        assert not answers[0].done
        await batch.execute()

        assert [answer.result() for answer in answers] == [[ALREADY], [ALREADY]]
        assert await entries(store, client) == ["1-0"]
        assert await One(store).commit(a_commit(position=3)) is OK

    async def test_of_which_the_answer_is_known_is_answered_to_the_leader_alone(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await reported(store, "r1")
        await client.set(store.keys.leader(), "9-other b:1")
        for known in (a_commit(), a_commit(position=9)):
            with pytest.raises(Fenced):
                await One(store).commit(known)

    async def test_of_a_report_under_an_old_lease_is_stale(self, store: Store) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await One(store).release(Release("r1", 1))
        await lease(store, "r1", "w2", 2)

        assert await One(store).commit(a_commit()) is ALREADY
        assert await One(store).commit(a_commit(position=3)) is STALE
        assert await One(store).commit(a_commit(lease_epoch=2, position=3)) is OK
        assert await One(store).commit(a_commit(lease_epoch=2, position=9)) is STALE
        assert (await read(store)).committed_ids == (11, 12, 13) * 2


class TestLoss:
    @pytest.mark.parametrize("kept", [0, 1])
    async def test_of_an_entry_fences_the_leader_until_it_has_written_back(
        self, store: Store, client: redis_client.Redis, kept: int
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        first = await client.dump(store.keys.log())
        await One(store).commit(a_commit(position=3, standing=a_standing(rounds=2)))
        copy = await read(store)
        await client.delete(store.keys.log())
        if kept:
            await client.restore(store.keys.log(), 60_000, first)
        batch = Batch(store)
        pending = batch.commit([a_commit(position=6, tokens=(17,), standing=a_standing(rounds=3))])

        with pytest.raises(Fenced, match="log"):
            await batch.execute()
        with pytest.raises(RecordBehind):
            await store.renew_leadership()
        assert await store.reclaim_leadership(newest_sequence=1)
        assert (await read(store)).committed_ids == (11, 12, 13)[: 3 * kept]
        assert await One(store).restore(copy) in (OK, ALREADY)
        await store.reclaimed()
        assert await store.renew_leadership()
        assert await entries(store, client) == []
        await batch.execute()
        assert pending.result() == [OK]
        assert (await read(store)).committed_ids == (*copy.committed_ids, 17)
        assert await entries(store, client) == ["1-0"]

    async def test_an_entry_of_another_writer_fences_the_leader(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        await client.xadd(store.keys.log(), {"p": pack_entry(0, [])}, id="2-0")

        with pytest.raises(Fenced, match="log"):
            await One(store).commit(a_commit(position=3))
        assert (await client.xrange(store.keys.log()))[-1][1] == {b"p": pack_entry(0, [])}
        await client.delete(store.keys.log())

    async def test_of_a_request_shows_when_it_is_folded(
        self, store: Store, client: redis_client.Redis
    ) -> None:
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        copy = await read(store)
        await client.delete(store.keys.request("r1"), store.keys.tokens("r1"))
        await fold(store)

        assert await One(store).commit(a_commit(position=3)) is GONE
        assert await One(store).restore(copy) is OK
        await client.set(store.keys.prompt_tokens(), 3)  # counted twice by the hand that deleted it
        await client.hset(store.keys.tenants(), "acme", "1")
        assert await One(store).commit(a_commit(position=3)) is OK

    async def test_a_leader_that_read_nothing_keeps_the_log(
        self, store: Store, open_store: OpenStore, client: redis_client.Redis
    ) -> None:
        """It holds nothing that it could write back."""
        await accept(store, a_request())
        await lease(store)
        await One(store).commit(a_commit())
        other = await take_over(open_store, store)
        await client.set(store.keys.server(), "an earlier process")
        await other.acquire_leadership(owner="other:1", lease_s=60)

        assert [stored.committed_ids for stored in await unfinished(other)] == [(11, 12, 13)]
        assert await One(other).commit(a_commit(position=3)) is OK
        assert await entries(other, client) == ["1-0", "2-0"], "it goes on with the log"


async def test_a_record_of_the_layout_before_is_read_and_goes_on(
    open_store: OpenStore, client: redis_client.Redis
) -> None:
    """All progress was in the requests' own keys, and there was an index of the queue by level."""
    before = open_store()
    await before.acquire_leadership(owner="before:1", lease_s=60)
    await accept(before, a_request())
    await lease(before)
    await One(before).commit(a_commit())
    await fold(before)
    known = await read(before)
    levels = before.keys.before_the_log()
    await client.delete(before.keys.log(), before.keys.leader())
    await client.set(before.keys.schema_version(), "1")
    await client.zadd(levels[0], {"r1": 1.5})

    after = open_store()
    assert await after.acquire_leadership(owner="after:1", lease_s=60) is not None
    assert await unfinished(after) == [known]
    assert await One(after).commit(a_commit(position=3)) is OK
    assert (await read(after)).committed_ids == (11, 12, 13) * 2
    assert await client.exists(*levels) == 0
    assert await client.get(after.keys.schema_version()) == b"2"
    with pytest.raises(Fenced):
        await One(before).commit(a_commit(position=3))
