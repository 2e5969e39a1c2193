"""Instructions in the middle of a chat, for a template that has a place for them at the beginning only."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.model.tool_calls.described import Message

__all__ = ["folded", "joined"]


def folded(messages: Sequence[Message]) -> list[Message]:
    """Return messages of which the first alone can have the role system. The text of a later one becomes a
    part of the message before it, or, after an answer of the assistant, of the user's next one: each message
    stays where it is, so that a longer chat begins as a shorter one did."""
    made: list[Message] = []
    held = ""
    for message in messages:
        if made and message["role"] == "system":
            if held or made[-1]["role"] == "assistant":
                held = joined(held, message["content"])
            else:
                made[-1] = made[-1] | {"content": joined(made[-1]["content"], message["content"])}
        elif held and message["role"] == "user":
            made.append(message | {"content": joined(held, message["content"])})
            held = ""
        else:
            made.append(message)
    return [*made, {"role": "user", "content": held}] if held else made


def joined(*texts: str) -> str:
    """Return texts as one, with a blank line between those that are not empty."""
    return "\n\n".join(filter(None, texts))
