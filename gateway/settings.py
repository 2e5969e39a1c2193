"""The settings of a gateway."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from laps_sd.contract.limits import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, TEN_YEARS_S
from laps_sd.contract.shard_names import SHARD_NAME, SHARD_NAME_RULE
from laps_sd.service.adapters import adapter_problems
from laps_sd.service.config import LENGTH_KEY_HELP, field
from laps_sd.service.leader_link import (
    BACK_OFF_FIRST_S,
    BACK_OFF_LONGEST_S,
    HEARTBEAT_S,
    LEAST_SILENCE_S,
)
from laps_sd.service.serving_settings import ServingSettings
from laps_sd.service.wire import MAX_MESSAGE_BYTES, LinkSettings

__all__ = ["GatewaySettings", "ReasoningParser", "ToolParser"]

ToolParser: TypeAlias = Literal[
    "auto", "hermes", "qwen3_coder", "glm45", "llama3_json", "mistral", "json", "none"
]
ReasoningParser: TypeAlias = Literal["auto", "think", "mistral", "none"]

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")

STALLED_S = 300.0
"""Longest time, in seconds, in which a client reads nothing of an answer that waits for it. Our choice: the
time after which Envoy ends an idle stream."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(LinkSettings, ServingSettings):
    """Settings of one gateway process."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "grpc_host": "Listening",
        "drain_s": "Calls and the stop",
        "max_message_fields": "Limits of a request",
        "shard": "Shards and model",
        "trust_tenant_metadata": "Tenants",
        "log_requests": "Log",
        "vllm_metrics": "Metrics",
        "unknown_fields": "HTTP",
        "predict_lengths": "Estimates",
        "grace_with_key_s": "Waiting and buffers",
        "heartbeat_s": "Link to the scheduler",
    }

    grpc_host: str = field(
        "127.0.0.1",
        help="Address the gRPC server listens on; :: is every address of IPv6 and IPv4, for a container",
    )
    http_port: int | None = field(
        8000,
        help="Port of the OpenAI-style HTTP server, at the address of the gRPC server; 0 takes a free one, empty serves none",
        minimum=0,
        maximum=65535,
    )

    drain_s: float = field(
        30.0,
        help="Time that calls in progress get to finish after the first signal",
        minimum=0.0,
        maximum=86400.0,
    )
    max_connection_age_s: float = field(
        300.0,
        help="Age at which clients are asked to connect again, which may lead them to another gateway: over gRPC by "
        "GOAWAY, over HTTP by Connection: close. Calls in progress are not cut. Shorter: new gateways get their part of"
        " the calls sooner; each connection is older or younger by a tenth at most",
        minimum=1.0,
        maximum=1_000_000.0,
    )
    max_message_bytes: int = field(
        4 * 1024 * 1024,
        help="Largest request of a client",
        minimum=65536,
        maximum=2**31 - 1,
    )

    max_message_fields: int = field(
        65_536,
        help="Fields of one request, including those of nested messages (over HTTP: lists, objects and their "
        "fields). A request with more is refused before it is decoded, because a field of two bytes takes"
        " forty or more bytes of memory afterwards",
        minimum=1024,
        maximum=2**31 - 1,
    )
    max_streams: int = field(
        10_000,
        help="Largest number of calls that have a request open at once; further calls get RESOURCE_EXHAUSTED "
        "with a time to retry.",
        minimum=1,
    )
    max_http_connections: int = field(
        10_000,
        help="Largest number of open connections of the HTTP port; further ones are closed. Each takes a file "
        "descriptor (ulimit -n)",
        minimum=1,
    )
    max_prompt_characters: int = field(
        1_000_000,
        help="Largest number of characters in the text or in all messages together; a longer prompt is refused"
        " before tokenizing.",
        minimum=1,
        unit="characters",
    )
    max_messages: int = field(8192, help="Largest number of chat messages in one request.", minimum=1)
    max_output_tokens: int = field(32_768, help="Largest max_tokens that is accepted.", minimum=1)
    default_max_tokens: int | None = field(
        None,
        help="max_tokens of a request that sets none, where the model's generation_config.json has no max_new_tokens"
        " (less if the context leaves less); none: all that the context leaves",
        minimum=1,
        unit="tokens",
    )
    max_choices: int = field(
        16, help="Largest number of outputs of one call: prompts times n.", minimum=1, maximum=1024
    )
    max_priority: int = field(
        100, help="Largest absolute value of a priority that is accepted.", minimum=0, maximum=2**31 - 1
    )
    max_draft_tokens: int = field(
        64, help="Largest speculation.max_draft_tokens that is accepted.", minimum=0
    )
    max_logprobs: int | None = field(
        20,
        help="Largest number of log-probability alternatives per token; none: requests for log probabilities "
        "are refused.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    max_prompt_logprobs: int = field(
        131_072,
        help="Largest number of log probabilities of the tokens of prompts in one call: for each output the tokens of its"
        " prompt, and of each the alternatives.",
        minimum=1,
        maximum=MAX_PROMPT_LOGPROBS,
    )
    max_time_limit_s: float = field(86_400.0, help="Largest time_limit_ms that is accepted.", minimum=0.001)

    shard: str = field("s0", help="Shard that this gateway submits to; request ids start with it.")
    shards_file: Path | None = field(
        None,
        help="File of shards, instead of LAPS_SD_SHARD and LAPS_SD_SCHEDULER_SEEDS, with one line NAME "
        "HOST:PORT[,HOST:PORT …] [draining] for each shard. It is read again when it changes.",
    )
    model: str = field(
        "",
        help="Name under which the model is served. Empty: that of LAPS_SD_TOKENIZER_DIR, without it laps-sd-demo.",
    )
    model_aliases: tuple[str, ...] = field(
        (),
        help="Further names, with commas between them, by which requests may name the model. Answers have its own",
    )
    adapters: tuple[str, ...] = field(
        (),
        help="LoRA adapters that requests may name as their model: the value that workers over vLLM have, of which a "
        "gateway takes the names",
    )
    tokenizer_dir: Path | None = field(
        None,
        help="Directory with tokenizer.json, tokenizer_config.json and config.json of the target model, or its name "
        "on the Hugging Face hub; default: that of the shipped demo model.",
    )
    tool_parser: ToolParser = field(
        "auto",
        help="How the model writes calls of tools; auto: the form that its chat template mentions, else json; none: "
        "requests with tools are refused. See docs/how-to/tools.md",
    )
    reasoning_parser: ReasoningParser = field(
        "auto",
        help="How the model marks its reasoning; auto: the form that its chat template mentions; none: reasoning is "
        "part of the content",
    )
    context_tokens: int | None = field(
        None,
        help="Largest sum of prompt and output tokens of a request; default: the value in the model's "
        "config.json, at most 8192. Workers must have the same value.",
        minimum=2,
    )
    generation_config: Literal["model", "none"] = field(
        "model",
        help="Defaults of temperature, top_p, top_k, min_p, repetition_penalty and max_tokens: those in the model's "
        "generation_config.json, or none, so that requests that set nothing are sampled from the model's own"
        " distribution",
    )

    trust_tenant_metadata: bool = field(
        False,
        help="Take the tenant from the metadata or header laps-sd-tenant of a call, or from "
        "x-llm-d-inference-fairness-id if that is missing; set it only if a proxy in front of the gateway"
        " sets these.",
    )
    api_keys_file: Path | None = field(
        None,
        help="File of tenants with the digests of their keys and their limits (TOML; `laps-sd key` "
        "prints an entry); it is read again when it changes",
    )
    anonymous: Literal["auto", "yes", "no"] = field(
        "auto",
        help="Serve calls without a key; auto: only while there is no file of keys and the gateway listens on "
        "loopback",
    )
    share_prompts: bool = field(
        False,
        help="Use what is computed for the prompt of one tenant for the same beginning in the prompts of all"
        " tenants; without it, of the same tenant only. Tenants that share can find out by time what others"
        " send",
    )

    log_requests: bool = field(
        True,
        help="Log one line for each request when it ends: its id, tenant, end, counts and times; never its prompt or "
        "its output",
    )

    vllm_metrics: bool = field(
        False,
        help="Serve the metrics under vLLM's names too (vllm:num_requests_running …), for programs that read "
        "those",
    )

    unknown_fields: Literal["refuse", "ignore"] = field(
        "refuse",
        help="Fields of an HTTP body that have no meaning here: refuse the body, or ignore them, with one line in "
        "the log for each name",
    )
    cors_origins: tuple[str, ...] = field(
        (),
        help="Origins whose web pages may call the HTTP port (https://app.example; * for all). Empty: none. Cookies "
        "are never allowed",
    )
    console: bool = field(
        True,
        help="Serve the console at /console of the HTTP port. It shows a caller its own requests, and operators all; "
        "callers without a key only at a gateway that listens on loopback. See docs/how-to/console.md",
    )

    predict_lengths: bool = field(
        True,
        help="Send hashed words of each prompt, from which the scheduler predicts the length of the output",
    )
    length_key: str = field("", help=LENGTH_KEY_HELP, secret=True)

    grace_with_key_s: float = field(
        30.0,
        help="How long a request with an idempotency key continues while no client is attached.",
        minimum=0,
        maximum=TEN_YEARS_S,
    )
    scheduler_wait_s: float = field(
        30.0,
        help="How long a call waits for a scheduler that cannot be reached; its deadline may end it earlier.",
        minimum=0.05,
    )
    stream_buffer_tokens: int = field(
        4096,
        help="Tokens buffered for a client that reads slowly; further tokens are read from the record again "
        "later.",
        minimum=1,
    )
    restore_s: float = field(
        10.0,
        help="How long a stream whose request cannot be found waits until it is restored.",
        minimum=0,
    )

    heartbeat_s: float = field(
        1.0, help="Interval of heartbeats to the scheduler.", minimum=0.01, maximum=HEARTBEAT_S
    )
    silence_s: float = field(
        5.0,
        help="A scheduler that has sent nothing for this long is given up.",
        minimum=LEAST_SILENCE_S,
        maximum=600.0,
    )
    dial_timeout_s: float = field(
        2.0,
        help="If a scheduler has not sent its hello after this time, the next seed is dialled.",
        minimum=0.05,
    )
    backoff_min_s: float = field(
        BACK_OFF_FIRST_S, help="First pause between two attempts to dial all seeds.", minimum=0.001
    )
    backoff_max_s: float = field(
        BACK_OFF_LONGEST_S, help="Longest pause between two attempts to dial all seeds.", minimum=0.001
    )

    @property
    def max_answer_bytes(self) -> int:
        """Return the largest size of an answer in one message: at least what our clients accept."""
        return max(MAX_MESSAGE_BYTES, self.max_message_bytes)

    @property
    def allows_anonymous(self) -> bool:
        """Return whether calls that identify no tenant are accepted."""
        if self.anonymous != "auto":
            return self.anonymous == "yes"
        return self.api_keys_file is None and self.local_only

    def problems(self) -> Iterator[str]:
        """Yield the problems that no check of a single field can find."""
        yield from super().problems()
        yield from adapter_problems(self.adapters, with_directories=False)
        if not SHARD_NAME.fullmatch(self.shard):
            yield f"LAPS_SD_SHARD must be {SHARD_NAME_RULE}, got {self.shard!r}."
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                yield f"LAPS_SD_CORS_ORIGINS must be origins such as https://app.example, or *, got {origin!r}."
        if not self.allows_anonymous and self.api_keys_file is None and not self.trust_tenant_metadata:
            yield (
                "LAPS_SD_ANONYMOUS=no needs LAPS_SD_API_KEYS_FILE: without keys every call would be refused."
                if self.anonymous == "no"
                else "LAPS_SD_API_KEYS_FILE must name a file of tenants, or LAPS_SD_ANONYMOUS must be yes, because other"
                f" machines can call a gateway at {self.grpc_host}."
            )
        if self.backoff_max_s < self.backoff_min_s:
            yield "LAPS_SD_BACKOFF_MAX_S must not be smaller than LAPS_SD_BACKOFF_MIN_S."
