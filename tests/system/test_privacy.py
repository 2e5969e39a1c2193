"""Words of prompts stay where they are needed: none of them, and no hash of them, is in a log, on a metrics page
or in an explanation, and the record has the hashes until the end of the request and no longer.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import openai
import pytest
import redis.asyncio as redis_client

from laps_sd.client import Accepted, Client
from laps_sd.contract.length_features import FeatureHash, packed
from laps_sd.contract.prompt_blocks import name_blocks
from laps_sd.errors import InvalidArgument
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.helpers import wait_until_async
from tests.system.calls import seeded, stream_all

MODEL = "laps-sd-demo"
WORD = "quixotryzzle"
PROMPT = (
    f"Tell me what a {WORD} is, in one sentence, and why the harbour of Antofagasta has none."
    " Then tell me what a sailor of that harbour would say of it, and to whom."
)
ENDED = 4
"""Requests with the prompt that run to their own end, two by each protocol."""
LEARNED = 300
"""Requests with 100 words each, no two with the same ones."""
MOST_PRIORS_BYTES = 200_000
TOGETHER = 4
"""Features in a row that no other data holds by chance."""


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    settings = {
        "LAPS_SD_FAKE_TIME_SCALE": "0.1",
        "LAPS_SD_FAKE_OUTPUT_TOKENS": "6",
        "LAPS_SD_PRIORS_SAVE_S": "0.2",
    }
    with LocalStack(engine="fake", slots=16, log_level="debug", environment=settings) as stack:
        yield stack


@asynccontextmanager
async def record_of(stack: LocalStack) -> AsyncIterator[redis_client.Redis]:
    async with redis_client.Redis.from_url(stack.redis_url, protocol=2) as record:
        yield record


async def everything_in(record: redis_client.Redis) -> dict[str, list[bytes]]:
    """Return all values of every key: strings, and fields and values of hashes and sorted sets."""
    found: dict[str, list[bytes]] = {}
    async for key in record.scan_iter(count=1000):
        match await record.type(key):
            case b"string":
                found[key.decode()] = [await record.get(key) or b""]
            case b"hash":
                found[key.decode()] = [part for pair in (await record.hgetall(key)).items() for part in pair]
            case b"zset":
                found[key.decode()] = await record.zrange(key, 0, -1)
            case b"stream":
                found[key.decode()] = [
                    part for _, entry in await record.xrange(key) for part in entry.values()
                ]
            case b"none":
                pass  # it expired meanwhile
            case kind:
                raise AssertionError(f"{key!r} is a {kind!r}")
    return found


async def learned_from(record: redis_client.Redis, requests: int) -> bytes:
    """Return what is learned, as the record has it once it is from so many requests."""

    async def saved() -> bytes:
        blob = await record.get("laps-sd:{s0}:priors") or b"{}"
        return blob if json.loads(blob).get("prompts", {}).get("learned", 0) >= requests else b""

    return await wait_until_async(saved, description="what is learned is on the record")


def listings(numbers: Sequence[int]) -> list[str]:
    """Return how any of these numbers in a row look in a text."""
    rows = [numbers[at : at + TOGETHER] for at in range(len(numbers) - TOGETHER + 1)]
    return [sign.join(map(str, row)) for row in rows for sign in (", ", ",", " ")]


def shown(stack: LocalStack) -> dict[str, str]:
    """Return every text that an operator sees: logs and metrics pages."""
    texts = {f"log of {name}": stack.log(name) for name in stack.children}
    for name in ("scheduler-0", "worker-0", "gateway-0"):
        with urllib.request.urlopen(stack.metrics_url(name), timeout=10) as reply:
            texts[f"metrics of {name}"] = reply.read().decode()
    return texts


def ask_by_http(stack: LocalStack) -> None:
    """Ask OpenAI's two questions."""
    with openai.OpenAI(base_url=stack.http_url, api_key="none", max_retries=0, timeout=60) as client:
        client.completions.create(model=MODEL, prompt=PROMPT, seed=1)
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}],
            seed=2,
        )


async def test_no_word_of_a_prompt_and_no_hash_of_one_is_shown_or_outlives_its_request(
    stack: LocalStack,
) -> None:
    features = FeatureHash().features_of(PROMPT, ["most 11"])  # 1,900 has 11 bits
    assert len(features) > TOGETHER
    with Client(stack.gateway_address) as client:
        token_ids = client.tokenize(PROMPT)
        client.generate(PROMPT, seed=3)
        client.generate([{"role": "user", "content": PROMPT}], seed=4)
        await asyncio.to_thread(ask_by_http, stack)
        with pytest.raises(InvalidArgument):
            client.generate(PROMPT, max_tokens=10**9)
        stack.pause("worker-0")  # what comes now cannot end
        events = client.stream(PROMPT, max_tokens=1900, keep=True)
        accepted = next(events)
        assert isinstance(accepted, Accepted)
        events.close()
        explained = [client.explain(accepted.request_id)]
        async with record_of(stack) as record:
            payload = await record.hgetall(f"laps-sd:{{s0}}:payload:{accepted.request_id}")
            client.cancel(accepted.request_id)
            explained.append(client.explain(accepted.request_id))
            stack.resume("worker-0")
            await learned_from(record, ENDED)
            held = await everything_in(record)

    blocks = name_blocks(token_ids, "anonymous")
    assert payload[b"length_features"] == packed(features), "it is kept while the request runs"
    assert payload[b"prompt_blocks"] == blocks != b"", "so are the names of its blocks"
    assert "from the words of its prompt" in explained[0].basis, "it is used"
    texts = shown(stack)
    for number, told in enumerate(explained):
        texts[f"explanation {number}"] = "\n".join(str(value) for _, value in told.ListFields())
    assert "call refused" in texts["log of gateway-0"], "details are logged"
    hidden = [
        WORD,
        WORD.title(),
        packed(features).hex(),
        repr(packed(features))[2:-1],
        blocks.hex(),
        repr(blocks)[2:-1],
        *listings(features),
        *listings(token_ids),
    ]
    for where, text in texts.items():
        assert [secret for secret in hidden if secret in text] == [], where
    rows = [packed(features[at : at + TOGETHER]) for at in range(len(features) - TOGETHER + 1)]
    hashes = [b"length_features", b"prompt_blocks", blocks]
    forbidden = [WORD.encode(), *hashes, *rows, *(text.encode() for text in listings(features))]
    assert f"laps-sd:{{s0}}:payload:{accepted.request_id}" in held
    for key, values in held.items():
        assert WORD not in key
        for value in values:
            assert [secret for secret in forbidden if secret in value] == [], key


async def test_what_is_learned_from_hundreds_of_prompts_is_small_on_the_record(stack: LocalStack) -> None:
    letters = random.Random(1)

    def a_word() -> str:
        return "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=6))

    prompts = [" ".join(a_word() for _ in range(100)) for _ in range(LEARNED)]
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel, record_of(stack) as record:
        stub = inference_pb2_grpc.InferenceStub(channel)
        outcomes = await stream_all(
            stub, [seeded(prompt, seed=number, max_tokens=256) for number, prompt in enumerate(prompts)]
        )

        blob = await learned_from(record, LEARNED)

    assert {outcome.end.finish_reason for outcome in outcomes if outcome.end} == {pb.FINISH_REASON_STOP}
    assert len(blob) <= MOST_PRIORS_BYTES
