"""Features of a prompt, from which the core predicts the length of the output.

vLLM's engine process has token ids only, and the tokenizer of the model, which it loads for structured
output. With the tokenizer the features are hashed words, as a gateway of LAPS-SD sends them, so the start
weights serve here too. Without it (`--skip-tokenizer-init`) they are hashed token ids, and learning begins
with nothing. What counts as the last message and as a mark is our choice (decision 0056).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from laps_sd.contract.length_features import FeatureHash, features_of_tokens, packed
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.start_weights import start_weights

__all__ = [
    "READ_TOKENS",
    "PromptFeatures",
    "PromptTokens",
    "PromptWords",
    "Span",
    "last_message",
    "special_ids",
    "text_end_ids",
]

READ_TOKENS = 160
"""Tokens that are decoded at each end of a message: enough for the words that count."""
MARK_TOKENS = 48
"""Tokens at the begin of a prompt that name its instructions, and at its end, its generation prompt."""
ROLES = frozenset(
    {
        "",
        "assistant",
        "model",
        "user",
        "system",
        "developer",
        "tool",
        "ipython",
        "analysis",
        "commentary",
        "final",
    }
)
"""What stands alone between two special tokens of chat templates, and is no message."""
ANSWER_ROLES = ("assistant", "model")
QUESTION_ROLES = frozenset({"user", "system", "developer", "tool", "ipython"})
"""Roles that no generation prompt names: what follows them is a message, or they have an empty one."""
_AROUND_ROLES = "<|｜>[]/# \n"
"""What stands around a role that is written without special tokens, or in an added token."""
_ROLE_TOKENS = 4
"""Most tokens of such a name with what surrounds it."""
_ANSWER_TOKENS = 16
"""Tokens in which the role of the answer is looked for."""
MOST_NAMES = 64
"""Names of roles that are decoded in one prompt, at most. A prompt that ends in more has no message."""

_TextOf: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""


class Tokenizer(Protocol):
    """What is used of vLLM's tokenizers; of most, their added tokens and the ends of their texts too."""

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that are no text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""


class Span(NamedTuple):
    """A part of a prompt, by the places of its tokens."""

    begin: int
    end: int


class PromptFeatures(Protocol):
    """How prompts are read."""

    source: str
    """What is read, for the log."""

    def predictor(self) -> PromptLengths:
        """Return a predictor for these features that has learned nothing here."""

    def features_of(self, ids: Sequence[int], limit: int | None, formatted: bool) -> bytes:
        """Return the packed features of a prompt. `limit`: most output tokens, if the client set it;
        `formatted`: whether the output has to have a format. Raises whatever the tokenizer raises.
        """


class PromptTokens:
    """Features by token ids."""

    source = "token ids of prompts"

    def __init__(self, vocab_size: int) -> None:
        self._name = f"{vocab_size} tokens"

    def predictor(self) -> PromptLengths:
        """Return a predictor for ids of a vocabulary of this size."""
        return PromptLengths(start_name=self._name)

    def features_of(self, ids: Sequence[int], limit: int | None, formatted: bool) -> bytes:
        """Return the hashed tokens."""
        return packed(features_of_tokens(ids))


class PromptWords:
    """Features by the words of the last message, as the start weights have learned them."""

    source = "words of prompts"

    def __init__(self, tokenizer: Tokenizer, key: str = "") -> None:
        self._tokenizer, self._key = tokenizer, key
        self._special = frozenset(special_ids(tokenizer))
        self._text_ends = frozenset(text_end_ids(tokenizer))
        self._hash = FeatureHash(key)

    def predictor(self) -> PromptLengths:
        """Return a predictor that has the start weights."""
        return PromptLengths(*start_weights(self._key))

    def features_of(self, ids: Sequence[int], limit: int | None, formatted: bool) -> bytes:
        """Return the hashed words of the last message and the marks of the rest."""
        message = last_message(ids, self._special, self._text_ends, self._text)
        size = message.end - message.begin
        if size <= 2 * READ_TOKENS:
            text = self._text(ids[message.begin : message.end])
            if message.end < len(ids):
                text = _content(text)
            breaks = text.count("\n")
        else:
            first = self._text(ids[message.begin : message.begin + READ_TOKENS])
            last = self._text(ids[message.end - READ_TOKENS : message.end])
            if message.end < len(ids):
                first, last = _content(first), last.rstrip()
            text = f"{first} {last}"
            # The middle is not decoded: its line breaks are as frequent as those at the ends.
            breaks = text.count("\n") * size // (2 * READ_TOKENS)
        marks = _marks(ids, message, limit, formatted)
        return packed(self._hash.features_of(text, marks, breaks))

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def special_ids(tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the ids of all special tokens. In the tokenizers of transformers `all_special_ids` are only those
    that have a role of their own, such as the end of the text. Added tokens that name a role count too
    (DeepSeek's are not special).
    """
    yield from tokenizer.all_special_ids
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        role = token.content.strip(_AROUND_ROLES).lower()
        if token.special or (role and role in ROLES):
            yield token_id


def text_end_ids(tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the ids of the tokens that begin and end a whole text."""
    for name in ("bos_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if token_id is not None:
            yield token_id


def last_message(
    ids: Sequence[int], special: Collection[int], text_ends: Collection[int], text_of: _TextOf
) -> Span:
    """Return where the last message of a chat is in its prompt: chat templates put special tokens around
    messages and end with the generation prompt, which begins the answer. A prompt without special tokens,
    save at its begin, is one message. Some templates write roles as text, and end each answer by one of
    `text_ends`: what follows the last of them is the message.

    An image or a video is a run of one special token. The message that it ends has the words before it, back
    to the name of its role or to the end of the answer before; if there are none, the message has no words.
    """
    places = [place for place, token in enumerate(ids) if token in special]
    end = len(ids)
    generation_prompt = Span(places[-1] + 1 if places else 0, end)
    first = ids[generation_prompt.begin : generation_prompt.begin + _ANSWER_TOKENS]
    if places and ids[places[-1]] in text_ends and not _begins_answer(first, text_of):
        return generation_prompt
    looked_at = 0
    wordless: Span | None = None  # after an image that nothing follows so far
    for place in reversed(places):
        begin = place + 1
        # An image or a video is thousands of special tokens, with nothing between them.
        if begin < end < len(ids):
            role = _role(ids[begin:end], text_of)
            if role is None:
                return Span(begin, end)
            looked_at += 1
            if role and (wordless or role in QUESTION_ROLES):
                return wordless or Span(end, end)
            if looked_at == MOST_NAMES:
                return generation_prompt
        elif begin == end < len(ids) and ids[place] == ids[end] and wordless is None:
            # An end that a template and a tokenizer both add is no image.
            wordless = None if ids[end] in text_ends else Span(end + 1, end + 1)
        if wordless is not None and ids[place] in text_ends:
            return wordless
        end = place
    if places and end and _role(ids[:end], text_of) is None:
        return Span(0, end)
    return generation_prompt


def _role(ids: Sequence[int], text_of: _TextOf) -> str | None:
    """Return the role that these tokens name, or "" if they are blank; None if they are neither."""
    role = text_of(ids).strip().lower() if len(ids) <= _ROLE_TOKENS else None
    return role if role in ROLES else None


def _begins_answer(ids: Sequence[int], text_of: _TextOf) -> bool:
    text = text_of(ids).strip(_AROUND_ROLES).lower()
    return not text or text.startswith(ANSWER_ROLES)


def _content(text: str) -> str:
    """Return a message without what its template puts around it: the name of its role in the line before, and
    blanks. The start weights have not learned these.
    """
    role, line_break, rest = text.partition("\n")
    return (rest if line_break and role.strip().lower() in ROLES else text).strip()


def _marks(ids: Sequence[int], message: Span, limit: int | None, formatted: bool) -> Iterator[str]:
    """Yield what else shows the length of an output: its limit by powers of 2, its format, with which tokens
    a prompt begins (the application's instructions), and which follow its last message (whether the model is
    to think first).
    """
    if limit is not None:
        yield f"most {limit.bit_length()}"
    if formatted:
        yield "format"
    if message.begin:
        yield f"begins {list(ids[: min(MARK_TOKENS, message.begin)])}"
    if message.end < len(ids):
        yield f"ends {list(ids[max(message.end, len(ids) - MARK_TOKENS) :])}"
