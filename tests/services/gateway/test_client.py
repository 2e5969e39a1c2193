"""`laps_sd.client` against real gateways."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import pickle
from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from laps_sd.client import Accepted, AsyncClient, Client, Delta, Ended, Event, Options, make_request
from laps_sd.client.repair import Progress
from laps_sd.errors import (
    DETAILS_KEY,
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    LapsSdError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    Cursor,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    SamplingParams,
    Speculation,
    TokenIds,
    TokenLogprobs,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.helpers import free_port, wait_until_async
from tests.services.gateway.conftest import Running, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4  # types of frames of HTTP/2
END_STREAM, END_HEADERS = 1, 4
OK_OF_GRPC = b"\x88\x5f\x10application/grpc"  # :status 200, content-type


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def address(running: Running) -> str:
    return f"127.0.0.1:{running.gateway.app.port}"


def accepted(request_id: str, choice: int = 0) -> GenerateEvent:
    return GenerateEvent(accepted=Accepted(request_id=request_id), choice=choice)


def tokens(first: int, last: int) -> list[int]:
    return [40 + n for n in range(first, last)]


def shape(events: list[Event]) -> list[str]:
    names = [type(event).__name__ for event in events]
    return [name for place, name in enumerate(names) if place == 0 or name != names[place - 1]]


def ids(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def full_until(after_s: float) -> grpc.aio.AioRpcError:
    """Return a gateway's refusal with a retry delay."""
    status = status_pb2.Status(code=8, message="full")
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMilliseconds(round(after_s * 1000))
    status.details.add().Pack(info)
    trailing = grpc.aio.Metadata((DETAILS_KEY, status.SerializeToString()))
    return grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), trailing)


class TestRequests:
    @pytest.mark.parametrize(
        ("made", "expected"),
        [
            (make_request("hi"), GenerateRequest(text="hi")),
            (make_request([1, 2]), GenerateRequest(token_ids=TokenIds(ids=[1, 2]))),
            (
                make_request([{"role": "user", "content": "hi"}]),
                GenerateRequest(messages=ChatMessages(messages=[ChatMessage(role="user", content="hi")])),
            ),
            (
                make_request(
                    [
                        {"role": "user", "content": "Oslo?"},
                        {
                            "role": "assistant",
                            "content": None,
                            "tool_calls": [
                                {
                                    "id": "c1",
                                    "type": "function",
                                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                                }
                            ],
                        },
                        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                    ],
                    tools=[
                        {
                            "type": "function",
                            "function": {"name": "weather", "description": "The weather.", "parameters": {}},
                        },
                        {"name": "now"},
                    ],
                    tool_choice="required",
                    parallel_tool_calls=False,
                    template_arguments={"enable_thinking": False},
                ),
                GenerateRequest(
                    messages=ChatMessages(
                        messages=[
                            ChatMessage(role="user", content="Oslo?"),
                            ChatMessage(
                                role="assistant",
                                tool_calls=[ToolCall(id="c1", name="weather", arguments='{"city": "Oslo"}')],
                            ),
                            ChatMessage(role="tool", tool_call_id="c1", content="rain"),
                        ],
                        tools=[
                            Tool(name="weather", description="The weather.", parameters="{}"),
                            Tool(name="now"),
                        ],
                        tool_choice=ToolChoice(mode=ToolChoice.MODE_REQUIRED, single=True),
                        template_arguments='{"enable_thinking": false}',
                    )
                ),
            ),
            (
                make_request([{"role": "user", "content": "hi"}], tools=[{"name": "now"}], tool_choice="now"),
                GenerateRequest(
                    messages=ChatMessages(
                        messages=[ChatMessage(role="user", content="hi")],
                        tools=[Tool(name="now")],
                        tool_choice=ToolChoice(mode=ToolChoice.MODE_REQUIRED, name="now"),
                    )
                ),
            ),
            (
                make_request("hi", max_tokens=3, temperature=0, seed=0, stop="x"),
                GenerateRequest(
                    text="hi", sampling=SamplingParams(max_tokens=3, temperature=0, seed=0, stop=["x"])
                ),
            ),
            (
                make_request("hi", time_limit_s=1.5, keep=True, logprobs=0, prompt_logprobs=0, priority=-1),
                GenerateRequest(
                    text="hi", time_limit_ms=1500, keep=True, logprobs=0, prompt_logprobs=0, priority=-1
                ),
            ),
            (make_request("hi", n=2), GenerateRequest(text="hi", n=2)),
            (
                make_request("hi", deadline=datetime(2030, 1, 1, tzinfo=UTC)),
                GenerateRequest(text="hi", deadline_unix_ms=1_893_456_000_000),
            ),
            (
                make_request("hi", speculation="off"),
                GenerateRequest(text="hi", speculation=Speculation(mode=Speculation.MODE_OFF)),
            ),
            (
                make_request("hi", speculation=4),
                GenerateRequest(
                    text="hi", speculation=Speculation(mode=Speculation.MODE_AUTO, max_draft_tokens=4)
                ),
            ),
        ],
    )
    def test_say_what_the_caller_said_and_no_more(
        self, made: GenerateRequest, expected: GenerateRequest
    ) -> None:
        assert made == expected

    def test_an_option_or_a_key_without_a_meaning_is_refused(self) -> None:
        with pytest.raises(ValueError, match="tool_choice, tools: only for a prompt of chat messages"):
            make_request("hi", tools=[{"name": "now"}], tool_choice="now")
        with pytest.raises(ValueError, match="a message has no 'tool_call'; its keys are role, content, "):
            make_request([{"role": "tool", "content": "rain", "tool_call": "c1"}])
        with pytest.raises(ValueError, match="a tool has no 'schema'; its keys are name, "):
            make_request([{"role": "user", "content": "hi"}], tools=[{"name": "now", "schema": {}}])

    @pytest.mark.parametrize(
        ("address", "words"),
        [
            (
                "grpcs://a.example:50051",
                r"is host:port, such as a\.example:50051 with tls=Tls\(\), got 'grpcs://",
            ),
            ("http://a.example:50051", r"is host:port, such as a\.example:50051, got 'http://"),
        ],
    )
    def test_a_url_in_place_of_an_address_is_refused(self, address: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            Client(["127.0.0.1:1", address])

    def test_an_option_that_does_not_exist_is_refused_with_the_nearest_one(self) -> None:
        misspelt: Any = {"max_token": 20}
        with pytest.raises(TypeError, match=r"^unknown option max_token; did you mean max_tokens\?$"):
            make_request("hi", **misspelt)
        foreign: Any = {"best_of": 2, "echo": True}
        with pytest.raises(TypeError, match=r"^unknown option best_of, echo$"):
            make_request("hi", **foreign)

    @pytest.mark.parametrize(
        ("options", "kind", "words"),
        [
            ({"max_tokens": -1}, ValueError, "max_tokens: Value out of range: -1"),
            ({"seed": 1, "stop": [1]}, TypeError, "stop: bad argument type"),
            ({"priority": "high"}, TypeError, "priority: 'str' object cannot"),
            ({"time_limit_s": -1}, ValueError, "time_limit_ms: Value out of range: -1000"),
            (
                {"speculation": "on"},
                ValueError,
                "speculation is 'auto', 'off' or a number of tokens, got 'on'",
            ),
            ({"speculation": -1}, ValueError, "max_draft_tokens: Value out of range: -1"),
            ({"drafter": "n-gram"}, ValueError, "drafter is 'model' or 'lookup', got 'n-gram'"),
        ],
    )
    def test_a_value_that_no_request_can_hold_names_its_option(
        self, options: Any, kind: type[Exception], words: str
    ) -> None:
        with pytest.raises(kind, match=f"^{words}"):
            make_request("hi", **options)
        with pytest.raises(ValueError, match=r"^ids: Value out of range: -1"):
            make_request([-1])

    def test_an_option_that_is_none_is_absent(self) -> None:
        every: Any = dict.fromkeys(Options.__annotations__)
        assert make_request("hi", **every) == make_request("hi")

    def test_a_message_or_a_tool_that_is_incomplete_says_what_it_needs(self) -> None:
        with pytest.raises(ValueError, match=r"^a message needs 'role'$"):
            make_request([{"content": "hi"}])
        with pytest.raises(ValueError, match=r"^a tool needs 'name'$"):
            make_request([{"role": "user", "content": "hi"}], tools=[{"description": "The time."}])
        with pytest.raises(TypeError, match=r"^the content of a message must be a text$"):
            make_request([{"role": "user", "content": [{"type": "text", "text": "hi"}]}])

    @pytest.mark.parametrize(
        "prompt",
        [["a", "b"], [1, "b"], [1, {"role": "user"}], [{"role": "user"}, 1], [1.5], None, b"hi"],
    )
    def test_no_part_of_a_prompt_is_left_out_because_of_its_type(self, prompt: Any) -> None:
        with pytest.raises(
            TypeError, match=r"^a prompt is a text, a list of chat messages, or a list of token ids$"
        ):
            make_request(prompt)

    def test_token_ids_may_be_integers_of_numpy(self) -> None:
        numbers: Any = [1, np.int64(2), np.uint32(3)]
        assert list(make_request(numbers).token_ids.ids) == [1, 2, 3]
        assert list(make_request(np.array(numbers)).token_ids.ids) == [1, 2, 3]  # type: ignore[arg-type]


class TestAsyncClient:
    async def test_generates(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running)) as client:
            answer = asyncio.create_task(client.generate("x", max_tokens=5))
            scheduler.commit(await scheduler.submitted(), tokens(0, 5), Kind.KIND_LENGTH)
            response = await answer

        assert list(response.token_ids) == tokens(0, 5)
        assert response.text == running.model.decode(tokens(0, 5))
        assert response.end.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert response.accepted.request_id == response.end.request_id

    async def test_streams_events_in_order(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running)) as client:
            events: list[Event] = []
            async for event in client.stream("x"):
                events.append(event)
                if isinstance(event, Accepted):
                    scheduler.commit(event.request_id, tokens(0, 3), Kind.KIND_STOP)

        assert shape(events) == ["Accepted", "Delta", "Ended"]
        assert ids(events) == tokens(0, 3)
        assert scheduler.all_heard("detach") == []
        assert scheduler.all_heard("cancel") == []

    async def test_a_stream_survives_the_death_of_its_gateway(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        one: Running = await start_gateway(scheduler.address)
        two: Running = await start_gateway(scheduler.address)
        events: list[Event] = []
        async with AsyncClient([address(one), address(two)]) as client:
            stream = client.stream("x")
            async for event in stream:
                events.append(event)
                if isinstance(event, Accepted):
                    request_id = event.request_id
                    scheduler.commit(request_id, tokens(0, 4))
                if len(ids(events)) == 4 and not scheduler.all_heard("attach"):
                    await one.gateway.app.server.stop(None)
                    scheduler.commit(request_id, tokens(4, 7), Kind.KIND_LENGTH)

        assert shape(events) == ["Accepted", "Delta", "Ended"]
        assert ids(events) == tokens(0, 7)
        assert scheduler.all_heard("submit")[0].grace_ms == 30_000
        assert "".join(event.text for event in events if isinstance(event, Delta)) == one.model.decode(
            tokens(0, 7)
        )

    async def test_a_message_that_is_sent_twice_is_two_requests_and_one_with_a_key_is_one(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        plain, keyed = make_request("x"), make_request("x", idempotency_key="mine")
        async with AsyncClient(address(running)) as client:
            for request in (plain, plain, keyed, keyed):
                async with client.send(request) as events:
                    await anext(events)

        keys = [submit.idempotency_key for submit in scheduler.all_heard("submit")]
        assert len(set(keys[:2])) == 2 and "" not in keys
        assert keys[2:] == ["mine", "mine"]
        assert plain == make_request("x")

    @pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
    def test_what_nobody_answered_is_tried_again(self, code: grpc.StatusCode) -> None:
        """gRPC itself ends calls with CANCELLED when a server stops, although no client cancelled them."""
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)

        assert progress.lost(error, 1.0) > 0.0

    def test_the_time_to_repeat_a_call_begins_when_its_first_loss_is_noticed(self) -> None:
        """Keepalive notices a gateway that hangs after up to 30 s; the next one may be healthy."""
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=5.0, now=0.0)

        assert progress.lost(error, 25.0) > 0.0
        assert progress.lost(error, 29.0) > 0.0
        with pytest.raises(Unavailable):
            progress.lost(error, 31.0)

        hurried = Progress(make_request("x"), timeout_s=25.0, reconnect_s=30.0, retry_s=5.0, now=0.0)
        with pytest.raises(Unavailable):
            hurried.lost(error, 25.0)

    @pytest.mark.parametrize("how", ["by a reset, as nginx", "without a status, as HAProxy"])
    async def test_a_stream_that_a_proxy_cuts_goes_to_the_next_address(
        self, running: Running, scheduler: FakeScheduler, how: str
    ) -> None:
        """So proxies end the streams of a gateway that died. gRPC makes INTERNAL or UNKNOWN of it."""

        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
                writer.write(frame(SETTINGS))
                while True:
                    head = await reader.readexactly(9)
                    await reader.readexactly(int.from_bytes(head[:3]))
                    if head[3] == HEADERS:
                        stream = int.from_bytes(head[5:])
                        writer.write(frame(HEADERS, OK_OF_GRPC, flags=END_HEADERS, stream=stream))
                        if "reset" in how:
                            writer.write(frame(RST_STREAM, (2).to_bytes(4), stream=stream))
                        else:
                            writer.write(frame(DATA, flags=END_STREAM, stream=stream))

        proxy = await asyncio.start_server(cut, "127.0.0.1")
        port = proxy.sockets[0].getsockname()[1]
        async with proxy, AsyncClient([f"127.0.0.1:{port}", address(running)], retry_s=30) as client:
            answer = asyncio.create_task(client.generate("x"))
            scheduler.commit(await scheduler.submitted(), tokens(0, 1), Kind.KIND_STOP)
            assert list((await answer).token_ids) == tokens(0, 1)

    def test_a_bug_of_a_gateway_is_not_tried_again(self) -> None:
        code, details = grpc.StatusCode.INTERNAL, "internal error, incident 0a1b2c3d"
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)

        with pytest.raises(LapsSdError, match="incident 0a1b2c3d"):
            progress.lost(error, 1.0)

    async def test_a_call_that_a_stopping_gateway_cut_off_before_it_was_accepted_goes_to_the_next_one(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        one: Running = await start_gateway(scheduler.address)
        two: Running = await start_gateway(scheduler.address)
        scheduler.answers_submits = False
        async with AsyncClient([address(one), address(two)]) as client:
            answer = asyncio.create_task(client.generate("x"))
            await wait_until_async(lambda: scheduler.all_heard("submit"), description="it was submitted")
            scheduler.answers_submits = True
            await one.gateway.app.server.stop(None)
            await wait_until_async(
                lambda: len(scheduler.all_heard("submit")) == 2, description="it was submitted again"
            )
            first, second = scheduler.all_heard("submit")
            scheduler.commit(second.request_id, tokens(0, 1), Kind.KIND_STOP)
            response = await answer

        assert list(response.token_ids) == tokens(0, 1)
        assert first.idempotency_key == second.idempotency_key != ""

    async def test_an_address_where_nobody_answers_is_left_for_the_next_one(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        async with AsyncClient([f"127.0.0.1:{free_port()}", address(running)]) as client:
            answer = asyncio.create_task(client.generate("x"))
            scheduler.commit(await scheduler.submitted(), tokens(0, 1), Kind.KIND_STOP)
            await answer

    async def test_calls_that_fail_together_all_go_on_at_the_next_address(self, running: Running) -> None:
        connections = []
        third = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1")
        port = third.sockets[0].getsockname()[1]
        nobody = f"127.0.0.1:{free_port()}"
        async with third, AsyncClient([nobody, address(running), f"127.0.0.1:{port}"]) as client:
            found = await asyncio.gather(*(client.models(timeout_s=10) for _ in range(5)))

        assert [[model.name for model in models] for models in found] == [["tiny"]] * 5
        assert connections == []

    async def test_streams_that_are_lost_together_all_go_on_at_the_next_address(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        one: Running = await start_gateway(scheduler.address)
        two: Running = await start_gateway(scheduler.address)
        three: Running = await start_gateway(scheduler.address)
        async with AsyncClient([address(one), address(two), address(three)]) as client:
            streams = [client.stream(f"x{number}") for number in range(5)]
            accepted = [await anext(stream) for stream in streams]
            await one.gateway.app.server.stop(None)
            rest = [asyncio.create_task(anext(stream)) for stream in streams]
            await wait_until_async(
                lambda: len(two.link.streams) == len(streams),
                description="all are attached through the second gateway",
            )
            for event in accepted:
                scheduler.commit(event.request_id, tokens(0, 1), Kind.KIND_STOP)
            await asyncio.gather(*rest)
            for stream in streams:
                await stream.aclose()

    def test_the_time_to_reconnect_begins_when_the_loss_is_noticed_however_long_it_was_silent_before(
        self,
    ) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 1.0)

        assert progress.lost(None, 61.0) > 0.0
        assert progress.lost(None, 90.0) > 0.0
        with pytest.raises(Unavailable):
            progress.lost(None, 91.1)

    @pytest.mark.parametrize("code", [None, grpc.StatusCode.UNAVAILABLE])
    @pytest.mark.parametrize(
        ("request_ids", "named"),
        [(["s0.r"], r"\(request s0\.r\)$"), (["s0.a", "s0.b"], r"\(requests s0\.a, s0\.b\)$")],
    )
    def test_connections_that_only_repeat_what_is_known_do_not_end_an_outage(
        self, request_ids: list[str], named: str, code: grpc.StatusCode | None
    ) -> None:
        """So it is with a proxy that cuts every connection after the first message. The error names the request."""
        error = code and grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
        request = make_request("x", n=len(request_ids))
        progress = Progress(request, timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        known = [
            GenerateEvent(accepted=Accepted(request_id=one), choice=n) for n, one in enumerate(request_ids)
        ]
        first = Delta(text="a", token_ids=[40], cursor=Cursor(next_token=1, text_offset=1))
        known.append(GenerateEvent(delta=first))

        def lose_again_and_again() -> None:
            now = 0.0
            for _ in range(1000):
                for message in known:
                    progress.take(message, now)
                now += progress.lost(error, now)

        with pytest.raises(Unavailable, match=named):
            lose_again_and_again()

    def test_what_a_repaired_stream_repeats_is_left_out_wherever_its_messages_are_cut(self) -> None:
        """Several outputs are sent from their start again."""
        progress = Progress(make_request("x", n=2), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        text = "abcde"
        got: list[Event] = []

        def sends(first: int, last: int, *, ends: bool = False) -> None:
            delta = Delta(
                text=text[first:last],
                token_ids=tokens(first, last),
                first_token=first,
                cursor=Cursor(next_token=last, text_offset=last),
                logprobs=[TokenLogprobs(logprob=-n) for n in range(first, last)],
            )
            messages = [GenerateEvent(delta=delta)] + [GenerateEvent(end=Ended())] * ends
            got.extend(chosen[1] for one in messages if (chosen := progress.take(one, 0.0)) is not None)

        for choice, request_id in enumerate(("s0.a", "s0.b")):
            progress.take(GenerateEvent(accepted=Accepted(request_id=request_id), choice=choice), 0.0)
        sends(0, 2)
        progress.lost(None, 0.0)
        sends(0, 1)
        sends(1, 4)
        sends(4, 5, ends=True)
        progress.lost(None, 0.0)
        sends(0, 5, ends=True)

        *deltas, end = got
        assert end == Ended()
        assert [(one.text, one.first_token) for one in deltas] == [("ab", 0), ("cd", 2), ("e", 4)]
        assert ids(deltas) == tokens(0, 5)
        assert [found.logprob for one in deltas for found in one.logprobs] == [0, -1, -2, -3, -4]

    def test_a_connection_that_brings_a_token_ends_the_outage(self) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 0.0)
        progress.lost(None, 0.0)
        progress.lost(None, 28.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 29.0)
        progress.take(GenerateEvent(delta=Delta(text="a", token_ids=[40])), 29.0)

        assert 0.02 <= progress.lost(None, 31.0) <= 0.04, "a first pause"
        with pytest.raises(Unavailable):
            progress.lost(None, 62.0)

    def test_a_connection_that_held_while_the_request_waited_in_the_queue_ends_the_outage(self) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 0.0)
        progress.lost(None, 1.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 2.0)

        assert progress.lost(None, 60.0) > 0.0
        assert progress.lost(None, 89.0) > 0.0
        with pytest.raises(Unavailable):
            progress.lost(None, 91.1)

    @pytest.mark.parametrize("cut_after_s", [1.5, 3.0, 60.0])
    def test_a_request_that_waits_behind_a_proxy_that_cuts_idle_connections_is_not_given_up(
        self, cut_after_s: float
    ) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        now = 0.0
        for _ in range(100):
            progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), now)
            now += cut_after_s
            now += progress.lost(None, now)

    async def test_a_full_gateway_that_a_lost_stream_comes_to_is_asked_again_when_it_says(self) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=0.0, now=0.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 1.0)

        assert progress.lost(full_until(2.5), 2.0) == 2.5
        with pytest.raises(ResourceExhausted):
            progress.lost(full_until(2.5), 33.0)

    def test_details_that_are_none_leave_the_error_what_it_is(self) -> None:
        trailing = grpc.aio.Metadata((DETAILS_KEY, b"\xff\xff"))
        code = grpc.StatusCode.INVALID_ARGUMENT
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="too long")
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)

        with pytest.raises(InvalidArgument, match="too long"):
            progress.lost(error, 1.0)

    def test_no_advice_makes_a_lost_stream_wait_beyond_its_time_to_reconnect_or_its_deadline(self) -> None:
        progress = Progress(make_request("x"), timeout_s=5.0, reconnect_s=30.0, retry_s=0.0, now=0.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 1.0)

        assert progress.lost(full_until(20.0), 2.0) == 3.0, "the rest until the deadline"
        with pytest.raises(ResourceExhausted):
            progress.lost(full_until(31.0), 2.0)

    def test_without_time_to_reconnect_a_lost_stream_ends(self) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=0.0, retry_s=5.0, now=0.0)
        progress.take(GenerateEvent(accepted=Accepted(request_id="s0.r")), 1.0)

        with pytest.raises(Unavailable):
            progress.lost(None, 2.0)

    async def test_resumes_a_request_by_its_id(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running)) as client:
            answer = asyncio.create_task(client.generate("x"))
            request_id = await scheduler.submitted()
            scheduler.commit(request_id, tokens(0, 3), Kind.KIND_LENGTH)
            await answer
            events = [event async for event in client.resume(request_id)]

        assert ids(events) == tokens(0, 3)

    async def test_a_stream_that_is_left_is_cancelled(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        async with AsyncClient(address(running)) as client:
            stream: Any = client.stream("x")
            async with aclosing(stream):
                async for event in stream:
                    assert isinstance(event, Accepted)
                    break

        assert scheduler.all_heard("cancel")[0].request_id == event.request_id
        await wait_until_async(lambda: len(running.link.streams) == 0, description="no stream", every_s=0.005)

    @pytest.mark.parametrize("options", [{"idempotency_key": "mine"}, {"keep": True}])
    async def test_unless_somebody_may_come_back_for_it(
        self, running: Running, scheduler: FakeScheduler, options: Any
    ) -> None:
        async with AsyncClient(address(running)) as client:
            stream: Any = client.stream("x", **options)
            async with aclosing(stream):
                await anext(stream)
            await scheduler.wait_heard("detach")

        assert scheduler.all_heard("cancel") == []

    async def test_several_outputs_of_one_prompt(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running)) as client:
            answer = asyncio.create_task(client.generate("x", n=3, seed=7))
            for count in (3, 2, 1):
                request_id = await scheduler.submitted(count)
                scheduler.commit(request_id, tokens(0, count), Kind.KIND_LENGTH)
            first = await answer

        assert [list(one.token_ids) for one in (first, *first.more)] == [
            tokens(0, count) for count in (1, 2, 3)
        ]
        assert [one.accepted.seed for one in (first, *first.more)] == [7, 8, 9]
        assert [one.text for one in (first, *first.more)] == [
            running.model.decode(tokens(0, count)) for count in (1, 2, 3)
        ]

    async def test_several_outputs_survive_the_death_of_their_gateway(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        one: Running = await start_gateway(scheduler.address)
        two: Running = await start_gateway(scheduler.address)
        read: list[list[Event]] = [[], []]
        lost = False
        async with AsyncClient([address(one), address(two)]) as client:
            stream = client.stream("x", n=2)
            async for event in stream:
                read[stream.choice].append(event)
                if stream.choice == 1 and isinstance(event, Accepted):
                    first, second = (await scheduler.submitted(1)), (await scheduler.submitted(2))
                    scheduler.commit(first, tokens(0, 4))
                    scheduler.commit(second, tokens(0, 2), Kind.KIND_STOP)
                if len(ids(read[0])) == 4 and shape(read[1])[-1] == "Ended" and not lost:
                    lost = True
                    await one.gateway.app.server.stop(None)
                    scheduler.replay_chunk = 3  # tokens that are sent again arrive in other messages
                    scheduler.commit(first, tokens(4, 7), Kind.KIND_LENGTH)

        assert [shape(events) for events in read] == [["Accepted", "Delta", "Ended"]] * 2
        assert [ids(events) for events in read] == [tokens(0, 7), tokens(0, 2)]
        assert ["".join(event.text for event in events if isinstance(event, Delta)) for events in read] == [
            one.model.decode(tokens(0, 7)),
            one.model.decode(tokens(0, 2)),
        ]

    async def test_an_output_whose_request_is_lost_does_not_go_on_with_that_of_another(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        """Its key leads to a new request, with another seed, where the record has lost the key or let it expire."""
        one: Running = await start_gateway(scheduler.address)
        two: Running = await start_gateway(scheduler.address)
        async with AsyncClient([address(one), address(two)]) as client, client.stream("x", n=2) as stream:
            begun = [(await anext(stream)).request_id for _ in range(2)]  # type: ignore[union-attr]
            scheduler.commit(begun[0], tokens(0, 4))
            assert ids([await anext(stream)]) == tokens(0, 4)
            await one.gateway.app.server.stop(None)
            scheduler.record.keys.clear()
            following = asyncio.create_task(anext(stream))
            another = await scheduler.submitted(3)
            scheduler.commit(another, [*tokens(20, 24), *tokens(4, 6)])
            with pytest.raises(NotFound, match=begun[0]):
                await following
            assert another in {cancel.request_id for cancel in scheduler.all_heard("cancel")}

    def test_an_output_that_has_ended_gets_nothing_of_another_request(self) -> None:
        progress = Progress(make_request("x", n=2), timeout_s=None, reconnect_s=30.0, retry_s=30.0, now=0.0)
        delta = Delta(text="a", token_ids=[40], cursor=Cursor(next_token=1, text_offset=1))
        longer = Delta(text="b", token_ids=[41], first_token=1, cursor=Cursor(next_token=2, text_offset=2))
        first = [accepted("s0.a"), GenerateEvent(delta=delta), GenerateEvent(end=Ended())]
        second = [accepted("s0.c"), GenerateEvent(delta=longer), GenerateEvent(end=Ended())]
        for message in [*first, accepted("s0.b", choice=1)]:
            assert progress.take(message, 0.0)
        progress.lost(None, 0.0)

        assert [progress.take(message, 0.0) for message in second] == [None] * 3

    async def test_several_outputs_that_are_left_are_all_cancelled(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        async with AsyncClient(address(running)) as client, client.stream("x", n=2) as events:
            await anext(events)
            await anext(events)
        cancelled = {cancel.request_id for cancel in scheduler.all_heard("cancel")}

        assert cancelled == set(scheduler.record.requests)
        assert len(cancelled) == 2

    async def test_no_output_that_is_left_waits_until_another_is_cancelled(
        self, start_gateway: StartGateway, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A gateway that hangs holds up the caller for one time limit, not for one of each output."""
        running: Running = await start_gateway(scheduler.address, scheduler_wait_s=1000.0)
        monkeypatch.setattr("laps_sd.client.aio.LEAVING_S", 1000.0)
        monkeypatch.setattr(scheduler, "_on_cancel", lambda *_: None)
        async with AsyncClient(address(running)) as client:
            stream = client.stream("x", n=2)
            await anext(stream)
            await anext(stream)
            leaving = asyncio.create_task(stream.aclose())
            await scheduler.wait_heard("cancel", 2)
            for cancel in scheduler.all_heard("cancel"):
                answer = link_pb2.CancelReply(cancel_id=cancel.cancel_id, found=True, cancelled=True)
                scheduler.say(link_pb2.GatewayLinkReply(cancel_reply=answer))
            await leaving

    async def test_cancels_explains_and_lists(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running)) as client:
            answer = asyncio.create_task(client.generate("x"))
            request_id = await scheduler.submitted()

            assert (await client.explain(request_id)).policy == "fcfs"
            assert await client.cancel(request_id)
            assert (await answer).end.finish_reason == FinishReason.FINISH_REASON_CANCELLED
            assert [model.name for model in await client.models()] == ["tiny"]

    async def test_refusals_are_our_errors(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running), retry_s=1) as client:
            with pytest.raises(InvalidArgument) as invalid:
                await client.generate("x", top_p=2)
            assert invalid.value.violations == (("sampling.top_p", "must be above 0 and at most 1, got 2"),)
            with pytest.raises(NotFound):
                await client.cancel("s0.unknown")
            with pytest.raises(NotFound):
                await anext(client.resume("s0.unknown"))
            scheduler.refuse = link_pb2.SubmitRefused(
                reason=link_pb2.SubmitRefused.REASON_QUEUE_FULL, retry_after_ms=1500
            )
            with pytest.raises(ResourceExhausted) as full:
                await client.generate("x")
            assert full.value.retry_after_s == 1.5

    async def test_a_gateway_that_is_not_there_is_told_when_patience_ends(self) -> None:
        async with AsyncClient(f"127.0.0.1:{free_port()}", retry_s=0.1) as client:
            with pytest.raises(Unavailable):
                await client.generate("x")
            with pytest.raises(Unavailable):
                await client.models()

    async def test_what_says_when_to_come_again_is_repeated_as_the_same_request(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        scheduler.refuse = link_pb2.SubmitRefused(
            reason=link_pb2.SubmitRefused.REASON_QUEUE_FULL, retry_after_ms=10
        )
        async with AsyncClient(address(running), retry_s=30) as client:
            answer = asyncio.create_task(client.generate("x"))
            await scheduler.wait_heard("submit", 2)
            scheduler.refuse = None
            request_id = await scheduler.submitted()
            scheduler.commit(request_id, tokens(0, 3), Kind.KIND_LENGTH)
            response = await answer

        assert list(response.token_ids) == tokens(0, 3)
        assert len({submit.idempotency_key for submit in scheduler.all_heard("submit")}) == 1

    async def test_what_is_wrong_is_not_repeated(self, running: Running, scheduler: FakeScheduler) -> None:
        scheduler.refuse = link_pb2.SubmitRefused(reason=link_pb2.SubmitRefused.REASON_KEY_CONFLICT)
        async with AsyncClient(address(running), retry_s=30) as client:
            with pytest.raises(AlreadyExists):
                await client.generate("x")

        assert len(scheduler.all_heard("submit")) == 1

    async def test_another_gateway_takes_the_call_of_one_that_is_not_there(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        async with AsyncClient([f"127.0.0.1:{free_port()}", address(running)], retry_s=30) as client:
            assert [model.name for model in await client.models()] == ["tiny"]

    async def test_the_call_after_one_that_failed_at_an_address_goes_to_the_next(
        self, running: Running
    ) -> None:
        async with AsyncClient([f"127.0.0.1:{free_port()}", address(running)], retry_s=0) as client:
            with pytest.raises(Unavailable):
                await client.models()
            assert [model.name for model in await client.models()] == ["tiny"]

    async def test_leaving_the_block_cancels(self, running: Running, scheduler: FakeScheduler) -> None:
        async with AsyncClient(address(running)) as client:
            with pytest.raises(RuntimeError):
                async with client.stream("x") as events:
                    accepted = await anext(events)
                    raise RuntimeError("the caller has other things to do")
            assert isinstance(accepted, Accepted)
            assert scheduler.all_heard("cancel")[0].request_id == accepted.request_id

    async def test_close_ends_what_other_tasks_wait_for(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        client = AsyncClient(address(running))
        waited_for, left = client.stream("x"), client.stream("x")
        known = [await anext(stream) for stream in (waited_for, left)]
        waiting = asyncio.create_task(anext(waited_for))
        answer = asyncio.create_task(client.generate("x"))
        await scheduler.submitted(3)
        await client.close()

        for closed in (waiting, answer, client.models(), anext(client.stream("x")), anext(left)):
            with pytest.raises(ValueError, match=r"^the client is closed$"):
                await closed
        await left.aclose()
        await client.close()
        cancelled = {cancel.request_id for cancel in scheduler.all_heard("cancel")}
        assert cancelled >= {accepted.request_id for accepted in known}

    async def test_close_does_not_cancel_a_task_that_leaves_its_stream(
        self, running: Running, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("laps_sd.client.aio.LEAVING_S", 1000.0)
        monkeypatch.setattr(scheduler, "_on_cancel", lambda *_: None)
        client = AsyncClient(address(running))
        stream = client.stream("x")
        await anext(stream)
        leaving = asyncio.create_task(stream.aclose())
        await scheduler.wait_heard("cancel")
        await client.close()

        await leaving

    async def test_a_stream_that_is_left_right_before_its_client_is_cancelled(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        async with AsyncClient(address(running)) as client:
            async for event in client.stream("x"):
                assert isinstance(event, Accepted)
                break

        assert [cancel.request_id for cancel in scheduler.all_heard("cancel")] == [event.request_id]

    async def test_belongs_to_the_loop_of_its_first_call(self, running: Running) -> None:
        client = AsyncClient(address(running))  # a global variable of a program

        async def program() -> None:
            assert await client.models()
            async with client.stream("x") as events:
                assert isinstance(await anext(events), Accepted)

        await asyncio.to_thread(asyncio.run, program())
        with pytest.raises(RuntimeError, match="another event loop: create one for each loop"):
            await client.models()

    async def test_a_stream_may_be_closed_after_its_client(self, running: Running) -> None:
        async with AsyncClient(address(running)) as client:
            stream = client.stream("x")
            await anext(stream)
        await stream.aclose()

    async def test_tokens_and_back(self, running: Running) -> None:
        async with AsyncClient(address(running)) as client:
            ids = await client.tokenize("hello world")
            assert ids == running.model.encode_text("hello world")
            assert await client.detokenize(ids) == "hello world"

    @pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
    async def test_a_time_limit_without_end_is_none(self, running: Running, timeout_s: float) -> None:
        async with AsyncClient(address(running)) as client:
            assert await client.models(timeout_s=timeout_s)
            async with client.stream("x", timeout_s=timeout_s) as events:
                assert isinstance(await anext(events), Accepted)

    async def test_the_hard_deadline_holds(self, running: Running) -> None:
        async with AsyncClient(address(running)) as client:
            with pytest.raises(DeadlineExceeded):
                await client.generate("x", timeout_s=0.2)


class TestClient:
    """The blocking client runs in a thread; the loop of gateway and scheduler runs in another."""

    @pytest.fixture
    def client(self, running: Running) -> Iterator[Client]:
        with Client(address(running)) as client:
            yield client

    async def test_generates(self, client: Client, scheduler: FakeScheduler) -> None:
        answer = asyncio.create_task(asyncio.to_thread(client.generate, "x"))
        scheduler.commit(await scheduler.submitted(), tokens(0, 5), Kind.KIND_LENGTH)

        assert list((await answer).token_ids) == tokens(0, 5)

    async def test_several_outputs_of_one_prompt(self, client: Client, scheduler: FakeScheduler) -> None:
        def read() -> list[tuple[int, str]]:
            stream = client.stream("x", n=2)
            return [(stream.choice, type(event).__name__) for event in stream]

        reading = asyncio.create_task(asyncio.to_thread(read))
        second = await scheduler.submitted(2)
        for request_id in (second, await scheduler.submitted(1)):
            scheduler.commit(request_id, tokens(0, 1), Kind.KIND_STOP)
        events = await reading

        assert events[:2] == [(0, "Accepted"), (1, "Accepted")]
        assert sorted(events[2:]) == [(0, "Delta"), (0, "Ended"), (1, "Delta"), (1, "Ended")]

    async def test_a_stream_survives_the_death_of_its_gateway(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        one: Running = await start_gateway(scheduler.address)
        two: Running = await start_gateway(scheduler.address)

        def read(client: Client) -> list[Event]:
            return list(client.stream("x"))

        with Client([address(one), address(two)]) as client:
            reading = asyncio.create_task(asyncio.to_thread(read, client))
            request_id = await scheduler.submitted()
            scheduler.commit(request_id, tokens(0, 4))
            await wait_until_async(
                lambda: all(
                    not stream.waiting.token_ids and stream.next_token == 4 for stream in one.link.streams
                ),
                description="four tokens passed on",
                every_s=0.005,
            )
            await one.gateway.app.server.stop(None)
            scheduler.commit(request_id, tokens(4, 7), Kind.KIND_LENGTH)
            events = await reading

        assert shape(events) == ["Accepted", "Delta", "Ended"]
        assert ids(events) == tokens(0, 7)
        assert isinstance(events[-1], Ended)

    async def test_a_stream_that_is_left_is_cancelled(
        self, client: Client, running: Running, scheduler: FakeScheduler
    ) -> None:
        def leave() -> str:
            stream: Any = client.stream("x")
            event = next(stream)
            stream.close()
            return str(event.request_id)

        request_id = await asyncio.to_thread(leave)

        assert scheduler.all_heard("cancel")[0].request_id == request_id
        await wait_until_async(lambda: len(running.link.streams) == 0, description="no stream", every_s=0.005)

    async def test_cancels_explains_lists_and_raises(self, client: Client, scheduler: FakeScheduler) -> None:
        answer = asyncio.create_task(asyncio.to_thread(client.generate, "x"))
        request_id = await scheduler.submitted()

        assert (await asyncio.to_thread(client.explain, request_id)).policy == "fcfs"
        assert await asyncio.to_thread(client.cancel, request_id)
        assert (await answer).end.finish_reason == FinishReason.FINISH_REASON_CANCELLED
        assert [model.name for model in await asyncio.to_thread(client.models)] == ["tiny"]
        with pytest.raises(InvalidArgument):
            await asyncio.to_thread(client.generate, "x", top_p=2)
        with pytest.raises(NotFound):
            await asyncio.to_thread(client.cancel, "s0.unknown")


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("top_p", "must be at most 1", ("top_k", "must not be negative")),
        ResourceExhausted("full", retry_after_s=2.5),
        NotFound("no such request"),
    ],
)
def test_an_error_crosses_the_border_of_a_process(error: LapsSdError) -> None:
    """A multiprocessing.Pool waits without end for a result that it cannot read."""
    copied = pickle.loads(pickle.dumps(error))

    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        Client([])


def test_both_clients_have_the_same_calls() -> None:
    """Both clients have the same calls, with the same names and arguments."""

    def calls(kind: type) -> dict[str, str]:
        public = {name: call for name, call in vars(kind).items() if not name.startswith("_")}
        return {
            name: str(inspect.signature(call).replace(return_annotation="")) for name, call in public.items()
        }

    assert calls(Client) == calls(AsyncClient)
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)
    assert {"generate", "stream", "resume", "cancel", "explain", "models", "tokenize", "detokenize"} <= set(
        calls(Client)
    )
