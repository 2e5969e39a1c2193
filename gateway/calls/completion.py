"""The submission of a checked request: defaults filled in, and what needs the prompt's token ids checked.
Pure: no clock, no randomness, no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gateway.calls.bad_words import BadWords
from gateway.calls.validation import SpeculationMode, prompt_too_long
from gateway.model.files import ModelFiles
from gateway.settings import GatewaySettings
from laps_sd.contract.limits import MAX_BAD_WORD_TOKENS, MAX_STOP_TOKENS
from laps_sd.contract.prompt_blocks import NAME_BYTES
from laps_sd.errors import InvalidArgument
from laps_sd.service.text_parameters import skips_special_tokens
from laps_sd.v1 import gateway_link_pb2, inference_pb2

__all__ = ["body_hash", "complete"]


def complete(
    request: inference_pb2.GenerateRequest,
    prompt_ids: Sequence[int],
    *,
    settings: GatewaySettings,
    model: ModelFiles,
    tenant: str,
    fallback_seed: int,
    capacity_tokens: int | None = None,
    bad_words: BadWords | None = None,
    reads_markup: bool = False,
) -> gateway_link_pb2.Submit:
    """Return the submission of a checked request, with defaults filled in; the id is added with the shard.

    Raises InvalidArgument if the request does not fit the context. `bad_words`: shared by all submissions of a call.
    `capacity_tokens`: the most tokens of prompt and output for which the workers have room, if that is known; an
    output without a limit of its own is that much shorter. A prompt for which they have no room is refused by the
    scheduler, or waits for a larger worker. `reads_markup`: see `Calls.generate`.
    """
    left = _context_left(request, len(prompt_ids), model)
    room = (capacity_tokens or 0) - len(prompt_ids)
    sampling = _filled_in(
        request.sampling, min(left, room) if room > 0 else left, settings, model, fallback_seed
    )
    _set_bad_words(sampling, bad_words or BadWords(model))
    if reads_markup:
        _end_with_markup(sampling, model)
    adapter = model.adapter_of(request.model)
    submit = gateway_link_pb2.Submit(
        tenant=tenant,
        specification=_specification(request, prompt_ids, sampling, settings, tenant, adapter),
        idempotency_key=request.idempotency_key,
        body_hash=body_hash(request),
        priority=request.priority,
        workload_class=request.workload_class,
        keep=request.keep,
        grace_ms=round(settings.grace_with_key_s * 1000) if request.idempotency_key else 0,
        model=adapter or model.name,
    )
    if request.HasField("time_limit_ms"):
        submit.time_limit_ms = request.time_limit_ms
    if request.HasField("expected_output_tokens"):
        submit.expected_output_tokens = request.expected_output_tokens
    return submit


def _context_left(request: inference_pb2.GenerateRequest, prompt_tokens: int, model: ModelFiles) -> int:
    """Return the tokens of the context after the prompt. Raises InvalidArgument if the request needs more."""
    prompt = request.WhichOneof("prompt") or "prompt"
    if not prompt_tokens:
        raise InvalidArgument(prompt, "must make at least one token, got none")
    left = model.context_tokens - prompt_tokens
    if left < 1:
        raise prompt_too_long(prompt, prompt_tokens, model)
    if request.sampling.max_tokens > left:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"must be at most {left} after a prompt of {prompt_tokens} tokens in a context of "
            f"{model.context_tokens}, got {request.sampling.max_tokens}",
        )
    return left


def _specification(
    request: inference_pb2.GenerateRequest,
    prompt_ids: Sequence[int],
    sampling: inference_pb2.SamplingParams,
    settings: GatewaySettings,
    tenant: str,
    adapter: str,
) -> gateway_link_pb2.Specification:
    """Return what a worker gets of a request; `sampling` is filled in."""
    specification = gateway_link_pb2.Specification(
        prompt_ids=prompt_ids,
        sampling=sampling,
        drafter=request.speculation.drafter,
        cache_salt=_cache_salt(request, settings, tenant, adapter),
        adapter=adapter,
    )
    if request.conversation:
        specification.conversation = _digest(tenant, request.conversation, size=NAME_BYTES)
    if request.output_format.WhichOneof("format"):
        specification.output_format.CopyFrom(request.output_format)
    if request.speculation.mode == SpeculationMode.MODE_OFF:
        specification.max_draft_tokens = 0
    elif request.speculation.HasField("max_draft_tokens"):
        specification.max_draft_tokens = request.speculation.max_draft_tokens
    if request.HasField("logprobs"):
        specification.logprobs = request.logprobs
    if request.HasField("prompt_logprobs"):
        specification.prompt_logprobs = request.prompt_logprobs
    return specification


def _filled_in(
    sampling: inference_pb2.SamplingParams,
    room: int,
    settings: GatewaySettings,
    model: ModelFiles,
    fallback_seed: int,
) -> inference_pb2.SamplingParams:
    """Return sampling parameters with the defaults of the model and the gateway. `room`: tokens that fit after
    the prompt. Raises InvalidArgument.
    """
    most = min(room, settings.max_output_tokens)
    filled_in = inference_pb2.SamplingParams(
        max_tokens=min(most, settings.default_max_tokens or most),
        temperature=1.0,
        top_p=1.0,
        seed=fallback_seed,
    )
    filled_in.MergeFrom(model.recommended)
    if not sampling.HasField("max_tokens"):
        filled_in.max_tokens = min(max(filled_in.max_tokens, sampling.min_tokens), most)
    filled_in.MergeFrom(sampling)
    if filled_in.min_tokens > filled_in.max_tokens:
        raise InvalidArgument(
            "sampling.min_tokens",
            f"must be at most max_tokens, {filled_in.max_tokens}, got {filled_in.min_tokens}",
        )
    # Fields of a later release, which nothing here has checked.
    filled_in.DiscardUnknownFields()  # type: ignore[attr-defined]
    return filled_in


def _end_with_markup(sampling: inference_pb2.SamplingParams, model: ModelFiles) -> None:
    """Have the tokens of markup that are stop strings end the output: for a worker they have no text. Not
    with `min_tokens`, which keeps tokens from being chosen and lets stop strings pass."""
    if sampling.min_tokens or not skips_special_tokens(sampling):
        return
    ends = sampling.stop_token_ids
    tokens = [model.markup[text] for text in sampling.stop if text in model.markup]
    ends.extend([token for token in tokens if token not in ends][: MAX_STOP_TOKENS - len(ends)])


def _set_bad_words(sampling: inference_pb2.SamplingParams, bad_words: BadWords) -> None:
    """Turn the bad words that are texts into token ids, which is the form that workers take."""
    given = {tuple(word.ids) for word in sampling.bad_words_ids}
    for ids in bad_words.sequences_of(sampling.bad_words):
        if len(ids) > MAX_BAD_WORD_TOKENS:
            raise InvalidArgument(
                "sampling.bad_words", f"must be texts of at most {MAX_BAD_WORD_TOKENS} tokens, got {len(ids)}"
            )
        if ids not in given:
            sampling.bad_words_ids.add(ids=ids)
    del sampling.bad_words[:]


def _cache_salt(
    request: inference_pb2.GenerateRequest, settings: GatewaySettings, tenant: str, adapter: str
) -> str:
    """Return the salt of a prompt: what is computed for it is used for prompts of equal salt only."""
    salt = "" if settings.share_prompts else tenant
    if request.cache_salt:
        salt = _digest(salt, request.cache_salt, size=16).hex()
    return _digest(salt, f"adapter\0{adapter}", size=16).hex() if adapter else salt


def _digest(tenant: str, text: str, size: int) -> bytes:
    return hashlib.blake2b(f"{tenant}\0{text}".encode(), digest_size=size).digest()


def body_hash(request: inference_pb2.GenerateRequest) -> bytes:
    """Return the hash of the request that an idempotency key identifies: the request as sent, without the key
    itself and without the deadline. A retry has another deadline, but needs the same result."""
    body = inference_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("idempotency_key")
    body.ClearField("deadline_unix_ms")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()
