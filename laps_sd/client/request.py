"""The request of a call: the prompt, the options, and the message made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from operator import index
from typing import Any, Literal, SupportsIndex, TypeAlias, TypedDict, TypeVar, Unpack, cast

from google.protobuf.message import Message

from laps_sd.client.chat import ChatOptions, Fields, make_chat
from laps_sd.v1.inference_pb2 import (
    GenerateRequest,
    OutputFormat,
    SamplingParams,
    Speculation,
    TokenIds,
    TokenizeRequest,
)

__all__ = [
    "Metadata",
    "Options",
    "Prompt",
    "addresses",
    "credentials",
    "make_request",
    "make_tokenize_request",
]

Prompt: TypeAlias = str | Sequence[int] | Sequence[Fields]
Metadata: TypeAlias = Sequence[tuple[str, str]]

Made = TypeVar("Made", bound=Message)

NO_PROMPT = "a prompt is a text, a list of chat messages, or a list of token ids"
DRAFTERS = {"model": Speculation.DRAFTER_MODEL, "lookup": Speculation.DRAFTER_LOOKUP}


class SamplingOptions(TypedDict, total=False):
    """All fields of `SamplingParams`, by their names."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    min_tokens: int
    stop_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    bad_words_ids: Sequence[Sequence[int]]
    allowed_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool


class Options(SamplingOptions, ChatOptions, total=False):
    """All fields of a request except its prompt; see `GenerateRequest` for the meaning."""

    model: str
    idempotency_key: str
    priority: int
    time_limit_s: float
    deadline: datetime
    """Hard deadline by the gateway's clock, also while no client is connected.

    `timeout_s` limits the call.
    """
    speculation: Literal["auto", "off"] | int
    """Mode of speculation; a number is the longest draft in tokens."""
    drafter: Literal["model", "lookup"]
    """Source of the draft tokens."""
    output_format: OutputFormat
    expected_output_tokens: int
    workload_class: str
    conversation: str
    """Name of the conversation of which this is a turn."""
    cache_salt: str
    """What is computed for the prompt is used for requests with the same salt only."""
    keep: bool
    logprobs: int
    prompt_logprobs: int
    n: int
    """Number of outputs for the one prompt."""
    add_special_tokens: bool


def make_request(prompt: Prompt, **options: Unpack[Options]) -> GenerateRequest:
    """Return the message for a prompt and its options. Absent options, and those that are None, stay absent.

    Raises ValueError for options of a chat with another prompt, for unknown keys of messages and tools, and
    for a value that no request can hold; TypeError for unknown options, and for a prompt or a value of
    another kind.
    """
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        nearest = get_close_matches(unknown[0], Options.__annotations__, 1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise TypeError(f"unknown option {', '.join(unknown)}{hint}")
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise TypeError(NO_PROMPT)
    options = cast(Options, {name: value for name, value in options.items() if value is not None})
    sampling, speculation = _sampling(options), _speculation(options)
    request = _made(GenerateRequest, _fields(options))
    if sampling.ByteSize():
        request.sampling.CopyFrom(sampling)
    if speculation is not None:
        request.speculation.CopyFrom(speculation)
    _set_prompt(request, prompt, options)
    return request


def _sampling(options: Options) -> SamplingParams:
    values = {
        name: value for name, value in options.items() if name in SamplingParams.DESCRIPTOR.fields_by_name
    }
    for name in ("stop", "bad_words"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    if "bad_words_ids" in options:
        values["bad_words_ids"] = [TokenIds(ids=word) for word in options["bad_words_ids"]]
    return _made(SamplingParams, values)


def _speculation(options: Options) -> Speculation | None:
    """Return the options of speculation; None: none of them is given."""
    wanted, drafter = options.get("speculation", "auto"), options.get("drafter")
    if isinstance(wanted, str) and wanted not in ("auto", "off"):
        raise ValueError(f"speculation is 'auto', 'off' or a number of tokens, got {wanted!r}")
    if drafter is not None and drafter not in DRAFTERS:
        raise ValueError(f"drafter is 'model' or 'lookup', got {drafter!r}")
    if wanted == "auto" and drafter is None:
        return None
    made = Speculation()
    if wanted == "off":
        made.mode = Speculation.MODE_OFF
    elif wanted != "auto":
        made = _made(Speculation, {"mode": Speculation.MODE_AUTO, "max_draft_tokens": wanted})
    if drafter is not None:
        made.drafter = DRAFTERS[drafter]
    return made


def _fields(options: Options) -> dict[str, Any]:
    """Return the fields of a request that are neither parameters of sampling or speculation nor its prompt."""
    fields: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if name in GenerateRequest.DESCRIPTOR.fields_by_name and name != "speculation"
    }
    if "time_limit_s" in options:
        fields["time_limit_ms"] = round(options["time_limit_s"] * 1000)
    if "deadline" in options:
        fields["deadline_unix_ms"] = round(options["deadline"].timestamp() * 1000)
    return fields


def _set_prompt(request: GenerateRequest, prompt: Prompt, options: Options) -> None:
    if not isinstance(prompt, str):
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if len(messages) == len(prompt):
            request.messages.CopyFrom(make_chat(messages, options))
            return
    if unused := ChatOptions.__annotations__.keys() & options.keys():
        raise ValueError(f"{', '.join(sorted(unused))}: only for a prompt of chat messages")
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.CopyFrom(_made(TokenIds, {"ids": _ids(prompt)}))


def _ids(prompt: Sequence[object]) -> list[int]:
    """Return the token ids of a prompt, which may be integers of NumPy or torch."""
    try:
        return [index(cast(SupportsIndex, part)) for part in prompt]
    except TypeError:
        raise TypeError(NO_PROMPT) from None


def _made(kind: type[Made], values: Mapping[str, Any]) -> Made:
    """Return a message with these fields. The error of a value that does not fit names its field."""
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            try:
                kind(**{name: value})
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        raise


def make_tokenize_request(prompt: str | Sequence[Fields]) -> TokenizeRequest:
    """Return the message that requests the token ids of a text or of chat messages."""
    made = make_request(prompt)
    if isinstance(prompt, str):
        return TokenizeRequest(text=made.text)
    return TokenizeRequest(messages=made.messages)


def credentials(api_key: str | None, metadata: Metadata) -> tuple[tuple[str, str], ...]:
    """Return the metadata of every call: the caller's, and the API key if there is one. Raise ValueError for a
    key that no header can hold; gRPC would raise an internal error at the first call.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError(
            "an API key has printable ASCII characters only; this one has others, such as a line break at its end"
        )
    return (*metadata, ("authorization", f"Bearer {api_key}")) if api_key else tuple(metadata)


def addresses(address: str | Sequence[str]) -> list[str]:
    """Return one or several addresses as a list. Raise ValueError if there is none, or a URL where gRPC would look for a
    host of that name.
    """
    found = [address] if isinstance(address, str) else list(address)
    if not found:
        raise ValueError("a client needs the address of a gateway")
    for one in found:
        scheme, separator, rest = one.partition("://")
        if separator and scheme.lower() in ("grpc", "grpcs", "http", "https"):
            secure = " with tls=Tls()" if scheme.lower() in ("grpcs", "https") else ""
            raise ValueError(f"the address of a gateway is host:port, such as {rest}{secure}, got {one!r}")
    return found
