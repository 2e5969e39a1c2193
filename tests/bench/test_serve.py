"""`laps-sd bench serve` at small sizes: an open loop, the same requests for every policy, and goals that can
be missed."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter

import pytest

import bench._serve.runs
import bench.serve
from bench._replay import (
    Reply,
    draw_requests,
    poisson_times,
    replay,
)
from bench._serve.cases import Case
from bench._serve.goals import verdicts
from bench._serve.lengths import lengths_row
from bench._serve.options import ALL_POLICIES, arguments
from bench._serve.results import Figures, Measured, counted, ratio
from bench._serve.runs import judge
from bench._serve.workloads import Workload, in_turn
from bench._serve_stack import Reading as WorkerReading
from bench._serve_stack import Run, Truth, hinted, make_jobs, truth_of
from bench.serve import main
from demo.prompts import KINDS
from gateway.calls.prompts import features_of
from laps_sd.contract.length_features import FeatureHash, unpacked
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.start_weights import start_weights

# -- the generator -------------------------------------------------------------------------------------------


class Clock:
    """Virtual time: a sleep takes none, but may end later than requested."""

    def __init__(self, oversleeps_s: float = 0.0) -> None:
        self.at_s = 0.0
        self._more_s = oversleeps_s

    def now(self) -> float:
        return self.at_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)  # what is ready runs first, as in real time
        self.at_s += seconds + self._more_s


class Server:
    """Server that sends no reply before all requests are here."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.sent_s: list[float] = []
        self._clock = clock
        self._count = count
        self._all_here = asyncio.Event()

    async def send(self, request):
        self.sent_s.append(self._clock.now())
        if len(self.sent_s) == self._count:
            self._all_here.set()
        await self._all_here.wait()
        yield pb.GenerateEvent(accepted=pb.Accepted(request_id="s0.1"))
        yield pb.GenerateEvent(delta=pb.Delta(token_ids=[1, 2]))
        yield pb.GenerateEvent(end=pb.Ended(finish_reason=pb.FINISH_REASON_STOP))


async def replayed(due_s, clock):
    server = Server(clock, len(due_s))
    async with asyncio.timeout(30):  # a closed loop would wait without end
        replies = await replay(
            [pb.GenerateRequest()] * len(due_s),
            due_s,
            server.send,
            lead_s=1.0,
            now=clock.now,
            sleep=clock.sleep,
        )
    return server, replies


async def test_requests_are_sent_at_their_times_whoever_has_been_answered():
    server, replies = await replayed([0.0, 2.0, 2.0, 5.0], Clock())

    assert server.sent_s == [1.0, 3.0, 3.0, 6.0]
    assert [reply.latency_s for reply in replies] == [5.0, 3.0, 3.0, 0.0]
    assert [reply.late_s for reply in replies] == [0.0, 0.0, 0.0, 0.0]
    assert not any(reply.error for reply in replies)


async def test_a_latency_counts_from_the_scheduled_time_when_the_generator_is_late():
    _, (reply,) = await replayed([0.0], Clock(oversleeps_s=0.5))

    assert (reply.late_s, reply.first_token_s, reply.latency_s) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "without an end"),
        ([pb.GenerateEvent(end=pb.Ended(finish_reason=pb.FINISH_REASON_ERROR, error="no room"))], "no room"),
        ([pb.GenerateEvent(end=pb.Ended(finish_reason=pb.FINISH_REASON_CANCELLED))], "cancelled"),
    ],
)
async def test_what_does_not_come_to_its_own_end_has_failed(events, said):
    async def send(request):
        for event in events:
            yield event

    (reply,) = await replay([pb.GenerateRequest()], [0.0], send, lead_s=0.0)

    assert said in reply.error


# -- what is sent --------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_requests_of_all_kinds_in_equal_parts():
    requests = draw_requests(7, 2 * len(KINDS), 64)

    assert requests == draw_requests(7, 2 * len(KINDS), 64)
    assert requests != draw_requests(8, 2 * len(KINDS), 64)
    assert Counter(request.workload_class for request in requests) == dict.fromkeys(KINDS, 2)
    assert {request.WhichOneof("prompt") for request in requests} == {"text", "messages"}


def truth(tokens: int = 10, alone_s: float = 1.0) -> Truth:
    return Truth(5, tokens, b"\1" * tokens, b"\0" * tokens, alone_s)


def test_hints_are_off_by_the_sigma_asked_for_and_the_same_each_time():
    requests = draw_requests(1, 400, 64)
    truths = [truth(10_000)] * len(requests)

    exact = hinted(requests, truths, 0.0, 1)
    noisy = hinted(requests, truths, 0.3, 1)

    assert {request.expected_output_tokens for request in exact} == {10_000}
    assert noisy == hinted(requests, truths, 0.3, 1)
    assert not any(request.HasField("expected_output_tokens") for request in requests)
    errors = [math.log(request.expected_output_tokens / 10_000) for request in noisy]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) == pytest.approx(0.3, rel=0.15)


def test_without_hints_a_request_says_neither_its_length_nor_its_class():
    requests = draw_requests(1, 12, 64)

    silent = hinted(requests, [truth()] * len(requests), None, 1)

    assert all(request.workload_class for request in requests)
    assert not any(request.workload_class for request in silent)
    assert not any(request.HasField("expected_output_tokens") for request in silent)
    assert [request.sampling for request in silent] == [request.sampling for request in requests]
    assert [request.text for request in silent] == [request.text for request in requests]


def test_the_simulator_predicts_lengths_from_the_words_that_the_gateway_sends():
    requests = draw_requests(1, 12, 64)
    hashed = FeatureHash()

    jobs = make_jobs(requests, [truth()] * len(requests), [0.0] * len(requests))

    assert [unpacked(job.length_features) for job in jobs] == [
        tuple(features_of(request, hashed)) for request in requests
    ]
    assert all(job.length_features for job in jobs)
    assert {job.tenant for job in jobs} == {"anonymous"}


def test_arrivals_have_the_average_gap_that_was_asked_for():
    times_s = poisson_times(3, 50, 0.2)

    assert times_s == sorted(times_s) == poisson_times(3, 50, 0.2)
    assert times_s[0] == 0.0
    assert times_s[-1] == pytest.approx(49 * 0.2)
    assert len({round(after - before, 6) for before, after in itertools.pairwise(times_s)}) > 40


@pytest.mark.parametrize("deltas", [[3, 1, 4], [4, 4]], ids=["a message per round", "joined messages"])
def test_the_rounds_of_a_request_are_what_its_end_says(deltas):
    reply = Reply(deltas=deltas, latency_s=0.5)
    reply.ended.usage.completion_tokens = 8
    reply.ended.usage.prompt_tokens = 20
    reply.ended.speculation.rounds = 3
    reply.ended.speculation.drafted = 12

    found = truth_of(reply)

    assert (found.output_tokens, len(found.paces), sum(found.paces), sum(found.drafts)) == (8, 3, 8, 12)
    assert all(drafted >= pace - 1 for pace, drafted in zip(found.paces, found.drafts, strict=True))
    assert len(deltas) == 2 or list(found.paces) == deltas


# -- the judgement -------------------------------------------------------------------------------------------


def test_policies_take_turns_in_another_order_each_time():
    orders = [in_turn(ALL_POLICIES, place) for place in range(7)]

    assert all(sorted(order) == sorted(ALL_POLICIES) for order in orders)
    assert len({order[0] for order in orders}) > 3


def test_a_run_with_a_failure_or_another_text_counts_for_nothing():
    def run(*tokens: int, error: str = "") -> Run:
        replies = [Reply(latency_s=2.0, error=error) for _ in tokens]
        for reply, count in zip(replies, tokens, strict=True):
            reply.ended.usage.completion_tokens = count
        return Run(replies, WorkerReading(1.0, 1.0, 0.0))

    load = Workload(Case("burst", 0.3), [], [], [truth(10), truth(12, alone_s=0.5)], b"", "")

    good, none = judge(run(10, 12), load)
    assert good is not None and not none
    assert (good.mean_s, good.slowdown) == (2.0, 3.0)
    assert judge(run(10, 11), load)[0] is None
    assert judge(run(10, 12, error="gone"), load)[0] is None


HINTS = Case("burst", 0.3)
NO_HINTS = Case("burst", None)


def measured(
    policy: str, seed: int, mean_s: float, predicted_s: float, failures=(), case: Case = HINTS
) -> Measured:
    found = Figures([mean_s], 0.0, 1.0, 0.0)
    return Measured(case, policy, seed, found, predicted_s, 1.0, 1.0, 0.0, list(failures), "same")


def runs(ours: float = 0.5, rival: float = 0.5, predicted: float = 0.5, case: Case = HINTS) -> list[Measured]:
    return [
        measured(policy, seed, mean_s * seed, predicted_s * seed, case=case)
        for seed in (1, 2, 3)
        for policy, mean_s, predicted_s in (
            ("fcfs", 1.0, 1.0),
            ("srpt-length", rival, rival),
            ("laps-sd", ours, predicted),
        )
    ]


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (runs(), set()),
        (runs(0.62, 0.62, 0.62), {"mean latency, laps-sd / fcfs"}),
        ([*runs(), *runs(0.62, 0.62, 0.62, NO_HINTS)], {"mean latency, laps-sd / fcfs"}),
        (runs(0.5, 0.47), {"mean latency, laps-sd / srpt-length"}),
        (runs(predicted=0.4), {"laps-sd / fcfs as simulated"}),
        (runs(predicted=0.6), {"laps-sd / fcfs as simulated"}),
    ],
    ids=[
        "all met",
        "too near fcfs",
        "too near fcfs without hints",
        "above srpt-length",
        "slower than simulated",
        "faster than simulated",
    ],
)
def test_each_goal_can_be_missed_and_the_exit_code_tells(found, missed, monkeypatch, capsys):
    async def measure(options):
        return found, []

    monkeypatch.setattr(bench.serve, "measure", measure)

    code = main([])

    assert {one["goal"] for one in verdicts(counted(found)) if not one["met"]} == missed
    assert code == (1 if missed else 0)
    assert capsys.readouterr().out.splitlines()[-1].startswith("GOAL MISSED" if missed else "goal met")


def test_the_upper_end_decides_and_a_single_pair_has_none():
    wide = runs()
    wide[-1] = measured("laps-sd", 3, 2.4, 1.5)

    found = ratio(counted(wide), HINTS, "laps-sd", "fcfs")
    assert found is not None and found.middle < 0.6 < found.high
    assert not verdicts(counted(wide))[0]["met"]
    assert not verdicts(counted(runs()[:3]))[0]["met"]


def test_a_failed_run_takes_its_pair_along():
    some = [*runs()[:-1], measured("laps-sd", 3, 100.0, 1.5, failures=["request 1: gone"])]

    found = ratio(counted(some), HINTS, "laps-sd", "fcfs")

    assert found is not None and found.high == pytest.approx(0.5)


def test_runs_with_and_without_hints_are_judged_apart():
    both = [*runs(0.4, 0.4, 0.4), *runs(0.55, 0.55, 0.55, NO_HINTS)]

    found = {(one["hints"], one["goal"]): one["ratio"] for one in verdicts(counted(both))}

    goal = "mean latency, laps-sd / fcfs"
    assert found["0.3", goal] == pytest.approx(0.4) and found["none", goal] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("given", "sigmas"),
    [
        ([], [0.3, None]),
        (["--predictor", "none"], [None]),
        (["--predictor", "1", "--predictor", "none"], [1.0, None]),
    ],
)
def test_a_run_has_hints_and_none_unless_told_otherwise(given, sigmas):
    assert arguments(given, "").predictor == sigmas


@pytest.mark.parametrize("given", ["-0.1", "nan", "some"])
def test_no_other_hints_are_taken(given, capsys):
    with pytest.raises(SystemExit):
        arguments([f"--predictor={given}"], "")
    assert "--predictor" in capsys.readouterr().err


# -- what is known of the lengths ----------------------------------------------------------------------------


def lengths_of(requests, truths, warm_up) -> dict[str, float]:
    """Return the row for these requests, once the scheduler has seen those of the warm-up, of the same
    lengths by kind."""
    by_kind = {request.workload_class: each for request, each in zip(requests, truths, strict=True)}
    priors = Priors(PromptLengths(*start_weights()))
    for job in make_jobs(
        hinted(warm_up, [truth()] * len(warm_up), None, 0),
        [by_kind[request.workload_class] for request in warm_up],
        [0.0] * len(warm_up),
    ):
        guesses = Guesses(prompt=priors.prompts.predict(job.length_features, "", job.tenant))
        priors.observe_length("", job.output_tokens, guesses, job.tenant)
        priors.prompts.learn(job.length_features, "", job.tenant, job.output_tokens, cut=False)
    silent = hinted(requests, truths, None, 1)
    saved = json.dumps(priors.to_dict()).encode()
    load = Workload(NO_HINTS, silent, [0.0] * len(silent), truths, saved, "")
    return lengths_row([load], [request.workload_class for request in requests], warm_up)


def test_words_that_tell_the_kind_tell_the_length_where_kinds_have_lengths():
    requests = draw_requests(1, 4 * len(KINDS), 64)
    truths = [truth(2 + 5 * KINDS.index(request.workload_class)) for request in requests]

    found = lengths_of(requests, truths, draw_requests(0, 200, 64))

    assert found["hints"] == "none" and found["requests"] == len(requests)
    assert found["explained_by_kinds"] == pytest.approx(1.0)
    assert found["tau"] > 0.5 and found["rms"] < found["spread"]
    assert found["explained"] == pytest.approx(1 - (found["rms"] / found["spread"]) ** 2)


def test_without_experience_nothing_is_known_and_no_prompt_has_been_seen():
    requests = draw_requests(1, 2 * len(KINDS), 64)
    truths = [truth(2 + number) for number in range(len(requests))]

    assert lengths_of(requests, truths, requests)["seen"] == 1.0
    assert lengths_of(requests, truths, draw_requests(0, 12, 64))["seen"] < 0.3


# -- the whole -----------------------------------------------------------------------------------------------


def test_every_policy_gets_the_same_requests_at_the_same_times(tmp_path):
    file = tmp_path / "rows.json"

    code = main(
        ["--engine", "fake", "--requests", "4", "--warm-up", "2", "--seeds", "1", "--max-tokens", "12",
         "--policy", "fcfs", "--policy", "laps-sd", "--scenario", "overload",
         "--json", str(file)]
    )  # fmt: skip

    rows = json.loads(file.read_text())["rows"]
    measured_rows = [row for row in rows if "mean_slowdown" in row]
    sent = {(row["hints"], row["policy"]): row["sent"] for row in rows if "run" in row}
    assert [
        (row["config"], row["hints"], row["policy"], row["runs"], row["failed_runs"]) for row in measured_rows
    ] == [("overload", hints, policy, 1, 0) for hints in ("0.3", "none") for policy in ("fcfs", "laps-sd")]
    assert sent["0.3", "fcfs"] == sent["0.3", "laps-sd"] != sent["none", "fcfs"] == sent["none", "laps-sd"]
    assert all(row["mean_s"] > 0 and row["simulated_mean_s"] > 0 for row in measured_rows)
    assert [row["hints"] for row in rows if "lengths" in row] == ["0.3", "none"]
    assert code == 1, "one pair has no interval"
