"""Pictures of the console for the documentation: `python -m tests.console.pictures docs/figures`."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from laps_sd.stack.local import LocalStack
from tests.console.conftest import CHROMIUM, LAPTOP
from tests.console.test_views import post

PROMPT = "Write a small Python function that adds two numbers."
DEMO_AT_S = 14
REQUESTS = 90
TRIES = 20


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with LocalStack(workers=2, engine="fake") as stack:
            _demo(browser, stack, folder)
            _queue(browser, stack, folder)
        with LocalStack(workers=1, engine="demo") as stack:
            _playground(browser, stack, folder)
        browser.close()


def _open(browser: Browser, stack: LocalStack, path: str, **options: Any) -> Page:
    page = browser.new_context(**{"viewport": LAPTOP, **options}).new_page()
    page.goto(stack.http_url.removesuffix("/v1") + path)
    return page


def _demo(browser: Browser, stack: LocalStack, folder: Path) -> None:
    page = _open(browser, stack, "/console/demo")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("slider").fill(str(DEMO_AT_S))
    page.wait_for_timeout(1000)  # the dots move
    page.screenshot(path=folder / "console-demo.png", clip={"x": 0, "y": 0, **LAPTOP, "height": 720})


def _queue(browser: Browser, stack: LocalStack, folder: Path) -> None:
    rng = random.Random(1)
    for _ in range(REQUESTS):
        body = {
            "prompt": "the quick",
            "max_tokens": min(1500, int(rng.lognormvariate(5.5, 1)) + 5),
            "ignore_eos": True,
        }
        threading.Thread(target=_generate, args=(stack, body), daemon=True).start()
    page = _open(browser, stack, "/console")
    page.get_by_role("img", name="16 running").wait_for()
    page.wait_for_timeout(4000)  # some are paused by then
    page.screenshot(path=folder / "console-queue.png")
    phone = _open(browser, stack, "/console", viewport={"width": 390, "height": 720}, color_scheme="dark")
    phone.get_by_role("img", name="16 running").wait_for()
    phone.wait_for_timeout(2000)
    phone.screenshot(path=folder / "console-phone.png")


def _generate(stack: LocalStack, body: Any) -> None:
    with contextlib.suppress(OSError):  # the stack stops before all have ended
        post(stack, "/completions", body).read()


def _playground(browser: Browser, stack: LocalStack, folder: Path) -> None:
    page = _open(browser, stack, "/console#playground")
    page.get_by_label("Prompt").fill(PROMPT)
    for _ in range(TRIES):
        page.get_by_role("button", name="Send").click()
        page.get_by_text("Output tokens").wait_for()
        if not page.get_by_text("Some rounds arrived together").count():
            break
    page.screenshot(path=folder / "console-playground.png", clip={"x": 0, "y": 0, **LAPTOP, "height": 640})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
