"""The checks of client input. Pure: no clock, no randomness, no I/O.

Two steps, because a prompt must be tokenized and an output format compiled in between (`formats.py`):

1. `check_request`: everything that can be checked in the message alone. Cheap; bounds the cost of tokenizing.
2. `completion.complete`: with the prompt's token ids, the submission that the scheduler gets.

Each problem is an InvalidArgument that names the field, as a path from the request, and the limit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.calls.tools import characters_of, check_tools
from gateway.model.files import ModelFiles
from gateway.settings import GatewaySettings
from laps_sd.contract.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_IDS,
    MAX_BIAS,
    MAX_FORMAT_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    prompt_logprobs_in_all,
)
from laps_sd.contract.sampling import BOUNDS
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import gateway_link_pb2, inference_pb2

__all__ = [
    "ROLES",
    "SpeculationMode",
    "check_ids",
    "check_model",
    "check_prompt_logprobs",
    "check_request",
    "check_whole_answer",
    "choices_of",
    "prompt_too_long",
]

ROLES = ("system", "user", "assistant", "tool")
FIRST_MS, LAST_MS = 10**12, 10**13
"""Range of a deadline in milliseconds: from 2001 to 2286, so that seconds and microseconds are not mistaken
for milliseconds."""
MAX_KEY_CHARACTERS = 128
MAX_CLASS_CHARACTERS = 64
MAX_CHARACTERS_PER_TOKEN = 64
"""Maximum number of characters of a prompt for each token of the context; a longer prompt cannot fit.
Tokenizing takes a hundred bytes and more for each resulting token, so a prompt that cannot fit is refused
before."""
TOKEN_BYTES = 12
"""Bytes of an output token in an answer: its id, and its text, which has about four characters. Our choice."""
LOGPROB_BYTES = 12
"""Largest number of bytes of the log probability of one token in an answer, with its id."""
CLASS = re.compile(r"[A-Za-z0-9._:/-]+")

SpeculationMode = inference_pb2.Speculation.Mode
Drafter = inference_pb2.Speculation.Drafter


def check_request(
    request: inference_pb2.GenerateRequest, settings: GatewaySettings, model: ModelFiles
) -> None:
    """Raise InvalidArgument unless the request can be tokenized and everything except its length is in
    bounds."""
    check_model(request.model, model)
    _check_prompt(request, settings, model)
    _check_sampling(request.sampling, settings, model)
    _check_speculation(request.speculation, settings)
    _check_format(request)

    if len(request.idempotency_key) > MAX_KEY_CHARACTERS:
        raise InvalidArgument(
            "idempotency_key",
            f"must be at most {MAX_KEY_CHARACTERS} characters, got {len(request.idempotency_key)}",
        )
    if not request.idempotency_key.isprintable():
        raise InvalidArgument("idempotency_key", "must hold printable characters only")
    for name, label in (("conversation", request.conversation), ("cache_salt", request.cache_salt)):
        if len(label) > MAX_KEY_CHARACTERS:
            raise InvalidArgument(name, f"must be at most {MAX_KEY_CHARACTERS} characters, got {len(label)}")
    if len(request.workload_class) > MAX_CLASS_CHARACTERS:
        raise InvalidArgument(
            "workload_class",
            f"must be at most {MAX_CLASS_CHARACTERS} characters, got {len(request.workload_class)}",
        )
    if request.workload_class and not CLASS.fullmatch(request.workload_class):
        raise InvalidArgument("workload_class", "must hold letters, digits and . _ : / - only")
    if abs(request.priority) > settings.max_priority:
        raise InvalidArgument(
            "priority",
            f"must be from {-settings.max_priority} to {settings.max_priority}, got {request.priority}",
        )
    if request.HasField("time_limit_ms"):
        longest_ms = round(settings.max_time_limit_s * 1000)
        if not 1 <= request.time_limit_ms <= longest_ms:
            raise InvalidArgument(
                "time_limit_ms", f"must be from 1 to {longest_ms}, got {request.time_limit_ms}"
            )
    if request.HasField("deadline_unix_ms") and not FIRST_MS <= request.deadline_unix_ms <= LAST_MS:
        raise InvalidArgument(
            "deadline_unix_ms", f"must be milliseconds since 1970, got {request.deadline_unix_ms}"
        )
    if request.HasField("expected_output_tokens") and request.expected_output_tokens < 1:
        raise InvalidArgument("expected_output_tokens", "must be at least 1, got 0")
    if request.HasField("n") and not 1 <= request.n <= settings.max_choices:
        raise InvalidArgument("n", f"must be from 1 to {settings.max_choices}, got {request.n}")
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if request.HasField(name) and settings.max_logprobs is None:  # type: ignore[arg-type]
            raise InvalidArgument(name, "must be absent: this gateway gives no log probabilities")
        if settings.max_logprobs is not None and count > settings.max_logprobs:
            raise InvalidArgument(name, f"must be at most {settings.max_logprobs}, got {count}")


def check_prompt_logprobs(in_all: int, settings: GatewaySettings) -> None:
    """Raise InvalidArgument for too many log probabilities of the tokens of prompts in one call."""
    if in_all > settings.max_prompt_logprobs:
        raise InvalidArgument(
            "prompt_logprobs",
            f"must make at most {settings.max_prompt_logprobs} log probabilities in one call (of each output the tokens of"
            f" its prompt, each with its alternatives), got {in_all}",
        )


def check_whole_answer(submits: Sequence[gateway_link_pb2.Submit], most_bytes: int) -> None:
    """Raise InvalidArgument if these outputs together may be larger than an answer in one message can be."""
    tokens = size = 0
    for submit in submits:
        spec = submit.specification
        most_tokens = spec.sampling.max_tokens
        tokens += most_tokens
        size += most_tokens * TOKEN_BYTES
        if spec.HasField("logprobs"):
            size += most_tokens * LOGPROB_BYTES * (1 + spec.logprobs)
        if spec.HasField("prompt_logprobs"):
            size += LOGPROB_BYTES * prompt_logprobs_in_all(len(spec.prompt_ids), spec.prompt_logprobs)
    if size > most_bytes:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"must be smaller for an answer in one message: {len(submits)} outputs of {tokens} tokens in all, with their log"
            f" probabilities, may have {size} bytes, and at most {most_bytes} can be sent; a stream (GenerateStream,"
            " stream: true) has no such limit",
        )


def check_model(name: str, model: ModelFiles) -> None:
    """Raise InvalidArgument unless the name is one of the model served here."""
    if name and name not in model.names:
        names = " or ".join(map(repr, model.names))
        raise InvalidArgument("model", f"must be {names}, the model served here, got {_shown(name)}")


def choices_of(request: inference_pb2.GenerateRequest) -> int:
    """Return the number of outputs of a checked request."""
    return request.n if request.HasField("n") else 1


def _check_prompt(
    request: inference_pb2.GenerateRequest, settings: GatewaySettings, model: ModelFiles
) -> None:
    match request.WhichOneof("prompt"):
        case None:
            raise InvalidArgument("prompt", "must be given: one of text, messages, token_ids")
        case "text":
            if not request.text:
                raise InvalidArgument("text", "must not be empty")
            _check_characters("text", len(request.text), settings, model)
        case "messages":
            _check_messages(request.messages, settings, model)
            check_tools(request, settings, model)
            _check_continuation(request.messages)
        case "token_ids":
            ids = request.token_ids.ids
            if not ids:
                raise InvalidArgument("token_ids.ids", "must not be empty")
            if len(ids) >= model.context_tokens:  # before each id is checked: there may be millions
                raise prompt_too_long("token_ids.ids", len(ids), model)
            check_ids("token_ids.ids", ids, model)


def _check_messages(chat: inference_pb2.ChatMessages, settings: GatewaySettings, model: ModelFiles) -> None:
    messages = chat.messages
    if model.template is None:
        raise InvalidArgument(
            "messages", f"cannot be used: the model {model.name!r} has no chat template; send text"
        )
    if not messages:
        raise InvalidArgument("messages.messages", "must not be empty")
    if len(messages) > settings.max_messages:
        raise InvalidArgument(
            "messages.messages", f"must be at most {settings.max_messages}, got {len(messages)}"
        )
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise InvalidArgument(
                f"messages.messages[{index}].role",
                f"must be one of {', '.join(ROLES)}, got {_shown(message.role)}",
            )
    if not any(message.content for message in messages):
        raise InvalidArgument("messages.messages", "must hold at least one message with content")
    _check_characters("messages.messages", characters_of(chat), settings, model)


def _check_continuation(chat: inference_pb2.ChatMessages) -> None:
    if not chat.continue_final_message:
        return
    if chat.add_generation_prompt:
        raise InvalidArgument(
            "messages.continue_final_message", "cannot be used together with add_generation_prompt: true"
        )
    if not chat.messages[-1].content.strip():
        raise InvalidArgument(
            f"messages.messages[{len(chat.messages) - 1}].content",
            "must not be empty where continue_final_message is true",
        )


def _check_characters(field: str, characters: int, settings: GatewaySettings, model: ModelFiles) -> None:
    most = min(settings.max_prompt_characters, MAX_CHARACTERS_PER_TOKEN * model.context_tokens)
    if characters > most:
        raise InvalidArgument(field, f"must be at most {most} characters in all, got {characters}")


def check_ids(field: str, ids: Sequence[int], model: ModelFiles) -> None:
    """Raise InvalidArgument if a token id is not in the model's vocabulary."""
    if ids and max(ids) >= model.vocab_size:
        index = next(index for index, token in enumerate(ids) if token >= model.vocab_size)
        raise InvalidArgument(
            f"{field}[{index}]", f"must be from 0 to {model.vocab_size - 1}, got {ids[index]}"
        )


def _check_sampling(
    sampling: inference_pb2.SamplingParams, settings: GatewaySettings, model: ModelFiles
) -> None:
    if sampling.HasField("max_tokens") and not 1 <= sampling.max_tokens <= settings.max_output_tokens:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"must be from 1 to {settings.max_output_tokens}, got {sampling.max_tokens}",
        )
    for name, bounds in BOUNDS.items():
        value = getattr(sampling, name)
        if sampling.HasField(name) and value not in bounds:  # type: ignore[arg-type]
            got = f"{value:g}" if isinstance(value, float) else value
            raise InvalidArgument(f"sampling.{name}", f"{bounds}, got {got}")
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidArgument(
            "sampling.logit_bias", f"must be at most {MAX_LOGIT_BIAS} tokens, got {len(sampling.logit_bias)}"
        )
    for token, value in sorted(sampling.logit_bias.items()):
        if token >= model.vocab_size:
            raise InvalidArgument(
                "sampling.logit_bias", f"must name token ids from 0 to {model.vocab_size - 1}, got {token}"
            )
        if not abs(value) <= MAX_BIAS:
            raise InvalidArgument(
                f"sampling.logit_bias[{token}]",
                f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, got {value:g}",
            )
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            "sampling.stop", f"must be at most {MAX_STOP_STRINGS} texts, got {len(sampling.stop)}"
        )
    _check_token_lists(sampling, model)
    for index, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidArgument(
                f"sampling.stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}"
            )


def _check_token_lists(sampling: inference_pb2.SamplingParams, model: ModelFiles) -> None:
    """Check what names tokens that end the output, or that it may not, or may only, contain."""
    words = sampling.bad_words_ids
    for name, values, most, things in (
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKENS, "token ids"),
        ("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS, "token ids"),
        ("bad_words", sampling.bad_words, MAX_BAD_WORDS, "texts"),
        ("bad_words_ids", words, MAX_BAD_WORDS_IDS - 2 * MAX_BAD_WORDS, "lists"),
    ):
        if len(values) > most:
            raise InvalidArgument(f"sampling.{name}", f"must be at most {most} {things}, got {len(values)}")
    check_ids("sampling.stop_token_ids", sampling.stop_token_ids, model)
    check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, model)
    for index, word in enumerate(words):
        if not 1 <= len(word.ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(
                f"sampling.bad_words_ids[{index}]",
                f"must have 1 to {MAX_BAD_WORD_TOKENS} token ids, got {len(word.ids)}",
            )
        check_ids(f"sampling.bad_words_ids[{index}]", word.ids, model)
    for index, text in enumerate(sampling.bad_words):
        if not text.strip() or len(text) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidArgument(
                f"sampling.bad_words[{index}]",
                f"must have 1 to {MAX_BAD_WORD_CHARACTERS} characters that are not all blanks, got {len(text)}",
            )
    single = {word.ids[0] for word in words if len(word.ids) == 1}
    if sampling.allowed_token_ids and single.issuperset(sampling.allowed_token_ids):
        raise InvalidArgument("sampling.allowed_token_ids", "must hold a token that is no bad word")


def _check_speculation(speculation: inference_pb2.Speculation, settings: GatewaySettings) -> None:
    if speculation.mode not in SpeculationMode.values():
        raise InvalidArgument("speculation.mode", f"must be MODE_AUTO or MODE_OFF, got {speculation.mode}")
    if speculation.max_draft_tokens > settings.max_draft_tokens:
        raise InvalidArgument(
            "speculation.max_draft_tokens",
            f"must be at most {settings.max_draft_tokens}, got {speculation.max_draft_tokens}",
        )
    if speculation.mode == SpeculationMode.MODE_OFF and speculation.max_draft_tokens:
        raise InvalidArgument(
            "speculation.max_draft_tokens", "must be absent or 0 when speculation.mode is MODE_OFF"
        )
    if speculation.drafter not in Drafter.values():
        raise InvalidArgument(
            "speculation.drafter", f"must be DRAFTER_MODEL or DRAFTER_LOOKUP, got {speculation.drafter}"
        )


def _check_format(request: inference_pb2.GenerateRequest) -> None:
    kind = request.output_format.WhichOneof("format")
    if kind is None:
        return
    field = f"output_format.{kind}"
    if kind == "json_object":
        if not request.output_format.json_object:
            raise InvalidArgument(field, "must be true, or absent")
    else:
        text: str = getattr(request.output_format, kind)
        if not 1 <= len(text) <= MAX_FORMAT_CHARACTERS:
            raise InvalidArgument(
                field, f"must have 1 to {MAX_FORMAT_CHARACTERS} characters, got {len(text)}"
            )
    if request.sampling.ignore_eos:
        raise InvalidArgument(
            "sampling.ignore_eos", "must be absent or false with output_format, which ends with the end token"
        )


def prompt_too_long(field: str, tokens: int, model: ModelFiles) -> InvalidArgument:
    """Return the error for a prompt that leaves no room for output."""
    return InvalidArgument(
        field,
        f"must be at most {model.context_tokens - 1} tokens, so that one output token fits in the context of "
        f"{model.context_tokens}, got {tokens}",
    )


def _shown(text: str) -> str:
    """Return a client's text for an error message: quoted, not too long."""
    return repr(text if len(text) <= 40 else text[:40] + "…")
