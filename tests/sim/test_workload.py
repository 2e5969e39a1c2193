"""Jobs are drawn as described, and public recordings are read in the formats in which they are published."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics

import pytest

from simulator.draw import draw
from simulator.machine import Machine
from simulator.traces import (
    TracedRequest,
    TraceError,
    read_acceptance,
    read_column,
    read_quantiles,
    read_trace,
)
from simulator.workload import (
    AcceptanceModel,
    Arrivals,
    Kind,
    Lengths,
    Predictor,
    Workload,
    described,
)

MACHINE = Machine()


def jobs(seed=1, workers=1, data=None, **workload):
    return draw(Workload(**{"requests": 2000} | workload), MACHINE, workers, seed, data)[0]


# Drawing.


def test_equal_seeds_give_equal_jobs():
    def plain(seed):
        return [(job.arrival_s, job.prompt_tokens, job.paces, job.predicted_tokens) for job in jobs(seed)]

    assert plain(1) == plain(1)
    assert plain(1) != plain(2)


@pytest.mark.parametrize("process", ["poisson", "gamma"])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_load_is_what_was_asked_for(process, workers):
    drawn = jobs(workers=workers, arrivals=Arrivals(process=process, load=0.8, cv=2.0))

    work_s = sum(MACHINE.service_s(job) for job in drawn)
    assert work_s / drawn[-1].arrival_s / workers == pytest.approx(0.8, rel=0.15)


def test_gamma_arrivals_have_their_coefficient_of_variation():
    times = [job.arrival_s for job in jobs(arrivals=Arrivals(process="gamma", cv=4.0))]

    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(4.0, rel=0.2)


def test_a_burst_is_all_at_once():
    assert {job.arrival_s for job in jobs(requests=20, arrivals=Arrivals(process="burst"))} == {0.0}


def test_predictions_are_off_by_the_sigma_asked_for():
    drawn = jobs(predictor=Predictor(sigma=0.5))

    errors = [math.log(job.predicted_tokens / job.output_tokens) for job in drawn if job.output_tokens > 30]
    assert statistics.stdev(errors) == pytest.approx(0.5, rel=0.1)
    assert statistics.fmean(errors) == pytest.approx(0.0, abs=0.05)


def test_without_a_predictor_nothing_is_said():
    assert {job.predicted_tokens for job in jobs(requests=5, predictor=Predictor(kind="none"))} == {None}


def test_acceptance_differs_between_requests_as_described():
    long = Lengths(kind="constant", value=1000)
    rates = [
        (job.output_tokens / len(job.paces))
        for job in jobs(
            requests=200, kinds=(Kind(output=long, acceptance=AcceptanceModel(concentration=3.0)),)
        )
    ]
    narrow = [
        (job.output_tokens / len(job.paces))
        for job in jobs(
            requests=200, kinds=(Kind(output=long, acceptance=AcceptanceModel(concentration=300.0)),)
        )
    ]

    assert statistics.stdev(rates) > 2 * statistics.stdev(narrow)
    assert all(1 <= pace <= MACHINE.draft_len + 1 for job in jobs(requests=20) for pace in job.paces)


def test_kinds_come_in_their_shares():
    drawn = jobs(kinds=(Kind(name="chat", share=3.0), Kind(name="code", share=1.0)))

    assert sum(job.workload_class == "chat" for job in drawn) / len(drawn) == pytest.approx(0.75, abs=0.05)


# Recordings.


def write(path, text):
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_a_plain_csv_is_a_trace(tmp_path, name):
    path = write(tmp_path / name, "arrival_s,input_tokens,output_tokens\n1.5,20,3\n0.5,10,2\n2,5,0\n")

    assert read_trace(path) == [TracedRequest(0.5, 10, 2), TracedRequest(1.5, 20, 3)]


def test_mooncake_is_a_trace_whose_ticks_are_spread(tmp_path):
    rows = [(0, 10, 1), (0, 20, 2), (3000, 30, 3)]
    lines = [json.dumps({"timestamp": t, "input_length": i, "output_length": o}) for t, i, o in rows]
    path = write(tmp_path / "m.jsonl", "\n".join(lines))

    assert read_trace(path) == [
        TracedRequest(0.0, 10, 1), TracedRequest(1.5, 20, 2), TracedRequest(3.0, 30, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "has no column 'arrival_s'"),
        ("arrival_s,input_tokens\n", "has no column 'output_tokens'"),
        ("arrival_s,input_tokens,output_tokens\nx,1,1\n", "line 2: arrival_s is no number"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", "line 2: arrival_s must not be negative"),
        ("arrival_s,input_tokens,output_tokens\n1,1.5,1\n", "line 2: input_tokens is no whole number"),
        ("arrival_s,input_tokens,output_tokens\n1,1,-1\n", "line 2: output_tokens must not be negative"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no requests"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: 'output_length' is missing"),
        ('{"timestamp": 1\n', "line 1: no JSON"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path, text, what):
    with pytest.raises(TraceError, match=what):
        read_trace(write(tmp_path / "trace", text))


def test_recorded_rounds_are_replayed_from_the_beginning_and_cut_at_the_draft_length(tmp_path):
    line = {"run": "r", "task": "qa", "category": "qa", "accept": [2, 9, 0, 1]}
    path = write(tmp_path / "a.jsonl", json.dumps(line) + "\n")
    recorded = AcceptanceModel(kind="recorded", file=path.name)
    kinds = (Kind(output=Lengths(kind="constant", value=20), acceptance=recorded),)

    (job,) = jobs(requests=1, kinds=kinds, data=tmp_path, arrivals=Arrivals(process="burst"))

    assert list(job.paces) == [2, 6, 1, 2, 6, 1, 2]
    assert job.workload_class == "qa"


def test_recordings_can_be_chosen(tmp_path):
    lines = [json.dumps({"run": run, "task": "qa", "category": "c", "accept": [2]}) for run in ("a", "b")]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))

    def asked(run):
        return (Kind(acceptance=AcceptanceModel(kind="recorded", file=path.name, runs=(run,))),)

    assert jobs(requests=1, kinds=asked("b"), data=tmp_path)
    with pytest.raises(ValueError, match="no recording of runs"):
        jobs(requests=1, kinds=asked("c"), data=tmp_path)


@pytest.mark.parametrize("line", ['{"accept": 3}', '{"accept": [1.5]}', "[]", '{"accept": []}'])
def test_rounds_that_cannot_be_read_are_refused(tmp_path, line):
    with pytest.raises(TraceError):
        read_acceptance(write(tmp_path / "a.jsonl", line))


def test_a_trace_gives_times_and_lengths_stretched_to_the_load(tmp_path):
    rows = "".join(f"{2 * n},{100 + n},{10 + n % 5}\n" for n in range(50))
    write(tmp_path / "t.csv", "arrival_s,input_tokens,output_tokens\n" + rows)
    arrivals = Arrivals(process="trace", file="t.csv", load=0.5)

    drawn = jobs(requests=40, data=tmp_path, arrivals=arrivals)

    gaps = {round(b.arrival_s - a.arrival_s, 9) for a, b in itertools.pairwise(drawn)}
    assert len(gaps) == 1
    work_s = sum(MACHINE.service_s(job) for job in drawn)
    assert work_s / (gaps.pop() * 40) == pytest.approx(0.5)
    assert [b.prompt_tokens - a.prompt_tokens for a, b in itertools.pairwise(drawn)] == [1] * 39


def test_a_recorded_predictor_brings_its_own_pairs(tmp_path):
    write(tmp_path / "p.csv", "output_tokens,predicted_class\n10,0\n30,0\n200,1\n")
    recorded = Predictor(kind="recorded", file="p.csv")
    own = Lengths(kind="column", file="p.csv", column="output_tokens")

    drawn = jobs(requests=100, data=tmp_path, predictor=recorded, kinds=(Kind(output=own),))
    others = jobs(requests=100, data=tmp_path, predictor=recorded)

    assert {(job.output_tokens, job.predicted_tokens) for job in drawn} == {(10, 20), (30, 20), (200, 200)}
    factors = {round(job.predicted_tokens / job.output_tokens, 1) for job in others if job.output_tokens > 60}
    assert factors == {2.0, 0.7, 1.0}


def test_client_summaries_give_lengths(tmp_path):
    quantiles = [float(10 * place) for place in range(29)]
    client = {
        "windows": [[0, 1.0, 1, "G", 1, 1], [600, 2.0, 1, "G", 1, 1]],
        "lengths": {"0": {"output_tokens": quantiles}},
    }
    unknown = {"windows": [[0, 9.0, 1, "G", 1, 1]], "lengths": None}
    path = write(tmp_path / "s.jsonl", json.dumps(client) + "\n" + json.dumps(unknown))
    drawn = Lengths(kind="quantiles", file=path.name, column="output_tokens")

    assert read_quantiles(path, "output_tokens") == [(3.0, quantiles)]
    lengths = [job.output_tokens for job in jobs(requests=300, data=tmp_path, kinds=(Kind(output=drawn),))]
    assert statistics.median(lengths) == pytest.approx(140, abs=20)
    with pytest.raises(TraceError, match="no quantiles of 'input_tokens'"):
        read_quantiles(path, "input_tokens")


def test_programs_give_lengths(tmp_path):
    write(tmp_path / "code.jsonl", json.dumps({"code": "x" * 35}))

    (job,) = jobs(requests=1, data=tmp_path, kinds=(Kind(output=Lengths(kind="code", file="code.jsonl")),))

    assert job.output_tokens == 10


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(TraceError, match="no column 'b'; there are: a"):
        read_column(write(tmp_path / "x.csv", "a\n1\n"), "b")


def test_recorded_data_without_its_folder_says_what_to_do():
    with pytest.raises(FileNotFoundError, match="--data"):
        jobs(arrivals=Arrivals(process="trace", file="t.csv"))


# Descriptions.


def test_a_description_is_read_as_it_is_written():
    table = {"kinds": [{"name": "a", "output": {"kind": "constant", "value": 7}}], "arrivals": {"load": 1}}

    found = described(Workload, table, "x.toml")

    assert found.kinds[0].output.value == 7
    assert found.arrivals.load == 1


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"kindz": []}, "x.toml: there is no 'kindz'"),
        ({"arrivals": {"laod": 1}}, "x.toml.arrivals: there is no 'laod'"),
        ({"requests": "many"}, "x.toml.requests must be a int"),
        ({"kinds": [{"share": True}]}, r"x.toml.kinds\[0\].share must be a float"),
    ],
)
def test_a_description_that_is_wrong_says_where(table, what):
    with pytest.raises(ValueError, match=what):
        described(Workload, table, "x.toml")


@pytest.mark.parametrize(
    "workload",
    [
        {"arrivals": Arrivals(process="bus")},
        {"predictor": Predictor(kind="bus")},
        {"kinds": (Kind(output=Lengths(kind="bus")),)},
        {"kinds": (Kind(acceptance=AcceptanceModel(kind="bus")),)},
    ],
)
def test_kinds_that_do_not_exist_are_named(workload):
    with pytest.raises(ValueError, match="'bus'"):
        jobs(requests=2, **workload)
