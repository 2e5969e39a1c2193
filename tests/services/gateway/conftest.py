"""A gateway in this process, with a scripted scheduler and a tiny tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gateway.app import GatewayApp
from gateway.links.link import ShardLink
from gateway.model.files import ModelFiles, load_model
from gateway.settings import GatewaySettings
from laps_sd.service.wire import make_channel
from laps_sd.v1 import inference_pb2_grpc
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind, Record

TEMPLATE = (
    "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the assistant cannot begin') }}{% endif %}"
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "hello there, hello world",
    "one two three four STOP here",
)
CONTEXT = 256


@pytest.fixture(scope="package")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Return the policy of the service's own loop: its transports differ from those of asyncio."""
    return uvloop.EventLoopPolicy()


def write_model(
    directory: Path,
    *,
    template: str | None = TEMPLATE,
    context: int = CONTEXT,
    special: tuple[str, ...] = SPECIAL,
) -> Path:
    """Write a byte-level BPE tokenizer with a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        list(TEXTS) * 5,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "max_position_embeddings": context,
        "vocab_size": 320,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
    }
    (directory / "config.json").write_text(json.dumps(config))
    extra = {"chat_template": template} if template is not None else {}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, **extra})
    )
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def model(model_dir: Path) -> ModelFiles:
    return load_model(model_dir, name="tiny")


@dataclass
class Running:
    """A running gateway."""

    gateway: GatewayApp
    channel: grpc.aio.Channel
    stub: Any
    model: ModelFiles

    @property
    def link(self) -> ShardLink:
        return next(iter(self.gateway.shards.links.values()))


def fast_settings(seeds: tuple[str, ...], **changes: Any) -> GatewaySettings:
    """Return real settings with short times."""
    values: dict[str, Any] = {
        "grpc_port": 0,
        "metrics_port": None,
        "http_port": None,
        "drain_s": 0.5,
        "scheduler_seeds": seeds,
        "model": "tiny",
        "heartbeat_s": 0.05,
        "silence_s": 10.0,
        "dial_timeout_s": 0.5,
        "backoff_min_s": 0.01,
        "backoff_max_s": 0.05,
        "scheduler_wait_s": 10.0,
        "trust_tenant_metadata": True,
        "max_logprobs": 20,
    }
    return GatewaySettings(**{**values, **changes})


StartGateway = Callable[..., Any]


@pytest.fixture
async def start_gateway(model: ModelFiles) -> AsyncIterator[StartGateway]:
    """Start gateways; they stop with the test."""
    async with AsyncExitStack() as stack:

        async def start(*seeds: str, model: ModelFiles = model, **changes: Any) -> Running:
            gateway = GatewayApp(fast_settings(seeds, **changes), model)
            await gateway.start()
            stack.push_async_callback(gateway.stop)
            channel = await stack.enter_async_context(make_channel(f"127.0.0.1:{gateway.app.port}"))
            return Running(gateway, channel, inference_pb2_grpc.InferenceStub(channel), model)

        yield start


@pytest.fixture
async def start_scheduler() -> AsyncIterator[StartGateway]:
    """Start schedulers; they die with the test."""
    async with AsyncExitStack() as stack:

        async def start(record: Record | None = None, *, port: int = 0, **options: Any) -> FakeScheduler:
            scheduler = FakeScheduler(record, **options)
            stack.push_async_callback(scheduler.kill)
            return await scheduler.start(port)

        yield start


@pytest.fixture
async def scheduler(start_scheduler: StartGateway) -> FakeScheduler:
    started: FakeScheduler = await start_scheduler()
    return started


@pytest.fixture
async def running(scheduler: FakeScheduler, start_gateway: StartGateway) -> Running:
    started: Running = await start_gateway(scheduler.address)
    await asyncio.wait_for(started.link.greeted.wait(), 10)
    return started


@dataclass
class Served:
    """A gateway's HTTP port, and the scheduler that it uses."""

    running: Running
    scheduler: FakeScheduler
    session: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any, Any]:
        """Return status, headers and decoded JSON."""
        async with self.session.post(self.url + path, json=body, **more) as response:
            return response.status, response.headers, await response.json()

    async def finished(self, text: str = "hello world", end: Any = Kind.KIND_STOP, count: int = 1) -> str:
        """Wait for the `count`-th request, give it this text, and end it."""
        request_id = await self.scheduler.submitted(count)
        self.scheduler.commit(request_id, self.running.model.encode_rendered(text), end)
        return request_id


Start = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(scheduler: FakeScheduler, start_gateway: StartGateway) -> AsyncIterator[Start]:
    async with aiohttp.ClientSession() as session:

        async def start(**changes: Any) -> Served:
            running = await start_gateway(scheduler.address, http_port=0, **changes)
            await asyncio.wait_for(running.link.greeted.wait(), 10)
            assert running.gateway.http is not None
            return Served(running, scheduler, session, f"http://127.0.0.1:{running.gateway.http.port}")

        yield start


@pytest.fixture
async def served(serve: Start) -> Served:
    return await serve()
