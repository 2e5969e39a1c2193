"""A context that is computed in rounds of limited time, which requests that decode share: what its owner sees."""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.core.events import Arrived, Progress, WorkerLost, WorkerUp
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.views import Explanation
from tests.core.test_scheduler import W, core, did, report, request

WORKER = replace(W, slots=4)
LIMIT_S = 0.2


def of(scheduler: Scheduler, request_id: str) -> Explanation:
    found = scheduler.explain(request_id, 0.0)
    assert found is not None
    return found


def prefilled(scheduler: Scheduler, request_id: str = "long") -> list[str]:
    return [line.detail for line in of(scheduler, request_id).story if line.what == "prefilled"]


def computed(tokens: int) -> Progress:
    """Return the progress of the long request in a round that computes a part of its context."""
    return did("long", 0, 0, drafted=0, accepted=0, prefilled=tokens)


def last(tokens: int) -> Progress:
    """Return its progress in the round that computes the rest, with its first token."""
    return did("long", 0, 1, drafted=0, accepted=0, prefilled=tokens)


def started() -> Scheduler:
    """Return a core whose worker runs two requests and a long one of 1,000 prompt tokens."""
    scheduler = core()
    arrivals = [request("a", 1), request("b", 2), request("long", 3, prompt_tokens=1000)]
    scheduler.step(0.0, [WorkerUp(WORKER, ()), *(Arrived(facts) for facts in arrivals)])
    return scheduler


def run(scheduler: Scheduler, *rounds: tuple[Progress, float]) -> None:
    """Report rounds, with their limit, in which the two others get a token each."""
    for n, (progress, limit_s) in enumerate(rounds):
        position = of(scheduler, "a").emitted
        scheduler.step(
            1.0 + n, [report(did("a", position, 1), did("b", position, 1), progress, limit_s=limit_s)]
        )


def test_its_timeline_has_what_its_prefill_took() -> None:
    scheduler = started()
    run(scheduler, *[(computed(300), LIMIT_S)] * 3, (last(100), 0.0))
    assert prefilled(scheduler) == ["1000 tokens in 4 rounds of at most 0.2 s, shared with 2 requests"]


def test_until_then_it_waits_for_the_rest_of_its_context() -> None:
    scheduler = started()
    assert of(scheduler, "long").waits_for == ""
    run(scheduler, (computed(300), LIMIT_S), (computed(250), LIMIT_S))
    assert of(scheduler, "long").waits_for == (
        "the other 450 tokens of its context to be computed: so far 550 tokens in 2 rounds of at most 0.2 s, shared with 2 requests"
    )
    assert of(scheduler, "a").waits_for == ""
    run(scheduler, (last(450), 0.0))
    assert of(scheduler, "long").waits_for == ""


def test_a_round_in_which_others_had_all_of_the_time_counts() -> None:
    scheduler = started()
    run(scheduler, (computed(0), LIMIT_S), (computed(0), LIMIT_S), (last(1000), 0.0))
    assert prefilled(scheduler) == ["1000 tokens in 3 rounds of at most 0.2 s, shared with 2 requests"]


def test_a_prefill_that_no_time_limited_leaves_no_line() -> None:
    scheduler = started()
    run(scheduler, (computed(512), 0.0), (last(488), 0.0))
    assert prefilled(scheduler) == []


def test_under_another_lease_the_count_begins_again() -> None:
    """What another worker computed is lost with it."""
    scheduler = started()
    run(scheduler, (computed(300), LIMIT_S))
    scheduler.step(9.0, [WorkerLost("w"), WorkerUp(replace(WORKER, worker_id="v"), ())])
    assert of(scheduler, "long").worker_id == "v"
    scheduler.step(10.0, [report(replace(computed(200), lease_epoch=2), limit_s=LIMIT_S, worker_id="v")])
    assert "so far 200 tokens in 1 round of at most 0.2 s" in of(scheduler, "long").waits_for
