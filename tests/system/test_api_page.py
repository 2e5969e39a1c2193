"""The page that compares the HTTP API with those of other servers: one call of the shipped pair, or a few, for each row."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

import laps_sd
from laps_sd.stack.local import LocalStack
from worker_svc.demo import TARGET_DIR

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
ROWS = re.findall(
    r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)
MODEL = "laps-sd-demo"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
TOKENIZER = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
IDS = TOKENIZER.encode(ANSWER, add_special_tokens=False).ids
END = TOKENIZER.token_to_id("<|end|>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Return the weather of a city.", "parameters": CITY},
}


class Api:
    """The HTTP port of a gateway, and OpenAI's client of it."""

    def __init__(self, url: str, client: openai.OpenAI) -> None:
        self.url = url.removesuffix("/v1")
        self.client = client

    def chat(self, **fields: Any) -> Any:
        """Return the answer to the question, greedy by default."""
        asked = {"temperature": 0, "max_tokens": 30, **fields}
        messages = asked.pop("messages", QUESTION)
        answer = self.client.chat.completions.create(model=MODEL, messages=messages, extra_body=asked)
        return answer.model_dump()

    def text(self, **fields: Any) -> Any:
        """Return the completion of a text."""
        asked = {"temperature": 0, "max_tokens": 12, **fields}
        prompt = asked.pop("prompt", "The capital of France is")
        return self.client.completions.create(model=MODEL, prompt=prompt, extra_body=asked).model_dump()

    def said(self, **fields: Any) -> str:
        """Return the content of the answer to the question."""
        content: str = self.chat(**fields)["choices"][0]["message"]["content"]
        return content

    def refuses(self, **fields: Any) -> None:
        """Check that a body with the one field is refused by name."""
        (name,) = fields
        with pytest.raises(openai.BadRequestError) as refused:
            self.text(**fields)
        assert refused.value.param is not None
        assert refused.value.param.startswith(name)

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Return status and content of a call of a path."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                raw, status = response.read(), response.status
        except urllib.error.HTTPError as error:
            raw, status = error.read(), error.code
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()


@pytest.fixture(scope="module")
def api(demo_stack: LocalStack) -> Iterator[Api]:
    with openai.OpenAI(base_url=demo_stack.http_url, api_key="none", max_retries=0, timeout=60) as client:
        yield Api(demo_stack.http_url, client)


def ids_of(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def min_tokens(api: Api) -> None:
    ids = ids_of(api.chat(min_tokens=20, return_token_ids=True))
    assert len(ids) > 20
    assert END not in ids[:20]


def stop_token_ids(api: Api) -> None:
    answer = api.chat(stop_token_ids=[IDS[3]], return_token_ids=True)
    (choice,) = answer["choices"]
    assert ids_of(answer) == IDS[:4]
    assert choice["message"]["content"] == TOKENIZER.decode(IDS[:3])


def bad_words(api: Api) -> None:
    assert "Paris" not in api.said(bad_words=["Paris"])
    words = TOKENIZER.encode(" Paris", add_special_tokens=False).ids
    assert "Paris" not in api.said(bad_words_ids=[words])


def allowed_token_ids(api: Api) -> None:
    allowed = [*IDS[:3], END]
    assert set(ids_of(api.chat(allowed_token_ids=allowed, return_token_ids=True))) <= set(allowed)


def ignore_eos(api: Api) -> None:
    assert len(ids_of(api.chat(ignore_eos=True, return_token_ids=True))) == 30


def skip_special_tokens(api: Api) -> None:
    fields = {"ignore_eos": True, "skip_special_tokens": False}
    assert "<|end|>" in api.said(**fields)
    assert "<|end|>" not in api.said(ignore_eos=True)


def spaces_between_special_tokens(api: Api) -> None:
    assert api.said(spaces_between_special_tokens=False) == api.said(spaces_between_special_tokens=True)


def include_stop_str(api: Api) -> None:
    assert api.said(stop=["France"]) == "The capital of "
    assert api.said(stop=["France"], include_stop_str_in_output=True) == "The capital of France"


def stop_reason(api: Api) -> None:
    assert api.chat(stop=["France"])["choices"][0]["stop_reason"] == "France"
    assert api.chat(stop_token_ids=[IDS[3]])["choices"][0]["stop_reason"] == IDS[3]
    assert api.chat()["choices"][0]["stop_reason"] is None


def logit_bias(api: Api) -> None:
    assert IDS[0] not in ids_of(api.chat(logit_bias={str(IDS[0]): -100}, return_token_ids=True))


def truncation(api: Api) -> None:
    assert api.said(temperature=1, top_k=1, seed=3) == api.said() == api.said(temperature=1, min_p=1, seed=3)
    assert api.said(repetition_penalty=1.0) == api.said()


def seed(api: Api) -> None:
    asked = {"temperature": 1.5, "seed": 11, "messages": [{"role": "user", "content": "Tell me a story."}]}
    assert api.said(**asked) == api.said(**asked) != api.said(**{**asked, "seed": 12})


def n(api: Api) -> None:
    assert [choice["index"] for choice in api.text(n=3)["choices"]] == [0, 1, 2]


def best_of(api: Api) -> None:
    assert len(api.text(n=2, best_of=2)["choices"]) == 2
    api.refuses(best_of=2)


def structured_outputs(api: Api) -> None:
    assert json.loads(api.said(structured_outputs={"json": SCHEMA}, max_tokens=200))["a"] in ("x", "y")
    assert re.fullmatch("[0-9]{3}", api.said(structured_outputs={"regex": "[0-9]{3}"}))
    assert api.said(structured_outputs={"choice": ["yes (a.b)", "no"]}) in ("yes (a.b)", "no")
    assert api.said(structured_outputs={"grammar": 'start: "up" | "down"'}) in ("up", "down")
    asked = api.chat(structured_outputs={"json_object": True}, max_tokens=200)
    assert asked["choices"][0]["message"]["content"].startswith("{")


def structural_tag(api: Api) -> None:
    api.refuses(structured_outputs={"structural_tag": "{}"})


def guided(api: Api) -> None:
    assert json.loads(api.said(guided_json=SCHEMA, max_tokens=200))["a"] in ("x", "y")
    assert re.fullmatch("[0-9]{3}", api.said(guided_regex="[0-9]{3}"))
    assert api.said(guided_choice=["red", "blue"]) in ("red", "blue")
    assert api.said(guided_grammar='start: "up" | "down"') in ("up", "down")


def response_format(api: Api) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert json.loads(api.said(response_format=wanted, max_tokens=200))["a"] in ("x", "y")


def logprobs(api: Api) -> None:
    content = api.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [2] * len(content)


def tokens_as_ids(api: Api) -> None:
    found = api.text(logprobs=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["tokens"]
    assert all(re.fullmatch(r"token_id:\d+", each) for each in found)


def return_token_ids(api: Api) -> None:
    answer = api.chat(return_token_ids=True)
    assert ids_of(answer) == [*IDS, END]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def echo(api: Api) -> None:
    assert api.text(echo=True)["choices"][0]["text"].startswith("The capital of France is")
    (choice,) = api.text(echo=True, logprobs=1, max_tokens=0)["choices"]
    assert choice["text"] == "The capital of France is"
    assert choice["logprobs"]["tokens"][-1] == " is"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


def prompt_logprobs(api: Api) -> None:
    (choice,) = api.text(prompt_logprobs=1, return_token_ids=True)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(choice["prompt_token_ids"][1:], others, strict=True):
        assert entry[str(token)]["decoded_token"] == TOKENIZER.decode([token])
        assert [each["rank"] for each in entry.values()][-1] == 1
    assert len(api.chat(prompt_logprobs=0)["prompt_logprobs"]) > 1
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs cannot be used with stream: true"):
        api.text(prompt_logprobs=1, stream=True)


def add_special_tokens(api: Api) -> None:
    counts = [api.text(add_special_tokens=add)["usage"]["prompt_tokens"] for add in (True, False)]
    assert counts[0] == counts[1] + 1


def add_generation_prompt(api: Api) -> None:
    counts = [api.chat(add_generation_prompt=add)["usage"]["prompt_tokens"] for add in (True, False)]
    assert counts[0] > counts[1]


def continue_final_message(api: Api) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of France"}]
    assert api.said(messages=messages, continue_final_message=True) == " is Paris."


def tools(api: Api) -> None:
    required = {"tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = api.chat(tools=[TOOL], max_tokens=80, **required)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in ("x", "y")
    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    (choice,) = api.chat(tools=[WEATHER], messages=question, max_tokens=80)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def stream_options(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = api.client.chat.completions.create(
        model=MODEL, messages=QUESTION, stream=True, extra_body={"stream_options": options}
    )
    assert all(chunk.usage for chunk in chunks)


def priority(api: Api) -> None:
    assert api.said(priority=3) == ANSWER


def truncate_prompt_tokens(api: Api) -> None:
    api.refuses(truncate_prompt_tokens=3)


def use_beam_search(api: Api) -> None:
    api.refuses(use_beam_search=True)


def cached(api: Api, **fields: Any) -> int:
    answer = api.text(prompt="The harbour master wrote every ship into the book. " * 20, **fields)
    details = answer["usage"]["prompt_tokens_details"]
    return (details or {}).get("cached_tokens") or 0


def cache_salt(api: Api) -> None:
    assert cached(api, cache_salt="one") == 0
    assert cached(api, cache_salt="one") > 64
    assert cached(api, cache_salt="other") == 0


def conversation(api: Api) -> None:
    for name in ("prompt_cache_key", "session_id", "user"):
        assert api.said(**{name: "any text " * 50}) == ANSWER


def suffix(api: Api) -> None:
    api.refuses(suffix="x")


def unknown(api: Api) -> None:
    api.refuses(colour="red")


def chat_completions(api: Api) -> None:
    assert api.said() == ANSWER


def completions(api: Api) -> None:
    assert api.text()["choices"][0]["text"]


def responses(api: Api) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0}
    assert api.client.responses.create(**asked).output_text == ANSWER
    with api.client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == ANSWER


def messages(api: Api) -> None:
    body = {"model": MODEL, "max_tokens": 30, "messages": QUESTION, "temperature": 0}
    status, answer = api.call("/v1/messages", body)
    assert (status, answer["content"]) == (200, [{"type": "text", "text": ANSWER}])
    status, stream = api.call("/v1/messages", body | {"stream": True})
    assert stream.startswith("event: message_start")


def count_tokens(api: Api) -> None:
    _, counted = api.call("/v1/messages/count_tokens", {"model": MODEL, "messages": QUESTION})
    assert counted["input_tokens"] == api.chat()["usage"]["prompt_tokens"]


def tokenize(api: Api) -> None:
    _, tokens = api.call("/tokenize", {"model": MODEL, "prompt": ANSWER, "add_special_tokens": False})
    assert tokens["tokens"] == IDS
    assert api.call("/detokenize", {"model": MODEL, "tokens": IDS}) == (200, {"prompt": ANSWER})


def models(api: Api) -> None:
    assert [model.id for model in api.client.models.list()] == [MODEL]


def version(api: Api) -> None:
    assert api.call("/version") == (200, {"version": laps_sd.__version__})


def ping(api: Api) -> None:
    assert api.call("/ping")[0] == 200


def load(api: Api) -> None:
    assert api.call("/load")[1].keys() == {"server_load"}


def health(api: Api) -> None:
    assert api.call("/health") == (200, {"status": "ready", "workers": 1})


def metrics(api: Api) -> None:
    assert "laps_sd_gateway_" in api.call("/metrics")[1]


def descriptions(api: Api) -> None:
    assert "/v1/responses" in api.call("/openapi.json")[1]["paths"]
    assert "<code>/v1/responses</code>" in api.call("/docs")[1]


def embeddings(api: Api) -> None:
    status, answer = api.call("/v1/embeddings", {"model": MODEL, "input": "x"})
    assert status == 404
    assert "POST /v1/chat/completions" in answer["error"]["message"]


CHECKS: dict[str, Callable[[Api], None]] = {
    "`min_tokens`": min_tokens,
    "`stop_token_ids`": stop_token_ids,
    "`bad_words`": bad_words,
    "`allowed_token_ids`": allowed_token_ids,
    "`ignore_eos`": ignore_eos,
    "`skip_special_tokens`": skip_special_tokens,
    "`spaces_between_special_tokens`": spaces_between_special_tokens,
    "`include_stop_str_in_output`": include_stop_str,
    "`stop_reason` in the answer": stop_reason,
    "`logit_bias`": logit_bias,
    "`top_k`, `min_p`, `repetition_penalty`": truncation,
    "`seed`": seed,
    "`n`": n,
    "`best_of`": best_of,
    "`structured_outputs`": structured_outputs,
    "`structured_outputs.structural_tag`": structural_tag,
    "`guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`": guided,
    "`response_format`": response_format,
    "`logprobs`, `top_logprobs`": logprobs,
    "`return_tokens_as_token_ids`": tokens_as_ids,
    "`return_token_ids`": return_token_ids,
    "`echo`": echo,
    "`prompt_logprobs`": prompt_logprobs,
    "`add_special_tokens`": add_special_tokens,
    "`add_generation_prompt`": add_generation_prompt,
    "`continue_final_message`": continue_final_message,
    "`tools`, `tool_choice`": tools,
    "`stream_options`": stream_options,
    "`priority`": priority,
    "`truncate_prompt_tokens`": truncate_prompt_tokens,
    "`use_beam_search`": use_beam_search,
    "`cache_salt`": cache_salt,
    "`prompt_cache_key`, `session_id`, `user`": conversation,
    "`suffix`": suffix,
    "unknown fields": unknown,
    "`POST /v1/chat/completions`": chat_completions,
    "`POST /v1/completions`": completions,
    "`POST /v1/responses`": responses,
    "`POST /v1/messages`": messages,
    "`POST /v1/messages/count_tokens`": count_tokens,
    "`POST /tokenize`, `/detokenize`": tokenize,
    "`GET /v1/models`": models,
    "`GET /version`": version,
    "`GET /ping`": ping,
    "`GET /load`": load,
    "`GET /health`": health,
    "`GET /metrics`": metrics,
    "`GET /openapi.json`, `/docs`": descriptions,
    "`POST /v1/embeddings`": embeddings,
}


@pytest.mark.parametrize(("name", "ours"), ROWS, ids=[name for name, _ in ROWS])
def test_a_row_is_as_the_page_has_it(api: Api, name: str, ours: str) -> None:
    check = CHECKS[name]
    assert ("refused" in ours) == (check.__code__.co_names[:1] == ("refuses",)), "a refusal is checked as one"
    check(api)


def test_the_page_has_every_row() -> None:
    assert [name for name, _ in ROWS] == list(CHECKS)
