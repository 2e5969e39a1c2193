"""The tools of a response as the functions of a chat.

A namespace is a list of functions. Chat templates have no place for lists within the list, so each of its functions
has the namespace in its name, `NAMESPACE__FUNCTION`, as the model sees and calls it; items have both apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.api.openai.body import Json
from gateway.api.openai.unknown_fields import OnUnknown
from gateway.api.openai.values import kind_of, shown
from laps_sd.errors import InvalidArgument

__all__ = ["ToolsOfResponse", "name_in_chat", "read_tools"]


@dataclass(frozen=True, slots=True)
class ToolsOfResponse:
    """The tools of one response."""

    functions: Sequence[Json] = ()
    """In the form of a chat."""
    fields: Sequence[str] = ()
    """The field of the body that has each of them."""
    items: Mapping[str, Json] = field(default_factory=dict)
    """Names of functions of namespaces in the chat, with `name` and `namespace` of an item that calls them."""

    def item_of(self, name: str) -> Json:
        """Return the fields that name a function of the chat in an item."""
        return self.items.get(name) or {"name": name}

    @property
    def names(self) -> Sequence[tuple[str, str]]:
        """Return names of fields of the chat, with those of the response; see `fields_of_chats.renamed`."""
        return [
            (f"{ours}tools[{index}]{part}", name)
            for index, name in enumerate(self.fields)
            for ours, part in (("", ".function"), ("", ""), ("messages.", ""))
        ]


def name_in_chat(name: Any, namespace: Any) -> Any:
    """Return the name of a function in the chat. What is not a text stays so, and is refused with the chat."""
    return f"{namespace}__{name}" if isinstance(name, str) and namespace is not None else name


def read_tools(tools: Sequence[Json], on_unknown: OnUnknown) -> ToolsOfResponse:
    """Return the tools of a body. Tools that only OpenAI or the client's own model has are unknown. Raises
    InvalidArgument."""
    functions: list[Json] = []
    fields: list[str] = []
    items: dict[str, Json] = {}
    for name, tool, namespace in _functions(tools, on_unknown):
        function = {key: value for key, value in tool.items() if key != "type"}
        if namespace is not None:
            name_of_both = name_in_chat(function.get("name"), namespace)
            function["name"] = name_of_both
            items[str(name_of_both)] = {"name": tool.get("name"), "namespace": namespace}
        functions.append({"type": "function", "function": function})
        fields.append(name)
    return ToolsOfResponse(functions, fields, items)


def _functions(tools: Sequence[Json], on_unknown: OnUnknown) -> Iterator[tuple[str, Json, str | None]]:
    """Yield the field of each function, the function and its namespace."""
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "function":
            yield f"tools[{index}]", tool, None
        elif kind == "namespace":
            namespace, members = tool.get("name"), tool.get("tools")
            if not isinstance(namespace, str):
                raise InvalidArgument(f"tools[{index}].name", f"must be a string, got {kind_of(namespace)}")
            if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
                raise InvalidArgument(f"tools[{index}].tools", "must be a list of objects")
            for place, member in enumerate(members):
                field_name = f"tools[{index}].tools[{place}]"
                if member.get("type") == "function":
                    yield field_name, member, namespace
                else:
                    _refuse(field_name, member.get("type"), on_unknown)
        else:
            _refuse(f"tools[{index}]", kind, on_unknown)


def _refuse(name: str, kind: object, on_unknown: OnUnknown) -> None:
    on_unknown(f"{name}.type", f"must be function, got {shown(kind)}: other tools are not run here")
