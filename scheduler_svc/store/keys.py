"""Every key of the record. Nothing else builds one.

All keys of a shard carry the shard as their hash tag, so they live in one slot of a Redis Cluster and one
script may touch them together. Claims belong to no shard and have slots of their own. Once all requests of a
shard have ended, each key that is left has an expiry.
"""

from __future__ import annotations

import hashlib
from urllib.parse import quote

from laps_sd.contract.shard_names import SHARD_NAME, SHARD_NAME_RULE

SCHEMA_VERSION = 2
"""Version of the layout, increased when keys, fields or encodings change so that another release would
misread them.
"""

SHARD_TTL_S = 30 * 24 * 3600
"""Seconds by which the keys of the shard as a whole outlive its last leader. Renewals of leadership refresh
them.
"""

CLAIM_TTL_S = 7 * 24 * 3600
"""Seconds for which a shard keeps an idempotency key for a request that has not ended; a request that waits
longer loses it.
"""

CLAIM_SLACK_S = 60
"""Seconds by which a claim outlives the request that it points to, so that no other shard takes the key a
moment too early.
"""


class Keys:
    """The keys of one shard."""

    def __init__(self, shard: str) -> None:
        if not SHARD_NAME.fullmatch(shard):
            raise ValueError(f"the name of a shard must be {SHARD_NAME_RULE}, got {shard!r}")
        self.shard = shard
        self.prefix = f"laps-sd:{{{shard}}}:"

    # the shard as a whole

    def leader(self) -> str:
        """string `epoch owner` · TTL: the leadership lease."""
        return self.prefix + "leader"

    def leader_count(self) -> str:
        """string, counter: the number of the newest leader epoch · TTL: SHARD_TTL_S."""
        return self.prefix + "leader_count"

    def schema_version(self) -> str:
        """string: SCHEMA_VERSION of the newest leader · TTL: SHARD_TTL_S."""
        return self.prefix + "schema_version"

    def incarnation(self) -> str:
        """string: random, made by the first leader; another one or none means the data was lost · TTL:
        SHARD_TTL_S."""
        return self.prefix + "incarnation"

    def server(self) -> str:
        """string: run id of the server that holds all that the last leader wrote; `behind` while a leader
        writes back what the record lost; none after a leader resigned · TTL: SHARD_TTL_S.
        """
        return self.prefix + "server"

    def priors(self) -> str:
        """string: what the policy has learnt, opaque · TTL: SHARD_TTL_S."""
        return self.prefix + "priors"

    def probes(self) -> str:
        """string: what the workers' probes have learnt, opaque · TTL: SHARD_TTL_S after the last change."""
        return self.prefix + "probes"

    def sequence(self) -> str:
        """string, counter: the newest arrival's sequence number · TTL: SHARD_TTL_S."""
        return self.prefix + "sequence"

    # the queue

    def unfinished(self) -> str:
        """sorted set: request id → sequence, of every unfinished request · gone when empty."""
        return self.prefix + "unfinished"

    def log(self) -> str:
        """stream: what each turn added to requests (see `log`), until their own keys hold it · TTL: SHARD_TTL_S."""
        return self.prefix + "log"

    def before_the_log(self) -> list[str]:
        """Return the keys of schema version 1 that this one does not have: the queue by level, and a counter."""
        return [*(f"{self.prefix}level:{level}" for level in range(32)), self.prefix + "reserved"]

    def tenants(self) -> str:
        """hash: tenant → its unfinished requests · gone when empty."""
        return self.prefix + "tenants"

    def prompt_tokens(self) -> str:
        """string, counter: prompt tokens of all unfinished requests · gone at 0."""
        return self.prefix + "prompt_tokens"

    # one request

    def request(self, request_id: str) -> str:
        """hash of plain fields (see `codec.py`) · TTL: none until it ends, then `finished_ttl_s`."""
        return f"{self.prefix}request:{request_id}"

    def tokens(self, request_id: str) -> str:
        """string: committed token ids, little-endian int32 each · TTL as the request's."""
        return f"{self.prefix}tokens:{request_id}"

    def payload(self, request_id: str) -> str:
        """hash `prompt` (token ids as above), `submission` (protobuf), `length_features` and `prompt_blocks` (packed,
        until the end), `prompt_logprobs` (protobuf, from the first token on), `story` (JSON, at the end) · TTL as the
        request's."""
        return f"{self.prefix}payload:{request_id}"

    def idempotency(self, tenant: str, idempotency_key: str) -> str:
        """string `sequence request-id body-hash` · TTL as the request's. The tenant is quoted, so it holds no
        colon."""
        return f"{self.prefix}idempotency:{quote(tenant, safe='')}:{idempotency_key}"

    def claim(self, idempotency: str) -> str | None:
        """string `shard request-id`: the shard that decides about an idempotency key, for all shards; None
        where `idempotency` is not a key built by `idempotency()` · TTL: CLAIM_TTL_S, at the end the request's
        and CLAIM_SLACK_S.

        Hashed: its size is bounded, and a client's braces choose no slot.
        """
        prefix = self.prefix + "idempotency:"
        if not idempotency.startswith(prefix):
            return None
        digest = hashlib.sha256(idempotency.removeprefix(prefix).encode()).hexdigest()
        return f"laps-sd:claim:{digest[:32]}"
