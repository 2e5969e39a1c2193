"""OpenAI's API as a gateway serves it: raw HTTP, so that every byte of the answer can be judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.api import http_connections, http_generation, http_stream
from gateway.api.http_requests import LARGE_BODIES_AT_ONCE, LARGE_BODY_BYTES
from gateway.api.openai.long_json import json_in_parts
from gateway.api.openai.reply import Reply
from gateway.calls import calls
from gateway.model.files import ModelFiles, load_model
from laps_sd.contract.ends import CLIENT_WENT_AWAY
from laps_sd.errors import LapsSdError, StartupError
from laps_sd.service.metrics import REGISTRY
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2
from laps_sd.v1.inference_pb2 import OutputFormat, SpeculationSummary, Timing
from tests.certificates import write_certificates
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import CONTEXT, Running, Served, Start, StartGateway, write_model
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind

Refused = link_pb2.SubmitRefused
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "tiny", "prompt": "the quick"}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """Return every server-sent event, decoded; the last must be [DONE]."""
    lines = [line for line in (await response.text()).split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def next_usage(response: aiohttp.ClientResponse) -> Any:
    """Return the usage in the next server-sent event."""
    return json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))["usage"]


def ended(end: str) -> float:
    """Return how many requests ended for this reason."""
    return REGISTRY.get_sample_value("laps_sd_gateway_requests_total", {"end": end}) or 0.0


async def nobody_left(served: Served) -> None:
    await wait_until_async(
        lambda: len(served.running.link.streams) == 0, description="an empty registry", every_s=0.005
    )


class TestAWholeAnswer:
    async def test_of_a_chat(self, served: Served, model: ModelFiles) -> None:
        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT))
        end = link_pb2.RequestEnd(
            kind=Kind.KIND_STOP,
            cached_prompt_tokens=1,
            speculation=SpeculationSummary(rounds=3, drafts=2, drafted=8, accepted=6),
            timing=Timing(queued_s=0.1, first_token_s=0.2, total_s=0.5, preemptions=3),
        )
        request_id = await served.finished(end=end)
        status, headers, answer = await call
        submit = served.scheduler.record.requests[request_id].submit
        prompt, output = len(submit.specification.prompt_ids), len(model.encode_rendered("hello world"))

        assert status == 200
        assert (answer["id"], answer["object"], answer["model"]) == (request_id, "chat.completion", "tiny")
        assert headers["x-request-id"] == request_id
        (choice,) = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello world"}
        assert (choice["index"], choice["finish_reason"]) == (0, "stop")
        assert answer["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert answer["metrics"]["speculative_decoding"] == {
            "mean_acceptance_length": 4.0,
            "draft_acceptance_rate": 0.75,
            "num_spec_steps": 2,
            "num_draft_tokens": 8,
            "num_accepted_draft_tokens": 6,
        }
        assert answer["metrics"]["timing"]["preemptions"] == 3
        await nobody_left(served)

    async def test_of_a_text(self, served: Served) -> None:
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        await served.finished(end=Kind.KIND_LENGTH)
        _, _, answer = await call

        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["text"] == "hello world"
        assert answer["choices"][0]["finish_reason"] == "length"

    async def test_of_several_prompts_has_them_in_order(self, served: Served) -> None:
        body = {"prompt": ["the quick", [70, 71]], "n": 2, "seed": 5}
        call = asyncio.create_task(served.post("/v1/completions", body))
        for count, cached in ((4, 2), (3, 2), (2, 3), (1, 1)):
            end = link_pb2.RequestEnd(kind=Kind.KIND_STOP, cached_prompt_tokens=cached)
            await served.finished("one" if count < 3 else "two", end, count)
        _, _, answer = await call
        submits = [recorded.submit for recorded in served.scheduler.record.requests.values()]

        assert [choice["text"] for choice in answer["choices"]] == ["one", "one", "two", "two"]
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [submit.specification.sampling.seed for submit in submits] == [5, 6, 5, 6]
        assert list(submits[2].specification.prompt_ids) == [70, 71]
        prompt_tokens = len(submits[0].specification.prompt_ids) + 2
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
        # A client that subtracts them gets what was computed for the first output of each prompt.
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1 + 2}

    async def test_of_several_outputs_tokenizes_its_bad_words_once(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenized, encode = [], ModelFiles.encode_rendered
        monkeypatch.setattr(
            ModelFiles, "encode_rendered", lambda model, text: tokenized.append(text) or encode(model, text)
        )
        body = {"prompt": ["a", "b"], "n": 2, "bad_words": ["never"]}
        call = asyncio.create_task(served.post("/v1/completions", body))
        for count in (4, 3, 2, 1):
            await served.finished("one", count=count)
        await call
        submits = [recorded.submit for recorded in served.scheduler.record.requests.values()]

        assert tokenized.count("never") == 1
        assert all(submit.specification.sampling.bad_words_ids for submit in submits)

    async def test_of_several_prompts_is_found_again_by_its_key(self, served: Served) -> None:
        body, longest = {"prompt": ["x", "x"], "n": 2, "seed": 5}, {"Idempotency-Key": "k" * 128}
        call = asyncio.create_task(served.post("/v1/completions", body, headers=longest))
        for count in (4, 3, 2, 1):
            await served.finished(f"the {count}", count=count)
        _, _, answer = await call
        _, _, again = await served.post("/v1/completions", body, headers=longest)

        assert [choice["text"] for choice in answer["choices"]] == ["the 1", "the 2", "the 3", "the 4"]
        assert again["choices"] == answer["choices"]
        assert len(served.scheduler.record.requests) == 4

    @pytest.mark.parametrize(
        ("kind", "status", "said"),
        [
            (Kind.KIND_ERROR, 500, "the request failed"),
            (Kind.KIND_CANCELLED, 499, "cancelled"),
            (link_pb2.RequestEnd(kind=Kind.KIND_CANCELLED, detail=CLIENT_WENT_AWAY), 503, "send it again"),
            (Kind.KIND_DEADLINE, 504, "deadline"),
        ],
    )
    async def test_that_did_not_come_about_is_an_error(
        self, served: Served, kind: Any, status: int, said: str
    ) -> None:
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        await served.finished(end=kind)
        got, _, answer = await call

        assert got == status
        assert answer["error"]["type"] == "server_error"
        assert said in answer["error"]["message"]


class TestAnswersWithLogprobs:
    """They may be thousands of times as long as others."""

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", TEXT | {"logprobs": 2}),
            ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ],
    )
    async def test_are_written_beside_the_event_loop(
        self, served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
    ) -> None:
        threads = []

        def written(value: object) -> str:
            threads.append(threading.current_thread())
            return json.dumps(value)

        monkeypatch.setattr(http_generation, "json_in_parts", written)
        call = asyncio.create_task(served.post(path, body))
        await served.finished()
        status, _, _ = await call
        assert status == 200
        assert len(threads) == 1 and threads[0] is not threading.main_thread()

    @pytest.mark.parametrize("stream", [False, True])
    async def test_that_may_be_too_large_are_refused_before_they_are_computed(
        self, serve: Start, tmp_path: Path, stream: bool
    ) -> None:
        served = await serve(model=load_model(write_model(tmp_path, context=8192), name="tiny"))
        body = {"prompt": "x", "n": 16, "logprobs": 20, "max_tokens": 8000, "stream": stream}
        call = asyncio.create_task(served.post("/v1/completions", body))
        if stream:
            await served.scheduler.submitted(16)
            call.cancel()
            return
        status, _, answer = await call
        assert (status, answer["error"]["param"]) == (400, "max_tokens")
        assert "stream: true" in answer["error"]["message"]
        assert not served.scheduler.all_heard("submit")

    @pytest.mark.parametrize(
        "value",
        [
            {},
            [],
            {"a": [], "b": {}, "c": None, "d": 'ü"', "e": [1, [2.5, {"f": True}]]},
            {"tokens": [f"t{n}" for n in range(200)], "top": [{"a": -1.5, "b": [n, n]} for n in range(64)]},
            [[list(range(65))] * 3, [{"x": n} for n in range(129)]],
        ],
    )
    def test_have_the_same_text_as_others(self, value: object) -> None:
        assert json_in_parts(value) == json.dumps(value)


class TestAStream:
    async def test_of_a_chat_is_role_text_reason_usage_and_done(self, served: Served) -> None:
        body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        async with served.session.post(served.url + "/v1/chat/completions", json=body) as response:
            request_id = await served.finished()
            chunks = await events(response)

        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["x-request-id"] == request_id
        assert {chunk["id"] for chunk in chunks} == {request_id}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        *parts, usage = chunks
        deltas = [part["choices"][0]["delta"] for part in parts]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
        assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "stop"
        assert {part["choices"][0]["finish_reason"] for part in parts[:-1]} == {None}
        assert all(part["usage"] is None for part in parts)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] > 0
        assert "speculative_decoding" in usage["metrics"]
        await nobody_left(served)

    async def test_without_include_usage_says_nothing_of_usage(self, served: Served) -> None:
        async with served.session.post(
            served.url + "/v1/completions", json=TEXT | {"stream": True}
        ) as response:
            await served.finished()
            chunks = await events(response)

        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
        assert not any("usage" in chunk for chunk in chunks)

    async def test_counts_as_it_goes_where_that_is_asked_for(self, served: Served) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = TEXT | {"stream": True, "stream_options": options}
        async with served.session.post(served.url + "/v1/completions", json=body) as response:
            await served.finished()
            chunks = await events(response)

        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] > 0

    @pytest.mark.parametrize("options", [{}, {"include_usage": True}, CONTINUOUS])
    @pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
    async def test_has_the_same_fields_in_the_event_of_every_text(
        self, served: Served, path: str, body: dict[str, Any], options: dict[str, bool]
    ) -> None:
        texts = ["the", ' "" %d \\ \n\t\x00', " \u2028 日本 \N{GRINNING FACE}"]
        body = body | {"stream": True, "stream_options": options or None}
        seen = []
        async with served.session.post(served.url + "/v1/" + path, json=body) as response:
            request_id = await served.scheduler.submitted()
            if body.get("messages"):
                await response.content.readuntil(b"\n\n")
            tokens = 0
            for text in texts:
                ids = served.running.model.encode_rendered(text)
                tokens += len(ids)
                served.scheduler.commit(request_id, ids)
                event = (await response.content.readuntil(b"\n\n")).decode()
                chunk = json.loads(event.removeprefix("data: "))
                seen.append((event, chunk, text, tokens))
            served.scheduler.commit(request_id, (), Kind.KIND_STOP)
            last = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))

        prompt_tokens = len(served.scheduler.record.requests[request_id].submit.specification.prompt_ids)
        for event, chunk, text, tokens in seen:
            content = {"delta": {"content": text}} if body.get("messages") else {"text": text}
            choice = {"index": 0, **content, "logprobs": None, "finish_reason": None}
            expected = {name: last[name] for name in ("id", "object", "created", "model")}
            expected["choices"] = [choice]
            if options:
                expected["usage"] = None
            if options == CONTINUOUS:
                expected["usage"] = {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": tokens,
                    "total_tokens": prompt_tokens + tokens,
                    "prompt_tokens_details": {"cached_tokens": 0},
                }
            assert chunk == expected
            assert list(chunk) == list(expected)
            assert event == f"data: {json.dumps(expected, ensure_ascii=False, separators=(',', ':'))}\n\n"

    async def test_counts_the_usage_of_all_its_outputs_in_each_of_them(self, served: Served) -> None:
        ids = served.running.model.encode_rendered("hello world")
        body = TEXT | {"stream": True, "n": 2, "stream_options": CONTINUOUS}
        async with served.session.post(served.url + "/v1/completions", json=body) as response:
            await served.scheduler.submitted(2)
            first, second = served.scheduler.record.requests
            served.scheduler.commit(second, ids[:1])
            usages = [await next_usage(response)]
            served.scheduler.commit(
                first, ids, link_pb2.RequestEnd(kind=Kind.KIND_STOP, cached_prompt_tokens=1)
            )
            usages += [await next_usage(response), await next_usage(response)]
            served.scheduler.commit(second, ids[1:])
            usages.append(await next_usage(response))

        assert [usage["completion_tokens"] for usage in usages] == [1, *[1 + len(ids)] * 2, 2 * len(ids)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, 0, 1, 1]

    async def test_a_failure_behind_the_first_chunk_is_an_event(self, served: Served) -> None:
        async with served.session.post(
            served.url + "/v1/completions", json=TEXT | {"stream": True}
        ) as response:
            await served.finished(end=link_pb2.RequestEnd(kind=Kind.KIND_ERROR, detail="the device is gone"))
            chunks = await events(response)

        assert chunks[-1]["error"]["message"] == "the device is gone"
        assert chunks[-1]["error"]["type"] == "server_error"

    async def test_that_fails_sends_nothing_behind_its_end(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Output of the second choice arrives just when the failure of the first is sent. Behind the end of
        the body, a client would read it as the beginning of the next answer."""
        failure, streams = Reply.failure, served.running.link.streams

        def failure_and_output(reply: Reply, error: LapsSdError) -> bytes:
            (other,) = [stream for stream in streams if not stream.over]
            delivery = link_pb2.Delivery(attachment_id=other.attachment_id, token_ids=[70, 71])
            streams.on_delivery(delivery, 0.0)
            assert other.has_news
            return failure(reply, error)

        monkeypatch.setattr(Reply, "failure", failure_and_output)
        assert served.running.gateway.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port)
        body = TEXT | {"stream": True, "n": 2}
        writer.write(octets_of(body).replace(b"Connection: close", b"Connection: keep-alive"))
        await served.scheduler.submitted(2)
        failed = next(iter(served.scheduler.record.requests))
        end = link_pb2.RequestEnd(kind=Kind.KIND_ERROR, detail="it broke")
        async with asyncio.timeout(20):
            await reader.readuntil(b"\r\n\r\n")
            served.scheduler.commit(failed, (), end)
            answer = await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            next_head = await reader.readuntil(b"\r\n")
        writer.close()

        assert b"it broke" in answer
        assert next_head == b"HTTP/1.1 200 OK\r\n"

    async def test_that_fails_is_counted_as_failed(self, served: Served) -> None:
        """The client is still there: it gets the error."""

        failed, disconnected = ended("already_exists"), ended("client_disconnected")
        async with served.session.post(
            served.url + "/v1/completions", json=TEXT | {"stream": True}
        ) as response:
            await served.scheduler.submitted()
            await served.scheduler.kill()
            empty = FakeScheduler(epoch="2-b")
            empty.refuse = Refused(reason=Refused.REASON_KEY_CONFLICT)
            try:
                await empty.start(served.scheduler.port)
                chunks = await events(response)
            finally:
                await empty.kill()
        await nobody_left(served)

        assert "idempotency key" in chunks[-1]["error"]["message"]
        assert (ended("already_exists"), ended("client_disconnected")) == (failed + 1, disconnected)

    async def test_that_is_quiet_gets_comments(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_stream, "QUIET_S", 0.02)
        async with served.session.post(
            served.url + "/v1/completions", json=TEXT | {"stream": True}
        ) as response:
            for _ in range(2):
                assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
            await served.finished()
            chunks = await events(response)

        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"

    @pytest.mark.parametrize("wanted", [b"close", b"keep-alive"])
    async def test_of_a_client_of_http_1_0_ends_with_its_connection(
        self, served: Served, wanted: bytes
    ) -> None:
        raw = octets_of(TEXT | {"stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
        raw = raw.replace(b"Connection: close", b"Connection: " + wanted)
        answer, _ = await asyncio.gather(said_to(served, raw), served.finished())
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = body.decode().split("\n\n")

        assert head.startswith(b"HTTP/1.0 200")
        assert b"chunked" not in head.lower()
        assert lines[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"

    async def test_that_fails_takes_nothing_from_another(self, served: Served) -> None:
        async def read() -> list[Any]:
            async with served.session.post(
                served.url + "/v1/completions", json=TEXT | {"stream": True}
            ) as response:
                return await events(response)

        one, other = asyncio.create_task(read()), asyncio.create_task(read())
        await served.scheduler.submitted(2)
        failed, whole = served.scheduler.record.requests
        served.scheduler.commit(failed, (), link_pb2.RequestEnd(kind=Kind.KIND_ERROR, detail="it broke"))
        served.scheduler.commit(whole, served.running.model.encode_rendered("hello world"), Kind.KIND_STOP)
        answers = sorted([await one, await other], key=len)

        assert [list(chunk) for chunk in answers[0]] == [["error"]]
        assert "".join(chunk["choices"][0]["text"] for chunk in answers[1]) == "hello world"
        await nobody_left(served)

    async def test_a_client_that_leaves_is_detached_and_forgotten(self, served: Served) -> None:
        before = ended("client_disconnected")
        response = await served.session.post(served.url + "/v1/completions", json=TEXT | {"stream": True})
        request_id = await served.scheduler.submitted()
        response.close()

        assert (await served.scheduler.wait_heard("detach")).request_id == request_id
        await nobody_left(served)
        assert ended("client_disconnected") == before + 1

    async def test_a_client_that_leaves_before_any_answer_is_detached_too(self, served: Served) -> None:
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        request_id = await served.scheduler.submitted()
        call.cancel()

        assert (await served.scheduler.wait_heard("detach")).request_id == request_id
        await nobody_left(served)


class TestWhatIsAskedFor:
    @pytest.mark.parametrize(
        ("path", "change", "expected"),
        [
            (
                "chat/completions",
                {"response_format": {"type": "json_object"}},
                OutputFormat(json_object=True),
            ),
            ("chat/completions", {"response_format": {"type": "text"}}, OutputFormat()),
            (
                "chat/completions",
                {
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}},
                    }
                },
                OutputFormat(json_schema='{"type": "object"}'),
            ),
            ("completions", {"guided_regex": "a+"}, OutputFormat(regex="a+")),
            (
                "completions",
                {"guided_json": {"type": "object"}},
                OutputFormat(json_schema='{"type": "object"}'),
            ),
            ("completions", {"guided_grammar": 'start: "a"'}, OutputFormat(grammar='start: "a"')),
            ("completions", {"guided_choice": ["a.b", "c"]}, OutputFormat(regex=r"(a\.b|c)")),
            ("completions", {"structured_outputs": {"regex": "a+"}}, OutputFormat(regex="a+")),
            (
                "chat/completions",
                {"structured_outputs": {"json": {"type": "object"}, "disable_any_whitespace": False}},
                OutputFormat(json_schema='{"type": "object"}'),
            ),
            (
                "completions",
                {"structured_outputs": {"json": '{"type": "object"}'}},
                OutputFormat(json_schema='{"type": "object"}'),
            ),
            (
                "completions",
                {"structured_outputs": {"choice": ["yes", "(no)"]}},
                OutputFormat(regex=r"(yes|\(no\))"),
            ),
            (
                "chat/completions",
                {"structured_outputs": {"grammar": 'start: "a"'}},
                OutputFormat(grammar='start: "a"'),
            ),
            ("completions", {"structured_outputs": {"json_object": True}}, OutputFormat(json_object=True)),
        ],
    )
    async def test_a_format_reaches_the_scheduler(
        self, served: Served, path: str, change: Any, expected: OutputFormat
    ) -> None:
        body = (CHAT if path == "chat/completions" else TEXT) | change
        call = asyncio.create_task(served.post(f"/v1/{path}", body))
        submit = served.scheduler.record.requests[await served.finished()].submit

        assert (await call)[0] == 200
        assert submit.specification.output_format == expected

    async def test_penalties_reach_the_scheduler(self, served: Served) -> None:
        change = {
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.25,
            "min_p": 0.25,
            "logit_bias": {"7": -100},
        }
        call = asyncio.create_task(served.post("/v1/completions", TEXT | change))
        found = served.scheduler.record.requests[await served.finished()].submit.specification.sampling
        await call

        assert (found.frequency_penalty, found.presence_penalty) == (0.5, -0.5)
        assert (found.repetition_penalty, found.min_p, dict(found.logit_bias)) == (1.25, 0.25, {7: -100})

    @pytest.mark.parametrize("stream", [False, True])
    async def test_log_probabilities_come_with_the_tokens(self, served: Served, stream: bool) -> None:
        async def answer(path: str, change: Any) -> list[Any]:
            request = TEXT if path == "completions" else CHAT
            count = len(served.scheduler.record.requests) + 1

            async def ask() -> list[Any]:
                async with served.session.post(
                    f"{served.url}/v1/{path}", json=request | change | {"stream": stream}
                ) as response:
                    if not stream:
                        return [await response.json()]
                    lines = (await response.text()).split("\n\n")
                    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

            call = asyncio.create_task(ask())
            request_id = await served.scheduler.submitted(count)
            ids = served.running.model.encode_rendered("hi")
            first = inference_pb2.TokenLogprobs(
                logprob=-0.25, top=[inference_pb2.TokenLogprob(token_id=ids[0], logprob=-0.25)]
            )
            served.scheduler.record.requests[request_id].logprobs = [first] + [
                inference_pb2.TokenLogprobs(unknown=True)
            ] * (len(ids) - 1)
            served.scheduler.commit(request_id, ids, Kind.KIND_STOP)
            return [chunk["choices"][0]["logprobs"] for chunk in await call if chunk["choices"]]

        ids = served.running.model.encode_rendered("hi")
        told = [
            one
            for each in await answer("chat/completions", {"logprobs": True, "top_logprobs": 1})
            for one in each["content"]
        ]
        assert len(told) == len(ids)
        text = served.running.model.decode(ids[:1])
        assert told[0] == {
            "token": text, "logprob": -0.25, "bytes": list(text.encode()),
            "top_logprobs": [{"token": text, "logprob": -0.25, "bytes": list(text.encode())}],
        }  # fmt: skip
        assert all(one["logprob"] is None for one in told[1:])
        parts = [each for each in await answer("completions", {"logprobs": 1}) if each["tokens"]]
        assert [text for each in parts for text in each["tokens"]] == [
            served.running.model.decode([one]) for one in ids
        ]
        assert [value for each in parts for value in each["token_logprobs"]] == [-0.25] + [None] * (
            len(ids) - 1
        )
        assert parts[0]["text_offset"][0] == 0

    async def test_log_probabilities_of_half_a_character_tell_its_bytes(
        self, served: Served, model: ModelFiles
    ) -> None:
        ids = model.encode_rendered("a€b")
        assert len(ids) == 5, "the sign is three tokens"
        one_of_two = inference_pb2.TokenLogprobs(
            logprob=-1,
            top=[inference_pb2.TokenLogprob(token_id=token, logprob=-1) for token in ids[1:3]],
        )
        told = []
        for count, (path, body) in enumerate(
            (
                ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
                ("/v1/completions", TEXT | {"logprobs": 2}),
            )
        ):
            call = asyncio.create_task(served.post(path, body))
            request_id = await served.scheduler.submitted(count + 1)
            served.scheduler.record.requests[request_id].logprobs = [one_of_two] * len(ids)
            served.scheduler.commit(request_id, ids, Kind.KIND_STOP)
            told.append((await call)[2]["choices"][0]["logprobs"])
        chat, text = told

        assert bytes(octet for one in chat["content"] for octet in one["bytes"]).decode() == "a€b"
        assert [one["token"] for one in chat["content"]] == ["a", "\\xe2", "\\x82", "\\xac", "b"]
        assert text["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
        assert text["text_offset"] == [0, 1, 1, 1, 2]
        assert [len(top) for top in text["top_logprobs"]] == [3, 2, 2, 3, 3], "neither hides the other"
        assert all(token in top for token, top in zip(text["tokens"], text["top_logprobs"], strict=True))

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("path", ["chat/completions", "completions"])
    async def test_several_outputs_come_each_under_its_index(
        self, served: Served, path: str, stream: bool
    ) -> None:
        asked = {"n": 3, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        call = asyncio.create_task(
            served.session.post(
                f"{served.url}/v1/{path}", json=(CHAT if path == "chat/completions" else TEXT) | asked
            )
        )
        texts = ["one", "two", "three"]
        for count in (3, 1, 2):
            await served.finished(texts[count - 1], count=count)
        response = await call
        answers = await events(response) if stream else [await response.json()]
        got = ["", "", ""]
        reasons = {}
        for choice in (choice for answer in answers for choice in answer["choices"]):
            said = choice.get("delta" if stream else "message", choice)
            got[choice["index"]] += said.get("content", said.get("text", ""))
            reasons[choice["index"]] = choice["finish_reason"]
        submits = [recorded.submit for recorded in served.scheduler.record.requests.values()]

        assert got == texts
        assert reasons == {0: "stop", 1: "stop", 2: "stop"}
        assert answers[-1]["usage"] == {
            "prompt_tokens": len(submits[0].specification.prompt_ids),  # it is one prompt
            "completion_tokens": sum(len(served.running.model.encode_rendered(text)) for text in texts),
            "total_tokens": answers[-1]["usage"]["prompt_tokens"] + answers[-1]["usage"]["completion_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        await nobody_left(served)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(
        self, served: Served, stream: bool
    ) -> None:
        body = CHAT | {"stop": ["STOP"], "stream": stream}
        call = asyncio.create_task(served.session.post(served.url + "/v1/chat/completions", json=body))
        end = link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, cut_characters=len("STOP"))
        await served.finished("hello STOP", end=end)
        response = await call
        if stream:
            choices = [chunk["choices"][0] for chunk in await events(response)]
            text = "".join(choice["delta"].get("content", "") for choice in choices)
        else:
            choices = (await response.json())["choices"]
            text = choices[0]["message"]["content"]

        assert (text, choices[-1]["finish_reason"]) == ("hello ", "stop")

    async def test_reaches_the_scheduler(self, served: Served) -> None:
        body = CHAT | {
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": -1,
            "seed": -1,
            "stop": "STOP",
            "ignore_eos": True,
            "priority": 7,
            "time_limit_ms": 1500,
            "deadline_unix_ms": round((time.time() + 600) * 1000),
            "expected_output_tokens": 40,
            "workload_class": "chat",
            "user": "somebody",
            "tools": [],
            "logprobs": None,
        }
        call = asyncio.create_task(
            served.post(
                "/v1/chat/completions",
                body,
                headers={"Idempotency-Key": "k", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
            )
        )
        submit = served.scheduler.record.requests[await served.finished()].submit
        await call
        specification = submit.specification

        assert specification.sampling.max_tokens == 9
        assert specification.sampling.temperature == 0.5
        assert specification.sampling.top_p == pytest.approx(0.9)
        assert specification.sampling.top_k == 0
        assert specification.sampling.seed == 2**64 - 1
        assert list(specification.sampling.stop) == ["STOP"]
        assert specification.sampling.ignore_eos
        assert (submit.priority, submit.time_limit_ms, submit.expected_output_tokens) == (7, 1500, 40)
        assert (submit.workload_class, submit.idempotency_key) == ("chat", "k")
        assert 500_000 < submit.deadline_in_ms <= 600_000
        assert submit.traceparent.startswith("00-aaaa")
        assert submit.tenant == "anonymous"

    @pytest.mark.parametrize("name", ["conversation", "prompt_cache_key", "session_id", "user"])
    async def test_a_conversation_can_be_named_by_its_field_or_by_those_of_others(
        self, served: Served, name: str
    ) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        for count, fields in enumerate(({name: "one"}, {name: "one", "seed": 3}, {}), start=1):
            call = asyncio.create_task(served.post("/v1/chat/completions", body | fields))
            await served.finished(count=count)
            await call
        first, again, without = (
            submit.specification.conversation for submit in served.scheduler.all_heard("submit")
        )
        assert first == again
        assert len(first) == 8
        assert without == b""

    @pytest.mark.parametrize(
        "content", ["hello", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]]
    )
    async def test_content_may_be_a_text_or_parts(
        self, served: Served, content: Any, model: ModelFiles
    ) -> None:
        call = asyncio.create_task(
            served.post("/v1/chat/completions", {"messages": [{"role": "developer", "content": content}]})
        )
        submit = served.scheduler.record.requests[await served.finished()].submit
        await call

        assert model.decode(submit.specification.prompt_ids) == "<|begin|><|system|>hello\n<|assistant|>"

    @pytest.mark.parametrize("name", ["laps-sd-tenant", "x-llm-d-inference-fairness-id"])
    async def test_two_tenants_that_a_proxy_made_one_header_of_are_refused(
        self, served: Served, name: str
    ) -> None:
        async with asyncio.timeout(30):
            status, _, answer = await served.post("/v1/completions", TEXT, headers={name: "victim, attacker"})

        assert status == 400
        assert answer["error"]["message"] == f"{name} must be one name, without a comma"
        assert answer["error"]["param"] == name

    @pytest.mark.parametrize(
        ("header", "tenant"),
        [("laps-sd-tenant", "acme"), ("x-llm-d-inference-fairness-id", "acme"), ("x-other", "anonymous")],
    )
    async def test_behind_a_trusted_proxy_a_header_names_the_tenant(
        self, served: Served, header: str, tenant: str
    ) -> None:
        call = asyncio.create_task(served.post("/v1/completions", TEXT, headers={header: "acme"}))
        submit = served.scheduler.record.requests[await served.finished()].submit
        await call

        assert submit.tenant == tenant

    async def test_a_time_to_live_ends_what_has_not_started(self, served: Served) -> None:
        status, headers, answer = await served.post(
            "/v1/completions", TEXT | {"stream": True}, headers={"x-llm-d-inference-ttl": "50ms"}
        )

        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "0.05 s" in answer["error"]["message"]
        await served.scheduler.wait_heard("detach")
        await nobody_left(served)

    async def test_a_time_to_live_does_not_end_what_has_started(self, served: Served) -> None:
        call = asyncio.create_task(
            served.post("/v1/completions", TEXT, headers={"x-llm-d-inference-ttl": "1m0.5s"})
        )
        await served.finished()
        status, _, answer = await call

        assert (status, answer["choices"][0]["text"]) == (200, "hello world")


class SlowReader:
    """A client of a stream that reads little, and for which the kernel buffers little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, served: Served) -> None:
        self.reader = reader
        self.writer = writer
        assert served.running.gateway.http is not None
        server = served.running.gateway.http._runner.server
        assert server is not None
        (self.connection,) = server.connections
        """The gateway's end of the connection."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    @classmethod
    async def open(cls, served: Served) -> tuple[SlowReader, str]:
        """Send a request for a stream; return its client and its id."""
        assert served.running.gateway.http is not None
        receiver = socket.socket()
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        receiver.setblocking(False)
        port = served.running.gateway.http.port
        await asyncio.get_running_loop().sock_connect(receiver, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=receiver, limit=1024)
        writer.write(octets_of({**TEXT, "stream": True}))
        request_id = await served.scheduler.submitted()
        return cls(reader, writer, served), request_id

    @property
    def transport(self) -> Any:
        assert self.connection.transport is not None
        return self.connection.transport

    async def falls_behind(self, served: Served, request_id: str, *, far: bool) -> None:
        """Wait until the gateway holds bytes for it; `far`: until it writes no more."""
        self.writer.transport.pause_reading()

        def behind() -> bool:
            served.scheduler.commit(request_id, [70] * 4)
            waiting = self.transport.get_write_buffer_size()
            return self.connection.writing_paused if far else waiting > 4000

        await wait_until_async(behind, description="bytes that wait for the client", every_s=0.002)


async def test_a_slow_reader_of_a_stream_costs_a_bounded_buffer_and_misses_nothing(serve: Any) -> None:
    served: Served = await serve(stream_buffer_tokens=4096)
    slow, request_id = await SlowReader.open(served)
    served.scheduler.replay_chunk = 4000
    tokens = [40 + n % 50 for n in range(200_000)]
    for begin in range(0, len(tokens), 4000):
        served.scheduler.commit(request_id, tokens[begin : begin + 4000])
    (stream,) = served.running.link.streams
    await wait_until_async(lambda: stream.paused, description="a full buffer", every_s=0.005)
    served.scheduler.commit(request_id, (), Kind.KIND_LENGTH)

    assert len(stream.waiting.token_ids) == 4096
    async with asyncio.timeout(60):
        answer = (await slow.reader.read()).decode()
    slow.writer.close()
    chunks = [line for line in answer.splitlines() if line.startswith("data: {")]
    text = "".join(
        choice["text"] for line in chunks for choice in json.loads(line.removeprefix("data: "))["choices"]
    )
    assert text == served.running.model.decode(tokens)


@pytest.mark.parametrize("far", [False, True], ids=["behind", "far behind"])
async def test_a_slow_reader_that_half_closes_is_detached_at_once(served: Served, far: bool) -> None:
    slow, request_id = await SlowReader.open(served)
    await slow.falls_behind(served, request_id, far=far)
    slow.writer.write_eof()

    assert (await served.scheduler.wait_heard("detach")).request_id == request_id
    await nobody_left(served)
    slow.writer.close()


async def test_a_client_that_leaves_as_its_call_is_accepted_is_no_error(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def send_to_nobody(request: web.Request, *rest: Any) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return await http_stream.send_stream(request, *rest)

    monkeypatch.setattr(http_generation, "send_stream", send_to_nobody)
    with pytest.raises(aiohttp.ClientConnectionError):
        await served.session.post(served.url + "/v1/completions", json=TEXT | {"stream": True})
    await served.scheduler.wait_heard("detach")
    await nobody_left(served)

    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_stream_ends_if_its_connection_closes_while_bytes_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_stream, "QUIET_S", 0.02)
    slow, request_id = await SlowReader.open(served)
    await slow.falls_behind(served, request_id, far=False)
    slow.transport.close()

    assert (await served.scheduler.wait_heard("detach")).request_id == request_id
    await nobody_left(served)
    slow.writer.close()


async def said_to(served: Served, octets: bytes) -> bytes:
    """Return all that the port answers to these bytes, until it closes the connection."""
    assert served.running.gateway.http is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port)
    writer.write(octets)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


def octets_of(body: Any, *headers: bytes) -> bytes:
    raw = json.dumps(body).encode()
    length = b"Content-Length: %d" % len(raw)
    lines = (
        b"POST /v1/completions HTTP/1.1",
        b"Host: x",
        b"Content-Type: application/json",
        b"Connection: close",
        length,
    )
    return b"\r\n".join((*lines, *headers)) + b"\r\n\r\n" + raw


class TestOctets:
    async def test_of_a_header_that_are_no_text_are_refused_by_its_name(self, served: Served) -> None:
        head, _, body = (await said_to(served, octets_of(TEXT, b"Idempotency-Key: \xff"))).partition(
            b"\r\n\r\n"
        )

        assert head.startswith(b"HTTP/1.1 400 ")
        error = json.loads(body)["error"]
        assert (error["param"], error["message"]) == (
            "Idempotency-Key",
            "Idempotency-Key must be valid Unicode",
        )

    async def test_of_a_body_are_not_decompressed_by_a_second_header(self, served: Served) -> None:
        headers = (b"Content-Encoding: identity", b"Content-Encoding: gzip")
        assert (await said_to(served, octets_of(TEXT, *headers))).startswith(b"HTTP/1.1 415 ")

    async def test_of_a_body_come_once_it_is_said_that_they_may(self, served: Served) -> None:
        call = asyncio.create_task(said_to(served, octets_of(TEXT, b"Expect: 100-continue")))
        await served.finished()
        answer = await call

        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")
        assert b"hello world" in answer

    @pytest.mark.parametrize(
        "octets",
        [
            b"GET / FTP/1.0\r\n\r\n",
            b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdefgh\r\n",
            b"POST /v1/completions HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
            b"POST /v1/completions HTTP/1.1\r\nExpect: \xff\r\nConnection: close\r\n\r\n",
            b"\x16\x03\x01\r\n\r\n",
        ],
    )
    async def test_that_are_no_http_are_answered_and_fill_no_log(
        self, served: Served, caplog: pytest.LogCaptureFixture, octets: bytes
    ) -> None:
        answer = await said_to(served, octets)

        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ", b"HTTP/1.1 415 ", b"HTTP/1.1 417 "))
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []


class TestARefusal:
    @pytest.mark.parametrize(
        ("change", "param", "said"),
        [
            ({"messages": []}, "messages", "must not be empty"),
            ({"messages": "hello"}, "messages", "must be a list"),
            ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "must be one of"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages[0].content[0].type",
                "must be text",
            ),
            ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "Unicode"),
            ({"temperature": -1}, "temperature", "from 0 to 100"),
            ({"temperature": "hot"}, "temperature", "must be a number"),
            ({"temperature": 1e300}, "temperature", "must be a number"),
            ({"max_tokens": 0}, "max_tokens", "from 1"),
            ({"max_tokens": 2.5}, "max_tokens", "whole number"),
            ({"max_tokens": True}, "max_tokens", "whole number"),
            ({"max_tokens": CONTEXT}, "max_tokens", "must be at most"),
            ({"stop": [""]}, "stop[0]", "1 to 256 characters"),
            ({"n": 17}, "n", "from 1 to 16"),
            ({"priority": 101}, "priority", "from -100 to 100"),
            ({"stream": 1}, "stream", "true or false"),
            ({"deadline_unix_ms": 1_763_000_000}, "deadline_unix_ms", "must be milliseconds since 1970"),
            ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
            ({"functions": [{"name": "f"}]}, "functions", "not supported"),
            (
                {"response_format": {"type": "json_schema"}},
                "response_format.json_schema",
                "an object with a schema",
            ),
            (
                {"response_format": {"type": "xml"}},
                "response_format.type",
                "must be text, json_object or json_schema",
            ),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
                "response_format.json_schema",
                "cannot be used",
            ),
            (
                {"response_format": {"type": "json_object"}, "guided_regex": "a"},
                "guided_regex",
                "cannot be used together with",
            ),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
            ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
            ({"frequency_penalty": 2.5}, "frequency_penalty", "from -2 to 2"),
            ({"logit_bias": {"five": 1}}, "logit_bias", "must name token ids"),
            ({"logit_bias": {"5": 101}}, "logit_bias[5]", "from -100 to 100"),
            ({"colour": "red"}, "colour", "is not a known field"),
        ],
    )
    async def test_names_the_field_and_the_limit(
        self, served: Served, change: Any, param: str, said: str
    ) -> None:
        status, headers, answer = await served.post("/v1/chat/completions", CHAT | change)
        error = answer["error"]

        assert status == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["message"].startswith(param)
        assert said in error["message"]
        assert headers["x-request-id"].startswith("req-")
        assert served.scheduler.all_heard("submit") == []

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [70, "x"]}, "prompt[1]"),
            ({"prompt": [10**6]}, "prompt[0]"),
            ({"prompt": [70] * CONTEXT}, "prompt"),
            ({"prompt": ["x"] * 17}, "n"),
            ({"echo": True, "logprobs": 21}, "logprobs"),
            ({"prompt_logprobs": 21}, "prompt_logprobs"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
            ({"prompt_logprobs": True}, "prompt_logprobs"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 0, "echo": True, "min_tokens": 2}, "min_tokens"),
            ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
            ({"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
            ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
            ({"bad_words": [""]}, "bad_words[0]"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
            ({"best_of": 3, "n": 2}, "best_of"),
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 2}, "best_of"),
            # Refused by number, before a message is made of each.
            ({"prompt": [""] * 1025}, "prompt"),
            ({"prompt": [1] * 1_048_577}, "prompt"),
            ({"prompt": [[1] * 530_000] * 2}, "prompt"),
            ({"stop": [""] * 65_537}, "stop"),
            ({"logprobs": 21}, "logprobs"),
            ({"guided_json": "{"}, "guided_json"),
            ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ],
        ids=lambda value: value if isinstance(value, str) else next(iter(value)),
    )
    async def test_of_a_completion_names_its_field(self, served: Served, change: Any, param: str) -> None:
        status, _, answer = await served.post("/v1/completions", TEXT | change)

        assert (status, answer["error"]["param"]) == (400, param)

    async def test_of_an_unknown_model_is_404(self, served: Served) -> None:
        status, _, answer = await served.post("/v1/completions", TEXT | {"model": "gpt-4"})

        assert (status, answer["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"[" * 200_000, b'{"n": NaN}', b"\xff", b"1" * 5000])
    async def test_of_what_is_no_json_object_is_400(self, served: Served, raw: bytes) -> None:
        async with served.session.post(
            served.url + "/v1/completions", data=raw, headers={"Content-Type": "application/json"}
        ) as response:
            answer = await response.json()

        assert response.status == 400
        assert answer["error"]["message"].startswith("the body must be")

    @pytest.mark.parametrize("chunked", [False, True])
    async def test_of_a_body_that_is_too_large_is_413(self, serve: Any, chunked: bool) -> None:
        served = await serve(max_message_bytes=65536)
        raw = json.dumps(TEXT | {"user": "x" * 100_000}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(raw), 10_000):
                yield raw[start : start + 10_000]

        async with served.session.post(
            served.url + "/v1/completions",
            data=pieces() if chunked else raw,
            headers={"Content-Type": "application/json"},
        ) as response:
            answer = await response.json()

        assert response.status == 413
        assert answer["error"]["message"] == "the body must be at most 65536 bytes"

    @pytest.mark.parametrize(
        "headers",
        [{"Content-Type": "text/plain"}, {"Content-Type": "application/json", "Content-Encoding": "gzip"}],
    )
    async def test_of_another_form_of_body_is_415(self, served: Served, headers: dict[str, str]) -> None:
        async with served.session.post(
            served.url + "/v1/completions", data=json.dumps(TEXT).encode(), headers=headers
        ) as response:
            assert response.status == 415
            assert (await response.json())["error"]["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        ("method", "path", "status", "names"),
        [("GET", "/v1/completions", 405, "POST"), ("POST", "/v1/embeddings", 404, "/v1/completions")],
    )
    async def test_of_an_unknown_path_has_the_same_shape(
        self, served: Served, method: str, path: str, status: int, names: str
    ) -> None:
        async with served.session.request(method, served.url + path) as response:
            assert response.status == status
            assert names in (await response.json())["error"]["message"]

    @pytest.mark.parametrize("value", ["soon", "-1s", "0s", "1e9h", "5"])
    async def test_of_a_time_to_live_names_the_header(self, served: Served, value: str) -> None:
        status, _, answer = await served.post(
            "/v1/completions", TEXT, headers={"x-llm-d-inference-ttl": value}
        )

        assert (status, answer["error"]["param"]) == (400, "x-llm-d-inference-ttl")

    async def test_of_a_full_queue_is_429_and_says_when(self, served: Served) -> None:
        served.scheduler.refuse = Refused(reason=Refused.REASON_QUEUE_FULL, retry_after_ms=2500)
        status, headers, answer = await served.post("/v1/chat/completions", CHAT | {"stream": True})

        assert status == 429
        assert (headers["Retry-After"], headers["Retry-After-Ms"]) == ("3", "2500")
        assert answer["error"]["type"] == "rate_limit_error"
        assert answer["error"]["code"] == "rate_limit_exceeded"

    async def test_after_the_deadline_is_504(self, served: Served) -> None:
        status, _, answer = await served.post("/v1/completions", TEXT | {"deadline_unix_ms": 10**12})

        assert (status, answer["error"]["type"]) == (504, "server_error")

    async def test_of_another_body_under_a_known_key_is_409(self, served: Served) -> None:
        served.scheduler.refuse = Refused(reason=Refused.REASON_KEY_CONFLICT)
        status, _, _ = await served.post("/v1/completions", TEXT, headers={"Idempotency-Key": "k"})

        assert status == 409

    async def test_while_no_scheduler_answers_is_503(self, serve: Any) -> None:
        served = await serve(scheduler_wait_s=0.05)
        served.scheduler.answers_submits = False
        status, headers, _ = await served.post("/v1/completions", TEXT)

        assert status == 503
        assert "Retry-After" in headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_holds_without_a_scheduler_that_ends_the_request(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(calls, "LATE_S", 0.0)
    body = TEXT | {"stream": stream, "deadline_unix_ms": round((time.time() + 0.5) * 1000)}
    call = asyncio.create_task(served.session.post(served.url + "/v1/completions", json=body))
    request_id = await served.scheduler.submitted()
    served.scheduler.commit(request_id, served.running.model.encode_rendered("hello"))
    async with await call as response:
        answer = (await events(response))[-1] if stream else await response.json()

    assert response.status == (200 if stream else 504)
    assert answer["error"]["message"] == "the deadline passed, and the request's scheduler does not answer"
    assert (await served.scheduler.wait_heard("detach")).request_id == request_id
    await nobody_left(served)


class TestTheServer:
    @pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
    async def test_a_page_whose_name_resolves_to_this_machine_is_refused(self, serve: Start) -> None:
        """Of a gateway without keys at loopback: the browser takes its answers for those of the page's own server."""
        served = await serve(trust_tenant_metadata=False)
        for host in ("evil.example:8000", "127.0.0.1.evil.example", ""):
            for path in ("/v1/models", "/metrics", "/load"):
                async with served.session.get(served.url + path, headers={"Host": host}) as response:
                    assert response.status == 403 and "localhost" in await response.text()
            async with served.session.post(
                served.url + "/v1/completions", json=TEXT, headers={"Host": host}
            ) as response:
                assert response.status == 403
        for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
            async with served.session.get(served.url + "/v1/models", headers={"Host": host}) as response:
                assert response.status == 200

    @pytest.mark.parametrize("settings", [{"anonymous": "yes"}, {"trust_tenant_metadata": True}])
    async def test_a_proxy_on_this_machine_may_send_another_host(
        self, serve: Start, settings: dict[str, Any]
    ) -> None:
        served = await serve(**{"trust_tenant_metadata": False, **settings})
        async with served.session.get(served.url + "/v1/models", headers={"Host": "api.example"}) as response:
            assert response.status == 200

    async def test_listens_on_every_address_of_ipv6_and_ipv4(self, serve: Any) -> None:
        served: Served = await serve(grpc_host="::", anonymous="yes")
        assert served.running.gateway.http is not None
        for host in ("127.0.0.1", "[::1]"):
            async with served.session.get(
                f"http://{host}:{served.running.gateway.http.port}/health"
            ) as answer:
                assert answer.status == 200

    async def test_lists_its_model(self, served: Served) -> None:
        async with served.session.get(served.url + "/v1/models") as response:
            (listed,) = (await response.json())["data"]
        async with served.session.get(served.url + "/v1/models/tiny") as response:
            assert await response.json() == listed
        async with served.session.get(served.url + "/v1/models/other") as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (404, "model", "model_not_found")

        assert (listed["id"], listed["object"], listed["max_model_len"]) == ("tiny", "model", CONTEXT)

    async def test_takes_requests_for_each_name_of_its_model(self, serve: Start, model_dir: Path) -> None:
        served = await serve(model=load_model(model_dir, name="tiny", aliases=("large", "gpt/4")))
        async with served.session.get(served.url + "/v1/models") as response:
            assert [one["id"] for one in (await response.json())["data"]] == ["tiny", "large", "gpt/4"]
        async with served.session.get(served.url + "/v1/models/large") as response:
            assert (await response.json())["id"] == "large"
        listed = await served.running.stub.ListModels(inference_pb2.ListModelsRequest())
        assert [one.name for one in listed.models] == ["tiny", "large", "gpt/4"]

        call = asyncio.create_task(served.post("/v1/chat/completions", CHAT | {"model": "gpt/4"}))
        await served.finished()
        status, _, answer = await call
        assert (status, answer["model"]) == (200, "tiny")
        assert served.scheduler.all_heard("submit")[0].model == "tiny"
        status, _, answer = await served.post("/v1/chat/completions", CHAT | {"model": "other"})
        assert status == 404
        assert "must be 'tiny' or 'large' or 'gpt/4', the model served here" in answer["error"]["message"]

    async def test_an_adapter_is_a_model_of_its_own(self, serve: Start, model_dir: Path) -> None:
        served = await serve(model=load_model(model_dir, name="tiny", adapters=("sql", "chat")))
        async with served.session.get(served.url + "/v1/models") as response:
            listed = {one["id"]: one.get("parent") for one in (await response.json())["data"]}
        assert listed == {"tiny": None, "sql": "tiny", "chat": "tiny"}

        answers = []
        for count, name in enumerate(("sql", "tiny", "sql", "chat"), start=1):
            call = asyncio.create_task(served.post("/v1/completions", TEXT | {"model": name}))
            await served.finished(count=count)
            answers.append((await call)[2]["model"])

        assert answers == ["sql", "tiny", "sql", "chat"]
        sent = served.scheduler.all_heard("submit")
        assert [one.specification.adapter for one in sent] == ["sql", "", "sql", "chat"]
        salts = [one.specification.cache_salt for one in sent]
        assert salts[0] == salts[2], "KV of one adapter is shared"
        assert len({*salts}) == 3, "and none with another"
        assert sent[0].length_features != sent[1].length_features

    async def test_is_healthy_while_a_leader_is_there(
        self, served: Served, start_gateway: StartGateway
    ) -> None:
        async with served.session.get(served.url + "/health") as response:
            assert response.status == 200
        alone: Running = await start_gateway("127.0.0.1:1", http_port=0)
        assert alone.gateway.http is not None
        async with served.session.get(f"http://127.0.0.1:{alone.gateway.http.port}/health") as response:
            assert response.status == 503

    async def test_is_not_healthy_while_it_may_open_no_more_streams(self, serve: Any) -> None:
        served = await serve(max_streams=1)
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        request_id = await served.scheduler.submitted()
        async with served.session.get(served.url + "/health") as response:
            reason = (await response.json())["reason"]
            assert (response.status, reason) == (503, "this gateway has 1 of 1 streams open, its limit")
        served.scheduler.commit(request_id, [70], Kind.KIND_STOP)
        await call

        async with served.session.get(served.url + "/health") as response:
            assert response.status == 200

    @pytest.mark.parametrize(("path", "status"), [("/health", 503), ("/live", 200)])
    async def test_is_alive_but_not_healthy_while_it_stops(
        self, served: Served, path: str, status: int
    ) -> None:
        assert served.running.gateway.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port)
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        request_id = await served.scheduler.submitted()
        stopping = asyncio.create_task(served.running.gateway.stop())
        await served.running.gateway.app.stopping.wait()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readline()
        writer.close()
        served.scheduler.commit(request_id, [70], Kind.KIND_STOP)
        await call
        await stopping

        assert head.startswith(f"HTTP/1.1 {status} ".encode())

    async def test_shows_the_metrics_of_the_process(self, served: Served) -> None:
        async with served.session.get(served.url + "/metrics") as response:
            text = await response.text()

        assert 'laps_sd_gateway_link_up{shard="s0"} 1.0' in text

    async def test_describes_every_path_that_it_serves(self, served: Served) -> None:
        assert served.running.gateway.http is not None
        routes = served.running.gateway.http.routes.routes()
        async with served.session.get(served.url + "/openapi.json") as response:
            assert (response.status, response.content_type) == (200, "application/json")
            description = await response.json()
        described = {
            (method, path)
            for path, methods in description["paths"].items()
            for method in methods
            if method != "parameters"
        }

        assert described == {
            (route.method.lower(), route.resource.canonical)
            for route in routes
            if route.method != "HEAD" and route.resource is not None
        }

    @pytest.mark.parametrize(
        ("method", "path", "location"),
        [
            ("GET", "/console/", "/console"),
            ("GET", "/console/demo/?a=b%20c", "/console/demo?a=b%20c"),
            ("POST", "/v1/completions/", "/v1/completions"),
        ],
    )
    async def test_leads_from_a_slash_at_the_end_to_the_path_without(
        self, served: Served, method: str, path: str, location: str
    ) -> None:
        async with served.session.request(method, served.url + path, allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (308, location)

    @pytest.mark.parametrize("path", ["//console/", "/console//", "/console/x/", "/v1/models/tiny/"])
    async def test_leads_nowhere_from_another_path(self, served: Served, path: str) -> None:
        async with served.session.get(served.url + path, allow_redirects=False) as response:
            assert response.status == 404

    @pytest.mark.parametrize(("given", "kept"), [("mine-7", True), ("x" * 200, False)])
    async def test_gives_a_request_id_back(self, served: Served, given: str, kept: bool) -> None:
        status, headers, _ = await served.post(
            "/v1/completions", {"prompt": ""}, headers={"x-request-id": given}
        )

        assert status == 400
        assert (headers["x-request-id"] == given) == kept

    async def test_a_stop_waits_for_the_calls_in_progress(self, served: Served) -> None:
        assert await status_of_a_call_that_outlives_a_stop(served) == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await served.session.get(served.url + "/health")

    async def test_whoever_comes_while_it_stops_is_sent_to_another(self, served: Served) -> None:
        assert served.running.gateway.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port)
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        request_id = await served.scheduler.submitted()
        stopping = asyncio.create_task(served.running.gateway.stop())
        await served.running.gateway.app.stopping.wait()
        writer.write(octets_of(TEXT, b"x-request-id: mine-8"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        served.scheduler.commit(request_id, [70], Kind.KIND_STOP)
        await call
        await stopping

        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"x-request-id: mine-8" in head
        assert b"Retry-After: 1" in head
        assert json.loads(body)["error"]["type"] == "server_error"

    async def test_a_stop_ends_connections_without_a_call(self, served: Served) -> None:
        assert served.running.gateway.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port)
        writer.write(LIVE)
        await reader.readuntil(b"}")
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        request_id = await served.scheduler.submitted()
        stopping = asyncio.create_task(served.running.gateway.stop())
        rest = await reader.read()
        was_stopped = stopping.done()
        writer.close()
        served.scheduler.commit(request_id, [70], Kind.KIND_STOP)
        await call
        await stopping

        assert (rest, was_stopped) == (b"", False)

    async def test_a_connection_ends_with_the_call_that_outlives_a_stop(self, served: Served) -> None:
        whole = asyncio.create_task(served.post("/v1/completions", TEXT))
        first = await served.scheduler.submitted()
        assert served.running.gateway.http is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port)
        writer.write(octets_of(TEXT | {"stream": True}).replace(b"Connection: close\r\n", b""))
        second = await served.scheduler.submitted(2)
        stopping = asyncio.create_task(served.running.gateway.stop())
        await served.running.gateway.app.stopping.wait()
        served.scheduler.commit(second, [70], Kind.KIND_STOP)
        stream = await reader.read()
        was_stopped = stopping.done()
        writer.close()
        served.scheduler.commit(first, [70], Kind.KIND_STOP)
        status, headers, _ = await whole
        await stopping

        assert b"data: [DONE]" in stream
        assert not was_stopped
        assert (status, headers["Connection"]) == (200, "close")

    async def test_a_call_that_does_not_end_in_time_is_refused(self, serve: Any) -> None:
        served = await serve(drain_s=0.0)
        before = ended("unavailable")
        call = asyncio.create_task(served.post("/v1/completions", TEXT))
        await served.scheduler.submitted()
        await served.running.gateway.stop()
        status, headers, answer = await call

        assert (status, headers["Retry-After"], headers["Connection"]) == (503, "1", "close")
        assert answer["error"]["message"] == "this gateway is stopping; try another"
        assert ended("unavailable") == before + 1

    async def test_a_stream_that_does_not_end_in_time_fails(self, serve: Any) -> None:
        served = await serve(drain_s=0.0)
        body = TEXT | {"stream": True}
        async with served.session.post(served.url + "/v1/completions", json=body) as response:
            before = ended("unavailable")
            request_id = await served.scheduler.submitted()
            served.scheduler.commit(request_id, served.running.model.encode_rendered("hello"))
            await response.content.readuntil(b"\n\n")
            await served.running.gateway.stop()
            *_, last = await events(response)

        assert last["error"]["message"] == "this gateway is stopping; try another"
        assert ended("unavailable") == before + 1

    async def test_speaks_tls_with_the_certificates_of_grpc(self, serve: Any, tmp_path: Path) -> None:
        folder = write_certificates(tmp_path)
        served = await serve(
            tls_cert=folder / "cert.pem", tls_key=folder / "key.pem", tls_client_ca=folder / "ca.pem"
        )
        secure = served.url.replace("http://", "https://")
        url = secure + "/health"
        known = ssl.create_default_context(cafile=folder / "ca.pem")
        stranger = ssl.create_default_context(cafile=folder / "ca.pem")
        known.load_cert_chain(folder / "cert.pem", folder / "key.pem")

        async with served.session.get(url, ssl=known) as response:
            assert response.status == 200
        body = TEXT | {"stream": True}
        async with served.session.post(secure + "/v1/completions", json=body, ssl=known) as response:
            await served.finished()
            chunks = await events(response)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
        with pytest.raises(aiohttp.ClientError):
            await served.session.get(url, ssl=stranger)
        with pytest.raises(aiohttp.ClientError):
            await served.session.get(served.url + "/health")

    async def test_a_port_in_use_is_one_sentence(self, served: Served, start_gateway: StartGateway) -> None:
        assert served.running.gateway.http is not None
        port = served.running.gateway.http.port
        with pytest.raises(StartupError, match=f"The HTTP port {port} on 127.0.0.1 cannot be opened"):
            await start_gateway("127.0.0.1:1", http_port=port)


async def status_of_a_call_that_outlives_a_stop(served: Served) -> int:
    """Stop the gateway during a call; return the call's status after both have ended."""
    call = asyncio.create_task(served.post("/v1/completions", TEXT))
    request_id = await served.scheduler.submitted()
    stopping = asyncio.create_task(served.running.gateway.stop())
    await served.running.gateway.app.stopping.wait()
    served.scheduler.commit(request_id, [70], Kind.KIND_STOP)
    status, _, _ = await call
    await stopping
    return int(status)


async def ended_by_the_server(port: int, sent: bytes) -> bytes:
    """Return the answer on a connection that sends these bytes and nothing more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


class Raw:
    """A connection whose bytes a test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.head = b""
        """Head of the last answer."""

    @classmethod
    async def open(cls, served: Served, tls: ssl.SSLContext | None = None) -> Raw:
        """Connect to the HTTP port."""
        assert served.running.gateway.http is not None
        return cls(*await asyncio.open_connection("127.0.0.1", served.running.gateway.http.port, ssl=tls))

    async def ask(self, sent: bytes = LIVE) -> bytes:
        """Send a request; return the status line of its answer, once all of that has come."""
        self.writer.write(sent)
        self.head = head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.splitlines() if line.lower().startswith(b"content-length:"))
        await self.reader.readexactly(int(length.partition(b":")[2]))
        return head.splitlines()[0]

    async def ended(self) -> bool:
        """Read until the server ends the connection; return whether nothing else came."""
        try:
            async with asyncio.timeout(30):
                return await self.reader.read() == b""
        except ConnectionError:
            return True
        finally:
            self.writer.close()


class TestConnections:
    @pytest.mark.parametrize(
        "sent", [b"", b"POST /v1/compl", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "]
    )
    async def test_one_whose_headers_do_not_come_is_ended(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes
    ) -> None:
        monkeypatch.setattr(http_connections, "HEADERS_S", 0.2)
        served: Served = await serve()
        answer = asyncio.create_task(served.post("/v1/completions", TEXT))
        await served.scheduler.submitted(1)

        async with asyncio.timeout(30):
            assert await ended_by_the_server(served.running.gateway.http.port, sent) == b""

        await served.finished()  # it began before, and continues
        status, _, _ = await answer
        assert status == 200

    async def test_more_than_may_be_open_are_closed_at_once_while_all_have_a_call(self, serve: Any) -> None:
        served: Served = await serve(max_http_connections=2)
        port = served.running.gateway.http.port
        held = [await Raw.open(served) for _ in range(2)]
        answers = [asyncio.create_task(connection.ask(octets_of(TEXT))) for connection in held]
        await served.scheduler.submitted(2)

        async with asyncio.timeout(30):
            assert await ended_by_the_server(port, LIVE) == b""
        for number in (1, 2):
            await served.finished(count=number)
        assert await asyncio.gather(*answers) == [b"HTTP/1.1 200 OK"] * 2

        new = await Raw.open(served)
        assert await new.ask() == b"HTTP/1.1 200 OK"
        for connection in (*held, new):
            connection.writer.close()

    async def test_those_without_a_request_make_room_for_new_ones_the_first_ones_first(
        self, serve: Any
    ) -> None:
        """Connections that send nothing, or half a request, would keep out all others for as long as their headers
        may take."""
        served: Served = await serve(max_http_connections=3)
        silent = []
        for sent in (b"", b"GET /live HTTP/1.1\r\nX-A: ", b"") * 5:
            silent.append(await Raw.open(served))
            silent[-1].writer.write(sent)
        client = await Raw.open(served)

        assert await client.ask() == b"HTTP/1.1 200 OK"
        for connection in silent[:-2]:
            assert await connection.ended()
        assert await silent[-1].ask() == b"HTTP/1.1 200 OK"
        for connection in (*silent, client):
            connection.writer.close()

    @pytest.mark.parametrize("sent", [b"G", b"GET /live HTTP/1.1\r\nX-A: "])
    async def test_one_whose_next_headers_do_not_come_is_ended(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes
    ) -> None:
        connection = await Raw.open(await serve())
        for _ in range(2):
            assert await connection.ask() == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(http_connections, "HEADERS_S", 0.2)
        connection.writer.write(sent)

        assert await connection.ended()

    async def test_an_idle_one_makes_room_for_a_new_one_and_a_busy_one_does_not(self, serve: Any) -> None:
        served: Served = await serve(max_http_connections=3)
        busy = await Raw.open(served)
        answer = asyncio.create_task(busy.ask(octets_of(TEXT)))
        await served.scheduler.submitted(1)
        longest_idle, idle = await Raw.open(served), await Raw.open(served)
        for connection in (longest_idle, idle, longest_idle, idle):
            assert await connection.ask() == b"HTTP/1.1 200 OK"

        new = await Raw.open(served)
        assert await new.ask() == b"HTTP/1.1 200 OK"
        assert await longest_idle.ended()
        assert await idle.ask() == b"HTTP/1.1 200 OK"
        await served.finished()
        assert await answer == b"HTTP/1.1 200 OK"
        for connection in (busy, idle, new):
            connection.writer.close()

    async def test_one_over_tls_is_counted_and_its_headers_have_their_time(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        folder = write_certificates(tmp_path)
        served: Served = await serve(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")
        known = ssl.create_default_context(cafile=folder / "ca.pem")
        first, second = [await Raw.open(served, known) for _ in range(2)]
        for connection in (first, second, first, second):
            assert await connection.ask() == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(http_connections, "HEADERS_S", 0.2)
        slow = await Raw.open(served, known)
        second.writer.write(b"GET /li")
        slow.writer.write(b"GET /li")

        assert await slow.ended()
        assert await second.ended()
        assert await first.ask() == b"HTTP/1.1 200 OK"
        http = served.running.gateway.http
        assert http is not None and http.connections == 1
        first.writer.close()
        await wait_until_async(lambda: http.connections == 0, description="no connection is counted")

    async def test_one_whose_client_reads_nothing_is_ended(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unread answers would keep the connection without end: it needs no key, only a path without one."""
        monkeypatch.setattr(http_connections, "STALLED_S", 0.2)
        served: Served = await serve()
        http = served.running.gateway.http
        assert http is not None
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.connect(("127.0.0.1", http.port))
        listening.setblocking(False)
        ask = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(listening, ask * 300)
        await wait_until_async(lambda: http.connections == 1, description="the connection is there")
        await wait_until_async(lambda: http.connections == 0, description="the connection is ended")
        listening.close()

    async def test_one_in_its_tls_handshake_is_counted_and_makes_room_for_new_ones(
        self, serve: Any, tmp_path: Path
    ) -> None:
        folder = write_certificates(tmp_path)
        served: Served = await serve(
            tls_cert=folder / "cert.pem", tls_key=folder / "key.pem", max_http_connections=3
        )
        http = served.running.gateway.http
        assert http is not None
        silent = [await Raw.open(served) for _ in range(3)]
        await wait_until_async(lambda: http.connections == 3, description="all are counted")

        client = await Raw.open(served, ssl.create_default_context(cafile=folder / "ca.pem"))
        assert await client.ask() == b"HTTP/1.1 200 OK"
        assert await silent[0].ended()
        assert http.connections == 3
        silent[1].writer.write(LIVE)  # plain text
        assert b"HTTP" not in await silent[1].reader.read()
        for connection in (*silent, client):
            connection.writer.close()
        await wait_until_async(lambda: http.connections == 0, description="no connection is counted")

    async def test_one_whose_tls_handshake_does_not_end_is_ended(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(http_connections, "HEADERS_S", 0.2)
        folder = write_certificates(tmp_path)
        served: Served = await serve(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem")
        http = served.running.gateway.http
        assert http is not None

        assert await (await Raw.open(served)).ended()
        assert http.connections == 0

    async def test_one_for_which_no_descriptor_is_left_waits(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_connections, "ACCEPT_AGAIN_S", 0.05)
        served: Served = await serve()
        http = served.running.gateway.http
        assert http is not None
        warned = asyncio.Event()
        monkeypatch.setattr(http_connections.log, "warning", lambda *_, **__: warned.set())
        with socket.socket() as client:
            client.setblocking(False)
            limits, filling = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            try:
                with contextlib.suppress(OSError):
                    while True:
                        filling.append(os.dup(client.fileno()))
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", http.port))
                await asyncio.wait_for(warned.wait(), 30)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in filling:
                    os.close(descriptor)
            await asyncio.get_running_loop().sock_sendall(client, LIVE)
            assert await asyncio.get_running_loop().sock_recv(client, 12) == b"HTTP/1.1 200"

    async def test_large_bodies_of_a_tenant_are_received_a_few_at_a_time_and_delay_no_other_tenant(
        self, served: Served
    ) -> None:
        """150 bodies of 4 MiB that lacked their last byte took 1.2 GiB, whatever calls their tenant may have open."""
        large = {"prompt": "x" * LARGE_BODY_BYTES}
        sent = octets_of(large, b"laps-sd-tenant: hostile")
        held = [await Raw.open(served) for _ in range(LARGE_BODIES_AT_ONCE)]
        for connection in held:
            connection.writer.write(sent[:-1])
        turns = served.running.gateway.http._generation._bodies._turns._of_tenants
        await wait_until_async(
            lambda: "hostile" in turns and not turns["hostile"]._free, description="all have begun"
        )
        more, other = await Raw.open(served), await Raw.open(served)
        waits = asyncio.create_task(more.ask(sent))

        refused = b"HTTP/1.1 400 Bad Request"  # a prompt that long does not fit
        assert await other.ask(octets_of(large, b"laps-sd-tenant: other")) == refused
        assert not waits.done()
        held[0].writer.write(sent[-1:])
        assert await waits == refused
        for connection in (*held, more, other):
            connection.writer.close()
        await wait_until_async(lambda: not turns, description="nothing is kept of the tenants")

    async def test_an_old_one_ends_with_its_next_answer_and_no_answer_is_cut(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_connections, "AGE_SPREAD", 0.0)
        served: Served = await serve(max_connection_age_s=1.0)
        whole, streaming, idle = [await Raw.open(served) for _ in range(3)]
        sent = octets_of(TEXT).replace(b"Connection: close\r\n", b"")
        answer = asyncio.create_task(whole.ask(sent))
        await served.scheduler.submitted(1)

        async def ends() -> bool:
            assert await idle.ask() == b"HTTP/1.1 200 OK"
            return b"connection: close" in idle.head.lower()

        await wait_until_async(ends, description="an answer that ends its connection")
        assert await idle.ended()
        streaming.writer.write(octets_of({**TEXT, "stream": True}).replace(b"Connection: close\r\n", b""))
        await served.scheduler.submitted(2)
        for number in (1, 2):
            await served.finished(count=number)
        assert await answer == b"HTTP/1.1 200 OK"
        assert b"connection: close" in whole.head.lower()
        assert await whole.ended()
        streamed = await streaming.reader.read()
        assert b"connection: close" in streamed.partition(b"\r\n\r\n")[0].lower()
        assert b"data: [DONE]" in streamed
        streaming.writer.close()

    async def test_what_follows_an_upgrade_that_is_not_made_is_the_next_request(self, served: Served) -> None:
        connection = await Raw.open(served)
        upgrade = LIVE.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost")

        assert await connection.ask(upgrade) == b"HTTP/1.1 200 OK"
        assert await connection.ask() == b"HTTP/1.1 200 OK"
        connection.writer.close()

    async def test_a_stop_ends_those_without_a_request_and_counts_none_any_more(self, served: Served) -> None:
        http = served.running.gateway.http
        assert http is not None
        silent, begun, idle = [await Raw.open(served) for _ in range(3)]
        begun.writer.write(b"GET /li")
        assert await idle.ask() == b"HTTP/1.1 200 OK"
        await wait_until_async(lambda: http.connections == 3, description="three connections")
        assert await status_of_a_call_that_outlives_a_stop(served) == 200
        for connection in (silent, begun, idle):
            assert await connection.ended()
        await wait_until_async(lambda: http.connections == 0, description="no connection is counted")
