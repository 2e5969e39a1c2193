"""How a request ended: one enum for all services.

Its values are what the record, metrics, traces and the command line contain. Other words for an end are
translations, each in one table: `laps_sd.service.ends` for protobuf, `gateway.api.ends` for OpenAI and vLLM.
"""

from __future__ import annotations

import enum


class End(enum.Enum):
    """How a request ended; exactly one per request.

    An engine ends requests with STOP, LENGTH, STOP_SEQUENCE or ERROR; the others are the scheduler's.
    """

    STOP = "stop"
    """The model ended the text: an end-of-sequence token, the last token of the output."""
    LENGTH = "length"
    """`max_tokens` is reached."""
    STOP_SEQUENCE = "stop_sequence"
    """A stop string appeared in the text."""
    TIME_LIMIT = "time_limit"
    """The soft time limit passed; the output is what existed by then."""
    CANCELLED = "cancelled"
    """The client cancelled it, or was away for too long."""
    DEADLINE = "deadline"
    """The hard deadline passed; the client's call fails."""
    ERROR = "error"
    """It failed; a sentence with the reason accompanies this end."""


CLIENT_WENT_AWAY = "its client went away"
"""Reason of a CANCELLED without a cancel. A client that waits all the same has a gateway that did not reach the
scheduler for longer than requests wait for their clients.
"""
