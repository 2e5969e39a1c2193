"""Which worker gets a request when some have computed the beginning of its prompt."""

from __future__ import annotations

import pytest

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    CacheChanged,
    EndRequested,
    Event,
    ResidencyChange,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.placement.routing import MOST_COMPARED, router_named
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.caches import MOST_CONVERSATIONS, Caches
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker
from tests.core.test_placement import core, named, worker_of
from tests.core.test_scheduler import did, report, request

TOKENS = 20 * BLOCK_TOKENS
PROMPT = name_blocks([1] * TOKENS)
OTHER = name_blocks([2] * TOKENS)


def arrives(request_id: str, sequence: int = 1, names: bytes = PROMPT, **more: object) -> Arrived:
    given = {"prompt_tokens": TOKENS, "prompt_blocks": names, **more}
    return Arrived(request(request_id, sequence, **given))


def has(worker_id: str, blocks: int, names: bytes = PROMPT) -> CacheChanged:
    return CacheChanged(worker_id, names[: blocks * 8], b"")


def workers(*slots: int) -> list[Event]:
    return [WorkerUp(named(name, count), ()) for name, count in zip("abc", slots, strict=False)]


def shard(*slots: int, policy: str = "fcfs") -> Scheduler:
    scheduler = core(policy)
    scheduler.step(0.0, workers(*slots))
    return scheduler


def story(scheduler: Scheduler, request_id: str) -> list[str]:
    found = scheduler.explain(request_id, 0.0)
    assert found is not None
    return [line.detail for line in found.story if line.what in ("leased", "moved")]


class TestWhoGetsIt:
    def test_the_worker_that_has_most_of_the_prompt(self) -> None:
        scheduler = shard(4, 4, 4)
        scheduler.step(0.0, [has("b", 10), has("c", 20)])
        scheduler.step(0.0, [arrives("r")])
        assert worker_of(scheduler, "r") == "c"
        assert story(scheduler, "r") == ["to worker c, which has 1279 of 1280 prompt tokens"]

    def test_the_least_loaded_one_if_none_has_any_of_it(self) -> None:
        scheduler = shard(4, 4)
        scheduler.step(0.0, [has("a", 20, OTHER)])
        scheduler.step(0.0, [arrives("r0", 0), arrives("r1", 1), arrives("r2", 2)])
        assert [worker_of(scheduler, name) for name in ("r0", "r1", "r2")] == ["a", "b", "a"]
        assert story(scheduler, "r0") == ["to worker a"]

    def test_another_one_when_its_queue_is_longer_than_the_prefill(self) -> None:
        """So a beginning that many prompts share spreads over the workers."""
        scheduler = shard(8, 8)
        scheduler.step(0.0, [has("a", 10)])
        where = []
        for number in range(4):
            scheduler.step(0.0, [arrives(f"r{number}", number)])
            where.append(worker_of(scheduler, f"r{number}"))
        assert where[0] == "a"
        assert "b" in where

    def test_those_that_run_there_count_because_a_prefill_delays_them(self) -> None:
        scheduler = shard(8, 8)
        scheduler.step(0.0, [arrives(f"r{n}", n, OTHER) for n in range(2)])
        scheduler.step(1.0, [report(did("r0", 0, 1), worker_id="a"), has("a", 1)])
        assert worker_of(scheduler, "r0") == "a"
        scheduler.step(1.0, [EndRequested("r1", End.CANCELLED, "")])
        scheduler.step(1.0, [arrives("r")])
        assert worker_of(scheduler, "r") == "b", "a lacks as much but for one block, and r0 would wait"

    def test_the_oldest_requests_too(self) -> None:
        """They go by the reserved share, which has an order of its own."""
        scheduler = core("fcfs", reserved_share=True)
        scheduler.step(0.0, [*workers(4, 4), has("b", 20)])
        scheduler.step(0.0, [arrives("r")])
        assert worker_of(scheduler, "r") == "b"

    def test_of_many_that_have_a_part_those_with_most_are_compared(self) -> None:
        names = [f"w{number:02d}" for number in range(2 * MOST_COMPARED + 1)]
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named(name, 4), ()) for name in names])
        scheduler.step(0.0, [has(name, 20 if name == names[-1] else 1) for name in names])
        scheduler.step(1.0, [arrives("r")])
        assert worker_of(scheduler, "r") == names[-1]

    def test_a_worker_without_a_free_slot_only_if_it_has_the_prompt(self) -> None:
        scheduler = shard(1, 1)
        scheduler.step(0.0, [arrives("r0", 0, OTHER), has("a", 20)])
        assert worker_of(scheduler, "r0") == "a"
        scheduler.step(0.0, [arrives("r1", 1, OTHER)])
        assert worker_of(scheduler, "r1") == "b"


class TestWhatItKnows:
    def test_a_worker_that_lost_the_blocks_is_like_any_other(self) -> None:
        scheduler = shard(4, 4)
        scheduler.step(0.0, [has("b", 20)])
        scheduler.step(0.0, [CacheChanged("b", b"", PROMPT)])
        scheduler.step(0.0, [arrives("r")])
        assert worker_of(scheduler, "r") == "a"

    def test_a_hello_replaces_what_was_known(self) -> None:
        scheduler = shard(4, 4)
        scheduler.step(0.0, [has("b", 20)])
        scheduler.step(0.0, [WorkerUp(named("b", 4), (), OTHER)])
        scheduler.step(0.0, [arrives("r0"), arrives("r1", 2, OTHER)])
        assert [worker_of(scheduler, name) for name in ("r0", "r1")] == ["a", "b"]

    def test_a_lost_worker_has_nothing_and_an_unknown_one_changes_nothing(self) -> None:
        scheduler = shard(4, 4)
        scheduler.step(0.0, [has("b", 20)])
        scheduler.step(0.0, [WorkerLost("b"), has("nobody", 20)])
        scheduler.step(0.0, [WorkerUp(named("b", 4), ())])
        scheduler.step(0.0, [arrives("r")])
        assert worker_of(scheduler, "r") == "a"

    def test_more_than_its_memory_can_hold_is_left_out(self) -> None:
        """A lie costs time, and no more memory than the worker could have."""
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named("a", 4, target_blocks=12), (), PROMPT)])
        scheduler.step(0.0, [has("a", 20, OTHER)])
        assert scheduler._shard.caches.blocks.blocks_of("a") == 12

    def test_beliefs_are_compared_with_what_was_found(self) -> None:
        scheduler = shard(4)
        scheduler.step(0.0, [has("a", 10)])
        scheduler.step(0.0, [arrives("r0", 0), arrives("r1", 1, OTHER)])
        scheduler.step(
            1.0,
            [
                report(
                    did("r0", 0, 1, cached=256, prefilled=1024),
                    did("r1", 0, 1, cached=64, prefilled=1216),
                    worker_id="a",
                )
            ],
        )
        scheduler.step(2.0, [report(did("r0", 1, 1), did("r1", 1, 1), worker_id="a")])
        found = {"expected": 256, "unexpected": 64, "missing": 384, "computed": 1280 - 640 + 1280 - 64}
        assert scheduler.found_tokens.take() == found
        assert not any(scheduler.found_tokens.take().values())


class TestWhatIsLeft:
    """The remaining service counts only what the worker must compute."""

    def remaining_s(self, scheduler: Scheduler) -> float:
        rank = scheduler.rank_of("r")
        assert rank is not None
        return rank.remaining.mean_s

    def test_it_is_less_by_what_is_cached(self) -> None:
        without, having = shard(4, policy="laps-sd"), shard(4, policy="laps-sd")
        having.step(0.0, [has("a", 10)])
        for scheduler in (without, having):
            scheduler.step(0.0, [arrives("r")])
        saved_s = self.remaining_s(without) - self.remaining_s(having)
        assert saved_s > 0
        assert saved_s == pytest.approx(having.priors.cost.prefill_share_s(10 * BLOCK_TOKENS))

    def test_in_the_queue_it_counts_with_the_worker_that_has_most(self) -> None:
        scheduler = core("laps-sd")
        scheduler.step(0.0, [arrives("r")])
        before_s = self.remaining_s(scheduler)
        other = core("laps-sd")
        other.step(0.0, [WorkerUp(named("a", 1), ()), has("a", 20, OTHER), arrives("first", 0, OTHER)])
        other.step(0.0, [has("a", 20)])
        other.step(0.0, [arrives("second", 1), arrives("r", 2)])
        assert self.remaining_s(other) < before_s

    def test_after_an_eviction_it_counts_what_the_cache_still_has(self) -> None:
        scheduler = shard(4, policy="laps-sd")
        scheduler.step(0.0, [arrives("r")])
        scheduler.step(1.0, [report(did("r", 0, 1, prefilled=TOKENS), worker_id="a"), has("a", 20)])
        evicted = ResidencyChange("r", 1, Residency.NONE)
        scheduler.step(2.0, [report(worker_id="a", residency=(evicted,))])
        kept_s = self.remaining_s(scheduler)
        lost = shard(4, policy="laps-sd")
        lost.step(0.0, [arrives("r")])
        lost.step(1.0, [report(did("r", 0, 1, prefilled=TOKENS), worker_id="a")])
        lost.step(2.0, [report(worker_id="a", residency=(evicted,))])
        assert kept_s < self.remaining_s(lost)


class TestStealing:
    def test_a_request_stays_where_its_prompt_is_if_it_would_take_longer_to_compute_it_than_to_wait(
        self,
    ) -> None:
        """`a` has one slot, one request that runs and one that waits; `b` becomes free."""
        for blocks, running_tokens, expected in ((20, 2, "a"), (20, 4000, "b"), (0, 2, "b")):
            scheduler = shard(1)
            runs = arrives("runs", 0, OTHER, max_tokens=running_tokens, runs_to_limit=True, prompt_tokens=64)
            scheduler.step(0.0, [runs])
            scheduler.step(0.5, [report(did("runs", 0, 1, prefilled=TOKENS), worker_id="a", prefill_s=20.0)])
            scheduler.step(1.0, [has("a", blocks)])
            scheduler.step(1.0, [arrives("waits", 1, prompt_tokens=TOKENS)])
            assert worker_of(scheduler, "waits") == "a"
            scheduler.step(2.0, [WorkerUp(named("b", 1), ())])
            assert worker_of(scheduler, "waits") == expected


class TestConversations:
    """A client can name the conversation of which a request is a turn."""

    def turn(self, number: int, conversation: bytes = b"one") -> Arrived:
        return arrives(f"r{number}", number, b"", conversation=conversation)

    def after_a_turn(self, *events: Event) -> Scheduler:
        scheduler = shard(4, 4)
        scheduler.step(0.0, [arrives("r0", 0, OTHER), self.turn(1)])
        assert worker_of(scheduler, "r1") == "b"
        scheduler.step(1.0, [report(did("r1", 0, 1, end=End.STOP), worker_id="b"), *events])
        return scheduler

    def test_the_next_turn_goes_to_the_worker_of_the_last_one(self) -> None:
        scheduler = self.after_a_turn(EndRequested("r0", End.CANCELLED, ""))
        scheduler.step(2.0, [self.turn(2), self.turn(3, b"other")])
        assert [worker_of(scheduler, name) for name in ("r2", "r3")] == ["b", "a"]

    def test_what_the_worker_reports_is_known_better(self) -> None:
        """It reports other blocks, so it does not have those of the conversation any more."""
        scheduler = self.after_a_turn(EndRequested("r0", End.CANCELLED, ""), has("b", 3, OTHER))
        scheduler.step(2.0, [self.turn(2)])
        assert worker_of(scheduler, "r2") == "a"

    def test_a_worker_that_is_gone_gets_nothing(self) -> None:
        scheduler = self.after_a_turn(WorkerLost("b"))
        scheduler.step(2.0, [self.turn(2)])
        assert worker_of(scheduler, "r2") == "a"

    def test_the_number_of_conversations_is_bounded(self) -> None:
        caches = Caches({"a": Worker("a")})
        for number in range(MOST_CONVERSATIONS + 5):
            caches.ended(Request(request("r", conversation=b"%d" % number)), "a")
        assert not caches.blocks_of(Request(request("r", conversation=b"4")))
        assert caches.blocks_of(Request(request("r", conversation=b"5")))


def test_placement_can_go_by_load_alone() -> None:
    settings = CoreSettings(reserved_share=False)
    scheduler = Scheduler(policy_named("fcfs", settings), settings, Priors(), router_named("least-loaded"))
    scheduler.step(0.0, [*workers(4, 4), has("b", 20)])
    scheduler.step(0.0, [arrives("r")])
    assert worker_of(scheduler, "r") == "a"
