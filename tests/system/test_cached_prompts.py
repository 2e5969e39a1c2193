"""A request runs where the beginning of its prompt is computed: gateway, scheduler, record and three workers, each a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from laps_sd.client import Client
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from tests.helpers import wait_until
from tests.system.test_metrics_answer import scrape

TURNS = 6
WORKERS = 3


def beginning(conversation: int) -> str:
    return (
        f"Conversation {conversation}. "
        + "The harbour master wrote every ship and its cargo into the book. " * 12
    )


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    with LocalStack(engine="fake", workers=WORKERS, slots=4) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.gateway_address) as client:
        yield client


def leased(client: Client, request_id: str) -> str:
    """Return what the timeline of a request has about its last worker."""
    return [line.detail for line in client.explain(request_id).story if line.what == "leased"][-1]


def worker_in(line: str) -> str:
    return line.split()[2].rstrip(",")


def test_the_turns_of_a_conversation_find_each_other_and_the_timeline_says_where(
    stack: LocalStack, client: Client
) -> None:
    for conversation in range(WORKERS):
        prompt = beginning(conversation)
        workers: Counter[str] = Counter()
        for turn in range(TURNS):
            answer = client.generate(prompt, max_tokens=8, seed=turn)
            line = leased(client, answer.accepted.request_id)
            workers[worker_in(line)] += 1
            assert ("which has" in line) == (answer.end.usage.cached_prompt_tokens > 0) == (turn > 0)
            prompt += answer.text + f" Turn {turn}. And then? "
        assert len(workers) == 1, "all turns ran where the first one did"


def test_what_was_found_is_counted(stack: LocalStack) -> None:
    def found() -> float:
        page = scrape(stack, "scheduler")
        return page.value("laps_sd_scheduler_prompt_tokens_total", found="expected")

    wait_until(lambda: found() > 0, description="tokens that were expected are counted")
    assert scrape(stack, "scheduler").value("laps_sd_scheduler_block_index_bytes") > 0
    with grpc.insecure_channel(stack.scheduler_address) as channel:
        shard = admin_pb2_grpc.AdminStub(channel).GetShard(admin_pb2.GetShardRequest(), timeout=10)
    assert 0 < shard.cached_prompt_tokens < shard.prompt_tokens


def test_a_killed_worker_has_nothing_any_more(stack: LocalStack, client: Client) -> None:
    prompt = beginning(9)
    first = client.generate(prompt, max_tokens=8, seed=1)
    with grpc.insecure_channel(stack.scheduler_address) as channel:
        listed = admin_pb2_grpc.AdminStub(channel).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10)
    names = {worker.worker_id: worker.worker_name for worker in listed.workers}
    stack.kill(names[worker_in(leased(client, first.accepted.request_id))])
    again = client.generate(prompt, max_tokens=8, seed=1)

    assert again.text == first.text
    assert again.end.usage.cached_prompt_tokens == 0
    assert "which has" not in leased(client, again.accepted.request_id)
