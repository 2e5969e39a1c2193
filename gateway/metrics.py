"""The metrics of a gateway. One line per metric; no label is a request id, and a tenant is a label only if
the gateway's file names it."""

from __future__ import annotations

from laps_sd.service.metrics import SECONDS, TOKENS, counter, gauge, histogram

REQUESTS = counter(
    "laps_sd_gateway_requests_total",
    "Client streams that ended, by finish reason, client_disconnected, or error status.",
    ("end",),
)
HTTP_CONNECTIONS_REFUSED = counter(
    "laps_sd_gateway_http_connections_refused_total",
    "Connections to the HTTP port that were closed because LAPS_SD_MAX_HTTP_CONNECTIONS were open.",
)
REFUSED = counter(
    "laps_sd_gateway_refused_total",
    "Calls refused before a request was accepted, including those without a known key, by gRPC status.",
    ("code",),
)
PROMPT_TOKENS = histogram(
    "laps_sd_gateway_prompt_tokens", "Prompt lengths of accepted requests.", buckets=TOKENS
)
OUTPUT_TOKENS = counter(
    "laps_sd_gateway_output_tokens_total",
    "Output tokens passed to clients, again to one that reads them again.",
)
FIRST_TOKEN = histogram(
    "laps_sd_gateway_first_token_seconds",
    "Time from the arrival of a request to its first output tokens.",
    buckets=SECONDS,
)
TOKEN_TIME = histogram(
    "laps_sd_gateway_time_per_output_token_seconds",
    "Time from the first to the last output token, divided by the tokens after the first.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
REQUEST = histogram(
    "laps_sd_gateway_request_seconds",
    "Time from the arrival of a request to its last message, for streams that made a request and reached its "
    "end: not if its client resumed it.",
    buckets=SECONDS,
)
REQUEST_OUTPUT = histogram(
    "laps_sd_gateway_request_output_tokens",
    "Output tokens of a request, for the same streams.",
    buckets=TOKENS,
)
QUEUE_WAIT = histogram(
    "laps_sd_gateway_queue_wait_seconds",
    "Time from acceptance to the first round, reported by the scheduler at the end of the same streams.",
    buckets=SECONDS,
)
ROUNDS = counter(
    "laps_sd_gateway_rounds_total",
    "Rounds of requests, counted at the end of the same streams, like the next four.",
)
DRAFTS = counter("laps_sd_gateway_drafts_total", "Rounds with at least one draft token.")
DRAFTED = counter("laps_sd_gateway_drafted_tokens_total", "Draft tokens.")
ACCEPTED = counter("laps_sd_gateway_accepted_tokens_total", "Draft tokens that the target accepted.")
PREEMPTIONS = counter("laps_sd_gateway_preemptions_total", "Times that requests were paused for others.")
TENANT_REQUESTS = counter(
    "laps_sd_gateway_tenant_requests_total",
    "Requests of a tenant that were accepted; others: tenants that the file of keys does not name.",
    ("tenant",),
)
TENANT_REFUSED = counter(
    "laps_sd_gateway_tenant_refused_total", "Requests of a tenant that were refused.", ("tenant", "code")
)
TENANT_PROMPT_TOKENS = counter(
    "laps_sd_gateway_tenant_prompt_tokens_total", "Prompt tokens of accepted requests.", ("tenant",)
)
TENANT_OUTPUT_TOKENS = counter(
    "laps_sd_gateway_tenant_output_tokens_total",
    "Output tokens passed to the tenant's clients, again to one that reads them again.",
    ("tenant",),
)
STREAMS = gauge("laps_sd_gateway_streams", "Client streams that are open.")
PAUSES = counter(
    "laps_sd_gateway_slow_reader_pauses_total", "Times that a client read so slowly that its buffer was full."
)
REATTACHED = counter(
    "laps_sd_gateway_reattached_total",
    "Times that a stream attached again because tokens before those that arrived were missing.",
)
LINK_UP = gauge("laps_sd_gateway_link_up", "1 while a leader of the shard is connected.", ("shard",))
LINK_GREETINGS = counter(
    "laps_sd_gateway_link_greetings_total", "Times that a leader of the shard sent its hello.", ("shard",)
)
LINK_STALE = counter(
    "laps_sd_gateway_link_stale_messages_total", "Messages refused because of their leader epoch.", ("shard",)
)


def forget_shard(shard: str) -> None:
    """Remove what is measured of a shard that this gateway does not use any more."""
    for metric in (LINK_UP, LINK_GREETINGS, LINK_STALE):
        metric.remove(shard)
