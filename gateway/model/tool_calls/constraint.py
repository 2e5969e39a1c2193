"""The grammar of an output that consists of tool calls, as a model's family writes them. Pure.

The grammars are in llguidance's form of Lark, with the JSON schemas inside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway.model.reasoning import Markers, State
from gateway.model.tool_calls.families import ToolFamily
from gateway.model.tool_calls.parameters import Schema, allowed_texts, parameters_of, takes_text
from gateway.model.tool_calls.tagged import Tags
from laps_sd.contract.formats import ONE_LINE, WHITESPACE
from laps_sd.contract.limits import MAX_FORMAT_CHARACTERS

__all__ = ["MAX_CALLS", "Token", "TooLong", "Wanted", "grammar"]

MAX_CALLS = 32
"""Most calls of one constrained output. Our choice: without a limit a model may repeat calls up to max_tokens."""

OPENING = frozenset({"$ref", "additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Keywords of a schema that decide themselves about further properties."""

Token: TypeAlias = Callable[[str], int | None]
"""Returns the id of a text that is a special token; None for any other text."""


class TooLong(ValueError):
    """The grammar would have more characters than a format may have."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The outputs that a grammar allows: reasoning, and then calls, or an answer, or either."""

    tools: Sequence[tuple[str, dict[str, Any]]] = ()
    """Names of the tools, each with the JSON schema of its arguments."""
    single: bool = False
    """At most one call."""
    answer: dict[str, Any] | None = None
    """The schema of an answer without calls; None: only calls."""


def grammar(
    wanted: Wanted, family: ToolFamily | None, reasoning: tuple[Markers, State] | None, special: Token
) -> str:
    """Return the grammar. `special` finds special tokens, which are not text for a tokenizer. `reasoning`: its
    markers, and where the output begins; None: there is no reasoning. Raises Unwritable for arguments that the
    family's form cannot have, and TooLong."""
    write = _Writer(special)
    kinds = []
    if wanted.tools:
        assert family is not None, "tools are refused without a family"
        kinds.append("calls")
        write.calls(wanted, family)
    if wanted.answer is not None:
        kinds.append("answer")
        write.rule("answer", _json(wanted.answer, WHITESPACE))
    start = " | ".join(kinds)
    if reasoning is not None and reasoning[1] is not State.AFTER:
        start = f"reasoning blanks? ({start})"
        write.reasoning(*reasoning)
    return write.beginning_with(f"start: {start}")


class _Writer:
    """Collects the rules of a grammar. Raises TooLong at the first rule too many: a definition of a schema is
    part of the rule of each parameter that may use it, so that the rest could be a thousand times as long."""

    def __init__(self, special: Token) -> None:
        self._special = special
        self._written = ""

    def rule(self, name: str, body: str) -> None:
        self.line(f"{name}: {body}")

    def line(self, text: str) -> None:
        self._written = _bounded(f"{self._written}{text}\n")

    def beginning_with(self, line: str) -> str:
        """Return the grammar, with one more line before the others."""
        return _bounded(f"{line}\n{self._written}")

    def calls(self, wanted: Wanted, family: ToolFamily) -> None:
        """Add the rule `calls`."""
        if family.tags is not None:
            self._several(wanted, family)
            for number, (name, schema) in enumerate(wanted.tools):
                self._tagged(number, name, schema, family.tags)
            self.rule("object", " | ".join(f"object_{number}" for number in range(len(wanted.tools))))
            return
        each = [_call(number, name, schema, family) for number, (name, schema) in enumerate(wanted.tools)]
        call = each[0] if len(each) == 1 else {"anyOf": each}
        if family.as_list:
            most = 1 if wanted.single else MAX_CALLS
            self.rule("calls", f"{self._markup(family.before)} list")
            self.rule("list", _json({"type": "array", "items": call, "minItems": 1, "maxItems": most}))
            return
        self._several(wanted, family)
        self.rule("object", _json(call))

    def _several(self, wanted: Wanted, family: ToolFamily) -> None:
        """Add the rule `calls` of calls, each of which is an `object` in the family's markup."""
        more = "" if wanted.single else f" ({_literal(family.between)} call){{0,{MAX_CALLS - 1}}}"
        self.rule("calls", f"call{more}")
        self.rule("call", f"{self._markup(family.before)} object {self._markup(family.after)}")

    def _tagged(self, number: int, name: str, schema: Schema, tags: Tags) -> None:
        """Add the rules of a call of one tool whose arguments are texts, in the order of its schema."""
        parts = [_literal(f"{tags.name[0]}{name}{tags.name[1]}")]
        for place, (key, (one, needed)) in enumerate(parameters_of(schema).items()):
            rule = f"value_{number}_{place}"
            opening = [
                self._markup(tags.key[0]),
                _literal(key),
                self._markup(tags.key[1]),
                self._markup(tags.value[0]),
            ]
            parts.append(f"({' '.join(filter(None, opening))} {rule}){'' if needed else '?'}")
            if texts := allowed_texts(one, schema):
                self.rule(rule, f"({' | '.join(map(json.dumps, texts))}) {self._markup(tags.value[1])}")
            elif takes_text(key, one, schema):
                self._text(rule, tags.value[1])
            else:
                definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                value = {"$id": f"urn:tool:{number}:{place}", **closed(dict(one)), **definitions}
                self.rule(f"json_{number}_{place}", _json(value))
                self.rule(rule, f"json_{number}_{place} {self._markup(tags.value[1])}")
        parts.append(self._markup(tags.end))
        self.rule(f"object_{number}", " ".join(filter(None, parts)))

    def _text(self, name: str, end: str) -> None:
        """Add a rule for any text, and the markup after it."""
        marker = end.strip("\n")
        token = self._special(marker)
        if token is None:
            self.line(f"{name}[suffix={_literal(end)}]: /(?s:.*)/")
        else:
            self.rule(name, f"/(?s:.*)/ <[{token}]> {_literal(end.partition(marker)[2])}")

    def reasoning(self, markers: Markers, state: State) -> None:
        """Add the rules `reasoning` and `blanks`."""
        end = self._special(markers.end)
        if end is None:
            thoughts = "thoughts"
            self.line(f"thoughts[suffix={_literal(markers.end)}]: /(?s:.*)/")
        else:
            thoughts = f"/(?s:.*)/ <[{end}]>"
        begun = state is State.INSIDE
        self.rule("reasoning", thoughts if begun else f"({self._markup(markers.begin)} {thoughts})?")
        self.rule("blanks", "/[ \\n]{1,4}/")

    def _markup(self, text: str) -> str:
        """Return markup as the symbols of a rule: a special token, or text, and text around it."""
        marker = text.strip("\n")
        token = self._special(marker) if marker else None
        if token is None:
            return _literal(text) if text else ""
        before, after = text.split(marker)
        return " ".join(filter(None, (_literal(before), f"<[{token}]>", _literal(after))))


def _call(number: int, name: str, schema: dict[str, Any], family: ToolFamily) -> dict[str, Any]:
    """Return the schema of a call of one tool."""
    # A schema's references are relative to its id; with one of its own they lead to its own definitions.
    arguments = {"$id": f"urn:tool:{number}", **closed(schema)}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, family.arguments_key: arguments},
        "required": ["name", family.arguments_key],
        "additionalProperties": False,
    }


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of arguments without properties that it does not name, unless it mentions others itself.

    JSON schema allows any other property by default, and a model that is free to invent some may never end. A schema
    that combines others by `allOf` stays open, because closed parts exclude each other.
    """
    return schema if _mentions(schema, "allOf") else _closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(inner := schema.get(key), dict):
            made[key] = {name: _closed_if_schema(value) for name, value in inner.items()}
    for key in ("items", "additionalProperties"):
        made |= {key: _closed_if_schema(schema[key])} if key in schema else {}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(several := schema.get(key), list):
            made[key] = [_closed_if_schema(value) for value in several]
    if isinstance(schema.get("properties"), dict) and OPENING.isdisjoint(schema):
        made["additionalProperties"] = False
    return made


def _closed_if_schema(value: Any) -> Any:
    return _closed(value) if isinstance(value, dict) else value


def _mentions(value: Any, key: str) -> bool:
    if isinstance(value, dict):
        return key in value or any(_mentions(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_mentions(inner, key) for inner in value)


def _json(schema: dict[str, Any], whitespace: dict[str, str] = ONE_LINE) -> str:
    options = schema.get("x-guidance", {})
    if isinstance(options, dict):  # any other is refused when the format is judged
        schema = {**schema, "x-guidance": {**options, **whitespace}}
    return f"%json {json.dumps(schema)}"


def _bounded(grammar: str) -> str:
    if len(grammar) > MAX_FORMAT_CHARACTERS:
        raise TooLong
    return grammar


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
