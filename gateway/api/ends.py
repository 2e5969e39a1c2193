"""How a request ended, in the words of other APIs. None: their word for it is an error."""

from __future__ import annotations

from laps_sd.contract.ends import End

__all__ = ["OPENAI", "VLLM"]

OPENAI: dict[End | None, str | None] = {
    None: None,  # an end of a later version
    End.STOP: "stop",
    End.LENGTH: "length",
    End.STOP_SEQUENCE: "stop",
    # The text is cut off at this point, as it is by a limit of tokens.
    End.TIME_LIMIT: "length",
    End.CANCELLED: None,
    End.DEADLINE: None,
    End.ERROR: None,
}
"""OpenAI's `finish_reason`."""

VLLM: dict[End, str | None] = {
    End.STOP: "stop",
    End.LENGTH: "length",
    End.STOP_SEQUENCE: "stop",
    End.TIME_LIMIT: "length",
    End.CANCELLED: "abort",
    End.DEADLINE: None,
    End.ERROR: None,
}
"""vLLM's `finished_reason`, the label of its metric of successes."""
