"""Translation between the messages of WorkerLink and the types of runner and engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from laps_sd import __version__
from laps_sd.contract.choose import Residency
from laps_sd.contract.length_probe import LearntProbe, ProbeKind, problem_with
from laps_sd.contract.sampling import LEAST_TEMPERATURE
from laps_sd.service import ends
from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.service.text_parameters import skips_special_tokens
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import inference_pb2 as public_pb
from laps_sd.v1 import worker_link_pb2 as pb
from worker_svc.engine.interface import (
    Capacity,
    Drafter,
    FormatKind,
    OutputFormat,
    PromptLogprobs,
    RequestRound,
    Sampling,
    Specification,
)
from worker_svc.runner.messages import HeldNow, HeldRequest, Listed, Round
from worker_svc.settings import WorkerSettings

__all__ = [
    "held_requests",
    "hello",
    "learnt_probe",
    "listed",
    "round_report",
    "specification",
    "wire_probe",
    "without_columns",
]

HELLO_BYTES = 4 * 1024 * 1024
"""Bound of the specifications in a hello: about a million token ids, and well below the largest message."""

SAMPLING: tuple[Any, ...] = tuple(field.name for field in fields(Sampling))
"""The fields that the engine's `Sampling` and the message `SamplingParams` both have, under the same name."""
LISTS: dict[str, Callable[[public_pb.SamplingParams], Any]] = {
    "logit_bias": lambda sampling: tuple(sorted(sampling.logit_bias.items())),
    "bad_words_ids": lambda sampling: tuple(tuple(word.ids) for word in sampling.bad_words_ids),
    "allowed_token_ids": lambda sampling: tuple(sampling.allowed_token_ids),
}
"""Those of them that are not single numbers."""
DRAFTERS = {
    public_pb.Speculation.DRAFTER_MODEL: Drafter.MODEL,
    public_pb.Speculation.DRAFTER_LOOKUP: Drafter.LOOKUP,
}
RESIDENCIES = {
    Residency.NONE: pb.HeldRequest.RESIDENCY_NONE,
    Residency.HOST: pb.HeldRequest.RESIDENCY_HOST,
    Residency.DEVICE: pb.HeldRequest.RESIDENCY_DEVICE,
}


def hello(
    settings: WorkerSettings,
    worker_id: str,
    capacity: Capacity,
    fingerprint: str,
    held: HeldNow,
    *,
    probe: ProbeKind | None = None,
    draining: bool,
) -> pb.WorkerHello:
    """Return the first message of a stream."""
    return pb.WorkerHello(
        worker_id=worker_id,
        worker_name=settings.name,
        pool=settings.pool,
        protocol_versions=PROTOCOL_VERSIONS,
        software_version=__version__,
        fingerprint=fingerprint,
        device=capacity.device,
        slots=capacity.slots,
        target_blocks=capacity.target_blocks,
        draft_blocks=capacity.draft_blocks,
        block_size=capacity.block_size,
        max_length=capacity.max_length,
        # The scheduler reads it as the room that a round needs beyond a request's next token.
        max_draft_tokens=capacity.growth - 1,
        vocab_size=capacity.vocab_size,
        vocabulary=capacity.vocabulary,
        held=held_requests(held.requests),
        cached_blocks=held.cached_blocks,
        draining=draining,
        last_report=held.last_report,
        length_probe=None if probe is None else _wire_kind(probe),
    )


def _wire_kind(kind: ProbeKind) -> pb.ProbeKind:
    return pb.ProbeKind(model=kind.model, layer=kind.layer, seed=kind.seed, dims=kind.dims)


def wire_probe(learnt: LearntProbe) -> pb.LearntProbe:
    """Return the wire message of what a probe has learnt."""
    return pb.LearntProbe(kind=_wire_kind(learnt.kind), requests=learnt.requests, numbers=learnt.numbers)


def learnt_probe(message: pb.LearntProbe) -> LearntProbe | None:
    """Return what the probe of another worker has learnt; None if it is damaged."""
    kind = message.kind
    learnt = LearntProbe(
        ProbeKind(kind.model, kind.layer, kind.seed, kind.dims), message.requests, message.numbers
    )
    return None if problem_with(learnt) else learnt


def round_report(outcome: Round) -> pb.RoundReport:
    """Return the wire message of one report, as a scheduler of the newest protocol version reads it."""
    result = outcome.result
    plain: list[tuple[int, RequestRound]] = []
    others: list[tuple[int, RequestRound]] = []
    for row in outcome.progress:
        (plain if _is_plain(row[1]) else others).append(row)
    return pb.RoundReport(
        number=outcome.number,
        plain=_plain_progress(plain) if plain else None,
        progress=[_progress(lease_epoch, step) for lease_epoch, step in others],
        residency=[
            pb.ResidencyChanged(
                request_id=request_id, lease_epoch=lease_epoch, residency=RESIDENCIES[residency]
            )
            for request_id, lease_epoch, residency in outcome.residency
        ],
        draft_s=result.draft_s,
        verify_s=result.verify_s,
        prefill_s=result.prefill_s,
        swap_s=result.swap_s + outcome.swap_out_s,
        idle_s=outcome.idle_s,
        total_s=result.total_s + outcome.swap_out_s,
        free_target_blocks=result.free_target_blocks,
        free_draft_blocks=result.free_draft_blocks,
        cached_blocks=outcome.cache.added,
        evicted_blocks=outcome.cache.removed,
        limit_s=result.limit_s,
    )


def _is_plain(step: RequestRound) -> bool:
    """Return whether the columns of a report can carry all that this step has."""
    return (
        step.tokens != ()
        and step.finish is None
        and step.predicted_remaining_tokens is None
        and step.prompt_logprobs is None
        and not (step.prefilled or step.cached or step.cut_characters or step.error or step.logprobs)
    )


def _plain_progress(rows: Sequence[tuple[int, RequestRound]]) -> pb.PlainProgress:
    steps = [step for _, step in rows]
    return pb.PlainProgress(
        request_ids=[step.request_id for step in steps],
        lease_epochs=[lease_epoch for lease_epoch, _ in rows],
        positions=[step.position for step in steps],
        token_counts=[len(step.tokens) for step in steps],
        token_ids=[token for step in steps for token in step.tokens],
        drafted=[step.drafted for step in steps],
        accepted=[step.accepted for step in steps],
    )


def _progress(lease_epoch: int, step: RequestRound) -> pb.RequestProgress:
    return pb.RequestProgress(
        request_id=step.request_id,
        lease_epoch=lease_epoch,
        position=step.position,
        token_ids=step.tokens,
        drafted=step.drafted,
        accepted=step.accepted,
        prefilled=step.prefilled,
        cached=step.cached,
        end=ends.KINDS[step.finish],
        cut_characters=step.cut_characters,
        error=step.error or "",
        predicted_remaining_tokens=step.predicted_remaining_tokens,
        logprobs=[
            public_pb.TokenLogprobs(
                logprob=entry.logprob,
                top=[public_pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in entry.top],
            )
            for entry in step.logprobs
        ],
        prompt_logprobs=None if step.prompt_logprobs is None else _prompt_logprobs(step.prompt_logprobs),
    )


def _prompt_logprobs(found: PromptLogprobs) -> public_pb.PromptLogprobs:
    return public_pb.PromptLogprobs(
        logprobs=found.logprobs,
        ranks=found.ranks,
        alternatives=found.alternatives,
        alternative_ids=found.alternative_ids,
        alternative_logprobs=found.alternative_logprobs,
    )


def without_columns(report: pb.RoundReport) -> pb.RoundReport:
    """Return the same report as a scheduler of protocol version 1 reads it."""
    plain = report.plain
    same = pb.RoundReport()
    same.CopyFrom(report)
    same.ClearField("plain")
    rows = zip(
        plain.request_ids, plain.lease_epochs, plain.positions, plain.token_counts, plain.drafted, plain.accepted,
        strict=True,
    )  # fmt: skip
    first = 0
    for request_id, lease_epoch, position, count, drafted, accepted in rows:
        same.progress.add(
            request_id=request_id,
            lease_epoch=lease_epoch,
            position=position,
            token_ids=plain.token_ids[first : first + count],
            drafted=drafted,
            accepted=accepted,
        )
        first += count
    return same


def listed(entry: pb.AssignmentEntry) -> Listed:
    """Return one entry of an assignment."""
    return Listed(
        entry.request_id,
        entry.lease_epoch,
        entry.rank_class,
        entry.index_s,
        entry.resume_cost_s,
        entry.reserved,
        entry.pinned,
    )


def specification(wire_spec: gateway_pb.Specification) -> Specification:
    """Return the engine's specification from the wire message. The engine checks it."""
    wire_sampling = wire_spec.sampling
    return Specification(
        request_id=wire_spec.request_id,
        prompt_ids=tuple(wire_spec.prompt_ids),
        committed_ids=tuple(wire_spec.committed_ids),
        sampling=_sampling(wire_sampling),
        max_tokens=wire_sampling.max_tokens,
        stop=tuple(wire_sampling.stop),
        ignore_eos=wire_sampling.ignore_eos,
        stop_token_ids=tuple(wire_sampling.stop_token_ids),
        include_stop_str_in_output=wire_sampling.include_stop_str_in_output,
        skip_special_tokens=skips_special_tokens(wire_sampling),
        max_draft_len=wire_spec.max_draft_tokens if wire_spec.HasField("max_draft_tokens") else None,
        drafter=DRAFTERS.get(wire_spec.drafter),
        format=_output_format(wire_spec.output_format),
        logprobs=wire_spec.logprobs if wire_spec.HasField("logprobs") else None,
        prompt_logprobs=wire_spec.prompt_logprobs if wire_spec.HasField("prompt_logprobs") else None,
        origin=wire_spec.origin,
        cache_salt=wire_spec.cache_salt,
        adapter=wire_spec.adapter,
    )


def _sampling(wire_sampling: public_pb.SamplingParams) -> Sampling:
    values: dict[str, Any] = {}
    for name in SAMPLING:
        if name in LISTS:
            values[name] = LISTS[name](wire_sampling)
        elif wire_sampling.HasField(name):
            values[name] = getattr(wire_sampling, name)
    sampling = Sampling(**values)
    return sampling if sampling.temperature >= LEAST_TEMPERATURE else replace(sampling, temperature=0.0)


def _wire_sampling(spec: Specification) -> public_pb.SamplingParams:
    values: dict[str, Any] = {name: getattr(spec.sampling, name) for name in SAMPLING}
    values["logit_bias"] = dict(spec.sampling.logit_bias)
    values["bad_words_ids"] = [public_pb.TokenIds(ids=word) for word in spec.sampling.bad_words_ids]
    return public_pb.SamplingParams(
        max_tokens=spec.max_tokens,
        stop=spec.stop,
        ignore_eos=spec.ignore_eos,
        stop_token_ids=spec.stop_token_ids,
        include_stop_str_in_output=spec.include_stop_str_in_output,
        skip_special_tokens=spec.skip_special_tokens,
        **values,
    )


def _output_format(wire_format: public_pb.OutputFormat) -> OutputFormat | None:
    kind = wire_format.WhichOneof("format")
    if kind is None:
        return None
    return OutputFormat(FormatKind(kind), "" if kind == "json_object" else getattr(wire_format, kind))


def _wire_format(output_format: OutputFormat) -> public_pb.OutputFormat:
    text: str | bool = output_format.text if output_format.kind is not FormatKind.JSON_OBJECT else True
    return public_pb.OutputFormat(**{output_format.kind.value: text})  # type: ignore[arg-type]


def held_requests(requests: Sequence[HeldRequest]) -> list[pb.HeldRequest]:
    """Return the held requests for a hello, in the order of arrival.

    Specifications are included as far as `HELLO_BYTES` allows.
    """
    room = HELLO_BYTES
    requests_on_wire = []
    for held in requests:
        one = pb.HeldRequest(
            request_id=held.spec.request_id,
            lease_epoch=held.lease_epoch,
            residency=RESIDENCIES[held.residency],
            emitted=len(held.output_ids),
            predicted_remaining_tokens=held.predicted_remaining_tokens,
        )
        if room > 0:
            specification = _wire_specification(held)
            room -= specification.ByteSize()
            if room >= 0:
                one.specification.CopyFrom(specification)
        requests_on_wire.append(one)
    return requests_on_wire


def _wire_specification(held: HeldRequest) -> gateway_pb.Specification:
    """Return the specification with all acknowledged outputs; reports bring the other ones."""
    spec = held.spec
    return gateway_pb.Specification(
        request_id=spec.request_id,
        prompt_ids=spec.prompt_ids,
        committed_ids=held.output_ids[: held.acknowledged],
        sampling=_wire_sampling(spec),
        max_draft_tokens=spec.max_draft_len,
        output_format=None if spec.format is None else _wire_format(spec.format),
        drafter=next(
            (wire for wire, own in DRAFTERS.items() if own is spec.drafter),
            public_pb.Speculation.DRAFTER_UNSPECIFIED,
        ),
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
        origin=spec.origin,
        cache_salt=spec.cache_salt,
        adapter=spec.adapter,
    )
