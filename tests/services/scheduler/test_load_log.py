"""The line of a scheduler's log about the load of its shard."""

from __future__ import annotations

from scheduler_svc.core.views import Totals
from scheduler_svc.leader.load_log import LoadLog


def totals(*, queued: int = 0, listed: int = 0, running: int = 0, preemptions: int = 0) -> Totals:
    return Totals(queued, listed, running, 0.0, preemptions)


def test_a_line_has_what_happened_since_the_one_before() -> None:
    log = LoadLog(100.0)
    log.add(drafted=40, accepted=30, tokens=50)
    log.add(drafted=10, accepted=0, tokens=50)
    busy = totals(queued=5, listed=4, running=3, preemptions=7)

    assert log.fields(110.0, busy, workers=2, kv_usage=0.5) == {
        "running": 3,
        "waiting": 6,
        "workers": 2,
        "tokens_per_s": 10.0,
        "acceptance": 0.6,
        "kv_usage": 0.5,
        "preemptions": 7,
    }
    again = log.fields(120.0, totals(queued=1, preemptions=9), workers=2, kv_usage=0.5)
    assert again is not None
    assert (again["tokens_per_s"], again["acceptance"], again["preemptions"]) == (0.0, 0.0, 2)


def test_an_idle_shard_is_silent_and_one_whose_requests_get_no_token_is_not() -> None:
    log = LoadLog(0.0)

    assert log.fields(10.0, totals(), workers=1, kv_usage=0.0) is None
    assert log.fields(20.0, totals(listed=1, running=1), workers=1, kv_usage=0.1) is not None
    assert log.fields(30.0, totals(queued=1), workers=0, kv_usage=0.0) is not None


def test_the_last_tokens_before_the_shard_became_idle_are_in_a_line() -> None:
    log = LoadLog(0.0)
    log.add(drafted=0, accepted=0, tokens=20)

    assert log.fields(10.0, totals(), workers=1, kv_usage=0.0) is not None
    assert log.fields(20.0, totals(), workers=1, kv_usage=0.0) is None
