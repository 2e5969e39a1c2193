"""One unfinished request, as the core knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from laps_sd.choose import Residency
from scheduler_svc.core.commands import Standing, StoryLine
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.core.rank import AHEAD, RankKey
from scheduler_svc.core.tenants import Account

MAX_STORY_LINES = 64
STORY_HEAD = 8
"""Lines from the beginning that a long story keeps; after them the oldest go first."""

OrderKey = tuple[int, float, str]
"""(rank_class, cost, request id): how requests are compared everywhere, smaller first."""


@dataclass(slots=True, eq=False)
class Request:
    """Mutable; only the scheduler changes it. `worker` is None exactly while it is queued."""

    facts: RequestFacts
    lease_epoch: int = 0
    """0: never leased."""
    worker: str | None = None
    emitted: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    attained_s: float = 0.0
    preemptions: int = 0
    residency: Residency = Residency.NONE
    running: bool = False
    """Took part in the last round that its worker reported."""
    started: bool = False
    """Has run at least once, anywhere."""
    ran_here: bool = False
    """Has run under the present lease."""
    passed_over: int = 0
    """Rounds of its worker without it, since it was leased or last ran."""
    reserved: bool = False
    expected_total: float | None = None
    """Output tokens in all, by the client's hint or by the worker's newest prediction."""
    predicted_by_worker: bool = False
    first_prediction: float | None = None
    """The worker's first word on its length: what the error of such predictions is learnt from."""
    seen_rounds: int = 0
    """Rounds since this core knows it, with their tokens and squared tokens: what the priors learn from at its end."""
    seen_tokens: int = 0
    seen_squares: int = 0
    rank_before: RankKey | None = None
    """The rank it has; None until it has one."""
    priors_version: int = -1
    """Version of the priors that its rank rests on."""
    order_key: OrderKey = (0, 0.0, "")
    """Up to date while it is on a list; in the queue, its tenant's turn may have come or gone since."""
    account: Account | None = None
    """Its tenant's, when fairness is on and it is in the shard."""
    story: list[StoryLine] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Its id."""
        return self.facts.request_id

    @property
    def context_tokens(self) -> int:
        """Prompt and output so far."""
        return self.facts.prompt_tokens + self.emitted

    @property
    def longest_tokens(self) -> int:
        """The longest context it may reach."""
        return self.facts.prompt_tokens + self.facts.max_tokens

    @property
    def tenant_ahead(self) -> bool:
        """Whether it comes after the requests of other tenants, because its own has had more."""
        return self.account is not None and self.account.ahead

    @property
    def rank(self) -> RankKey:
        """Its rank now."""
        assert self.rank_before is not None, "ranked when it enters the shard"
        return self.rank_before

    @property
    def key_now(self) -> OrderKey:
        """Its order key as its rank, its KV and its tenant stand now."""
        rank = self.rank
        cost = rank.index_s if self.residency is Residency.DEVICE else rank.index_s + rank.resume_cost_s
        rank_class = rank.rank_class | AHEAD if self.tenant_ahead else rank.rank_class
        return (rank_class, cost, self.facts.request_id)

    @property
    def standing(self) -> Standing:
        """What the record keeps of it."""
        return Standing(
            rounds=self.rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            attained_s=self.attained_s,
            preemptions=self.preemptions,
            level=self.rank.level,
            score=self.order_key[1],
        )

    def set_rank(self, rank: RankKey) -> None:
        """Give it this rank; the order key follows from the rank and from where the KV lies."""
        self.rank_before = rank
        self.order_key = self.key_now

    def tell(self, now_s: float, what: str, detail: str = "") -> None:
        """Add a line to its story, on the clock of `step`."""
        if len(self.story) == MAX_STORY_LINES:
            del self.story[STORY_HEAD]
        self.story.append(StoryLine(at_s=now_s, what=what, detail=detail))
