"""The worker's Prometheus metrics."""

from __future__ import annotations

from laps_sd.contract.choose import Residency
from laps_sd.service.log import get_logger
from laps_sd.service.metrics import counter, gauge, histogram
from worker_svc.runner.messages import Round

log = get_logger(__name__)

ROUNDS = counter("laps_sd_worker_rounds_total", "Rounds run with at least one request.")
DRAFTED = counter("laps_sd_worker_drafted_tokens_total", "Draft tokens.")
ACCEPTED = counter("laps_sd_worker_accepted_tokens_total", "Draft tokens that the target accepted.")
DRAFTED_BY = counter(
    "laps_sd_worker_drafted_tokens_by_source_total",
    "Draft tokens by source: model is the draft model, lookup is prompt lookup.",
    ["source"],
)
ACCEPTED_BY = counter(
    "laps_sd_worker_accepted_tokens_by_source_total",
    "Draft tokens that the target accepted, by source.",
    ["source"],
)
TESTED_AT = counter(
    "laps_sd_worker_tested_tokens_total",
    "Draft tokens that were compared with the target's choice, by position in the draft (1 is the first).",
    ["position"],
)
ACCEPTED_AT = counter(
    "laps_sd_worker_accepted_tokens_by_position_total",
    "Draft tokens that the target accepted, by position in the draft.",
    ["position"],
)
ACCEPTANCE = gauge(
    "laps_sd_worker_acceptance_ratio",
    "Accepted among compared tokens, over about the last thousand; 1 before the first.",
)
COLLAPSES = counter(
    "laps_sd_worker_acceptance_collapses_total",
    "Times that this ratio fell below 0.1: the draft does not fit the traffic or the target. If the "
    "worker chooses draft lengths, it then stops drafting and tries it again from time to time.",
)
OUT_OF_MEMORY = counter(
    "laps_sd_worker_out_of_memory_total",
    "Times that the device had no memory for a round; after that fewer requests run for a while.",
)
GENERATED = counter("laps_sd_worker_tokens_total", "Output tokens.")
PREFILLED = counter(
    "laps_sd_worker_prefilled_tokens_total",
    "Context tokens computed: prompts, and context whose KV was discarded and is computed again.",
)
CACHED = counter(
    "laps_sd_worker_cached_tokens_total",
    "Prompt tokens that were found in the prefix cache and not computed. Hit rate: cached / (cached +"
    " prefilled).",
)
SECONDS = counter(
    "laps_sd_worker_seconds_total",
    "Time by phase: draft, verify, prefill, swap, other; idle: between two rounds; waiting: nothing to run.",
    ["phase"],
)
ROUND = histogram("laps_sd_worker_round_seconds", "Duration of a round with at least one request.")
PREEMPTIONS = counter("laps_sd_worker_preemptions_total", "Requests paused in favour of others.")
MOVES = counter(
    "laps_sd_worker_residency_changes_total",
    "Times that the KV of a request moved to device, host or nowhere (none).",
    ["to"],
)
ENDS = counter(
    "laps_sd_worker_ended_requests_total",
    "Requests whose generation ended on this worker, by finish reason.",
    ["reason"],
)

COMPUTED_BY = gauge(
    "laps_sd_worker_computed_by",
    "1 for what computes the rounds: path all_in_c, attention_in_c (the rest by torch), torch, vllm or fake; threads 0: "
    "not on the CPU, or not known.",
    ["path", "dtype", "threads"],
)
WEIGHT_BYTES = gauge(
    "laps_sd_worker_weight_bytes_per_second",
    "Memory bandwidth at the start: bytes of weights that a round without draft tokens reads for one request, by its "
    "measured time; 0: not known.",
)
SLOTS = gauge("laps_sd_worker_slots", "Largest number of requests in one round.")
SLOTS_USED = gauge("laps_sd_worker_slots_used", "Requests of the last round that continue; 0 when idle.")
FREE_BLOCKS = gauge(
    "laps_sd_worker_free_blocks",
    "KV blocks that a request could get after the last round; blocks of the prefix cache count as free.",
    ["model"],
)
UNACKNOWLEDGED_TOKENS = gauge(
    "laps_sd_worker_unacknowledged_tokens", "Output tokens that no leader has acknowledged."
)
UNACKNOWLEDGED_REPORTS = gauge(
    "laps_sd_worker_unacknowledged_reports", "Reports that no leader has acknowledged."
)
CONNECTED = gauge(
    "laps_sd_worker_connected", "1 while a leader that has sent its hello is connected and not silent."
)
CONNECTIONS = counter(
    "laps_sd_worker_connections_total", "Times that a leader sent its hello to this worker."
)
IGNORED = counter(
    "laps_sd_worker_ignored_messages_total", "Messages ignored because they came from an older leader."
)

_DRAFT, _VERIFY, _PREFILL, _SWAP, _OTHER, _IDLE, _WAITING = (
    SECONDS.labels(phase) for phase in ("draft", "verify", "prefill", "swap", "other", "idle", "waiting")
)
ACCEPTANCE.set(1.0)
MOST_POSITIONS = 16  # draft positions with their own label; later ones share the last label
_TESTED_AT, _ACCEPTED_AT = (
    [metric.labels(str(place)) for place in range(1, MOST_POSITIONS + 1)]
    for metric in (TESTED_AT, ACCEPTED_AT)
)
_BY_MODEL, _BY_LOOKUP = (
    [metric.labels(source) for metric in (DRAFTED_BY, ACCEPTED_BY)] for source in ("model", "lookup")
)
_MOVED = {residency: MOVES.labels(residency.name.lower()) for residency in Residency}
_FREE_TARGET, _FREE_DRAFT = FREE_BLOCKS.labels("target"), FREE_BLOCKS.labels("draft")


class AcceptanceWatch:
    """Ratio of accepted to compared draft tokens, with old ones fading, and detection of its collapse."""

    MEMORY_TOKENS = 1000.0
    EVIDENCE_TOKENS = 200.0
    """Tokens that must be compared before a collapse is reported."""
    COLLAPSED, RECOVERED = 0.1, 0.2

    def __init__(self) -> None:
        self._tested = self._accepted = 0.0
        self.collapsed = False

    @property
    def ratio(self) -> float:
        """Accepted among compared tokens; 1 before any comparison."""
        return self._accepted / self._tested if self._tested else 1.0

    def observe(self, tested: int, accepted: int) -> bool:
        """Take in one round. Returns True if it caused the collapse."""
        keep = max(0.0, 1 - tested / self.MEMORY_TOKENS)
        self._tested = self._tested * keep + tested
        self._accepted = self._accepted * keep + accepted
        if self.collapsed:
            self.collapsed = self.ratio < self.RECOVERED
        elif self._tested >= self.EVIDENCE_TOKENS and self.ratio < self.COLLAPSED:
            self.collapsed = True
            return True
        return False


_watch = AcceptanceWatch()


def set_free_blocks(target: int, draft: int) -> None:
    """Set the free blocks of both pools."""
    _FREE_TARGET.set(target)
    _FREE_DRAFT.set(draft)


def observe(report: Round) -> None:
    """Count one round."""
    if report.out_of_memory:
        OUT_OF_MEMORY.inc(report.out_of_memory)
    result = report.result
    _IDLE.inc(max(0.0, report.idle_s - report.waited_s))
    _WAITING.inc(report.waited_s)
    for change in report.residency:
        _MOVED[change.residency].inc()
    drafted = accepted = found = found_accepted = tokens = prefilled = cached = tested = 0
    for _, step in report.progress:
        drafted += step.drafted
        accepted += step.accepted
        if step.looked_up:
            found += step.drafted
            found_accepted += step.accepted
        tokens += len(step.tokens)
        prefilled += step.prefilled
        cached += step.cached
        tested += step.tested
        for counters, count in ((_TESTED_AT, step.tested), (_ACCEPTED_AT, step.accepted)):
            for at in range(count):
                counters[min(at, MOST_POSITIONS - 1)].inc()
        if step.finish is not None:
            ENDS.labels(step.finish.value).inc()
    GENERATED.inc(tokens)
    if tested:
        if _watch.observe(tested, accepted):
            COLLAPSES.inc()
            log.warning(
                "the target accepts next to nothing of what is proposed", ratio=round(_watch.ratio, 3)
            )
        ACCEPTANCE.set(_watch.ratio)
    SLOTS_USED.set(sum(step.finish is None for step in result.requests))
    set_free_blocks(result.free_target_blocks, result.free_draft_blocks)
    if not result.requests:
        return
    ROUNDS.inc()
    ROUND.observe(result.total_s)
    DRAFTED.inc(drafted)
    ACCEPTED.inc(accepted)
    _BY_LOOKUP[0].inc(found)
    _BY_LOOKUP[1].inc(found_accepted)
    _BY_MODEL[0].inc(drafted - found)
    _BY_MODEL[1].inc(accepted - found_accepted)
    _DRAFT.inc(result.draft_s)
    _VERIFY.inc(result.verify_s)
    _SWAP.inc(result.swap_s + report.swap_out_s)
    _OTHER.inc(max(0.0, result.total_s - result.draft_s - result.verify_s - result.prefill_s - result.swap_s))
    if prefilled:
        PREFILLED.inc(prefilled)
        _PREFILL.inc(result.prefill_s)
    if cached:
        CACHED.inc(cached)
    if report.preempted:
        PREEMPTIONS.inc(report.preempted)
