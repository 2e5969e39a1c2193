"""The part that all protocols share, gRPC and HTTP alike: checks, the prompt, submission, and the resulting
events.

    caller = Caller(tenant="acme", deadline=None)
    async with calls.generate([request], caller) as generation:     # raises LapsSdError until all is accepted
        for accepted in generation.accepted: ...                    # one per choice
        while not generation.over:
            for choice, piece in await generation.read(): ...
    # left early, cancelled or failed: every attachment is closed, which ends requests without a client

No other module submits requests. A limit or a rule that is checked here holds for every protocol.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from gateway import metrics
from gateway.calls.generation import Attachment, Generation
from gateway.calls.output import Output, accepted_event
from gateway.calls.prompts import Prompts
from gateway.calls.request_log import log_end
from gateway.calls.stream_metrics import StreamMetrics
from gateway.calls.submissions import Submissions
from gateway.calls.validation import (
    check_ids,
    check_model,
    check_request,
    check_whole_answer,
    choices_of,
)
from gateway.fair_turns import FairTurns
from gateway.links.link import AcceptedStream, ShardLink
from gateway.links.request_ids import check_request_id
from gateway.links.shards import Shards
from gateway.model.detokenizer import Detokenizer
from gateway.model.files import ModelFiles
from gateway.model.reasoning import State
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from gateway.tracing import CallSpan, call_span
from laps_sd.contract.length_features import FeatureHash
from laps_sd.contract.limits import TEN_YEARS_S
from laps_sd.errors import DeadlineExceeded, InvalidArgument, LapsSdError, ResourceExhausted
from laps_sd.service.retry_times import StreamRetryTimes
from laps_sd.service.tracing import Tracing
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2

__all__ = ["Caller", "Calls", "deadline_after"]

THREAD_FROM_TOKENS = 1024
"""Tokens from which work on them is done in a thread: in the text of a whole output, bytes that are no text take 10 to 20 µs
each."""
MAX_CONVERSIONS = 64
"""Most calls of one tenant that wait for such work. Our choice."""
LATE_S = 1.0
"""Seconds after its deadline in which the scheduler may end a request: its end comes with the last tokens."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request and its deadline, as determined by the protocol layer."""

    tenant: str
    deadline: float | None = None  # hard, in the loop's time
    traceparent: str = ""  # W3C, valid or empty


class Calls:
    """One model, on any of the shards."""

    def __init__(
        self,
        settings: GatewaySettings,
        model: ModelFiles,
        shards: Shards,
        tenants: Tenants,
        tracing: Tracing,
    ) -> None:
        self.settings = settings
        self.model = model
        self._tenants = tenants
        self._tracing = tracing
        self._shards = shards
        self._prompts = Prompts(model, FeatureHash(settings.length_key) if settings.predict_lengths else None)
        self._submissions = Submissions(settings, model, self._prompts)
        self.conversions = FairTurns(1, most_waiting=MAX_CONVERSIONS, what="long outputs and lists of tokens")
        """Turns at work on many tokens: one at a time, so that threads are left for prompts."""
        self._open = 0
        """Outputs of the calls that are admitted, also before their streams are open."""
        self._refused = StreamRetryTimes()
        """Retry times of calls refused by the limit of open streams."""

    @property
    def refusal(self) -> str:
        """Return the reason why any new request would be refused now; empty if one would be accepted."""
        return self._no_room(1) or self._shards.refusal

    @property
    def streams(self) -> int:
        """Return the number of requests that are open at this gateway."""
        return self._shards.streams

    @property
    def workers(self) -> int:
        """Return the number of connected workers of all shards. A request is accepted even with no worker,
        and waits for one."""
        return self._shards.workers

    async def close(self) -> None:
        """Release what the calls share: the process that checks formats. Call it after the last call has
        ended."""
        await self._submissions.close()

    @asynccontextmanager
    async def generate(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        caller: Caller,
        *,
        reads_markup: bool = False,
        in_one_message: bool = False,
    ) -> AsyncIterator[Generation]:
        """Submit every choice of every request, and wait until all are accepted.

        Choices are numbered consecutively: those of the first request, then those of the second.
        `reads_markup`: the caller finds calls of tools and reasoning in the text. Their markup then is text
        even where it is special tokens, and an output format applies after the reasoning. `in_one_message`:
        the caller sends the whole output in one message, which must not be too large.
        """
        began = _now()
        with ExitStack() as stack:
            span = stack.enter_context(
                call_span(self._tracing, requests, caller.traceparent, model=self.model.name)
            )
            with self.refusals(caller):
                count = self._check(requests, caller)
                stack.enter_context(self._room(count))
                by_field = _earliest_deadline(requests, unix_ms=time.time() * 1000, now=began)
                caller = _no_later_than(by_field, caller)
                stack.enter_context(self._tenants.admitted(caller.tenant, count, new=True))
                async with _until(by_field):
                    submissions, states = await self._submissions.of(
                        requests,
                        caller.tenant,
                        span.traceparent,
                        reads_markup=reads_markup,
                        capacity_tokens=self._shards.capacity_tokens,
                    )
                    if in_one_message:
                        check_whole_answer(submissions, self.settings.max_answer_bytes)
                    streams = await self._place_all(stack, submissions, caller)
            generation = self._opened(
                stack,
                streams,
                caller,
                began=began,
                states=states,
                span=span,
                shown_ids=frozenset(self.model.markup.values()) if reads_markup else frozenset(),
            )
            with _ends_late(generation, by_field):
                yield generation

    @asynccontextmanager
    async def resume(
        self, request_id: str, cursor: inference_pb2.Cursor, caller: Caller
    ) -> AsyncIterator[Generation]:
        """Attach to an existing request and stream its output after the cursor."""
        began = _now()
        with ExitStack() as stack:
            with self.refusals(caller):
                self._tenants.charge_call(caller.tenant)
                link = self._link_of(request_id)
                stack.enter_context(self._room(1))
                stack.enter_context(self._tenants.admitted(caller.tenant, 1, new=False))
                stream = link.attach(request_id, tenant=caller.tenant)
                stack.callback(link.close, stream)
                acceptance = await link.accepted(stream, wait_s=self.settings.scheduler_wait_s)
            accepted = AcceptedStream(link, stream, acceptance)
            yield self._opened(stack, [accepted], caller, began=began, cursor=cursor)

    async def cancel(self, request_id: str, caller: Caller) -> bool:
        """End a request; return False if it had ended."""
        self.charge(caller)
        link = self._link_of(request_id)
        return await link.cancel(request_id, tenant=caller.tenant, wait_s=self.settings.scheduler_wait_s)

    async def explain(
        self, request_id: str, caller: Caller, *, of_any_tenant: bool = False
    ) -> inference_pb2.ExplainResponse:
        """Return the explanation of a request's state from the shard's leader; `of_any_tenant`: also if the
        request is not the caller's."""
        self.charge(caller)
        link = self._link_of(request_id)
        tenant = "" if of_any_tenant else caller.tenant
        return await link.explain(request_id, tenant=tenant, wait_s=self.settings.scheduler_wait_s)

    async def tokenize(self, request: inference_pb2.GenerateRequest, caller: Caller) -> list[int]:
        """Return the token ids of a request's prompt. Raises InvalidArgument, ResourceExhausted."""
        self.charge(caller)
        check_request(request, self.settings, self.model)
        with self.refusals(caller):
            rendered = await self._prompts.rendered(request, caller.tenant)
            return await self._prompts.ids_of(request, rendered, caller.tenant)

    async def detokenize(
        self,
        model: str,
        ids: Sequence[int],
        caller: Caller,
        *,
        field: str = "token_ids",
        special: bool = False,
    ) -> str:
        """Return the text of a whole output, with that of special tokens if `special`. `field` is the name of
        `ids` in errors. Raises InvalidArgument, ResourceExhausted."""
        self.charge(caller)
        check_model(model, self.model)
        if len(ids) > self.model.context_tokens:
            raise InvalidArgument(field, f"must be at most {self.model.context_tokens}, got {len(ids)}")
        check_ids(field, ids, self.model)
        silent_ids = frozenset[int]() if special else self.model.silent_ids
        text = Detokenizer(self.model.decode, silent_ids=silent_ids)
        return await self.converted(lambda: text.feed(ids) + text.finish(), len(ids), caller)

    async def converted(self, work: Callable[[], str], tokens: int, caller: Caller) -> str:
        """Return the result of work on this number of tokens: if they are many, it is done in a thread, for tenants
        in rotation. Raises ResourceExhausted."""
        if tokens < THREAD_FROM_TOKENS:
            return work()
        with self.refusals(caller):
            return await self.conversions.run(caller.tenant, work)

    @contextmanager
    def refusals(self, caller: Caller) -> Iterator[None]:
        """Count refusals raised inside the context: for the protocol layer, before it has a request to
        submit."""
        try:
            yield
        except LapsSdError as error:
            metrics.REFUSED.labels(error.code.name).inc()
            metrics.TENANT_REFUSED.labels(self._tenants.label(caller.tenant), error.code.name).inc()
            raise

    def charge(self, caller: Caller) -> None:
        """Charge a call that makes no request to the tenant's rate limit. Raises ResourceExhausted."""
        with self.refusals(caller):
            self._tenants.charge_call(caller.tenant)

    # ---- helpers

    def _check(self, requests: Sequence[inference_pb2.GenerateRequest], caller: Caller) -> int:
        """Return the number of requested outputs, after all checks that cost nothing."""
        for request in requests:
            check_request(request, self.settings, self.model)
            self._tenants.check_priority(caller.tenant, request.priority)
        count = sum(map(choices_of, requests))
        if count > self.settings.max_choices:
            raise InvalidArgument(
                "n", f"must be at most {self.settings.max_choices} outputs of one call, got {count}"
            )
        return count

    def _opened(
        self,
        stack: ExitStack,
        streams: Sequence[AcceptedStream],
        caller: Caller,
        *,
        began: float,
        cursor: inference_pb2.Cursor | None = None,
        states: Sequence[State | None] = (None,),
        span: CallSpan | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Generation:
        """Return the output of accepted streams, counted until the end of the stack."""
        accepted = [accepted_event(stream.acceptance, self.model) for stream in streams]
        if span is not None:
            span.accepted(accepted)
        recorded = span if span is not None and span.records else None
        label = self._tenants.label(caller.tenant)
        attachments = []
        for stream in streams:
            output = Output(stream.acceptance, self.model, cursor, shown_ids=shown_ids)
            measured = StreamMetrics(stream.acceptance, cursor, tenant=label, began=began)
            if self.settings.log_requests:  # called after `measured` has the end
                stack.callback(log_end, measured, tenant=caller.tenant)
            stack.enter_context(measured)
            attachments.append(Attachment(stream, output, measured, recorded))
        stack.callback(lambda: self._refused.closed(_now() - began))
        return Generation(accepted, attachments, states)

    async def _place_all(
        self, stack: ExitStack, submissions: Sequence[link_pb2.Submit], caller: Caller
    ) -> list[AcceptedStream]:
        """Submit the requests of a call. If one is refused, so is the call: those before it, which would continue
        without a client, are cancelled. Those of an idempotency key are not: a retry attaches to them.
        """
        placed: list[AcceptedStream] = []
        try:
            for submit in submissions:
                accepted = await self._place(stack, submit, caller)
                placed.append(accepted)
        except LapsSdError:
            for (link, _, acceptance), submit in zip(placed, submissions, strict=False):
                if submit.keep and not submit.idempotency_key:
                    link.cancel_soon(acceptance.request_id, tenant=caller.tenant)
            raise
        return placed

    async def _place(self, stack: ExitStack, submit: link_pb2.Submit, caller: Caller) -> AcceptedStream:
        """Submit one request and wait until it is accepted; its stream is closed with the stack.

        The shard of each output of a call is chosen separately: each output has its own idempotency key, and
        an earlier call may have placed it on another shard than the call's other outputs.
        """
        accepted = await self._shards.place(
            submit, deadline=caller.deadline, wait_s=self.settings.scheduler_wait_s
        )
        stack.callback(accepted.link.close, accepted.stream)
        return accepted

    def _no_room(self, count: int) -> str:
        """Return the reason why this gateway has no room for `count` more streams; empty if it has."""
        is_open, most = self._open, self.settings.max_streams
        return (
            f"this gateway has {is_open} of {most} streams open, its limit" if is_open + count > most else ""
        )

    @contextmanager
    def _room(self, count: int) -> Iterator[None]:
        """Reserve room for `count` streams inside the context. Raises ResourceExhausted."""
        if reason := self._no_room(count):
            retry_after_s = self._refused.next_s(_now(), count, self.settings.max_streams)
            raise ResourceExhausted(reason, retry_after_s=retry_after_s)
        self._open += count
        try:
            yield
        finally:
            self._open -= count

    def _link_of(self, request_id: str) -> ShardLink:
        check_request_id(request_id)
        return self._shards.link_of(request_id)


def deadline_after(remaining_s: float | None, now: float) -> float | None:
    """Return a call's deadline in the loop's time. gRPC gives None, or an endless time, when there
    is none."""
    if remaining_s is None or not math.isfinite(remaining_s) or remaining_s > TEN_YEARS_S:
        return None
    return now + remaining_s


def _earliest_deadline(
    requests: Sequence[inference_pb2.GenerateRequest], *, unix_ms: float, now: float
) -> float | None:
    """Return the earliest `deadline_unix_ms`, on the clock of `now`. Raises DeadlineExceeded if it has
    passed."""
    given = [request.deadline_unix_ms for request in requests if request.HasField("deadline_unix_ms")]
    if not given:
        return None
    left_s = (min(given) - unix_ms) / 1000
    if left_s <= 0:
        raise DeadlineExceeded(f"deadline_unix_ms passed {-left_s:.3f} s ago, by the gateway's clock")
    return deadline_after(left_s, now)


def _no_later_than(deadline: float | None, caller: Caller) -> Caller:
    if deadline is None or (caller.deadline is not None and caller.deadline <= deadline):
        return caller
    return replace(caller, deadline=deadline)


@asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Enforce the deadline of a request's field until the scheduler enforces it. gRPC itself ends a call at
    the call's own deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the deadline passed before the request was accepted") from None


@contextmanager
def _ends_late(generation: Generation, deadline: float | None) -> Iterator[None]:
    """Fail a call whose scheduler does not end it at the deadline of the request's field: there may be none
    that leads, or its record may be gone."""
    if deadline is None:
        yield
        return
    error = DeadlineExceeded("the deadline passed, and the request's scheduler does not answer")
    timer = asyncio.get_running_loop().call_at(deadline + LATE_S, generation.fail, error)
    try:
        yield
    finally:
        timer.cancel()


def _now() -> float:
    return asyncio.get_running_loop().time()
