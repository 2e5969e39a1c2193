"""The engine in a process of its own: it has the interface of a runner, and every way to end is handled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench._chaos.checks import ENGINE_KILLED
from gateway.app import load_configured_model
from gateway.settings import GatewaySettings
from laps_sd.contract.length_probe import problem_with_kind
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks
from laps_sd.errors import StartupError
from laps_sd.service.config import load
from tests.helpers import wait_until
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.runner.messages import (
    Acknowledged,
    Assigned,
    Failed,
    HeldNow,
    HeldRequested,
    Listed,
    Outcome,
    Round,
    Specified,
)
from worker_svc.runner.process import EngineLaunch, EngineProcess
from worker_svc.settings import WorkerSettings


@pytest.fixture(params=["demo"])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    settings = load(WorkerSettings, {"engine": request.param, "slots": 2}, environ={})
    process = EngineLaunch(settings).result()
    yield process
    process.stop()


for_any_engine = pytest.mark.parametrize("engine", ["fake"], indirect=True)
"""Mark of a test about the process, whichever engine is in it: the fake one needs no torch."""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def specification(max_tokens: int) -> Specification:
    return Specification(
        request_id="a",
        prompt_ids=(5, 6, 7),
        committed_ids=(),
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=1),
        max_tokens=max_tokens,
        stop=(),
        ignore_eos=True,
        max_draft_len=None,
    )


def test_rounds_come_up_and_an_acknowledged_end_leaves_nothing_held(engine: EngineProcess) -> None:
    outcomes: list[Outcome] = []
    engine.start(outcomes.append)
    engine.put(Specified(specification(12), 1), Assigned((Listed("a", 1, 0, 1.0, 0.0, False, False),)))

    def tokens() -> list[int]:
        return [t for o in outcomes if isinstance(o, Round) for _, step in o.progress for t in step.tokens]

    wait_until(lambda: len(tokens()) == 12, description="the request has run to its end")
    assert [o.number for o in outcomes if isinstance(o, Round)] == list(range(1, len(outcomes) + 1))
    assert not engine.holds_nothing
    engine.put(Acknowledged(len(outcomes)))
    wait_until(lambda: engine.holds_nothing, description="it is forgotten once its end is acknowledged")


def test_what_is_cached_comes_up_too(engine: EngineProcess) -> None:
    outcomes: list[Outcome] = []
    engine.start(outcomes.append)
    prompt = tuple(range(5, 5 + BLOCK_TOKENS + 1))
    one = replace(specification(2), prompt_ids=prompt, cache_salt="acme")
    engine.put(Specified(one, 1), Assigned((Listed("a", 1, 0, 1.0, 0.0, False, False),)), HeldRequested())
    wait_until(
        lambda: any(step.finish for o in outcomes if isinstance(o, Round) for _, step in o.progress),
        description="the request has run to its end",
    )
    engine.put(HeldRequested())
    wait_until(
        lambda: sum(isinstance(o, HeldNow) for o in outcomes) == 2, description="what is held is answered"
    )
    before, after = (o.cached_blocks for o in outcomes if isinstance(o, HeldNow))

    assert before == b""
    assert b"".join(o.cache.added for o in outcomes if isinstance(o, Round)) == after
    assert after == name_blocks(prompt, "acme")


def test_a_gateway_finds_the_tokens_of_its_workers_its_own(engine: EngineProcess) -> None:
    assert engine.capacity.vocabulary == load_configured_model(GatewaySettings()).vocabulary != b""


def test_the_parent_knows_the_kind_of_the_engines_probe(engine: EngineProcess) -> None:
    assert engine.probe_kind is not None
    assert (engine.probe_kind.layer, engine.probe_kind.dims) == (3, 128)
    assert problem_with_kind(engine.probe_kind) == ""


@for_any_engine
def test_a_killed_engine_is_told_as_a_failure(engine: EngineProcess) -> None:
    """In the words by which the chaos benchmark knows the engines that it killed."""
    outcomes: list[Outcome] = []
    engine.start(outcomes.append)
    os.kill(engine.pid, signal.SIGKILL)

    wait_until(lambda: outcomes, description="the failure is delivered")
    assert isinstance(outcomes[0], Failed)
    assert "was killed by SIGKILL, as the system does when memory is short" in str(outcomes[0].error)
    assert ENGINE_KILLED in str(outcomes[0].error)


def test_an_engine_that_is_killed_while_it_loads_is_told_as_such() -> None:
    launch = EngineLaunch(load(WorkerSettings, {"engine": "fake"}, environ={}))
    launch.abort()

    with pytest.raises(StartupError, match=r"killed by SIGKILL.*, while it loaded the model"):
        launch.result()


@for_any_engine
def test_stop_leaves_no_process(engine: EngineProcess) -> None:
    engine.start(lambda _: None)
    engine.stop()

    assert gone(engine.pid)


def test_what_cannot_be_loaded_is_refused_in_one_sentence(tmp_path: object) -> None:
    settings = load(WorkerSettings, {"target": str(tmp_path)}, environ={})
    with pytest.raises(StartupError, match="cannot be served"):
        EngineLaunch(settings).result()
