"""Requests on their way through the scheduler: as gateways submit them, as the record stores them, and as
workers receive, hold and offer them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from laps_sd.contract.length_features import packed, unpacked
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.store.records import NewRequest
from scheduler_svc.wire.gateway_messages import Submission, submission_of

Specification = gateway_pb.Specification
"""Settings of a request for the worker that runs it; the leader passes it on unread."""
LeasedSpecification = worker_pb.LeasedSpecification
"""Message with the specification that goes to a worker."""

BYTES_PER_TOKEN: Final = 3
"""Size of a token id on the wire."""


def new_request(submission: Submission, arrival_unix_ms: int) -> NewRequest:
    """Return a checked submission as the record takes it."""
    submit = submission.message
    specification = submit.specification
    sampling = specification.sampling
    return NewRequest(
        request_id=submit.request_id,
        tenant=submit.tenant,
        model=submit.model,
        priority=submit.priority,
        workload_class=submit.workload_class,
        arrival_unix_ms=arrival_unix_ms,
        prompt_ids=tuple(specification.prompt_ids),
        max_tokens=sampling.max_tokens,
        expected_output_tokens=submit.expected_output_tokens
        if submit.HasField("expected_output_tokens")
        else None,
        deadline_unix_ms=arrival_unix_ms + submit.deadline_in_ms
        if submit.HasField("deadline_in_ms")
        else None,
        time_limit_ms=submit.time_limit_ms if submit.HasField("time_limit_ms") else None,
        keep=submit.keep,
        grace_ms=-1 if submit.keep else submit.grace_ms,
        idempotency_key=submit.idempotency_key,
        body_hash=submit.body_hash.hex(),
        seed=sampling.seed,
        submission=_serialized(specification),
        length_features=packed(submit.length_features),
        prompt_blocks=submit.prompt_blocks,
    )


def _serialized(specification: Specification) -> bytes:
    """Return the settings as the record keeps them; it stores prompt and outputs by themselves."""
    settings = gateway_pb.Specification()
    settings.CopyFrom(specification)
    settings.ClearField("prompt_ids")
    settings.ClearField("committed_ids")
    settings.ClearField("origin")
    return settings.SerializeToString(deterministic=True)


@dataclass(slots=True)
class AcceptedRequest:
    """A request that is on the record, as it was submitted.

    Its prompt is not in a message, since most requests of a new leader wait: they need none before they are leased.
    """

    facts: Final[RequestFacts]
    model: Final[str]
    idempotency_key: Final[str]
    body_hash: Final[str]
    keep: Final[bool]
    grace_s: Final[float]
    """Seconds that the request lives without an attached client."""
    most_logprobs: Final[int | None]
    """Most alternatives per token, as the client requested them; None without logprobs."""
    prompt_logprobs: Final[int | None]
    """The same for the tokens of the prompt."""
    prompt_ids: Final[array[int]]
    settings: Final[Specification]
    """Specification without prompt, outputs and origin."""

    @property
    def sampling(self) -> SamplingParams:
        """Return its sampling parameters."""
        return self.settings.sampling

    @property
    def seed(self) -> int:
        """Return the seed of its sampling."""
        return self.sampling.seed

    @property
    def traceparent(self) -> str:
        """Return the traceparent of the span that the submission came with; empty if none."""
        return self.settings.traceparent

    @property
    def submission(self) -> bytes:
        """Return the settings as the record keeps them."""
        return self.settings.SerializeToString(deterministic=True)

    @property
    def settings_tokens(self) -> int:
        """Return the size of its settings on the wire, in token ids: an output format may be larger than the prompt."""
        return self.settings.ByteSize() // BYTES_PER_TOKEN

    def specify(self, specification: Specification) -> None:
        """Write prompt and settings into an empty message."""
        specification.CopyFrom(self.settings)
        specification.prompt_ids.extend(self.prompt_ids)


def accepted(new: NewRequest, sequence: int) -> AcceptedRequest:
    """Return a request that is on the record under this sequence number."""
    settings = Specification.FromString(new.submission)
    settings.request_id = new.request_id
    prompt_ids = new.prompt_ids
    return AcceptedRequest(
        facts=RequestFacts(
            request_id=new.request_id,
            sequence=sequence,
            arrival_s=new.arrival_unix_ms / 1000.0,
            tenant=new.tenant,
            priority=new.priority,
            workload_class=new.workload_class,
            prompt_tokens=len(prompt_ids),
            max_tokens=new.max_tokens,
            expected_output_tokens=new.expected_output_tokens,
            runs_to_limit=_runs_to_limit(settings),
            length_features=new.length_features,
            prompt_blocks=new.prompt_blocks,
            conversation=settings.conversation,
        ),
        model=new.model,
        idempotency_key=new.idempotency_key,
        body_hash=new.body_hash,
        keep=new.keep,
        grace_s=max(0, new.grace_ms) / 1000.0,
        most_logprobs=settings.logprobs if settings.HasField("logprobs") else None,
        prompt_logprobs=settings.prompt_logprobs if settings.HasField("prompt_logprobs") else None,
        prompt_ids=prompt_ids if isinstance(prompt_ids, array) else array("i", prompt_ids),
        settings=settings,
    )


def _runs_to_limit(specification: Specification) -> bool:
    sampling = specification.sampling
    # An output format may end before the limit.
    ends = sampling.stop or sampling.stop_token_ids or specification.HasField("output_format")
    return sampling.ignore_eos and not ends


def submission_again(
    request: AcceptedRequest, *, deadline_s: float | None, time_limit_s: float | None, now_s: float
) -> gateway_pb.Submit:
    """Return the request as it was submitted, with the rest of its times; without outputs."""
    submit = _without_specification(request, deadline_s, time_limit_s, now_s)
    request.specify(submit.specification)
    return submit


def _without_specification(
    request: AcceptedRequest, deadline_s: float | None, time_limit_s: float | None, now_s: float
) -> gateway_pb.Submit:
    facts = request.facts
    return gateway_pb.Submit(
        request_id=facts.request_id,
        tenant=facts.tenant,
        idempotency_key=request.idempotency_key,
        body_hash=bytes.fromhex(request.body_hash),
        priority=facts.priority,
        workload_class=facts.workload_class,
        expected_output_tokens=facts.expected_output_tokens,
        deadline_in_ms=_ms_from(now_s, deadline_s),
        time_limit_ms=_ms_from(now_s, time_limit_s),
        keep=request.keep,
        grace_ms=round(request.grace_s * 1000),
        model=request.model,
        traceparent=request.traceparent,
        length_features=unpacked(facts.length_features),
        prompt_blocks=facts.prompt_blocks,
    )


def _ms_from(now_s: float, moment_s: float | None) -> int | None:
    return None if moment_s is None else max(0, round((moment_s - now_s) * 1000))


def specify(
    request: AcceptedRequest,
    message: LeasedSpecification,
    *,
    lease_epoch: int,
    committed: Iterable[int],
    traceparent: str | None,
    origin: bytes,
) -> None:
    """Write into an empty message what a worker needs to continue after the committed tokens under this lease, and what
    it keeps for a scheduler that needs it. `traceparent`: the span of the lease; None where no trace is recorded.
    """
    message.lease_epoch = lease_epoch
    specification = message.specification
    request.specify(specification)
    specification.committed_ids.extend(committed)
    specification.origin = origin
    if traceparent is not None:
        specification.traceparent = traceparent


def origin(
    request: AcceptedRequest,
    *,
    deadline_s: float | None,
    time_limit_s: float | None,
    now_s: float,
    incarnation: str,
) -> bytes:
    """Return everything that the worker's hello would lack to restore the request, if this record (its
    `incarnation`) loses it.
    """
    # Without the specification: the worker offers that itself. A worker of another release offers only the
    # fields that it knows, and generated by no others.
    submit = _without_specification(request, deadline_s, time_limit_s, now_s)
    return gateway_pb.Origin(
        submit=submit, written_unix_ms=round(now_s * 1000), incarnation=incarnation
    ).SerializeToString()


@dataclass(frozen=True, slots=True)
class Offer:
    """A request that a worker holds, with its specification and outputs."""

    message: worker_pb.HeldRequest

    @property
    def request_id(self) -> str:
        """Return the id of the request."""
        return self.message.request_id

    @property
    def committed_ids(self) -> Sequence[int]:
        """Return the outputs that a leader had acknowledged."""
        return self.message.specification.committed_ids


def offered(offer: Offer, incarnation: str, now_unix_ms: int) -> Submission | None:
    """Return the submission of a request that a worker holds, if its record is gone: with the outputs that a
    leader had acknowledged. Return None if the present record is the one that had the request (then the
    request has ended), or for invalid data.
    """
    held = offer.message
    origin = gateway_pb.Origin()
    try:
        origin.ParseFromString(held.specification.origin)
    except DecodeError:
        return None
    submit = origin.submit
    if origin.incarnation in ("", incarnation) or submit.request_id != held.request_id:
        return None
    elapsed_ms = max(0, now_unix_ms - origin.written_unix_ms)
    for name in ("deadline_in_ms", "time_limit_ms"):
        if submit.HasField(name):
            setattr(submit, name, max(1, getattr(submit, name) - elapsed_ms))
    submit.specification.CopyFrom(held.specification)
    submit.specification.ClearField("committed_ids")
    submit.specification.ClearField("origin")
    submit.specification.traceparent = submit.traceparent  # the worker has the span of its lease
    submit.shown_ids.extend(held.specification.committed_ids)
    submit.restores = True
    return submission_of(submit)
