"""Sources of an estimated length."""

from __future__ import annotations

import enum
from typing import Final


class Basis(enum.StrEnum):
    """Source of an estimated length. Every estimate also uses the lengths of the class."""

    CLASS = "class"
    """Nothing but the earlier lengths of its class."""
    CLIENT = "client"
    """The client's hint."""
    PROMPT = "prompt"
    """The prediction from its prompt."""
    CLIENT_AND_PROMPT = "client_prompt"
    LIMIT = "limit"
    """Its length limit: nothing else can end it."""
    WORKER = "worker"
    """The worker's prediction of what remains."""


BY_CLASS: Final = Basis.CLASS  # compiled, such a name costs no look-up
