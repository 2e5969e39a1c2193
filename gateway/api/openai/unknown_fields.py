"""Fields of a body that have no meaning here: refused, or ignored with one line in the log for each name; and
fields that are not supported, which are refused if their value requests something."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Literal, Protocol, TypeAlias

from laps_sd.errors import InvalidArgument
from laps_sd.service.log import get_logger

__all__ = ["OnUnknown", "UnknownFields", "Unsupported", "check_fields", "refuse"]

log = get_logger(__name__)

UNKNOWN = "is not a known field; leave it out"


class OnUnknown(Protocol):
    """Called with the name of what has no meaning here, and the reason. It may raise InvalidArgument."""

    def __call__(self, name: str, problem: str = UNKNOWN) -> object:
        """Return if the rest of the body can be used."""
        ...


Unsupported: TypeAlias = Mapping[str, tuple[object, ...]]
"""Names of fields that are not supported, with the values (besides null) that do not request them."""

MAX_NAME_CHARACTERS = 80
MAX_NAMES = 256
"""Most names of which the log has a line: clients choose them."""


def refuse(name: str, problem: str = UNKNOWN) -> None:
    """Raise InvalidArgument for an unknown field."""
    raise InvalidArgument(name[:MAX_NAME_CHARACTERS], problem)


def check_fields(
    body: Mapping[str, object],
    known: Container[str],
    unsupported: Unsupported,
    on_unknown: OnUnknown,
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Refuse what a body requests of the fields that are not supported, and call `on_unknown` with the names
    of those that are not `known` either. `reasons`: why fields are not supported. Raises InvalidArgument."""
    for name, value in body.items():
        if value is None or name in known:
            continue
        if name not in unsupported:
            on_unknown(name)
        elif value not in unsupported[name]:
            reason = (reasons or {}).get(name, "the engine does not have it")
            raise InvalidArgument(name, f"is not supported: {reason}; leave it out")


class UnknownFields:
    """Handles the unknown fields of all bodies that one gateway reads."""

    def __init__(self, how: Literal["refuse", "ignore"]) -> None:
        self._refuses = how == "refuse"
        self._logged: set[str] = set()

    def __call__(self, name: str, problem: str = UNKNOWN) -> None:
        """Refuse a field, or log it if it is the first of its name. Raises InvalidArgument."""
        if self._refuses:
            refuse(name, problem)
        name = name[:MAX_NAME_CHARACTERS]
        if name not in self._logged and len(self._logged) < MAX_NAMES:
            self._logged.add(name)
            log.warning("unknown field ignored", field=ascii(name))
