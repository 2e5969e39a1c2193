"""The parts of a model that a gateway uses: tokenizer, chat template, context limit. No weights, no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.sandbox
from tokenizers import Tokenizer

from gateway.model.dialect import NONE, Dialect, Parsers, dialect_of
from gateway.model.generation_config import recommended
from gateway.model.instructions import folded
from gateway.model.token_bytes import TokenBytes
from gateway.model.tool_calls.described import Message, described, flattened
from laps_sd.service import model_dir
from laps_sd.service.tokenizer_match import vocabulary_digest
from laps_sd.v1.inference_pb2 import SamplingParams

__all__ = [
    "THREAD_FROM_CHARACTERS",
    "ChatTemplate",
    "ModelFiles",
    "ModelFilesError",
    "TemplateRefused",
    "load_model",
]

THREAD_FROM_CHARACTERS = 4096  # a shorter text is tokenized faster than it is passed to a thread
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort` in OpenAI's and Anthropic's API, the least first."""


class ModelFilesError(ValueError):
    """Raised when the tokenizer directory cannot be used. The message is a sentence that names the file."""


class TemplateRefused(ValueError):
    """Raised when the chat template cannot render these messages (for instance because of an unknown order of
    roles)."""


class ChatTemplate:
    """A model's Jinja template in a sandbox, with the arguments that `apply_chat_template` of transformers gives it.

    Raises ModelFilesError when the source is not a template. `with_tools` is the source for chats with tools, where a
    model has one of its own.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        where: str,
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
            raise ModelFilesError(f"{where}: the chat template is not valid Jinja: {error}") from error
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


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The tokenizer and the limits of a model. Thread-safe."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context_tokens: int  # prompt and output together
    vocab_size: int
    eos_ids: frozenset[int]
    silent_ids: frozenset[int]  # special tokens: they have no text
    pieces: TokenBytes
    dialect: Dialect = NONE
    markup_ids: frozenset[int] = frozenset()
    """Those of `silent_ids` that are markup of tool calls or reasoning."""
    recommended: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters that the model's generation_config.json recommends."""
    aliases: Sequence[str] = ()
    """Further names that requests may have for the model."""
    adapters: Sequence[str] = ()
    """LoRA adapters of the model, which requests name as their model."""
    vocabulary: bytes = b""
    """Digest of the tokens of all ids."""

    @property
    def names(self) -> Sequence[str]:
        """Return all names of the model, its own first, and its adapters."""
        return (self.name, *self.aliases, *self.adapters)

    def adapter_of(self, name: str) -> str:
        """Return the adapter that this name of the model means; empty: none."""
        return name if name in self.adapters else ""

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a plain text, with the tokens that the tokenizer adds around a sequence
        (often a begin token)."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of text from the chat template, which has written all special tokens
        itself."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    async def encode_off_loop(self, text: str, *, rendered: bool) -> list[int]:
        """Return the token ids of a text; a long text is tokenized in a thread, because the tokenizer
        releases the interpreter lock."""
        encode = self.encode_rendered if rendered else self.encode_text
        if len(text) < THREAD_FROM_CHARACTERS:
            return encode(text)
        return await asyncio.to_thread(encode, text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included; an id that the tokenizer does not know has no
        text."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def load_model(
    directory: Path,
    *,
    name: str,
    context_tokens: int | None = None,
    parsers: Parsers = ("auto", "auto"),
    recommendations: bool = True,
    aliases: Sequence[str] = (),
    adapters: Sequence[str] = (),
) -> ModelFiles:
    """Load tokenizer.json, tokenizer_config.json, chat_template.jinja (if there) and config.json. Raises
    ModelFilesError.

    `context_tokens` overrides the limit in the model's files, `parsers` the dialect of its chat template;
    without `recommendations` the sampling parameters in generation_config.json are not read.
    """
    tokenizer = _tokenizer(directory / "tokenizer.json")
    config = _read_json(directory / "config.json")
    text_config = config.get("text_config", config)
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    generation_config = _read_json(directory / "generation_config.json")

    try:
        parameters = recommended(generation_config) if recommendations else SamplingParams()
    except ValueError as error:
        raise ModelFilesError(
            f"{directory / 'generation_config.json'}: {error}; LAPS_SD_GENERATION_CONFIG=none does not read it"
        ) from None

    limit = model_dir.context_tokens(directory, context_tokens)
    if limit is None:
        raise ModelFilesError(
            f"{directory / 'config.json'} has no context limit ({model_dir.POSITIONS[0]}, or {model_dir.POSITIONS[1]} "
            "and the like); set LAPS_SD_CONTEXT_TOKENS"
        )
    vocab_size = max(
        int(text_config.get("vocab_size") or 0), tokenizer.get_vocab_size(with_added_tokens=True)
    )

    special_tokens = {
        key: text
        for key, value in tokenizer_config.items()
        if key.endswith("_token") and (text := _token_text(value)) is not None
    }
    eos_ids = model_dir.end_ids(directory)
    special_ids = {
        token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    silent_ids = frozenset(special_ids | eos_ids)

    template = _chat_template(directory, tokenizer_config, special_tokens, parsers)
    dialect = NONE if template is None else template.dialect
    return ModelFiles(
        name=name,
        tokenizer=tokenizer,
        template=template,
        context_tokens=limit,
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        silent_ids=silent_ids,
        pieces=TokenBytes(tokenizer),
        dialect=dialect,
        markup_ids=silent_ids & {tokenizer.token_to_id(text) for text in dialect.markup()},
        recommended=parameters,
        aliases=aliases,
        adapters=adapters,
        vocabulary=vocabulary_digest(directory),
    )


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFilesError(f"{path}: the file is missing; a tokenizer directory must have it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelFilesError(f"{path}: not a tokenizer: {error}") from error
    # Truncation and padding are settings of training pipelines that some files contain; a prompt is never cut
    # silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _chat_template(
    directory: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    parsers: Parsers,
) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        for_tools = directory / "additional_chat_templates" / "tool_use.jinja"
        return ChatTemplate(
            path.read_text(encoding="utf-8"),
            special_tokens=special_tokens,
            where=str(path),
            with_tools=for_tools.read_text(encoding="utf-8") if for_tools.is_file() else None,
            parsers=parsers,
        )
    source = tokenizer_config.get("chat_template")
    with_tools = None
    if isinstance(source, list):  # several named templates
        named = {str(item.get("name")): item.get("template") for item in source if isinstance(item, dict)}
        source, with_tools = named.get("default"), named.get("tool_use")
    if source is None:
        return None
    where = str(directory / "tokenizer_config.json")
    if not isinstance(source, str) or not isinstance(with_tools, str | None):
        raise ModelFilesError(f"{where}: chat_template must be a text")
    return ChatTemplate(
        source, special_tokens=special_tokens, where=where, with_tools=with_tools, parsers=parsers
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path}: must hold a JSON object")
    return value


def _token_text(value: object) -> str | None:
    """Return the text of a special token, which is written as a text, or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
