"""Rules for repeating a call, and for continuing a stream that broke. Pure: time is an argument."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TypeAlias

import grpc

from laps_sd.client.failures import MAX_PAUSE_S, error_of, may_work_later, next_pause_s
from laps_sd.errors import DeadlineExceeded, LapsSdError, NotFound
from laps_sd.v1.inference_pb2 import (
    Accepted,
    Cursor,
    Delta,
    Ended,
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    ResumeRequest,
)

__all__ = ["Chosen", "Event", "Patience", "Progress", "collect"]

Event: TypeAlias = Accepted | Delta | Ended
Chosen: TypeAlias = tuple[int, Event]

HELD_S = MAX_PAUSE_S
"""A connection that was open for this long has ended the outage before it, although it brought nothing new: a
request may wait in the queue for longer than the time limit of an outage, behind a proxy that cuts idle connections.
"""

LONGEST_S = 1e9
"""Longest time limit that is one: gRPC takes more, or infinity, for a deadline that has passed."""


class Patience:
    """Time limit for repeating a call that has had no effect yet. Pure; time is an argument."""

    def __init__(self, retry_s: float, *, timeout_s: float | None, now: float) -> None:
        self._retry_s = retry_s
        self._until: float | None = None
        self._deadline = _deadline(timeout_s, now)
        self._attempts = 0

    def timeout_s(self, now: float) -> float | None:
        """Return the seconds left until the caller's deadline; None without a deadline."""
        return None if self._deadline is None else max(0.001, self._deadline - now)

    def pause_s(self, error: grpc.RpcError, now: float) -> float:
        """Return the seconds to wait before the next call. Raise the error if there is to be none."""
        self._attempts += 1
        pause_s = next_pause_s(error, self._attempts)
        if self._until is None:
            self._until = now + self._retry_s  # not from the call's start: a hanging gateway is noticed late
        ends = self._until if self._deadline is None else min(self._until, self._deadline)
        if not may_work_later(error) or now + pause_s >= ends:
            raise error_of(error) from error
        return pause_s


class Progress:
    """Progress of the outputs of one call, and the repair of a lost connection. Pure; time is an argument.

    The caller's request is not changed: it may be sent again, as another request.
    """

    def __init__(
        self,
        request: GenerateRequest | ResumeRequest,
        *,
        timeout_s: float | None,
        reconnect_s: float,
        retry_s: float,
        now: float,
    ) -> None:
        self._patience = Patience(retry_s, timeout_s=timeout_s, now=now)
        self._own_key = isinstance(request, GenerateRequest) and not request.idempotency_key
        if isinstance(request, GenerateRequest) and self._own_key:
            keyed = GenerateRequest(idempotency_key=secrets.token_hex(16))
            keyed.MergeFrom(request)
            request = keyed
        self._request = request
        self._deadline = _deadline(timeout_s, now)
        self._reconnect_s = reconnect_s
        self._lost_at: float | None = None
        self._attempts = 0
        self._repeated_at: float | None = None  # when this connection brought what was known, or None
        start = request.cursor if isinstance(request, ResumeRequest) else Cursor()
        count = max(1, request.n) if isinstance(request, GenerateRequest) else 1
        self._outputs = [_Reading(start) for _ in range(count)]

    @property
    def accepted(self) -> bool:
        """Return whether every output is on the record: then a lost connection can be repaired."""
        return all(output.request_id for output in self._outputs)

    @property
    def ended(self) -> bool:
        """Return whether every output has ended."""
        return all(output.ended for output in self._outputs)

    @property
    def to_cancel(self) -> list[str]:
        """Return the ids of the requests to cancel if the caller leaves now: no client can want the rest."""
        keep = isinstance(self._request, GenerateRequest) and self._request.keep
        if keep or not self._own_key:
            return []
        return [output.request_id for output in self._outputs if output.request_id and not output.ended]

    def request(self) -> GenerateRequest | ResumeRequest:
        """Return the next request: the caller's at first, later one that resumes where the stream broke.

        Several outputs are found again by their idempotency key, and are sent from the start; `take` drops
        the events that were read before.
        """
        if len(self._outputs) > 1 or not self.accepted:
            return self._request
        (output,) = self._outputs
        return ResumeRequest(request_id=output.request_id, cursor=output.cursor)

    def timeout_s(self, now: float) -> float | None:
        """Return the seconds left until the deadline; None without one.

        Raise DeadlineExceeded if none are left.
        """
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlineExceeded("the deadline passed while the stream was being resumed")
        return self._deadline - now

    def take(self, message: GenerateEvent, now: float) -> Chosen | None:
        """Return the caller's event and its choice; None for an event that a repaired stream repeats.

        Only what is new ends an outage: every connection begins with *accepted*, also one that is cut after it.
        """
        if message.choice >= len(self._outputs):
            raise LapsSdError(f"the server sent output {message.choice} of {len(self._outputs)}")
        event = self._outputs[message.choice].take(message)
        if event is None:
            self._repeated_at = now if self._repeated_at is None else self._repeated_at
            return None
        self._end_outage()
        return message.choice, event

    def lost(self, error: grpc.RpcError | None, now: float) -> float:
        """Return the seconds to wait before the next call. Raise the error if there is to be none.

        The error names the request, so that the caller can resume one that it keeps or that has the caller's key.
        """
        if error is not None and not self.accepted:
            return self._patience.pause_s(error, now)
        if self._repeated_at is not None and now - self._repeated_at >= HELD_S:
            self._end_outage()
        self._repeated_at = None
        if self._lost_at is None:
            self._lost_at = now  # not the time of the last message: a hanging gateway is noticed late
        self._attempts += 1
        pause_s = next_pause_s(error, self._attempts)  # a server may advise any
        may_go_on = self.accepted and (error is None or may_work_later(error))
        if not may_go_on or now + pause_s - self._lost_at > self._reconnect_s:
            raise error_of(error, self._unfinished()) from error
        return pause_s if self._deadline is None else min(pause_s, max(0.0, self._deadline - now))

    def _end_outage(self) -> None:
        self._lost_at = None
        self._attempts = 0

    def _unfinished(self) -> str:
        """Return the requests of the outputs that have not ended, in words."""
        ids = [output.request_id for output in self._outputs if output.request_id and not output.ended]
        return f"{'request' if len(ids) == 1 else 'requests'} {', '.join(ids)}" if ids else ""


def _deadline(timeout_s: float | None, now: float) -> float | None:
    return None if timeout_s is None or timeout_s > LONGEST_S else now + timeout_s


class _Reading:
    """Read position of one output."""

    def __init__(self, start: Cursor) -> None:
        self.request_id = ""
        self.cursor = Cursor()
        self.cursor.CopyFrom(start)
        self.ended = False

    def take(self, message: GenerateEvent) -> Event | None:
        """Return the new part of a message; None if nothing is new. Raise NotFound if the output is not that of the
        request any more which it began with: the server has lost that one, and has made another of the same key.
        """
        if self.ended:
            return None
        match message.WhichOneof("event"):
            case "accepted":
                known, self.request_id = self.request_id, message.accepted.request_id
                if known and known != self.request_id:
                    raise NotFound(f"there is no request {known!r}")
                return None if known else message.accepted
            case "delta":
                unseen = _unseen(message.delta, self.cursor)
                if unseen is not None:
                    self.cursor.CopyFrom(unseen.cursor)
                return unseen
            case "end":
                self.ended = True
                return message.end
            case _:
                return None


def _unseen(delta: Delta, cursor: Cursor) -> Delta | None:
    """Return the part of a delta after a cursor; None if there is none."""
    tokens = cursor.next_token - delta.first_token if delta.token_ids else 0
    characters = cursor.text_offset - (delta.cursor.text_offset - len(delta.text))
    if tokens <= 0 and characters <= 0:
        return delta
    rest = Delta(
        text=delta.text[max(0, characters) :],
        token_ids=delta.token_ids[max(0, tokens) :],
        first_token=max(delta.first_token, cursor.next_token),
        cursor=delta.cursor,
        logprobs=delta.logprobs[max(0, tokens) :],
        prompt_logprobs=delta.prompt_logprobs if tokens <= 0 and delta.HasField("prompt_logprobs") else None,
    )
    return rest if rest.text or rest.token_ids else None


def collect(events: Sequence[Chosen]) -> GenerateResponse:
    """Return the response of the unary call: choice 0, and the others in `more`."""
    responses = [GenerateResponse() for _ in range(1 + max((choice for choice, _ in events), default=0))]
    texts: list[list[str]] = [[] for _ in responses]
    for choice, event in events:
        match event:
            case Accepted():
                responses[choice].accepted.CopyFrom(event)
            case Delta():
                texts[choice].append(event.text)
                responses[choice].token_ids.extend(event.token_ids)
                responses[choice].logprobs.extend(event.logprobs)
                if event.HasField("prompt_logprobs"):
                    responses[choice].prompt_logprobs.CopyFrom(event.prompt_logprobs)
            case Ended():
                responses[choice].end.CopyFrom(event)
    for response, text in zip(responses, texts, strict=True):
        response.text = "".join(text)
    responses[0].more.extend(responses[1:])
    return responses[0]
