"""Logging: JSON lines on stderr, a readable console on a terminal.

    configure("gateway", level="info")
    log = get_logger(__name__)
    with bound(request_id="s0.abc"):
        log.info("accepted", prompt_tokens=12)

Prompts and outputs are never logged: the values of keys that carry them are withheld here, whichever code
passes them, and tracebacks are rendered without local variables.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

__all__ = [
    "FACTS",
    "REQUEST_ENDED",
    "SHARD_LOAD",
    "LogLevel",
    "LogStyle",
    "Outlet",
    "bound",
    "configure",
    "get_logger",
]

REQUEST_ENDED = "request ended"
SHARD_LOAD = "load"
FACTS = ("model:", "engine:", "room:")
"""Beginnings of the lines that a worker logs about itself at its start. `laps-sd up` shows all of these lines."""

LogStyle = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

WITHHELD_KEYS = frozenset(
    {"api_key", "committed_ids", "content", "messages", "output", "prompt", "prompt_ids", "text", "token_ids"}
)


def _withhold(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Keep the texts of users, and the texts generated for them, out of the log."""
    for key in WITHHELD_KEYS & event.keys():
        event[key] = "[withheld]"
    return event


class Outlet:
    """Stream of a log, or of a terminal.

    A line that cannot be written (a broken pipe, a full disk) is lost; the program continues.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def configure(
    service: str, *, level: LogLevel = "info", style: LogStyle = "auto", stream: TextIO | None = None
) -> None:
    """Set up this process's log. Call it once, before anything else.

    `auto` is a console on a terminal and JSON elsewhere.
    """
    out = stream if stream is not None else sys.stderr
    outlet = Outlet(out)
    console = style == "console" or (style == "auto" and out.isatty())

    def add_service(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        add_service,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
        structlog.processors.StackInfoRenderer(),
        _withhold,
    ]
    render: list[Processor]
    if console:
        # The default formatter of the console would print local variables.
        render = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback, sort_keys=False
            )
        ]
    else:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, outlet)),
        cache_logger_on_first_use=False,
    )
    # Libraries log through the standard library; their lines get the same form.
    handler = logging.StreamHandler(outlet)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """Return the logger of a module."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Add values (a request id) to every line logged inside, also in tasks started there."""
    with structlog.contextvars.bound_contextvars(**values):
        yield
