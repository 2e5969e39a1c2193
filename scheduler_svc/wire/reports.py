"""Messages of workers: the hello and the reports of rounds, as the core takes them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from laps_sd.contract.choose import Residency
from laps_sd.contract.length_probe import LearntProbe, ProbeKind
from laps_sd.contract.prompt_blocks import MOST_CACHED_BLOCKS, problem_of
from laps_sd.service import ends
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.core.events import (
    CacheChanged,
    Held,
    Progress,
    ResidencyChange,
    RoundReported,
    WorkerFacts,
)
from scheduler_svc.wire.checks import MAX_TOKEN_ID
from scheduler_svc.wire.requests import Offer

WorkerMessage = worker_pb.WorkerMessage
"""Message of a worker after its hello; `from_worker` reads it."""
WorkerHello = worker_pb.WorkerHello

RESIDENCIES = {
    worker_pb.HeldRequest.RESIDENCY_UNSPECIFIED: Residency.NONE,
    worker_pb.HeldRequest.RESIDENCY_NONE: Residency.NONE,
    worker_pb.HeldRequest.RESIDENCY_HOST: Residency.HOST,
    worker_pb.HeldRequest.RESIDENCY_DEVICE: Residency.DEVICE,
}
MAX_DRAFTED_PER_ROUND = 4096
"""Upper bound of the draft tokens of a round, more than any draft is long: a larger number from a worker
counts as this, so that no sum overflows.
"""
MAX_PREFILLED_PER_ROUND = 2**24
"""Upper bound of the prefilled tokens of a round, more than any context is long; a larger number counts as
this.
"""
MAX_DURATION_S = 86_400.0
"""Upper bound of a duration: no part of a round takes a day."""
NOWHERE = 2**32
"""Position that no output reaches: for the core, a worker that reports it has a wrong state of the
request.
"""


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker that connects: what it can hold, and what it holds."""

    name: str
    facts: WorkerFacts
    held: tuple[Held, ...]
    cached_blocks: bytes
    """Names of the prompt blocks whose KV it has."""
    offers: tuple[Offer, ...]
    """Those of the held requests that came with their specification."""
    draining: bool
    vocabulary: bytes
    """Digest of the tokens of all ids; empty: unknown."""
    probe: ProbeKind | None
    """Its probe of output lengths; None: it has none that could use what others have learnt."""


def hello_of(hello: WorkerHello) -> Hello:
    """Return the content of a worker's checked hello."""
    return Hello(
        name=hello.worker_name,
        facts=WorkerFacts(
            worker_id=hello.worker_id,
            slots=hello.slots,
            target_blocks=hello.target_blocks,
            draft_blocks=hello.draft_blocks,
            block_size=hello.block_size,
            max_length=hello.max_length,
            max_draft_len=hello.max_draft_tokens,
        ),
        held=tuple(
            Held(
                held.request_id,
                held.lease_epoch,
                RESIDENCIES.get(held.residency, Residency.NONE),
                held.emitted,
                _prediction(held),
            )
            for held in hello.held
        ),
        cached_blocks=hello.cached_blocks,
        offers=tuple(Offer(held) for held in hello.held if held.HasField("specification")),
        draining=hello.draining,
        vocabulary=hello.vocabulary,
        probe=_probe_kind(hello.length_probe) if hello.HasField("length_probe") else None,
    )


class Details(NamedTuple):
    """Details of one request in a report that the core's event does not have."""

    request_id: str
    lease_epoch: int
    position: int
    cached_tokens: int
    """Prompt tokens that were in the prefix cache."""
    logprobs: Sequence[pb.TokenLogprobs]
    """Logprobs of the tokens from `position` on."""
    prompt_logprobs: pb.PromptLogprobs | None
    """Those of the prompt, with its first output token; None without any."""


@dataclass(frozen=True, slots=True)
class Report:
    """Report of one round."""

    number: int
    event: RoundReported
    details: list[Details]
    """Details of the requests that have any."""
    cache: CacheChanged | None
    """Changes of what its cache holds; None without any."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Requests of which a worker lacks the specification."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker that drains itself."""


def from_worker(
    worker_id: str, message: WorkerMessage
) -> list[Report] | Missing | Leaving | LearntProbe | None:
    """Return the content of a worker's message; None for a kind that this release does not know."""
    match message.WhichOneof("message"):
        case "reports":
            return [
                Report(
                    report.number,
                    round_reported(worker_id, report),
                    [
                        Details(
                            one.request_id,
                            one.lease_epoch,
                            one.position,
                            one.cached,
                            one.logprobs,
                            one.prompt_logprobs if one.HasField("prompt_logprobs") else None,
                        )
                        for one in report.progress
                        if one.cached or one.logprobs or one.HasField("prompt_logprobs")
                    ],
                    _cache_changed(worker_id, report),
                )
                for report in message.reports.reports
            ]
        case "missing":
            return Missing(tuple(message.missing.request_ids))
        case "drain":
            return Leaving()
        case "learnt_probe":
            learnt = message.learnt_probe
            return LearntProbe(_probe_kind(learnt.kind), learnt.requests, learnt.numbers)
    return None


def _cache_changed(worker_id: str, report: worker_pb.RoundReport) -> CacheChanged | None:
    """Return the changes of a worker's cache; None without any."""
    added, removed = _names(report.cached_blocks), _names(report.evicted_blocks)
    return CacheChanged(worker_id, added, removed) if added or removed else None


def _names(names: bytes) -> bytes:
    """Return names of prompt blocks; none if they are not whole, or more than a worker may have."""
    return b"" if names and problem_of(names, MOST_CACHED_BLOCKS) else names


def _probe_kind(kind: worker_pb.ProbeKind) -> ProbeKind:
    return ProbeKind(kind.model, kind.layer, kind.seed, kind.dims)


def alternatives(logprobs: pb.TokenLogprobs) -> int:
    """Return the number of alternatives that the logprobs of a token name."""
    return len(logprobs.top)


def prompt_logprobs_in(found: pb.PromptLogprobs) -> int:
    """Return the number of logprobs, those of alternatives included."""
    return len(found.logprobs) + len(found.alternative_logprobs)


def are_whole(found: pb.PromptLogprobs, prompt_tokens: int, most: int) -> bool:
    """Return whether these are the logprobs of a prompt of `prompt_tokens`, with at most `most` alternatives each."""
    rows = prompt_tokens - 1
    of_alternatives = len(found.alternative_ids), len(found.alternative_logprobs)
    return (
        found.alternatives <= most
        and len(found.logprobs) == len(found.ranks) == rows
        and of_alternatives == (rows * found.alternatives, rows * found.alternatives)
    )


def round_reported(worker_id: str, report: worker_pb.RoundReport) -> RoundReported:
    """Return one round as an event for the core. A report is never refused: invalid times count as 0, a
    request that is named twice counts once, and invalid tokens count as a wrong state of the request.
    """
    reported = [*_plain_progress(report.plain), *map(_progress, report.progress)]
    if len({progress.request_id for progress in reported}) < len(reported):
        once = {(progress.request_id, progress.lease_epoch): progress for progress in reversed(reported)}
        reported = list(reversed(once.values()))
    return RoundReported(
        worker_id=worker_id,
        progress=tuple(reported),
        residency=tuple(
            ResidencyChange(
                change.request_id, change.lease_epoch, RESIDENCIES.get(change.residency, Residency.NONE)
            )
            for change in report.residency
        ),
        draft_s=_duration(report.draft_s),
        verify_s=_duration(report.verify_s),
        prefill_s=_duration(report.prefill_s),
        swap_s=_duration(report.swap_s),
        idle_s=_duration(report.idle_s),
        total_s=_duration(report.total_s),
        free_target_blocks=report.free_target_blocks,
        free_draft_blocks=report.free_draft_blocks,
        limit_s=_duration(report.limit_s),
    )


def _duration(value_s: float) -> float:
    return value_s if 0 < value_s <= MAX_DURATION_S else 0.0  # NaN fails both comparisons


def _prediction(message: worker_pb.RequestProgress | worker_pb.HeldRequest) -> float | None:
    """Return the predicted remaining tokens; None without a prediction, and for NaN or infinity."""
    if not message.HasField("predicted_remaining_tokens"):
        return None
    predicted = message.predicted_remaining_tokens
    return predicted if math.isfinite(predicted) else None


def _progress(progress: worker_pb.RequestProgress) -> Progress:
    # Slices: reading a repeated field entry by entry takes twice as long.
    tokens = tuple(progress.token_ids[:])
    believable = not tokens or max(tokens) <= MAX_TOKEN_ID
    return Progress(
        request_id=progress.request_id,
        lease_epoch=progress.lease_epoch,
        position=progress.position if believable else NOWHERE,
        tokens=tokens if believable else (),
        drafted=min(progress.drafted, MAX_DRAFTED_PER_ROUND),
        accepted=min(progress.accepted, progress.drafted, MAX_DRAFTED_PER_ROUND),
        prefilled=min(progress.prefilled, MAX_PREFILLED_PER_ROUND),
        end=ends.end_of_kind(progress.end),
        cut_characters=progress.cut_characters,
        error=progress.error[:1024],
        predicted_remaining_tokens=_prediction(progress),
        cached=min(progress.cached, MAX_PREFILLED_PER_ROUND),
    )


def _plain_progress(plain: worker_pb.PlainProgress) -> list[Progress]:
    """Return the progress in columns. If these do not fit together, each of their requests counts as one in a
    wrong state.
    """
    request_ids, epochs, positions = plain.request_ids[:], plain.lease_epochs[:], plain.positions[:]
    counts, drafted, accepted = plain.token_counts[:], plain.drafted[:], plain.accepted[:]
    token_ids = tuple(plain.token_ids[:])
    if not request_ids:
        return []
    firsts = list(accumulate(counts, initial=0))
    lengths = {len(epochs), len(positions), len(counts), len(drafted), len(accepted)}
    if lengths != {len(request_ids)} or firsts[-1] != len(token_ids):
        named = zip(request_ids, epochs, strict=False)
        return [Progress(name, epoch, NOWHERE, (), 0, 0, 0, None, 0, "") for name, epoch in named]
    tokens = [token_ids[first:end] for first, end in pairwise(firsts)]
    if max(token_ids, default=0) > MAX_TOKEN_ID:
        for row, of_row in enumerate(tokens):
            if max(of_row, default=0) > MAX_TOKEN_ID:
                positions[row], tokens[row] = NOWHERE, ()
    if max(drafted) > MAX_DRAFTED_PER_ROUND or any(map(operator.gt, accepted, drafted)):
        drafted = [min(count, MAX_DRAFTED_PER_ROUND) for count in drafted]
        accepted = list(map(min, accepted, drafted))
    rows = zip(request_ids, epochs, positions, tokens, drafted, accepted, strict=True)
    # Without names of arguments, which take a third of the time.
    return [
        Progress(name, epoch, at, new, proposed, taken, 0, None, 0, "")
        for name, epoch, at, new, proposed, taken in rows
    ]
