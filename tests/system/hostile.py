"""Bad input, made by the thousand: bytes that do not parse as messages, messages that are not valid requests,
and the allowed answers of a call.

Everything comes from a seeded `random.Random`, so a run can be repeated. The parser is its own oracle: an
input whose bytes do not parse here does not parse in the server either.
"""

from __future__ import annotations

import asyncio
import functools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from laps_sd.errors import DETAILS_KEY
from laps_sd.keda import externalscaler_pb2 as scaler_pb
from laps_sd.v1 import admin_pb2
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import open_inference_pb2 as oip
from tests.system.hostile_formats import HOSTILE
from tests.system.tally import Verdict

PATIENCE_S = 60.0
"""Time of a call before it counts as hanging; calls that are to be cut off have their own deadline."""
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
SCALER = scaler_pb.DESCRIPTOR.services_by_name["ExternalScaler"]
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
VOCABULARY = 1024
CONTEXT = 2048

Code = grpc.StatusCode
Metadata = tuple[tuple[str, str | bytes], ...]
INVALID = frozenset({Code.INVALID_ARGUMENT})
ANSWERED = frozenset({Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS})
"""Allowed results of a message that parses."""


@dataclass(frozen=True, slots=True)
class Input:
    """One call, and its allowed results."""

    kind: str
    method: str
    payload: bytes
    expected: frozenset[Code]
    field: str = ""
    """Start of the name that the violation must have."""
    metadata: Metadata = ()
    timeout_s: float = PATIENCE_S
    heavy: bool = False

    def __str__(self) -> str:
        return f"{self.kind} to {self.method} with {self.payload[:160]!r}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a call."""

    code: Code
    message: str = ""
    violations: tuple[tuple[str, str], ...] = ()


def complaint(sent: Input, answer: Answer) -> str | None:
    """Return the fault of this answer; None: no fault."""
    if answer.code is Code.UNAVAILABLE and "does not name (yet)" in answer.message:
        # Ids of gateways look like this, and another gateway may know the shard: here it is the same as
        # unknown.
        return None if Code.NOT_FOUND in sent.expected else "took it for an id that some gateway issued"
    if answer.code not in sent.expected:
        return f"ended with {answer.code.name} ({answer.message[:200]})"
    if answer.code is not Code.INVALID_ARGUMENT:
        return None
    if not answer.violations:
        return f"no field violation came with {answer.message[:200]!r}"
    name, description = answer.violations[0]
    if sent.field and not name.startswith(sent.field):
        return f"the violation names {name!r} instead of {sent.field!r}"
    unreadable = "no valid message" in description
    if not unreadable and not (name and ("must" in description or "cannot" in description)):
        return f"field and limit are not named: {name!r}, {description[:200]!r}"
    return None


# -- calls ---------------------------------------------------------------------------------------------------


class Caller:
    """A client that sends raw bytes, over channels that every input shares."""

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = channels
        self._next = 0
        self._streaming = {
            f"/{service.full_name}/{method.name}": method.server_streaming
            for service in (SERVICE, SCALER)
            for method in service.methods
        }

    async def judged(self, sent: Input) -> Verdict:
        """Judge the answer to one input, for `send_all`."""
        answer = await self.call(sent)
        return Verdict(answer.code.name, complaint(sent, answer))

    async def call(self, sent: Input) -> Answer:
        """Return the answer; raise TimeoutError when gRPC itself does not return."""
        self._next += 1
        channel = self._channels[self._next % len(self._channels)]
        arguments: dict[str, Any] = {"timeout": sent.timeout_s, "metadata": sent.metadata or None}
        async with asyncio.timeout(min(sent.timeout_s, PATIENCE_S) + 30.0):
            try:
                if self._streaming.get(sent.method, False):
                    async for _ in channel.unary_stream(sent.method)(sent.payload, **arguments):
                        pass
                else:
                    await channel.unary_unary(sent.method)(sent.payload, **arguments)
            except grpc.aio.AioRpcError as error:
                return Answer(error.code(), error.details() or "", violations(error))
        return Answer(Code.OK)


def violations(error: grpc.aio.AioRpcError) -> tuple[tuple[str, str], ...]:
    """Return field and description of each violation, from the google.rpc details."""
    found: list[tuple[str, str]] = []
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            for packed in status_pb2.Status.FromString(value).details:
                detail = error_details_pb2.BadRequest()
                if packed.Unpack(detail):
                    found += [(item.field, item.description) for item in detail.field_violations]
    return tuple(found)


def channels(address: str, count: int) -> list[grpc.aio.Channel]:
    """Return separate connections that send any bytes."""
    options = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_metadata_size", 1 << 20),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return [grpc.aio.insecure_channel(address, options=options) for _ in range(count)]


# -- messages by reflection ----------------------------------------------------------------------------------

INTEGERS = (
    0,
    1,
    2,
    7,
    63,
    64,
    127,
    128,
    255,
    1023,
    1024,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)
FLOATS = (
    float("nan"),
    float("inf"),
    -float("inf"),
    -1.0,
    -0.0,
    0.0,
    1e-45,
    0.5,
    1.0,
    100.5,
    3.4e38,
    1e-300,
    1.7e308,
)
TEXTS = (
    "", " ", "x", "\0", "\r\n", "a b", "s0.aaaa", "s0.", ".", "s9.zzzz", "../../x", "{s0}", "*", "%s%n", "é😀\u202e", "\ufffd",
    "🏴" * 40, "a" * 256, "A" * 257, "' OR 1", "\x7f\x80", "ID" * 2000, "__proto__", "leader", ":request:", "\U0010ffff",
)  # fmt: skip
BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}

Hints = dict[str, Sequence[Any]]
"""Field name → valid values, used at times, so that messages pass the first check."""


def random_message(
    rng: random.Random, made: Message, hints: Hints | None = None, *, depth: int = 0, filled: float = 0.4
) -> Message:
    """Fill `made` with extreme values, field by field by its descriptor."""
    hints = hints or {}
    descriptor: Descriptor = made.DESCRIPTOR
    for about in descriptor.fields:
        if rng.random() > filled:
            continue
        if about.message_type is not None and about.message_type.GetOptions().map_entry:
            _fill_map(rng, made, about, hints, depth)
        elif about.is_repeated:
            count = rng.choice((1, 1, 2, 3, 20)) if depth < 3 else 1
            for _ in range(count):
                if about.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                    if depth < 4:
                        random_message(
                            rng, getattr(made, about.name).add(), hints, depth=depth + 1, filled=filled
                        )
                else:
                    getattr(made, about.name).append(_value(rng, about, hints))
        elif about.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth < 4:
                inner = getattr(made, about.name)
                inner.SetInParent()
                random_message(rng, inner, hints, depth=depth + 1, filled=filled)
        else:
            setattr(made, about.name, _value(rng, about, hints))
    return made


def _fill_map(rng: random.Random, made: Message, about: FieldDescriptor, hints: Hints, depth: int) -> None:
    key, value = (about.message_type.fields_by_name[name] for name in ("key", "value"))
    names = hints.get(f"keys of {about.name}", TEXTS)
    for _ in range(rng.choice((1, 1, 2, 20))):
        at = rng.choice(names) if key.type == FieldDescriptor.TYPE_STRING else _value(rng, key, hints)
        if value.message_type is None:
            getattr(made, about.name)[at] = _value(rng, value, hints)
        else:
            random_message(rng, getattr(made, about.name)[at], hints, depth=depth + 1, filled=0.9)


def spoil(rng: random.Random, made: Message, times: int = 1) -> None:
    """Give this many fields of a correct message an extreme value each, at any depth."""
    for _ in range(times):
        target = made
        about = rng.choice(target.DESCRIPTOR.fields)
        while about.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            inner = getattr(target, about.name)
            if about.message_type.GetOptions().map_entry:
                _fill_map(rng, target, about, {}, 3)
                break
            if about.is_repeated:
                target = rng.choice(inner) if inner and rng.random() < 0.9 else inner.add()
            else:
                target = inner
                target.SetInParent()
            if not target.DESCRIPTOR.fields:
                break
            about = rng.choice(target.DESCRIPTOR.fields)
        else:
            value = _value(rng, about, {})
            if about.is_repeated:
                getattr(target, about.name).append(value)
            else:
                setattr(target, about.name, value)


def _value(rng: random.Random, about: FieldDescriptor, hints: Hints) -> Any:
    hint = hints.get(about.name)
    if hint is not None and rng.random() < 0.7:
        return rng.choice(hint)
    kind = about.cpp_type
    if kind in BOUNDS:
        low, high = BOUNDS[kind]
        value = rng.choice(INTEGERS) * rng.choice((1, 1, -1))
        return min(max(value, low), high)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        value = rng.choice(FLOATS)
        return value if kind == FieldDescriptor.CPPTYPE_DOUBLE or abs(value) < 3.5e38 else 3.4e38
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 99, -1, 2**31 - 1, -(2**31)))
    if about.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 32, 33, 5000)))
    return rng.choice(TEXTS)


# -- wire bytes ----------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Return the protobuf encoding; also of more than 64 bits."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    """Return the bytes of field number and wire type."""
    return varint(number << 3 | wire_type)


def delimited(number: int, data: bytes) -> bytes:
    """Return a string, bytes or message field."""
    return tag(number, 2) + varint(len(data)) + data


def many_fields(octets: int) -> list[bytes]:
    """Generate requests of about this many bytes, each of tiny fields: messages, texts, entries of a map,
    unknown ones.
    """
    return [
        delimited(3, delimited(1, b"") * (octets // 2)),
        delimited(5, delimited(5, b"") * (octets // 2)),
        delimited(5, b"".join(delimited(12, b"\x08" + varint(token)) for token in range(octets // 7))),
        (tag(1000, 0) + b"\1") * (octets // 3),
    ]


def path(method: str) -> str:
    """Return the HTTP/2 path of a method of the public service."""
    return f"/{SERVICE.full_name}/{method}"


# -- the generator -------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, bytes], bytes]


def truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 3, 9, 40, 400)))


def flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed.insert(at, rng.randrange(256))
            case 2 if len(changed) > 1:
                del changed[at]
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 8)]
    return bytes(changed)


def wrong_wire_type(rng: random.Random, data: bytes) -> bytes:
    number, wire_type = rng.randint(0, 14), rng.randrange(8)
    body = {0: varint(rng.choice(INTEGERS)), 1: rng.randbytes(8), 2: varint(3) + b"abc", 5: rng.randbytes(4)}
    return data + tag(number, wire_type) + body.get(wire_type, b"")


def nested(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice((1, 50, 99, 101, 1000, 20_000))
    if rng.random() < 0.5:  # groups of an unknown field; some are never closed
        closing = tag(1000, 4) * (depth if rng.random() < 0.7 else depth - 1)
        return data + tag(1000, 3) * depth + closing
    inner = b""
    for _ in range(min(depth, 500)):
        inner = delimited(3, inner)
    return data + inner


def unknown_fields(rng: random.Random, data: bytes) -> bytes:
    number = rng.choice((100, 19_000, 2**28, 2**29 - 1))
    return data + delimited(number, rng.randbytes(5)) * rng.choice((1, 10, 2000))


def long_lengths(rng: random.Random, data: bytes) -> bytes:
    length = rng.choice((2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**70, len(data) + 1))
    return data + tag(rng.randint(1, 15), 2) + varint(length) + b"abc"


def broken_text(rng: random.Random, data: bytes) -> bytes:
    bad = rng.choice(
        (
            b"\xff",
            b"\xc3",
            b"\xed\xa0\x80",
            b"\xf8\x88\x80\x80\x80",
            b"\xc0\x80",
            b"ok\x80",
            b"\xf4\x90\x80\x80",
        )
    )
    number = rng.choice((1, 2, 6, 11))
    wrapped = delimited(5, delimited(6, bad)) if rng.random() < 0.3 else delimited(number, bad)
    return data + wrapped


DAMAGES: tuple[Damage, ...] = (
    truncated, noise, flipped, flipped, wrong_wire_type, nested, unknown_fields, long_lengths, broken_text,
)  # fmt: skip


def plain_request(rng: random.Random, **fields: Any) -> pb.GenerateRequest:
    """Return a correct request with little to do."""
    sampling = pb.SamplingParams(
        max_tokens=rng.randint(1, 3), temperature=0.8, top_p=0.9, seed=rng.randrange(2**64)
    )
    return pb.GenerateRequest(text="A plain prompt", sampling=sampling, **fields)


Change = Callable[[pb.GenerateRequest], Any]


def _stops(*texts: str) -> tuple[Change]:
    return (lambda request: request.sampling.stop.extend(texts),)


def _set(name: str, *values: Any) -> tuple[Change, ...]:
    def change(request: pb.GenerateRequest, value: Any) -> None:
        *outer, last = name.split(".")
        target: Any = request
        for part in outer:
            target = getattr(target, part)
        setattr(target, last, value)

    return tuple(functools.partial(change, value=value) for value in values)


def _ids(*ids: int) -> tuple[Change]:
    return (lambda request: request.token_ids.CopyFrom(pb.TokenIds(ids=ids)),)


def _messages(*pairs: tuple[str, str]) -> tuple[Change]:
    made = pb.ChatMessages(messages=[pb.ChatMessage(role=role, content=content) for role, content in pairs])
    return (lambda request: request.messages.CopyFrom(made),)


NAN, INF = float("nan"), float("inf")
OUT_OF_BOUNDS: tuple[tuple[str, tuple[Change, ...]], ...] = (
    ("model", _set("model", "gpt-5", "\0", "LAPS-SD-DEMO", "laps-sd-demo ", "é" * 5000)),
    ("prompt", (lambda request: request.ClearField("text"),)),
    ("text", _set("text", "")),
    ("text", _set("text", "word " * 3000, "\0" * 9000, "\U0001f600" * 2000)),
    ("token_ids.ids", _ids()),
    ("token_ids.ids[", _ids(1, VOCABULARY)),
    ("token_ids.ids[", _ids(2**32 - 1)),
    ("token_ids.ids", _ids(*range(CONTEXT // 2), *range(CONTEXT // 2))),
    ("messages.messages", _messages()),
    ("messages.messages", _messages(("user", ""), ("assistant", ""))),
    ("messages.messages[1].role", _messages(("user", "hi"), ("root", "hi"))),
    ("messages.messages[0].role", _messages(("\0" * 3000, "hi"))),
    ("messages.messages", _messages(*[("user", "x")] * 8193)),
    ("messages", _messages(("user", "word " * 3000))),
    ("sampling.max_tokens", _set("sampling.max_tokens", 0, 32_769, 2**31, 2**32 - 1)),
    ("sampling.max_tokens", _set("sampling.max_tokens", CONTEXT, 32_768)),
    ("sampling.temperature", _set("sampling.temperature", NAN, INF, -INF, -1.0, -1e-30, 1e30, 100.5)),
    ("sampling.top_p", _set("sampling.top_p", NAN, INF, -INF, 0.0, -0.5, 1.001, 3e38)),
    ("sampling.top_k", _set("sampling.top_k", 2**31, 2**32 - 1)),
    ("sampling.min_p", _set("sampling.min_p", NAN, INF, -0.5, 1.001)),
    ("sampling.repetition_penalty", _set("sampling.repetition_penalty", NAN, INF, 0.0, -1.0, 101.0)),
    ("sampling.presence_penalty", _set("sampling.presence_penalty", NAN, -INF, 2.5)),
    ("sampling.frequency_penalty", _set("sampling.frequency_penalty", NAN, INF, -2.5)),
    ("sampling.logit_bias", (lambda request: request.sampling.logit_bias.update({2**32 - 1: 1.0}),)),
    ("sampling.logit_bias", (lambda request: request.sampling.logit_bias.update(dict.fromkeys(range(1025), 1.0)),)),
    ("sampling.logit_bias[5]", (lambda request: request.sampling.logit_bias.update({5: NAN}),)),
    ("output_format.json_object", _set("output_format.json_object", False)),
    ("output_format.json_schema", _set("output_format.json_schema", "", "{", "[" * 60_000, '{"type": 7}', "x" * 70_000)),
    ("output_format.regex", _set("output_format.regex", "", "(", "a{3,1}", "[" * 5000)),
    ("output_format.grammar", _set("output_format.grammar", "", "start", "start: start2", "\0" * 100)),
    *((f"output_format.{kind}", _set(f"output_format.{kind}", text)) for (kind, text), _ in HOSTILE.values()),
    ("speculation.drafter", _set("speculation.drafter", 3, 99, -1)),
    ("sampling.stop", _stops(*["stop"] * 10_000)),
    ("sampling.stop", _stops(*[""] * 10_000)),
    ("sampling.stop[1]", _stops("fine", "")),
    ("sampling.stop[0]", _stops("x" * 257)),
    ("speculation.mode", _set("speculation.mode", 3, 99, -1, 2**31 - 1)),
    ("speculation.max_draft_tokens", _set("speculation.max_draft_tokens", 65, 2**32 - 1)),
    ("idempotency_key", _set("idempotency_key", "k" * 129, "\0", "a\nb", "\u202e\u2066", "\x7f", "😀" * 5000)),
    ("conversation", _set("conversation", "c" * 129)),
    ("cache_salt", _set("cache_salt", "c" * 129)),
    ("workload_class", _set("workload_class", "c" * 65, "two words", "é", "\0", "a\n", "{}")),
    ("priority", _set("priority", 101, -101, 2**31 - 1, -(2**31))),
    ("time_limit_ms", _set("time_limit_ms", 0, 86_400_001, 2**32 - 1)),
    ("deadline_unix_ms", _set("deadline_unix_ms", 0, 1_763_000_000, 2**64 - 1)),
    ("expected_output_tokens", _set("expected_output_tokens", 0)),
    ("logprobs", _set("logprobs", 21, 2**32 - 1)),
)  # fmt: skip
"""One fault each: the field that must be named, and ways to produce the fault."""

ODD_KEYS = (
    "a b",
    "é😀",
    "{x}",
    "a:b:c",
    "*",
    "k" * 128,
    "-",
    "0",
    "__proto__",
    "../..",
    "%00",
    "nil",
    "s0.aaaa",
    '"',
    "\\",
)
BAD_IDS = (
    "",
    ".",
    "s0",
    "s0.",
    ".a",
    "s0.a b",
    "s0.a\n",
    "é.a",
    "s0.a.b",
    "s 0.a",
    "s0:x",
    "s0.é",
    "x" * 129,
    "s0.\0",
    "{s0}.a",
)
UNKNOWN_METHODS = (
    path("Nope"), path("generate"), path(""), path("Generate") + "/x", "/laps_sd.v1.Nobody/Generate", "/", "//", "/x" * 900,
    "/laps_sd.v1.Admin/ListQueue", "/laps_sd.v1.GatewayLink/Connect", "/%00/%ff", "/laps_sd.v2.Inference/Generate",
)  # fmt: skip


def parsed_or_not(kind: str, method: str, message_type: type[Message], payload: bytes) -> Input:
    """Return an input of bytes of which only the parser can decide whether they are a message."""
    try:
        message_type.FromString(payload)
    except DecodeError:
        return Input(kind, method, payload, INVALID)
    return Input(kind, method, payload, ANSWERED)


class Generator:
    """Source of unlimited inputs, the same for the same seed. `finished`: ids of requests that have ended."""

    def __init__(self, seed: int, finished: Sequence[str]) -> None:
        self._rng = random.Random(seed)
        self._finished = finished
        self._makers: tuple[tuple[Callable[[], Input], int], ...] = (
            (self._damaged, 46),
            (self._out_of_bounds, 24),
            (self._reflected, 12),
            (self._bad_id, 6),
            (self._odd_metadata, 4),
            (self._unknown_method, 3),
            (self._odd_key, 2),
            (self._odd_deadline, 2),
            (self._odd_place, 2),
        )

    def inputs(self, count: int) -> Iterator[Input]:
        """Yield this many inputs; every 500th is large."""
        makers = [maker for maker, _ in self._makers]
        weights = [weight for _, weight in self._makers]
        for number in range(count):
            yield self._large() if number % 500 == 250 else self._rng.choices(makers, weights)[0]()

    def _valid(self, name: str) -> Message:
        rng = self._rng
        request_id = rng.choice(self._finished)
        match name:
            case "Generate" | "GenerateStream":
                # The request would be refused, so that an input that survives the damage seldom runs.
                request = plain_request(rng, workload_class="chat", logprobs=99, idempotency_key="")
                request.sampling.stop.append("\n\n")
                return request
            case "Resume":
                return pb.ResumeRequest(request_id=request_id, cursor=pb.Cursor(next_token=1, text_offset=2))
            case "Cancel":
                return pb.CancelRequest(request_id=request_id)
            case "Explain":
                return pb.ExplainRequest(request_id=request_id)
        return pb.ListModelsRequest()

    def _any_method(self) -> tuple[str, type[Message]]:
        method = self._rng.choice([*SERVICE.methods, SERVICE.methods[0], SERVICE.methods[1]])
        return method.name, method.input_type._concrete_class

    def _damaged(self) -> Input:
        name, message_type = self._any_method()
        damage = self._rng.choice(DAMAGES)
        payload = damage(self._rng, self._valid(name).SerializeToString())
        return parsed_or_not(damage.__name__, path(name), message_type, payload)

    def _generate(self) -> str:
        return path(self._rng.choice(("Generate", "GenerateStream")))

    def _out_of_bounds(self) -> Input:
        name, changes = self._rng.choice(OUT_OF_BOUNDS)
        request = plain_request(self._rng)
        self._rng.choice(changes)(request)
        return Input("out of bounds", self._generate(), request.SerializeToString(), INVALID, field=name)

    def _reflected(self) -> Input:
        name, message_type = self._any_method()
        hints: Hints = {
            "request_id": self._finished,
            "max_tokens": (2,),
            "model": ("",),
        }
        payload = random_message(self._rng, message_type(), hints).SerializeToString()
        return parsed_or_not("reflected", path(name), message_type, payload)

    def _bad_id(self) -> Input:
        name = self._rng.choice(("Resume", "Cancel", "Explain"))
        message_type = SERVICE.methods_by_name[name].input_type._concrete_class
        if self._rng.random() < 0.3:
            unknown = self._rng.choice(("s0.nobody", "s1.nobody", "nowhere.x", f"s0.{'a' * 125}"))
            return Input("unknown id", path(name), message_type(request_id=unknown).SerializeToString(),
                         frozenset({Code.NOT_FOUND}))  # fmt: skip
        payload = message_type(request_id=self._rng.choice(BAD_IDS)).SerializeToString()
        return Input("bad id", path(name), payload, INVALID, field="request_id")

    def _odd_place(self) -> Input:
        numbers = (0, 1, 2**31, 2**32 - 1)
        cursor = pb.Cursor(next_token=self._rng.choice(numbers), text_offset=self._rng.choice(numbers))
        request = pb.ResumeRequest(request_id=self._rng.choice(self._finished), cursor=cursor)
        return Input("odd cursor", path("Resume"), request.SerializeToString(), frozenset({Code.OK}))

    def _odd_metadata(self) -> Input:
        rng = self._rng
        choices: tuple[Metadata, ...] = (
            (("laps-sd-tenant", rng.choice(("", "x" * 500, "a,b", "*", "anonymous")))),
            (("traceparent", rng.choice(("", "00", "zz" * 40, "00-" + "0" * 32 + "-" + "0" * 16 + "-00")))),
            tuple(("x-same", str(number)) for number in range(100)),
            (("x-blob-bin", rng.randbytes(rng.choice((0, 1, 2000)))),),
            (("grpc-status-details-bin", rng.randbytes(50)),),
            (("idempotency-key", "x"), ("authorization", "Bearer " + "x" * 1000), ("te", "nonsense")),
            (("x-big", "v" * 200_000),),
            (("x-big-bin", rng.randbytes(60_000)),),
            tuple((name, "x") for name in [rng.choice(("laps-sd-tenant", "authorization"))] * 2),
        )  # type: ignore[assignment]
        chosen: Any = rng.choice(choices)
        metadata: Metadata = (chosen,) if isinstance(chosen[0], str) else chosen
        large = sum(len(value) for _, value in metadata) > 7000
        names = [name for name, _ in metadata if not name.startswith("x-")]
        expected = (
            {Code.RESOURCE_EXHAUSTED} if large else {Code.OK} if len(set(names)) == len(names) else INVALID
        )
        name = rng.choice(("ListModels", "Generate", "GenerateStream"))
        payload = b"" if name == "ListModels" else plain_request(rng).SerializeToString()
        return Input("odd metadata", path(name), payload, frozenset(expected), metadata=metadata, heavy=large)

    def _unknown_method(self) -> Input:
        rng = self._rng
        payload = rng.choice((b"", rng.randbytes(30), plain_request(rng).SerializeToString()))
        return Input("unknown method", rng.choice(UNKNOWN_METHODS), payload, frozenset({Code.UNIMPLEMENTED}))

    def _odd_key(self) -> Input:
        request = plain_request(self._rng, idempotency_key=self._rng.choice(ODD_KEYS))
        expected = frozenset({Code.OK, Code.ALREADY_EXISTS})
        return Input("odd key", self._generate(), request.SerializeToString(), expected)

    def _odd_deadline(self) -> Input:
        timeout_s = self._rng.choice((1e-9, 1e-6, 1e-4, 0.001, 0.003, 0.01, 1e6, 1e9))
        payload = plain_request(self._rng).SerializeToString()
        expected = frozenset({Code.OK, Code.DEADLINE_EXCEEDED} if timeout_s < 1 else {Code.OK})
        return Input("odd deadline", self._generate(), payload, expected, timeout_s=timeout_s)

    def _large(self) -> Input:
        rng = self._rng
        request = plain_request(rng)
        expected, name = INVALID, ""
        match rng.randrange(8):
            case 0:
                request.text, expected = "x" * (MAX_MESSAGE_BYTES + 1), frozenset({Code.RESOURCE_EXHAUSTED})
            case 1:
                request.text, name = "x" * 1_000_001, "text"
            case 2:
                request.text, name = "\U0001f600" * 1_000_000, "text"
            case 3:
                request.token_ids.ids.extend([5] * 1_000_000)
                name = "token_ids.ids"
            case 4:
                request.messages.messages.extend([pb.ChatMessage()] * 50_000)
                name = "messages.messages"
            case 5 | 6:
                bomb = rng.choice(many_fields(rng.choice((300_000, 4_000_000))))
                metadata: Metadata = rng.choice(((), (("authorization", "Bearer nobody's"),)))
                return Input(
                    "many fields",
                    self._generate(),
                    bomb,
                    INVALID,
                    field="message",
                    metadata=metadata,
                    heavy=True,
                )
            case _:
                request.sampling.stop.extend(["s" * 300] * 10_000)
                name = "sampling.stop"
        return Input("large", self._generate(), request.SerializeToString(), expected, field=name, heavy=True)


# -- the Open Inference Protocol ------------------------------------------------------------------------------

KSERVE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
MODEL = "laps-sd-demo"


def infer(*texts: bytes) -> oip.ModelInferRequest:
    """Return a correct request with little to do."""
    made = oip.ModelInferRequest(model_name=MODEL, id="mine")
    made.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)]).contents.bytes_contents.extend(
        texts
    )
    made.parameters["max_tokens"].int64_param = 2
    return made


InferChange = Callable[[oip.ModelInferRequest], Any]


def _parameter(name: str, kind: str, *values: Any) -> tuple[InferChange, ...]:
    def change(request: oip.ModelInferRequest, value: Any) -> None:
        setattr(request.parameters[name], kind, value)

    return tuple(functools.partial(change, value=value) for value in values)


def _tensor(**fields: Any) -> tuple[InferChange]:
    return (lambda request: request.inputs[0].MergeFrom(oip.ModelInferRequest.InferInputTensor(**fields)),)


def _raw(*contents: bytes) -> tuple[InferChange]:
    return (lambda request: request.raw_input_contents.extend(contents),)


INFER_OUT_OF_BOUNDS: tuple[tuple[str, tuple[InferChange, ...]], ...] = (
    ("model_name", (lambda request: request.ClearField("model_name"),)),
    ("model", (lambda request: setattr(request, "model_name", "gpt-5"),)),
    ("inputs", (lambda request: request.ClearField("inputs"),)),
    ("inputs", (lambda request: request.inputs.add(name="text_input"),)),
    ("inputs", _tensor(name="x")),
    ("inputs[0].datatype", _tensor(datatype="FP32")),
    ("inputs[0].shape", _tensor(shape=[2])),
    ("inputs[0].shape", _tensor(shape=[0])),
    ("inputs[0].shape", _tensor(shape=[2**63 - 1] * 7)),
    ("inputs[0].shape", _tensor(shape=[1] * 8)),
    ("inputs[0]", (lambda request: request.inputs[0].contents.bytes_contents.append(b"\xff"),
                   lambda request: request.inputs[0].contents.bytes_contents.extend([b"x"] * 2000))),
    ("raw_input_contents", _raw(b"\xff\xff\xff\xff") + _raw(b"\1\0\0") + _raw(b"\2\0\0\0a") + _raw(b"", b"")),
    ("inputs[0]", _raw(b"") + _raw(b"\1\0\0\0\xff") + _raw(b"\0\0\0\0" * 2000)),
    ("outputs", (lambda request: request.outputs.add(name="logits"),)),
    ("parameters[", _parameter("nonsense", "int64_param", 1) + _parameter("x" * 5000, "bool_param", True)),
    ("parameters[", _parameter("n", "int64_param", 1) + _parameter("stream", "bool_param", True)),
    ("", _parameter("max_tokens", "int64_param", 0, -1, 2**40) + _parameter("max_tokens", "string_param", "2")),
    ("", _parameter("temperature", "double_param", NAN, INF, -INF, -1.0, 1e30) + _parameter("temperature", "bool_param", True)),
    ("", _parameter("top_p", "double_param", NAN, 0.0, 2.0) + _parameter("seed", "double_param", 1.5, NAN, INF)),
    ("", _parameter("stop", "int64_param", 5) + _parameter("stop", "string_param", "", "x" * 257)),
    ("", _parameter("priority", "int64_param", 101, -101, 2**62) + _parameter("time_limit_ms", "uint64_param", 0, 2**64 - 1)),
    ("", _parameter("workload_class", "string_param", "two words", "\0", "c" * 65)),
)  # fmt: skip
"""One fault each: the start of the field that must be named, and ways to produce the fault."""


class KServeGenerator:
    """A generator for the methods of KServe's protocol, like Generator."""

    def __init__(self, seed: int, finished: Sequence[str] = ()) -> None:
        self._rng = random.Random(seed)

    def inputs(self, count: int) -> Iterator[Input]:
        """Yield this many inputs; every 250th is large."""
        makers = (self._damaged, self._out_of_bounds, self._reflected)
        for number in range(count):
            yield self._large() if number % 250 == 125 else self._rng.choices(makers, (40, 40, 20))[0]()

    def _to(self, name: str) -> str:
        return f"/{KSERVE.full_name}/{name}"

    def _damaged(self) -> Input:
        # The request would be refused, so that an input that survives the damage seldom runs.
        request = infer(b"A prompt", b"Another")
        request.parameters["n"].int64_param = 1
        damage = self._rng.choice(DAMAGES)
        payload = damage(self._rng, request.SerializeToString())
        return parsed_or_not(damage.__name__, self._to("ModelInfer"), oip.ModelInferRequest, payload)

    def _out_of_bounds(self) -> Input:
        name, changes = self._rng.choice(INFER_OUT_OF_BOUNDS)
        request = infer(b"A prompt")
        self._rng.choice(changes)(request)
        return Input(
            "out of bounds", self._to("ModelInfer"), request.SerializeToString(), INVALID, field=name
        )

    def _reflected(self) -> Input:
        method = self._rng.choice([*KSERVE.methods, *[KSERVE.methods_by_name["ModelInfer"]] * 5])
        hints: Hints = {
            "name": ("text_input", MODEL),
            "model_name": (MODEL,),
            "datatype": ("BYTES",),
            "shape": (1, 2),
            "keys of parameters": ("max_tokens", "seed", "stop", "temperature", "top_k", "priority"),
            "int64_param": (1, 2),
        }
        message_type = method.input_type._concrete_class
        payload = random_message(self._rng, message_type(), hints).SerializeToString()
        return parsed_or_not("reflected", self._to(method.name), message_type, payload)

    def _large(self) -> Input:
        request, name = infer(b"A prompt"), ""
        match self._rng.randrange(6):
            case 0:
                request.inputs[0].shape.extend([2**62] * 100_000)
                name = "inputs[0].shape"
            case 1:
                request.raw_input_contents.append(bytes(2_000_000))
                name = "inputs[0]"
            case 2:
                request.inputs[0].contents.bytes_contents.extend([b""] * 60_000)
                name = "inputs[0]"
            case 3:
                for number in range(15_000):
                    request.parameters[f"p{number}"].int64_param = number
                name = "parameters["
            case 4:
                request.inputs.extend([oip.ModelInferRequest.InferInputTensor()] * 200_000)
                name = "message"
            case _:
                request.inputs[0].contents.bytes_contents[0] = b"x" * 4_000_000
                name = "text"
        return Input(
            "large", self._to("ModelInfer"), request.SerializeToString(), INVALID, field=name, heavy=True
        )


class SchedulerGenerator:
    """A generator of the calls of operators and autoscalers to a scheduler, like Generator. `finished` as
    there.
    """

    def __init__(self, seed: int, finished: Sequence[str]) -> None:
        self._rng = random.Random(seed)
        self._finished = finished

    def inputs(self, count: int) -> Iterator[Input]:
        """Yield this many inputs; every 500th is large."""
        makers = (self._damaged, self._reflected, self._out_of_bounds)
        for number in range(count):
            yield self._large() if number % 500 == 250 else self._rng.choices(makers, (45, 45, 10))[0]()

    def _method(self) -> tuple[str, type[Message]]:
        service = self._rng.choice((ADMIN, SCALER))
        method = self._rng.choice(list(service.methods))
        return f"/{service.full_name}/{method.name}", method.input_type._concrete_class

    def _made(self, message_type: type[Message]) -> Message:
        hints: Hints = {
            "request_id": self._finished,
            "tenant": ("", "anonymous"),
            "limit": (0, 1, 10_000),
            "keys of scalerMetadata": ("pool", "targetBacklogSeconds", "other"),
            "value": ("demo", "5", "nan", "-inf", "1e400", "0x10", "1_0"),
        }
        return random_message(self._rng, message_type(), hints, filled=0.8)

    def _sent(self, kind: str, method: str, message_type: type[Message], payload: bytes) -> Input:
        sent = parsed_or_not(kind, method, message_type, payload)
        if method.endswith("/StreamIsActive"):  # it lasts until its caller leaves
            leaves = sent.expected | {Code.DEADLINE_EXCEEDED}
            return replace(sent, expected=frozenset(leaves), timeout_s=self._rng.choice((0.001, 0.05)))
        return sent

    def _damaged(self) -> Input:
        method, message_type = self._method()
        damage = self._rng.choice(DAMAGES)
        payload = damage(self._rng, self._made(message_type).SerializeToString())
        return self._sent(damage.__name__, method, message_type, payload)

    def _reflected(self) -> Input:
        method, message_type = self._method()
        return self._sent("reflected", method, message_type, self._made(message_type).SerializeToString())

    def _out_of_bounds(self) -> Input:
        scaled = f"/{SCALER.full_name}/GetMetricSpec"
        choices: tuple[tuple[str, str, Message], ...] = (
            ("limit", f"/{ADMIN.full_name}/ListQueue", admin_pb2.ListQueueRequest(limit=10_001)),
            (
                "request_id",
                f"/{ADMIN.full_name}/ExplainRequest",
                admin_pb2.AdminExplainRequest(request_id="s0." + "x" * 300),
            ),
            (
                "scalerMetadata.pool",
                scaled,
                scaler_pb.ScaledObjectRef(scalerMetadata={"pool": self._rng.choice(("x", "X" * 5000))}),
            ),
            (
                "scalerMetadata.targetBacklogSeconds",
                scaled,
                scaler_pb.ScaledObjectRef(
                    scalerMetadata={"targetBacklogSeconds": self._rng.choice(("0", "nan", "x" * 5000))}
                ),
            ),
        )
        name, method, message = self._rng.choice(choices)
        return Input("out of bounds", method, message.SerializeToString(), INVALID, field=name)

    def _large(self) -> Input:
        megabytes = "é" * 4_000_000
        choices: tuple[tuple[str, Message, frozenset[Code]], ...] = (
            ("Admin/ExplainRequest", admin_pb2.AdminExplainRequest(request_id=megabytes), INVALID),
            (
                "Admin/DrainWorker",
                admin_pb2.DrainWorkerRequest(worker=megabytes),
                frozenset({Code.NOT_FOUND}),
            ),
            (
                "Admin/ListWorkers",
                admin_pb2.DrainWorkerRequest(worker="x" * (MAX_MESSAGE_BYTES + 1)),
                frozenset({Code.RESOURCE_EXHAUSTED}),
            ),
        )
        name, message, expected = self._rng.choice(choices)
        method = f"/laps_sd.v1.{name}"
        return Input("large", method, message.SerializeToString(), expected, heavy=True)


# -- below gRPC ----------------------------------------------------------------------------------------------

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header_block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return HPACK without an index and without Huffman; texts of up to 126 bytes each, which
    is enough here.
    """
    out = bytearray()
    for name, value in headers:
        assert len(name) < 127 and len(value) < 127
        out += bytes((0, len(name))) + name + bytes((len(value),)) + value
    return bytes(out)


def grpc_headers(method: bytes, **changed: bytes | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of a gRPC client; `changed` by name with _ for -, None leaves one out."""
    headers: dict[bytes, bytes | None] = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": method,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    headers |= {name.replace("_", "-").encode(): value for name, value in changed.items()}
    return [(name, value) for name, value in headers.items() if value is not None]


def conversation(*frames: bytes) -> bytes:
    """Return a client's side of a connection, from its first byte."""
    return PREFACE + frame(SETTINGS, 0, 0, b"") + b"".join(frames)


def raw_conversations() -> Iterator[tuple[str, bytes]]:
    """Yield conversations that a client library would never send, with a name each. Each opened stream is
    ended from the client's side.
    """
    generate = path("Generate").encode()
    body = plain_request(random.Random(1)).SerializeToString()
    message = b"\0" + struct.pack(">I", len(body)) + body

    def call(data: bytes, **changed: bytes | None) -> bytes:
        block = header_block(grpc_headers(generate, **changed))
        return conversation(frame(HEADERS, END_HEADERS, 1, block), frame(DATA, END_STREAM, 1, data))

    for timeout in (
        b"",
        b"0n",
        b"-1S",
        b"abc",
        b"1",
        b"99999999H",
        b"100000000H",
        b"9" * 60 + b"S",
        b"1e9S",
        b"1n",
        b"5X",
        b"\xff",
    ):
        yield f"grpc-timeout {timeout[:12]!r}", call(message, grpc_timeout=timeout)
    for length in (2**32 - 1, 2**31, MAX_MESSAGE_BYTES + 1, len(body) + 1):
        yield f"a length prefix of {length} octets", call(b"\0" + struct.pack(">I", length) + body)
    yield "compressed without a codec", call(b"\1" + message[1:])
    yield "compressed with nonsense", call(b"\1" + message[1:], grpc_encoding=b"gzip")
    yield "an unknown codec", call(b"\1" + message[1:], grpc_encoding=b"nonsense")
    yield "flags that do not exist", call(b"\xff" + message[1:])
    yield "half a length prefix", call(message[:3])
    yield "no message at all", call(b"")
    yield "two messages", call(message * 2)
    yield "a wrong content type", call(message, content_type=b"text/html")
    yield "no te", call(message, te=None)
    yield (
        "no path",
        conversation(frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block([(b":method", b"POST")]))),
    )
    yield "GET", call(message, **{":method": b"GET"})
    yield "broken HPACK", conversation(frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\xff" * 40))
    yield "data before headers", conversation(frame(DATA, END_STREAM, 1, message))
    yield "an even stream", conversation(frame(DATA, END_STREAM, 2, message))
    yield "a giant window", conversation(frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff") * 3)
    yield "a settings frame of the wrong size", PREFACE + frame(SETTINGS, 0, 0, b"abc")
    yield "HTTP/1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield "TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400)
    yield "noise", random.Random(2).randbytes(5000)
    yield "half a preface", PREFACE[:9]


async def converse(address: str, octets: bytes, *, patience_s: float, idle_s: float = 0.5) -> str:
    """Send, and read until the server ends the stream or the connection. Raise TimeoutError if it never does.

    A conversation that opens no stream (no DATA frame in `octets`) need not be answered: silence is fine
    after `idle_s`.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(octets)
        await writer.drain()
        opens_a_stream = octets.startswith(PREFACE) and frame(HEADERS, END_HEADERS, 1, b"")[3:9] in octets
        async with asyncio.timeout(patience_s if opens_a_stream else idle_s):
            return await _end_of_stream(reader)
    except TimeoutError:
        if opens_a_stream:
            raise
        return "silence"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.close()


async def _end_of_stream(reader: asyncio.StreamReader) -> str:
    while True:
        head = await reader.readexactly(9)
        kind, flags = head[3], head[4]
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind in (HEADERS, DATA) and flags & END_STREAM:
            return "ended"
        if kind == RST_STREAM:
            return "reset"


# -- processes -----------------------------------------------------------------------------------------------


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20
