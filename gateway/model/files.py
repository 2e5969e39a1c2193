"""The files of a model that a gateway reads: tokenizer, chat template, limits. No weights, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.model.chat_template import ChatTemplate
from gateway.model.dialect import NONE, Dialect, Parsers
from gateway.model.generation_config import recommended
from gateway.model.token_bytes import TokenBytes
from laps_sd.service import model_dir
from laps_sd.service.tokenizer_match import vocabulary_digest
from laps_sd.v1.inference_pb2 import SamplingParams

__all__ = ["ModelFiles", "ModelFilesError", "load_model"]

# A text is tokenized by one thread, and the library warns of each child process after it has used several.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ModelFilesError(ValueError):
    """Raised when the tokenizer directory cannot be used. The message is a sentence that names the file."""


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
    token_bytes: TokenBytes
    markup: Mapping[str, int] = field(default_factory=dict)
    """Those of `silent_ids` that are markup of tool calls or reasoning, by their texts."""
    recommended: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters that the model's generation_config.json recommends."""
    aliases: Sequence[str] = ()
    """Further names that requests may have for the model."""
    adapters: Sequence[str] = ()
    """LoRA adapters of the model, which requests name as their model."""
    vocabulary: bytes = b""
    """Digest of the tokens of all ids."""

    @property
    def dialect(self) -> Dialect:
        """Return how the model writes calls and reasoning."""
        return NONE if self.template is None else self.template.dialect

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
        return self._encode(text, add_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of text from the chat template, which has written all special tokens
        itself."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Only this method of the library leaves out the texts of the tokens and their places. Otherwise these are freed
        # under the interpreter lock: for 40 ms after 270,000 tokens, in which no other call went on.
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

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
    without `recommendations` the sampling parameters in generation_config.json are not used.
    """
    tokenizer = _tokenizer(directory / "tokenizer.json")
    config = _read_json(directory / "config.json")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    vocab_size = max(
        int(config.get("text_config", config).get("vocab_size") or 0),
        tokenizer.get_vocab_size(with_added_tokens=True),
    )
    special_tokens = {
        key: text
        for key, value in tokenizer_config.items()
        if key.endswith("_token") and (text := _token_text(value)) is not None
    }
    template = _chat_template(directory, tokenizer_config, special_tokens, parsers)
    markup = () if template is None else template.dialect.markup()
    eos_ids = model_dir.end_ids(directory)
    special_ids = {
        token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    silent_ids = frozenset(special_ids | eos_ids)
    return ModelFiles(
        name=name,
        tokenizer=tokenizer,
        template=template,
        context_tokens=_context_tokens(directory, context_tokens),
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        silent_ids=silent_ids,
        token_bytes=TokenBytes(tokenizer),
        markup={text: token for text in markup if (token := tokenizer.token_to_id(text)) in silent_ids},
        recommended=_recommended(directory / "generation_config.json", used=recommendations),
        aliases=aliases,
        adapters=adapters,
        vocabulary=vocabulary_digest(directory),
    )


def _recommended(path: Path, *, used: bool) -> SamplingParams:
    """Return the parameters in a file, which must be JSON also if it is not `used`."""
    config = _read_json(path)
    try:
        return recommended(config) if used else SamplingParams()
    except ValueError as error:
        raise ModelFilesError(
            f"{path}: {error}; with LAPS_SD_GENERATION_CONFIG=none it is not used"
        ) from None


def _context_tokens(directory: Path, given: int | None) -> int:
    tokens = model_dir.context_tokens(directory, given)
    if tokens is None:
        raise ModelFilesError(
            f"{directory / 'config.json'} has no context limit ({model_dir.POSITIONS[0]}, or {model_dir.POSITIONS[1]} "
            "and the like); set LAPS_SD_CONTEXT_TOKENS"
        )
    return tokens


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        problem = f"{path}: the file is missing; a tokenizer directory must have it"
        other = path.with_name("tekken.json")
        if other.is_file():
            problem += f", and {other} must be converted: docs/troubleshooting.md has the command"
        raise ModelFilesError(problem)
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
    with_tools: object = None
    if path.is_file():
        source: object = path.read_text(encoding="utf-8")
        for_tools = directory / "additional_chat_templates" / "tool_use.jinja"
        if for_tools.is_file():
            with_tools = for_tools.read_text(encoding="utf-8")
    else:
        path = directory / "tokenizer_config.json"
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {str(item.get("name")): item.get("template") for item in source if isinstance(item, dict)}
            source, with_tools = named.get("default"), named.get("tool_use")
    if source is None:
        return None
    if not isinstance(source, str) or not isinstance(with_tools, str | None):
        raise ModelFilesError(f"{path}: chat_template must be a text")
    try:
        return ChatTemplate(source, special_tokens=special_tokens, with_tools=with_tools, parsers=parsers)
    except ValueError as error:
        raise ModelFilesError(f"{path}: {error}") from error


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
