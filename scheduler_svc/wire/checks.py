"""Checks of what peers send: a message out of bounds is refused by the name of its field."""

from __future__ import annotations

import math

from laps_sd.contract import length_features, limits, prompt_blocks
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams

MAX_NAME_LENGTH = 256
MAX_HELD = 100_000
MAX_SLOTS = 65_536
MIN_CONTEXT = 2
"""Tokens of the shortest request: one of its prompt and one of its output."""
MAX_TOKEN_ID = 2**31 - 1
MAX_DIGEST_BYTES = 64
MAX_TIME_MS = limits.TEN_YEARS_S * 1000
"""Ten years: the value that gateways treat as "no deadline"."""


def check_submission(submit: gateway_pb.Submit, max_context_tokens: int) -> None:
    """Refuse a submission that no gateway of ours sends: what they check is not relied on here.

    Raises InvalidArgument naming the field and the limit.
    """
    specification = submit.specification
    sampling = specification.sampling
    _check_names(submit)
    for name in ("deadline_in_ms", "time_limit_ms", "grace_ms"):
        if getattr(submit, name) > MAX_TIME_MS:
            raise InvalidArgument(name, f"must be at most {MAX_TIME_MS}, got {getattr(submit, name)}")
    _check_prompt(submit)
    check_fits(submit, max_context_tokens)
    _check_outputs(submit, sampling.max_tokens)
    _check_sampling(sampling)
    if specification.output_format.ByteSize() > limits.RECORDED_FORMAT_BYTES:
        raise InvalidArgument(
            "specification.output_format", f"must have at most {limits.RECORDED_FORMAT_BYTES} bytes"
        )
    if specification.logprobs > limits.RECORDED_LOGPROBS:
        raise InvalidArgument("specification.logprobs", f"must be at most {limits.RECORDED_LOGPROBS}")
    if specification.HasField("prompt_logprobs"):
        _check_prompt_logprobs(specification.prompt_logprobs, len(specification.prompt_ids))


def check_fits(submit: gateway_pb.Submit, most_tokens: int) -> None:
    """Refuse a submission whose prompt and output may have more tokens together. Raises InvalidArgument."""
    specification = submit.specification
    prompt_tokens, max_tokens = len(specification.prompt_ids), specification.sampling.max_tokens
    if prompt_tokens >= most_tokens:
        raise InvalidArgument(
            "specification.prompt_ids",
            f"must have at most {max(0, most_tokens - 1)} tokens in this shard, got {prompt_tokens}",
        )
    room = most_tokens - prompt_tokens
    if max_tokens > room:
        raise InvalidArgument(
            "specification.sampling.max_tokens",
            f"must be at most {room} after a prompt of {prompt_tokens} tokens in this shard, got {max_tokens}",
        )


def _check_prompt_logprobs(alternatives: int, prompt_tokens: int) -> None:
    most, count = limits.RECORDED_PROMPT_LOGPROBS, limits.prompt_logprobs_in_all(prompt_tokens, alternatives)
    if alternatives > limits.RECORDED_LOGPROBS:
        raise InvalidArgument("specification.prompt_logprobs", f"must be at most {limits.RECORDED_LOGPROBS}")
    if count > most:
        raise InvalidArgument(
            "specification.prompt_logprobs", f"must make at most {most} log probabilities, got {count}"
        )


def _check_names(submit: gateway_pb.Submit) -> None:
    _bounded("request_id", submit.request_id, minimum=1)
    if not submit.request_id.isprintable() or " " in submit.request_id:
        raise InvalidArgument("request_id", "must hold printable characters and no white space")
    _bounded("tenant", submit.tenant, minimum=1)
    _bounded("idempotency_key", submit.idempotency_key)
    _bounded("workload_class", submit.workload_class)
    _bounded("model", submit.model)
    _bounded("traceparent", submit.traceparent)
    _bounded("specification.traceparent", submit.specification.traceparent)
    _bounded("specification.cache_salt", submit.specification.cache_salt)
    _bounded("specification.adapter", submit.specification.adapter)
    _bounded_bytes("body_hash", submit.body_hash)


def _check_prompt(submit: gateway_pb.Submit) -> None:
    """Check the prompt, and what is derived from it."""
    specification = submit.specification
    prompt_tokens = len(specification.prompt_ids)
    if prompt_tokens == 0:
        raise InvalidArgument("specification.prompt_ids", "must not be empty")
    if max(specification.prompt_ids) > MAX_TOKEN_ID:
        raise InvalidArgument("specification.prompt_ids", f"must be at most {MAX_TOKEN_ID}")
    if problem := length_features.problem_of(submit.length_features):
        raise InvalidArgument("length_features", problem)
    most = min(prompt_tokens // prompt_blocks.BLOCK_TOKENS, prompt_blocks.MOST_BLOCKS)
    if problem := prompt_blocks.problem_of(submit.prompt_blocks, most):
        raise InvalidArgument("prompt_blocks", problem)
    if len(specification.conversation) not in (0, prompt_blocks.NAME_BYTES):
        raise InvalidArgument(
            "specification.conversation",
            f"must have {prompt_blocks.NAME_BYTES} bytes, got {len(specification.conversation)}",
        )


def _check_outputs(submit: gateway_pb.Submit, max_tokens: int) -> None:
    """Check the output tokens that are requested and those that were shown."""
    if max_tokens == 0:
        raise InvalidArgument("specification.sampling.max_tokens", "must be at least 1")
    if len(submit.shown_ids) > max_tokens:
        raise InvalidArgument(
            "shown_ids",
            f"must have at most max_tokens ({max_tokens}) entries, got {len(submit.shown_ids)}",
        )
    if max(submit.shown_ids, default=0) > MAX_TOKEN_ID:
        raise InvalidArgument("shown_ids", f"must be at most {MAX_TOKEN_ID}")
    if submit.shown_ids and not submit.restores:
        raise InvalidArgument("shown_ids", "must be empty in a submission that restores nothing")


def _check_sampling(sampling: SamplingParams) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidArgument("specification.sampling.temperature", "must be finite and not negative")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidArgument("specification.sampling.top_p", "must lie in (0, 1]")
    if len(sampling.stop) > limits.RECORDED_STOP_STRINGS:
        raise InvalidArgument(
            "specification.sampling.stop", f"must have at most {limits.RECORDED_STOP_STRINGS} entries"
        )
    for stop in sampling.stop:
        _bounded("specification.sampling.stop", stop, minimum=1)
    if len(sampling.logit_bias) > limits.RECORDED_LOGIT_BIAS:
        raise InvalidArgument(
            "specification.sampling.logit_bias", f"must have at most {limits.RECORDED_LOGIT_BIAS} entries"
        )
    for name, most in (
        ("stop_token_ids", limits.RECORDED_STOP_TOKENS),
        ("bad_words", limits.RECORDED_BAD_WORDS),
        ("bad_words_ids", limits.RECORDED_BAD_WORDS),
        ("allowed_token_ids", limits.RECORDED_ALLOWED_TOKENS),
    ):
        if len(getattr(sampling, name)) > most:
            raise InvalidArgument(f"specification.sampling.{name}", f"must have at most {most} entries")
    for word in sampling.bad_words:
        _bounded("specification.sampling.bad_words", word)
    if any(len(word.ids) > limits.RECORDED_BAD_WORD_TOKENS for word in sampling.bad_words_ids):
        raise InvalidArgument(
            "specification.sampling.bad_words_ids",
            f"must hold lists of at most {limits.RECORDED_BAD_WORD_TOKENS} token ids",
        )


def check_attachment(submit: gateway_pb.Submit) -> None:
    """Check the attachment id of a gateway's submission, which is an attachment too. Raises
    InvalidArgument.
    """
    _bounded("attachment_id", submit.attachment_id, minimum=1)


def check_request_id(request_id: str) -> None:
    """Raise InvalidArgument for a string that cannot be a request id."""
    _bounded("request_id", request_id, minimum=1)


def can_be_named(*names: str) -> bool:
    """Return True if all of these strings have a valid length for names here. A call with any other name gets
    "not found".
    """
    return all(1 <= len(name) <= MAX_NAME_LENGTH for name in names)


def _bounded(field: str, value: str, *, minimum: int = 0) -> None:
    if not minimum <= len(value) <= MAX_NAME_LENGTH:
        raise InvalidArgument(field, f"must have {minimum} to {MAX_NAME_LENGTH} characters, got {len(value)}")


def _bounded_bytes(field: str, value: bytes) -> None:
    if len(value) > MAX_DIGEST_BYTES:
        raise InvalidArgument(field, f"must be at most {MAX_DIGEST_BYTES} bytes, got {len(value)}")


def check_gateway_hello(hello: gateway_pb.GatewayHello) -> None:
    """Refuse a gateway without a name, or with a name that is too long for a log. Raises InvalidArgument."""
    _bounded("hello.gateway_id", hello.gateway_id, minimum=1)


def check_hello(hello: worker_pb.WorkerHello) -> None:
    """Refuse a worker whose numbers make no sense. Raises InvalidArgument naming the field and the limit."""
    _bounded("worker_id", hello.worker_id, minimum=1)
    _bounded("worker_name", hello.worker_name, minimum=1)
    _bounded("fingerprint", hello.fingerprint)
    _bounded("device", hello.device)
    _bounded_bytes("vocabulary", hello.vocabulary)
    for name, least in (("slots", 1), ("target_blocks", 1), ("block_size", 1), ("max_length", MIN_CONTEXT)):
        if getattr(hello, name) < least:
            raise InvalidArgument(name, f"must be at least {least}")
    _check_pool("target_blocks", hello.target_blocks, hello)
    if hello.draft_blocks:
        _check_pool("draft_blocks", hello.draft_blocks, hello)
    if hello.slots > MAX_SLOTS:
        raise InvalidArgument("slots", f"must be at most {MAX_SLOTS}, got {hello.slots}")
    if len(hello.held) > MAX_HELD:
        raise InvalidArgument("held", f"must have at most {MAX_HELD} entries, got {len(hello.held)}")
    most = prompt_blocks.most_cached(hello.target_blocks, hello.block_size)
    if problem := prompt_blocks.problem_of(hello.cached_blocks, most):
        raise InvalidArgument("cached_blocks", problem)


def _check_pool(name: str, blocks: int, hello: worker_pb.WorkerHello) -> None:
    """Refuse a KV pool that could not hold the shortest context, and the longest draft in addition."""
    tokens, least = blocks * hello.block_size, hello.max_draft_tokens + MIN_CONTEXT
    if tokens < least:
        raise InvalidArgument(
            name,
            f"must hold at least {least} tokens, max_draft_tokens ({hello.max_draft_tokens}) and {MIN_CONTEXT}: "
            f"{blocks} of {hello.block_size} tokens hold {tokens}",
        )
