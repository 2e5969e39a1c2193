"""Log probabilities of the tokens of one output in JSON, as chats and as completions have them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from gateway.api.openai.body import Json
from gateway.api.openai.prompt_logprobs import beginning_of_logprobs
from gateway.model.detokenizer import TokenDecoder
from gateway.model.files import ModelFiles
from laps_sd.v1.inference_pb2 import PromptLogprobs, TokenLogprobs

__all__ = ["OutputLogprobs", "TokenNames"]


class TokenNames:
    """The texts by which log probabilities name tokens."""

    def __init__(self, model: ModelFiles, *, as_ids: bool) -> None:
        """`as_ids`: tokens are named by their ids."""
        self.bytes_of = functools.cache(model.token_bytes.bytes_of)
        self._as_ids = as_ids

    def in_chat(self, token: int) -> str:
        """Return a token's text. Part of a character is written as its bytes, as OpenAI does: `\\xe2\\x82`."""
        return self._name(token, "")

    def in_completion(self, token: int) -> str:
        """Return the same, with `bytes:` before bytes."""
        return self._name(token, "bytes:")

    def decoded(self, token: int) -> str:
        """Return a token's text, with replacement characters for part of a character, as vLLM does."""
        return self.bytes_of(token).decode(errors="replace")

    def _name(self, token: int, before: str) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        octets = self.bytes_of(token)
        try:
            return octets.decode()
        except UnicodeDecodeError:
            return before + "".join(f"\\x{octet:02x}" for octet in octets)


class OutputLogprobs:
    """The log probabilities of one output that have not been sent. Unknown ones are null, as OpenAI writes the
    first token's."""

    def __init__(self, names: TokenNames, model: ModelFiles) -> None:
        self._names = names
        self._model = model
        self._unsent: list[tuple[int, TokenLogprobs]] = []
        self._text = self._text_decoder()
        self._characters = 0
        """Characters of the text of the tokens whose log probabilities have been sent."""

    def add(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> None:
        """Add the log probabilities of the next tokens."""
        self._unsent.extend(zip(token_ids, logprobs, strict=False))

    def in_chat(self) -> Json:
        """Return those that have not been sent."""
        return {
            "content": [
                {
                    **self._token(token, one.logprob, known=not one.unknown),
                    "top_logprobs": [self._token(each.token_id, each.logprob) for each in one.top],
                }
                for token, one in self._take()
            ]
        }

    def in_completion(self) -> Json:
        """Return those that have not been sent."""
        unsent = self._take()
        offsets = []
        for token, _ in unsent:
            offsets.append(self._characters)
            self._characters += len(self._text.feed([token]))
        return {
            "tokens": [self._names.in_completion(token) for token, _ in unsent],
            "token_logprobs": [None if one.unknown else one.logprob for _, one in unsent],
            "top_logprobs": [self._top_logprobs(token, one) for token, one in unsent],
            "text_offset": offsets,
        }

    def of_prompt(self, found: PromptLogprobs, prompt: Sequence[int], echo: str, most: int) -> Json:
        """Return those of the prompt of a completion, whose text is `echo`; those of the output come after it."""
        self._characters = len(echo)
        text, offsets = self._text_decoder(), [0]
        for token in prompt:
            offsets.append(min(offsets[-1] + len(text.feed([token])), len(echo)))
        beginning = beginning_of_logprobs(found, prompt, most, self._names.in_completion)
        return beginning | {"text_offset": offsets[:-1]}

    def _take(self) -> list[tuple[int, TokenLogprobs]]:
        unsent, self._unsent = self._unsent, []
        return unsent

    def _token(self, token: int, logprob: float, *, known: bool = True) -> Json:
        return {
            "token": self._names.in_chat(token),
            "logprob": logprob if known else None,
            "bytes": list(self._names.bytes_of(token)),
        }

    def _top_logprobs(self, token: int, one: TokenLogprobs) -> Json:
        """Return the most probable tokens by name, and the chosen one where it is none of them."""
        found: Json = {self._names.in_completion(each.token_id): each.logprob for each in one.top}
        if not one.unknown:
            found.setdefault(self._names.in_completion(token), one.logprob)
        return found

    def _text_decoder(self) -> TokenDecoder:
        model = self._model
        return TokenDecoder(model.decode, model.silent_ids, joins=model.token_bytes.joins)
