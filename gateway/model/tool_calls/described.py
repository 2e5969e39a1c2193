"""Tools for a chat template that has no place for them: as a part of the instructions, and as plain messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gateway.model.tool_calls.families import ToolFamily

__all__ = ["Message", "described", "flattened"]

Message: TypeAlias = dict[str, Any]
"""A message as chat templates read it."""


def described(messages: Sequence[Message], tools: Sequence[Message], family: ToolFamily) -> list[Message]:
    """Return messages whose instructions name the tools and the form of a call."""
    if family.tags is None:
        example = f'{{"name": NAME, "{family.arguments_key}": OBJECT}}'
    else:
        example = family.tags.written("NAME", {"PARAMETER": "VALUE"})
    example = f"{family.before}[{example}]" if family.as_list else f"{family.before}{example}{family.after}"
    text = "\n".join(
        (
            "You can call these functions:",
            *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
            "To call functions, answer with nothing but this:",
            example,
        )
    )
    first, others = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    if first is not None and first["content"]:
        text = f"{first['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *others]


def flattened(messages: Sequence[Message], family: ToolFamily) -> list[Message]:
    """Return messages of the roles system, user and assistant with text alone: calls as the family writes them,
    results as messages of the user. Raises ValueError for arguments that it cannot write."""
    plain: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = message.get("name")
            text = f"Result of {name}: {message['content']}" if name else f"Result: {message['content']}"
            if was_result:  # templates want user and assistant in turns
                plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            text = "\n".join(filter(None, (message["content"], _written(message["tool_calls"], family))))
            plain.append({"role": message["role"], "content": text})
        else:
            plain.append(message)
        was_result = is_result
    return plain


def _written(tool_calls: Sequence[Message], family: ToolFamily) -> str:
    """Return calls as the family writes them."""
    calls = [_call(family, **call["function"]) for call in tool_calls]
    if family.as_list:
        return f"{family.before}[{', '.join(calls)}]"
    return family.between.join(f"{family.before}{call}{family.after}" for call in calls)


def _call(family: ToolFamily, name: str, arguments: Any) -> str:
    if family.tags is not None:
        if not isinstance(arguments, Mapping):
            raise ValueError(f"the arguments of the earlier call of {name!r} must be an object")
        return family.tags.written(name, arguments)
    return json.dumps({"name": name, family.arguments_key: arguments}, ensure_ascii=False)
