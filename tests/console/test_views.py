"""Each view of the console, as a viewer uses it."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from laps_sd.service.keys import digest_of
from laps_sd.stack.local import LocalStack
from tests.conftest import StackMaker
from tests.console.conftest import OpenPage
from tests.helpers import wait_until

KEY = "laps-sd-" + "k" * 40


def post(stack: LocalStack, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        stack.http_url + path,
        data=json.dumps({"model": "laps-sd-demo"} | body).encode(),
        headers={"Content-Type": "application/json"} | (headers or {}),
    )
    return urllib.request.urlopen(request, timeout=120)


@contextmanager
def open_requests(
    stack: LocalStack, count: int, headers: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """Have requests that last as long as the context; yields their ids."""
    body = {"prompt": "the quick", "max_tokens": 500, "ignore_eos": True, "stream": True}
    streams: list[Any] = []
    opening = [
        threading.Thread(target=lambda: streams.append(post(stack, "/completions", body, headers)))
        for _ in range(count)
    ]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join()
    try:
        yield [stream.headers["x-request-id"] for stream in streams]
    finally:
        for stream in streams:
            stream.close()


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[LocalStack]:
    """Start two workers of eight slots whose rounds take so long that no request of a test ends by itself."""
    with LocalStack(workers=2, engine="fake", environment={"LAPS_SD_FAKE_TIME_SCALE": "20"}) as stack:
        yield stack


class TestTheQueue:
    def test_it_shows_requests_as_they_come_and_leave(
        self, slow_stack: LocalStack, open_page: OpenPage
    ) -> None:
        page = open_page(slow_stack, "/console")
        page.get_by_text("No request is waiting or running.").wait_for()
        with open_requests(slow_stack, 20) as ids:
            # Some of those that wait may have run already.
            shares = "|".join(f"{4 - paused} waiting, {paused} paused" for paused in range(5))
            page.get_by_role(
                "img", name=re.compile(f"Requests of shard s0: 16 running, ({shares})")
            ).wait_for()
            rows = page.get_by_role("row")
            assert set(page.locator("tbody th a").all_inner_texts()) == set(ids)
            assert rows.filter(has_text="runs").count() == 16
        page.get_by_text("No request is waiting or running.").wait_for()

    def test_a_click_on_a_dot_and_the_keyboard_lead_to_the_timeline(
        self, slow_stack: LocalStack, open_page: OpenPage
    ) -> None:
        with open_requests(slow_stack, 1) as (request_id,):
            page = open_page(slow_stack, "/console")
            canvas = page.get_by_role("img", name="1 running")
            canvas.wait_for()
            spot = wait_until(
                lambda: canvas.evaluate(
                    "c => { const [d] = c.field.dots.values(); return Math.abs(d.x - d.target.x) < 1 && [d.x, d.y] }"
                ),
                description="the dot in its place",
            )
            canvas.click(position={"x": spot[0], "y": spot[1]})
            page.get_by_role("row", name="started").wait_for()
            assert page.get_by_label("Id of the request").input_value() == request_id
            assert page.get_by_role("img", name="Timeline: ").count() == 1

            page.get_by_role("link", name="Queue").press("Enter")
            page.get_by_role("link", name=request_id).press("Enter")
            page.get_by_role("row", name="arrived").wait_for()

    def test_a_thousand_requests_have_a_place_each(self, slow_stack: LocalStack, open_page: OpenPage) -> None:
        page = open_page(slow_stack, "/console")
        page.locator("canvas").wait_for()
        places = page.evaluate(
            """() => {
              const canvas = document.querySelector("canvas");
              const requests = Array.from({ length: 1000 }, (_, number) => ({
                id: `r${number}`, state: number % 30 ? "queued" : "running", level: number < 900 ? 4 : number % 4,
                perceptible: true, attainedS: 0,
              }));
              canvas.field.show(requests);
              const { spots, floor, middle } = canvas.field.layout;
              return { floor, middle, width: canvas.clientWidth, spots: [...spots.values()].map(({ x, y }) => [x, y]) };
            }"""
        )
        assert len({tuple(spot) for spot in places["spots"]}) == 1000
        assert all(0 < x < places["width"] and 0 < y < places["floor"] for x, y in places["spots"])

    def test_a_hidden_page_keeps_no_request_that_ended(
        self, slow_stack: LocalStack, open_page: OpenPage
    ) -> None:
        """It draws no frames, which remove them otherwise."""
        page = open_page(slow_stack, "/console")
        page.locator("canvas").wait_for()
        kept = page.evaluate(
            """() => {
              Object.defineProperty(document, "hidden", { get: () => true });
              const { field } = document.querySelector("canvas");
              for (let number = 0; number < 100; number++)
                field.show([{ id: `r${number}`, state: "queued", level: 1, perceptible: true, attainedS: 0 }]);
              return [...field.dots.keys()];
            }"""
        )
        assert kept == ["r99"]


class TestWorkersAndCharts:
    def test_the_workers_are_listed_with_their_rounds(
        self, slow_stack: LocalStack, open_page: OpenPage
    ) -> None:
        with open_requests(slow_stack, 16):
            page = open_page(slow_stack, "/console#workers")
            for worker in ("worker-0", "worker-1"):
                page.get_by_role("row", name=worker).filter(has_text="8 of 8").wait_for()
            assert page.get_by_role("meter", name="Acceptance").count() == 2

    def test_charts_name_their_present_values(self, slow_stack: LocalStack, open_page: OpenPage) -> None:
        with open_requests(slow_stack, 16):
            page = open_page(slow_stack, "/console#charts")
            page.get_by_role("img", name="Requests: now running 16, waiting 0").wait_for()
            assert page.get_by_role("img").count() == 4


class TestThePlayground:
    def test_it_colours_the_tokens_of_each_round(self, demo_stack: LocalStack, open_page: OpenPage) -> None:
        prompt = "Write a small Python function that adds two numbers."
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 60, "temperature": 0}
        with post(demo_stack, "/chat/completions", body) as response:
            expected = json.load(response)["choices"][0]["message"]["content"]

        page = open_page(demo_stack, "/console#playground")
        page.get_by_label("Prompt").fill(prompt)
        page.get_by_label("Most tokens").fill("60")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("Output tokens").wait_for()
        tokens = [
            (token.inner_text(), token.get_attribute("class"))
            for token in page.locator("p.output span").all()
        ]
        assert page.locator("p.output").text_content().removesuffix("<|end|>") == expected

        def number(label: str) -> int:
            return int(page.locator("dl div", has_text=label).locator("dd").inner_text().split()[0])

        assert len(tokens) == number("Output tokens")
        if page.get_by_text("Some rounds arrived together").count() == 0:
            assert sum(origin == "accepted" for _, origin in tokens) == number("Accepted")
        assert number("Draft tokens") == number("Accepted") + number("Rejected")

        page.get_by_role("link", name="Timeline of this request").click()
        page.get_by_role("row", name="ended").wait_for()

    def test_a_refusal_is_shown(self, demo_stack: LocalStack, open_page: OpenPage) -> None:
        page = open_page(demo_stack, "/console#playground")
        page.get_by_label("Prompt").fill("word " * 5000)
        page.get_by_role("button", name="Send").click()
        page.locator(".problem", has_text="tokens").wait_for()
        assert page.get_by_role("button", name="Send").is_enabled()

    def test_a_stream_can_be_stopped(self, slow_stack: LocalStack, open_page: OpenPage) -> None:
        page = open_page(slow_stack, "/console#playground")
        page.get_by_label("Prompt").fill("the quick")
        page.get_by_label("As").select_option("text to continue")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("link", name="Timeline of this request").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Send").wait_for()
        page.get_by_role("link", name="Timeline of this request").click()
        page.locator("dd", has_text="cancelled: its client went away").wait_for()
        page.get_by_role("link", name="Queue").click()
        page.get_by_text("No request is waiting or running.").wait_for()


class TestTheDemo:
    def test_it_replays_both_policies_without_any_data(
        self, fake_stack: LocalStack, open_page: OpenPage
    ) -> None:
        page = open_page(fake_stack, "/console/demo")
        calls: list[str] = []
        page.on("request", lambda call: calls.append(call.url))
        page.get_by_role("img", name="Requests under fcfs").wait_for()
        page.get_by_role("img", name="Requests under laps-sd").wait_for()
        page.get_by_role("slider").press("End")
        page.get_by_text("Half of the requests took at most").wait_for()
        assert page.get_by_text("120 of 120").count() == 2
        page.get_by_role("button", name="Replay").click()
        page.get_by_text("Which requests end first?").wait_for()
        assert not any("/api/" in url or "/v1/" in url for url in calls)


class TestKeys:
    def test_a_key_is_asked_for_and_forgotten(
        self, make_stack: StackMaker, open_page: OpenPage, tmp_path: Path
    ) -> None:
        keys = tmp_path / "tenants.toml"
        keys.write_text(f'[tenants.acme]\nkeys = ["{digest_of(KEY)}"]\n')
        stack = make_stack(workers=1, environment={"LAPS_SD_API_KEYS_FILE": str(keys)})
        page = open_page(stack, "/console")
        page.get_by_text("a key is needed").wait_for()
        page.get_by_label("Key of this gateway").fill("laps-sd-wrong")
        page.get_by_role("button", name="Use the key").click()
        page.get_by_text("the API key is not known here").wait_for()
        page.get_by_label("Key of this gateway").fill(KEY)
        page.get_by_role("button", name="Use the key").click()
        page.get_by_text("You see the requests of your key only.").wait_for()
        page.get_by_role("link", name="Workers").click()
        page.get_by_text("Only operators see the workers").wait_for()
        page.get_by_role("button", name="Forget the key").click()
        page.get_by_text("a key is needed").wait_for()


def test_a_key_that_no_header_can_have_is_asked_for_again(
    make_stack: StackMaker, open_page: OpenPage, tmp_path: Path
) -> None:
    keys = tmp_path / "tenants.toml"
    keys.write_text(f'[tenants.acme]\nkeys = ["{digest_of(KEY)}"]\n')
    stack = make_stack(workers=0, environment={"LAPS_SD_API_KEYS_FILE": str(keys)})
    page = open_page(stack, "/console")
    page.get_by_label("Key of this gateway").fill(f"{KEY}\u200b")  # an invisible character, copied with it
    page.get_by_role("button", name="Use the key").click()
    page.get_by_text("the key has a character that no key has").wait_for()
    page.get_by_label("Key of this gateway").fill(KEY)
    page.get_by_role("button", name="Use the key").click()
    page.get_by_text("You see the requests of your key only.").wait_for()


def test_the_playground_finds_a_gateway_that_comes_back(make_stack: StackMaker, open_page: OpenPage) -> None:
    stack = make_stack(workers=1)
    page = open_page(stack, "/console")
    page.get_by_text("No request is waiting or running.").wait_for()
    stack.kill("gateway-0")
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("The gateway cannot be reached.").first.wait_for()
    stack.restart("gateway-0")
    page.get_by_role("textbox", name="Prompt").fill("Once")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("Output tokens").wait_for()
    assert page.get_by_text("The gateway cannot be reached.").count() == 0


def test_a_gateway_that_is_gone_is_named(make_stack: StackMaker, open_page: OpenPage) -> None:
    stack = make_stack(workers=1)
    page = open_page(stack, "/console")
    page.get_by_text("No request is waiting or running.").wait_for()
    stack.kill("gateway-0")
    page.get_by_text("The gateway cannot be reached.").wait_for()


def test_a_shard_without_a_scheduler_is_unknown_and_not_empty(
    make_stack: StackMaker, open_page: OpenPage
) -> None:
    stack = make_stack(workers=1)
    page = open_page(stack, "/console")
    page.get_by_text("No request is waiting or running.").wait_for()
    stack.kill("scheduler-0")
    problem = page.get_by_role("status").filter(has_text=re.compile("scheduler.* of shard|leads shard"))
    problem.wait_for()
    assert page.get_by_text("No request is waiting or running.").count() == 0
    assert page.get_by_text("All requests").count() == 0
    page.get_by_role("link", name="Workers").click()
    problem.wait_for()
    assert page.get_by_text("No worker is connected.").count() == 0
    page.get_by_role("link", name="Charts").click()
    page.get_by_role("img", name="Requests: now running unknown, waiting unknown").wait_for()


def test_a_gateway_that_is_silent_is_left_and_the_charts_have_a_gap(
    make_stack: StackMaker, open_page: OpenPage
) -> None:
    """So it is with a machine that died: its connections stay open, and nobody reports an error."""
    stack = make_stack(workers=1)
    page = open_page(stack, "/console#charts")
    chart = page.get_by_role("img", name="Requests: now running 0, waiting 0")
    chart.wait_for()
    stack.pause("gateway-0")
    try:
        page.get_by_text("The connection broke.").wait_for(timeout=40_000)
    finally:
        stack.resume("gateway-0")
    page.get_by_text("The connection broke.").wait_for(state="detached")
    assert chart.locator("path").first.get_attribute("d").count("M") > 1
