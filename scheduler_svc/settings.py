"""Settings of a scheduler process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from laps_sd.contract.limits import TEN_YEARS_S
from laps_sd.service.config import LENGTH_KEY_HELP, field
from laps_sd.service.leader_link import LEAST_SILENCE_S, is_address
from laps_sd.service.serving_settings import ServingSettings
from scheduler_svc.core.placement.routing import PlacementName
from scheduler_svc.core.policies import PolicyName
from scheduler_svc.record_settings import RecordSettings, name_problems
from scheduler_svc.roles import ClientRoles


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(RecordSettings, ServingSettings):
    """One scheduler: one shard of one pool."""

    GROUPS: ClassVar[Mapping[str, str]] = {
        "redis_wait_replicas": "Record",
        "pool": "Pool and policy",
        "client_roles": "Peers",
        "max_requests": "Limits of the queue",
        "finished_ttl_s": "Ended requests",
        "predict_lengths": "Estimates",
        "log_load_s": "Log",
        "priors_save_s": "Estimates",
    }

    redis_wait_replicas: int = field(
        0,
        help="Number of replicas that must have a write before it counts (WAIT); with fewer replicas the "
        "record is unavailable.",
        minimum=0,
        maximum=16,
    )
    pool: str = field("demo", help="The pool of workers (one model pair) that the shard serves.")
    policy: PolicyName = field(
        "laps-sd", help='The order of requests (the page "Policies" of the documentation describes each).'
    )
    perceived_levels: bool = field(
        False,
        help="With laps-sd-paper: a request whose acceptance has settled goes to the level of its remaining "
        "time.",
    )
    placement: PlacementName = field(
        "soonest-done",
        help="Which worker gets a request: soonest-done, by load and by what each has computed of its prompt, or "
        "least-loaded, by load alone",
    )
    tenant_fairness: bool = field(
        False,
        help="Fairness between tenants: the service of backlogged tenants of one priority differs by at most "
        "that of the longest request.",
    )
    grpc_port: int = field(
        50052, help="Port for gateways, workers and operators; 0 takes a free one", minimum=0, maximum=65535
    )
    metrics_port: int | None = field(
        9091,
        help="Port of the Prometheus endpoint, at LAPS_SD_GRPC_HOST; 0 takes a free one, empty serves none",
        minimum=0,
        maximum=65535,
    )
    client_roles: tuple[str, ...] = field(
        (),
        help="Roles on this port, by DNS names and URIs in the client's certificate: "
        "gateway=NAME,worker=NAME,operator=NAME …; empty: any certificate of LAPS_SD_TLS_CLIENT_CA "
        "permits everything",
    )
    advertise_address: str = field(
        "", help="host:port at which peers reach this process; empty: the address it listens on."
    )
    lease_s: float = field(
        3.0,
        help="How long leadership lasts without a renewal, the same at all schedulers of a shard. Shorter: faster "
        "takeover; longer: fewer takeovers while Redis is slow.",
        minimum=0.5,
        maximum=60.0,
    )
    worker_grace_s: float = field(
        2.0,
        help="How long the requests of a worker wait for it after its stream broke.",
        minimum=0.0,
        maximum=600.0,
    )
    silence_s: float = field(
        5.0,
        help="A peer that has sent nothing for this long is given up.",
        minimum=LEAST_SILENCE_S,
        maximum=600.0,
    )
    watchdog_s: float = field(
        60.0,
        help="A connected worker with assigned work that sends no report for this long is given up. Must be longer "
        "than any round.",
        minimum=1.0,
        maximum=3600.0,
    )
    reattach_grace_s: float = field(
        5.0,
        help="How long requests wait for their gateway after its stream broke, or after a change of leader; "
        "longer while clients of others still come back.",
        minimum=0.0,
        maximum=600.0,
    )
    max_requests: int = field(100_000, help="Largest number of unfinished requests in the shard.", minimum=1)
    max_queued_tokens: int = field(
        200_000_000,
        help="Largest number of prompt tokens of all unfinished requests together; outputs do not count.",
        minimum=1,
    )
    max_requests_per_tenant: int = field(
        100_000, help="Largest number of unfinished requests of one tenant.", minimum=1
    )
    max_context_tokens: int = field(
        1_048_576,
        help="Largest number of prompt and output tokens of one request.",
        minimum=2,
        maximum=16_777_216,
    )
    finished_ttl_s: float = field(
        900.0,
        help="How long an ended request can be read back (Resume, Explain).",
        minimum=1.0,
        maximum=TEN_YEARS_S,
    )
    predict_lengths: bool = field(
        True,
        help="Predict the length of an output from the words of its prompt, as learned from earlier requests.",
    )
    length_key: str = field("", help=LENGTH_KEY_HELP, secret=True)
    log_load_s: float = field(
        10.0,
        help="Interval of a log line about the load of the shard: requests, tokens per second, acceptance, KV, "
        "preemptions; no line while it is idle. 0: never.",
        minimum=0.0,
    )
    priors_save_s: float = field(
        10.0, help="Interval at which learnt estimates are written to the record.", minimum=0.1
    )

    @property
    def open_to_strangers(self) -> bool:
        """Return True if a client on another machine, without a certificate, may act as a gateway, a worker
        or an operator.
        """
        return not self.local_only and self.tls_client_ca is None

    def problems(self) -> Iterator[str]:
        """Yield the problems that the check of a single field cannot find."""
        yield from super().problems()
        try:
            ClientRoles(self.client_roles)
        except ValueError as error:
            yield f"LAPS_SD_CLIENT_ROLES {error}."
        if self.client_roles and self.tls_client_ca is None:
            yield "LAPS_SD_CLIENT_ROLES needs LAPS_SD_TLS_CLIENT_CA: roles are read from certificates."
        if self.advertise_address and not is_address(self.advertise_address):
            yield f"LAPS_SD_ADVERTISE_ADDRESS must be host:port, got {self.advertise_address!r}."
        yield from name_problems("LAPS_SD_POOL", self.pool)
