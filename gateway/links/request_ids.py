"""Request ids, which contain the shard: `{shard}.{random}`."""

from __future__ import annotations

import re

from laps_sd.errors import InvalidArgument

__all__ = ["check_request_id", "shard_of"]

MAX_REQUEST_ID_CHARACTERS = 128
REQUEST_ID = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9]+)")


def check_request_id(request_id: str) -> None:
    """Raise InvalidArgument unless this could be an id that some gateway issued."""
    if not request_id:
        raise InvalidArgument("request_id", "must not be empty")
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgument(
            "request_id", f"must be at most {MAX_REQUEST_ID_CHARACTERS} characters, got {len(request_id)}"
        )
    if not REQUEST_ID.fullmatch(request_id):
        shown = request_id if len(request_id) <= 40 else request_id[:40] + "…"
        raise InvalidArgument("request_id", f"must be a request id from `accepted`, got {shown!r}")


def shard_of(request_id: str) -> str:
    """Return the shard of a request."""
    return request_id.partition(".")[0]
