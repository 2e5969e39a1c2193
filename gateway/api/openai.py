"""Conversion of OpenAI's JSON to our messages and back: chat completions, completions, models, errors. Pure.

A body is read field by field. Fields that the engine supports are used; fields that merely label a request
are accepted and ignored; every other field is refused by name, unless its value requests nothing (`null`,
`tools: []`, `n: 1` …). An answer never silently leaves out a requested feature.

Bounds are those of `validation`, which gets the same message from every protocol. This module checks only
shapes, and refuses numbers of items above the largest possible setting before it makes a message of each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias

import grpc

from gateway.api.ends import OPENAI
from gateway.calls.calls import Event
from gateway.model.detokenizer import TokenDecoder
from gateway.model.tokenizer import ModelFiles
from laps_sd.contract.acceptance import mean_acceptance_length
from laps_sd.contract.ends import End
from laps_sd.errors import Cancelled, InvalidArgument, LapsSdError, ResourceExhausted, Unavailable
from laps_sd.service.ends import end_of_reason
from laps_sd.v1 import inference_pb2

__all__ = [
    "DONE",
    "MAX_PROMPTS",
    "Kind",
    "Order",
    "Reply",
    "error_json",
    "http_status",
    "model_json",
    "models_json",
    "read_body",
    "read_chat",
    "read_completion",
    "read_header",
    "read_ttl_s",
    "retry_headers",
    "sse",
]

Json: TypeAlias = dict[str, Any]
Kind = Literal["chat", "text"]

DONE = b"data: [DONE]\n\n"
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""A string of JSON. An unterminated string matches too, so that it is scanned only once."""
MAX_PROMPTS = 1024
MAX_ITEMS = 65_536
MAX_TOKEN_IDS = 1_048_576
"""Maximum number of prompts; of messages, their parts and stop texts; of token ids of all prompts
together."""
MAX_VALUES = MAX_TOKEN_IDS + MAX_ITEMS
"""Maximum number of values of all lists and objects of a body, counted before it is decoded."""
UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
INT32 = 2**31 - 1

NOTHING: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that the engine does not support, with the values (besides null) that do not request them."""

GUIDED = ("guided_json", "guided_regex", "guided_grammar")
"""vLLM's names for output formats that OpenAI does not have."""

LABELS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
"""Fields that label a request and have no effect on it."""

OURS_TO_THEIRS = (("sampling.", ""), ("messages.messages", "messages"), ("token_ids.ids", "prompt"),
                  ("output_format.", "response_format."))  # fmt: skip
ROLES = {"developer": "system"}
"""Roles that a template has under another name."""

STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP statuses of codes, as in google.rpc.Code; every other code is 500."""

CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)")
UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


# ---- a request


@dataclass(frozen=True, slots=True)
class Order:
    """The parsed content of a body."""

    kind: Kind
    requests: Sequence[inference_pb2.GenerateRequest]
    """One request per prompt; they differ only in the prompt."""
    stream: bool
    include_usage: bool
    continuous_usage: bool

    @property
    def choices_per_prompt(self) -> int:
        """Return the number of outputs for each prompt."""
        return self.requests[0].n if self.requests[0].HasField("n") else 1


def read_body(raw: bytes, most_fields: int) -> Json:
    """Return the object in a body. Raises InvalidArgument; for too many values before any value is made,
    because an empty list takes three bytes here and fifty in memory."""
    if not _few(raw, most_fields) and not _few(STRING.sub(b"", raw), most_fields):
        raise InvalidArgument(
            "",
            f"the body must be JSON of at most {most_fields} lists, objects and fields of them, and {MAX_VALUES} values",
        )
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument("", f"the body must be JSON: {reason}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("", f"the body must be a JSON object, got {_kind(value)}")
    return value


def _few(raw: bytes, most_fields: int) -> bool:
    """Return whether JSON is within the bounds even if the contents of its strings are counted as JSON."""
    fields = raw.count(b"[") + raw.count(b"{") + raw.count(b":")
    return fields <= most_fields and raw.count(b",") <= MAX_VALUES


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


class _Fields:
    """A reader of an object's fields by type; null counts as absent. `finish` refuses the fields that were
    not read."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._body.get(name)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        return None if value is None else _text(name, value)

    def flag(self, name: str) -> bool | None:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgument(name, f"must be true or false, got {_kind(value)}")
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(name, f"must be a number, got {_kind(value)}")
        if not abs(value) <= 3e38:  # the range of a float field of the message
            raise InvalidArgument(name, "must be a number of ordinary size")
        return float(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidArgument(name, f"must be a whole number, got {_kind(value)}")
        if value is not None and not least <= value <= most:
            raise InvalidArgument(name, f"must be from {least} to {most}, got {_shown(value)}")
        return value

    def finish(self) -> None:
        """Raise InvalidArgument for fields that would change the answer and are not supported."""
        for name, value in self._body.items():
            if value is None or name in self._read or name in LABELS:
                continue
            if name not in NOTHING:
                raise InvalidArgument(name[:80], "is not a field that this server knows; leave it out")
            if value not in NOTHING[name]:
                raise InvalidArgument(name, "is not supported: the engine does not have it; leave it out")


def read_chat(body: Json) -> Order:
    """Parse the body of a chat completion."""
    fields = _Fields(body)
    request = _common(fields)
    alternatives = fields.integer("top_logprobs", 0, UINT32)
    if fields.flag("logprobs"):
        request.logprobs = alternatives or 0
    elif alternatives:
        raise InvalidArgument("top_logprobs", "needs logprobs: true")
    most = [fields.integer(name, 1, UINT32) for name in ("max_completion_tokens", "max_tokens")]
    chosen = next((value for value in most if value is not None), None)
    if chosen is not None:
        request.sampling.max_tokens = chosen
    messages = fields.get("messages")
    if not isinstance(messages, list):
        raise InvalidArgument("messages", f"must be a list of messages, got {_kind(messages)}")
    _check_count("messages", messages, MAX_ITEMS)
    request.messages.SetInParent()
    for index, message in enumerate(messages):
        request.messages.messages.append(_message(f"messages[{index}]", message))
    return _order("chat", fields, [request])


def read_completion(body: Json) -> Order:
    """Parse the body of a completion of text or token ids; each of several prompts becomes a request."""
    fields = _Fields(body)
    request = _common(fields)
    max_tokens = fields.integer("max_tokens", 1, UINT32)
    if max_tokens is not None:
        request.sampling.max_tokens = max_tokens
    if fields.get("logprobs") is not False:
        alternatives = fields.integer("logprobs", 0, UINT32)
        if alternatives is not None:
            request.logprobs = alternatives
    requests = []
    for prompt in _prompts(fields.get("prompt")):
        one = inference_pb2.GenerateRequest()
        one.CopyFrom(request)
        if isinstance(prompt, str):
            one.text = prompt
        else:
            one.token_ids.ids.extend(prompt)
        requests.append(one)
    return _order("text", fields, requests)


def _order(kind: Kind, fields: _Fields, requests: Sequence[inference_pb2.GenerateRequest]) -> Order:
    stream = fields.flag("stream") or False
    options = fields.get("stream_options")
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise InvalidArgument("stream_options", f"must be an object, got {_kind(options)}")
    if options and not stream:
        raise InvalidArgument("stream_options", "needs stream: true")
    wanted = {name: _Fields(options).flag(name) for name in options}
    unknown = next((name for name in wanted if name not in STREAM_OPTIONS and wanted[name]), None)
    if unknown is not None:
        raise InvalidArgument(f"stream_options.{unknown[:40]}", "is not known here; leave it out")
    fields.finish()
    return Order(
        kind,
        requests,
        stream=stream,
        include_usage=bool(wanted.get("include_usage")),
        continuous_usage=bool(wanted.get("include_usage") and wanted.get("continuous_usage_stats")),
    )


STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def _common(fields: _Fields) -> inference_pb2.GenerateRequest:
    """Return the fields that both endpoints have; absent fields stay absent."""
    stop = fields.get("stop")
    if stop is None:
        stop = []
    elif isinstance(stop, str):
        stop = [stop]
    elif not isinstance(stop, list):
        raise InvalidArgument("stop", f"must be a text or a list of texts, got {_kind(stop)}")
    _check_count("stop", stop, MAX_ITEMS)
    seed = fields.integer("seed", -(2**63), UINT64)
    return inference_pb2.GenerateRequest(
        model=fields.text("model") or "",
        sampling=inference_pb2.SamplingParams(
            temperature=fields.number("temperature"),
            top_p=fields.number("top_p"),
            top_k=_top_k(fields),
            min_p=fields.number("min_p"),
            repetition_penalty=fields.number("repetition_penalty"),
            presence_penalty=fields.number("presence_penalty"),
            frequency_penalty=fields.number("frequency_penalty"),
            logit_bias=_logit_bias(fields.get("logit_bias")),
            # OpenAI's seeds are signed.
            seed=None if seed is None else seed % 2**64,
            stop=[_text(f"stop[{index}]", one) for index, one in enumerate(stop)],
            ignore_eos=fields.flag("ignore_eos"),
        ),
        priority=fields.integer("priority", -INT32, INT32),
        time_limit_ms=fields.integer("time_limit_ms", 0, UINT32),
        deadline_unix_ms=fields.integer("deadline_unix_ms", 0, UINT64),
        expected_output_tokens=fields.integer("expected_output_tokens", 0, UINT32),
        workload_class=fields.text("workload_class") or "",
        n=fields.integer("n", 0, UINT32),
        output_format=_output_format(fields),
    )


def _logit_bias(value: object) -> dict[int, float]:
    """Return the biases by token id; JSON's keys are texts."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument("logit_bias", f"must be an object of token ids, got {_kind(value)}")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32):
            raise InvalidArgument("logit_bias", f"must name token ids, got {_shown(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 3e38:
            raise InvalidArgument(f"logit_bias[{key}]", f"must be a number, got {_kind(bias)}")
        found[int(key)] = float(bias)
    return found


def _output_format(fields: _Fields) -> inference_pb2.OutputFormat | None:
    """Return the format in OpenAI's `response_format`, or in one of vLLM's `guided_json`, `guided_regex`,
    `guided_grammar`."""
    guided = [name for name in GUIDED if fields.get(name) is not None]
    wanted = fields.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "text":
        wanted = None
    if len(guided) + (wanted is not None) > 1:
        raise InvalidArgument(guided[0], "cannot be used beside another output format")
    if guided:
        return _guided(guided[0], fields.get(guided[0]))
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise InvalidArgument("response_format", f"must be an object, got {_kind(wanted)}")
    match wanted.get("type"):
        case "json_object":
            return inference_pb2.OutputFormat(json_object=True)
        case "json_schema":
            holder = wanted.get("json_schema")
            if not isinstance(holder, dict):
                raise InvalidArgument(
                    "response_format.json_schema", f"must be an object with a schema, got {_kind(holder)}"
                )
            schema = holder.get("schema")
            if not isinstance(schema, dict):
                raise InvalidArgument(
                    "response_format.json_schema.schema", f"must be a JSON schema, got {_kind(schema)}"
                )
            # The order of properties is the order of output. `strict` is not needed: it always holds here.
            return inference_pb2.OutputFormat(json_schema=json.dumps(schema))
        case other:
            raise InvalidArgument(
                "response_format.type", f"must be text, json_object or json_schema, got {_shown(other)}"
            )


def _guided(name: str, value: object) -> inference_pb2.OutputFormat:
    if name == "guided_json" and isinstance(value, dict):
        return inference_pb2.OutputFormat(json_schema=json.dumps(value))
    text = _text(name, value)
    match name:
        case "guided_json":
            return inference_pb2.OutputFormat(json_schema=text)
        case "guided_regex":
            return inference_pb2.OutputFormat(regex=text)
        case _:
            return inference_pb2.OutputFormat(grammar=text)


def _top_k(fields: _Fields) -> int | None:
    """Return top_k; vLLM's -1 for "all" becomes our 0."""
    top_k = fields.integer("top_k", -1, UINT32)
    return 0 if top_k == -1 else top_k


def _message(where: str, message: object) -> inference_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidArgument(where, f"must be an object with role and content, got {_kind(message)}")
    for name in ("tool_calls", "function_call", "tool_call_id", "audio", "refusal"):
        if message.get(name):
            raise InvalidArgument(f"{where}.{name}", "is not supported: the engine does not have it")
    role = _text(f"{where}.role", message.get("role"))
    return inference_pb2.ChatMessage(
        role=ROLES.get(role, role), content=_content(f"{where}.content", message.get("content"))
    )


def _content(where: str, content: object) -> str:
    """Return the text of a content: a text, or parts that are all text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(where, content)
    if not isinstance(content, list):
        raise InvalidArgument(where, f"must be a text or a list of parts, got {_kind(content)}")
    _check_count(where, content, MAX_ITEMS)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidArgument(f"{where}[{index}]", f"must be an object, got {_kind(part)}")
        if part.get("type") != "text":
            raise InvalidArgument(
                f"{where}[{index}].type",
                f"must be text, all that the engine reads, got {_shown(part.get('type'))}",
            )
        texts.append(_text(f"{where}[{index}].text", part.get("text")))
    return "".join(texts)


def _prompts(prompt: object) -> Sequence[str | list[int]]:
    """Return the prompts of a text, of token ids, or of a list of either."""
    if isinstance(prompt, str):
        return [_text("prompt", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidArgument("prompt", f"must be a text, token ids, or a list of them, got {_kind(prompt)}")
    if not isinstance(prompt[0], str | list):
        _check_count("prompt", prompt, MAX_TOKEN_IDS)
        return [_ids("prompt", prompt)]
    _check_count("prompt", prompt, MAX_PROMPTS)
    ids = sum(len(one) for one in prompt if isinstance(one, list))
    if ids > MAX_TOKEN_IDS:
        raise InvalidArgument("prompt", f"must be at most {MAX_TOKEN_IDS} token ids in all, got {ids}")
    return [
        _ids(f"prompt[{index}]", one) if isinstance(one, list) else _text(f"prompt[{index}]", one)
        for index, one in enumerate(prompt)
    ]


def _ids(where: str, ids: Sequence[object]) -> list[int]:
    found = []
    for index, one in enumerate(ids):
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one <= UINT32:
            raise InvalidArgument(f"{where}[{index}]", f"must be a token id, got {_shown(one)}")
        found.append(one)
    return found


def _check_count(where: str, items: Sequence[object], most: int) -> None:
    if len(items) > most:
        raise InvalidArgument(where, f"must be at most {most} items, got {len(items)}")


def read_header(name: str, value: str) -> str:
    """Return the text of a header, whose bytes may not be UTF-8. Raises InvalidArgument."""
    return _text(name, value)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(where, f"must be a text, got {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates: only JSON and headers can hold them
        raise InvalidArgument(where, "must be valid Unicode") from None
    return value


def read_ttl_s(name: str, value: str, most_s: float) -> float | None:
    """Return the seconds of a header that holds a duration in Go's notation ("1500ms", "1m30s"); None without
    the header."""
    if not value:
        return None
    parts = DURATION.findall(value[:64])
    if "".join(parts) != value:
        raise InvalidArgument(name, f"must be a duration such as 1500ms or 2s, got {_shown(value)}")
    seconds = sum(float(number) * UNIT_S[unit] for number, unit in (_split(part) for part in parts))
    if not 0 < seconds <= most_s:
        raise InvalidArgument(name, f"must be above 0 and at most {most_s:g} s, got {value}")
    return seconds


def _split(part: str) -> tuple[str, str]:
    number = part.rstrip("nuµmsh")
    return number, part[len(number) :]


def _kind(value: object) -> str:
    """Return the JSON name of a value's type."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "…"


# ---- a reply


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: list[tuple[int, inference_pb2.TokenLogprobs]] = field(default_factory=list)
    """Tokens whose log probabilities have not been sent."""
    text: TokenDecoder | None = None
    characters: int = 0
    """Characters of the text of the tokens whose log probabilities have been sent."""
    tokens: int = 0
    end: inference_pb2.Ended | None = None


class Reply:
    """One answer: in chunks (`opening`, `chunks`, `closing`), or whole (`add` every event, then `whole`)."""

    def __init__(
        self,
        order: Order,
        accepted: Sequence[inference_pb2.Accepted],
        *,
        created_unix_s: int,
        model: ModelFiles,
    ) -> None:
        self._order = order
        self._files = model
        self._chat = order.kind == "chat"
        self._model = accepted[0].model
        self._created = created_unix_s
        self._prompt_tokens = sum(one.prompt_tokens for one in accepted[:: order.choices_per_prompt])
        self._choices = [_Choice() for _ in accepted]
        self.id = accepted[0].request_id
        """Request id of the first choice; every other call of LAPS-SD accepts it."""

    def add(self, choice: int, event: Event) -> None:
        """Add an event of a choice. Raises the failure of a failed choice."""
        kept = self._choices[choice]
        if isinstance(event, inference_pb2.Delta):
            kept.tokens += len(event.token_ids)
            kept.logprobs.extend(zip(event.token_ids, event.logprobs, strict=False))
            if not self._order.stream:
                kept.texts.append(event.text)
            return
        end = end_of_reason(event.finish_reason)
        if end is End.CANCELLED:
            raise Cancelled(f"request {event.request_id} was cancelled")
        if OPENAI[end] is None:
            raise LapsSdError(event.error or "the request failed")
        kept.end = event

    def whole(self) -> Json:
        """Return the answer of a call without stream; every choice has ended."""
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.texts)
            content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(choice),
                    "finish_reason": _finish(choice),
                }
            )
        return {
            **self._envelope("chat.completion" if self._chat else "text_completion"),
            "choices": choices,
            "usage": self._usage(),
            "metrics": self._metrics(),
        }

    def opening(self) -> Iterator[Json]:
        """Return the chunks before any output has arrived."""
        if self._chat:
            for index in range(len(self._choices)):
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunks(self, choice: int, event: Event) -> Iterator[Json]:
        """Return the chunks of one event, and add the event."""
        self.add(choice, event)
        if isinstance(event, inference_pb2.Delta):
            if event.text:
                yield self._chunk(
                    choice, {"delta": {"content": event.text}} if self._chat else {"text": event.text}, None
                )
        else:
            yield self._chunk(
                choice, {"delta": {}} if self._chat else {"text": ""}, _finish(self._choices[choice])
            )

    def closing(self) -> Iterator[Json]:
        """Return the last chunk, if it was requested."""
        if self._order.include_usage:
            yield {
                **self._envelope("chat.completion.chunk" if self._chat else "text_completion"),
                "choices": [],
                "usage": self._usage(),
                "metrics": self._metrics(),
            }

    def _chunk(self, index: int, content: Json, finish_reason: str | None) -> Json:
        chunk = {
            **self._envelope("chat.completion.chunk" if self._chat else "text_completion"),
            "choices": [
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(self._choices[index]),
                    "finish_reason": finish_reason,
                }
            ],
        }
        if self._order.include_usage:
            chunk["usage"] = self._usage() if self._order.continuous_usage else None
        return chunk

    def _logprobs(self, choice: _Choice) -> Json | None:
        """Return the log probabilities that have not been sent; None if there are none. Unknown ones are
        null, as OpenAI writes the first token's."""
        if not self._order.requests[0].HasField("logprobs"):
            return None
        told, choice.logprobs = choice.logprobs, []
        if self._chat:
            return {
                "content": [
                    {
                        **self._token(token, one.logprob, known=not one.unknown),
                        "top_logprobs": [self._token(each.token_id, each.logprob) for each in one.top],
                    }
                    for token, one in told
                ]
            }
        if choice.text is None:
            choice.text = TokenDecoder(self._files.decode, self._files.silent_ids)
        offsets = []
        for token, _ in told:
            offsets.append(choice.characters)
            choice.characters += len(choice.text.feed([token]))
        return {
            "tokens": [self._name(token, "bytes:") for token, _ in told],
            "token_logprobs": [None if one.unknown else one.logprob for _, one in told],
            "top_logprobs": [
                {self._name(each.token_id, "bytes:"): each.logprob for each in one.top} for _, one in told
            ],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float, *, known: bool = True) -> Json:
        return {
            "token": self._name(token),
            "logprob": logprob if known else None,
            "bytes": list(self._files.pieces.bytes_of(token)),
        }

    def _name(self, token: int, before: str = "") -> str:
        """Return a token's text. Part of a character is written as its bytes, as OpenAI does: `\\xe2\\x82`,
        in completions after `bytes:`."""
        octets = self._files.pieces.bytes_of(token)
        try:
            return octets.decode()
        except UnicodeDecodeError:
            return before + "".join(f"\\x{octet:02x}" for octet in octets)

    def _envelope(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self) -> Json:
        completion_tokens = sum(choice.tokens for choice in self._choices)
        cached = sum(choice.end.usage.cached_prompt_tokens for choice in self._choices if choice.end)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _metrics(self) -> Json:
        """Return the speculation metrics under vLLM's names, and the times, which vLLM does not have."""
        ends = [choice.end for choice in self._choices if choice.end is not None]
        drafts = sum(end.speculation.drafts for end in ends)
        drafted = sum(end.speculation.drafted for end in ends)
        accepted = sum(end.speculation.accepted for end in ends)
        metrics: Json = {
            "speculative_decoding": {
                "mean_acceptance_length": mean_acceptance_length(accepted, drafts),
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "num_spec_steps": drafts,
                "num_draft_tokens": drafted,
                "num_accepted_draft_tokens": accepted,
            }
        }
        if len(ends) == 1:
            timing = ends[0].timing
            metrics["timing"] = {
                "queued_s": timing.queued_s,
                "first_token_s": timing.first_token_s,
                "total_s": timing.total_s,
                "preemptions": timing.preemptions,
            }
        return metrics


def _finish(choice: _Choice) -> str | None:
    assert choice.end is not None, "only what has ended has a reason"
    return OPENAI[end_of_reason(choice.end.finish_reason)]


def sse(value: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def models_json(model: ModelFiles, created_unix_s: int) -> Json:
    """Return the list of models."""
    return {"object": "list", "data": [model_json(model, created_unix_s)]}


def model_json(model: ModelFiles, created_unix_s: int) -> Json:
    """Return the entry of one model."""
    return {
        "id": model.name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "laps-sd",
        "max_model_len": model.context_tokens,
    }


# ---- an error


def http_status(error: LapsSdError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, InvalidArgument) and error.violations[0][0] == "model":
        return 404
    return STATUSES.get(error.code, 500)


def error_json(error: LapsSdError) -> Json:
    """Return an error in OpenAI's shape; fields have the client's names."""
    status = http_status(error)
    message, param = error.message, None
    if isinstance(error, InvalidArgument):
        named = [(_their_name(name), text) for name, text in error.violations]
        message = "; ".join(f"{name} {text}" if name else text for name, text in named)
        param = named[0][0] or None
    code = "model_not_found" if param == "model" else CODES.get(status)
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 499:
        kind = "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _their_name(name: str) -> str:
    if name in ("text", "token_ids"):
        return "prompt"
    for ours, theirs in OURS_TO_THEIRS:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


def retry_headers(error: LapsSdError) -> dict[str, str]:
    """Return the headers with the time to retry after: in whole seconds for HTTP, and in milliseconds, which
    OpenAI's clients read first."""
    if not isinstance(error, ResourceExhausted | Unavailable) or error.retry_after_s is None:
        return {}
    return {
        "Retry-After": str(max(1, math.ceil(round(error.retry_after_s, 3)))),
        "Retry-After-Ms": str(max(1, round(error.retry_after_s * 1000))),
    }
