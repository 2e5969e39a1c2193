"""Recorded answers with their prompts, and workloads and benchmarks of them."""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.lengths import main
from bench.report import kendall_tau
from laps_sd.contract.length_features import FEATURES, MOST_FEATURES, FeatureHash, packed, unpacked
from simulator.draw import draw
from simulator.jobs import Job
from simulator.lengths import read_answers
from simulator.machine import Machine
from simulator.traces import TraceError
from simulator.workload import Kind, Lengths, Predictor, Tenants, Workload

HASHED = FeatureHash()
TASKS = {"name": 10, "explain": 200, "write": 900}


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def rows(count: int) -> list[dict[str, Any]]:
    """Return answers whose length follows the first word of the prompt."""
    rng = random.Random(4)
    made = []
    for number in range(count):
        task = rng.choice(sorted(TASKS))
        length = math.ceil(rng.lognormvariate(math.log(TASKS[task]), 0.3))
        made.append(
            {
                "source": "s",
                "model": "m",
                "prompt": f"{task} topic{chr(97 + number % 26)}",
                "output_tokens": length,
            }
        )
    return made


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return write(tmp_path / "answers.jsonl.gz", rows(400))


class TestReading:
    def test_rows_with_text(self, tmp_path: Path) -> None:
        row = {"model": "m", "source": "s", "prompt": "Hello there", "output_tokens": 7, "prompt_tokens": 3}
        (answer,) = read_answers(write(tmp_path / "a.jsonl.gz", [row]))
        assert answer.features == packed(HASHED.features_of("Hello there"))
        assert (answer.model, answer.source, answer.prompt_tokens, answer.output_tokens) == ("m", "s", 3, 7)

    def test_hashed_rows_have_the_same_features_as_their_text(self, tmp_path: Path) -> None:
        text = "write a poem\nabout rain"
        words = text.split()
        parts = [*words, *(f"{a} {b}" for a, b in zip(["", *words], words, strict=False))]
        row = {
            "hashed": [zlib.crc32(part.encode()) % FEATURES for part in parts],
            "cues": [1.0, 3.0, math.log(2)],
            "output_tokens": {"m": 7, "n": 0},
        }
        first, second = read_answers(write(tmp_path / "a.jsonl.gz", [row]))
        assert list(unpacked(first.features)) == HASHED.features_of(text)
        assert (first.model, first.output_tokens) == ("m", 7)
        assert (second.model, second.output_tokens) == ("n", 1), "an answer has a token at least"

    def test_a_long_prompt_has_no_more_features_than_a_request_may(self, tmp_path: Path) -> None:
        row = {"hashed": list(range(1000)), "output_tokens": {"m": 7}}
        (answer,) = read_answers(write(tmp_path / "a.jsonl.gz", [row]))
        assert 200 <= len(unpacked(answer.features)) <= MOST_FEATURES

    @pytest.mark.parametrize(
        "row", [{"prompt": "no model", "output_tokens": 1}, {"hashed": [FEATURES], "output_tokens": {"m": 1}}]
    )
    def test_an_error_names_the_line(self, row: dict[str, Any], tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl.gz", [{"model": "m", "prompt": "fine", "output_tokens": 1}, row])
        with pytest.raises(TraceError, match=r"a\.jsonl\.gz, line 2: "):
            read_answers(path)


class TestWorkloads:
    def drawn(self, recorded: Path, kind: str, **more: Any) -> tuple[list[Job], list[Job]]:
        lengths = Lengths(kind="answers", file=str(recorded))
        workload = Workload(
            requests=200,
            learned=150,
            kinds=(Kind(name="k", output=lengths),),
            predictor=Predictor(kind=kind),
            **more,
        )
        return draw(workload, Machine(), 1, 5, None)

    def test_no_answer_is_drawn_twice_before_all_were(self, recorded: Path) -> None:
        jobs, history = self.drawn(recorded, "prompt")
        assert len(jobs) == 200 and len(history) == 150
        together = sorted(job.output_tokens for job in [*jobs, *history])
        everything = sorted(answer.output_tokens for answer in read_answers(recorded))
        for length in together:
            everything.remove(length)

    def test_all_predictors_see_the_same_jobs(self, recorded: Path) -> None:
        seen = [
            [(job.arrival_s, job.paces, job.prompt_tokens) for job in self.drawn(recorded, kind)[0]]
            for kind in ("prompt", "none", "shuffled", "short")
        ]
        assert seen[0] == seen[1] == seen[2] == seen[3]

    def test_the_core_gets_the_words_and_no_hint(self, recorded: Path) -> None:
        by_words = {answer.features for answer in read_answers(recorded)}
        for kind, known in (("prompt", True), ("shuffled", True), ("short", True), ("none", False)):
            for job in self.drawn(recorded, kind)[0]:
                facts = job.facts(1)
                assert facts.expected_output_tokens is None
                assert (facts.length_features in by_words) == known

    def test_short_words_are_those_of_the_shortest_answers(self, recorded: Path) -> None:
        names = HASHED.features_of("name")[0], HASHED.features_of("name")[-1]
        for job in self.drawn(recorded, "short")[0]:
            assert set(names) & set(unpacked(job.length_features))

    def test_tenants_send_their_kinds_and_classes_can_be_left_out(self, recorded: Path) -> None:
        lengths = Lengths(kind="answers", file=str(recorded))
        workload = Workload(
            requests=100,
            kinds=(Kind(name="a", output=lengths), Kind(name="b", output=lengths)),
            tenants=(Tenants(name="ta", kinds=("a",)), Tenants(name="tb", kinds=("b",))),
        )
        jobs, _ = draw(workload, Machine(), 1, 5, None)
        assert {(job.tenant, job.workload_class) for job in jobs} == {("ta-0", "a"), ("tb-0", "b")}
        assert {job.workload_class for job in self.drawn(recorded, "none", classes=False)[0]} == {""}


class TestBenchLengths:
    def test_it_compares_the_estimators_on_each_stream(
        self, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = tmp_path / "lengths.json"
        assert main(["--data", str(recorded), "--seeds", "1", "--json", str(result)]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("no goal: ")
        found = {
            (row["estimator"], row["after"]): row
            for row in json.loads(result.read_text())["rows"]
            if row["stream"] == "m"
        }
        assert {estimator for estimator, _ in found} == {"class", "scratch", "warm"}
        assert found["scratch", 100]["tau"] > 0.5 > 0.2 > abs(found["class", 100]["tau"])
        assert found["scratch", 100]["rms"] < 0.7 * found["class", 100]["rms"]
        assert 0.6 < found["scratch", 100]["cover"] < 0.95

    def test_a_file_that_is_none_is_refused_with_a_sentence(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--data", str(write(tmp_path / "a.jsonl.gz", [{"model": "m"}]))]) == 2
        assert "line 1" in capsys.readouterr().err
        assert main(["--data", str(write(tmp_path / "b.jsonl.gz", rows(20)))]) == 2
        assert "no stream has 150 answers" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("first", "second", "tau"),
        [
            ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
            ([1, 2, 3, 4], [40, 30, 20, 10], -1.0),
            ([1, 2, 3], [1, 3, 2], 1 / 3),
            ([1, 1, 2], [1, 2, 3], 2 / math.sqrt(2 * 3)),
            ([1, 1, 1], [1, 2, 3], 0.0),
        ],
    )
    def test_kendalls_tau(self, first: list[float], second: list[float], tau: float) -> None:
        assert kendall_tau(first, second) == pytest.approx(tau)
