"""The engine in a thread of this process: it has the interface of the engine in a process."""

from __future__ import annotations

import threading

from tests.helpers import wait_until
from tests.services.worker.harness import entry, spec
from worker_svc.fake.engine import FakeEngine
from worker_svc.runner.messages import Acknowledged, Assigned, Failed, Outcome, Round, Specified
from worker_svc.runner.thread import EngineThread
from worker_svc.settings import WorkerSettings


def test_it_holds_nothing_once_the_last_end_is_acknowledged() -> None:
    outcomes: list[Outcome] = []
    before = set(threading.enumerate())
    runner = EngineThread(FakeEngine(slots=2), WorkerSettings())
    assert runner.holds_nothing
    runner.start(outcomes.append)
    try:
        runner.put(Specified(spec("a", max_tokens=12), 1), Assigned((entry("a"),)))
        assert not runner.holds_nothing
        wait_until(
            lambda: sum(len(s.tokens) for o in outcomes if isinstance(o, Round) for _, s in o.progress) == 12,
            description="the request has run to its end",
        )
        assert not runner.holds_nothing
        runner.put(Acknowledged(len(outcomes)))
        wait_until(lambda: runner.holds_nothing, description="it is forgotten")
    finally:
        runner.stop()

    assert "engine" not in {thread.name for thread in set(threading.enumerate()) - before}


def test_the_bounds_of_the_settings_hold() -> None:
    outcomes: list[Outcome] = []
    runner = EngineThread(FakeEngine(slots=2), WorkerSettings(max_unacknowledged_reports=3))
    runner.start(outcomes.append)
    try:
        runner.put(Specified(spec("a", max_tokens=200), 1), Assigned((entry("a"),)))
        wait_until(lambda: len(outcomes) == 3, description="three reports")
        runner.put(Acknowledged(2))
        wait_until(lambda: len(outcomes) == 5, description="two more")
    finally:
        runner.stop()

    assert len(outcomes) == 5


def test_an_error_of_the_engine_is_delivered() -> None:
    class Broken(FakeEngine):
        def status(self, request_id: str):  # type: ignore[no-untyped-def]
            raise RuntimeError("the table is broken")

    outcomes: list[Outcome] = []
    runner = EngineThread(Broken(), WorkerSettings())
    runner.start(outcomes.append)
    runner.put(Specified(spec("a"), 1), Assigned((entry("a"),)))
    wait_until(lambda: outcomes, description="the failure is delivered")
    runner.stop()

    assert isinstance(outcomes[0], Failed)
    assert "the table is broken" in str(outcomes[0].error)
