"""Seeded requests through resuming clients, any number at once, and what may be wrong with what comes back.

Each distinct piece is run undisturbed once; later runs of it must bring the same tokens, text and end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from laps_sd.client import Accepted, AsyncClient, Delta, Ended, Options
from laps_sd.errors import LapsSdError, ResourceExhausted, Unavailable
from laps_sd.v1 import inference_pb2 as pb

PATIENCE_S = 600.0
"""Seconds for which a client tries to reconnect: the run judges which requests are stuck, not the client."""
CLIENTS = 8
TWICE_SHARE = 0.05
"""Share of the requests that are sent by two calls under one idempotency key, as by a client that got no
answer to its first call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One request of the run; its output is the same every time."""

    prompt: str
    seed: int
    max_tokens: int
    temperature: float
    more: Options = field(default_factory=Options)
    """Further options of the request."""

    def options(self, key: str) -> Options:
        """Return the options of the request for the client library."""
        options = Options(
            idempotency_key=key,
            seed=self.seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=True,
        )
        options.update(self.more)
        return options


@dataclass(slots=True)
class Outcome:
    """One request, from the first call to its end."""

    number: int
    piece: int
    key: str
    began_s: float
    """Seconds since the start of the run, as are all times here."""
    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    end: pb.Ended | None = None
    error: str = ""
    """Explicit error after acceptance."""
    over_s: float = 0.0
    refused: int = 0
    """Calls that failed before acceptance."""
    cancel_asked: bool = False
    cancelled: bool = False
    """True if a cancel was answered with yes. A cancel whose answer was lost may have ended the request; the
    next one is then answered with no."""
    problems: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """Return the digest of all output that the client received."""
        packed = b"".join(token.to_bytes(4, "little") for token in self.tokens)
        reason = self.end.finish_reason if self.end is not None else -1
        return hashlib.sha256(packed + "".join(self.text).encode() + bytes([reason])).hexdigest()


class Load:
    """Load of `concurrency` open requests at all times, until `finish`."""

    def __init__(
        self,
        addresses: Sequence[str],
        pieces: Sequence[Piece],
        *,
        seed: int,
        cancel_share: float,
        deadly_seed: int,
    ) -> None:
        """`deadly_seed` is the seed of the request that ends the process of each worker that runs it."""
        self._count = len(pieces)
        self._pieces = [*pieces, Piece("Deadly", deadly_seed, 64, 0.0)]
        self._seed = seed
        self._cancel_share = cancel_share
        self._began = time.monotonic()
        self._next = 0
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []
        self._clients = [
            AsyncClient(
                [addresses[(at + offset) % len(addresses)] for offset in range(len(addresses))],
                reconnect_s=PATIENCE_S,
            )
            for at in range(CLIENTS)
        ]
        self.expected: list[Outcome] = []
        self.open: dict[int, Outcome] = {}
        self.done: list[Outcome] = []
        self.tokens = 0
        self.last_message_s = 0.0

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._began

    async def reference(self) -> None:
        """Run each piece once. Raise the error of a request that fails: nothing disturbs these."""
        self.expected = list(
            await asyncio.gather(
                *(self._one(number, piece=number, calm=True) for number in range(self._count))
            )
        )
        for outcome in self.expected:
            if outcome.error or outcome.problems or outcome.end is None:
                raise SystemExit(f"the undisturbed run failed: {outcome.error or outcome.problems}")
        self.tokens = 0
        self.done.clear()

    def start(self, concurrency: int) -> None:
        """Begin; `finish` ends it."""
        self._next = self._count
        self._tasks = [asyncio.create_task(self._lane()) for _ in range(concurrency)]

    async def finish(self, *, stuck_s: float) -> list[Outcome]:
        """Send no new requests, wait for the open ones, and return those that are stuck: they have no end,
        and no client received anything for `stuck_s`.
        """
        self._stop = True
        self.last_message_s = self.now()
        while self.open and self.now() - self.last_message_s < stuck_s:  # noqa: ASYNC110  two conditions, and one is a time
            await asyncio.sleep(0.2)
        stuck = list(self.open.values())
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        return stuck

    async def wave(self, count: int) -> list[Outcome]:
        """Send `count` requests at once, run each to its end without any cancel, and return the outcomes."""
        self._cancel_share = 0.0
        first, self._next = self._next, self._next + count
        return list(
            await asyncio.gather(
                *(self._one(number, piece=number % self._count) for number in range(first, first + count))
            )
        )

    async def deadly(self, number: int) -> Outcome:
        """Run a request that ends workers, to its end. It counts neither as open nor as completed."""
        rng = random.Random(number)
        outcome = Outcome(number, self._count, f"chaos-{self._seed}-deadly-{number}", self.now())
        while outcome.end is None and not outcome.error:
            await self._call(outcome, rng, None)
        outcome.over_s = self.now()
        return outcome

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            with contextlib.suppress(Exception):
                await client.close()

    async def _lane(self) -> None:
        while not self._stop:
            number, self._next = self._next, self._next + 1
            rng = random.Random(self._seed * 7_000_003 + number)
            once = rng.random() >= TWICE_SHARE
            await (self._one if once else self._both)(number, piece=number % self._count)

    async def _one(self, number: int, *, piece: int, calm: bool = False, may_cancel: bool = True) -> Outcome:
        rng = random.Random(self._seed * 1_000_003 + number)
        outcome = Outcome(number, piece, f"chaos-{self._seed}-{abs(number)}", self.now())
        cancel_at = None
        if may_cancel and not calm and rng.random() < self._cancel_share:
            cancel_at = rng.randrange(self._pieces[piece].max_tokens)
        self.open[number] = outcome
        try:
            while outcome.end is None and not outcome.error:
                await self._call(outcome, rng, cancel_at)
        finally:
            outcome.over_s = self.now()
            del self.open[number]
        if not calm:
            self._check(outcome)
        self.done.append(outcome)
        return outcome

    async def _both(self, number: int, piece: int) -> None:
        """Send one request by two calls."""
        first = asyncio.create_task(self._one(number, piece=piece, may_cancel=False))
        await asyncio.sleep(random.Random(number).random())
        second = asyncio.create_task(self._one(-number, piece=piece, may_cancel=False))
        one, other = await asyncio.gather(first, second)
        if one.request_id != other.request_id and not (one.error or other.error):
            other.problems.append(
                f"a second call with its key is request {other.request_id}, the first {one.request_id}"
            )

    async def _call(self, outcome: Outcome, rng: random.Random, cancel_at: int | None) -> None:
        client = self._clients[rng.randrange(CLIENTS)]
        piece = self._pieces[outcome.piece]
        cancelling: asyncio.Task[None] | None = None
        accepted = False
        try:
            async for event in client.stream(piece.prompt, **piece.options(outcome.key)):
                self.last_message_s = self.now()
                match event:
                    case Accepted():
                        accepted = True
                        if outcome.request_id:
                            outcome.problems.append("accepted twice")
                        outcome.request_id = event.request_id
                    case Delta():
                        if event.first_token != len(outcome.tokens):
                            outcome.problems.append(
                                f"token {event.first_token} came when {len(outcome.tokens)} was due"
                            )
                        outcome.tokens += event.token_ids
                        outcome.text.append(event.text)
                        self.tokens += len(event.token_ids)
                        if cancel_at is not None and cancelling is None and len(outcome.tokens) > cancel_at:
                            cancelling = asyncio.create_task(self._cancel(client, outcome))
                    case Ended():
                        if outcome.end is not None:
                            outcome.problems.append("ended twice")
                        outcome.end = event
                        if event.finish_reason == pb.FINISH_REASON_ERROR:
                            outcome.error = f"ended with an error: {event.error}"
            if outcome.end is None:
                outcome.problems.append("the stream closed without an end")
                outcome.error = "silent close"
        except LapsSdError as error:
            if accepted:
                outcome.error = f"{type(error).__name__}: {error}"
            elif isinstance(error, Unavailable | ResourceExhausted):
                outcome.refused += 1
                await asyncio.sleep(rng.uniform(0.1, 0.5))
            else:
                outcome.error = f"before acceptance, {type(error).__name__}: {error}"
        if cancelling is not None:
            await cancelling

    async def _cancel(self, client: AsyncClient, outcome: Outcome) -> None:
        while True:
            outcome.cancel_asked = True
            try:
                outcome.cancelled = await client.cancel(outcome.request_id, timeout_s=10.0)
                return
            except LapsSdError:  # a gateway or record is down: retry, unless the run is over
                if outcome.end is not None or outcome.error:
                    return
                await asyncio.sleep(0.3)

    def _check(self, outcome: Outcome) -> None:
        """Check that the request had exactly one end, and only the output of the undisturbed run."""
        if outcome.end is None or outcome.error:
            if outcome.tokens != self.expected[outcome.piece].tokens[: len(outcome.tokens)]:
                outcome.problems.append("failed, and its tokens are not the first of the undisturbed run's")
            return
        expected = self.expected[outcome.piece]
        if outcome.end.finish_reason == pb.FINISH_REASON_CANCELLED:
            if outcome.tokens != expected.tokens[: len(outcome.tokens)]:
                outcome.problems.append(
                    "cancelled, and its tokens are not the first of the undisturbed run's"
                )
            if not outcome.cancel_asked:
                outcome.error = "ended as cancelled, and nobody had cancelled it"
        elif outcome.digest() != expected.digest():
            at = next(
                (
                    at
                    for at, (one, other) in enumerate(zip(outcome.tokens, expected.tokens, strict=False))
                    if one != other
                ),
                min(len(outcome.tokens), len(expected.tokens)),
            )
            outcome.problems.append(
                f"not what the undisturbed run brought: {len(outcome.tokens)} of {len(expected.tokens)} tokens, "
                f"different from token {at} on, end {pb.FinishReason.Name(outcome.end.finish_reason)}"
            )
        elif outcome.cancelled:
            outcome.problems.append("a cancel was answered with yes, and it ended as if nothing was")
