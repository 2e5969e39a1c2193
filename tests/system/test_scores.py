"""Scores of texts as evaluation harnesses compute them: lm-evaluation-harness' `local-completions` sends token ids with
`echo`, `logprobs` and `max_tokens`, and reads the part of the continuation.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import grpc.aio
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from demo.prompts import demo_prompts
from laps_sd.client import Client
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.conftest import StackMaker
from tests.helpers import wait_until_async
from tests.system.calls import seeded
from worker_svc.demo import TARGET_DIR

TOKENIZER = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
CONTEXT = "The capital of France is"
CONTINUATIONS = [" Paris.", " Rome.", " a very large river"]


@pytest.fixture(scope="module")
def expected() -> Iterator[Any]:
    """Return log probabilities [tokens - 1, vocabulary] of a text, by a plain forward of the shipped target."""
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32).eval()

    @torch.inference_mode()
    def of(ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, :-1]
        return logits.double().log_softmax(-1)

    yield of


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def post(stack: LocalStack, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{stack.http_url}/completions",
        data=json.dumps({"model": "laps-sd-demo", "temperature": 0, **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def scores(answer: Any, context_tokens: int, generated: int) -> list[tuple[float, bool]]:
    """Return the log probability of each continuation, and whether greedy decoding would choose it, as the harness
    reads them from an answer.
    """
    found = []
    for choice in sorted(answer["choices"], key=lambda one: one["index"]):
        logprobs = choice["logprobs"]
        own = slice(context_tokens, len(logprobs["token_logprobs"]) - generated)
        values = logprobs["token_logprobs"][own]
        greedy = all(
            value == max(top.values())
            for value, top in zip(values, logprobs["top_logprobs"][own], strict=True)
        )
        found.append((sum(values), greedy))
    return found


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_continuations_get_the_scores_of_the_model(
    demo_stack: LocalStack, expected: Any, max_tokens: int
) -> None:
    context = ids_of(CONTEXT)
    prompts = [context + ids_of(text) for text in CONTINUATIONS]
    answer = post(demo_stack, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, seed=1234)
    plain = []
    for ids in prompts:
        rows = expected(ids)[len(context) - 1 :]
        own = rows.gather(-1, torch.tensor(ids[len(context) :])[:, None])[:, 0]
        plain.append((float(own.sum()), bool((own == rows.max(-1).values).all())))

    found = scores(answer, len(context), max_tokens)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in plain], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in plain] == [True, False, False]
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)


def test_a_second_score_of_the_same_text_is_the_same(demo_stack: LocalStack) -> None:
    """The first one has filled the prefix cache."""
    body = {
        "prompt": ids_of(" ".join([CONTEXT + CONTINUATIONS[2]] * 20)),
        "echo": True,
        "logprobs": 2,
        "max_tokens": 0,
    }
    first, second = (post(demo_stack, **body)["choices"][0]["logprobs"] for _ in range(2))
    assert len(first["tokens"]) == len(body["prompt"])
    assert first == second


def test_both_apis_give_the_same(demo_stack: LocalStack) -> None:
    ids = ids_of(CONTEXT)
    over_http = post(demo_stack, prompt=ids, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    with Client(demo_stack.gateway_address) as client:
        over_grpc = client.generate(ids, prompt_logprobs=2, max_tokens=1, temperature=0).prompt_logprobs
    assert over_http[0] is None
    for at, entry in enumerate(over_http[1:]):
        token = str(ids[at + 1])
        assert (entry[token]["logprob"], entry[token]["rank"]) == (
            over_grpc.logprobs[at],
            over_grpc.ranks[at],
        )
        best = over_grpc.alternative_ids[2 * at]
        assert entry[str(best)]["rank"] == 1
        assert entry[str(best)]["logprob"] == over_grpc.alternative_logprobs[2 * at]


@pytest.mark.parametrize("victim", ["worker-0", "scheduler"])
async def test_every_score_is_complete_when_a_process_is_killed(
    make_stack: StackMaker, expected: Any, victim: str
) -> None:
    """Each prompt takes several rounds, and is computed again by the next worker if it has no token yet."""
    stack = make_stack(engine="demo", workers=2, environment={"LAPS_SD_PREFILL_CHUNK": "16"})
    texts = [prompt.text * 8 for prompt in demo_prompts(None, 24, seed=5)]
    wanted = [seeded(text[:800], seed=n, max_tokens=24, ignore_eos=True) for n, text in enumerate(texts)]
    found: dict[int, list[pb.PromptLogprobs]] = {}
    tokens: dict[int, int] = {}

    async def run(number: int, stub: Any) -> None:
        request = wanted[number]
        request.prompt_logprobs = 1
        found[number] = []
        async for event in stub.GenerateStream(request, timeout=120):
            if event.HasField("delta"):
                tokens[number] = tokens.get(number, 0) + len(event.delta.token_ids)
                if event.delta.HasField("prompt_logprobs"):
                    found[number].append(event.delta.prompt_logprobs)

    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = [asyncio.create_task(run(number, stub)) for number in range(len(wanted))]
        await wait_until_async(lambda: len(tokens) >= 4, description="four requests have tokens")
        stack.kill(victim)
        begun = len(tokens)
        await asyncio.to_thread(stack.restart, victim)
        await asyncio.gather(*running)
        ids = [
            list((await stub.Tokenize(pb.TokenizeRequest(text=request.text))).token_ids) for request in wanted
        ]

    assert begun < len(wanted), "the kill came too late to show anything"
    assert list(tokens.values()) == [24] * len(wanted)
    for number, prompt in enumerate(ids):
        (once,) = found[number]
        own = expected(prompt).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert list(once.logprobs) == pytest.approx(own.tolist(), abs=2e-3)
