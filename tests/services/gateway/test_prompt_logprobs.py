"""Log probabilities of a prompt, as clients get them: over gRPC as they are, over HTTP in the shapes of vLLM and OpenAI."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from gateway.model.files import ModelFiles
from laps_sd.client.repair import Progress, collect
from laps_sd.client.request import make_request
from laps_sd.v1.inference_pb2 import (
    Cursor,
    Delta,
    GenerateEvent,
    GenerateRequest,
    PromptLogprobs,
    ResumeRequest,
    TokenIds,
    TokenLogprob,
    TokenLogprobs,
)
from tests.services.gateway.conftest import Running, Served, Start, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.test_http import CHAT, events

PROMPT = [70, 71, 72]
BODY = {"prompt": PROMPT}
FOUND = PromptLogprobs(
    logprobs=[-1.5, -0.25],
    ranks=[7, 1],
    alternatives=2,
    alternative_ids=[80, 81, 72, 82],
    alternative_logprobs=[-0.5, -0.75, -0.25, -math.inf],
)
SCORED = GenerateRequest(token_ids=TokenIds(ids=PROMPT), prompt_logprobs=2)
OUTPUT = [90, 91]


def commit(scheduler: FakeScheduler, request_id: str, found: PromptLogprobs | None = FOUND) -> None:
    recorded = scheduler.record.requests[request_id]
    recorded.prompt_logprobs = found
    recorded.logprobs = [
        TokenLogprobs(logprob=-2.0 - n, top=[TokenLogprob(token_id=85 + n, logprob=-1.0)]) for n in range(2)
    ]
    scheduler.commit(request_id, OUTPUT[:1])
    scheduler.commit(request_id, OUTPUT[1:], Kind.KIND_LENGTH)


class TestOverGrpc:
    async def test_they_come_with_the_first_token(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.GenerateStream(SCORED)
        request_id = await scheduler.submitted()
        commit(scheduler, request_id)
        deltas = [event.delta async for event in call if event.HasField("delta")]

        assert [delta.prompt_logprobs for delta in deltas if delta.HasField("prompt_logprobs")] == [FOUND]
        assert deltas[0].HasField("prompt_logprobs") and deltas[0].first_token == 0
        submit = scheduler.record.requests[request_id].submit
        assert submit.specification.prompt_logprobs == 2
        assert not submit.prompt_blocks, "a cache saves such a prompt nothing"

    async def test_the_whole_answer_has_them(self, running: Running, scheduler: FakeScheduler) -> None:
        call = running.stub.Generate(SCORED)
        commit(scheduler, await scheduler.submitted())
        assert (await call).prompt_logprobs == FOUND

    @pytest.mark.parametrize(("cursor", "found"), [(0, FOUND), (1, None)])
    async def test_whoever_resumes_from_the_start_gets_them(
        self, running: Running, scheduler: FakeScheduler, cursor: int, found: PromptLogprobs | None
    ) -> None:
        call = running.stub.Generate(SCORED)
        request_id = await scheduler.submitted()
        commit(scheduler, request_id)
        await call
        resumed = running.stub.Resume(ResumeRequest(request_id=request_id, cursor=Cursor(next_token=cursor)))
        deltas = [event.delta async for event in resumed if event.HasField("delta")]
        assert [one.prompt_logprobs for one in deltas if one.HasField("prompt_logprobs")] == [found][
            : cursor == 0
        ]

    async def test_tokens_without_them_are_an_error(self, running: Running, scheduler: FakeScheduler) -> None:
        """A scheduler or a worker of an earlier release ignores the field."""
        call = running.stub.Generate(SCORED)
        commit(scheduler, await scheduler.submitted(), None)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert failed.value.details().startswith("the log probabilities of the prompt are missing: ")

    async def test_of_a_single_token_there_are_none(self, running: Running, scheduler: FakeScheduler) -> None:
        """An empty message says so; the record does not keep one."""
        call = running.stub.Generate(GenerateRequest(token_ids=TokenIds(ids=PROMPT[:1]), prompt_logprobs=2))
        commit(scheduler, await scheduler.submitted(), None)
        response = await call
        assert response.HasField("prompt_logprobs") and response.prompt_logprobs == PromptLogprobs()

    async def test_a_client_whose_stream_broke_gets_them_once(self) -> None:
        progress = Progress(make_request("x"), timeout_s=None, reconnect_s=30, retry_s=30, now=0.0)
        first = Delta(
            text="a", token_ids=[1], cursor=Cursor(next_token=1, text_offset=1), prompt_logprobs=FOUND
        )
        again = Delta(
            text="ab", token_ids=[1, 2], cursor=Cursor(next_token=2, text_offset=2), prompt_logprobs=FOUND
        )
        taken = [progress.take(GenerateEvent(delta=each), 0.0) for each in (first, again)]
        got = [event for chosen in taken if chosen is not None and isinstance(event := chosen[1], Delta)]
        assert [one.HasField("prompt_logprobs") for one in got] == [True, False]
        assert collect([chosen for chosen in taken if chosen is not None]).prompt_logprobs == FOUND

    async def test_more_than_the_limit_of_a_call_is_refused_before_anything_is_submitted(
        self, scheduler: FakeScheduler, start_gateway: StartGateway
    ) -> None:
        running = await start_gateway(scheduler.address, max_prompt_logprobs=17)
        await asyncio.wait_for(running.link.greeted.wait(), 10)
        two = GenerateRequest()
        two.CopyFrom(SCORED)
        two.n = 2
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.stub.Generate(two)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == (
            "prompt_logprobs must make at most 17 log probabilities in one call (of each output the tokens of its prompt,"
            " each with its alternatives), got 18"
        )
        assert scheduler.all_heard("submit") == []


async def answer_of(served: Served, path: str, body: Any, found: PromptLogprobs | None = FOUND) -> Any:
    call = asyncio.create_task(served.post(path, body))
    commit(served.scheduler, await served.scheduler.submitted(), found)
    status, _, answer = await call
    assert status == 200, answer
    return answer


def entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


class TestVllmsField:
    def expected(self, model: ModelFiles) -> list[Any]:
        t = {token: model.decode([token]) for token in (71, 72, 80, 81, 82)}
        return [
            None,
            {"71": entry(-1.5, 7, t[71]), "80": entry(-0.5, 1, t[80]), "81": entry(-0.75, 2, t[81])},
            {"72": entry(-0.25, 1, t[72]), "82": entry(-9999.0, 2, t[82])},
        ]

    async def test_of_a_completion(self, served: Served, model: ModelFiles) -> None:
        answer = await answer_of(served, "/v1/completions", BODY | {"prompt_logprobs": 2})
        (choice,) = answer["choices"]
        assert choice["prompt_logprobs"] == self.expected(model)
        assert choice["logprobs"] is None
        assert "prompt_logprobs" not in answer

    async def test_of_a_chat_stands_beside_the_choices(self, served: Served, model: ModelFiles) -> None:
        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT | {"prompt_logprobs": 0}))
        request_id = await served.scheduler.submitted()
        prompt = served.scheduler.record.requests[request_id].submit.specification.prompt_ids
        rows = len(prompt) - 1
        commit(served.scheduler, request_id, PromptLogprobs(logprobs=[-0.5] * rows, ranks=[2] * rows))
        _, _, answer = await call
        assert answer["prompt_logprobs"] == [None] + [
            {str(token): entry(-0.5, 2, served.running.model.token_bytes.bytes_of(token).decode())}
            for token in prompt[1:]
        ]
        assert "prompt_logprobs" not in answer["choices"][0]

    async def test_of_each_prompt_of_a_batch(self, served: Served) -> None:
        body = {"prompt": [PROMPT, PROMPT[:1]], "prompt_logprobs": 0}
        call = asyncio.create_task(served.post("/v1/completions", body))
        for count, found in ((1, FOUND), (2, None)):
            commit(served.scheduler, await served.scheduler.submitted(count), found)
        _, _, answer = await call
        assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [3, 1]

    async def test_is_absent_if_it_is_not_wanted(self, served: Served) -> None:
        answer = await answer_of(served, "/v1/completions", BODY | {"echo": True, "logprobs": 2})
        assert "prompt_logprobs" not in answer["choices"][0]

    async def test_tokens_without_them_are_an_error(self, served: Served) -> None:
        call = asyncio.create_task(served.post("/v1/completions", BODY | {"prompt_logprobs": 2}))
        commit(served.scheduler, await served.scheduler.submitted(), None)
        status, _, answer = await call
        assert status == 400
        assert answer["error"]["message"].startswith("the log probabilities of the prompt are missing: ")


class TestEchoWithLogprobs:
    async def test_begins_with_the_prompt(self, served: Served, model: ModelFiles) -> None:
        answer = await answer_of(served, "/v1/completions", BODY | {"echo": True, "logprobs": 1})
        (choice,) = answer["choices"]
        names = [model.decode([token]) for token in (*PROMPT, *OUTPUT)]
        assert choice["text"] == "".join(names)
        assert choice["logprobs"] == {
            "tokens": names,
            "token_logprobs": [None, -1.5, -0.25, -2.0, -3.0],
            "top_logprobs": [
                None,
                {model.decode([80]): -0.5, names[1]: -1.5},
                {model.decode([72]): -0.25},
                {model.decode([85]): -1.0, names[3]: -2.0},
                {model.decode([86]): -1.0, names[4]: -3.0},
            ],
            "text_offset": [sum(map(len, names[:at])) for at in range(5)],
        }
        (submit,) = served.scheduler.all_heard("submit")
        assert (submit.specification.logprobs, submit.specification.prompt_logprobs) == (1, 1)

    async def test_of_a_stream_come_with_its_first_event(self, served: Served, model: ModelFiles) -> None:
        body = BODY | {"echo": True, "logprobs": 1, "stream": True}
        async with served.session.post(served.url + "/v1/completions", json=body) as response:
            commit(served.scheduler, await served.scheduler.submitted())
            chunks = [chunk["choices"][0] for chunk in await events(response)]
        assert chunks[0]["text"] == model.decode(PROMPT)
        assert chunks[0]["logprobs"]["token_logprobs"] == [None, -1.5, -0.25]
        assert [value for one in chunks for value in one["logprobs"]["token_logprobs"]] == [
            None, -1.5, -0.25, -2.0, -3.0,
        ]  # fmt: skip
        assert "".join(one["text"] for one in chunks) == model.decode([*PROMPT, *OUTPUT])
        offsets = [value for one in chunks for value in one["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets) and offsets[3] == len(model.decode(PROMPT))

    async def test_both_fields_have_their_own_number_of_alternatives(self, served: Served) -> None:
        body = BODY | {"echo": True, "logprobs": 0, "prompt_logprobs": 2}
        answer = await answer_of(served, "/v1/completions", body)
        (choice,) = answer["choices"]
        tokens, values = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        assert choice["logprobs"]["top_logprobs"][1:3] == [
            {token: value} for token, value in zip(tokens[1:3], values[1:3], strict=True)
        ]
        assert list(choice["prompt_logprobs"][1]) == ["71", "80", "81"]
        (submit,) = served.scheduler.all_heard("submit")
        assert (submit.specification.logprobs, submit.specification.prompt_logprobs) == (0, 2)

    async def test_too_many_name_the_field_that_was_sent(self, serve: Start) -> None:
        served = await serve(max_prompt_logprobs=5)
        status, _, answer = await served.post("/v1/completions", BODY | {"echo": True, "logprobs": 1})
        assert (status, answer["error"]["param"]) == (400, "logprobs")
        assert "must make at most 5 log probabilities" in answer["error"]["message"]


class TestThePromptAlone:
    """`max_tokens: 0` with `echo`, for scores. As in vLLM one token is generated, and left out."""

    async def test_has_no_output(self, served: Served, model: ModelFiles) -> None:
        body = BODY | {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
        answer = await answer_of(served, "/v1/completions", body)
        (choice,) = answer["choices"]
        assert choice["text"] == model.decode(PROMPT)
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -0.25]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (PROMPT, [])
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)
        (submit,) = served.scheduler.all_heard("submit")
        assert submit.specification.sampling.max_tokens == 1

    async def test_of_a_stream(self, served: Served, model: ModelFiles) -> None:
        body = BODY | {"echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}
        async with served.session.post(served.url + "/v1/completions", json=body) as response:
            commit(served.scheduler, await served.scheduler.submitted())
            chunks = [chunk["choices"][0] for chunk in await events(response)]
        assert [one["text"] for one in chunks] == [model.decode(PROMPT), ""]
        assert [one["finish_reason"] for one in chunks] == [None, "length"]
        assert chunks[0]["logprobs"]["token_logprobs"] == [None, -1.5, -0.25]
        assert chunks[1]["logprobs"]["tokens"] == []

    async def test_without_logprobs(self, served: Served, model: ModelFiles) -> None:
        answer = await answer_of(served, "/v1/completions", BODY | {"echo": True, "max_tokens": 0})
        (choice,) = answer["choices"]
        assert (choice["text"], choice["logprobs"]) == (model.decode(PROMPT), None)
