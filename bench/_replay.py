"""Requests and send times of `bench serve`, and the open-loop client that sends them.

Open loop: every send time is fixed before the first request goes out and the client never waits for a reply,
so a slow server meets the same arrivals as a fast one. A latency counts from the time at which its request
was to be sent, so that a generator that is late hides nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import grpc

from demo.prompts import KINDS, demo_prompts
from laps_sd.errors import describe
from laps_sd.service.ends import reason_text
from laps_sd.v1 import inference_pb2 as pb

LEAD_S = 0.2
"""Seconds from the start of a run to the first send, so that the first is not late."""
TEMPERATURE = 0.8
"""Temperature of all requests. At 0 the demo pair loops on prose and logs until the limit, at 0.8 its own end
token decides the lengths."""

OWN_ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP_SEQUENCE)

Send = Callable[[pb.GenerateRequest], AsyncIterable[pb.GenerateEvent]]


# -- requests -------------------------------------------------------------------------------------------------------------


def draw_requests(seed: int, count: int, max_tokens: int) -> list[pb.GenerateRequest]:
    """Return prompts of all kinds in equal parts and random order, every other one as a chat. Equal seeds
    give equal requests.
    """
    rng = random.Random(f"serve/requests/{seed}")
    requests = []
    for number, prompt in enumerate(demo_prompts(None, count, seed)):
        request = pb.GenerateRequest(workload_class=prompt.kind)
        if number % 2:
            request.messages.messages.add(role="user", content=prompt.text)
        else:
            request.text = prompt.text
        request.sampling.max_tokens = max_tokens
        request.sampling.temperature = TEMPERATURE
        request.sampling.seed = rng.randrange(1 << 32)
        requests.append(request)
    return requests


def draw_ids(rng: random.Random, length: int) -> list[int]:
    """Return token ids of this number: prompts of the demo pair's kinds, joined."""
    ids = itertools.chain.from_iterable(
        _token_ids(rng.choice(KINDS), rng.randrange(64)) for _ in itertools.count()
    )
    return list(itertools.islice(ids, length))


@cache
def _token_ids(kind: str, seed: int) -> tuple[int, ...]:
    """Return one prompt of a kind; never empty."""
    from tokenizers import Tokenizer

    from worker_svc.demo import TARGET_DIR

    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    return tuple(tokenizer.encode(demo_prompts(kind, 1, seed)[0].text + "\n").ids)


def poisson_times(seed: int, count: int, gap_s: float) -> list[float]:
    """Return arrivals from 0 on, `gap_s` seconds apart on average. The average is exact in each draw (our
    choice): the load of a few dozen requests would vary by a fifth otherwise.
    """
    rng = random.Random(f"serve/arrivals/{seed}")
    gaps = [rng.expovariate(1.0) for _ in range(count - 1)]
    stretch = gap_s * len(gaps) / (sum(gaps) or 1.0)
    return [0.0, *itertools.accumulate(gap * stretch for gap in gaps)]


def digest(requests: Sequence[pb.GenerateRequest], due_s: Sequence[float]) -> str:
    """Return the digest of the requests and their times: equal digests mean the same requests at the same
    times.
    """
    sha = hashlib.sha256()
    for request, at_s in zip(requests, due_s, strict=True):
        sha.update(request.SerializeToString(deterministic=True))
        sha.update(repr(at_s).encode())
    return sha.hexdigest()[:16]


# -- sending --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reply:
    """Result of one request. Seconds count from its scheduled send time."""

    late_s: float = 0.0
    """Delay of the send after its scheduled time, in seconds."""
    accepted_s: float = 0.0
    first_token_s: float = 0.0
    latency_s: float = 0.0
    deltas: list[int] = field(default_factory=list)
    """Tokens of each message that brought some: those of a round, unless messages were joined."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    ended: pb.Ended = field(default_factory=pb.Ended)
    error: str = ""
    """Reason why it counts as failed; empty otherwise."""


async def replay(
    requests: Sequence[pb.GenerateRequest],
    due_s: Sequence[float],
    send: Send,
    *,
    lead_s: float = LEAD_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[Reply]:
    """Send each request at its time (seconds from the start, ascending), whatever the result of those before,
    and return when all have ended.
    """
    start_s = now() + lead_s
    running = []
    for request, at_s in zip(requests, due_s, strict=True):
        while (wait_s := start_s + at_s - now()) > 0:
            await sleep(wait_s)
        running.append(asyncio.create_task(send_one(request, start_s + at_s, send, now)))
    return list(await asyncio.gather(*running))


async def send_one(
    request: pb.GenerateRequest, due_s: float, send: Send, now: Callable[[], float] = time.monotonic
) -> Reply:
    """Send a request that was to be sent at `due_s`, by `now`, and return when it has ended."""
    reply = Reply(late_s=now() - due_s, error="its stream ended without an end")
    try:
        async for event in send(request):
            at_s = now() - due_s
            reply.text += event.delta.text
            match event.WhichOneof("event"):
                case "accepted":
                    reply.accepted_s = at_s
                case "delta" if event.delta.token_ids:
                    if not reply.deltas:
                        reply.first_token_s = at_s
                    reply.deltas.append(len(event.delta.token_ids))
                    reply.token_ids += event.delta.token_ids
                case "end":
                    reply.latency_s = at_s
                    reply.ended = event.end
                    reply.error = _error(event.end)
    except grpc.RpcError as error:
        reply.error = describe(error)
    return reply


def _error(ended: pb.Ended) -> str:
    if ended.finish_reason in OWN_ENDS:
        return ""
    reason = reason_text(ended.finish_reason)
    return f"{reason}: {ended.error}" if ended.error else reason
