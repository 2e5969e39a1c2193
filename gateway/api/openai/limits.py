"""Largest numbers of things in a body. The settings' own, smaller limits are checked by
`gateway.calls.validation`, which gets the same message from every protocol."""

from __future__ import annotations

__all__ = [
    "INT32",
    "INT64_MIN",
    "MAX_ITEMS",
    "MAX_NUMBER",
    "MAX_PROMPTS",
    "MAX_TOKEN_IDS",
    "MAX_VALUES",
    "UINT32",
    "UINT64",
]

MAX_PROMPTS = 1024
MAX_ITEMS = 65_536
"""Maximum number of messages, of the parts of one, and of stop texts."""
MAX_TOKEN_IDS = 1_048_576
"""Maximum number of token ids of all prompts together."""
MAX_VALUES = MAX_TOKEN_IDS + MAX_ITEMS
"""Maximum number of values of all lists and objects of a body, counted before it is decoded."""
UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
INT32 = 2**31 - 1
INT64_MIN = -(2**63)
MAX_NUMBER = 3e38
"""Largest absolute value of a number: about the range of a float field of the message."""
