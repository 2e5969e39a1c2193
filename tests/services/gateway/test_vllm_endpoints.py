"""The small endpoints of vLLM's server, the answer to a wrong path, and calls of web pages."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import laps_sd
from gateway.api import http_vllm
from gateway.api.openai.tokens import tokens_json
from gateway.calls.calls import THREAD_FROM_TOKENS
from gateway.model.files import ModelFiles
from tests.services.gateway.conftest import CONTEXT, Served, Start
from tests.services.gateway.test_http import CHAT, TEXT
from tests.services.gateway.test_vllm_fields import answer_of

PAGE = "https://app.example"


async def get(served: Served, path: str) -> tuple[int, Any]:
    async with served.session.get(served.url + path) as response:
        return response.status, await response.json()


async def test_the_version_is_that_of_the_package(served: Served) -> None:
    assert await get(served, "/version") == (200, {"version": laps_sd.__version__})


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_ping_is_answered_as_health_is(served: Served, method: str) -> None:
    async with served.session.request(method, served.url + "/ping") as response:
        assert (response.status, await response.json()) == await get(served, "/health")


async def test_the_load_is_the_number_of_open_requests(served: Served) -> None:
    assert await get(served, "/load") == (200, {"server_load": 0})
    call = asyncio.create_task(served.post("/v1/completions", TEXT))
    await served.scheduler.submitted()
    assert await get(served, "/load") == (200, {"server_load": 1})
    await served.finished()
    await call


class TestTokenize:
    async def test_a_prompt(self, served: Served, model: ModelFiles) -> None:
        ids = model.encode_text("the quick")
        status, _, answer = await served.post("/tokenize", {"prompt": "the quick", "return_token_strs": True})
        assert status == 200
        assert answer == {
            "count": len(ids),
            "max_model_len": CONTEXT,
            "tokens": ids,
            "token_strs": [model.tokenizer.id_to_token(token) for token in ids],
        }
        _, _, bare = await served.post("/tokenize", {"prompt": "the quick", "add_special_tokens": False})
        assert (bare["tokens"], bare["token_strs"]) == (model.encode_rendered("the quick"), None)

    async def test_a_long_answer_is_made_in_a_thread(
        self, served: Served, model: ModelFiles, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other calls go on: it takes half a second for a million tokens."""
        threads = []

        def observed(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread())
            return tokens_json(*arguments, **named)

        monkeypatch.setattr(http_vllm, "tokens_json", observed)
        prompt = "xq" * THREAD_FROM_TOKENS
        _, _, answer = await served.post("/tokenize", {"prompt": prompt, "return_token_strs": True})
        ids = model.encode_text(prompt)
        assert (answer["count"], answer["tokens"]) == (len(ids), ids)
        assert answer["token_strs"] == [model.tokenizer.id_to_token(token) for token in ids]
        assert len(ids) >= THREAD_FROM_TOKENS
        assert threading.main_thread() not in threads

    async def test_messages_as_a_chat_has_them(self, served: Served) -> None:
        _, _, tokens = await served.post("/tokenize", CHAT)
        answer = await answer_of(served, "/v1/chat/completions", CHAT)
        request = served.scheduler.record.requests[answer["id"]]
        assert tokens["tokens"] == list(request.submit.specification.prompt_ids)
        _, _, fewer = await served.post("/tokenize", CHAT | {"add_generation_prompt": False})
        assert fewer["tokens"] == tokens["tokens"][:-1]

    async def test_back_to_the_text_with_its_special_tokens(self, served: Served, model: ModelFiles) -> None:
        ids = model.encode_text("the quick")
        status, _, answer = await served.post("/detokenize", {"model": "tiny", "tokens": ids})
        assert (status, answer) == (200, {"prompt": "<|begin|>the quick"})

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("tokenize", {}, "prompt"),
            ("tokenize", CHAT | {"prompt": "x"}, "prompt"),
            ("tokenize", {"prompt": "x", "colour": 1}, "colour"),
            ("tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template"),
            ("tokenize", {"prompt": "x" * (64 * CONTEXT + 1)}, "prompt"),
            ("detokenize", {"tokens": ["x"]}, "tokens[0]"),
            ("detokenize", {"tokens": [10**6]}, "tokens[0]"),
            ("detokenize", {"tokens": [1] * (CONTEXT + 1)}, "tokens"),
            ("detokenize", {}, "tokens"),
        ],
    )
    async def test_a_fault_names_its_field(self, served: Served, path: str, body: Any, param: str) -> None:
        status, _, answer = await served.post("/" + path, body)
        assert (status, answer["error"]["param"]) == (400, param)

    async def test_of_another_model_is_404(self, served: Served) -> None:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            status, _, answer = await served.post(path, body | {"model": "gpt-4"})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_wrong_path_is_answered_with_those_that_exist(served: Served) -> None:
    status, answer = await get(served, "/v1/chat/completion")
    assert status == 404
    message = answer["error"]["message"]
    assert message.startswith('"/v1/chat/completion" is not a path of this server')
    assert "POST /v1/chat/completions" in message
    assert "GET /v1/models/{name}" in message


class TestWebPages:
    async def test_of_no_origin_are_granted_by_default(self, served: Served) -> None:
        asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        async with served.session.options(served.url + "/v1/completions", headers=asked) as response:
            assert response.status == 405
            assert not [name for name in response.headers if name.startswith("Access-Control")]
        async with served.session.get(served.url + "/version", headers={"Origin": PAGE}) as response:
            assert not [name for name in response.headers if name.startswith("Access-Control")]

    @pytest.mark.parametrize(("origins", "granted"), [((PAGE,), PAGE), (("*",), "*")])
    async def test_of_a_granted_origin_may_call_and_read(
        self, serve: Start, origins: tuple[str, ...], granted: str
    ) -> None:
        served = await serve(cors_origins=origins)
        asked = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        async with served.session.options(served.url + "/v1/completions", headers=asked) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == granted
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            allowed = response.headers["Access-Control-Allow-Headers"]
            assert allowed == asked["Access-Control-Request-Headers"]
        body = TEXT | {"stream": True}
        async with served.session.post(
            served.url + "/v1/completions", json=body, headers={"Origin": PAGE}
        ) as response:
            await served.finished()
            assert response.headers["Access-Control-Allow-Origin"] == granted
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        async with served.session.get(served.url + "/nothing", headers={"Origin": PAGE}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (404, granted)

    async def test_of_another_origin_are_not_granted(self, serve: Start) -> None:
        served = await serve(cors_origins=(PAGE,))
        asked = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
        async with served.session.options(served.url + "/v1/completions", headers=asked) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"
