"""A plain client: the generated stubs, without our own client code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from laps_sd.v1 import inference_pb2 as pb


@dataclass
class Outcome:
    """Result of one stream."""

    accepted: pb.Accepted | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    end: pb.Ended | None = None
    finished_order: int = -1

    @property
    def request_id(self) -> str:
        assert self.accepted is not None
        return self.accepted.request_id


_finished = 0


async def stream(
    stub: Any,
    request: pb.GenerateRequest,
    *,
    on_accepted: Callable[[Outcome], None] | None = None,
    on_tokens: Callable[[Outcome], Awaitable[None] | None] | None = None,
    timeout_s: float = 120.0,
) -> Outcome:
    """Run one request to its end; any error status is raised. Checks that tokens come once and in order."""
    global _finished
    outcome = Outcome()
    async for event in stub.GenerateStream(request, timeout=timeout_s):
        match event.WhichOneof("event"):
            case "accepted":
                assert outcome.accepted is None, "accepted twice"
                outcome.accepted = event.accepted
                if on_accepted is not None:
                    on_accepted(outcome)
            case "delta":
                assert event.delta.first_token == len(outcome.tokens), "a gap or a repetition"
                outcome.tokens += event.delta.token_ids
                outcome.text += event.delta.text
                if on_tokens is not None:
                    waiting = on_tokens(outcome)
                    if waiting is not None:
                        await waiting
            case "end":
                assert outcome.end is None, "two ends"
                outcome.end = event.end
    assert outcome.end is not None, "the stream closed silently"
    outcome.finished_order = _finished
    _finished += 1
    return outcome


async def stream_all(stub: Any, requests: list[pb.GenerateRequest], **options: Any) -> list[Outcome]:
    """Run all requests at once; return the results in the order of the requests."""
    return await asyncio.gather(*(stream(stub, request, **options) for request in requests))


def seeded(
    prompt: str, *, seed: int, max_tokens: int, temperature: float = 0.8, **fields: Any
) -> pb.GenerateRequest:
    """Return a request whose text is fixed by its seed."""
    sampling = pb.SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=fields.pop("ignore_eos", False),
        stop=fields.pop("stop", ()),
    )
    for name in ("top_p", "top_k"):
        if name in fields:
            setattr(sampling, name, fields.pop(name))
    return pb.GenerateRequest(text=prompt, sampling=sampling, **fields)
