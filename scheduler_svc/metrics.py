"""Metrics of a scheduler. Observed by the shell; the core counts nothing for others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from prometheus_client import Counter, Histogram

from laps_sd.contract.ends import End
from laps_sd.service.metrics import SECONDS, count_histogram, counter, gauge, histogram
from scheduler_svc.core.estimates.errors import Judged
from scheduler_svc.core.events import Event, RequestFacts, RoundReported
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.request import ALONE_AFTER, MOST_DEATHS

SUBMISSIONS = counter(
    "laps_sd_scheduler_submissions_total", "Submissions by outcome: accepted, attached, refused.", ["outcome"]
)
ENDS = counter("laps_sd_scheduler_requests_ended_total", "Requests that ended, by kind of end.", ["end"])
REFUSED = counter(
    "laps_sd_scheduler_refused_transitions_total",
    "Transitions that the record refused, by kind and reason.",
    ["transition", "reason"],
)
DEATHS = counter(
    "laps_sd_scheduler_requests_with_dead_workers_total",
    "Requests that may have been in the batch of a worker that died, counted each time, by "
    "consequence: again (it continues), alone (it gets a worker of its own), given_up (it ends with "
    "an error).",
    ["then"],
)
STORE_DOWN = gauge(
    "laps_sd_scheduler_record_unavailable",
    "1 while this process cannot reach or write Redis. If it leads, nothing is admitted or shown then.",
)
STORE_FAULTS = counter(
    "laps_sd_scheduler_record_faults_total",
    "Faults of the record, by kind, each counted once per outage: unreachable, slow, loading, full, read_only, other.",
    ["fault"],
)
WRITTEN_BACK = counter(
    "laps_sd_scheduler_requests_written_back_total",
    "Requests that the record had lost, entirely or their last part, and that were restored, by "
    "source: the leader, a gateway or a worker.",
    ["source"],
)
LEADING = gauge("laps_sd_scheduler_leading", "1 while this process leads its shard.")
QUEUE_DEPTH = gauge(
    "laps_sd_scheduler_queue_depth",
    "Requests that wait (queued, or assigned and not running), by level; read every second.",
    ["level"],
)
KV_USAGE = gauge(
    "laps_sd_scheduler_kv_usage_ratio",
    "Share of the workers' KV blocks (of the target) that is in use, 0 to 1; read every second.",
)
WORKERS = gauge(
    "laps_sd_scheduler_workers", "Workers that are connected or may still reconnect; read every second."
)
BACKLOG = gauge(
    "laps_sd_scheduler_backlog_seconds",
    "Machine seconds of remaining work, by the estimates; read every second.",
)
POOL_BACKLOG = gauge(
    "laps_sd_backlog_seconds",
    "Machine seconds of remaining work per worker of the pool, by the estimates (without a worker: as"
    " if there were one); read every second. Autoscaling keeps this near its target.",
    ["pool"],
)
ARRIVING = gauge(
    "laps_sd_arriving_load",
    "Workers that the arriving work keeps busy: machine seconds per second by the estimates, over about two minutes;"
    " read every second. Autoscaling adds workers by it before a queue is there.",
    ["pool"],
)
ROUNDS = counter(
    "laps_sd_scheduler_rounds_total",
    "Rounds reported by workers. A report that is sent again counts again, here and in the next three.",
)
DRAFTED = counter("laps_sd_scheduler_drafted_tokens_total", "Draft tokens in the workers' reports.")
ACCEPTED = counter(
    "laps_sd_scheduler_accepted_tokens_total",
    "Draft tokens that the target accepted, in the workers' reports.",
)
TOKENS = counter("laps_sd_scheduler_output_tokens_total", "Output tokens reported by workers.")
ACCEPTANCE_LENGTH = count_histogram(
    "laps_sd_scheduler_acceptance_length_tokens",
    "Tokens that a request gained in one round: the accepted ones and the bonus token.",
    buckets=(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32),
)
COMMIT = histogram(
    "laps_sd_scheduler_commit_seconds",
    "One exchange with the record: all transitions of a turn in one pipeline, repetitions included.",
    buckets=SECONDS,
)
ROUND_SECONDS = counter(
    "laps_sd_scheduler_round_seconds_total",
    "Reported time by part of a round: draft, verify, prefill, swap, and idle before it (nothing to run included).",
    ["part"],
)
_PARTS = [ROUND_SECONDS.labels(part) for part in ("draft", "verify", "prefill", "swap", "idle")]
WAIT = histogram(
    "laps_sd_scheduler_queue_wait_seconds",
    "Time from acceptance to the first round, of requests that ended.",
    buckets=SECONDS,
)
FIRST_TOKEN = histogram(
    "laps_sd_scheduler_first_token_seconds",
    "Time from acceptance to the first committed token, of requests that ended.",
    buckets=SECONDS,
)
TOTAL = histogram("laps_sd_scheduler_request_seconds", "Time from acceptance to the end.", buckets=SECONDS)
TOKEN_TIME = histogram(
    "laps_sd_scheduler_output_token_seconds",
    "Time from the first committed token to the end, divided by the tokens after the first.",
    buckets=SECONDS,
)
ESTIMATE_ERROR = histogram(
    "laps_sd_scheduler_estimate_error_ratio",
    "Machine seconds that a request took after a point in time, divided by those predicted then: 1 is"
    " right, 2 is twice as long. For requests that ended by themselves; when: arrival, first_round, "
    "perceptible, round_32; basis of the length: class, client, prompt, client_prompt (both), worker, limit (nothing else ends it). The counts "
    "at arrival by basis show how many requests each source of lengths was used for.",
    ["when", "basis"],
    buckets=(0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10),
)
ESTIMATES_COVERED = counter(
    "laps_sd_scheduler_estimates_covered_total",
    "Estimates whose request then took machine seconds inside the interval that was reported with the estimate. "
    "Divided by the count of `laps_sd_scheduler_estimate_error_ratio`: 0.8 if the intervals are right.",
    ["when", "basis"],
)


PROMPT_TOKENS = counter(
    "laps_sd_scheduler_prompt_tokens_total",
    "Prompt tokens of requests that workers took up, by whether the worker had them in its prefix cache: expected (found, "
    "and the scheduler believed so), unexpected (found, and it did not), missing (not found, and it believed so: a wrong "
    "belief), computed (neither).",
    ["found"],
)
BLOCK_INDEX = gauge(
    "laps_sd_scheduler_block_index_bytes",
    "Memory of what this scheduler knows of the prefix caches of its workers.",
)


def observe_turn(events: Iterable[Event]) -> tuple[int, int, int]:
    """Count what the workers reported. Returns the draft tokens, those accepted, and the output tokens."""
    gained: list[int] = []
    drafted = accepted = reports = rounds = 0
    draft_s = verify_s = prefill_s = swap_s = idle_s = 0.0
    for event in events:
        if not isinstance(event, RoundReported):
            continue
        reports += 1
        rounds += event.total_s > 0  # no round has run before a report of, for example, a refused request
        gained += [len(progress.tokens) for progress in event.progress]
        drafted += sum([progress.drafted for progress in event.progress])
        accepted += sum([progress.accepted for progress in event.progress])
        draft_s += event.draft_s
        verify_s += event.verify_s
        prefill_s += event.prefill_s
        swap_s += event.swap_s
        idle_s += event.idle_s
    tokens = sum(gained)
    if reports:  # once a turn: each count takes a lock
        ROUNDS.inc(rounds)
        DRAFTED.inc(drafted)
        ACCEPTED.inc(accepted)
        TOKENS.inc(tokens)
        ACCEPTANCE_LENGTH.observe_all([count for count in gained if count])
        parts_s = (draft_s, verify_s, prefill_s, swap_s, idle_s)
        for counted, seconds in zip(_PARTS, parts_s, strict=True):
            counted.inc(seconds)
    return drafted, accepted, tokens


def observe_death(deaths: int) -> None:
    """Count the death of a worker for one of its requests; `deaths` includes it."""
    then = "given_up" if deaths >= MOST_DEATHS else "alone" if deaths >= ALONE_AFTER else "again"
    DEATHS.labels(then).inc()


def observe_estimates(judged: Iterable[Judged]) -> None:
    """Count how wrong the estimates were of requests that ended."""
    for one in judged:
        error, covered = _estimates_of(one.moment.value, one.basis.value)
        error.observe(one.ratio)
        # Also when it adds 0: the share of a source that never covers is 0, and not missing.
        covered.inc(one.covered)


@cache
def _estimates_of(when: str, basis: str) -> tuple[Histogram, Counter]:
    return ESTIMATE_ERROR.labels(when, basis), ESTIMATES_COVERED.labels(when, basis)


def observe_queue(core: Scheduler, pool: str, now_s: float) -> float:
    """Set the gauges from the core. Returns the share of KV blocks in use."""
    for level, depth in enumerate(core.depth_by_level()):
        QUEUE_DEPTH.labels(str(level)).set(depth)
    views, backlog_s = core.workers(), core.totals().backlog_s
    WORKERS.set(len(views))
    BACKLOG.set(backlog_s)
    ARRIVING.labels(pool).set(core.arriving_load(now_s))
    POOL_BACKLOG.labels(pool).set(backlog_s / max(1, len(views)))
    blocks = sum(view.target_blocks for view in views if view.up)
    free = sum(view.free_target_blocks for view in views if view.up)
    kv_usage = 1 - free / blocks if blocks else 0.0
    KV_USAGE.set(kv_usage)
    BLOCK_INDEX.set(core.block_index_bytes)
    for found, tokens in core.found_tokens.take().items():
        PROMPT_TOKENS.labels(found).inc(tokens)
    return kv_usage


def leads(leading: bool) -> None:
    """Set whether this process leads. A process that does not lead has no data of the queue, and shows
    none.
    """
    LEADING.set(leading)
    if not leading:
        QUEUE_DEPTH.clear()
        WORKERS.set(0)
        BACKLOG.set(0)
        KV_USAGE.set(0)
        BLOCK_INDEX.set(0)
        POOL_BACKLOG.clear()
        ARRIVING.clear()


def observe_end(
    end: End,
    facts: RequestFacts,
    started_s: float | None,
    first_token_s: float | None,
    tokens: int,
    now_s: float,
) -> None:
    """Count an end and how long its parts took."""
    ENDS.labels(end.value).inc()
    TOTAL.observe(max(0.0, now_s - facts.arrival_s))
    if started_s is not None:
        WAIT.observe(max(0.0, started_s - facts.arrival_s))
    if first_token_s is not None:
        FIRST_TOKEN.observe(max(0.0, first_token_s - facts.arrival_s))
        if tokens > 1:
            TOKEN_TIME.observe(max(0.0, now_s - first_token_s) / (tokens - 1))
