"""The log for an operator: a line per request, a line per interval, the facts of a worker."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from laps_sd.client import Client, Delta
from laps_sd.stack.local import LocalStack
from tests.helpers import wait_until

PROMPT = "Never to be logged"


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    environment = {"LAPS_SD_LOG_LOAD_S": "0.2", "LAPS_SD_FAKE_TIME_SCALE": "0.1"}
    with LocalStack(engine="fake", environment=environment) as running:
        yield running


def lines(stack: LocalStack, name: str, event: str) -> list[str]:
    return [line for line in stack.log(name).splitlines() if f"] {event} " in line]


def test_a_request_has_one_line_when_it_ends(stack: LocalStack) -> None:
    with Client(stack.gateway_address) as client:
        done = client.generate(PROMPT, max_tokens=8, seed=1, ignore_eos=True)

    [line] = wait_until(
        lambda: [each for each in lines(stack, "gateway", "request ended") if done.end.request_id in each],
        description="the line of the request",
    )
    for field in (
        "tenant=anonymous",
        "end=length",
        f"prompt_tokens={done.accepted.prompt_tokens}",
        "output_tokens=8",
        r"queued_s=[\d.]+",
        r"first_token_s=[\d.]+",
        r"total_s=[\d.]+",
        "preemptions=0",
    ):
        assert re.search(rf"\b{field}\b", line), (field, line)
    assert PROMPT not in stack.log("gateway") and done.text not in stack.log("gateway")


def test_a_client_that_leaves_is_the_end_of_its_request(stack: LocalStack) -> None:
    with Client(stack.gateway_address) as client:
        events = client.stream(PROMPT, max_tokens=1500, seed=1, ignore_eos=True)
        for event in events:
            if isinstance(event, Delta):
                events.close()
                break

    wait_until(
        lambda: [
            each for each in lines(stack, "gateway", "request ended") if "end=client_disconnected" in each
        ],
        description="the line of the request",
    )


def test_a_working_shard_has_lines_about_its_load_and_an_idle_one_has_none(stack: LocalStack) -> None:
    before = len(lines(stack, "scheduler", "load"))
    with Client(stack.gateway_address) as client:
        for event in client.stream(PROMPT, max_tokens=1500, seed=1, ignore_eos=True):
            if isinstance(event, Delta) and len(lines(stack, "scheduler", "load")) > before:
                break
        line = lines(stack, "scheduler", "load")[-1]
    assert re.search(
        r"shard=s0 running=\d waiting=\d workers=1 tokens_per_s=[\d.]+ acceptance=[\d.]+ kv_usage=", line
    )


def test_both_lines_can_be_turned_off(make_stack) -> None:
    stack = make_stack(environment={"LAPS_SD_LOG_REQUESTS": "false", "LAPS_SD_LOG_LOAD_S": "0"})
    with Client(stack.gateway_address) as client:
        client.generate(PROMPT, max_tokens=8, seed=1)
    gateway, scheduler = stack.log("gateway"), stack.log("scheduler")

    assert "listening" in gateway and "request ended" not in gateway
    assert "listening" in scheduler and "] load " not in scheduler


def test_a_worker_says_what_it_is(stack: LocalStack) -> None:
    log = stack.log("worker")

    assert "] model: none, the tokens are scripted" in log
    assert "] engine: fake: no model runs" in log
    assert "] room: 2048 tokens of context, 8 slots, KV for " in log
