"""Formats are checked outside the gateway process: only the caller that sent a format waits for its check,
and no format harms the gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine

import grpc
import pytest
import uvloop

from gateway.model import formats
from gateway.model.files import ModelFiles
from gateway.model.formats import FormatJudge
from laps_sd.errors import ResourceExhausted, Unavailable
from laps_sd.v1.inference_pb2 import GenerateRequest, OutputFormat
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import Running
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import rest, text_of, violations
from tests.system.hostile_formats import HOSTILE


@pytest.fixture
async def judge() -> AsyncIterator[FormatJudge]:
    judge = FormatJudge()
    yield judge
    await judge.close()


def child_of(judge: FormatJudge) -> int:
    assert judge._child is not None
    return judge._child.pid


async def test_every_hostile_format_is_refused_in_one_sentence_and_the_next_one_is_judged(
    judge: FormatJudge,
) -> None:
    for name, ((kind, text), words) in HOSTILE.items():
        problem = await judge.problem_of(kind, text)
        assert words in problem, name
        assert problem.startswith(("must ", "cannot ")) and "\n" not in problem and len(problem) < 400, name
    assert await judge.problem_of("regex", "[a-z]+") == ""


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "{", "must be JSON"),
        ("json_schema", "7", "must be a JSON schema"),
        ("json_schema", '{"type": "nothing"}', "cannot be used: Invalid type: nothing"),
        ("regex", "(a", "cannot be used"),
        ("grammar", "start: nowhere", "cannot be used"),
    ],
)
async def test_what_is_wrong_is_said(judge: FormatJudge, kind: str, text: str, words: str) -> None:
    assert words in await judge.problem_of(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", "true"), ("json_schema", '{"type": "object"}'), ("grammar", 'start: "a"+')],
)
async def test_what_can_be_used_has_no_problem(judge: FormatJudge, kind: str, text: str) -> None:
    assert await judge.problem_of(kind, text) == ""


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (signal.SIGPROF, "more than 0.5 s to compile"),
        (signal.SIGABRT, "more than 512 MiB to compile"),
        (signal.SIGSEGV, "nested too deeply to compile"),
        (signal.SIGKILL, "the library for formats fails over it"),
    ],
)
async def test_a_format_that_ends_the_child_is_refused_with_what_it_died_of(
    judge: FormatJudge, monkeypatch: pytest.MonkeyPatch, death: signal.Signals, words: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(formats, "CHILD", "tests.services.gateway.dying_child")
        assert words in await judge.problem_of("regex", str(int(death)))
        dying = child_of(judge)
    assert await judge.problem_of("regex", "c") == ""
    assert child_of(judge) != dying


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_child_that_ended_between_two_formats_costs_neither(
    judge: FormatJudge, noticed: bool
) -> None:
    assert await judge.problem_of("regex", "a") == ""
    child = judge._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    if noticed:
        await child.wait()
    assert await judge.problem_of("regex", "b") == ""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_child_whose_pipe_is_closed_and_whose_end_is_not_yet_known_costs_nothing(
    run: Callable[[Coroutine[None, None, None]], None],
) -> None:
    async def scenario() -> None:
        judge = FormatJudge()
        assert await judge.problem_of("regex", "a") == ""
        child = judge._child
        assert child is not None and child.stdin is not None
        child.stdin.transport.abort()
        await wait_until_async(child.stdin.is_closing, description="the pipe is closed")
        assert child.returncode is None
        assert await judge.problem_of("regex", "b") == ""
        await judge.close()

    run(scenario())


async def test_children_that_all_end_before_they_take_a_format_say_nothing_of_it(
    judge: FormatJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(formats, "CHILD", "tests.services.gateway.dying_child")
        with pytest.raises(Unavailable, match="no output format can be judged now"):
            await judge.problem_of("early", str(int(signal.SIGKILL)))
    assert await judge.problem_of("regex", "a") == ""


async def test_whoever_stops_waiting_takes_no_answer_away(judge: FormatJudge) -> None:
    await judge.problem_of("regex", "a")
    os.kill(child_of(judge), signal.SIGSTOP)
    first = asyncio.create_task(judge.problem_of("regex", "(b"))
    second = asyncio.create_task(judge.problem_of("regex", "c"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    os.kill(child_of(judge), signal.SIGCONT)

    assert await second == ""
    assert "cannot be used" in await judge.problem_of("regex", "(b")


async def test_so_many_formats_wait_and_no_more(judge: FormatJudge) -> None:
    await judge.problem_of("regex", "a")
    os.kill(child_of(judge), signal.SIGSTOP)
    waiting = [
        asyncio.create_task(judge.problem_of("regex", f"b{n}")) for n in range(1 + formats.MAX_WAITING)
    ]
    await asyncio.sleep(0)
    again = asyncio.create_task(judge.problem_of("regex", "b0"))  # waits with the first caller

    with pytest.raises(ResourceExhausted, match="too many output formats of the tenant wait"):
        await judge.problem_of("regex", "c")
    os.kill(child_of(judge), signal.SIGCONT)
    assert set(await asyncio.gather(again, *waiting)) == {""}
    assert await judge.problem_of("regex", "c") == ""


async def test_formats_of_a_tenant_that_wait_hold_up_no_other_tenant(judge: FormatJudge) -> None:
    await judge.problem_of("regex", "a")
    os.kill(child_of(judge), signal.SIGSTOP)
    waiting = [
        asyncio.create_task(judge.problem_of("regex", f"b{n}", tenant="hostile"))
        for n in range(formats.MAX_WAITING)
    ]
    await asyncio.sleep(0)
    other = asyncio.create_task(judge.problem_of("regex", "c", tenant="other"))
    await asyncio.sleep(0)
    os.kill(child_of(judge), signal.SIGCONT)
    assert await other == ""
    assert sum(task.done() for task in waiting) < 5
    await asyncio.gather(*waiting)


async def test_verdicts_are_kept_so_many_and_no_more(
    judge: FormatJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "KEPT", 3)
    for n in range(10):
        await judge.problem_of("regex", f"a{n}")
    os.kill(child_of(judge), signal.SIGSTOP)

    assert await judge.problem_of("regex", "a9") == ""  # the child cannot have got the question
    assert len(judge._verdicts) == 3


class TestCalls:
    """The same checks over real gRPC."""

    async def test_others_go_on_while_a_format_compiles(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        """The child is stopped, as with a format whose check never ends: all calls that need no check
        continue.
        """
        judge = running.gateway.calls._submissions._formats
        assert await judge.problem_of("regex", "[a-z]+") == ""
        ids = model.encode_rendered("hello world")
        stream = running.stub.GenerateStream(GenerateRequest(text="the quick"))
        streaming = await scheduler.submitted()
        os.kill(child_of(judge), signal.SIGSTOP)
        (kind, text), _ = HOSTILE["terminals that double"]
        hostile = running.stub.Generate(GenerateRequest(text="x", output_format=OutputFormat(**{kind: text})))
        await wait_until_async(
            lambda: any(not verdict.done() for verdict in judge._verdicts.values()),
            description="the format waits for its verdict",
        )

        scheduler.commit(streaming, ids, Kind.KIND_STOP)
        assert text_of(await rest(stream)) == "hello world"
        others = (
            GenerateRequest(text="the quick"),
            GenerateRequest(text="the quick", output_format=OutputFormat(json_object=True)),
            GenerateRequest(text="the quick", output_format=OutputFormat(regex="[a-z]+")),  # known already
        )
        for number, request in enumerate(others, start=2):
            beside = running.stub.GenerateStream(request)
            scheduler.commit(await scheduler.submitted(number), ids, Kind.KIND_STOP)
            assert text_of(await rest(beside)) == "hello world"
        assert not hostile.done()

        os.kill(child_of(judge), signal.SIGCONT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await hostile
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        ((field, description),) = violations(refused.value)
        assert field == "output_format.grammar" and "too big" in description

    @pytest.mark.parametrize("schema", [{"type": "nothing"}, {"type": "string", "minLength": "é" * 100}])
    async def test_a_format_that_cannot_be_is_refused_before_anybody_hears_of_it(
        self, running: Running, scheduler: FakeScheduler, schema: object
    ) -> None:
        wanted = OutputFormat(json_schema=json.dumps(schema))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Generate(GenerateRequest(text="x", output_format=wanted))
        assert [field for field, _ in violations(refused.value)] == ["output_format.json_schema"]
        assert not running.link.streams
