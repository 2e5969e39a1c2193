"""A browser, and pages that fail a test on any error and on any call of another server.

Skipped where Playwright or a Chromium is missing; LAPS_SD_TEST_CHROMIUM names one that is not on the PATH.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from laps_sd.stack.local import LocalStack

CHROMIUM = os.environ.get("LAPS_SD_TEST_CHROMIUM") or shutil.which("chromium")
LAPTOP = {"width": 1200, "height": 800}
PHONE = {"width": 360, "height": 740}

OpenPage = Callable[..., Any]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before anything is started for the test."""
    if "open_page" in getattr(item, "fixturenames", ()):
        if importlib.util.find_spec("playwright") is None:
            pytest.skip("there is no Playwright: make test-console")
        if CHROMIUM is None:
            pytest.skip("there is no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start a browser. Playwright runs an event loop in this thread, which the async tests of other modules forbid."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Containers seldom allow the sandbox; only pages of this repository are opened.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Open a path of a stack's gateway. A refused call is an error message in the browser's console, and allowed."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def open_(stack: LocalStack, path: str, **options: Any) -> Any:
        base = stack.http_url.removesuffix("/v1")
        context = browser.new_context(**{"viewport": LAPTOP, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if "Content Security" in message.text else None,
        )
        page.on(
            "request",
            lambda call: None if call.url.startswith((base, "data:")) else wrong.append(f"calls {call.url}"),
        )
        page.goto(base + path)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []
