"""Fields that other APIs pass on to a chat unchanged, and errors about a chat under the names of another API."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api.openai.body import Json
from gateway.api.openai.models import SAMPLING_FIELDS, ChatBody
from laps_sd.errors import InvalidArgument

__all__ = ["NAMES_OF_TOOLS", "PASSED_ON", "passed_on", "renamed"]

PASSED_ON = (
    *(name for name in SAMPLING_FIELDS if name not in ("max_tokens", "temperature", "top_p")),
    "add_special_tokens",
    "cache_salt",
    "chat_template_kwargs",
    "deadline_unix_ms",
    "expected_output_tokens",
    "priority",
    "structured_outputs",
    "time_limit_ms",
    "workload_class",
)
"""vLLM's extensions and ours, which have the same meaning in each API."""

NAMES_OF_TOOLS = (
    ("messages.tools", "tools"),
    ("messages.tool_choice", "tool_choice"),
    ("messages.template_arguments", "chat_template_kwargs"),
)
"""Names that APIs share, for the table of `renamed`; before `messages`."""
MESSAGES = ("messages.messages", "messages")


def passed_on(body: Json) -> Json:
    """Return the fields of a body that a chat has too."""
    assert ChatBody.model_fields.keys() >= set(PASSED_ON)
    return {name: body[name] for name in PASSED_ON if name in body}


def renamed(error: InvalidArgument, names: Sequence[tuple[str, str]]) -> InvalidArgument:
    """Return an error about a field of a chat with the field's name in another API. `names`: beginnings of names, the
    longest first. Of a message only the last name is kept, in the sentence: the lists of messages differ."""
    first, *others = (_renamed(name, text, names) for name, text in error.violations)
    return InvalidArgument(*first, *others)


def _renamed(name: str, text: str, names: Sequence[tuple[str, str]]) -> tuple[str, str]:
    for ours, theirs in names:
        if name != ours and not name.startswith((ours + ".", ours + "[")):
            continue
        rest = name[len(ours) :]
        if ours not in MESSAGES:
            return theirs + rest, text
        last = rest.rpartition(".")[2]
        return theirs, f"has a part whose {last} {text}" if rest.startswith("[") and "." in rest else text
    return name, text
