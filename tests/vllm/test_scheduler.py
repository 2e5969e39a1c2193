"""vLLM's own Scheduler and AsyncScheduler under LAPS-SD, on a virtual clock and without a model."""

from __future__ import annotations

import gc
import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from vllm import PoolingParams, SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

from bench._vllm.in_core import model_output
from laps_sd.contract.length_features import FeatureHash, features_of_tokens, packed
from laps_vllm.prompt_features import PromptWords
from laps_vllm.scheduler import LapsAsyncScheduler, LapsScheduler, LapsSyncScheduler
from scheduler_svc.core.events import RequestFacts
from tests.vllm.virtual import BLOCK, DEMO, MODEL_LENGTH, Job, Server, burst, run

PAIR = AutoTokenizer.from_pretrained(DEMO / "target")
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
OF_VLLM = pytest.mark.parametrize("policy", ["fcfs", "priority"])
"""vLLM's own `--scheduling-policy`, which stays in force for whom it preempts itself."""


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


def test_vllm_finds_it_by_its_short_name() -> None:
    assert resolve_obj_by_qualname("laps_vllm.LapsScheduler") is LapsScheduler


def test_a_data_parallel_rank_keeps_and_reads_a_file_of_its_own_and_has_its_own_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAPS_SD_LEARNT_FILE", str(tmp_path / "learnt.json"))
    for rank, length in ((0, 4), (1, 40)):
        server = laps(rank=rank)
        serve(server, Job(0, 16, length, kind=f"of rank {rank}"))
        assert server.scheduler._publisher.metrics.engine == str(rank)
        server.scheduler.shutdown()

    for rank in (0, 1):
        learnt = laps(rank=rank).scheduler.one_worker.core.priors.to_dict()
        assert list(learnt["classes"]) == [f"of rank {rank}"]


def log_of_a_start(caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    logger = logging.getLogger("vllm.laps_sd")
    logger.addHandler(caplog.handler)
    with caplog.at_level("INFO", logger.name):
        laps(**options)
    logger.removeHandler(caplog.handler)
    return caplog.text


def test_the_log_names_a_setting_that_is_misspelt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LAPS_SD_LEARNT_FIEL", "/tmp/learnt.json")

    assert (
        "LAPS_SD_LEARNT_FIEL is not a setting of LAPS-SD and has no effect; did you mean LAPS_SD_LEARNT_FILE?"
        in log_of_a_start(caplog)
    )


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
def test_a_long_prompt_of_the_best_rank_does_not_stop_those_that_decode(asynchronous: bool) -> None:
    """As in vLLM, it takes of each step's tokens what they leave."""
    server = laps(slots=4, asynchronous=asynchronous)
    server.scheduler.max_num_scheduled_tokens = 64
    decoding = [server.add(Job(0, 8, 300, guess=300)) for _ in range(3)]
    for _ in range(8):
        server.step()
    prompt = server.add(Job(0, 400, 4, priority=-1))
    server.add(Job(0, 8, 300, guess=300))  # it waits
    before, steps = [server.emitted[name] for name in decoding], 0
    while not server.emitted[prompt]:
        server.step()
        steps += 1

    assert steps >= 400 // 64
    assert all(
        server.emitted[name] - emitted >= steps - 1 for name, emitted in zip(decoding, before, strict=True)
    )


@BOTH
def test_the_oldest_request_begins_though_its_prompt_fills_a_step_and_others_always_wait(
    asynchronous: bool,
) -> None:
    """Without chunked prefill a prompt needs room for all of it in a step."""
    server = laps(slots=4, asynchronous=asynchronous, chunked=False)
    rng = random.Random(2)
    longest = server.add(Job(0, MODEL_LENGTH - 5, 5))
    while not server.emitted[longest]:
        while len(server.scheduler.requests) < 12:
            server.add(Job(0, rng.randint(5, 60), rng.randint(10, 60)))
        server.step()
        server.check()
        assert server.steps < 500


@BOTH
@OF_VLLM
def test_with_kv_for_few_requests_paused_ones_are_evicted_and_all_end(
    policy: str, asynchronous: bool
) -> None:
    server = laps(slots=4, residents=16, blocks=45, asynchronous=asynchronous, policy=policy)
    jobs = [
        replace(job, prompt=min(job.prompt, 100), priority=at % 3) for at, job in enumerate(burst(40, seed=5))
    ]

    run(server, jobs, check=True)

    assert server.scheduler.one_worker.paused > 0


@BOTH
def test_with_kv_for_few_requests_vllm_preempts_none_of_a_step_itself(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may grow by the step in flight and by the next one. vLLM preempts without regard to ranks, and our
    metric does not count it.
    """
    server = laps(slots=4, blocks=40, asynchronous=asynchronous)
    preempted: list[str] = []
    preempt = server.scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    monkeypatch.setattr(server.scheduler, "_preempt_request", noted)

    run(server, burst(40, seed=3), check=True)

    assert len(preempted) == server.scheduler.evictions > 0


@BOTH
def test_with_a_watermark_all_end(asynchronous: bool) -> None:
    """vLLM keeps that share of its blocks free when a request joins others, and paused requests hold blocks."""
    server = laps(slots=4, residents=16, blocks=90, asynchronous=asynchronous, watermark=0.6)

    run(server, [replace(job, prompt=min(job.prompt, 100)) for job in burst(40, seed=5)], check=True)


@BOTH
def test_requests_with_one_beginning_run_together_where_its_kv_fits_once(asynchronous: bool) -> None:
    """64 requests of 17 blocks, 15 of which are the same: 1,088 blocks if each counted its own."""
    beginning = tuple(3 + at * 7 % 900 for at in range(15 * BLOCK))
    jobs = [Job(0, 15 * BLOCK + 2, 20, words=beginning) for _ in range(64)]
    server = laps(slots=32, residents=64, blocks=200, asynchronous=asynchronous)
    run(server, jobs, check=True)
    fcfs = Server(None, slots=32, blocks=200, asynchronous=asynchronous)
    run(fcfs, jobs)

    assert max(server.run_sizes) == max(fcfs.run_sizes) == 32
    assert server.steps < 1.3 * fcfs.steps


def test_a_model_that_keeps_no_kv_fills_its_steps() -> None:
    """An encoder whose server returns embeddings. vLLM's pool for it has no block."""
    server = laps(slots=8, residents=16, keeps_kv=False)
    scheduler = server.scheduler
    scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens = 8 * 200
    for number in range(16):
        pooling = PoolingParams(task="embed")
        scheduler.add_request(
            Request(str(number), [3 + number] * 200, None, pooling, block_hasher=server.hasher)
        )
    sizes = []
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        outcome = model_output(names, [])
        outcome.pooler_output = [torch.zeros(1) for _ in names]
        scheduler.update_from_output(output, outcome)
        sizes.append(len(names))

    assert sizes == [8, 8]


@BOTH
@OF_VLLM
def test_a_higher_priority_goes_first(policy: str, asynchronous: bool) -> None:
    """In vLLM the smaller number is the higher priority."""
    server = laps(slots=1, residents=8, asynchronous=asynchronous, policy=policy)
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


class TestAdapters:
    """A step loads `--max-loras` LoRA adapters; vLLM checks that only when it admits a request."""

    def server(self, **options: Any) -> Server:
        server = laps(**options)
        server.scheduler.lora_config = SimpleNamespace(max_loras=1)
        return server

    def add(self, server: Server, job: Job) -> str:
        name = server.add(job)
        server.scheduler.requests[name].lora_request = SimpleNamespace(
            lora_int_id=job.adapter, lora_name=f"a{job.adapter}", lora_path="a"
        )
        return name

    def test_a_step_has_no_more_than_vllm_can_load(self) -> None:
        server = self.server(slots=4, residents=16)
        for at in range(8):
            self.add(server, Job(0, 16, 30 + 5 * at, adapter=1 + at % 2))
        while server.busy:
            server.step()
            server.check()

        assert len(server.ended) == 8

    def test_places_of_requests_whose_adapter_does_not_fit_go_to_others(self) -> None:
        server = self.server(slots=4, residents=32)
        for at in range(24):
            self.add(server, Job(0, 16, 20, adapter=1 + at % 2))
        for _ in range(6):
            server.step()
            server.check()

        assert server.run_sizes[1:] == [4] * 5

    def test_the_oldest_request_has_its_adapter_though_its_rank_is_the_worst(self) -> None:
        server = self.server(slots=2, residents=16)
        oldest = self.add(server, Job(0, 16, 400, guess=400, adapter=2))
        for _ in range(300):
            while sum(job.adapter == 1 for name, job in server.jobs.items() if name not in server.ended) < 8:
                self.add(server, Job(0, 16, 4, guess=4, adapter=1))
            server.step()
            server.check()

        assert server.emitted[oldest] > 100


class TestRequestsThatAreNotReady:
    """Their grammar still compiles: vLLM passes over them."""

    def compiling(self, server: Server, job: Job, name: str = "compiling") -> SimpleNamespace:
        """Add a request whose grammar compiles; set `grammar` of what is returned when it is there."""
        made = SimpleNamespace(grammar=None, reasoning_ended=True)
        made._check_grammar_completion = lambda: made.grammar is not None
        server.add(job, name, structured=made)
        return made

    @pytest.mark.parametrize("which_first", ["compiling", "other"])
    def test_their_place_belongs_to_the_next_one(self, which_first: str) -> None:
        server = laps(slots=1, residents=4)
        if which_first == "other":
            other = server.add(Job(0, 16, 60, guess=60))
            server.step()
            server.step()
            self.compiling(server, Job(0, 16, 4, guess=4))
        else:
            self.compiling(server, Job(0, 16, 4, guess=4))
            other = server.add(Job(0, 16, 60, guess=60))
        before = server.emitted[other]
        for _ in range(12):
            server.step()
            server.check()

        assert server.emitted[other] >= before + 12
        assert server.emitted["compiling"] == 0

    def test_as_many_as_the_core_lists_leave_the_step_to_others(self) -> None:
        server = laps(slots=2, residents=16)
        for number in range(8):
            self.compiling(server, Job(0, 16, 4, guess=4), f"compiling {number}")
        others = [server.add(Job(0, 16, 60, guess=60)) for _ in range(2)]
        for _ in range(12):
            server.step()
            server.check()

        assert all(server.emitted[name] >= 11 for name in others)

    def test_one_that_is_cancelled_leaves_nothing(self) -> None:
        server = laps()
        self.compiling(server, Job(0, 16, 4))
        server.abort("compiling")

        assert not server.scheduler.requests
        assert not server.scheduler._compiling

    def test_they_run_by_their_rank_once_they_are_ready(self) -> None:
        server = laps(slots=1, residents=4)
        long = server.add(Job(0, 16, 300, guess=300))
        made = self.compiling(server, Job(0, 16, 4, guess=4))
        for _ in range(5):
            server.step()
        made.grammar = SimpleNamespace(accept_tokens=lambda *_: True, validate_tokens=lambda tokens: tokens)
        for _ in range(8):
            server.step()

        assert "compiling" in server.ended
        assert long not in server.ended


class TestRequestsThatWaitWithKv:
    """A connector has loaded it, or a session has further input: vLLM keeps these in a queue of its own."""

    def let_it_wait(self, server: Server, name: str) -> None:
        """Let a resident request wait with its KV."""
        scheduler = server.scheduler
        request = scheduler.requests[name]
        scheduler.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.spec_token_ids = []
        scheduler.kv_holding_waiting.add_request(request)

    def test_they_run_by_their_rank(self) -> None:
        server = laps(slots=1, residents=4)
        long = server.add(Job(0, 16, 300, guess=300))
        server.step()
        short = server.add(Job(0, 16, 40, guess=40))
        server.step()
        assert server.emitted[short] > 0
        self.let_it_wait(server, short)
        for _ in range(40):
            server.step()
            server.check()

        assert short in server.ended
        assert long not in server.ended

    def test_one_that_is_not_chosen_takes_no_place_of_one_that_is(self) -> None:
        """vLLM admits them before all others."""
        server = laps(slots=1, residents=8)
        long = server.add(Job(0, 16, 300, guess=300))
        for _ in range(3):
            server.step()
        self.let_it_wait(server, long)
        emitted = server.emitted[long]
        short = server.add(Job(0, 16, 4, guess=4))
        server.step()

        assert server.emitted[short] > 0
        assert server.emitted[long] == emitted

    def test_those_that_a_drain_finds_end(self) -> None:
        server = laps(slots=1, residents=8)
        names = [server.add(Job(0, 16, length, guess=length)) for length in (30, 4)]
        server.step()
        self.let_it_wait(server, next(request.request_id for request in server.scheduler.running))
        server.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        while server.scheduler.has_unfinished_requests():
            server.step()

        assert len(server.ended) == 1
        server.scheduler.set_pause_state(PauseState.UNPAUSED)
        while server.busy:
            server.step()
        assert server.ended.keys() == set(names)

    def test_they_count_among_the_resident_ones(self) -> None:
        """They may join any step that has a place, and then the model runner needs one for each."""
        server = laps(slots=1, residents=2)
        scheduler = server.scheduler
        for length in (300, 40):
            server.add(Job(0, 16, length, guess=length))
            server.step()
        [runs, paused] = scheduler.running
        scheduler.kv_holding_waiting.add_request(scheduler.requests[server.add(Job(0, 16, 5))])

        assert scheduler._make_room([runs], [paused], []) == []
        assert scheduler.running == [runs]


def test_no_request_whose_kv_was_freed_ends_where_a_connector_hands_kv_over_at_the_end() -> None:
    """Its step was in flight when it was evicted. It is computed again, as where vLLM preempts it."""
    server = laps(slots=1, residents=4, asynchronous=True)
    scheduler = server.scheduler
    scheduler.requires_kv_delivery = True
    name = server.add(Job(0, 32, 1))
    server.step()
    scheduler.evict(scheduler.requests[name])
    server.step()
    assert name not in server.ended
    blocks = 0
    while server.busy:
        if name in scheduler.requests:
            blocks = scheduler.held_blocks(scheduler.requests[name])
        server.step()

    assert name in server.ended
    assert blocks >= 2


@pytest.mark.usefixtures("nothing_reserved")
@BOTH
@pytest.mark.parametrize("text", [0, 10])
def test_one_that_waits_for_room_for_its_image_does_not_stop_the_one_that_has_it(
    text: int, asynchronous: bool
) -> None:
    """The images are the same size as the cache of encoded ones. `text`: tokens before an image, which can be computed."""
    server = laps(slots=2, residents=8, asynchronous=asynchronous)
    scheduler = server.scheduler
    scheduler.max_num_scheduled_tokens = 64
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=100)
    scheduler.max_num_encoder_input_tokens = 100

    def add(length: int) -> str:
        name = server.add(Job(0, 120, length, guess=length))
        where = PlaceholderRange(offset=text, length=100)
        scheduler.requests[name].mm_features = [MultiModalFeatureSpec(None, "image", name, where)]
        return name

    add(300)
    server.step()
    for _ in range(2):
        add(4)
    for _ in range(40):
        server.step()
        server.check()

    assert len(server.ended) == 2


class TestSessions:
    """A request whose prompt goes on: at the end of a turn vLLM makes the output a part of the prompt."""

    def session(self, server: Server, *, queued: bool) -> list[int]:
        """Run a session of three turns with 4, 40 and 90 tokens; return the tokens of each reported step."""
        scheduler, limits = server.scheduler, [4, 40, 90]
        server.jobs["session"], server.emitted["session"] = Job(0, 16, 400), 0
        reported: list[int] = []
        report = scheduler.one_worker.report
        scheduler.one_worker.report = lambda steps, *args, **kwargs: (
            reported.extend(step.tokens for step in steps),
            report(steps, *args, **kwargs),
        )

        def go_on() -> None:
            params = SamplingParams(temperature=0, max_tokens=limits.pop(0))
            scheduler.add_request(
                Request("session", [*range(3, 19)], params, None, block_hasher=server.hasher, resumable=True)
            )

        go_on()
        while queued and limits:
            go_on()
        for _ in range(200):
            server.step()
            server.check()
            if scheduler.requests["session"].status is RequestStatus.WAITING_FOR_STREAMING_REQ and limits:
                go_on()
        return reported

    @BOTH
    @pytest.mark.parametrize("slots", [4, 32])
    @pytest.mark.parametrize("queued", [False, True])
    def test_every_turn_runs_to_its_own_limit(self, queued: bool, slots: int, asynchronous: bool) -> None:
        server = laps(slots=slots, residents=64, asynchronous=asynchronous)
        reported = self.session(server, queued=queued)

        request = server.scheduler.requests["session"]
        assert request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        assert request.num_output_tokens == 90
        assert min(reported) >= 0

    def idle(self, server: Server, count: int) -> list[str]:
        """Return sessions whose first turn is over."""
        names = [f"session {number}" for number in range(count)]
        for number, name in enumerate(names):
            server.jobs[name], server.emitted[name] = Job(0, 16, 400), 0
            params = SamplingParams(temperature=0, max_tokens=4)
            prompt = [*range(3 + number, 19 + number)]
            server.scheduler.add_request(
                Request(name, prompt, params, None, block_hasher=server.hasher, resumable=True)
            )
        while server.busy:
            server.step()
            server.check()
        statuses = {server.scheduler.requests[name].status for name in names}
        assert statuses == {RequestStatus.WAITING_FOR_STREAMING_REQ}
        return names

    @BOTH
    def test_sessions_that_wait_for_input_leave_the_step_to_others(self, asynchronous: bool) -> None:
        """Also where they are more than a step and a list of the core have places for."""
        server = laps(slots=2, residents=16, asynchronous=asynchronous)
        self.idle(server, 6)
        names = [server.add(Job(0, 16, 40)) for _ in range(4)]
        before = len(server.run_sizes)
        for _ in range(60):
            server.step()
            server.check()

        assert set(names) <= server.ended.keys()
        assert server.run_sizes[before + 1 : before + 8] == [2] * 7

    @BOTH
    @pytest.mark.parametrize("queued", [False, True])
    def test_the_length_of_each_turn_is_learned(self, queued: bool, asynchronous: bool) -> None:
        server = laps(asynchronous=asynchronous)
        self.session(server, queued=queued)

        assert server.scheduler.one_worker.core.priors.lengths_seen("") == pytest.approx(3, abs=0.01)

    def test_a_session_that_ends_while_it_waits_leaves_nothing(self) -> None:
        server = laps()
        [name] = self.idle(server, 1)
        server.abort(name)
        server.add(Job(0, 16, 4))
        while server.busy:
            server.step()

        worker = server.scheduler.one_worker
        assert not server.scheduler.requests
        assert not (worker._epochs or worker._unfinished or worker.core.queue(server.now_s, 10))


class TestEveryRequestThatVllmTakesRuns:
    """However its pool is counted, vLLM has checked at its start that one request of the longest context fits."""

    @BOTH
    def test_in_a_pool_for_one_context(self, asynchronous: bool) -> None:
        server = laps(blocks=1 + MODEL_LENGTH // BLOCK, asynchronous=asynchronous)

        run(server, [Job(0, 16, 300), Job(0, 200, 40), Job(1, 16, 5)], check=True)

    def test_with_a_limit_above_the_context(self) -> None:
        server = laps()
        server.add(Job(0, 16, 20), max_tokens=MODEL_LENGTH)
        while server.busy:
            server.step()
            server.check()

        assert len(server.ended) == 1


def test_a_stop_string_teaches_a_length_and_a_cancellation_does_not() -> None:
    """The API server finds stop strings, and aborts the request."""
    server = laps()
    seen = server.scheduler.one_worker.core.priors.lengths_seen
    for stop, learned in (([], 0), (["\n"], 1)):
        name = server.add(Job(0, 16, 100), stop=stop, detokenize=True)
        for _ in range(4):
            server.step()
        server.abort(name)
        server.scheduler.one_worker.decide(server.now_s)

        assert seen("") == learned


@BOTH
def test_when_no_request_is_left_the_core_knows_of_every_end(asynchronous: bool) -> None:
    """Steps are merged, and no step follows the last one whose report could bring its ends."""
    server = laps(asynchronous=asynchronous)
    run(server, [Job(0, 16, 20, kind="chat"), Job(0, 16, 9, kind="chat"), Job(1, 16, 5, kind="chat")])

    core = server.scheduler.one_worker.core
    assert core.priors.lengths_seen("chat") == pytest.approx(3, abs=0.01)  # it forgets slowly
    assert sum(core.depth_by_level()) == 0


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
    assert not server.scheduler._known
    assert not worker.judged, "each is counted once"
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
    """Where vLLM runs without the tokenizer."""

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
        ("setting", "tokenizer", "said"),
        [
            ("on", False, "predicted from the token ids of prompts"),
            ("on", True, "predicted from the words of prompts"),
            ("off", True, "not predicted"),
        ],
    )
    def test_the_log_says_whether_they_are_and_from_what(
        self,
        setting: str,
        tokenizer: bool,
        said: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("LAPS_SD_PREDICT_LENGTHS", setting)

        assert f"lengths are {said};" in log_of_a_start(caplog, tokenizer=tokenizer)

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


QUESTION = "Answer in one word: is water wet?"
ESSAY = "Write a long and detailed essay about the history of Rome."


def words(text: str) -> Job:
    """Return a request with this prompt; what it brings forth is of equal length for all of them."""
    ids = tuple(PAIR(text, add_special_tokens=False).input_ids)
    return Job(0, len(ids), 20, words=ids)


def texts_as_they_start(server: Server) -> list[str]:
    """Return the texts of prompts in the order in which they start; the one that promises a long output arrives first."""
    texts = {server.add(words(text)): text for text in (ESSAY, QUESTION)}
    started: dict[str, None] = {}
    while server.busy:
        server.step()
        started |= {name: None for name in texts if server.emitted[name]}
    return [texts[name] for name in started]


@pytest.mark.usefixtures("nothing_reserved")
class TestLengthsArePredictedFromWords:
    """Where vLLM has the tokenizer, which it has by default."""

    @BOTH
    def test_from_the_first_request_on(self, asynchronous: bool) -> None:
        server = laps(slots=1, residents=8, tokenizer=True, asynchronous=asynchronous)
        assert texts_as_they_start(server) == [QUESTION, ESSAY]

    def test_token_ids_say_nothing_before_any_request_has_ended(self) -> None:
        """So the order above comes from the start weights."""
        assert texts_as_they_start(laps(slots=1, residents=8)) == [ESSAY, QUESTION]

    def test_only_a_limit_that_the_client_set_counts(self) -> None:
        server = laps(tokenizer=True)
        unlimited, limited = (
            server.scheduler._length_features(server.scheduler.requests[server.add(words(QUESTION), **sampling)])
            for sampling in ({}, {"max_tokens": 9})
        )  # fmt: skip

        assert unlimited == packed(FeatureHash().features_of(QUESTION))
        assert limited == packed(FeatureHash().features_of(QUESTION, ["most 4"]))

    def test_a_prompt_that_the_tokenizer_fails_over_runs_without_a_prediction(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = laps(tokenizer=True)
        features = server.scheduler._features
        assert isinstance(features, PromptWords)
        monkeypatch.setattr(features, "_text", Mock(side_effect=OverflowError("out of range")))
        name = server.add(words(QUESTION))

        assert server.scheduler._length_features(server.scheduler.requests[name]) == b""
        while server.busy:
            server.step()
        assert name in server.ended

    def test_what_was_learnt_survives_a_restart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LAPS_SD_LEARNT_FILE", str(tmp_path / "learnt.json"))
        server = laps(tokenizer=True)
        for _ in range(20):
            serve(server, words(QUESTION))
        server.scheduler.shutdown()

        assert laps(tokenizer=True).scheduler.one_worker.core.priors.prompts.learned == 20
        assert laps().scheduler.one_worker.core.priors.prompts.learned == 0


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
