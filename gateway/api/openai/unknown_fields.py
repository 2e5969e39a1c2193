"""Fields of a body that have no meaning here: refused, or ignored with one line in the log for each name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from laps_sd.errors import InvalidArgument
from laps_sd.service.log import get_logger

__all__ = ["OnUnknown", "UnknownFields", "refuse"]

log = get_logger(__name__)

OnUnknown: TypeAlias = Callable[[str], object]
"""Called with the name of an unknown field. It may raise InvalidArgument."""

MAX_NAME_CHARACTERS = 80
MAX_NAMES = 256
"""Most names of which the log has a line: clients choose them."""


def refuse(name: str) -> None:
    """Raise InvalidArgument for an unknown field."""
    raise InvalidArgument(name[:MAX_NAME_CHARACTERS], "is not a known field; leave it out")


class UnknownFields:
    """Handles the unknown fields of all bodies that one gateway reads."""

    def __init__(self, how: Literal["refuse", "ignore"]) -> None:
        self._refuses = how == "refuse"
        self._logged: set[str] = set()

    def __call__(self, name: str) -> None:
        """Refuse a field, or log it if it is the first of its name. Raises InvalidArgument."""
        if self._refuses:
            refuse(name)
        name = name[:MAX_NAME_CHARACTERS]
        if name not in self._logged and len(self._logged) < MAX_NAMES:
            self._logged.add(name)
            log.warning("unknown field ignored", field=ascii(name))
