"""One unfinished request, as the core knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from laps_sd.contract.choose import ON_DEVICE, Residency
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS
from scheduler_svc.core.commands import AssignEntry, Standing, StoryLine
from scheduler_svc.core.estimates.errors import ALL_MOMENTS, SETTLED_ROUNDS, KeptEstimate, Moment
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.core.native import mypyc_attr
from scheduler_svc.core.rank import AHEAD, BEHIND, OrderKey, RankKey
from scheduler_svc.core.state.shared_prefill import SharedPrefill
from scheduler_svc.core.state.tenants import Account

STABLE_ROUNDS: Final = 8
"""Rounds of running acceptance that are remembered, for `policies/laps_sd_paper.py`. Our choice."""
MAX_STORY_LINES: Final = 64
STORY_HEAD: Final = 8
"""Lines from the beginning that a long story keeps; after them one line replaces the oldest others."""
LEFT_OUT: Final = "left_out"
"""The event name (`what`) of that line."""

ALONE_AFTER: Final = 2
"""Deaths of workers after which a request runs alone: one is an accident, two may be its doing. Our choice,
like the next two."""
MOST_DEATHS: Final = 5
"""Deaths after which it is ended, including those while it shared a worker. So three workers must die that
ran nothing else: an operator, or the owner of a spot node, who happens to kill four in a row ends no request.
With 4, random faults that killed a worker every two seconds ended 2 innocent requests of 9,894."""
SURVIVED_ROUNDS: Final = 8
"""Rounds with tokens after the last death that clear a request: more than the one or two that a dying worker
does not report, so that a request that always kills at the same token is not cleared before that token."""
QUIET_S: Final = 3.0
"""Time that a worker is kept empty between a request that is not known to be harmless and one that runs
alone, in seconds: the time of a Drop on its way, of the round that runs when it arrives, and until a death in
that round is noticed (`LAPS_SD_WORKER_GRACE_S`). Where these take longer a death may count for the wrong
request; two in a row are unlikely. Our choice."""

_FIRST_ROUND: Final = Moment.FIRST_ROUND  # compiled, such a name costs no look-up
_PERCEPTIBLE: Final = Moment.PERCEPTIBLE
_SETTLED: Final = Moment.SETTLED


@mypyc_attr(acyclic=True)
@dataclass(slots=True, eq=False)
class Request:
    """Mutable; only the scheduler changes it. `worker` is None exactly while it is on no list."""

    facts: RequestFacts
    lease_epoch: int = 0
    """0: never leased."""
    worker: str | None = None
    emitted: int = 0
    rounds: int = 0
    """Rounds that verified something; a round that only computed its context does not count."""
    drafts: int = 0
    """Rounds that had draft tokens."""
    drafted: int = 0
    accepted: int = 0
    attained_s: float = 0.0
    attained_before_level_s: float = 0.0
    """Machine seconds it had attained when it entered its present level."""
    late_acceptance: tuple[float, ...] = ()
    """Accepted over drafted tokens in all, after each of the last `STABLE_ROUNDS` rounds that drafted. Covers
    only rounds that this core has seen, and is kept only for policies with `looks_back`."""
    preemptions: int = 0
    deaths: int = 0
    """Workers that died while it may have been in their batch, since it was last cleared."""
    death_round: int = 0
    """Its `rounds` at the last of these deaths."""
    residency: Residency = Residency.NONE
    running: bool = False
    """Took part in the last round that its worker reported."""
    started: bool = False
    """Has run at least once, anywhere."""
    ran_here: bool = False
    """Has run under the present lease."""
    last_report: int = 0
    """The report of its worker in which it last ran, by the worker's count; before that, the one after which
    it was leased."""
    reserved: bool = False
    cached_tokens: int = 0
    """Tokens at the start of its context that its worker has computed already, as far as known; in the queue, those that
    the best worker has."""
    missing_tokens: int = 0
    """Context tokens that its worker has yet to compute, as far as known; 0 in the queue."""
    shared_prefill: SharedPrefill | None = None
    """The rounds so far in which its context is computed, if their time is limited; None: it is not."""
    guesses: Guesses = field(default_factory=Guesses)
    seen_rounds: int = 0
    """Rounds that this core has seen. The priors learn from these three at its end."""
    seen_tokens: int = 0
    """Tokens of these rounds."""
    seen_squares: int = 0
    """Sum of the squared tokens of each of these rounds."""
    kept_estimates: dict[Moment, KeptEstimate] | None = None
    """Estimates to be judged at its end; None if it is not judged."""
    rank_before: RankKey | None = None
    """The rank it has; None until it has one."""
    priors_version: int = -1
    """Version of the priors that its rank rests on."""
    order_key: OrderKey = (0, 0.0, "")
    """Up to date while it is on a list; in the queue, its tenant's turn may have come or gone since."""
    entry: AssignEntry | None = None
    """Its entry for its worker's list; None when the entry has to be built again."""
    sent: AssignEntry | None = None
    """The entry that the worker has; None while it is on no list, or has not been sent."""
    account: Account | None = None
    """Account of its tenant, when fairness is on and it is in the shard."""
    story: list[StoryLine] = field(default_factory=list)
    left_out: int = 0
    """Lines that were removed from the story."""
    left_out_pauses: int = 0
    """Pauses among these lines."""

    @property
    def request_id(self) -> str:
        """Return its id."""
        return self.facts.request_id

    @property
    def attained_at_level_s(self) -> float:
        """Return the machine seconds charged since it entered its present level."""
        return self.attained_s - self.attained_before_level_s

    @property
    def runs_alone(self) -> bool:
        """Return whether it gets a worker of its own: only that shows that workers die of it and not of a
        neighbour.
        """
        return self.deaths >= ALONE_AFTER

    @property
    def has_survived(self) -> bool:
        """Return whether it has run long enough since the last death to be cleared."""
        return self.rounds - self.death_round >= SURVIVED_ROUNDS

    @property
    def may_have_run(self) -> bool:
        """Return whether it may be in the batch that its worker runs now. A worker prepares a request when it
        is listed, and its first round is known only afterwards: so a request that has not run there counts as
        well.
        """
        return self.running or not self.ran_here

    @property
    def is_harmless(self) -> bool:
        """Return whether it has run on its worker, and no worker died with it."""
        return self.ran_here and not self.deaths

    @property
    def context_tokens(self) -> int:
        """Return the tokens of prompt and output so far."""
        return self.facts.prompt_tokens + self.emitted

    def cached_in(self, blocks: int) -> int:
        """Return the context tokens in the first `blocks` blocks of its prompt; the last token is always computed."""
        return min(blocks * BLOCK_TOKENS, self.context_tokens - 1)

    @property
    def longest_tokens(self) -> int:
        """Return the longest context it may reach, in tokens."""
        return self.facts.prompt_tokens + self.facts.max_tokens

    @property
    def tenant_ahead(self) -> bool:
        """Return whether it comes after requests of other tenants, because its own has had more service."""
        return self.account is not None and self.account.ahead

    @property
    def tenant_behind(self) -> bool:
        """Return whether it comes before requests of other tenants, because its own has had less service."""
        return self.account is not None and self.account.behind

    @property
    def rank(self) -> RankKey:
        """Return its present rank."""
        assert self.rank_before is not None, "ranked when it enters the shard"
        return self.rank_before

    @property
    def key_now(self) -> OrderKey:
        """Return its order key in its tenant's present turn."""
        return (self._class_now(self.rank.rank_class), self.order_key[1], self.facts.request_id)

    @property
    def age_key(self) -> OrderKey:
        """Return the key that orders by age, the oldest first."""
        return (0, self.facts.sequence, self.facts.request_id)

    @property
    def standing(self) -> Standing:
        """Return its progress and its place in the queue, for the record."""
        return Standing(
            self.rounds,
            self.drafts,
            self.drafted,
            self.accepted,
            self.attained_s,
            self.preemptions,
            self.rank.level,
            self.order_key[1],
        )

    def set_rank(self, rank: RankKey) -> None:
        """Set its rank; the order key follows from the rank and from where the KV lies."""
        if self.rank_before is None or rank.level != self.rank_before.level:
            self.attained_before_level_s = self.attained_s
        self.rank_before = rank
        self.entry = None
        cost = rank.index_s if self.residency is ON_DEVICE else rank.index_s + rank.resume_cost_s
        self.order_key = (self._class_now(rank.rank_class), cost, self.facts.request_id)

    def _class_now(self, rank_class: int) -> int:
        """Return the class that its policy gave it, in its tenant's present turn."""
        account = self.account
        if account is None:
            return rank_class
        if account.ahead:
            return rank_class | AHEAD
        # In the queue there is no such request, except until the end of a step that took it off a list.
        return rank_class + BEHIND if account.behind and self.worker is not None else rank_class

    def speculated(self, drafts: int, drafted: int, accepted: int, remember: bool) -> None:
        """Count `drafts` rounds with `drafted` draft tokens in all, `accepted` of them accepted. `remember`:
        for policies that look back.
        """
        if drafts:
            self.drafts += drafts
            self.drafted += drafted
            self.accepted += accepted
            if remember:
                so_far = self.accepted / self.drafted
                self.late_acceptance = (*self.late_acceptance[1 - STABLE_ROUNDS :], so_far)

    def remember_estimate(self) -> None:
        """Keep the remaining service estimated in its rank, if this is a moment to be judged."""
        kept = self.kept_estimates
        if kept is None or len(kept) == ALL_MOMENTS:
            return
        if not kept:
            kept[Moment.ARRIVAL] = self._estimate()
        elif self.rounds >= 1 and _FIRST_ROUND not in kept:
            kept[_FIRST_ROUND] = self._estimate()
        elif self.rounds >= SETTLED_ROUNDS and _SETTLED not in kept:
            kept[_SETTLED] = self._estimate()
        if self.rank.perceptible and _PERCEPTIBLE not in kept:
            kept[_PERCEPTIBLE] = self._estimate()

    def _estimate(self) -> KeptEstimate:
        remaining = self.rank.remaining
        return KeptEstimate(
            remaining.mean_s, remaining.low_s, remaining.high_s, self.attained_s, remaining.basis
        )

    def record_event(self, now_s: float, what: str, detail: str = "") -> None:
        """Add an event to its story, on the clock of `step`."""
        story = self.story
        if len(story) == MAX_STORY_LINES:
            since_s = story[STORY_HEAD].at_s
            if not self.left_out:
                self._leave_out(story[STORY_HEAD])
            self._leave_out(story.pop(STORY_HEAD + 1))
            count = f"{self.left_out} lines, {self.left_out_pauses} of them paused"
            story[STORY_HEAD] = StoryLine(at_s=since_s, what=LEFT_OUT, detail=count)
        story.append(StoryLine(at_s=now_s, what=what, detail=detail))

    def _leave_out(self, line: StoryLine) -> None:
        self.left_out += 1
        self.left_out_pauses += line.what == "paused"


def order_key_of(request: Request) -> OrderKey:
    """Return the key that orders the best first."""
    return request.order_key
