"""Events that the core receives. Frozen facts; token ids pass through unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.native import mypyc_attr


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class RequestFacts:
    """Facts of a request from its submission. They never change."""

    request_id: Final[str]
    sequence: Final[int]
    """Arrival order within the shard; breaks ties."""
    arrival_s: Final[float]
    """Time of arrival, on the clock of `step`."""
    tenant: Final[str]
    priority: Final[int]
    """Higher runs first."""
    workload_class: Final[str]
    """Key of the learnt priors (the client's hint, bounded by the shell; may be empty)."""
    prompt_tokens: Final[int]
    max_tokens: Final[int]
    expected_output_tokens: Final[int | None]
    """The client's own guess; never trusted blindly."""
    runs_to_limit: Final[bool]
    """Only its length limit ends it: end-of-sequence tokens are ignored, and there is no stop string."""
    length_features: Final[bytes]
    """Hashed words of the prompt, as `laps_sd.contract.length_features` packs them; empty: none."""
    prompt_blocks: Final[bytes]
    """Names of the blocks that the prompt starts with (`laps_sd.contract.prompt_blocks`); empty: none."""
    conversation: Final[bytes]
    """Identifies the conversation of which this is a turn; empty: none is known."""

    def __init__(
        self,
        request_id: str,
        sequence: int,
        arrival_s: float,
        tenant: str,
        priority: int,
        workload_class: str,
        prompt_tokens: int,
        max_tokens: int,
        expected_output_tokens: int | None,
        runs_to_limit: bool = False,
        length_features: bytes = b"",
        prompt_blocks: bytes = b"",
        conversation: bytes = b"",
    ) -> None:
        self.request_id = request_id
        self.sequence = sequence
        self.arrival_s = arrival_s
        self.tenant = tenant
        self.priority = priority
        self.workload_class = workload_class
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.expected_output_tokens = expected_output_tokens
        self.runs_to_limit = runs_to_limit
        self.length_features = length_features
        self.prompt_blocks = prompt_blocks
        self.conversation = conversation

    @property
    def guessed_tokens(self) -> float | None:
        """Return the client's guess, at least 1; None without one."""
        return None if self.expected_output_tokens is None else float(max(1, self.expected_output_tokens))


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request is on the record and waits."""

    facts: RequestFacts


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Recovered:
    """A request found on the record by a new leader, with what it had reached."""

    facts: Final[RequestFacts]
    emitted: Final[int]
    """Committed output tokens."""
    rounds: Final[int]
    drafted: Final[int]
    accepted: Final[int]
    attained_s: Final[float]
    preemptions: Final[int]
    worker_id: Final[str | None]
    lease_epoch: Final[int]
    deaths: Final[int]
    """As in `Request`, like the next two."""
    death_round: Final[int]
    drafts: Final[int]

    def __init__(
        self,
        facts: RequestFacts,
        emitted: int,
        rounds: int,
        drafted: int,
        accepted: int,
        attained_s: float,
        preemptions: int,
        worker_id: str | None,
        lease_epoch: int,
        deaths: int = 0,
        death_round: int = 0,
        drafts: int = 0,
    ) -> None:
        self.facts = facts
        self.emitted = emitted
        self.rounds = rounds
        self.drafted = drafted
        self.accepted = accepted
        self.attained_s = attained_s
        self.preemptions = preemptions
        self.worker_id = worker_id
        self.lease_epoch = lease_epoch
        self.deaths = deaths
        self.death_round = death_round
        self.drafts = drafts


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Capacity of a worker, from its hello. Fixed for the life of its process."""

    worker_id: str
    """One process: a worker that starts again has another id."""
    slots: int
    """Most requests in one of its rounds."""
    target_blocks: int
    draft_blocks: int
    """KV blocks in its two pools, for the target and for the draft; 0 for the draft: it has no such pool."""
    block_size: int
    """Tokens in a KV block."""
    max_length: int
    """Longest context, in tokens."""
    max_draft_len: int
    """Most draft tokens of one request in a round."""


@dataclass(frozen=True, slots=True)
class Held:
    """A request that a worker holds, by its hello."""

    request_id: str
    lease_epoch: int
    residency: Residency
    emitted: int = 0
    """Output tokens that the worker has."""
    predicted_remaining_tokens: float | None = None
    """Output tokens that remain after these, by its newest prediction."""


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """The hello of a worker (first contact, or again after a broken stream or a change of leader)."""

    facts: WorkerFacts
    held: tuple[Held, ...]
    cached_blocks: bytes = b""
    """Names of all blocks whose KV it has."""


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """Blocks whose KV a worker has newly computed, and blocks that it has lost since."""

    worker_id: str
    added: bytes
    removed: bytes


@dataclass(frozen=True, slots=True)
class WorkerAway:
    """The stream of a worker has ended, and its grace begins: it keeps its requests and gets no others until it
    is up again."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The grace of a worker is over: its requests must continue elsewhere."""

    worker_id: str
    hung: bool = False
    """True: connected, and without a report for too long. Otherwise its stream ended, and only a new
    connection would show that its process lives."""


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker takes no new work; its requests move at a round boundary, or finish if that is sooner."""

    worker_id: str


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Merged:
    """Counts of a request's progress in several rounds that are reported together."""

    rounds: Final[int]
    """Rounds that verified something."""
    drafts: Final[int]
    """Rounds with draft tokens."""
    token_squares: Final[int]
    """Sum over the rounds of the squared number of new tokens."""

    def __init__(self, rounds: int, drafts: int, token_squares: int) -> None:
        self.rounds = rounds
        self.drafts = drafts
        self.token_squares = token_squares


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Progress:
    """Progress of one request in the rounds of a report."""

    request_id: Final[str]
    lease_epoch: Final[int]
    position: Final[int]
    """Output tokens before the first of these rounds."""
    tokens: Final[tuple[int, ...]]
    """New output token ids; the core counts them and hands them on."""
    drafted: Final[int]
    accepted: Final[int]
    prefilled: Final[int]
    """Context tokens computed for it (prompt, or recompute)."""
    end: Final[End | None]
    cut_characters: Final[int]
    error: Final[str]
    predicted_remaining_tokens: Final[float | None]
    merged: Final[Merged | None]
    """Counts of several rounds; None for one."""
    cached: Final[int]
    """Prompt tokens that the worker found in its prefix cache when it took the request up; 0 in later rounds."""
    recorded: bool
    """Whether the caller has written the tokens to the record, or is writing them: no `Commit` answers them.
    Never with an end.
    """

    def __init__(
        self,
        request_id: str,
        lease_epoch: int,
        position: int,
        tokens: tuple[int, ...],
        drafted: int,
        accepted: int,
        prefilled: int,
        end: End | None,
        cut_characters: int,
        error: str,
        predicted_remaining_tokens: float | None = None,
        merged: Merged | None = None,
        recorded: bool = False,
        cached: int = 0,
    ) -> None:
        self.request_id = request_id
        self.lease_epoch = lease_epoch
        self.position = position
        self.tokens = tokens
        self.drafted = drafted
        self.accepted = accepted
        self.prefilled = prefilled
        self.end = end
        self.cut_characters = cut_characters
        self.error = error
        self.predicted_remaining_tokens = predicted_remaining_tokens
        self.merged = merged
        self.recorded = recorded
        self.cached = cached

    @property
    def rounds(self) -> int:
        """Return in how many rounds it had tokens verified."""
        if self.merged is not None:
            return self.merged.rounds
        return 1 if self.tokens else 0

    @property
    def drafts(self) -> int:
        """Return in how many rounds it had draft tokens."""
        if self.merged is not None:
            return self.merged.drafts
        return 1 if self.drafted else 0

    def squares(self, new: int) -> int:
        """Return the sum over the rounds of the squared number of tokens. `new` of them are counted: of one
        round that is reported again, only those that were not committed before.
        """
        return self.merged.token_squares if self.merged is not None else new * new


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class ResidencyChange:
    """The KV of a request lies elsewhere now."""

    request_id: Final[str]
    lease_epoch: Final[int]
    residency: Final[Residency]

    def __init__(
        self,
        request_id: str,
        lease_epoch: int,
        residency: Residency,
    ) -> None:
        self.request_id = request_id
        self.lease_epoch = lease_epoch
        self.residency = residency


@dataclass(frozen=True, slots=True)
class RoundReported:
    """One round of one worker, or several that the caller merged: the requests that took part, their tokens,
    the costs. Rounds can be merged if each of them verified something and no request left the batch between
    them, except by its end.
    """

    worker_id: str
    progress: tuple[Progress, ...]
    residency: tuple[ResidencyChange, ...]
    draft_s: float
    verify_s: float
    prefill_s: float
    swap_s: float
    idle_s: float
    """Time between the end of the round before and the start of this one."""
    total_s: float
    free_target_blocks: int
    free_draft_blocks: int
    rounds: int = 1
    """Rounds that this covers; the times are sums over them."""
    limit_s: float = 0.0
    """Longest time that the round was to take, where because of it some context was left for later; 0: none was."""

    @property
    def verified(self) -> int:
        """Return how many sequences the rounds verified; the others only had context computed."""
        return sum([progress.rounds for progress in self.progress])

    @property
    def prefilled(self) -> int:
        """Return the context tokens that were computed in these rounds."""
        return sum([progress.prefilled for progress in self.progress])

    def service_s(self, progress: Progress, verified: int, prefilled: int) -> float:
        """Return the machine seconds that one of the requests has attained: an equal share of each round for
        all requests that it verified (for all that took part, if it verified nothing), and a share of the
        prefill by the tokens computed. `verified`, `prefilled`: those of the report.
        """
        seconds = 0.0
        if progress.rounds:
            seconds = (self.draft_s + self.verify_s) / verified * progress.rounds
        elif not verified:
            seconds = (self.draft_s + self.verify_s) / len(self.progress)
        if progress.prefilled:
            seconds += self.prefill_s * progress.prefilled / prefilled
        return seconds


@dataclass(frozen=True, slots=True)
class EndRequested:
    """A request ends without a report of it: by a cancel, a deadline, a soft time limit, an error; inside vLLM by a
    stop string, too.
    """

    request_id: str
    end: End
    detail: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The record refused a transition of this request: it has no such unfinished request, or another lease epoch or
    position than the core. The core's state is wrong: it forgets the request, and the caller reads the record again.
    """

    request_id: str


Event = (
    Arrived
    | Recovered
    | WorkerUp
    | WorkerAway
    | WorkerLost
    | WorkerDraining
    | CacheChanged
    | RoundReported
    | EndRequested
    | Refused
)
