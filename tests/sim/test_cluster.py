"""The simulator against exact results: queueing theory, exact SRPT, conservation of work, determinism."""

from __future__ import annotations

import random
import statistics

import pytest

from laps_sd.contract.round_time import PLAIN_ROUNDS
from scheduler_svc.core.estimates.errors import Moment
from scheduler_svc.core.policies import POLICIES, policy_named
from scheduler_svc.core.settings import CoreSettings
from simulator.cluster import Cluster
from simulator.draw import draw
from simulator.held import HeldRequest
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.oracle import Oracle
from simulator.outcome import Outcome
from simulator.workload import Arrivals, Kind, Lengths, Workload

NO_RESERVE = CoreSettings(reserved_share=False)


def run(
    policy: str,
    jobs: list[Job],
    machine: Machine,
    workers: int = 1,
    settings: CoreSettings = NO_RESERVE,
    digest: bool = False,
    check: bool = False,
    reports_per_s: float | None = None,
) -> Outcome:
    def make(by_id, core_settings):
        return (
            Oracle(core_settings, by_id, machine)
            if policy == "oracle"
            else policy_named(policy, core_settings)
        )

    return Cluster(
        jobs, machine, workers, make, settings, digest=digest, check=check, reports_per_s=reports_per_s
    ).run()


def chat(requests: int, load: float, seed: int, machine: Machine, workers: int = 1, **arrivals) -> list[Job]:
    short = Kind(output=Lengths(median=40, sigma=1.0, most=400), prompt=Lengths(median=60, most=400))
    workload = Workload(
        requests=requests, max_tokens=400, kinds=(short,), arrivals=Arrivals(load=load, **arrivals)
    )
    return draw(workload, machine, workers, seed, None)[0]


def single_rounds(requests: int, load: float, seed: int) -> list[Job]:
    """Return jobs of one round each, with prompts of very different lengths: service times that queueing
    theory can use."""
    rng = random.Random(seed)
    prompts = [max(1, int(rng.expovariate(1 / 300))) for _ in range(requests)]
    machine = Machine()
    gap_s = statistics.fmean(service_s(machine, prompt) for prompt in prompts) / load
    now_s = 0.0
    jobs = []
    for number, prompt in enumerate(prompts):
        now_s += rng.expovariate(1 / gap_s)
        jobs.append(Job(f"r{number}", now_s, prompt, bytes([1]), 1))
    return jobs


def service_s(machine: Machine, prompt: int) -> float:
    return machine.prefill_token_s * prompt + machine.decode_s(1, prompt)


def test_fcfs_waits_as_the_lindley_recursion_says():
    jobs = single_rounds(500, 0.8, seed=1)

    outcome = run("fcfs", jobs, Machine())

    wait_s, before = 0.0, None
    for fate in outcome.fates:
        if before is not None:
            gap_s = fate.job.arrival_s - before.arrival_s
            wait_s = max(0.0, wait_s + service_s(Machine(), before.prompt_tokens) - gap_s)
        assert fate.waited_s == pytest.approx(wait_s, abs=1e-6)
        before = fate.job


def test_fcfs_waits_as_pollaczek_and_khinchine_say():
    jobs = single_rounds(15_000, 0.5, seed=2)

    outcome = run("fcfs", jobs, Machine())

    services = [service_s(Machine(), job.prompt_tokens) for job in jobs]
    rate = len(jobs) / jobs[-1].arrival_s
    load = rate * statistics.fmean(services)
    expected_s = rate * statistics.fmean(s * s for s in services) / (2 * (1 - load))
    assert statistics.fmean(fate.waited_s for fate in outcome.fates) == pytest.approx(expected_s, rel=0.03)


def exact_srpt(jobs: list[Job], machine: Machine) -> float:
    """Return the mean latency when before each round the request with the least remaining service is taken;
    no other rule."""
    waiting = sorted(jobs, key=lambda job: job.arrival_s)
    here: dict[str, tuple[Job, int, int]] = {}
    now_s, total_s = 0.0, 0.0
    while waiting or here:
        if not here:
            now_s = max(now_s, waiting[0].arrival_s)
        while waiting and waiting[0].arrival_s <= now_s:
            job = waiting.pop(0)
            here[job.request_id] = (job, 0, 0)

        def left_s(held: tuple[Job, int, int]) -> float:
            job, rounds, emitted = held
            prefill_s = 0.0 if rounds else machine.prefill_token_s * job.prompt_tokens
            return machine.left_s(job, rounds, emitted) + prefill_s

        job, rounds, emitted = min(here.values(), key=left_s)
        now_s += machine.decode_s(1, job.prompt_tokens + emitted)
        now_s += 0.0 if rounds else machine.prefill_token_s * job.prompt_tokens
        here[job.request_id] = (job, rounds + 1, emitted + job.paces[rounds])
        if rounds + 1 == len(job.paces):
            del here[job.request_id]
            total_s += now_s - job.arrival_s
    return total_s / len(jobs)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_oracle_is_exact_srpt(seed):
    machine = Machine()
    jobs = chat(250, 0.85, seed, machine)

    outcome = run("oracle", jobs, machine)

    mean_s = statistics.fmean(fate.latency_s for fate in outcome.fates)
    assert mean_s == pytest.approx(exact_srpt(jobs, machine), rel=0.005)


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "oracle"])
def test_one_slot_does_the_same_work_whatever_the_order(policy):
    """Without a KV limit nothing is computed twice, so a busy machine is busy for as long."""
    machine = Machine()
    jobs = chat(60, 0.9, 3, machine)

    outcome = run(policy, jobs, machine, check=True)

    needed_s = sum(machine.alone_s(job) for job in jobs)
    assert outcome.busy_s == pytest.approx(needed_s, rel=1e-3)
    assert outcome.prefilled_tokens == sum(job.prompt_tokens for job in jobs)
    assert [fate.evictions for fate in outcome.fates] == [0] * len(jobs)
    assert sum(fate.running_s for fate in outcome.fates) == pytest.approx(outcome.busy_s)


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "oracle"])
def test_every_job_ends_with_all_its_tokens_on_several_short_machines(policy):
    """The simulator itself refuses tokens that are lost or come twice, and a KV pool that overflows."""
    machine = Machine(slots=4, kv_tokens=1600)
    jobs = chat(80, 1.2, 4, machine, workers=3)

    outcome = run(policy, jobs, machine, workers=3, check=True)

    assert all(fate.finished_s > fate.job.arrival_s for fate in outcome.fates)
    assert all(fate.first_token_s <= fate.finished_s for fate in outcome.fates)


def test_the_same_jobs_give_the_same_commands():
    machine = Machine(slots=4, kv_tokens=2000)

    digests = {run("laps-sd", chat(60, 1.1, 5, machine), machine, digest=True).digest for _ in range(2)}
    other = run("laps-sd", chat(60, 1.1, 6, machine), machine, digest=True).digest

    assert len(digests) == 1
    assert other not in digests


def test_an_evicted_context_is_moved_or_computed_again():
    tight = {"slots": 8, "kv_tokens": 1600}
    jobs = chat(80, 1.2, 7, Machine(**tight))

    moved = run("srpt-length", jobs, Machine(**tight))
    computed = run("srpt-length", jobs, Machine(**tight, host_memory=False))

    evictions = sum(fate.evictions for fate in moved.fates)
    prompts = sum(job.prompt_tokens for job in jobs)
    assert evictions > 0
    assert moved.swapped_tokens > 0
    assert moved.prefilled_tokens == prompts
    assert computed.swapped_tokens == 0
    assert computed.prefilled_tokens > prompts


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on():
    """Its first token comes after as many rounds as it has chunks, and no round computes more than one."""
    machine = Machine(slots=2, prefill_chunk=512)
    short, long = Job("short", 0.0, 10, bytes([2] * 40), 80), Job("long", 0.1, 4000, bytes([2] * 5), 80)

    outcome = run("fcfs", [short, long], machine)

    chunk_s = machine.prefill_token_s * 512 + machine.decode_s(2, 5000)
    assert outcome.prefilled_tokens == 4010
    assert outcome.fates[0].latency_s < machine.alone_s(short) + 8 * chunk_s
    assert 7 * machine.round_s < outcome.fates[1].first_token_s - 0.1 < 9 * chunk_s


def test_a_long_prompt_keeps_the_time_of_rounds_that_others_decode_in():
    """The same rule as a worker's: its first token comes later, and no round of the other takes longer."""
    short, long = Job("short", 0.0, 10, bytes([2] * 400), 800), Job("long", 0.1, 20_000, bytes([2] * 5), 80)
    machine = Machine(slots=2, max_round_s=0.0)
    plain_s = machine.decode_s(1, 10 + 800)

    outcome = run("fcfs", [short, long], machine)
    whole = run("fcfs", [short, long], Machine(slots=2))

    rounds = 20_000 * machine.prefill_token_s / ((PLAIN_ROUNDS - 1) * plain_s)
    assert outcome.prefilled_tokens == whole.prefilled_tokens == 20_010
    assert outcome.fates[1].first_token_s - 0.1 == pytest.approx(rounds * PLAIN_ROUNDS * plain_s, rel=0.1)
    assert outcome.fates[1].first_token_s > whole.fates[1].first_token_s


def test_where_prompts_are_short_the_time_of_rounds_changes_nothing():
    machine = Machine(slots=4)
    jobs = [Job(f"j{n}", 0.2 * n, 20 + 37 * n % 200, bytes([2] * (5 + 7 * n % 40)), 100) for n in range(60)]

    bounded = run("laps-sd", jobs, Machine(slots=4, max_round_s=0.05))

    assert [fate.latency_s for fate in bounded.fates] == [
        fate.latency_s for fate in run("laps-sd", jobs, machine).fates
    ]


def test_a_round_costs_what_was_drafted_in_it():
    """Recorded draft lengths replace the machine's own; their cost is the difference in verified tokens."""
    machine = Machine(draft_len=5, sequence_s=0.002)
    usual = Job("r0", 0.0, 100, bytes([2] * 10), 60)
    recorded = Job("r0", 0.0, 100, bytes([2] * 10), 60, drafts=bytes([1, 3] * 5))

    own, other = run("fcfs", [usual], machine).busy_s, run("fcfs", [recorded], machine).busy_s

    assert own - other == pytest.approx((5 * 10 - 20) * machine.verified_token_s)
    assert other == pytest.approx(machine.alone_s(recorded), rel=0.001)
    assert run("fcfs", [usual], Machine(draft_len=5)).busy_s == pytest.approx(own - 10 * 0.002)


def test_a_slow_link_delays_decisions_and_not_the_machine():
    """Workers continue with the list they have: with one request there is nothing to decide, and only the
    latency of messages is lost."""
    job = Job("r0", 0.0, 100, bytes([3] * 20), 60)

    near = run("laps-sd", [job], Machine())
    far = run("laps-sd", [job], Machine(message_s=0.010))

    assert far.busy_s == near.busy_s
    assert far.fates[0].latency_s == pytest.approx(near.fates[0].latency_s + 0.020)


def test_jobs_behind_a_slow_link_all_end_once():
    machine = Machine(slots=2, message_s=0.050, kv_tokens=1500)
    jobs = chat(60, 1.3, 8, machine, workers=2)

    outcome = run("laps-sd", jobs, machine, workers=2, check=True)

    assert all(fate.finished_s for fate in outcome.fates)


def test_a_slower_worker_takes_that_many_times_as_long():
    job = Job("r0", 0.0, 100, bytes([3] * 20), 60)

    def latency_s(slowness):
        cluster = Cluster([job], Machine(), 1, lambda _, s: policy_named("fcfs", s), slowness=slowness)
        return cluster.run().fates[0].latency_s

    assert latency_s([2.5]) == pytest.approx(2.5 * latency_s([]))


@pytest.mark.parametrize("message_s", [0.0, 0.050])
def test_a_worker_whose_last_request_has_moved_away_reports_that_its_blocks_are_free(message_s):
    machine = Machine(slots=2, kv_tokens=1500, message_s=message_s)
    jobs = chat(150, 0.8, 6, machine, workers=3)
    cluster = Cluster(
        jobs, machine, 3, lambda _, s: policy_named("laps-sd", s), check=True, slowness=[1, 1, 3]
    )

    cluster.run()

    workers = cluster.scheduler.workers()
    assert [worker.free_target_blocks for worker in workers] == [1500 // 16] * 3


def test_a_job_that_fits_nowhere_is_an_error_and_not_a_hang():
    job = Job("r0", 0.0, 500, bytes([1]), 10)

    with pytest.raises(RuntimeError, match="1 jobs did not end"):
        run("laps-sd", [job], Machine(kv_tokens=100))


def test_levels_and_perceptibility_are_told():
    machine = Machine()
    outcome = run("laps-sd", chat(60, 0.9, 9, machine), machine)

    assert sum(outcome.level_s.values()) == pytest.approx(outcome.busy_s), "each second has its level"
    assert len([level for level, seconds in outcome.level_s.items() if seconds > 0]) >= 3
    assert {request for requests in outcome.level_requests.values() for request in requests} <= {
        fate.job.request_id for fate in outcome.fates
    }
    assert any(fate.perceptible_after == 0 for fate in outcome.fates)


def test_estimates_are_judged_when_requests_end():
    machine = Machine()
    jobs = chat(60, 0.9, 9, machine)

    known = run("oracle", jobs, machine).estimate_errors.of(Moment.ARRIVAL)
    guessed = run("laps-sd", jobs, machine).estimate_errors.of(Moment.ARRIVAL)

    assert known.count == guessed.count == len(jobs)
    assert known.rms == pytest.approx(0, abs=1e-3)
    assert guessed.rms > 0.1


def test_a_last_round_that_was_cut_is_reported_as_it_was_accepted():
    """As by a real worker, tokens after the end are verified, though they are not delivered."""
    progress = HeldRequest(Job("r", 0.0, 20, b"\1", 1, uncut_last=6), 1, 0, 0).decoded(0, 5)

    assert (len(progress.tokens), progress.accepted) == (1, 5)


def test_a_job_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match=r"output of 5 tokens is not within 1 … 3"):
        Job("r0", 0.0, 1, bytes([2, 3]), 3)
    with pytest.raises(ValueError, match="same request id"):
        Cluster([Job("a", 0, 1, b"\1", 1)] * 2, Machine(), 1, lambda _, s: policy_named("fcfs", s))
    with pytest.raises(ValueError, match="prefill_chunk"):
        Machine(prefill_chunk=0)


@pytest.mark.parametrize("slots", [1, 8])
def test_reports_that_wait_for_the_core_lose_no_token_and_hardly_any_time(slots: int) -> None:
    """Up to four rounds wait; the cluster raises if a token is lost or counted twice."""
    machine = Machine(slots=slots, kv_tokens=1000 * slots)
    jobs = chat(300, 1.0, 5, machine, workers=3)

    at_once = run("laps-sd", jobs, machine, workers=3, check=True)
    later = run("laps-sd", jobs, machine, workers=3, check=True, reports_per_s=0.001)

    assert later.steps < 0.8 * at_once.steps
    mean, late_mean = (
        statistics.fmean(fate.latency_s for fate in outcome.fates) for outcome in (at_once, later)
    )
    assert late_mean == pytest.approx(mean, rel=0.05)
