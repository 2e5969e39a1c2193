"""The fields of a message, counted on its bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from gateway.api.openai.body import read_body
from gateway.bounded_json import is_few
from laps_sd.errors import InvalidArgument
from laps_sd.service.field_count import check_fields
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import open_inference_pb2 as oip
from tests.system.hostile import (
    DAMAGES,
    broken_text,
    delimited,
    nested,
    plain_request,
    random_message,
    tag,
    varint,
)

BULK = b"x" * 1000
"""Field that makes a message large enough for its fields to be counted."""
BULKY = delimited(1, BULK)


def fields_of(data: bytes, message: Any = pb.GenerateRequest) -> int:
    """Return the least bound that the message keeps; the bulk is one of its fields."""
    for most in range(len(data)):
        try:
            check_fields(data, message.DESCRIPTOR, most)
        except InvalidArgument as error:
            assert error.violations == (
                ("message", f"must have at most {most} fields, those of messages in it included"),
            )
        else:
            return most
    raise AssertionError("no bound is enough")


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.GenerateRequest(), 0),
        (pb.GenerateRequest(text="abc", priority=0), 2),
        (pb.GenerateRequest(sampling=pb.SamplingParams()), 1),
        (pb.GenerateRequest(sampling=pb.SamplingParams(stop=["a", "b"])), 3),
        (pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias={1: 1.0, 2: 2.0})), 1 + 2 * 3),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(50))), 2),  # packed
        (pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * 3)), 1 + 3 * 2),
    ],
)
def test_messages_in_a_message_count_with_their_fields(request_: pb.GenerateRequest, fields: int) -> None:
    assert fields_of(BULKY + request_.SerializeToString()) == 1 + fields


def test_fields_that_are_not_known_count_and_so_do_numbers_that_are_not_packed() -> None:
    assert fields_of(BULKY + delimited(1000, b"ab") * 7 + tag(1001, 0) + b"\1" + tag(1002, 5) + b"abcd") == 10
    assert fields_of(BULKY + delimited(4, (tag(1, 0) + varint(300)) * 9)) == 11


def test_a_message_too_small_for_that_many_is_not_looked_at() -> None:
    check_fields(b"\xff" * 20, pb.GenerateRequest.DESCRIPTOR, 10)


@pytest.mark.parametrize("message", [pb.GenerateRequest, pb.TokenizeRequest, oip.ModelInferRequest])
def test_what_protobuf_decodes_is_refused_for_its_fields_only_and_nothing_else_breaks(message: Any) -> None:
    rng = random.Random(1)
    decoded = 0
    for _ in range(3000):
        data = random_message(rng, message()).SerializeToString()
        damage = rng.choice(DAMAGES)
        if rng.random() < 0.7:
            data = damage(rng, data)
        try:
            check_fields(data, message.DESCRIPTOR, 0 if rng.random() < 0.2 else len(data) // 2 - 1)
        except InvalidArgument as error:
            assert error.violations[0][0] == "message"
        except DecodeError:
            if damage not in (nested, broken_text):  # groups, which no message of ours has
                with pytest.raises(DecodeError):
                    message.FromString(data)
        else:
            decoded += 1
    assert decoded > 500


def test_a_body_of_json_is_bounded_before_it_is_decoded() -> None:
    assert read_body(b'{"a": [[], {}, "[[[[::,,,,"]}', 5) == {"a": [[], {}, "[[[[::,,,,"]}
    for body in (b'{"a": [[], {}, []]}', b'{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}'):
        with pytest.raises(InvalidArgument, match="the body must be JSON of at most 4 lists, objects and"):
            read_body(body, 4)
    with pytest.raises(InvalidArgument, match="must be JSON"):  # one string, which does not end
        read_body(b'{"a": "' + b'\\"[' * 99, 4)


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-16", "UTF-8"), ("utf-32", "UTF-8"), ("utf-16-le", "JSON"), ("utf-32-be", "JSON")],
)
def test_a_body_in_another_encoding_cannot_hide_its_fields(encoding: str, said: str) -> None:
    """U+2200 has the byte of a quotation mark in UTF-16 and UTF-32, and Python's decoder takes both."""
    body = f'{{"a": "\u2200", "b": [{"[], " * 99}[]]}}'
    with pytest.raises(InvalidArgument, match=f"the body must be {said}"):
        read_body(body.encode(encoding), 5)
    with pytest.raises(InvalidArgument, match="the body must be JSON of at most 5 lists"):
        read_body(body.encode(), 5)


def test_a_byte_order_mark_before_a_body_is_ignored() -> None:
    assert read_body(b'\xef\xbb\xbf{"a": 1}', 5) == {"a": 1}


def test_a_text_that_is_no_json_hides_nothing_of_those_after_it() -> None:
    assert is_few(['{"a": "[[["}', '"', "[]"], 3, 9)
    assert not is_few(['{"a": "[[["}', '"', "[[]]"], 3, 9)


def test_a_plain_request_has_few_fields() -> None:
    check_fields(plain_request(random.Random(1)).SerializeToString(), pb.GenerateRequest.DESCRIPTOR, 8)
