"""The log: JSON lines, readable consoles, and no text of users."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from laps_sd.service.log import bound, configure, get_logger


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def lines(out: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


class GoneReader(io.StringIO):
    """Pipe whose other end was closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_log_that_nobody_reads_any_more_breaks_nothing(style):
    configure("gateway", stream=GoneReader(), style=style)

    get_logger("gateway.api.inference").error("accepted")
    logging.getLogger("library").error("also this")


def test_a_line_is_json_with_service_and_request():
    out = io.StringIO()
    configure("gateway", stream=out)

    with bound(request_id="s0.a"):
        get_logger("gateway.api.inference").info("accepted", prompt_tokens=12)

    (line,) = lines(out)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "accepted",
        "level": "info",
        "module": "gateway.api.inference",
        "prompt_tokens": 12,
        "request_id": "s0.a",
        "service": "gateway",
    }


def test_what_people_wrote_is_withheld():
    out = io.StringIO()
    configure("gateway", stream=out)

    get_logger("x").info("accepted", prompt="my secret", token_ids=[1, 2])

    assert "secret" not in out.getvalue()
    assert lines(out)[0]["token_ids"] == "[withheld]"


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_traceback_shows_no_local_variables(style):
    out = io.StringIO()
    configure("gateway", style=style, stream=out)

    def fails(prompt):
        raise ValueError("broken")

    secret = "my " + "secret"  # in two parts: a traceback quotes the source
    try:
        fails(secret)
    except ValueError:
        get_logger("x").exception("call failed")

    assert "ValueError: broken" in out.getvalue()
    assert "my secret" not in out.getvalue()


def test_libraries_log_the_same_way():
    out = io.StringIO()
    configure("worker", stream=out)

    logging.getLogger("some.library").warning("careful %s", "now")

    assert (lines(out)[0]["event"], lines(out)[0]["service"]) == ("careful now", "worker")


def test_lines_below_the_level_are_not_written():
    out = io.StringIO()
    configure("worker", level="warning", stream=out)

    get_logger("x").info("quiet")

    assert out.getvalue() == ""
