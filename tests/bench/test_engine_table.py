"""`laps-sd bench engine --table`: sessions, turns, ratios against the right rival, and what is not there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench._engine.options import QUICK_BATCHES, TABLE_BATCHES, arguments
from bench._peer_engines.ours import Ours
from bench._peers import PeerFailed
from bench._table import homes, models
from bench._table.goals import BY_TWO_THREADS, DECODE, PREFILLED, WITH_QUANTIZED, goals
from bench._table.homes import interpreter
from bench._table.plan import (
    BY_THREADS,
    MAX_LENGTH,
    MODELS,
    OURS,
    PRECISIONS,
    PREFILL,
    Entry,
    Model,
    Session,
    sessions,
    usable_threads,
)
from bench._table.rows import left_out, merged, rows_of
from bench._table.turns import SPARE_TOKENS, Measured
from bench.engine import main
from worker_svc.loading import DEMO

DEMO_MODEL = MODELS["demo"]


def options(*given: str) -> argparse.Namespace:
    return arguments(["--table", *given], "")


def test_each_precision_is_compared_with_the_peers_that_have_it():
    found = sessions(options("--threads", "1", "--models", "demo"))

    assert [(one.comparison, [str(entry) for entry in one.entries]) for one in found] == [
        ("bfloat16", ["ours bfloat16", "OpenVINO bf16", "vLLM bfloat16", "llama.cpp bf16"]),
        ("int8", ["ours int8", "OpenVINO int8", "llama.cpp q8_0", "ours bfloat16"]),
        ("int4", ["ours int4", "OpenVINO int4", "llama.cpp q4_0", "ours bfloat16"]),
    ]
    assert all(one.tasks == (1, 4, 16, PREFILL) for one in found)
    assert all(one.reference.engine == OURS for one in found)


def test_with_several_numbers_of_threads_ours_is_compared_with_itself_on_one():
    found = sessions(options("--threads", "2", "--models", "demo", "--precisions", "bfloat16"))
    assert [(one.comparison, one.by_wall_clock) for one in found] == [("bfloat16", True)]

    *_, last = sessions(options("--threads", "1,2,4", "--models", "demo"))
    assert last.comparison == BY_THREADS
    assert [entry.threads for entry in last.entries] == [1, 2, 4]
    assert last.by_wall_clock


def test_all_is_every_core_of_this_machine():
    assert options("--threads", "all").threads == [usable_threads()]
    assert arguments(["--threads", "all"], "").threads == usable_threads()


@pytest.mark.parametrize(
    "given",
    [
        ["--threads", "1,2"],
        ["--threads", "0"],
        ["--table", "--models", "other"],
        ["--table", "--precisions", "int2"],
        ["--table", "--only", "colour=red"],
        ["--table", "--shape", "tiny"],
        ["--table", "--turns", "1"],
    ],
)
def test_options_that_mean_nothing_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        arguments(given, "")
    assert "error: " in capsys.readouterr().err


def test_a_quick_run_has_fewer_cells():
    assert (options("--quick").batch, options().batch) == (QUICK_BATCHES, TABLE_BATCHES)
    assert options("--quick").turns < options().turns


def test_only_chooses_cells_and_keeps_ours_for_the_ratios():
    chosen = sessions(options("--threads", "1,2", "--only", "model=demo,precision=int4,threads=2,batch=16+prefill,engine=openvino"))  # fmt: skip

    (one,) = chosen
    assert str(one) == "demo, int4, 2 threads"
    assert one.tasks == (16, PREFILL)
    assert [entry.engine for entry in one.entries] == [OURS, "openvino"]
    assert not sessions(options("--only", "precision=int4,engine=vllm")), "vLLM has no such weights here"


def session(comparison: str = "int8", threads: int = 1, *entries: Entry) -> Session:
    return Session(
        DEMO_MODEL,
        comparison,
        threads,
        entries or (Entry(OURS, comparison, threads), Entry("openvino", comparison, threads)),
        (1, PREFILL),
    )


def test_a_ratio_is_paired_by_turn_and_is_ours_over_the_other():
    one = session()
    ours_, theirs = one.entries
    found = rows_of(
        one,
        {ours_: Measured({1: [200.0, 100.0, 300.0]}), theirs: Measured({1: [100.0, 50.0, 150.0]}, "2026")},
    )

    rows = {(row["engine"], row["task"]): row for row in found}
    row = rows["openvino", "batch 1"]
    assert (row["tokens_per_s"], row["clock"], row["version"], row["turns"]) == (100.0, "cpu", "2026", 3)
    assert [row[name] for name in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([2.0] * 3)
    assert rows[OURS, "batch 1"]["ratio"] is None
    assert rows["openvino", PREFILL]["not_run"] == "not measured"


def test_by_threads_a_ratio_is_that_to_one_thread():
    one = session(BY_THREADS, 2, Entry(OURS, "bfloat16", 1), Entry(OURS, "bfloat16", 2))
    found = rows_of(
        one, {one.entries[0]: Measured({1: [100.0, 110.0]}), one.entries[1]: Measured({1: [160.0, 176.0]})}
    )

    by_threads = {row["threads"]: row for row in found if row["task"] == "batch 1"}
    assert by_threads[2]["ratio"] == pytest.approx(1.6)
    assert by_threads[2]["clock"] == by_threads[1]["clock"] == "wall"


def test_an_engine_that_stopped_half_way_has_no_ratio():
    one = session()
    ours_, theirs = one.entries
    found = rows_of(one, {ours_: Measured({1: [2.0, 2.0]}), theirs: Measured({1: [1.0]}, not_run="it fell")})

    assert [row["ratio"] for row in found] == [None] * 4


def test_what_is_left_out_says_why():
    assert {row["not_run"] for row in left_out(session(), "no time was left")} == {"no time was left"}


def test_a_cell_that_is_measured_again_replaces_its_row():
    old, new = left_out(session(), "first"), left_out(session(threads=2), "second")
    again = left_out(session(), "third")[:1]

    found = merged([*old, *new], again)

    assert [row["not_run"] for row in found] == ["third", *["first"] * 3, *["second"] * 4]


def row(ratio: float, **given: Any) -> dict[str, Any]:
    return {
        "model": "demo", "comparison": "bfloat16", "threads": 1, "task": "batch 1", "engine": "openvino", "precision": "bf16",
        "ratio": ratio, "ratio_low": ratio, "ratio_high": ratio, **given,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "least"),
    [
        ({}, DECODE),
        ({"engine": "vllm", "threads": 2, "task": "batch 16"}, DECODE),
        ({"task": PREFILL}, PREFILLED),
        ({"comparison": "int8", "precision": "int8"}, WITH_QUANTIZED),
        ({"comparison": "int4", "precision": "int4", "task": "batch 16"}, WITH_QUANTIZED),
        *(
            ({"comparison": BY_THREADS, "threads": 2, "engine": OURS, "model": model}, goal)
            for model, goal in BY_TWO_THREADS.items()
        ),
    ],
)
def test_each_goal_can_be_met_and_missed(given: dict[str, Any], least: float):
    assert [goal.met for goal in goals([row(least, **given)])] == [True]
    assert [goal.met for goal in goals([row(least - 0.01, **given)])] == [False]
    assert [goal.met for goal in goals([row(least, **given) | {"ratio_low": least - 0.01}])] == [False]


@pytest.mark.parametrize(
    "given",
    [
        {"engine": "llamacpp"},
        {"comparison": "int8", "precision": "int8", "task": "batch 4"},
        {"comparison": "int8", "engine": OURS},
        {"comparison": BY_THREADS, "threads": 1, "engine": OURS},
        {"threads": 4},
    ],
)
def test_other_ratios_are_reported_and_not_judged(given: dict[str, Any]):
    assert not goals([row(0.1, **given)])


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps: no figure is looked at."""
    monkeypatch.setitem(MODELS, "demo", Model("demo", 2, None, True))


def run(tmp_path: Path, *given: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "rows.json"
    fixed = (
        "--table",
        "--cache",
        str(tmp_path / "cache"),
        "--models",
        "demo",
        "--turns",
        "2",
        "--json",
        str(file),
    )
    code = main([*fixed, *given])
    return code, json.loads(file.read_text())


def test_our_engine_runs_through_beside_peers_that_are_not_there(
    short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    nowhere = [part for name in ("openvino", "vllm", "llamacpp") for part in (f"--{name}", str(tmp_path / name))]  # fmt: skip
    code, found = run(tmp_path, *nowhere, "--precisions", "float32", "--threads", "1", "--batch", "2")

    rows = {(row["engine"], row["task"]): row for row in found["rows"]}
    assert set(rows) == {
        (name, task) for name in (OURS, *PRECISIONS["float32"]) for task in ("batch 2", PREFILL)
    }
    assert all(rows[OURS, task]["tokens_per_s"] > 0 for task in ("batch 2", PREFILL))
    assert rows[OURS, "batch 2"]["version"].startswith("cpu, 1 thread, float32; ")
    assert all(
        "No such file" in rows[name, "batch 2"]["not_run"] for name in ("openvino", "vllm", "llamacpp")
    )
    told = capsys.readouterr().out
    assert "demo: 4.7 M weights, 9 MB in bfloat16; prompts of " in told
    assert "demo, 1 thread: OpenVINO f32 did not run: " in told
    assert code == 1, "no ratio was judged"
    assert str(tmp_path) not in json.dumps(found["about"])

    before = rows[OURS, "batch 2"]
    code, found = run(
        tmp_path, "--no-peers", "--precisions", "float32", "--threads", "1", "--only", "batch=prefill"
    )

    rows = {(row["engine"], row["task"]): row for row in found["rows"]}
    assert rows[OURS, "batch 2"] == before
    assert rows["vllm", PREFILL]["not_run"]
    assert found["about"]["again"] == [
        "laps-sd bench engine --table --cache DIR --models demo --turns 2 --no-peers --precisions float32 --threads 1 --only batch=prefill"
    ]


def test_more_threads_than_the_machine_has_and_no_time_are_told_and_not_measured(short: None, tmp_path: Path):
    many = usable_threads() + 1
    _, found = run(tmp_path, "--no-peers", "--precisions", "float32", "--threads", str(many))
    assert {row["not_run"] for row in found["rows"]} == {f"this machine has {many - 1} threads"}

    _, found = run(tmp_path, "--no-peers", "--precisions", "float32", "--threads", "1", "--minutes", "-1")
    assert {row["not_run"] for row in found["rows"]} == {"no time was left: --minutes -1"}


def test_our_engine_decodes_greedily_to_the_limit_and_lets_go_of_the_request():
    engine = Ours(
        {"target": str(DEMO / "target"), "dtype": "float32", "quantization": "none", "threads": 1, "slots": 2, "max_length": 64}
    )  # fmt: skip
    engine.add(0, [5, 6, 7], 4)
    engine.add(1, [5, 6, 7], 4)
    outputs: dict[int, list[int]] = {0: [], 1: []}
    ended = 0
    while ended < 2:
        for number, tokens, done in engine.step():
            outputs[number] += tokens
            ended += done
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 4
    engine.add(2, [5], 1)
    assert [one.number for one in engine.step()] == [2]


def test_an_engine_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(homes.REQUIREMENTS, "openvino", ("no-such-engine==1",))
    monkeypatch.setitem(homes.FLAGS, "openvino", ("--no-index",))
    monkeypatch.setattr(homes, "_failed", {})
    with pytest.raises(PeerFailed, match=r"^openvino cannot be installed here: .*no-such-engine"):
        interpreter("openvino", None, tmp_path)
    assert not list(tmp_path.glob("environments/*/.installed"))
    monkeypatch.setattr(homes.venv, "create", nobody)
    with pytest.raises(PeerFailed, match="no-such-engine"):
        interpreter("openvino", None, tmp_path)
    homes._failed.clear()
    assert interpreter("openvino", "python-of-mine", tmp_path) == "python-of-mine"


def nobody(*given: object, **more: object) -> None:
    raise AssertionError("it is tried once")


def test_what_was_not_finished_is_made_again(tmp_path: Path):
    def breaks(place: Path) -> None:
        place.mkdir()
        (place / "half").touch()
        raise PeerFailed("the disk is full")

    def works(place: Path) -> None:
        place.mkdir()
        (place / "whole").touch()

    with pytest.raises(PeerFailed):
        models._once(tmp_path / "model", breaks)
    assert not (tmp_path / "model").exists()
    place = models._once(tmp_path / "model", works)
    assert [file.name for file in place.iterdir()] == ["whole"]
    assert models._once(place, breaks) == place


def test_the_group_of_int4_divides_the_sizes_of_the_model(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 896, "intermediate_size": 4864}))
    assert models.group_of(tmp_path) == 128
    assert models.group_of(DEMO / "target") == 64


def test_the_longest_context_of_each_model_fits():
    turns = options().turns
    for model in MODELS.values():
        short, _ = models.prompts(model, DEMO / "target", 16)
        tokens = max(map(len, short)) + 2 + model.generated_tokens(turns) + SPARE_TOKENS
        assert tokens <= MAX_LENGTH


def test_the_long_prompt_is_as_long_as_it_is_called():
    for model in MODELS.values():
        short, long = models.prompts(model, DEMO / "target", 3)
        assert len(short) == 3
        assert len(long) == 1000
