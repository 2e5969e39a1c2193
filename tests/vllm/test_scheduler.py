"""vLLM's own Scheduler and AsyncScheduler under LAPS-SD, on a virtual clock and without a model."""

from __future__ import annotations

import gc
import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

from laps_sd.contract.length_features import features_of_tokens, packed
from laps_vllm.scheduler import LapsAsyncScheduler, LapsScheduler, LapsSyncScheduler
from scheduler_svc.core.events import RequestFacts
from tests.vllm.virtual import Job, Server, burst, run

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def laps(**options: Any) -> Server:
    return Server(LapsScheduler, **({"slots": 4, "residents": 32} | options))


@BOTH
def test_a_burst_ends_sooner_on_average_than_first_come_first_served(asynchronous: bool) -> None:
    jobs = [replace(job, kind="", guess=None) for job in burst(60, seed=3)]
    classes = burst(60, seed=3)
    fcfs = run(Server(None, asynchronous=asynchronous), jobs)

    without = run(laps(asynchronous=asynchronous), jobs, check=True)
    with_class = run(laps(asynchronous=asynchronous), [replace(job, guess=None) for job in classes])
    with_guess = run(laps(asynchronous=asynchronous), classes)

    assert without.mean_s < 0.85 * fcfs.mean_s
    assert with_class.mean_s < 0.80 * fcfs.mean_s
    assert with_guess.mean_s < 0.65 * fcfs.mean_s


@BOTH
def test_the_class_follows_async_scheduling(asynchronous: bool) -> None:
    expected = LapsAsyncScheduler if asynchronous else LapsSyncScheduler

    assert type(laps(asynchronous=asynchronous).scheduler) is expected


@BOTH
def test_a_short_request_pauses_a_long_one_which_keeps_its_kv(asynchronous: bool) -> None:
    server = laps(slots=1, residents=4, asynchronous=asynchronous)
    long = server.add(Job(0, 32, 300, kind="story", guess=300))
    for _ in range(20):
        server.step()
    short = server.add(Job(0, 16, 4, kind="short", guess=4))
    blocks = server.scheduler.held_blocks(server.scheduler.requests[long])
    while short not in server.ended:
        server.step()
        server.check()
        if short in server.scheduler.requests:
            assert server.scheduler.held_blocks(server.scheduler.requests[long]) >= blocks
    assert long not in server.ended
    while server.busy:
        server.step()

    assert server.emitted == {long: 300, short: 4}
    assert server.scheduler.evictions == 0
    assert server.scheduler.one_worker.paused >= 1


@BOTH
def test_with_kv_for_few_requests_paused_ones_are_evicted_and_all_end(asynchronous: bool) -> None:
    server = laps(slots=4, residents=16, blocks=45, asynchronous=asynchronous)
    jobs = [replace(job, prompt=min(job.prompt, 100)) for job in burst(40, seed=5)]

    run(server, jobs, check=True)

    assert server.scheduler.one_worker.paused > 0


@BOTH
def test_a_higher_priority_goes_first(asynchronous: bool) -> None:
    """In vLLM the smaller number is the higher priority."""
    server = laps(slots=1, residents=8, asynchronous=asynchronous)
    low = server.add(Job(0, 16, 40, priority=5))
    high = server.add(Job(0, 16, 200, priority=0))
    while server.busy:
        server.step()

    assert server.ended[high] < server.ended[low]


@pytest.mark.parametrize(
    "policy", ["fcfs", "las", "mlfq", "srpt-length", "sjf-length", "sd-index", "laps-sd-paper"]
)
def test_every_policy_runs_by_its_name(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPS_SD_POLICY", policy)

    run(laps(), burst(20, seed=1), check=True)


def test_the_policy_fcfs_serves_in_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPS_SD_POLICY", "fcfs")
    server = laps(slots=1)
    names = [server.add(Job(0, 16, length)) for length in (50, 5, 20)]
    while server.busy:
        server.step()

    assert sorted(names, key=lambda name: server.ended[name]) == names


def test_a_step_has_no_more_adapters_than_vllm_can_load() -> None:
    """vLLM asserts this for running requests, and checks it only when it admits one."""
    server = laps(slots=4, residents=16)
    server.scheduler.lora_config = SimpleNamespace(max_loras=1)
    for at in range(8):
        name = server.add(Job(0, 16, 30 + 5 * at))
        server.scheduler.requests[name].lora_request = SimpleNamespace(
            lora_int_id=1 + at % 2, lora_name=f"a{at % 2}", lora_path="a"
        )
    while server.busy:
        server.step()
        server.check()

    assert len(server.ended) == 8


def test_the_place_of_a_request_that_is_not_ready_goes_to_the_next_one() -> None:
    """Its grammar still compiles: vLLM passes over it."""
    server = laps(slots=1, residents=4)
    blocked = server.add(Job(0, 16, 4, guess=4))
    request = server.scheduler.requests[blocked]
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.structured_output_request = SimpleNamespace(grammar=None, _check_grammar_completion=lambda: False)
    other = server.add(Job(0, 16, 30, guess=30))
    for _ in range(12):
        server.step()

    assert server.emitted[other] > 0
    assert server.emitted[blocked] == 0


@pytest.mark.parametrize("paused", [False, True])
def test_a_cancelled_request_leaves_nothing(paused: bool) -> None:
    server = laps(slots=1, residents=4)
    first = server.add(Job(0, 32, 300, guess=300))
    for _ in range(5):
        server.step()
    if paused:
        server.add(Job(0, 16, 200, guess=2))
        server.step()
    server.abort(first)
    while server.busy:
        server.step()
        server.check()

    worker = server.scheduler.one_worker
    assert not server.scheduler.requests
    assert not worker.core.queue(server.now_s, 10)
    assert not worker._epochs
    pool = server.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == server.scheduler.pool_blocks


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    slots=st.integers(1, 6),
    spare=st.integers(0, 12),
    blocks=st.integers(40, 200),
    asynchronous=st.booleans(),
)
def test_any_load_ends_whole_and_the_core_agrees_after_each_step(
    seed: int, slots: int, spare: int, blocks: int, asynchronous: bool
) -> None:
    """Arrivals, cancellations, pauses and evictions at random, some thousand steps in all."""
    server = laps(slots=slots, residents=slots + spare, blocks=blocks, asynchronous=asynchronous, seed=seed)
    rng = random.Random(seed)
    jobs = [replace(job, prompt=min(job.prompt, 120), length=min(job.length, 200)) for job in burst(25, seed)]
    alive: list[str] = []
    while jobs or server.busy:
        if jobs and rng.random() < 0.2:
            alive.append(server.add(jobs.pop()))
        if alive and rng.random() < 0.01:
            server.abort(alive.pop(rng.randrange(len(alive))))
        server.step()
        server.check()

    assert server.ended.keys() == server.jobs.keys()
    assert not server.scheduler.requests
    assert not server.scheduler.one_worker.core.queue(server.now_s, 10)


SHORT, LONG = (901, 902), (903, 904)
"""Words of prompts that get short and long answers."""


def asked(words: tuple[int, ...], prompt: int = 24) -> Job:
    return Job(0, prompt, 200 if words == LONG else 8, words=words)


def serve(server: Server, job: Job) -> None:
    """Answer one request alone."""
    server.add(job)
    while server.busy:
        server.step()


def taught(*, says_something: bool = True, asynchronous: bool = False) -> Server:
    """Return a server that has answered prompts of both kinds in turn, without any hint."""
    server = laps(slots=1, residents=8, asynchronous=asynchronous)
    for _ in range(20):
        for words in (LONG, SHORT):
            serve(server, replace(asked(words), words=words if says_something else ()))
    return server


def order_of_starts(server: Server) -> list[tuple[int, ...]]:
    """Return the words of prompts in the order in which they start; the long ones arrive first."""
    names = [server.add(asked(words)) for words in (LONG, LONG, LONG, SHORT, SHORT, SHORT)]
    started: dict[str, None] = {}
    while server.busy:
        server.step()
        started |= {name: None for name in names if server.emitted[name]}
    return [server.jobs[name].words for name in started]


SHORT_FIRST = [SHORT] * 3 + [LONG] * 3
AS_THEY_CAME = [LONG] * 3 + [SHORT] * 3


@pytest.fixture
def nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the place that belongs to the oldest request to the best one."""
    monkeypatch.setenv("LAPS_SD_RESERVED_SHARE", "off")


@pytest.mark.usefixtures("nothing_reserved")
class TestLengthsArePredictedFromTokenIds:
    @BOTH
    def test_requests_that_will_be_short_go_first_without_a_hint(self, asynchronous: bool) -> None:
        assert order_of_starts(taught(asynchronous=asynchronous)) == SHORT_FIRST

    def test_prompts_that_said_nothing_leave_the_order(self) -> None:
        """So the order above comes from the prompts."""
        assert order_of_starts(taught(says_something=False)) == AS_THEY_CAME

    def test_switched_off_nothing_is_learned_or_predicted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LAPS_SD_PREDICT_LENGTHS", "off")
        server = taught()

        assert server.scheduler.one_worker.core.priors.prompts.learned == 0
        assert order_of_starts(server) == AS_THEY_CAME

    @pytest.mark.parametrize(
        ("setting", "said"), [("on", "predicted from prompts"), ("off", "not predicted")]
    )
    def test_the_log_says_whether_they_are(
        self, setting: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("LAPS_SD_PREDICT_LENGTHS", setting)
        logger = logging.getLogger("vllm.laps_sd")
        logger.addHandler(caplog.handler)
        with caplog.at_level("INFO", logger.name):
            laps()
        logger.removeHandler(caplog.handler)

        assert f"lengths are {said}," in caplog.text

    def test_what_was_learnt_survives_a_restart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LAPS_SD_LEARNT_FILE", str(tmp_path / "learnt.json"))
        taught().scheduler.shutdown()

        assert order_of_starts(laps(slots=1, residents=8)) == SHORT_FIRST

    def test_a_long_prompt_is_read_at_its_two_ends(self) -> None:
        server = laps()
        request = server.scheduler.requests[server.add(asked(LONG, prompt=400))]
        ids = request.prompt_token_ids
        ends = packed(features_of_tokens([*ids[:60], *ids[-60:]]))

        assert server.scheduler._length_features(request) == ends
        request.prompt_token_ids = ConstantList(ids)  # vLLM's own type for lists of token ids
        assert server.scheduler._length_features(request) == ends

    def test_a_prompt_of_embeddings_has_no_prediction_and_runs(self) -> None:
        server = taught()
        request = Request(
            "embeddings",
            None,
            SamplingParams(temperature=0, max_tokens=8),
            None,
            prompt_embeds=torch.zeros(16, 8),
            block_hasher=server.hasher,
        )
        server.jobs["embeddings"], server.emitted["embeddings"] = Job(0, 16, 8), 0
        server.scheduler.add_request(request)
        while server.busy:
            server.step()

        assert "embeddings" in server.ended

    def test_nothing_of_a_prompt_is_kept_after_the_end(self) -> None:
        server = taught()
        own = server.add(replace(asked(SHORT), words=(905, 906, 907)))
        features = server.scheduler._length_features(server.scheduler.requests[own])
        server.step()
        while_it_runs = kept_facts(features)
        while server.busy:
            server.step()

        assert while_it_runs == [own]
        assert kept_facts(features) == []


def kept_facts(features: bytes) -> list[str]:
    """Return the requests with these features whose facts are anywhere in the memory of the process."""
    gc.collect()
    every = gc.get_objects()
    return [one.request_id for one in every if type(one) is RequestFacts and one.length_features == features]


def test_a_full_step_is_joined_by_several_at_a_time() -> None:
    """A prompt makes a step longer for all of its requests. 1 of 32 places is filled after 4 steps, 2 at once."""
    server = laps(slots=32, residents=64)
    names = [server.add(Job(0, 8, 300)) for _ in range(40)]
    server.step()
    assert server.run_sizes == [32]
    running = [request.request_id for request in server.scheduler.running]

    server.abort(running[0])
    for _ in range(6):
        server.step()
    assert server.run_sizes[1:] == [31, 31, 31, 31, 32, 32]

    server.abort(running[1])
    server.abort(running[2])
    server.step()
    assert server.run_sizes[-1] == 32

    for name in [*names[32:], *running[3:8]]:
        server.abort(name)
    before = len(server.scheduler.running)
    server.add(Job(0, 8, 300))
    server.step()
    assert before < 31, "the step is not full"
    assert server.run_sizes[-1] == before + 1


def test_a_small_step_is_joined_at_once() -> None:
    server = laps(slots=8, residents=32)
    for _ in range(12):
        server.add(Job(0, 8, 300))
    server.step()
    server.abort(server.scheduler.running[0].request_id)
    server.step()

    assert server.run_sizes == [8, 8]


@BOTH
def test_all_is_well_where_requests_join_together(asynchronous: bool) -> None:
    jobs = burst(200, seed=4)
    server = laps(slots=32, residents=64, blocks=600, asynchronous=asynchronous)
    outcome = run(server, jobs, check=True)

    assert len(outcome.latency_s) == 200
    assert server.scheduler.one_worker.paused > 0
