"""Bad input over HTTP, made by the thousand: bodies that are not JSON, JSON that is not a request, headers,
and bytes that are not HTTP.

Bytes are sent unchanged over plain sockets: a client library would not send most of them. Seeded, so a run
can be repeated; `json` is the oracle for valid JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.system.hostile import flipped, noise, truncated
from tests.system.hostile_formats import HOSTILE
from tests.system.tally import Tally, Verdict, send_all

PATIENCE_S = 60.0
SILENCE_S = 0.2
"""Time after which the sending side is closed, if bytes that are not a request get no answer."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_BODY_BYTES = 4 * 1024 * 1024
"""Limit in a gateway's default settings."""
NEITHER = frozenset({200, 400})
REFUSED = frozenset({400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 431, 501, 505})
"""Allowed statuses for bytes that are not a proper request. 500 is never among them."""
CLOSED = 0
"""The connection ended without an answer."""


@dataclass(frozen=True, slots=True)
class Input:
    """Bytes of one request, and the allowed answers."""

    kind: str
    octets: bytes
    expected: frozenset[int]
    param: str = ""
    """Start of the field that the error must name."""
    ours: bool = True
    """The answer is the gateway's own, in OpenAI's shape; otherwise that of the HTTP library below it."""
    last: bool = False
    """The connection gets no more input. A silent server may wait for more, so the sending side is closed."""
    heavy: bool = False

    def __str__(self) -> str:
        return f"{self.kind} with {self.octets[:300]!r}"


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes


def complaint(sent: Input, answer: Answer) -> str | None:
    """Return the fault of this answer; None: no fault."""
    if answer.status not in sent.expected:
        return f"was answered with {answer.status} {answer.body[:200]!r}"
    if answer.status in (CLOSED, 200) or not sent.ours:
        return None
    try:
        error = json.loads(answer.body)["error"]
        named, message = error["param"], error["message"]
    except (ValueError, KeyError, TypeError):
        return f"the error has not OpenAI's shape: {answer.body[:200]!r}"
    if not message or "internal error" in message:
        return f"says {message!r}"
    if sent.param and not str(named).startswith(sent.param):
        return f"names {named!r} instead of {sent.param!r}: {message[:200]}"
    if "x-request-id" not in answer.headers:
        return "has no x-request-id"
    return None


# -- a connection ----------------------------------------------------------------------------------------------------------


class Connection:
    """A connection that is kept while the server keeps it."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def judged(self, sent: Input) -> Verdict:
        """Judge the answer to one input, for `send_all`."""
        answer = await self.exchange(sent)
        return Verdict(str(answer.status or "closed"), complaint(sent, answer))

    async def exchange(self, sent: Input) -> Answer:
        """Send, and read the answer. Raise TimeoutError when none comes and the connection stays."""
        kept = self._open is not None
        answer = await self._exchange(sent)
        # A server may close a connection that it had kept, as any client must know (RFC 9112, section 9.3.1).
        return await self._exchange(sent) if kept and answer.status == CLOSED else answer

    async def _exchange(self, sent: Input) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            if self._open is None:
                self._open = await asyncio.open_connection(self._host, self._port)
            reader, writer = self._open
            reading = asyncio.create_task(_read_answer(reader))
            try:
                writer.write(sent.octets)
                sending = asyncio.create_task(writer.drain())
                try:
                    await asyncio.wait({reading}, timeout=SILENCE_S if sent.last else None)
                    if not reading.done():
                        writer.write_eof()
                    answer = await reading
                finally:
                    for task in (sending, reading):
                        task.cancel()
                    await asyncio.gather(sending, reading, return_exceptions=True)
            except (ConnectionError, asyncio.IncompleteReadError):
                answer = Answer(CLOSED, {}, b"")
            except BaseException:
                self.close()
                raise
        if sent.last or answer.status == CLOSED or answer.headers.get("connection", "").lower() == "close":
            self.close()
        return answer

    def close(self) -> None:
        """End it; the next exchange opens another."""
        if self._open is not None:
            self._open[1].transport.abort()
            self._open = None


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    """Return one response, without those that only announce another one (1xx)."""
    while True:
        status = int((await _line(reader)).split(b" ", 2)[1])
        headers: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.decode("latin1").partition(":")
            headers[name.lower()] = value.strip()
        if status >= 200:
            break
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await _line(reader), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await _line(reader)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Answer(status, headers, body)


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n"))[:-2]


async def send_all_over(host: str, port: int, inputs: Iterator[Input], *, at_once: int = 24) -> Tally:
    """Send everything, over this many connections."""
    connections = [Connection(host, port) for _ in range(at_once)]
    try:
        return await send_all(inputs, [connection.judged for connection in connections])
    finally:
        for connection in connections:
            connection.close()


# -- requests --------------------------------------------------------------------------------------------------------------


def request(
    path: str, body: bytes, *headers: bytes, method: str = "POST", kind: bytes = b"application/json"
) -> bytes:
    """Return the request as any client sends it."""
    first = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n".encode()
    return (
        first + b"".join(header + b"\r\n" for header in (b"Content-Type: " + kind, *headers)) + b"\r\n" + body
    )


def chunked(path: str, *chunks: bytes) -> bytes:
    """Return a request with a body of these chunks, unchanged."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"".join(chunks)


def chunk(data: bytes) -> bytes:
    """Return one chunk, with its size."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0.5},
    TEXT: {"prompt": "hi", "max_tokens": 2, "top_p": 0.9, "stop": ["\n\n"]},
}

SCHEMAS = [
    hostile
    for name, hostile in HOSTILE.items()
    if hostile[0][0] == "json_schema" and name != "a blank of its own"  # means nothing inside a schema
]

REFUSED_FIELD = {"tools": ["x"]}
"""Fields in damaged bodies, so that an input that survives the damage seldom runs."""

HUGE = "9" * 4000
OUT_OF_BOUNDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("max_tokens", ("0", "-1", "1.5", "true", '"2"', "[]", "{}", "1e300", "32769", "4294967296", HUGE)),
    ("temperature", ('"hot"', "-1", "1e999", "-1e999", "101", "true", "[0]", "{}", HUGE, "-0.001")),
    ("top_p", ("0", "-0.5", "1.01", '"x"', "1e999", "false")),
    ("top_k", ("-2", "2147483648", "1.5", '"x"', "true")),
    ("seed", ("1.5", '"x"', "18446744073709551616", "-9223372036854775809", "true", "[1]")),
    ("stop", ("5", "{}", "true", "[1]", '["a", null]', '[""]', '["' + "x" * 257 + '"]', '["\\ud800"]')),
    ("stop", (json.dumps(["a"] * 17), json.dumps(["a"] * 70_000))),
    ("min_tokens", ("-1", "1.5", "true", '"2"', "[]", "32769", "2147483648", "4294967296", HUGE)),
    (
        "stop_token_ids",
        ("5", "{}", "[-1]", "[true]", '["a"]', "[9999999]", "[4294967296]", json.dumps([1] * 65)),
    ),
    (
        "allowed_token_ids",
        ("5", "[null]", "[1.5]", "[9999999]", json.dumps([1] * 1025), json.dumps([1] * 70_000)),
    ),
    (
        "bad_words",
        ("5", "[5]", '[""]', '["  "]', '["' + "x" * 65 + '"]', json.dumps(["a"] * 129), '["\\ud800"]'),
    ),
    (
        "bad_words_ids",
        ("[5]", "[[]]", "[[9999999]]", '["a"]', json.dumps([[1]] * 129), json.dumps([[1] * 65])),
    ),
    ("structured_outputs", ("5", "{}", "[]", '{"choice": []}', '{"regex": 5}', '{"json": 5}', '{"x": 1}')),
    ("structured_outputs", ('{"regex": "a", "grammar": "b"}', '{"regex": "("}', '{"structural_tag": "x"}')),
    ("n", ("0", "-1", "17", '"x"', "1.5", "true", HUGE)),
    ("priority", ("101", "-101", '"x"', "2147483648", "1.5")),
    ("time_limit_ms", ("0", "-1", "4294967296", '"x"')),
    ("deadline_unix_ms", ("0", "-1", "1763000000", "18446744073709551616", '"x"')),
    ("expected_output_tokens", ("0", "-1", '"x"')),
    ("conversation", ("5", "[]", json.dumps("c" * 129))),
    ("cache_salt", ("5", "{}", json.dumps("c" * 129))),
    ("workload_class", ("5", '"two words"', '"é"', json.dumps("c" * 65), '"\\u0000"', '"\\udfff"')),
    ("model", ("5", '"gpt-5"', '"\\ud800"', "[]", json.dumps("m" * 5000))),
    ("stream", ('"yes"', "1", "[]")),
    ("stream_options", ("[]", '"x"', '{"include_usage": true}')),
    ("tools", ('[{"type": "function"}]', "5", '[{"type": "x", "function": {"name": "f"}}]', "[null]")),
    ("logit_bias", ('{"1": 500}', '{"x": 5}', '{"-1": 5}', "[]", '{"1": "x"}', '{"9999999": 1}')),
    (
        "response_format",
        (
            '{"type": "yaml"}',
            '"text"',
            '{"type": "json_schema"}',
            '{"type": "json_schema", "json_schema": {"schema": 5}}',
        ),
    ),
    ("presence_penalty", ("2.5", '"x"', "-3", "1e400")),
    ("frequency_penalty", ("2.5", '"x"', "-3", "true")),
    ("nonsense", ("1", '"x"', "{}")),
)
"""A field, and values in JSON."""
ONLY_CHAT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "tools",
        (
            '[{"type": "function", "function": {"name": "a b"}}]',
            '[{"type": "function", "function": {"name": "\\ud800"}}]',
            '[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]',
            '[{"type": "function", "function": {"name": "f", "parameters": {"title": "\\ud800"}}}]',
            '[{"type": "function", "function": {"name": "f", "parameters": '
            + '{"items":' * 60
            + "{}"
            + "}" * 60
            + "}}]",
            json.dumps([{"type": "function", "function": {"name": "f"}}] * 2),
            json.dumps([{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]),
            "[" + "5," * 5000 + "5]",
        ),
    ),
    (
        "tool_choice",
        ('"any"', '"required"', "5", "[]", "{}", '{"type": "function", "function": {"name": "f"}}'),
    ),
    ("parallel_tool_calls", ('"x"', "5", "[]")),
    ("chat_template_kwargs", ("5", '"x"', '{"messages": 1}', '{"a b": 1}', '{"a": "\\ud800"}')),
    ("chat_template_kwargs", (json.dumps({"a": "x" * 20_000}), '{"a": ' + "[" * 900 + "]" * 900 + "}")),
    ("reasoning_effort", ("5", "[]", '"\\ud800"')),
    (
        "messages[0]",
        (
            '[{"role": "tool", "content": "x"}]',
            '[{"role": "user", "content": "x", "tool_call_id": "a"}]',
            '[{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]',
            '[{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": ""}}]}]',
            '[{"role": "assistant", "content": "x", "tool_calls": [5]}]',
            json.dumps(
                [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}] * 129}]
            ),
        ),
    ),
    (
        "messages",
        ("5", '"hi"', "{}", "true", "[]", "[5]", '["hi"]', "[[]]", "[null]", json.dumps([[]] * 60_000)),
    ),
    ("messages[0]", ('[{"content": "x"}]', '[{"role": 5}]', '[{"role": "root", "content": "x"}]')),
    ("messages[0]", ('[{"role": "user", "content": 5}]', '[{"role": "user", "content": [5]}]')),
    (
        "messages[0]",
        (
            '[{"role": "user", "content": [{"type": "image_url"}]}]',
            '[{"role": "user", "content": "\\ud800"}]',
        ),
    ),
    (
        "messages[0]",
        (
            '[{"role": "user", "content": [{"type": "text", "text": 5}]}]',
            '[{"role": "\\udc00", "content": ""}]',
        ),
    ),
    (
        "messages",
        (
            json.dumps([{"role": "user", "content": "x"}] * 8193),
            json.dumps([{"role": "user", "content": "w " * 9000}]),
        ),
    ),
)
ONLY_TEXT: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "prompt",
        ("5", "{}", "true", "[]", '""', '"\\ud800"', "[1.5]", "[true]", "[-1]", "[4294967296]", "[1, null]"),
    ),
    ("prompt", ("[999999]", '[""]', "[[]]", "[[1], 5]", '["x", {}]', json.dumps("word " * 9000))),
    ("n", (json.dumps(["x"] * 17),)),
    ("prompt", (json.dumps([""] * 2000), json.dumps([5] * 3000))),
)

NO_JSON = (
    b"", b" ", b"{", b"}", b"{}}", b"[]", b"null", b"5", b'"x"', b"NaN", b"{'a': 1}", b'{"a": 1,}', b"\xff\xfe", b"\x00",
    b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": -Infinity}', b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}',
    b'{"a": 01}', b'{"a": +1}', b'{"a": .5}', b'{"a": 1.}', b'{"a": 0x10}', b'{"a": "\n"}', b'{"a": "\\x"}', b"\xef\xbb\xbf",
    b'{"n": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 50_000, b"{" * 70_000, b"/* */ {}", b"<xml/>", b"a=b&c=d",
    b'{"prompt": "x"} {"prompt": "y"}', b"\x1f\x8b\x08\x00", b'{"a": "' + b"\\" * 999,
)  # fmt: skip

HEADERS: tuple[tuple[bytes, frozenset[int], str], ...] = (
    (b"Idempotency-Key: \xff\xfe", frozenset({400}), "Idempotency-Key"),
    (b"Idempotency-Key: " + b"k" * 129, frozenset({400}), "idempotency_key"),
    (b"Idempotency-Key: a\tb", frozenset({400}), "idempotency_key"),
    (b"Idempotency-Key: \xc3\xa9\xf0\x9f\x98\x80", frozenset({200, 409}), ""),
    (b"Idempotency-Key: " + b"\xf0\x9f\x98\x80" * 200, frozenset({400}), "idempotency_key"),
    (b"traceparent: \xff", frozenset({200}), ""),
    (b"traceparent: 00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-00", frozenset({200}), ""),
    (b"traceparent: " + b"z" * 4000, frozenset({200}), ""),
    (b"x-request-id: \xff\x80", frozenset({200}), ""),
    (b"x-request-id: " + b"r" * 4000, frozenset({200}), ""),
    (b"x-request-id: a\tb", frozenset({200}), ""),
    (b"x-llm-d-inference-ttl: \xff", frozenset({400}), "x-llm-d-inference-ttl"),
    (b"x-llm-d-inference-ttl: 1e9h", frozenset({400}), "x-llm-d-inference-ttl"),
    (b"x-llm-d-inference-ttl: " + b"9" * 4000 + b"s", frozenset({400}), "x-llm-d-inference-ttl"),
    (b"x-llm-d-inference-ttl: \xc2\xb5s", frozenset({400}), "x-llm-d-inference-ttl"),
    (b"x-llm-d-inference-ttl: " + b"9" * 60 + b"h", frozenset({400}), "x-llm-d-inference-ttl"),
    (b"Authorization: Bearer \xff\xff", frozenset({200}), ""),
    (b"Authorization: Basic " + b"x" * 4000, frozenset({200}), ""),
    (b"laps-sd-tenant: \xff", frozenset({200}), ""),
    (b"laps-sd-tenant: a\r\nLaps-SD-Tenant: b", frozenset({400}), "laps-sd-tenant"),
    (b"Authorization: Bearer a\r\nauthorization: Bearer a", frozenset({400}), "authorization"),
    (b"Idempotency-Key: a\r\nIdempotency-Key: b", frozenset({400}), "Idempotency-Key"),
    (b"x-llm-d-inference-ttl: 1s\r\nx-llm-d-inference-ttl: 2s", frozenset({400}), "x-llm-d-inference-ttl"),
    (b"Content-Encoding: gzip", frozenset({400, 415}), ""),
    (b"Content-Encoding: \xff", frozenset({415}), ""),
    (b"Accept: \xff", frozenset({200}), ""),
    (b"Cookie: \xff=\xfe; ;;=", frozenset({200}), ""),
    (b"X-Forwarded-For: ' OR 1", frozenset({200}), ""),
    (b"Range: bytes=0-", frozenset({200}), ""),
    (b"If-Match: *", frozenset({200}), ""),
)
"""A header, its allowed results, and the field that is named."""

PLACES: tuple[tuple[str, str, frozenset[int]], ...] = (
    ("GET", "/", frozenset({404})),
    ("GET", "/v1", frozenset({404})),
    ("POST", "/v1/embeddings", frozenset({404})),
    ("GET", "/v1/completions", frozenset({405})),
    ("DELETE", "/v1/models", frozenset({405})),
    ("PATCH", "/health", frozenset({405})),
    ("OPTIONS", "/v1/chat/completions", frozenset({405})),
    ("BREW", "/v1/models", REFUSED),
    ("GET", "/v1/models/nope", frozenset({404})),
    ("GET", "/v1/models/%ff%00", frozenset({404})),
    ("GET", "/v1/models/" + "%F0%9F%98%80" * 200, frozenset({404})),
    ("GET", "/v1/models/../../etc/passwd", frozenset({404})),
    ("GET", "/v1/models/..%2f..%2fetc", frozenset({404})),
    ("GET", "/console/assets/..%2f__init__.py", frozenset({404})),
    ("GET", "/console/assets/%ff%00", frozenset({404})),
    # The Host of these requests is no name of this machine, and they have no key.
    ("GET", "/console/api/events", frozenset({403})),
    ("GET", "/console/api/requests/%ff%00", frozenset({403})),
    ("GET", "/console/api/requests/" + "%F0%9F%98%80" * 200, frozenset({403})),
    ("POST", "//v1/completions", frozenset({404})),
    ("POST", "/v1/completions/", frozenset({308})),
    ("GET", "/%", REFUSED),
    ("GET", "/v1/models?" + "a=b&" * 1000, frozenset({200})),
    ("GET", "/v1/models?%ff=%zz", frozenset({200})),
    ("GET", "/metrics?name[]=x", frozenset({200})),
    ("GET", "*", REFUSED),
    ("GET", "http://example.com/v1/models", REFUSED | {200}),
    ("GET", "/" + "x" * 20_000, REFUSED),
)


def no_http(rng: random.Random) -> bytes:
    """Return bytes that are not a request, or have a false body length."""
    body = json.dumps(BODIES[TEXT]).encode()
    good = request(TEXT, body)
    match rng.randrange(24):
        case 0:
            return rng.randbytes(rng.choice((1, 20, 300, 5000)))
        case 1:
            return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(300)
        case 2:
            return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        case 3:
            return rng.choice(
                (
                    b"GET\r\n\r\n",
                    b"GET /\r\n\r\n",
                    b"\r\n\r\n\r\n",
                    b"GET / HTTP/9.9\r\n\r\n",
                    b"GET / FTP/1.0\r\n\r\n",
                )
            )
        case 4:
            return (
                b"GET / HTTP/1.1\r\n"
                + rng.choice((b"no colon", b": x", b"a b: x", b"a\0: x", b" a: x", b"a: \0", b"\xff: x"))
                + b"\r\n\r\n"
            )
        case 5:
            return (
                b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
                + b"v" * rng.choice((9_000, 70_000, 300_000))
                + b"\r\n\r\n"
            )
        case 6:
            return (
                b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * rng.choice((200, 40_000)) + b"\r\n"
            )
        case 7:
            length = rng.choice(
                (b"-1", b"abc", b"1e3", b"+5", b"0x10", b" ", b"9" * 30, b"5, 6", b"1_0", b"\xb2")
            )
            return (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                + length
                + b"\r\n\r\n"
                + body
            )
        case 8:
            return (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n"
                + body
            )
        case 9:
            return (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
                + chunk(body)
            )
        case 10:
            coding = rng.choice((b"gzip", b"chunked, gzip", b"x", b"chunked, chunked", b"\xff"))
            return (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
                + coding
                + b"\r\n\r\n"
                + chunk(body)
            )
        case 11:
            size = rng.choice(
                (b"zz", b"-1", b"", b"ffffffffffffffffffff", b"5;" + b"e" * 20_000, b"0x5", b" 5", b"+5")
            )
            return chunked(TEXT, size + b"\r\n" + body)
        case 12:
            return chunked(TEXT, chunk(body[:5]), b"5\r\nabcdefg\r\n0\r\n\r\n")
        case 13:
            return chunked(TEXT, chunk(body[:9]))  # no end
        case 14:
            return good[: rng.randrange(len(good))]
        case 15:
            return good[: -rng.randrange(1, len(body))]
        case 16:
            return (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\nExpect: "
                + rng.choice((b"wonders", b"\xff"))
                + b"\r\n\r\n"
            )
        case 17:
            return good.replace(
                b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 x", b"HTTP/2"))
            )
        case 18:
            return good.replace(b"\r\n", b"\n")
        case 19:
            return good.replace(
                b"Host: localhost",
                rng.choice((b"Host: \xff", b"Host: a b/c", b"Host:", b"Host: x\r\nHost: y", b"Hos: x")),
            )
        case 20:
            upgrade = rng.choice((b"websocket", b"h2c", b"\xff"))
            return good.replace(
                b"Host: localhost", b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: " + upgrade
            )
        case 21:
            return b"CONNECT evil:443 HTTP/1.1\r\nHost: evil\r\n\r\n"
        case 22:
            return flipped(rng, good)
        case _:
            return (
                rng.choice((b"GET ", b"POST ")) + rng.randbytes(50) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )


def is_json_object(raw: bytes) -> bool:
    """Return whether it is an object by the strict reading: NaN is not a number."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return isinstance(json.loads(raw, parse_constant=refuse), dict)
    except (ValueError, RecursionError):
        return False


class Generator:
    """Source of unlimited inputs, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def inputs(self, count: int) -> Iterator[Input]:
        """Yield this many inputs; every 500th is large."""
        makers = (
            self._damaged,
            self._out_of_bounds,
            self._random,
            self._no_json,
            self._header,
            self._place,
            self._no_http,
            self._hostile_format,
            self._hostile_tool,
        )
        for number in range(count):
            maker = self._rng.choices(makers, (30, 24, 12, 8, 8, 6, 12, 2, 2))[0]
            yield self._large() if number % 500 == 250 else maker()

    def _path(self) -> str:
        return self._rng.choice((CHAT, TEXT))

    def _damaged(self) -> Input:
        path, damage = self._path(), self._rng.choice((truncated, flipped, flipped, noise))
        body = damage(self._rng, json.dumps(BODIES[path] | REFUSED_FIELD).encode())
        expected = NEITHER | {404} if is_json_object(body) else frozenset({400})
        return Input(f"{damage.__name__} body", request(path, body), expected)

    def _out_of_bounds(self) -> Input:
        path = self._path()
        name, values = self._rng.choice(OUT_OF_BOUNDS + (ONLY_CHAT if path == CHAT else ONLY_TEXT))
        value = self._rng.choice(values)
        of = "messages" if name.startswith("messages") else name
        if name == "n" and value.startswith("["):  # of prompts, counted as outputs
            of = "prompt"
        fields = {key: json.dumps(given) for key, given in BODIES[path].items()} | {of: value}
        body = "{" + ", ".join(f"{json.dumps(key)}: {given}" for key, given in fields.items()) + "}"
        return Input("out of bounds", request(path, body.encode()), frozenset({400, 404}), param=name)

    def _hostile_format(self) -> Input:
        path, ((kind, text), _) = self._path(), self._rng.choice(list(HOSTILE.values()))
        body = BODIES[path] | {f"guided_{kind.removesuffix('_schema')}": text}
        return Input(
            "hostile format",
            request(path, json.dumps(body).encode()),
            frozenset({400}),
            param=f"guided_{kind.removesuffix('_schema')}",
        )

    def _hostile_tool(self) -> Input:
        (_, schema), _ = self._rng.choice(SCHEMAS)
        tools = (
            '[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": '
            + schema
            + "}}}}]"
        )
        fields = {key: json.dumps(given) for key, given in BODIES[CHAT].items()}
        fields |= {"tools": tools, "tool_choice": '"required"'}
        body = "{" + ", ".join(f"{json.dumps(key)}: {given}" for key, given in fields.items()) + "}"
        return Input("hostile tool", request(CHAT, body.encode()), frozenset({400}))

    def _random(self) -> Input:
        path, rng = self._path(), self._rng
        body = dict(BODIES[path])
        names = [
            *body,
            *(name for name, _ in OUT_OF_BOUNDS),
            "user",
            "metadata",
            "echo",
            "suffix",
            "tool_choice",
            "chat_template_kwargs",
        ]
        for _ in range(rng.choice((1, 1, 2, 5))):
            body[rng.choice(names)] = random_json(rng, 0)
        # allow_nan: values outside JSON are a part of it.
        raw = json.dumps(body).encode()
        expected = NEITHER | {404} if is_json_object(raw) else frozenset({400})
        return Input("random values", request(path, raw), expected)

    def _no_json(self) -> Input:
        raw = self._rng.choice(NO_JSON)
        return Input("no JSON object", request(self._path(), raw), frozenset({400}))

    def _header(self) -> Input:
        header, expected, name = self._rng.choice(HEADERS)
        path = self._path()
        if self._rng.random() < 0.2:
            kind = self._rng.choice(
                (b"text/plain", b"", b"\xff", b"application/x-www-form-urlencoded", b"multipart/form-data")
            )
            return Input("content type", request(path, b"{}", kind=kind), frozenset({415}))
        body = json.dumps(BODIES[path]).encode()
        return Input("header", request(path, body, header), expected, param=name)

    def _place(self) -> Input:
        method, path, expected = self._rng.choice(PLACES)
        host = "x" if path.startswith("/console/api/") else "localhost"
        octets = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode()
        return Input("place", octets, expected | {CLOSED}, ours=False)

    def _no_http(self) -> Input:
        return Input("no HTTP", no_http(self._rng), REFUSED | {200, CLOSED}, ours=False, last=True)

    def _large(self) -> Input:
        rng, path = self._rng, self._path()
        body = b"{" + b",".join(json.dumps({k: v}).encode()[1:-1] for k, v in BODIES[path].items())
        match rng.randrange(9):
            case 0:
                head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
                return Input("large", head.encode(), frozenset({413}), heavy=True)
            case 1:
                sent = chunked(path, *[chunk(b" " * 2**20)] * 5)
                return Input("large", sent, frozenset({413, CLOSED}), heavy=True)
            case 2:
                body += b', "user": "' + b"u" * 4_000_000 + b'", "top_k": -5}'
            case 3:
                body += b', "stop": [' + b'"",' * 1_000_000 + b'""]}'
            case 4:
                body = b'{"prompt": [' + b'"",' * 1_000_000 + b'""]}'
                path = TEXT
            case 5:
                body = b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}"
                path = CHAT
            case 6:
                body = b'{"prompt": [' + b"1," * 2_000_000 + b"1]}"
                path = TEXT
            case 7:
                body += (
                    b', "metadata": '
                    + b"[" * 900
                    + b"[]," * 1_000_000
                    + b"1"
                    + b"]" * 900
                    + b', "top_k": -5}'
                )
            case _:
                body += b"," + b",".join(b'"k%d":1' % number for number in range(300_000)) + b"}"
        return Input("large", request(path, body), frozenset({400}), heavy=True)


SCALARS: Sequence[Any] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e300, -0.0, 0.1, float("nan"), float("inf"), "", "x", "\0",
    "\ud800", "\U0001f600" * 50, "a" * 3000, "NaN", "__proto__", "\u202e",
)  # fmt: skip


def random_json(rng: random.Random, depth: int) -> Any:
    """Return any value, nested a little."""
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.8:
        return [random_json(rng, depth + 1) for _ in range(rng.choice((0, 1, 3, 40)))]
    names = ("role", "content", "type", "text", "include_usage", "", "\ud800", "x" * 500)
    return {rng.choice(names): random_json(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))}
