"""Helpers that read a stream as a client does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from laps_sd.v1.inference_pb2 import GenerateEvent


async def rest(call: Any) -> list[GenerateEvent]:
    """Return all events that are left."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def read_tokens(call: Any, count: int) -> list[GenerateEvent]:
    """Return events until `count` tokens have come."""
    events: list[GenerateEvent] = []
    while len(ids_of(events)) < count:
        event = await call.read()
        assert event is not grpc.aio.EOF, f"the stream ended after {ids_of(events)}"
        events.append(event)
    return events


def text_of(events: Iterable[GenerateEvent]) -> str:
    return "".join(event.delta.text for event in events)


def ids_of(events: Iterable[GenerateEvent]) -> list[int]:
    """Return token ids, after checking that positions leave no gap and nothing comes twice."""
    ids: list[int] = []
    first: int | None = None
    for event in events:
        if not event.HasField("delta"):
            continue
        if first is None:
            first = event.delta.first_token
        if event.delta.token_ids:
            assert event.delta.first_token == first + len(ids)
        ids.extend(event.delta.token_ids)
    return ids


def violations(error: grpc.aio.AioRpcError) -> list[tuple[str, str]]:
    """Return (field, description) of a refusal's BadRequest."""
    found = []
    for detail in _details(error):
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            found.extend(
                (violation.field, violation.description) for violation in bad_request.field_violations
            )
    return found


def has_retry_info(error: grpc.aio.AioRpcError) -> bool:
    return any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in _details(error))


def _details(error: grpc.aio.AioRpcError) -> list[Any]:
    packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    return [] if packed is None else list(status_pb2.Status.FromString(packed).details)
