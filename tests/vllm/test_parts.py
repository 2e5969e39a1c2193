"""The parts of the scheduler inside vLLM that need no vLLM."""

from __future__ import annotations

import ast
import base64
import json
import math
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, write_to_textfile

from laps_sd.contract.ends import End
from laps_sd.contract.length_features import features_of_tokens, packed
from laps_sd.service.config import ConfigError, load
from laps_vllm import known_faults
from laps_vllm.hints import MAX_CLASS_CHARACTERS, hints_of
from laps_vllm.learnt_file import MAX_FILE_BYTES, LearntFile
from laps_vllm.merged_steps import MergedSteps, Step
from laps_vllm.metrics import Metrics
from laps_vllm.metrics_page import EngineFiles, file_of
from laps_vllm.one_worker import MOST_REPORT_STEPS, OneWorker, RequestNow
from laps_vllm.prompt_features import PromptTokens
from laps_vllm.settings import VllmSettings
from laps_vllm.versions import SUPPORTED, USED, VersionError, check_names, check_version
from scheduler_svc.core.estimates import priors as priors_module
from scheduler_svc.core.estimates.errors import Moment
from scheduler_svc.core.estimates.priors import FORMAT, Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import RequestFacts, WorkerFacts
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler as Core
from scheduler_svc.core.settings import CoreSettings

ROOT = Path(__file__).parents[2]


class TestHints:
    def test_both_are_read(self) -> None:
        hints = hints_of({"workload_class": "chat", "expected_output_tokens": 40, "other": object()})

        assert hints == ("chat", 40, ())

    def test_none_are_given(self) -> None:
        assert hints_of(None) == hints_of({}) == ("", None, ())

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("workload_class", "x" * (MAX_CLASS_CHARACTERS + 1)),
            ("workload_class", 7),
            ("expected_output_tokens", 0),
            ("expected_output_tokens", -5),
            ("expected_output_tokens", 2**31),
            ("expected_output_tokens", "40"),
            ("expected_output_tokens", 40.5),
            ("expected_output_tokens", True),
        ],
    )
    def test_one_out_of_bounds_is_ignored_and_named(self, name: str, value: Any) -> None:
        hints = hints_of({name: value})

        assert hints == ("", None, (name,))


def worker(slots: int = 1, blocks: int = 1000) -> OneWorker:
    settings = CoreSettings()
    core = Core(policy_named("laps-sd", settings), settings, Priors())
    return OneWorker(core, WorkerFacts("w", slots, blocks, 0, 16, 4096, 4), growth_tokens=9)


def facts(name: str, sequence: int, guess: int) -> RequestFacts:
    return RequestFacts(name, sequence, 0.0, "", 0, "", 16, 400, guess)


class TestOneWorker:
    def test_a_shorter_request_pauses_the_longer_one(self) -> None:
        one = worker()
        now = {"long": RequestNow(16, 0), "short": RequestNow(16, 0)}
        one.arrived(facts("long", 1, 400))
        assert one.choose(0.0, now.get).run == ("long",)
        now["long"] = RequestNow(20, 2)
        one.report([Step("long", 0, 4, 4, 3, 0, None)], {"long"}, decode_s=0.02, prefill_s=0.0, free_blocks=9)
        one.arrived(facts("short", 2, 2))

        assert one.choose(0.1, now.get).run == ("short",)
        assert one.paused == 1

    def test_a_request_that_ended_between_steps_is_not_chosen_and_is_no_pause(self) -> None:
        one = worker()
        now = {"a": RequestNow(16, 1)}
        one.arrived(facts("a", 1, 10))
        one.choose(0.0, now.get)
        one.ended("a", End.CANCELLED)
        del now["a"]

        assert one.choose(0.1, now.get).run == ()
        assert one.paused == 0
        assert not one.core.queue(0.1, 10)

    def test_only_requests_that_the_core_has_listed_can_be_chosen(self) -> None:
        """It takes requests off a list without sending a new one."""
        rng = random.Random(4)
        one, now = worker(), dict[str, RequestNow]()
        for at in range(200):
            if rng.random() < 0.3:
                now[f"r{at}"] = RequestNow(16, 0)
                one.arrived(facts(f"r{at}", at, rng.choice((4, 40, 400))))
            run = one.choose(at / 10, now.get).run
            on_list = {each.request_id for each in one.core.queue(0.0, 100) if each.worker_id}
            assert set(one.ranked(now.get)) <= on_list
            step(one, now, run, ended=run[0] if run and rng.random() < 0.1 else "")

    def test_an_eviction_by_the_engine_is_known_with_the_next_report(self) -> None:
        one = worker(slots=2)
        now = {"a": RequestNow(16, 1)}
        one.arrived(facts("a", 1, 100))
        one.choose(0.0, now.get)
        one.report([Step("a", 0, 4, 0, 0, 16, None)], {"a"}, decode_s=0.02, prefill_s=0.1, free_blocks=9)
        one.decide(0.1)
        running = one.core.explain("a", 0.1)
        one.report([], set(), decode_s=0.02, prefill_s=0.0, free_blocks=10)
        one.decide(0.2)
        evicted = one.core.explain("a", 0.2)

        assert running is not None
        assert evicted is not None
        assert (running.state.value, evicted.state.value) == ("running", "listed")

    def test_what_is_judged_in_one_decision_outlasts_the_next(self) -> None:
        one = worker(slots=2)
        now = {"a": RequestNow(16, 1), "b": RequestNow(16, 1)}
        for number, name in enumerate(now):
            one.arrived(facts(name, number, 100))
        step(one, now, one.choose(0.0, now.get).run, ended="a")
        step(one, now, one.choose(0.1, now.get).run, ended="b")
        one.decide(0.2)

        assert [each.moment for each in one.judged].count(Moment.ARRIVAL) == 2


def many(slots: int = 32, waiting: int = 8, blocks: int = 10_000) -> tuple[OneWorker, dict[str, RequestNow]]:
    """Return a worker whose slots are all in use, with others that wait."""
    one = worker(slots, blocks)
    now = {f"r{number:02}": RequestNow(16, 0) for number in range(slots + waiting)}
    for number, name in enumerate(now):
        one.arrived(facts(name, number, 100))
    return one, now


def step(
    one: OneWorker, now: dict[str, RequestNow], run: Sequence[str], ended: str = "", free: int = 9000
) -> None:
    """Let the requests of a step gain a token each."""
    steps = []
    for name in run:
        emitted = now[name].tokens - 16
        steps.append(Step(name, emitted, 1, 0, 0, 0, End.STOP if name == ended else None))
        now[name] = RequestNow(now[name].tokens + 1, 2)
    now.pop(ended, None)
    on_device = {name for name, state in now.items() if state.blocks}
    one.report(steps, on_device, decode_s=0.02, prefill_s=0.0, free_blocks=free)


def emitted(one: OneWorker, name: str) -> int | None:
    found = one.core.explain(name, 0.0)
    return None if found is None else found.emitted


class TestStepsAreMerged:
    def test_a_full_worker_reports_four_steps_at_once(self) -> None:
        one, now = many()
        known = []
        for _ in range(2 * MOST_REPORT_STEPS):
            run = one.choose(0.0, now.get).run
            known.append(emitted(one, run[0]))
            step(one, now, run)

        assert len(run) == 32
        assert known == [0] * MOST_REPORT_STEPS + [MOST_REPORT_STEPS] * MOST_REPORT_STEPS

    @pytest.mark.parametrize("slots", [1, 8])
    def test_where_all_fit_in_a_step_four_are_reported_at_once_with_few_slots_too(self, slots: int) -> None:
        one, now = many(slots, waiting=0)
        known = []
        for _ in range(2 * MOST_REPORT_STEPS):
            run = one.choose(0.0, now.get).run
            known.append(emitted(one, run[0]))
            step(one, now, run)

        assert known == [0] * MOST_REPORT_STEPS + [MOST_REPORT_STEPS] * MOST_REPORT_STEPS

    def test_one_more_than_fit_in_a_step_lets_the_core_decide_by_the_newest_step(self) -> None:
        one, now = many(slots=8, waiting=0)
        step(one, now, one.choose(0.0, now.get).run)
        now["another"] = RequestNow(16, 0)
        one.arrived(facts("another", 9, 100))
        run = one.choose(0.0, now.get).run

        assert emitted(one, run[0]) == 1

    def test_a_worker_with_few_slots_reports_each_step(self) -> None:
        one, now = many(slots=8)
        run = one.choose(0.0, now.get).run
        step(one, now, run)
        one.choose(0.0, now.get)

        assert emitted(one, run[0]) == 1

    def test_the_place_of_one_that_ended_is_taken_in_the_next_step(self) -> None:
        one, now = many()
        before = one.choose(0.0, now.get).run
        step(one, now, before, ended=before[3])
        after = one.choose(0.0, now.get).run

        assert emitted(one, before[0]) == 0, "the core does not know of the step"
        assert len(after) == 32
        assert set(before) - set(after) == {before[3]}

    def test_the_place_of_one_that_was_cancelled_is_taken_in_the_next_step(self) -> None:
        one, now = many()
        step(one, now, one.choose(0.0, now.get).run)
        before = one.choose(0.0, now.get).run
        one.ended(before[3], End.CANCELLED)
        del now[before[3]]
        after = one.choose(0.0, now.get).run

        assert len(after) == 32
        assert set(before) - set(after) == {before[3]}

    def test_all_steps_before_a_stop_string_count_where_the_length_is_learned(self) -> None:
        def learned(*, reported: bool) -> dict[str, Any]:
            one, now = many()
            for _ in range(MOST_REPORT_STEPS - 1):
                run = one.choose(0.0, now.get).run
                step(one, now, run)
            if reported:
                one.decide(0.0)
            one.ended(run[0], End.STOP_SEQUENCE)
            one.decide(0.0)
            return one.core.priors.to_dict()

        assert learned(reported=False) == learned(reported=True)

    @pytest.mark.parametrize("slots", [1, 8, 32])
    def test_nothing_is_kept_of_requests_that_have_ended(self, slots: int) -> None:
        one, now = many(slots)
        while now:
            run = one.choose(0.0, now.get).run
            step(one, now, run, ended=run[-1])
            if run[0] in now:
                one.ended(run[0], End.CANCELLED)
                del now[run[0]]
        one.report([], set(), decode_s=0.0, prefill_s=0.0, free_blocks=9000)
        one.decide(0.0)

        assert not one.core.queue(0.0, 10)
        assert not (one._epochs or one._unfinished or one._on_device or one._events)

    @pytest.mark.parametrize("ends", [True, False], ids=["just freed", "free before"])
    def test_an_arrival_takes_a_free_place_at_once(self, ends: bool) -> None:
        one, now = many(waiting=0 if ends else -1)
        run = one.choose(0.0, now.get).run
        step(one, now, run, ended=run[0] if ends else "")
        now["new"] = RequestNow(16, 0)
        one.arrived(facts("new", 99, 100))

        assert "new" in one.choose(0.0, now.get).run

    def test_an_arrival_waits_for_the_report_while_all_places_are_taken(self) -> None:
        one, now = many()
        run = one.choose(0.0, now.get).run
        now["new"] = RequestNow(16, 0)
        one.arrived(facts("new", 99, 100))
        known = []
        for _ in range(MOST_REPORT_STEPS):
            step(one, now, run)
            run = one.choose(0.0, now.get).run
            known.append(emitted(one, "new") is not None)

        assert known == [False] * (MOST_REPORT_STEPS - 1) + [True]

    def test_a_request_that_leaves_the_step_unfinished_ends_the_merging(self) -> None:
        merged = MergedSteps()
        merged.add(
            [Step("a", 0, 1, 0, 0, 0, None), Step("b", 0, 1, 0, 0, 0, End.STOP)], decode_s=1, prefill_s=0
        )

        assert merged.can_take([Step("a", 1, 1, 0, 0, 0, None)]), "b has ended"
        assert merged.can_take([Step("a", 1, 1, 0, 0, 0, None), Step("c", 0, 0, 0, 0, 16, None)])
        assert not merged.can_take([Step("c", 0, 1, 0, 0, 0, None)]), "a was paused"

    def test_a_step_that_verified_nothing_is_reported_alone(self) -> None:
        merged, prefill = MergedSteps(), [Step("a", 0, 0, 0, 0, 16, None)]
        assert merged.can_take(prefill)
        merged.add(prefill, decode_s=0, prefill_s=1)

        assert not merged.can_take([Step("a", 0, 1, 0, 0, 0, None)])
        merged = MergedSteps()
        merged.add([Step("a", 0, 1, 0, 0, 0, None)], decode_s=1, prefill_s=0)
        assert not merged.can_take(prefill)

    def test_counts_are_summed(self) -> None:
        merged = MergedSteps()
        merged.add([Step("a", 0, 1, 3, 0, 16, None)], decode_s=0.5, prefill_s=0.25)
        merged.add([Step("a", 1, 3, 4, 2, 0, None)], decode_s=0.5, prefill_s=0.0)
        merged.add([Step("a", 4, 1, 0, 0, 0, None)], decode_s=0.5, prefill_s=0.0)
        (one,) = merged.progress({"a": 7})

        assert (one.lease_epoch, one.position, len(one.tokens)) == (7, 0, 5)
        assert (one.rounds, one.drafts, one.drafted, one.accepted) == (3, 2, 7, 2)
        assert one.squares(5) == 1 + 9 + 1
        assert (merged.decode_s, merged.prefill_s) == (1.5, 0.25)


class TestStatesAreRead:
    """How often the scheduler inside vLLM has to look at its requests."""

    def reads(self, free: int, blocks: int = 10_000) -> list[int]:
        one, now = many(blocks=blocks)
        counts = []
        for _ in range(MOST_REPORT_STEPS + 1):
            read: list[str] = []

            def state(name: str, read: list[str] = read) -> RequestNow | None:
                read.append(name)
                return now.get(name)

            run = one.choose(0.0, state).run
            counts.append(len(read))
            step(one, now, run, free=free)
        return counts

    def test_not_in_each_step_while_kv_is_plentiful(self) -> None:
        assert self.reads(free=9000)[1:-1] == [0] * (MOST_REPORT_STEPS - 1)

    @pytest.mark.parametrize(
        ("free", "blocks"), [(20, 100), (150, 200)], ids=["now", "before the next report"]
    )
    def test_in_each_step_where_kv_is_short(self, free: int, blocks: int) -> None:
        assert min(self.reads(free, blocks)) > 0


GIGABYTES = base64.b64encode(zlib.compress(bytes(2**24), 9)).decode()
"""Stands for much more than all weights take."""


class TestLearntFile:
    def learnt(self) -> Priors:
        priors = Priors()
        for length in range(10, 60):
            priors.observe_length("chat", length, Guesses(), "")
        return priors

    def test_what_was_learnt_is_read_after_a_restart(self, tmp_path: Path) -> None:
        file = LearntFile(tmp_path / "learnt.json")
        file.keep(self.learnt())
        file.save()
        priors, sentence = LearntFile(tmp_path / "learnt.json").load()

        assert priors.to_dict() == self.learnt().to_dict()
        assert sentence == f"read from {tmp_path / 'learnt.json'}"
        assert [path.name for path in tmp_path.iterdir()] == ["learnt.json"]

    def test_it_is_written_once_for_what_was_kept(self, tmp_path: Path) -> None:
        file = LearntFile(tmp_path / "learnt.json")
        file.keep(self.learnt())
        file.save()
        file.path.unlink()
        file.save()

        assert not file.path.exists()

    def test_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        file = LearntFile(tmp_path / "learnt.json")
        umask = os.umask(0o022)
        try:
            file.keep(self.learnt())
            file.save()
        finally:
            os.umask(umask)

        assert file.path.stat().st_mode & 0o777 == 0o600

    def test_a_write_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        file = LearntFile(tmp_path / "folder")
        file.path.mkdir()
        file.keep(self.learnt())
        with pytest.raises(OSError):
            file.save()

        assert [path.name for path in tmp_path.iterdir()] == ["folder"]

    @pytest.mark.parametrize(
        ("name", "problem"),
        [("", "must be a file, got the folder"), ("missing/l", "in a folder that exists")],
    )
    def test_a_path_at_which_no_file_can_be_is_refused(self, tmp_path: Path, name: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            load(VllmSettings, environ={"LAPS_SD_LEARNT_FILE": str(tmp_path / name)})

    def test_each_data_parallel_rank_has_its_own(self, tmp_path: Path) -> None:
        assert [LearntFile(tmp_path / "l", rank=rank).path.name for rank in (0, 1)] == ["l", "l.1"]

    @pytest.mark.parametrize("content", ["", "[1, 2]", f'{{"format": {FORMAT}}}', "\x00", '{"format": "x"}'])
    def test_a_damaged_file_starts_learning_again(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "l").write_text(content)
        priors, sentence = LearntFile(tmp_path / "l").load()

        assert priors.to_dict() == Priors().to_dict()
        assert str(tmp_path / "l") in sentence

    @pytest.mark.parametrize("value", [None, -1, 0, 1e308, math.inf, math.nan, "x"])
    def test_a_file_with_another_number_starts_learning_again(self, tmp_path: Path, value: object) -> None:
        """One that can be read, and that cannot be computed with."""
        file = LearntFile(tmp_path / "l")
        file.keep(self.learnt())
        file.save()
        damaged = json.loads((tmp_path / "l").read_text())
        damaged["cost"]["rounds"] = value
        (tmp_path / "l").write_text(json.dumps(damaged))
        priors, sentence = file.load()

        assert priors.to_dict() == Priors().to_dict()
        assert "is not used" in sentence

    def test_a_file_of_another_format_starts_learning_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = LearntFile(tmp_path / "l")
        with monkeypatch.context() as earlier:
            earlier.setattr(priors_module, "FORMAT", FORMAT - 1)
            file.keep(self.learnt())
        file.save()
        priors, sentence = file.load()

        assert priors.to_dict() == Priors().to_dict()
        assert sentence == f"{tmp_path / 'l'} was written by another version of LAPS-SD, and is not used"

    def test_words_that_were_read_under_another_key_are_learnt_again(self, tmp_path: Path) -> None:
        file = LearntFile(tmp_path / "l")
        learnt = self.learnt()
        learnt.prompts.learned = 1
        file.keep(learnt)
        file.save()
        priors, sentence = file.load(lambda: PromptLengths(start_name="of another key"))

        assert priors.prompts.learned == 0
        assert sentence.startswith(f"read from {tmp_path / 'l'}, without the words of prompts")

    def test_lists_without_end_start_learning_again(self, tmp_path: Path) -> None:
        (tmp_path / "l").write_text("[" * 10**6)

        assert "is not used" in LearntFile(tmp_path / "l").load()[1]

    def test_weights_of_another_vocabulary_are_not_used(self, tmp_path: Path) -> None:
        """A token id means another word there. The lengths of classes stay."""
        file = LearntFile(tmp_path / "l")
        priors, _ = file.load(PromptTokens(900).predictor)
        for _ in range(30):
            priors.prompts.learn(packed(features_of_tokens([5, 6, 7])), "", "", 9, cut=False)
        priors.observe_length("chat", 9, Guesses(), "")
        file.keep(priors)
        file.save()

        same, other = (file.load(PromptTokens(size).predictor)[0] for size in (900, 901))
        assert (same.prompts.learned, other.prompts.learned) == (30, 0)
        assert same.lengths_seen("chat") == other.lengths_seen("chat") == 1

    @pytest.mark.parametrize(
        "weights",
        ["!", "AAAA", "eJwDAAAAAAE=", GIGABYTES],
        ids=["no base64", "no zlib", "too few", "too many"],
    )
    def test_damaged_weights_start_learning_again(self, tmp_path: Path, weights: str) -> None:
        """Also those that would fill the memory."""
        priors = self.learnt()
        learnt = priors.to_dict()
        learnt["prompts"]["weights"] = weights
        file = LearntFile(tmp_path / "l")
        file.keep(SimpleNamespace(to_dict=lambda: learnt))  # type: ignore[arg-type]
        file.save()
        found, sentence = file.load()

        assert found.to_dict() == Priors().to_dict()
        assert "is not used" in sentence

    def test_a_huge_file_is_not_read(self, tmp_path: Path) -> None:
        with (tmp_path / "l").open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)

        assert "is not used" in LearntFile(tmp_path / "l").load()[1]


class TestMetricsPage:
    def published(self, folder: Path, parent: int, engine: int, rank: int = 0) -> None:
        registry = CollectorRegistry()
        Metrics(rank, registry).pauses.inc(3)
        write_to_textfile(str(file_of(folder, parent, engine, rank)), registry)

    def pauses(self, folder: Path) -> dict[str, float]:
        return {
            sample.labels["engine"]: sample.value
            for family in EngineFiles(folder).collect()
            for sample in family.samples
            if sample.name == "laps_sd_vllm_preemptions_total" and sample.labels["kind"] == "pause"
        }

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tmp_path.chmod(0o700)
        return tmp_path

    def test_all_ranks_of_this_server_are_on_it(self, folder: Path) -> None:
        self.published(folder, os.getpid(), os.getpid(), 0)
        self.published(folder, os.getpid(), os.getppid(), 1)

        assert self.pauses(folder) == {"0": 3.0, "1": 3.0}

    def test_another_server_is_not(self, folder: Path) -> None:
        self.published(folder, os.getpid() + os.getppid(), os.getpid())  # neither this process nor its parent

        assert self.pauses(folder) == {}

    def test_an_engine_that_is_gone_is_removed(self, folder: Path) -> None:
        gone = 2**22 + 1  # above the largest process id
        self.published(folder, os.getpid(), gone)

        assert self.pauses(folder) == {}
        assert not list(folder.iterdir())

    def test_the_rest_of_a_write_of_an_engine_that_is_gone_is_removed(self, folder: Path) -> None:
        (folder / f"1-{2**22 + 1}-0.prom.{2**22 + 1}.7").write_text("")

        assert self.pauses(folder) == {}
        assert not list(folder.iterdir())

    def test_a_folder_that_others_can_write_is_not_read(self, folder: Path) -> None:
        self.published(folder, os.getpid(), os.getpid())
        folder.chmod(0o777)

        assert self.pauses(folder) == {}

    def test_without_an_engine_the_page_is_as_it_was(self, tmp_path: Path) -> None:
        assert list(EngineFiles(tmp_path / "missing").collect()) == []


class TestVersions:
    @pytest.mark.parametrize("minor", SUPPORTED)
    def test_two_minor_versions_are_supported(self, minor: str) -> None:
        check_version(f"{minor}.1", {})
        assert len(SUPPORTED) == 2

    def test_another_one_is_refused_with_a_way_out(self) -> None:
        with pytest.raises(
            VersionError, match=r"supports vLLM .* this is vLLM 0\.10\.2: install one of them"
        ):
            check_version("0.10.2", {})
        check_version("0.10.2", {"LAPS_SD_VLLM_UNTESTED": "1"})

    @pytest.mark.parametrize("module", ["laps_vllm.scheduler", "worker_svc.engine.vllm.loading"])
    def test_the_number_is_checked_before_anything_that_such_a_version_may_lack(
        self, module: str, tmp_path: Path
    ) -> None:
        """Here it lacks all."""
        (tmp_path / "vllm.py").write_text('__version__ = "0.10.2"')
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module}"
        ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

        assert "VersionError: LAPS-SD supports vLLM 0.32 and 0.33, and this is vLLM 0.10.2" in ended.stderr

    def test_missing_names_are_listed_together(self) -> None:
        with pytest.raises(VersionError) as caught:
            check_names("9.9.9", Scheduler, Request)
        message = str(caught.value)

        assert message.startswith("vLLM 9.9.9 has changed what LAPS-SD uses: Scheduler.update_from_output, ")
        assert "Scheduler._preempt_request(request, timestamp, drop_stale_output)" in message
        assert message.endswith("Request.resumable")
        assert not re.search(r"\.(schedule|running|num_tokens|num_prompt_tokens)\b", message)

    @pytest.mark.parametrize(
        ("owner", "variables", "files"),
        [
            ("Scheduler", {"self"}, ["laps_vllm/pausing.py", "laps_vllm/scheduler.py"]),
            ("Scheduler", {"self"}, ["laps_vllm/pausing.py", "worker_svc/engine/vllm/scheduler.py"]),
            ("Request", {"request", "session"}, ["laps_vllm/pausing.py", "laps_vllm/scheduler.py"]),
        ],
    )
    def test_all_that_is_used_is_looked_up(self, owner: str, variables: set[str], files: list[str]) -> None:
        classes = [
            one
            for file in files
            for one in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(one, ast.ClassDef) and one.name in ("Pausing", "Laps", "Rounds")
        ]
        used = {
            one.attr
            for one in walked(classes)
            if isinstance(one, ast.Attribute)
            and isinstance(one.value, ast.Name)
            and one.value.id in variables
        }
        own = {one.name for one in walked(classes) if isinstance(one, ast.FunctionDef)}
        own |= {
            target.attr
            for one in walked(classes)
            if isinstance(one, ast.Assign | ast.AnnAssign)
            for target in walked(one.targets if isinstance(one, ast.Assign) else [one.target])
            if isinstance(target, ast.Attribute)
        }
        own |= {"clock", "_preempt_request"}  # the latter with its parameters

        assert used - own <= set(USED[owner])
        assert len(classes) == 2


def walked(trees: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for tree in trees:
        yield from ast.walk(tree)


class Scheduler:
    def schedule(self) -> None:
        self.running: list[int] = []


class Request:
    def __init__(self) -> None:
        self.num_prompt_tokens = 0

    @property
    def num_tokens(self) -> int:
        return 0


class TestKnownFaults:
    def of(
        self, version: str = "0.32.0", *, device: str = "cpu", chunked: bool = False, **parts: Any
    ) -> list[str]:
        config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
            speculative_config=parts.get("speculative"),
            lora_config=parts.get("lora"),
            structured_outputs_config=SimpleNamespace(backend=parts.get("backend", "auto")),
            use_v2_model_runner=device == "cuda",
        )
        spare = parts.get("spare", False)
        return list(known_faults.warnings(config, version, spare_lora_place=spare))

    @pytest.mark.parametrize(
        ("parts", "fault"),
        [
            ({"lora": object()}, "without a LoRA adapter"),
            ({"chunked": True}, "CPU Generator does not use offset"),
            ({"speculative": object(), "version": "0.33.0"}, "ignores min_p and logit_bias with speculation"),
            ({"speculative": object(), "device": "cuda", "backend": "guidance"}, "grammar with nested rules"),
        ],
    )
    def test_each_that_can_be_met_has_a_sentence(self, parts: dict[str, Any], fault: str) -> None:
        (warning,) = self.of(**parts)

        assert fault in warning

    def test_speculation_on_a_cpu_has_two(self) -> None:
        first, second = self.of(speculative=object())

        assert "samples wrong tokens for a batch with draft tokens" in first
        assert "min_p" in second

    @pytest.mark.parametrize(
        "parts",
        [
            {},
            {"lora": object(), "spare": True},
            {"device": "cuda", "lora": object(), "chunked": True, "speculative": object()},
            {"version": "0.33.0", "lora": object(), "chunked": True, "backend": "guidance"},
        ],
    )
    def test_others_have_none(self, parts: dict[str, Any]) -> None:
        assert self.of(**parts) == []
