"""The lines of the children's logs that `laps-sd up` shows."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from laps_sd.service.log import FACTS, REQUEST_ENDED, SHARD_LOAD, configure, get_logger
from laps_sd.stack.children import MAX_LOG_BYTES, Child
from laps_sd.stack.local import LocalStack
from laps_sd.stack.log_watch import LogWatch, lines_to_show


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Return where the log of a service goes, as `laps-sd up` starts it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    configure("gateway", stream=out, style="console", level="debug")
    yield out
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_warnings_and_errors_are_shown_and_what_is_usual_is_not(written: io.StringIO) -> None:
    log = get_logger("gateway.links.link")
    log.debug("dialling", address="a:1")
    log.info("listening", port=1)
    log.warning("the stream broke", shard="s0")
    logging.getLogger("aiohttp").error("a library failed")

    assert list(lines_to_show(written.getvalue())) == [
        "warning: the stream broke  shard=s0",
        "error: a library failed",
    ]


def test_an_error_comes_with_the_last_line_of_its_traceback(written: io.StringIO) -> None:
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        get_logger("x").error("task ended", task="links", exc_info=error)
    get_logger("x").info("stopped")

    assert list(lines_to_show(written.getvalue())) == [
        "error: task ended  task=links (ValueError: no such thing)"
    ]


def test_what_an_operator_looks_for_is_shown_in_the_order_of_its_fields(written: io.StringIO) -> None:
    log = get_logger("x")
    log.info(REQUEST_ENDED, request_id="s0.a", tenant="acme", end="stop")
    log.info(SHARD_LOAD, running=1, waiting=0)
    for fact in FACTS:
        log.info(f"{fact} something")

    assert list(lines_to_show(written.getvalue())) == [
        "request ended  request_id=s0.a tenant=acme end=stop",
        "load  running=1 waiting=0",
        "model: something",
        "engine: something",
        "room: something",
    ]


def test_a_line_that_a_library_printed_is_no_part_of_what_is_no_problem(written: io.StringIO) -> None:
    get_logger("x").info(f"{FACTS[0]} small")
    written.write("I1128 14:37:27 ssl_transport_security.cc:2563] Handshake failed\n")

    assert list(lines_to_show(written.getvalue())) == ["model: small"]


def test_a_mistyped_variable_is_not_repeated_by_every_child(written: io.StringIO) -> None:
    get_logger("x").warning("unknown LAPS_SD variables, ignored", nearest_known={"LAPS_SD_A": None})

    assert list(lines_to_show(written.getvalue())) == []


def test_a_log_that_has_become_long_begins_again_and_the_part_before_is_kept(tmp_path: Path) -> None:
    stack = LocalStack()
    child = stack.children["x"] = Child("x", "a_module", environment={}, log=tmp_path / "x.log")
    shown: list[str] = []
    watch = LogWatch(stack, report=shown.append)
    line = b"2026-11-27T15:00:00 [info     ] request ended\n"
    late = b"2026-11-27T15:00:01 [warning  ] late\n"

    with child.log.open("ab", buffering=0) as log:  # as the process has it
        for _ in range(2):
            log.write(line * (MAX_LOG_BYTES // len(line) + 1))
            watch.look()
            log.write(late)
            watch.look()

    assert child.log.read_bytes() == late
    assert [path.name for path in tmp_path.iterdir() if path != child.log] == ["x.log.old"]
    assert (tmp_path / "x.log.old").read_bytes().startswith(late + line)
    assert shown.count("x  warning: late") == 2
