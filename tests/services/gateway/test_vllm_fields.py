"""Fields of vLLM's bodies and answers that a gateway serves without a worker's help."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.api.openai.request import read_chat
from gateway.model.continued import MARK, cut_at_mark
from gateway.model.files import ModelFiles, load_model
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import TokenLogprobs
from tests.services.gateway.conftest import TEMPLATE, Served, Start, write_model
from tests.services.gateway.fake_scheduler import Kind
from tests.services.gateway.test_http import CHAT, TEXT, events

ASSISTANT = {"role": "assistant", "content": "one two"}


async def answer_of(served: Served, path: str, body: Any, end: Any = Kind.KIND_STOP) -> Any:
    """Return the answer of a call whose output is "hello world"."""
    call = asyncio.create_task(served.post(path, body))
    count = len(served.scheduler.all_heard("submit")) + 1
    await served.finished(end=end, count=count)
    status, _, answer = await call
    assert status == 200, answer
    return answer


async def events_of(served: Served, path: str, body: Any) -> list[Any]:
    count = len(served.scheduler.all_heard("submit")) + 1
    async with served.session.post(served.url + path, json=body | {"stream": True}) as response:
        await served.finished(count=count)
        return await events(response)


async def prompt_of(served: Served, path: str, body: Any) -> list[int]:
    """Return the token ids that the scheduler gets for a body."""
    answer = await answer_of(served, path, body)
    return list(served.scheduler.record.requests[answer["id"]].submit.specification.prompt_ids)


class TestEcho:
    async def test_of_a_text(self, served: Served) -> None:
        answer = await answer_of(served, "/v1/completions", TEXT | {"echo": True, "n": 1})
        assert answer["choices"][0]["text"] == "the quickhello world"

    async def test_of_token_ids(self, served: Served, model: ModelFiles) -> None:
        ids = model.encode_text("the quick")
        answer = await answer_of(served, "/v1/completions", {"prompt": ids, "echo": True})
        assert answer["choices"][0]["text"] == "the quickhello world"

    async def test_of_a_stream(self, served: Served) -> None:
        chunks = await events_of(served, "/v1/completions", TEXT | {"echo": True})
        assert chunks[0]["choices"][0]["text"] == "the quick"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the quickhello world"

    async def test_of_a_chat_is_the_assistants_last_message(self, served: Served) -> None:
        body = {"messages": [*CHAT["messages"], ASSISTANT], "echo": True, "continue_final_message": True}
        answer = await answer_of(served, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "one twohello world"
        chunks = await events_of(served, "/v1/chat/completions", CHAT | {"echo": True})
        assert chunks[0]["choices"][0]["delta"]["content"] == ""


class TestTokenIds:
    async def test_of_a_completion(self, served: Served, model: ModelFiles) -> None:
        answer = await answer_of(served, "/v1/completions", TEXT | {"return_token_ids": True})
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == model.encode_text("the quick")
        assert choice["token_ids"] == model.encode_rendered("hello world")

    async def test_of_a_chat(self, served: Served, model: ModelFiles) -> None:
        answer = await answer_of(served, "/v1/chat/completions", CHAT | {"return_token_ids": True})
        assert answer["choices"][0]["token_ids"] == model.encode_rendered("hello world")
        request = served.scheduler.record.requests[answer["id"]]
        assert answer["prompt_token_ids"] == list(request.submit.specification.prompt_ids)

    @pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", TEXT)])
    async def test_of_a_stream_come_once(
        self, served: Served, model: ModelFiles, path: str, body: Any
    ) -> None:
        chunks = await events_of(served, f"/v1/{path}", body | {"return_token_ids": True})
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert ids == model.encode_rendered("hello world")
        prompts = [
            part["prompt_token_ids"]
            for chunk in chunks
            for part in (chunk, chunk["choices"][0])
            if "prompt_token_ids" in part
        ]
        (submit,) = served.scheduler.all_heard("submit")
        assert prompts == [list(submit.specification.prompt_ids)]

    async def test_are_the_names_of_tokens_if_they_are_to_be(self, served: Served) -> None:
        body = TEXT | {"logprobs": 1, "return_tokens_as_token_ids": True}
        call = asyncio.create_task(served.post("/v1/completions", body))
        request_id = await served.scheduler.submitted()
        served.scheduler.record.requests[request_id].logprobs = [TokenLogprobs(logprob=-0.5)] * 2
        served.scheduler.commit(request_id, [7, 9], Kind.KIND_STOP)
        _, _, answer = await call
        assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:9"]


class TestTheReasonOfAStop:
    async def test_is_the_stop_string(self, served: Served) -> None:
        end = link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, cut_characters=5)
        answer = await answer_of(served, "/v1/completions", TEXT | {"stop": ["wor", "world"]}, end)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello ", "stop", "wor")

    async def test_is_the_stop_string_that_stays(self, served: Served) -> None:
        end = link_pb2.RequestEnd(kind=Kind.KIND_STOP_SEQUENCE, cut_characters=2)
        body = TEXT | {"stop": ["wor"], "include_stop_str_in_output": True}
        answer = await answer_of(served, "/v1/completions", body, end)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("hello wor", "wor")

    async def test_is_the_stop_token_whose_text_is_left_out(self, served: Served, model: ModelFiles) -> None:
        ids = model.encode_rendered("hello world")
        answer = await answer_of(served, "/v1/completions", TEXT | {"stop_token_ids": ids[-1:]})
        (choice,) = answer["choices"]
        assert choice["stop_reason"] == ids[-1]
        assert choice["text"] == model.decode(ids[:-1])

    async def test_is_null_at_an_end_of_the_model(self, served: Served) -> None:
        chunks = await events_of(served, "/v1/chat/completions", CHAT)
        (choice,) = chunks[-1]["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


class TestThePrompt:
    async def test_ends_in_the_message_that_is_continued(self, served: Served, model: ModelFiles) -> None:
        body = {"messages": [*CHAT["messages"], ASSISTANT], "continue_final_message": True}
        ids = await prompt_of(served, "/v1/chat/completions", body)
        assert model.decode(ids).endswith("<|assistant|>one two")

    async def test_has_no_beginning_of_an_answer_if_none_is_wanted(
        self, served: Served, model: ModelFiles
    ) -> None:
        ids = await prompt_of(served, "/v1/chat/completions", CHAT | {"add_generation_prompt": False})
        assert model.decode(ids).endswith("hello\n")

    async def test_has_the_tokens_around_it_or_not(self, served: Served, model: ModelFiles) -> None:
        bare = await prompt_of(served, "/v1/completions", TEXT | {"add_special_tokens": False})
        assert bare == model.encode_rendered("the quick")
        whole = await prompt_of(served, "/v1/completions", TEXT | {"add_special_tokens": True})
        assert whole == model.encode_text("the quick") != bare
        chat = await prompt_of(served, "/v1/chat/completions", CHAT | {"add_special_tokens": True})
        assert chat[:2] == [whole[0]] * 2

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            (
                {"continue_final_message": True, "add_generation_prompt": True},
                "continue_final_message",
            ),
            (
                {"continue_final_message": True, "messages": [{"role": "assistant", "content": " "}]},
                "messages[0].content",
            ),
        ],
    )
    async def test_that_cannot_be_continued_is_refused(self, served: Served, change: Any, param: str) -> None:
        status, _, answer = await served.post("/v1/chat/completions", CHAT | change)
        assert (status, answer["error"]["param"]) == (400, param)


def test_a_chat_is_cut_after_the_content_of_its_last_message() -> None:
    assert cut_at_mark(f"<u>hi</u><a>so {MARK}</a>", "so ") == "<u>hi</u><a>so "
    assert cut_at_mark(f"<u>so</u><a>so {MARK.strip()}</a>", " so ") == "<u>so</u><a>so"
    assert cut_at_mark(f"<u>hi</u><a>a{MARK}</a>", "a") == "<u>hi</u><a>a"
    assert cut_at_mark(f"<a>SO{MARK}</a>", "so") is None
    assert cut_at_mark("<a></a>", "so") is None


async def test_letters_that_a_template_writes_after_a_message_are_not_its_end(
    serve: Start, tmp_path: Path
) -> None:
    template = TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}<|im_end|>")
    model = load_model(write_model(tmp_path / "model", template=template), name="tiny")
    served = await serve(model=model)
    messages = [*CHAT["messages"], {"role": "assistant", "content": "i"}]
    body = {"messages": messages, "continue_final_message": True}
    ids = await prompt_of(served, "/v1/chat/completions", body)
    assert model.decode(ids).endswith("<|assistant|>i")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_logprobs": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
        {"spaces_between_special_tokens": False, "stop_token_ids": [], "bad_words": [], "min_tokens": 0},
        {
            "best_of": 1,
            "n": 1,
            "echo": False,
            "logits_processors": [],
            "vllm_xargs": {},
            "watermarking": False,
        },
        {"request_id": "mine", "session_id": "mine", "cache_salt": None, "truncate_prompt_tokens": None},
        {"structured_outputs": None, "guided_choice": None, "allowed_token_ids": None, "stream_interval": 1},
    ],
)
async def test_defaults_of_vllm_are_accepted(served: Served, fields: Any) -> None:
    await answer_of(served, "/v1/completions", TEXT | fields)


async def test_hints_as_for_the_scheduler_inside_vllm_are_refused_with_the_names_of_the_fields(
    served: Served,
) -> None:
    status, _, answer = await served.post(
        "/v1/completions", TEXT | {"vllm_xargs": {"workload_class": "chat"}}
    )
    assert (status, answer["error"]["param"]) == (400, "vllm_xargs")
    assert (
        "workload_class and expected_output_tokens are fields of the body here" in answer["error"]["message"]
    )


@pytest.mark.parametrize("wanted", [True, False])
async def test_openais_padding_of_events_has_no_effect(served: Served, wanted: bool) -> None:
    body = CHAT | {"stream_options": {"include_usage": True, "include_obfuscation": wanted}}
    chunks = await events_of(served, "/v1/chat/completions", body)
    assert chunks[-1]["usage"]["completion_tokens"] > 0


async def test_unknown_fields_are_ignored_with_one_line_where_a_setting_allows_it(
    serve: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    served = await serve(unknown_fields="ignore")
    for _ in range(2):
        await answer_of(served, "/v1/completions", TEXT | {"colour": "red"})
    assert capsys.readouterr().out.count("unknown field ignored") == 1
    status, _, answer = await served.post("/v1/completions", TEXT | {"suffix": "x"})
    assert (status, answer["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize(
    "field", ["guided_json", "structured_outputs.json", "response_format.json_schema.schema"]
)
def test_a_schema_that_nests_too_deeply_is_refused_by_its_field(field: str) -> None:
    schema: dict[str, Any] = {}
    inner = schema
    for _ in range(5000):
        inner["a"] = inner = {}
    first, *others = field.split(".")
    value: Any = schema
    for name in reversed(others):
        value = {name: value}
    if first == "response_format":
        value |= {"type": "json_schema"}
        value["json_schema"]["name"] = "deep"
    with pytest.raises(InvalidArgument, match=f"{field} must not nest this deeply"):
        read_chat({"messages": [{"role": "user", "content": "x"}], first: value})
