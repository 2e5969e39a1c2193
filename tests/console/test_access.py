"""The console by keyboard, by screen reader, on a phone, in light and dark."""

from __future__ import annotations

from typing import Any

import pytest

from laps_sd.stack.local import LocalStack
from tests.console.conftest import PHONE, OpenPage

VIEWS = ("#queue", "#workers", "#charts", "#playground", "#request", "/demo")
LEAST_CONTRAST = 4.5
"""Least contrast of text by the Web Content Accessibility Guidelines 2.2, section 1.4.3."""
LEAST_CONTRAST_OF_MARKS = 3.0
"""Least contrast of the parts of a picture, section 1.4.11."""


def opened(open_page: OpenPage, stack: LocalStack, view: str, **options: Any) -> Any:
    page = open_page(stack, f"/console{view}", **options)
    page.locator("h1").wait_for()
    return page


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_has_landmarks_a_heading_and_names(
    fake_stack: LocalStack, open_page: OpenPage, view: str
) -> None:
    page = opened(open_page, fake_stack, view)
    assert page.get_by_role("heading", level=1).count() == 1
    assert page.get_by_role("main").count() == page.get_by_role("navigation").count() == 1
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, canvas, svg, meter")]
          .filter((one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("nav [aria-current=page]").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"


def test_the_keyboard_reaches_content_and_views_in_order(fake_stack: LocalStack, open_page: OpenPage) -> None:
    page = opened(open_page, fake_stack, "#playground")
    focused = "document.activeElement.textContent || document.activeElement.labels?.[0].textContent"
    order = []
    for _ in range(8):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focused))
    assert order == [
        "Skip to the content", "Queue", "Workers", "Charts", "Playground", "Request", "Demo", "Prompt",
    ]  # fmt: skip
    page.get_by_role("link", name="Skip to the content").press("Enter")
    assert page.evaluate("document.activeElement.tagName") == "MAIN"


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_wider_than_a_phone(fake_stack: LocalStack, open_page: OpenPage, view: str) -> None:
    page = opened(open_page, fake_stack, view, viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_have_contrast(fake_stack: LocalStack, open_page: OpenPage, scheme: str) -> None:
    page = opened(open_page, fake_stack, "#queue", color_scheme=scheme)
    names = [
        "text",
        "muted",
        "link",
        "page",
        "surface",
        "surface-2",
        "waiting",
        "ready",
        "paused",
        "running",
        "accepted-back",
        "bonus-back",
        "problem-back",
    ]
    colours = page.evaluate(
        "names => Object.fromEntries(names.map(n => [n, getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()]))",
        names,
    )
    for back in ("page", "surface", "surface-2"):
        for text in ("text", "muted", "link"):
            assert contrast(colours[text], colours[back]) >= LEAST_CONTRAST, (text, back)
        for mark in ("waiting", "ready", "paused", "running"):
            assert contrast(colours[mark], colours[back]) >= LEAST_CONTRAST_OF_MARKS, (mark, back)
    for back in ("accepted-back", "bonus-back", "problem-back"):
        assert contrast(colours["text"], colours[back]) >= LEAST_CONTRAST, back
    assert contrast(colours["page"], colours["link"]) >= LEAST_CONTRAST
    assert (luminance(colours["page"]) < 0.1) == (scheme == "dark")


def test_who_wants_no_motion_sees_requests_in_their_places(
    fake_stack: LocalStack, open_page: OpenPage
) -> None:
    page = opened(open_page, fake_stack, "/demo", reduced_motion="reduce")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("slider").fill("12")
    page.wait_for_function(
        """() => [...document.querySelectorAll("canvas")].every(({ field }) => field.dots.size > 0
          && [...field.dots.values()].every((dot) => dot.x === dot.target.x && dot.y === dot.target.y))"""
    )


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2.2)."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
