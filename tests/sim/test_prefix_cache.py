"""Prefix caches of virtual workers, and the workloads and routers that they serve to compare."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from bench._policy.regime import read_regime
from bench._policy.run import found_by_one
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks, numbers_of
from scheduler_svc.core.placement.routing import Router
from scheduler_svc.core.policies import Policy, policy_named
from scheduler_svc.core.settings import CoreSettings
from simulator.cluster import Cluster
from simulator.draw import draw
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.outcome import Outcome
from simulator.prefix_cache import PrefixCache
from simulator.routers import ROUTERS
from simulator.traces import read_trace
from simulator.workload import Conversations, Kind, Lengths, Workload

MACHINE = Machine(slots=4, kv_tokens=40_000, prefill_chunk=512)
SHARED = name_blocks([1] * (30 * BLOCK_TOKENS))


def laps_sd(_: object, settings: CoreSettings) -> Policy:
    return policy_named("laps-sd", settings)


def job(number: int, arrival_s: float = 0.0, blocks: bytes = b"", **more: object) -> Job:
    given: dict[str, object] = {"prompt_tokens": 32 * BLOCK_TOKENS, "max_tokens": 100, **more}
    return Job(f"r{number}", arrival_s, paces=bytes([3] * 8), blocks=blocks, **given)  # type: ignore[arg-type]


def run(
    jobs: list[Job], workers: int = 1, machine: Machine = MACHINE, router: Router | None = None
) -> Outcome:
    return Cluster(
        jobs,
        machine,
        workers,
        laps_sd,
        check=True,
        router=router,
    ).run()


class TestCache:
    def test_the_end_of_the_least_recently_used_prompt_goes_first(self) -> None:
        cache = PrefixCache()
        for names in ([1, 2, 3], [4, 5, 6]):
            cache.use(names)
            cache.leave(names)
        cache.evict(2)
        assert cache.find([1, 2, 3], 3) == 1
        assert cache.find([4, 5, 6], 3) == 3
        assert cache.changes() == ((1, 4, 5, 6), ())
        cache.evict(1)
        assert cache.changes() == ((), (1,))

    def test_blocks_in_use_are_not_idle(self) -> None:
        cache = PrefixCache()
        cache.use([1, 2])
        cache.use([1])
        cache.leave([1, 2])
        assert list(cache.idle) == [2]
        assert cache.used == {1: 1}


class TestWorker:
    def test_a_prompt_that_begins_like_one_before_is_computed_from_there_on(self) -> None:
        outcome = run([job(1, blocks=SHARED), job(2, 100.0, blocks=SHARED)])
        assert outcome.prefilled_tokens == (32 + 2) * BLOCK_TOKENS
        assert outcome.found_tokens == 30 * BLOCK_TOKENS

    def test_without_names_nothing_is_found(self) -> None:
        assert run([job(1), job(2, 100.0)]).found_tokens == 0

    def test_what_the_cache_lost_is_computed_again(self) -> None:
        """The context of the second request needs the whole memory."""
        small = replace(MACHINE, kv_tokens=40 * BLOCK_TOKENS)
        other = name_blocks([2] * (30 * BLOCK_TOKENS))
        outcome = run(
            [job(1, blocks=SHARED), job(2, 100.0, blocks=other), job(3, 200.0, blocks=SHARED)], machine=small
        )
        assert outcome.found_tokens < 10 * BLOCK_TOKENS

    @pytest.mark.parametrize("host_memory", [False, True])
    def test_requests_with_one_beginning_run_together_where_its_kv_fits_once(self, host_memory: bool) -> None:
        """The memory holds one context and 8 blocks more. Requests that wait for room for all of their context run
        one after another.
        """
        small = replace(MACHINE, slots=16, kv_tokens=40 * BLOCK_TOKENS, host_memory=host_memory)
        jobs = [job(number, blocks=SHARED) for number in range(20)]
        last_s = max(fate.finished_s or 0.0 for fate in run(jobs, machine=small).fates)
        [alone] = run(jobs[:1], machine=small).fates
        assert last_s < len(jobs) * (alone.finished_s or 0.0) / 3

    def test_changes_that_are_reported_are_what_the_cache_holds(self) -> None:
        cluster = Cluster(
            [job(number, number * 0.1, name_blocks([number % 3] * 1800)) for number in range(20)],
            replace(MACHINE, kv_tokens=8_000),
            1,
            laps_sd,
        )
        outcome = cluster.run()
        cache = cluster._workers["w0"].cache
        held = {*cache.used, *cache.idle}
        blocks = cluster.scheduler._shard.caches.blocks
        assert blocks.blocks_of("w0") == len(held)
        assert outcome.found_tokens > 0
        found = cluster.scheduler.found_tokens.take()
        assert found["expected"] + found["unexpected"] == outcome.found_tokens


class TestConversations:
    KINDS = (Kind(prompt=Lengths(median=100.0), output=Lengths(median=50.0)),)

    def jobs(self, **more: object) -> list[Job]:
        conversations = Conversations(turns=4.0, think_s=5.0, **more)  # type: ignore[arg-type]
        workload = Workload(requests=60, kinds=self.KINDS, conversations=conversations)
        return draw(workload, MACHINE, 1, 1, None)[0]

    def test_a_turn_begins_with_all_turns_before_it(self) -> None:
        turns = [(one, two) for one, two in pairwise(self.jobs()) if two.after]
        assert turns
        for one, two in turns:
            assert two.after == one.request_id
            assert two.prompt_tokens > one.prompt_tokens + one.output_tokens
            assert two.blocks.startswith(one.blocks)

    def test_instructions_are_shared_and_the_rest_is_not(self) -> None:
        shared = Lengths(kind="constant", value=640)
        firsts = [job for job in self.jobs(kinds=1, instructions=shared) if not job.after]
        one, two = (list(numbers_of(job.blocks)) for job in firsts[:2])
        assert one[:10] == two[:10]
        assert not set(one[10:]) & set(two[10:])

    def test_a_turn_arrives_after_the_one_before_has_ended(self) -> None:
        outcome = run(self.jobs(), workers=2)
        fates = {fate.job.request_id: fate for fate in outcome.fates}
        for fate in outcome.fates:
            if fate.job.after:
                assert fate.arrival_s == fates[fate.job.after].finished_s + fate.job.arrival_s
        assert outcome.found_tokens > 0


def test_equal_ids_of_a_recorded_trace_are_equal_beginnings(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 8]}\n'
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}\n'
    )
    one, two = (list(numbers_of(row.blocks)) for row in read_trace(trace))
    assert (len(one), len(two)) == (15, 9)
    assert one[:8] == two[:8]
    assert one[8] != two[8]


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_serves_every_request(name: str) -> None:
    jobs = [job(number, number * 0.2, name_blocks([number % 3] * 1800)) for number in range(30)]
    outcome = run(jobs, workers=3, router=ROUTERS[name]())
    assert all(fate.finished_s for fate in outcome.fates)


def test_a_router_that_knows_caches_finds_more() -> None:
    jobs = [job(number, number * 1.0, name_blocks([number % 3] * 1800)) for number in range(40)]
    blind, ours = (run(jobs, 4, router=ROUTERS[name]()) for name in ("round-robin", "soonest-done"))
    assert ours.found_tokens > 1.2 * blind.found_tokens


def test_one_cache_for_all_is_the_measure_of_hits() -> None:
    jobs = [job(number, blocks=SHARED) for number in range(3)]
    assert found_by_one(jobs, None) == 2 * 30 * BLOCK_TOKENS
    assert found_by_one(jobs, 10) == 2 * 10 * BLOCK_TOKENS


@pytest.mark.parametrize("name", ["mooncake", "mooncake-calm", "chat", "instructions", "agents", "nothing"])
def test_a_regime_compares_with_the_least_loaded_worker(name: str) -> None:
    regime = read_regime(Path(__file__).parents[2] / f"bench/regimes/cache-{name}.toml")
    assert {"mean_s", "p99_s"} <= {expected.figure for expected in regime.expect}
    assert "laps-sd:router=least-loaded" in regime.runs
