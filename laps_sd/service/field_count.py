"""Number of fields of a protobuf message, counted on its bytes before it is decoded.

Decoding turns a field of two bytes into an object of forty and more: 4 MiB of empty chat messages become 100
MiB. The count bounds that factor. Packed lists count once, since each of their numbers takes eight bytes at
most.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from laps_sd.errors import InvalidArgument

__all__ = ["check_fields"]

MAX_DEPTH = 100
"""Most levels of messages within messages; protobuf's own limit."""
MAX_VARINT_BYTES = 10
LEAST_FIELD_BYTES = 2
VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5

Nested: TypeAlias = "dict[int, Nested]"
"""Tags of the fields that are messages, each with the tags of that message."""


def check_fields(data: bytes, descriptor: Descriptor, most: int) -> None:
    """Raise InvalidArgument for a message of more than `most` fields, those of messages in it included.

    Raise DecodeError for bytes that are not a message, and for groups, which no message of ours has.
    """
    if len(data) > LEAST_FIELD_BYTES * most:  # a smaller message cannot hold that many
        try:
            _count(data, _nested(descriptor), most)
        except IndexError:
            raise DecodeError("the message ends inside a field") from None


def _count(data: bytes, nested: Nested, most: int) -> None:
    at, end = 0, len(data)
    outer: list[tuple[int, Nested]] = []
    fields = 0
    while True:
        while at == end:
            if not outer:
                return
            end, nested = outer.pop()
        fields += 1
        if fields > most:
            raise InvalidArgument(
                "message", f"must have at most {most} fields, those of messages in it included"
            )
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == DELIMITED:
            length = data[at]
            at += 1
            if length > 127:
                length, at = _varint(data, at - 1)
            if at + length > end:
                raise DecodeError("a field ends after its message")
            inner = nested.get(tag)
            if inner is None:
                at += length
            else:
                if len(outer) == MAX_DEPTH:
                    raise DecodeError(f"more than {MAX_DEPTH} messages within messages")
                outer.append((end, nested))
                end, nested = at + length, inner
        elif kind == VARINT:
            if data[at] < 128:
                at += 1
            else:
                _, at = _varint(data, at)
        elif kind == FIXED32:
            at += 4
        elif kind == FIXED64:
            at += 8
        else:
            raise DecodeError(f"a field of wire type {kind}")
        if at > end:
            raise DecodeError("a field ends after its message")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the position after it."""
    value = 0
    for place in range(MAX_VARINT_BYTES):
        octet = data[at + place]
        value |= (octet & 127) << 7 * place
        if octet < 128:
            return value, at + place + 1
    raise DecodeError(f"a number of more than {MAX_VARINT_BYTES} bytes")


@lru_cache
def _nested(descriptor: Descriptor) -> Nested:
    """Return the table of a message; that of a message that contains itself contains itself."""
    known: dict[str, Nested] = {}

    def of(message: Descriptor) -> Nested:
        if message.full_name not in known:
            table = known[message.full_name] = {}
            for field in message.fields:
                if field.message_type is not None:
                    table[field.number << 3 | DELIMITED] = of(field.message_type)
        return known[message.full_name]

    return of(descriptor)
