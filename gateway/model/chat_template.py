"""The chat template of a model: from the messages of a chat to the text of its prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.sandbox

from gateway.model.dialect import Parsers, dialect_of
from gateway.model.instructions import folded
from gateway.model.tool_calls.described import Message, described, flattened

__all__ = ["ChatTemplate", "TemplateRefused"]

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort` in OpenAI's and Anthropic's API, the least first."""


class TemplateRefused(ValueError):
    """Raised when the chat template cannot render these messages (for instance because of an unknown order of
    roles)."""


class ChatTemplate:
    """A model's Jinja template in a sandbox, with the arguments that `apply_chat_template` of transformers gives it.

    Raises ValueError when the source is not a template. `with_tools` is the source for chats with tools, where a
    model has one of its own.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        with_tools: str | None = None,
        parsers: Parsers = ("auto", "auto"),
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        for_tools = source if with_tools is None else with_tools
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(for_tools)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(for_tools))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        self._shows_tools = "tools" in variables
        self._shows_calls = "tool_calls" in for_tools
        self._special_tokens = dict(special_tokens)
        self.dialect = dialect_of(for_tools, *parsers)
        """How the model writes calls and reasoning."""
        self._shows_later_instructions = True
        self._shows_later_instructions = self._can_show_later_instructions()
        self._efforts: Sequence[str] = EFFORTS
        self._efforts = [effort for effort in EFFORTS if self._knows_effort(effort)]

    @property
    def own_arguments(self) -> AbstractSet[str]:
        """Return the variables that `render` gives the template itself."""
        return {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        arguments: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt, up to the beginning of the assistant's answer if that is to be added. Raises
        TemplateRefused.

        `tools` and messages have the form of OpenAI's API, but arguments of calls are objects. A template that has
        no place for tools or calls gets them as text, and one that has none for later instructions gets those
        as a part of other messages. In place of an effort that it refuses it gets the nearest one that it
        knows.
        """
        family = self.dialect.tools
        template = self._with_tools if tools else self._template
        try:
            if not self._shows_later_instructions:
                messages = folded(messages)
            if family is not None and not self._shows_calls:
                messages = flattened(messages, family)
            if family is not None and tools and not self._shows_tools:
                messages = described(messages, tools, family)
            return template.render(
                **self._with_known_effort(arguments),
                messages=[dict(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error) or type(error).__name__) from error
        # The template is code that came with a model: any error that it raises for these messages is its
        # refusal.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def _with_known_effort(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments with the nearest known effort, the lesser of two; without one for "none"."""
        effort = arguments.get("reasoning_effort")
        if effort not in EFFORTS or effort in self._efforts:
            return arguments
        known = [EFFORTS.index(one) for one in self._efforts if one != "none"]
        if not known:  # it refuses something else
            return arguments
        others = {name: value for name, value in arguments.items() if name != "reasoning_effort"}
        if effort == "none":
            return others
        level = EFFORTS.index(effort)
        return others | {"reasoning_effort": EFFORTS[min(known, key=lambda one: abs(one - level))]}

    def _knows_effort(self, effort: str) -> bool:
        """Return whether the template takes an effort, by rendering with it."""
        try:
            self.render([{"role": "user", "content": "USER"}], arguments={"reasoning_effort": effort})
        except TemplateRefused:
            return False
        return True

    def _can_show_later_instructions(self) -> bool:
        """Return whether a message of the role system may come after the first one, by rendering chats."""
        first, later = ({"role": "system", "content": text} for text in ("FIRST", "LATER"))
        user = {"role": "user", "content": "USER"}
        try:
            self.render([first, user])
        except TemplateRefused:
            return True  # no place for them anywhere
        try:
            return all("LATER" in self.render(chat) for chat in ([first, user, later], [first, later, user]))
        except TemplateRefused:
            return False


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize like the filter of transformers: no HTML escaping."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 -- the name that templates use
    return datetime.now().astimezone().strftime(format)
