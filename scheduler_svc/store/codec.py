"""Encodings of requests inside the record: fields of the request's hash, packed token ids, the timeline as
JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import replace

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Standing, StoryLine
from scheduler_svc.core.rank import MAX_LEVELS
from scheduler_svc.store.records import NewRequest, Shown, StoredRequest

Argument = str | bytes | int | float
"""Types that the client library sends without conversion."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return the ids as packed int32. Raises ValueError for an id that does not fit int32."""
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise ValueError(f"token ids must be integers from -2^31 to 2^31 - 1: {error}") from None


def unpack_ids(packed: bytes | None) -> tuple[int, ...]:
    """Return the ids of packed int32, the inverse of `pack_ids`; none for a missing key."""
    return struct.unpack(f"<{len(packed) // 4}i", packed) if packed else ()


def unpack_prompt(packed: bytes | None) -> array[int]:
    """Return the ids of packed int32 as an array, which is made in a tenth of the time of a tuple."""
    ids = array("i")
    if packed:
        ids.frombytes(packed)
        if sys.byteorder == "big":  # pragma: no cover
            ids.byteswap()
    return ids


def safe_seconds(value: float) -> float:
    """Return a finite number, which the record can add and compare: infinities become the largest float, NaN
    becomes 0.
    """
    if math.isfinite(value):
        return value
    return 0.0 if math.isnan(value) else math.copysign(sys.float_info.max, value)


def safe_score(value: float) -> float:
    """Return a score that a sorted set takes: infinities are allowed; NaN, which it refuses, becomes the
    score that runs last.
    """
    return math.inf if math.isnan(value) else value


def recordable(standing: Standing) -> Standing:
    """Return the progress as the record keeps it: NaN and infinite seconds replaced."""
    if math.isfinite(standing.attained_s) and not math.isnan(standing.score):
        return standing
    return replace(standing, attained_s=safe_seconds(standing.attained_s), score=safe_score(standing.score))


def check_level(request_id: str, level: int) -> int:
    """Return the level. Raises ValueError for a level that has no key."""
    if not 0 <= level < MAX_LEVELS:
        raise ValueError(f"request {request_id}: level {level} is not in 0 … {MAX_LEVELS - 1}")
    return level


def story_json(story: Sequence[StoryLine]) -> bytes:
    """Return `[[at_s, what, detail], …]`; nothing for an empty timeline."""
    return (
        json.dumps([[safe_seconds(line.at_s), line.what, line.detail] for line in story]).encode()
        if story
        else b""
    )


def _story(encoded: bytes | None) -> tuple[StoryLine, ...]:
    return (
        tuple(StoryLine(at_s, what, detail) for at_s, what, detail in json.loads(encoded)) if encoded else ()
    )


def submission_fields(request: NewRequest) -> list[Argument]:
    """Return field, value, … of everything that the client chooses, without the payload."""
    return [*_fixed_fields(request), *itertools.chain(*_optional_fields(request))]


def _fixed_fields(request: NewRequest) -> list[Argument]:
    return [
        *("tenant", request.tenant),
        *("model", request.model),
        *("priority", request.priority),
        *("workload_class", request.workload_class),
        *("arrival_unix_ms", request.arrival_unix_ms),
        *("prompt_tokens", len(request.prompt_ids)),
        *("max_tokens", request.max_tokens),
        *("keep", int(request.keep)),
        *("grace_ms", request.grace_ms),
        *("body_hash", request.body_hash),
        *("seed", request.seed),
    ]


def _optional_fields(request: NewRequest) -> list[tuple[str, Argument]]:
    """Return field and value of what a client may leave out; then the value is empty."""
    return [
        ("expected_output_tokens", _optional(request.expected_output_tokens)),
        ("deadline_unix_ms", _optional(request.deadline_unix_ms)),
        ("time_limit_ms", _optional(request.time_limit_ms)),
        ("idempotency_key", request.idempotency_key),
    ]


def new_fields(request: NewRequest, shown: Shown) -> list[Argument]:
    """Return field, value, … of a request at its arrival; its state, score and sequence come from the script.
    What the client left out has no field: each costs time, at the arrival and in every search of the hash.

    The fields that change come first, the busiest first: a small hash is one packed list, read from its
    beginning.
    """
    return [
        *("lease_epoch", shown.lease_epoch),
        *("committed", len(shown.token_ids)),
        *("level", 0),
        *("rounds", 0),
        *("attained_s", "0.0"),
        *("drafts", 0),
        *("drafted", 0),
        *("accepted", 0),
        *("preemptions", 0),
        *("worker", ""),
        *("leased_to", ""),
        *("released_epoch", shown.lease_epoch),
        *_fixed_fields(request),
        *itertools.chain(*(pair for pair in _optional_fields(request) if pair[1] != "")),
    ]


def progress_fields(request: StoredRequest) -> list[Argument]:
    """Return field, value, … of everything that changes while the request is unfinished."""
    standing = request.standing
    leased = request.worker_id is not None
    return [
        *("state", "leased" if leased else "queued"),
        *("score", safe_score(standing.score)),
        *("sequence", request.sequence),
        *("lease_epoch", request.lease_epoch),
        *("committed", len(request.committed_ids)),
        *("level", standing.level),
        *("rounds", standing.rounds),
        *("attained_s", safe_seconds(standing.attained_s)),
        *("end", ""),
        *("drafts", standing.drafts),
        *("drafted", standing.drafted),
        *("accepted", standing.accepted),
        *("preemptions", standing.preemptions),
        *("worker", request.worker_id or ""),
        *("leased_to", request.worker_id or ""),
        *("released_epoch", request.lease_epoch - 1 if leased else request.lease_epoch),
        *("first_token_unix_ms", _optional(request.first_token_unix_ms)),
        *("deaths", request.deaths),
        *("death_round", request.death_round),
        *("pair", request.pair),
    ]


def stored_request(
    request_id: str, fields: dict[bytes, bytes], tokens: bytes | None, payload: dict[bytes, bytes]
) -> StoredRequest | None:
    """Return the request from its hash; None when it, or some of its tokens, are missing (they expire one by
    one).

    Raises KeyError or ValueError for a hash that this code did not write.
    """
    if not fields:
        return None
    committed = int(fields[b"committed"])
    committed_ids = unpack_ids(tokens)[:committed]
    if len(committed_ids) < committed:
        return None
    end = End(fields[b"end"].decode()) if fields.get(b"end") else None
    return StoredRequest(
        request_id=request_id,
        tenant=fields[b"tenant"].decode(),
        model=fields[b"model"].decode(),
        priority=int(fields[b"priority"]),
        workload_class=fields[b"workload_class"].decode(),
        arrival_unix_ms=int(fields[b"arrival_unix_ms"]),
        prompt_ids=unpack_prompt(payload.get(b"prompt")),
        max_tokens=int(fields[b"max_tokens"]),
        expected_output_tokens=_optional_int(fields.get(b"expected_output_tokens")),
        deadline_unix_ms=_optional_int(fields.get(b"deadline_unix_ms")),
        time_limit_ms=_optional_int(fields.get(b"time_limit_ms")),
        keep=fields[b"keep"] == b"1",
        grace_ms=int(fields[b"grace_ms"]),
        idempotency_key=fields.get(b"idempotency_key", b"").decode(),
        body_hash=fields[b"body_hash"].decode(),
        seed=int(fields[b"seed"]),
        submission=payload.get(b"submission", b""),
        length_features=payload.get(b"length_features", b""),
        prompt_blocks=payload.get(b"prompt_blocks", b""),
        sequence=int(fields[b"sequence"]),
        committed_ids=committed_ids,
        lease_epoch=int(fields[b"lease_epoch"]),
        worker_id=fields[b"worker"].decode() or None,
        standing=Standing(
            rounds=int(fields[b"rounds"]),
            # An earlier version of the software did not count them.
            drafts=int(fields.get(b"drafts", fields[b"rounds"])),
            drafted=int(fields[b"drafted"]),
            accepted=int(fields[b"accepted"]),
            attained_s=float(fields[b"attained_s"]),
            preemptions=int(fields[b"preemptions"]),
            level=int(fields[b"level"]),
            score=float(fields[b"score"]),
        ),
        end=end,
        cut_characters=int(fields.get(b"cut_characters", b"0")),
        detail=fields.get(b"detail", b"").decode(),
        story=_story(payload.get(b"story")) if end is not None else (),
        ended_unix_ms=_optional_int(fields.get(b"ended_unix_ms")),
        first_token_unix_ms=_optional_int(fields.get(b"first_token_unix_ms")),
        # A request that was never released has neither, nor has one of an earlier version of the software.
        deaths=int(fields.get(b"deaths", b"0")),
        death_round=int(fields.get(b"death_round", b"0")),
        prompt_logprobs=payload.get(b"prompt_logprobs", b""),
        # A request that was never leased has none, nor has one of an earlier version of the software.
        pair=fields.get(b"pair", b"").decode(),
    )


def _optional(value: int | None) -> Argument:
    return "" if value is None else value


def _optional_int(field: bytes | None) -> int | None:
    return int(field) if field else None
