"""Every call of the public contract, over real gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway.api import inference
from gateway.calls.calls import Caller
from gateway.calls.completion import body_hash
from gateway.calls.prompts import SYSTEM_CHARACTERS, Prompts
from gateway.calls.validation import LOGPROB_BYTES, TOKEN_BYTES
from gateway.model.files import ModelFiles, load_model
from laps_sd.contract.length_features import FeatureHash, problem_of
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, NAME_BYTES, name_blocks
from laps_sd.errors import retry_after_s
from laps_sd.service import metrics
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2_grpc
from laps_sd.v1.inference_pb2 import (
    CancelRequest,
    ChatMessage,
    ChatMessages,
    Cursor,
    DetokenizeRequest,
    ExplainRequest,
    FinishReason,
    GenerateRequest,
    ListModelsRequest,
    OutputFormat,
    ResumeRequest,
    SamplingParams,
    Speculation,
    SpeculationSummary,
    Timing,
    TokenIds,
    TokenizeRequest,
    TokenLogprob,
    TokenLogprobs,
)
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import CONTEXT, Running, StartGateway, write_model
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import has_retry_info, ids_of, read_tokens, rest, text_of, violations

Refused = link_pb2.SubmitRefused
HELLO = GenerateRequest(text="the quick")


async def nobody_left(running: Running) -> None:
    await wait_until_async(
        lambda: len(running.link.streams) == 0, description="an empty registry", every_s=0.005
    )


class TestConnections:
    async def test_an_old_one_gets_no_new_call_and_its_stream_goes_on(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, model: ModelFiles
    ) -> None:
        """So the clients of a Service reach gateways that started after them."""
        running: Running = await start_gateway(scheduler.address, max_connection_age_s=1.0)
        await asyncio.wait_for(running.link.greeted.wait(), 10)
        ids = model.encode_rendered("hello world")
        stream = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, ids[:2])
        events = await read_tokens(stream, 2)

        async with asyncio.timeout(30):
            await running.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert (await running.stub.ListModels(ListModelsRequest())).models  # over another connection
        scheduler.commit(request_id, ids[2:], Kind.KIND_STOP)
        assert ids_of(events + await rest(stream)) == ids


class TestGenerateStream:
    async def test_is_accepted_then_deltas_then_one_end(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        ids = model.encode_rendered("hello world")
        call = running.stub.GenerateStream(GenerateRequest(text="the quick", sampling=SamplingParams(seed=7)))
        request_id = await scheduler.submitted()
        accepted = (await call.read()).accepted

        assert accepted.request_id == request_id
        assert request_id.startswith("s0.")
        assert accepted.model == "tiny"
        assert accepted.seed == 7
        assert accepted.prompt_tokens == len(model.encode_text("the quick"))
        assert not accepted.attached

        scheduler.commit(request_id, ids[:2])
        events = await read_tokens(call, 2)
        scheduler.commit(
            request_id,
            ids[2:],
            link_pb2.RequestEnd(
                kind=Kind.KIND_STOP,
                speculation=SpeculationSummary(rounds=3, mean_acceptance_length=1.0),
                timing=Timing(total_s=1.5),
                cached_prompt_tokens=1,
            ),
        )
        events += await rest(call)

        end = events[-1].end
        assert ids_of(events) == ids
        assert text_of(events) == "hello world"
        assert end.finish_reason == FinishReason.FINISH_REASON_STOP
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (accepted.prompt_tokens, len(ids))
        assert end.usage.cached_prompt_tokens == 1
        assert end.speculation == SpeculationSummary(rounds=3, mean_acceptance_length=1.0)
        assert end.timing.total_s == 1.5
        assert end.request_id == request_id
        assert [event.WhichOneof("event") for event in events].count("end") == 1
        assert len(running.link.streams) == 0

    async def test_what_arrived_together_goes_out_together(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        ids = model.encode_rendered("one two three four")
        scheduler.answers_submits = False
        call = running.stub.GenerateStream(HELLO)
        submit = await scheduler.wait_heard("submit")
        scheduler.answers_submits = True
        scheduler._on_submit(scheduler.connections[0], submit)
        for token in ids:
            scheduler.commit(submit.request_id, [token])
        scheduler.commit(submit.request_id, (), Kind.KIND_LENGTH)
        events = await rest(call)

        assert ids_of(events) == ids
        assert len(events) <= len(ids) + 2

    async def test_a_stop_string_is_cut_from_the_end(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        ids = model.encode_rendered("one two STOP.")
        call = running.stub.GenerateStream(GenerateRequest(text="x", sampling=SamplingParams(stop=["STOP"])))
        request_id = await scheduler.submitted()
        for token in ids:
            scheduler.commit(request_id, [token])
        scheduler.commit(
            request_id, (), link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, cut_characters=len("STOP."))
        )
        events = await rest(call)

        assert text_of(events) == "one two "
        assert ids_of(events) == ids
        assert events[-1].end.finish_reason == FinishReason.FINISH_REASON_STOP_SEQUENCE

    async def test_log_probabilities_come_with_their_tokens(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(GenerateRequest(text="x", logprobs=0))
        request_id = await scheduler.submitted()
        scheduler.record.requests[request_id].logprobs = [TokenLogprobs(logprob=-n) for n in range(3)]
        scheduler.commit(request_id, [70, 71, 72], Kind.KIND_LENGTH)
        events = await rest(call)

        assert [p.logprob for event in events for p in event.delta.logprobs] == [0, -1, -2]
        assert scheduler.record.requests[request_id].submit.specification.HasField("logprobs")

    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            (Kind.KIND_TIME_LIMIT, FinishReason.FINISH_REASON_TIME_LIMIT),
            (Kind.KIND_CANCELLED, FinishReason.FINISH_REASON_CANCELLED),
            (Kind.KIND_ERROR, FinishReason.FINISH_REASON_ERROR),
            (Kind.KIND_UNSPECIFIED, FinishReason.FINISH_REASON_ERROR),
        ],
    )
    async def test_every_other_end_is_an_ended_message(
        self, running: Running, scheduler: FakeScheduler, kind: int, reason: int
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, [70], link_pb2.RequestEnd(kind=kind, detail="a word"))
        end = (await rest(call))[-1].end

        assert end.finish_reason == reason
        assert end.error == ("" if reason == FinishReason.FINISH_REASON_TIME_LIMIT else "a word")
        assert await call.code() == grpc.StatusCode.OK

    async def test_the_hard_deadline_is_a_status(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, [70], Kind.KIND_DEADLINE)

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(call)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await nobody_left(running)

    async def test_deadline_limits_hints_and_grace_travel(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        request = GenerateRequest(
            text="x",
            idempotency_key="mine",
            priority=3,
            time_limit_ms=1500,
            workload_class="chat",
            expected_output_tokens=12,
            keep=True,
            speculation=Speculation(mode=Speculation.MODE_OFF),
            sampling=SamplingParams(
                max_tokens=5, temperature=0, top_p=0.5, top_k=4, stop=["a"], ignore_eos=True
            ),
        )
        traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        call = running.stub.GenerateStream(
            request, timeout=20, metadata=(("traceparent", traceparent), ("laps-sd-tenant", "acme"))
        )
        submit: link_pb2.Submit = await scheduler.wait_heard("submit")

        assert 19_000 < submit.deadline_in_ms <= 21_000  # gRPC rounds it up
        assert submit.time_limit_ms == 1500
        assert submit.grace_ms == 30_000
        assert submit.keep
        assert submit.tenant == "acme"
        assert submit.traceparent == traceparent
        assert submit.body_hash == body_hash(request)
        assert (submit.priority, submit.workload_class, submit.expected_output_tokens) == (3, "chat", 12)
        specification = submit.specification
        assert specification.request_id == submit.request_id
        assert (
            specification.sampling.max_tokens,
            specification.sampling.temperature,
            specification.sampling.top_p,
        ) == (5, 0, 0.5)
        assert (
            specification.sampling.top_k,
            list(specification.sampling.stop),
            specification.sampling.ignore_eos,
        ) == (4, ["a"], True)
        assert specification.HasField("max_draft_tokens") and specification.max_draft_tokens == 0
        call.cancel()

    async def test_of_two_deadlines_the_earlier_holds(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        in_a_minute = round((time.time() + 60) * 1000)
        calls = [
            running.stub.GenerateStream(
                GenerateRequest(text="x", deadline_unix_ms=in_a_minute), timeout=timeout
            )
            for timeout in (None, 600, 5)
        ]
        for call in calls:
            await call.read()
        by_timeout = {round(submit.deadline_in_ms / 60_000, 1) for submit in scheduler.all_heard("submit")}
        for call in calls:
            call.cancel()

        assert by_timeout == {1.0, 0.1}

    async def test_a_deadline_in_another_century_is_none(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(GenerateRequest(text="x", deadline_unix_ms=9 * 10**12))
        await call.read()
        call.cancel()

        assert not scheduler.all_heard("submit")[0].HasField("deadline_in_ms")

    async def test_a_deadline_in_the_past_is_one_that_passed(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="x", deadline_unix_ms=10**12))

        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert scheduler.all_heard("submit") == []

    async def test_a_deadline_ends_the_wait_for_a_scheduler(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        scheduler.answers_submits = False
        soon = round((time.time() + 0.1) * 1000)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="x", deadline_unix_ms=soon))

        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await nobody_left(running)

    async def test_without_a_deadline_key_or_seed_there_is_none_no_grace_and_a_random_seed(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        calls = [running.stub.GenerateStream(HELLO) for _ in range(2)]
        await scheduler.wait_heard("submit", 2)
        one, two = scheduler.all_heard("submit")

        assert not one.HasField("deadline_in_ms")
        assert one.grace_ms == 0
        assert one.tenant == "anonymous"
        assert one.specification.sampling.seed != two.specification.sampling.seed
        assert one.request_id != two.request_id
        assert one.specification.sampling.temperature == 1.0
        assert one.specification.sampling.top_p == 1.0
        assert one.specification.sampling.max_tokens == CONTEXT - len(one.specification.prompt_ids)
        for call in calls:
            call.cancel()

    async def test_messages_go_through_the_chat_template(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        messages = [ChatMessage(role="system", content="be kind"), ChatMessage(role="user", content="hi")]
        call = running.stub.GenerateStream(GenerateRequest(messages=ChatMessages(messages=messages)))
        submit = await scheduler.wait_heard("submit")

        rendered = "<|begin|><|system|>be kind\n<|user|>hi\n<|assistant|>"
        assert list(submit.specification.prompt_ids) == model.encode_rendered(rendered)
        call.cancel()

    async def test_the_same_key_and_body_attach_to_the_request_that_exists(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        request = GenerateRequest(text="x", idempotency_key="once")
        first = running.stub.GenerateStream(request)
        request_id = await scheduler.submitted()
        accepted = (await first.read()).accepted
        second = running.stub.GenerateStream(request)
        again = (await second.read()).accepted

        assert again.attached
        assert (again.request_id, again.seed) == (request_id, accepted.seed)
        scheduler.commit(request_id, [70, 71], Kind.KIND_LENGTH)
        assert ids_of(await rest(first)) == ids_of(await rest(second)) == [70, 71]

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="y", idempotency_key="once"))
        assert error.value.code() == grpc.StatusCode.ALREADY_EXISTS
        await nobody_left(running)

    @pytest.mark.parametrize(
        ("reason", "code", "retry"),
        [
            (Refused.REASON_QUEUE_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
            (Refused.REASON_TENANT_FULL, grpc.StatusCode.RESOURCE_EXHAUSTED, True),
            (Refused.REASON_KEY_CONFLICT, grpc.StatusCode.ALREADY_EXISTS, False),
            (Refused.REASON_STORE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, True),
            (Refused.REASON_EXPIRED, grpc.StatusCode.DEADLINE_EXCEEDED, False),
            (Refused.REASON_INVALID, grpc.StatusCode.INVALID_ARGUMENT, False),
        ],
    )
    async def test_a_refusal_is_a_status(
        self, running: Running, scheduler: FakeScheduler, reason: Any, code: grpc.StatusCode, retry: bool
    ) -> None:
        scheduler.refuse = Refused(reason=reason, detail="no room today")

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(HELLO)
        assert error.value.code() == code
        assert "no room today" in (error.value.details() or "")
        assert has_retry_info(error.value) == retry
        await nobody_left(running)

    @pytest.mark.parametrize(
        ("refused_field", "problem_of_it", "field"),
        [
            ("specification.sampling.max_tokens", "must be at most 61, got 62", "sampling.max_tokens"),
            ("specification.prompt_ids", "must have at most 63 tokens, got 64", "prompt"),
            ("attachment_id", "must be short", ""),
            ("", "a sentence of a scheduler of an earlier build, which names no field", ""),
        ],
    )
    async def test_what_a_shard_cannot_hold_is_refused_by_the_clients_name_of_the_field(
        self, running: Running, scheduler: FakeScheduler, refused_field: str, problem_of_it: str, field: str
    ) -> None:
        detail = f"{refused_field} {problem_of_it}".strip()
        scheduler.refuse = Refused(reason=Refused.REASON_INVALID, detail=detail, field=refused_field)

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(HELLO)
        ((named, problem),) = violations(error.value)
        assert named == field
        assert error.value.details() == f"{field} {problem}".strip()
        assert detail.endswith(problem)

    @pytest.mark.parametrize(("fields", "cancelled"), [({}, 1), ({"idempotency_key": "k"}, 0)])
    async def test_outputs_of_a_refused_call_do_not_continue_without_a_client(
        self,
        running: Running,
        scheduler: FakeScheduler,
        monkeypatch: pytest.MonkeyPatch,
        fields: Any,
        cancelled: int,
    ) -> None:
        on_submit = scheduler._on_submit

        def refuse_the_second(connection: Any, submit: Any) -> None:
            if scheduler.record.requests:
                scheduler.refuse = Refused(reason=Refused.REASON_TENANT_FULL)
            on_submit(connection, submit)

        monkeypatch.setattr(scheduler, "_on_submit", refuse_the_second)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="x", n=2, keep=True, **fields))
        await scheduler.wait_heard("detach")

        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        [accepted] = scheduler.record.requests
        assert [one.request_id for one in scheduler.all_heard("cancel")] == [accepted] * cancelled

    async def test_a_client_that_leaves_is_detached_and_forgotten(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        await call.read()
        call.cancel()
        detach = await scheduler.wait_heard("detach")

        assert detach.request_id == request_id
        assert detach.attachment_id == scheduler.all_heard("submit")[0].attachment_id
        assert len(running.link.streams) == 0

    async def test_a_client_that_leaves_before_acceptance_is_detached_too(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        scheduler.answers_submits = False
        call = running.stub.GenerateStream(HELLO)
        submit = await scheduler.wait_heard("submit")
        call.cancel()
        detach = await scheduler.wait_heard("detach")

        assert detach.attachment_id == submit.attachment_id
        assert len(running.link.streams) == 0

    async def test_a_slow_reader_costs_a_bounded_buffer_and_misses_nothing(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running: Running = await start_gateway(scheduler.address, stream_buffer_tokens=4096)
        # A client whose transport takes 64 KiB and no more.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.gateway.app.port}", options) as channel:
            await self._read_slowly(running, scheduler, inference_pb2_grpc.InferenceStub(channel))

    async def _read_slowly(self, running: Running, scheduler: FakeScheduler, stub: Any) -> None:
        call = stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        await call.read()
        (stream,) = running.link.streams
        pauses = metrics.value("laps_sd_gateway_slow_reader_pauses_total")
        scheduler.replay_chunk = 4000
        # More than the transport takes from a server whose client does not read.
        tokens = [40 + n % 50 for n in range(300_000)]
        for begin in range(0, len(tokens), 1000):
            scheduler.commit(request_id, tokens[begin : begin + 1000])
        await wait_until_async(lambda: stream.paused, description="a full buffer", every_s=0.005)
        scheduler.commit(request_id, (), Kind.KIND_LENGTH)

        assert len(stream.waiting.token_ids) == 4096
        assert metrics.value("laps_sd_gateway_slow_reader_pauses_total") > pauses
        events = await rest(call)
        assert ids_of(events) == tokens
        assert text_of(events) == running.model.decode(tokens)


class TestGenerate:
    async def test_answers_once_with_everything(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        ids = model.encode_rendered("hello world")
        call = running.stub.Generate(GenerateRequest(text="x", logprobs=0))
        request_id = await scheduler.submitted()
        scheduler.record.requests[request_id].logprobs = [TokenLogprobs(logprob=-1) for _ in ids]
        for token in ids:
            scheduler.commit(request_id, [token])
        scheduler.commit(request_id, (), Kind.KIND_STOP)
        response = await call

        assert response.accepted.request_id == request_id
        assert response.text == "hello world"
        assert list(response.token_ids) == ids
        assert len(response.logprobs) == len(ids)
        assert response.end.finish_reason == FinishReason.FINISH_REASON_STOP
        assert len(running.link.streams) == 0

    async def test_an_answer_may_be_larger_than_a_request(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running: Running = await start_gateway(scheduler.address, max_message_bytes=65536)
        call = running.stub.Generate(GenerateRequest(text="x", logprobs=20, n=4))
        await scheduler.submitted(4)
        tops = [TokenLogprob(token_id=100_000 + n, logprob=-1.5) for n in range(20)]
        for request_id, recorded in scheduler.record.requests.items():
            recorded.logprobs = [TokenLogprobs(logprob=-1, top=tops)] * 200
            scheduler.commit(request_id, [70] * 200, Kind.KIND_LENGTH)
        response = await call

        assert response.ByteSize() > 2 * 65536
        assert response.ByteSize() <= 4 * 200 * (TOKEN_BYTES + 21 * LOGPROB_BYTES)

    async def test_an_answer_that_may_be_too_large_for_one_message_is_refused_before_it_is_computed(
        self, scheduler: FakeScheduler, start_gateway: StartGateway, tmp_path: Path
    ) -> None:
        model = load_model(write_model(tmp_path, context=8192), name="tiny")
        running: Running = await start_gateway(scheduler.address, model=model)
        request = GenerateRequest(text="x", logprobs=20, n=16, sampling=SamplingParams(max_tokens=8000))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(request, timeout=20)
        stream = running.stub.GenerateStream(request)
        await scheduler.submitted(16)
        stream.cancel()

        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        ((field, problem),) = violations(error.value)
        assert field == "sampling.max_tokens"
        assert (
            "at most 16777216 can be sent; a stream (GenerateStream, stream: true) has no such limit"
            in problem
        )
        assert len(scheduler.all_heard("submit")) == 16

    async def test_token_ids_are_used_as_they_stand(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.Generate(GenerateRequest(token_ids=TokenIds(ids=[70, 71])))
        submit = await scheduler.wait_heard("submit")

        assert list(submit.specification.prompt_ids) == [70, 71]
        call.cancel()

    async def test_the_gateway_counts_how_requests_end(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        before = metrics.value("laps_sd_gateway_requests_total", {"end": "length"})
        call = running.stub.Generate(HELLO)
        scheduler.commit(await scheduler.submitted(), [70], Kind.KIND_LENGTH)
        await call

        assert metrics.value("laps_sd_gateway_requests_total", {"end": "length"}) == before + 1


class TestResume:
    async def test_continues_exactly_from_every_cursor(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        text = "one €2 ST STO 😀 STOP"
        ids = model.encode_rendered(text)
        call = running.stub.GenerateStream(
            GenerateRequest(text="x", sampling=SamplingParams(stop=["STOP", "€€"]))
        )
        request_id = await scheduler.submitted()
        events = [await call.read()]
        for count, token in enumerate(ids, start=1):
            scheduler.commit(request_id, [token])
            events += await read_tokens(call, 1)
            assert len(ids_of(events)) == count
        scheduler.commit(request_id, (), link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, cut_characters=4))
        events += await rest(call)
        whole = text.removesuffix("STOP")
        assert text_of(events) == whole

        for count, event in enumerate(events):
            if not event.HasField("delta"):
                continue
            cursor = event.delta.cursor
            resumed = await rest(running.stub.Resume(ResumeRequest(request_id=request_id, cursor=cursor)))
            assert text_of(events[: count + 1]) + text_of(resumed) == whole
            assert ids_of(resumed) == ids[cursor.next_token :]
            assert resumed[0].accepted.attached
            assert resumed[-1].end == events[-1].end
        assert len(running.link.streams) == 0

    async def test_without_a_cursor_replays_everything(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, [70, 71, 72], Kind.KIND_LENGTH)
        first = await rest(call)
        again = await rest(running.stub.Resume(ResumeRequest(request_id=request_id)))

        assert (ids_of(again), text_of(again)) == (ids_of(first), text_of(first))

    async def test_beyond_what_is_committed_waits(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        scheduler.commit(request_id, [70, 71])
        resumed = running.stub.Resume(
            ResumeRequest(request_id=request_id, cursor=Cursor(next_token=3, text_offset=3))
        )
        assert (await resumed.read()).HasField("accepted")
        scheduler.commit(request_id, [72, 73, 74], Kind.KIND_LENGTH)

        assert ids_of(await rest(resumed)) == [73, 74]
        assert ids_of(await rest(call)) == [70, 71, 72, 73, 74]

    @pytest.mark.parametrize("request_id", ["s0.unknown", "s9.unknown"])
    async def test_of_an_unknown_request_is_not_found(self, running: Running, request_id: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(running.stub.Resume(ResumeRequest(request_id=request_id)))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        await nobody_left(running)

    async def test_of_another_tenants_request_is_not_found(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(
                running.stub.Resume(
                    ResumeRequest(request_id=request_id), metadata=(("laps-sd-tenant", "other"),)
                )
            )
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        call.cancel()


class TestChoices:
    """n above 1: every choice is a request of its own."""

    async def test_each_has_an_id_a_seed_an_end_and_its_number(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(
            GenerateRequest(text="x", n=3, sampling=SamplingParams(seed=2**64 - 1))
        )
        ids = [await scheduler.submitted(count) for count in (1, 2, 3)]
        for number in (2, 0, 1):
            scheduler.commit(ids[number], [70 + number, 80], Kind.KIND_LENGTH)
        events = await rest(call)

        assert [event.WhichOneof("event") for event in events[:3]] == ["accepted"] * 3
        assert [event.accepted.request_id for event in events[:3]] == ids
        assert [event.accepted.seed for event in events[:3]] == [2**64 - 1, 0, 1]
        for number in range(3):
            of_choice = [event for event in events if event.choice == number]
            assert ids_of(of_choice) == [70 + number, 80]
            assert [event.WhichOneof("event") for event in of_choice].count("end") == 1
            assert of_choice[-1].end.request_id == ids[number]
        await nobody_left(running)

    async def test_one_that_ends_between_two_reads_is_not_lost(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        caller = Caller(tenant="anonymous")
        async with running.gateway.calls.generate([GenerateRequest(text="x", n=2)], caller) as generation:
            first, second = list(scheduler.record.requests)
            scheduler.commit(first, [70], Kind.KIND_LENGTH)
            seen = list(await generation.read())
            scheduler.commit(second, [71], Kind.KIND_LENGTH)
            await wait_until_async(
                lambda: all(stream.over for stream in running.link.streams), description="both ends"
            )
            while not generation.over:
                seen += await generation.read()

        assert [(choice, list(piece.token_ids), piece.end is not None) for choice, piece in seen] == [
            (0, [70], True),
            (1, [71], True),
        ]

    async def test_the_unary_call_has_them_all(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.Generate(GenerateRequest(text="x", n=2))
        first, second = [await scheduler.submitted(count) for count in (1, 2)]
        scheduler.commit(second, [71], Kind.KIND_LENGTH)
        scheduler.commit(first, [70], Kind.KIND_STOP)
        response = await call
        (other,) = response.more

        assert (list(response.token_ids), list(other.token_ids)) == ([70], [71])
        assert response.end.finish_reason == FinishReason.FINISH_REASON_STOP
        assert other.end.finish_reason == FinishReason.FINISH_REASON_LENGTH

    async def test_an_idempotency_key_names_each_of_them(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        request = GenerateRequest(text="x", n=2, idempotency_key="k")
        call = running.stub.GenerateStream(request)
        ids = [await scheduler.submitted(count) for count in (1, 2)]
        again = running.stub.GenerateStream(request)
        accepted = [(await again.read()).accepted for _ in ids]

        assert [one.request_id for one in accepted] == ids
        assert all(one.attached for one in accepted)
        call.cancel()
        again.cancel()

    async def test_no_other_key_of_a_client_is_one_of_theirs(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(GenerateRequest(text="x", n=2, idempotency_key="k"))
        for _ in range(2):
            await call.read()
        first, second = [submit.idempotency_key for submit in scheduler.all_heard("submit")]

        assert first == "k"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="x", n=2, idempotency_key=second))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call.cancel()

    async def test_all_of_them_go_with_their_client(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(GenerateRequest(text="x", n=2))
        await call.read()
        call.cancel()

        await scheduler.wait_heard("detach", 2)
        await nobody_left(running)

    @pytest.mark.parametrize("n", [0, 17])
    async def test_are_bounded(self, running: Running, n: int) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="x", n=n))
        assert violations(error.value) == [("n", f"must be from 1 to 16, got {n}")]


QUESTION = "Name the capital of Peru in one word"


def chat(*contents: str, system: str = "") -> GenerateRequest:
    """Return a chat of these contents, from the user and the assistant in turn."""
    messages = [ChatMessage(role="system", content=system)] if system else []
    messages += [
        ChatMessage(role=("user", "assistant")[number % 2], content=content)
        for number, content in enumerate(contents)
    ]
    return GenerateRequest(messages=ChatMessages(messages=messages))


def limited(max_tokens: int) -> GenerateRequest:
    return GenerateRequest(text=QUESTION, sampling=SamplingParams(max_tokens=max_tokens))


def marked(**output_format: Any) -> GenerateRequest:
    return GenerateRequest(text=QUESTION, output_format=OutputFormat(**output_format))


class TestLengthFeatures:
    """Hashed words of the prompt, by which a scheduler predicts the length of the output."""

    @staticmethod
    async def sent(running: Running, scheduler: FakeScheduler, *requests: GenerateRequest) -> list[set[int]]:
        """Return the features that the submission of each request has."""
        found = []
        for request in requests:
            call = running.stub.GenerateStream(request)
            submit = await scheduler.wait_heard("submit", len(scheduler.all_heard("submit")) + 1)
            call.cancel()
            assert problem_of(submit.length_features) == ""
            found.append(set(submit.length_features))
        return found

    async def test_of_a_text_are_those_of_its_words(self, running: Running, scheduler: FakeScheduler) -> None:
        [found] = await self.sent(running, scheduler, GenerateRequest(text=QUESTION))

        assert found == set(FeatureHash().features_of(QUESTION))
        assert len(found) > len(QUESTION.split())

    async def test_of_a_chat_are_those_of_its_last_message_and_of_what_kind_of_chat_it_is(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        first, later, other, told, told_otherwise = await self.sent(
            running,
            scheduler,
            chat(QUESTION),
            chat("hello", "hi", QUESTION),
            chat("bye", "hi", QUESTION),
            chat(QUESTION, system="be brief"),
            chat(QUESTION, system="be kind"),
        )
        words = set(FeatureHash().features_of(QUESTION))

        assert words < first and words < later and words < told
        assert later == other, "what was said before does not count"
        assert [len(found - words) for found in (first, later, told)] == [1, 1, 2]
        assert later != first, "how far the chat has got"
        assert len(told - told_otherwise) == len(told_otherwise - told) == 1, "what its instructions are"

    def test_tell_long_instructions_apart_by_their_beginning(self, model: ModelFiles) -> None:
        prompts = Prompts(model, FeatureHash())
        same = "be kind" + " " * SYSTEM_CHARACTERS
        one, other, another = (
            prompts.features_of(chat(QUESTION, system=system))
            for system in (same + "1", same + "2", "1" + same)
        )

        assert one == other != another

    async def test_tell_a_length_limit_by_powers_of_2_and_a_format(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        plain, five, seven, eight, json, grammar = await self.sent(
            running,
            scheduler,
            GenerateRequest(text=QUESTION),
            limited(5),
            limited(7),
            limited(8),
            marked(json_object=True),
            marked(grammar='start: "a"'),
        )

        assert five == seven != eight
        assert json != grammar
        for found in (five, eight, json, grammar):
            assert plain < found
            assert len(found - plain) == 1

    async def test_of_token_ids_are_none(self, running: Running, scheduler: FakeScheduler) -> None:
        request = GenerateRequest(token_ids=TokenIds(ids=[70, 71]), sampling=SamplingParams(max_tokens=5))

        assert await self.sent(running, scheduler, request) == [set()]

    async def test_are_the_same_for_every_choice(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(GenerateRequest(text=QUESTION, n=3))
        await scheduler.wait_heard("submit", 3)
        call.cancel()

        expected = FeatureHash().features_of(QUESTION)
        assert [list(submit.length_features) for submit in scheduler.all_heard("submit")] == [expected] * 3

    async def test_are_none_where_lengths_are_not_predicted(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running = await start_gateway(scheduler.address, predict_lengths=False)

        assert await self.sent(running, scheduler, limited(5), chat(QUESTION)) == [set(), set()]

    async def test_mean_nothing_without_the_key_of_the_deployment(
        self, running: Running, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        keyed = await start_gateway(scheduler.address, length_key="a secret")
        request = limited(5)
        [plain], [secret] = (
            await self.sent(running, scheduler, request),
            await self.sent(keyed, scheduler, request),
        )

        assert len(plain) == len(secret)
        assert len(plain & secret) <= 1, "by chance"
        assert set(FeatureHash("a secret").features_of(QUESTION)) < secret


class TestPromptBlocks:
    """Names of the beginning of a prompt, by which a scheduler finds the worker that has computed it."""

    @staticmethod
    async def sent(
        running: Running,
        scheduler: FakeScheduler,
        prompt_ids: list[int],
        tenant: str = "acme",
        n: int = 1,
        **more: str,
    ) -> list[link_pb2.Submit]:
        """Return the submissions of a prompt of token ids."""
        before = len(scheduler.all_heard("submit"))
        request = GenerateRequest(
            token_ids=TokenIds(ids=prompt_ids),
            sampling=SamplingParams(max_tokens=5),
            n=n,
            **more,  # type: ignore[arg-type]
        )
        call = running.stub.GenerateStream(request, metadata=(("laps-sd-tenant", tenant),))
        await scheduler.wait_heard("submit", before + n)
        call.cancel()
        return list(scheduler.all_heard("submit")[before:])

    async def test_are_of_full_blocks_under_the_name_of_the_tenant(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        prompt = [number % 300 for number in range(2 * BLOCK_TOKENS + 5)]
        [submit] = await self.sent(running, scheduler, prompt)

        assert submit.specification.cache_salt == "acme"
        assert submit.prompt_blocks == name_blocks(prompt, "acme")
        assert len(submit.prompt_blocks) == 2 * NAME_BYTES

    async def test_differ_between_tenants(self, running: Running, scheduler: FakeScheduler) -> None:
        prompt = [7] * BLOCK_TOKENS
        [acme], [other], [again] = [
            await self.sent(running, scheduler, prompt, tenant) for tenant in ("acme", "other", "acme")
        ]

        assert acme.prompt_blocks == again.prompt_blocks != other.prompt_blocks
        assert acme.specification.cache_salt != other.specification.cache_salt

    async def test_differ_between_salts_of_one_tenant_and_stay_apart_from_other_tenants(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        prompt = [7] * BLOCK_TOKENS
        sent = [
            (await self.sent(running, scheduler, prompt, tenant, cache_salt=salt))[0]
            for tenant, salt in (
                ("acme", ""),
                ("acme", "one"),
                ("acme", "one"),
                ("acme", "two"),
                ("other", "one"),
            )
        ]
        plain, one, again, two, other = (submit.prompt_blocks for submit in sent)

        assert one == again
        assert len({plain, one, two, other}) == 4
        assert all(one.prompt_blocks == name_blocks(prompt, one.specification.cache_salt) for one in sent)

    async def test_the_name_of_a_conversation_is_sent_as_a_digest_of_its_tenant_and_itself(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        sent = [
            (await self.sent(running, scheduler, [7], tenant, conversation=name))[
                0
            ].specification.conversation
            for tenant, name in (
                ("acme", "chat"),
                ("acme", "chat"),
                ("acme", "more"),
                ("other", "chat"),
                ("acme", ""),
            )
        ]

        assert sent[0] == sent[1]
        assert len(set(sent)) == 4
        assert {len(digest) for digest in sent[:4]} == {NAME_BYTES}
        assert sent[4] == b""

    async def test_are_equal_for_all_tenants_where_these_share(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running = await start_gateway(scheduler.address, share_prompts=True)
        prompt = [7] * BLOCK_TOKENS
        [acme], [other] = [
            await self.sent(running, scheduler, prompt, tenant) for tenant in ("acme", "other")
        ]

        assert acme.prompt_blocks == other.prompt_blocks == name_blocks(prompt)
        assert acme.specification.cache_salt == other.specification.cache_salt == ""

    async def test_are_none_for_less_than_a_block(self, running: Running, scheduler: FakeScheduler) -> None:
        [submit] = await self.sent(running, scheduler, [7] * (BLOCK_TOKENS - 1))

        assert submit.prompt_blocks == b""

    async def test_are_the_same_for_every_choice(self, running: Running, scheduler: FakeScheduler) -> None:
        prompt = [7] * BLOCK_TOKENS
        submits = await self.sent(running, scheduler, prompt, n=3)

        assert [submit.prompt_blocks for submit in submits] == [name_blocks(prompt, "acme")] * 3


class TestCancel:
    async def test_ends_the_stream_and_is_idempotent(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        first = await running.stub.Cancel(CancelRequest(request_id=request_id))
        second = await running.stub.Cancel(CancelRequest(request_id=request_id))

        assert (first.cancelled, second.cancelled) == (True, False)
        assert (await rest(call))[-1].end.finish_reason == FinishReason.FINISH_REASON_CANCELLED

    async def test_of_an_unknown_request_is_not_found(self, running: Running) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Cancel(CancelRequest(request_id="s0.unknown"))
        assert error.value.code() == grpc.StatusCode.NOT_FOUND

    @pytest.mark.parametrize("request_id", ["", "nonsense", "s0.a b", "x" * 200])
    async def test_of_no_request_id_at_all_is_invalid(self, running: Running, request_id: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Cancel(CancelRequest(request_id=request_id))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(error.value)[0][0] == "request_id"


class TestExplain:
    async def test_passes_on_what_the_leader_says(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        response = await running.stub.Explain(ExplainRequest(request_id=request_id))

        assert response.explanation.request_id == request_id
        assert response.explanation.policy == "fcfs"
        assert response.explanation.tenant == "anonymous"
        call.cancel()

    async def test_of_another_tenants_request_is_not_found(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()

        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Explain(
                ExplainRequest(request_id=request_id), metadata=(("laps-sd-tenant", "other"),)
            )
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
        call.cancel()


class TestTokens:
    async def test_of_a_prompt_are_those_that_generation_gets(
        self, running: Running, scheduler: FakeScheduler, model: ModelFiles
    ) -> None:
        messages = ChatMessages(messages=[ChatMessage(role="user", content="hello")])
        for prompt in ({"text": "the quick"}, {"messages": messages}):
            tokenized = await running.stub.Tokenize(TokenizeRequest(**prompt))
            call = running.stub.GenerateStream(GenerateRequest(**prompt))
            await call.read()
            submit = list(scheduler.record.requests.values())[-1].submit

            assert tokenized.token_ids == submit.specification.prompt_ids
            assert tokenized.tokens_left == CONTEXT - len(tokenized.token_ids)
            call.cancel()

    async def test_of_an_output_make_its_text(self, running: Running, model: ModelFiles) -> None:
        ids = [*model.encode_rendered("hello world"), *model.eos_ids]
        answer = await running.stub.Detokenize(DetokenizeRequest(token_ids=ids))

        assert answer.text == "hello world"

    async def test_of_a_long_output_do_not_hold_up_other_calls(
        self,
        scheduler: FakeScheduler,
        start_gateway: StartGateway,
        model_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        model = load_model(model_dir, name="tiny", context_tokens=8192)
        running: Running = await start_gateway(scheduler.address, model=model)
        ids = model.encode_rendered("hello world") * 1000
        decode, decoding, goes_on = ModelFiles.decode, threading.Event(), threading.Event()

        def slow(self: ModelFiles, ids: Sequence[int]) -> str:
            decoding.set()
            assert goes_on.wait(30)
            return decode(self, ids)

        monkeypatch.setattr(ModelFiles, "decode", slow)
        answer = asyncio.ensure_future(running.stub.Detokenize(DetokenizeRequest(token_ids=ids)))
        await wait_until_async(decoding.is_set, description="it is decoded", every_s=0.005)
        await running.stub.ListModels(ListModelsRequest())
        goes_on.set()

        assert (await answer).text == "hello world" * 1000

    @pytest.mark.parametrize(
        ("method", "request_", "field"),
        [
            ("Tokenize", TokenizeRequest(), "prompt"),
            ("Tokenize", TokenizeRequest(model="other", text="x"), "model"),
            ("Detokenize", DetokenizeRequest(token_ids=[320]), "token_ids[0]"),
            ("Detokenize", DetokenizeRequest(token_ids=[1] * (CONTEXT + 1)), "token_ids"),
            ("Detokenize", DetokenizeRequest(model="other"), "model"),
        ],
    )
    async def test_are_checked(self, running: Running, method: str, request_: Any, field: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await getattr(running.stub, method)(request_)
        assert violations(error.value)[0][0] == field


class TestTheServer:
    async def test_lists_its_model(self, running: Running) -> None:
        (listed,) = (await running.stub.ListModels(ListModelsRequest())).models

        assert (listed.name, listed.context_tokens, listed.vocab_size) == ("tiny", CONTEXT, 320)
        assert listed.has_chat_template

    async def test_reflection_lists_the_service(self, running: Running) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(call))

        assert "laps_sd.v1.Inference" in [service.name for service in answer.list_services_response.service]

    async def test_is_ready_once_a_leader_has_greeted(
        self, start_gateway: StartGateway, start_scheduler: StartGateway
    ) -> None:
        standby = await start_scheduler()
        standby.leader = ""
        running: Running = await start_gateway(standby.address)
        stub = health_pb2_grpc.HealthStub(running.channel)

        async def status(name: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return int(answer.status)

        await standby.wait_heard("hello")
        assert await status("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING
        standby.leader = None
        for name in ("readiness", "laps_sd.v1.Inference"):
            await wait_until_async(
                lambda name=name: _is_serving(status, name), description=f"{name} SERVING", every_s=0.01
            )

    @pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Resume", "Cancel", "Explain"])
    async def test_bytes_that_are_no_message_are_an_invalid_argument(
        self, running: Running, method: str
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.channel.unary_unary(f"/laps_sd.v1.Inference/{method}")(b"\xff\xff\xff")
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    async def test_text_that_is_not_utf8_is_an_invalid_argument(self, running: Running) -> None:
        field_2_text = b"\x12\x02\xc3\x28"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.channel.unary_unary("/laps_sd.v1.Inference/Generate")(field_2_text)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    async def test_more_streams_than_the_limit_are_told_to_come_back(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running: Running = await start_gateway(scheduler.address, max_streams=1)
        call = running.stub.GenerateStream(HELLO)
        request_id = await scheduler.submitted()
        await call.read()
        running.gateway.calls._refused.mean_open_s = 20.0

        advice = []
        resumed = ResumeRequest(request_id=request_id)
        generate, resume = running.stub.GenerateStream, running.stub.Resume
        for method, request in ((generate, HELLO), (resume, resumed), (generate, HELLO)):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rest(method(request))
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            advice.append(retry_after_s(error.value) or 0.0)
            assert running.gateway.calls.refusal  # what health reads takes no turn
        call.cancel()
        first, second, third = advice
        assert first == 20.0
        assert first < second < third, "each has a turn of its own"

    async def test_a_stream_whose_client_reads_nothing_makes_room_for_others(
        self, running: Running, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(inference, "STALLED_S", 0.2)
        gone = "laps_sd_gateway_requests_total", {"end": "client_disconnected"}
        before = metrics.value(*gone)
        address = f"127.0.0.1:{running.gateway.app.port}"
        window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64)]
        async with grpc.aio.insecure_channel(address, options=window) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(HELLO)
            scheduler.commit(await scheduler.submitted(), [70] * 500)
            calls, guard = running.gateway.calls, running.gateway.app.guard
            await wait_until_async(
                lambda: not (calls._open or calls.streams or guard.active), description="its place is free"
            )
            assert metrics.value(*gone) == before + 1
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rest(call)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "the client has read nothing for 0.2 s"

    async def test_calls_that_come_together_open_no_more_streams_than_the_limit(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running: Running = await start_gateway(scheduler.address, max_streams=8)
        calls = [running.stub.GenerateStream(GenerateRequest(text="hello", n=4)) for _ in range(10)]
        first = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        refused = [one for one in first if isinstance(one, grpc.aio.AioRpcError)]

        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) == 8
        assert len(running.link.streams) == 8
        for call in calls:
            call.cancel()
        await wait_until_async(
            lambda: running.gateway.calls.refusal == "", description="room again", every_s=0.005
        )

    async def test_a_refused_request_never_reaches_the_scheduler(
        self, running: Running, scheduler: FakeScheduler
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await running.stub.Generate(GenerateRequest(text="x", sampling=SamplingParams(top_p=2)))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert violations(error.value) == [("sampling.top_p", "must be above 0 and at most 1, got 2")]
        assert scheduler.all_heard("submit") == []


async def _is_serving(status: Any, name: str) -> bool:
    return bool(await status(name) == health_pb2.HealthCheckResponse.SERVING)
