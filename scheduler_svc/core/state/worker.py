"""One worker, as the core knows it."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from laps_sd.contract.choose import LATCH_OFF, RESERVED_ONE_IN, reserved_slots
from scheduler_svc.core.events import WorkerFacts
from scheduler_svc.core.rank import OrderKey
from scheduler_svc.core.state.request import Request, order_key_of

MOST_TAKEN_OFF: Final = 256
"""Requests remembered after they left a worker: more than it can have in one batch. Our choice."""
STUCK_REPORTS: Final = 2
"""Reports in which a worker with slots for all must have left a request out before it counts as short of
memory, or must have left a slot free before this counts as idle; one may come between the lease and the first
round.
"""
MOST_MOVES: Final = 8
"""Places that a member moves by in the mean, beyond which its list is not nearly sorted. Our choice."""


@dataclass(slots=True, eq=False)
class Worker:
    """Mutable; only the scheduler changes it. `members` and `in_order` hold the same requests."""

    worker_id: str
    facts: WorkerFacts | None = None
    """Facts from its hello; None if requests on the record name it, and it has not come up (again)."""
    draining: bool = False
    away: bool = False
    """True from the end of its stream until its next hello."""
    alone: bool = False
    """True while a member runs alone here, or is about to: the worker gets no other request."""
    taken_off: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_TAKEN_OFF))
    """The newest requests that left its list since its last report. They may still be in its batch, because
    it runs them until it receives the Drop, which it does not answer. Requests that are known to be harmless
    are left out."""
    quiet_at_s: float = 0.0
    """Time from which the newest of them has certainly left its batch."""
    members: dict[str, Request] = field(default_factory=dict)
    """Every request leased to it: its list."""
    running: dict[str, Request] = field(default_factory=dict)
    """Members that took part in the last round it reported."""
    must_send: bool = False
    """True after its hello: it gets its list, whatever the list holds."""
    drained_sent: bool = False
    reserved: int = 0
    """Members that may use the reserved share."""
    unsent: int = 0
    """Members that were not yet sent to it."""
    priors_version: int = 0
    """The oldest version of the priors that ranks of members rest on, or an older one."""
    free_target_blocks: int = 0
    free_draft_blocks: int = 0
    reserve_debt_blocks: float = 0.0
    """KV blocks times rounds that its reserved share has used beyond its part; see `charge_reserve`."""
    reports: int = 0
    """Reports of rounds in which a member ran; `rounds` counts these rounds."""
    full_at: int = 0
    """The last of these reports in whose round all slots were taken."""
    rounds: int = 0
    tokens: int = 0
    drafted: float = 0.0
    accepted: float = 0.0
    """Recent drafted and accepted tokens (decayed)."""
    computing: dict[str, Request] = field(default_factory=dict)
    """Members of which it has yet to compute context tokens, as far as known."""
    tokens_per_s: float = 0.0
    """Recent rate (decayed)."""
    slowness: float = 1.0
    """Its rounds take this many times as long as the shared cost model expects. Placement uses it; it follows
    `recent_slowness` in steps, so that equal workers stay equal."""
    recent_slowness: float = 1.0
    """The same over its recent rounds (decayed)."""
    _listed: list[Request] = field(default_factory=list)
    """Its members, best first as of the last sort."""
    _is_in_order: bool = True

    @property
    def stays(self) -> bool:
        """Return whether requests can wait for it: it has come up, and it does not drain."""
        return self.facts is not None and not self.draining

    @property
    def takes_work(self) -> bool:
        """Return whether it may be given requests now."""
        return self.stays and not self.away and not self.alone

    @property
    def slots(self) -> int:
        """Return the number of requests it runs at once; 0 while it is not up."""
        return self.facts.slots if self.facts is not None else 0

    @property
    def capacity_tokens(self) -> int:
        """Return the longest context it can bring to its end, alone.

        A round needs room for the longest draft even when it will draft less, so a draft is set aside.
        """
        facts = self.facts
        assert facts is not None, "only a worker that has come up has a capacity"
        pools = [facts.target_blocks, facts.draft_blocks] if facts.draft_blocks else [facts.target_blocks]
        return min(facts.max_length, min(pools) * facts.block_size - facts.max_draft_len)

    @property
    def reserved_share(self) -> int:
        """Return how many requests may use its reserved share; a one-slot worker has one, in its reserved
        rounds.
        """
        return reserved_slots(self.slots) or 1

    def charge_reserve(self, rounds: int) -> None:
        """Charge the reserved share for rounds that are over. Where KV is short, the share is one of blocks as
        much as of slots: blocks used beyond its part are a debt, and until that is paid no other old request
        is preferred. Otherwise the oldest requests, which are the largest of all where the small ones
        overtake them, would take many times their share. Our choice.
        """
        facts = self.facts
        if facts is None:
            return
        used = 0.0
        if self.is_short_of_blocks:
            tokens = sum(request.context_tokens for request in self.running.values() if request.reserved)
            used = tokens / facts.block_size
        share = self.reserved_share / facts.slots if facts.slots > 1 else 1 / RESERVED_ONE_IN
        due = share * facts.target_blocks
        owed = self.reserve_debt_blocks > 0
        self.reserve_debt_blocks = max(0.0, self.reserve_debt_blocks + rounds * (used - due))
        if owed != (self.reserve_debt_blocks > 0):
            for request in self.members.values():
                if request.reserved:
                    request.entry = None

    @property
    def is_short_of_blocks(self) -> bool:
        """Return whether either pool is so full that `choose` may suspend preemption."""
        facts = self.facts
        assert facts is not None, "only a worker that has come up has a capacity"
        return (
            facts.target_blocks - self.free_target_blocks > LATCH_OFF * facts.target_blocks
            or facts.draft_blocks - self.free_draft_blocks > LATCH_OFF * facts.draft_blocks
        )

    def holds(self, request: Request) -> bool:
        """Return whether it could run the request to its end."""
        return request.longest_tokens <= self.capacity_tokens

    def has_blocks_for(self, request: Request) -> bool:
        """Return whether it could run the request right now, in addition to all its members; by its last
        report.
        """
        facts = self.facts
        assert facts is not None, "only a worker that has come up has a capacity"
        if len(self.running) < len(self.members):
            return False
        free = (
            min(self.free_target_blocks, self.free_draft_blocks)
            if facts.draft_blocks
            else self.free_target_blocks
        )
        return request.context_tokens + facts.max_draft_len <= free * facts.block_size

    @property
    def has_idle_slot(self) -> bool:
        """Return whether it has left a slot free for some rounds: of the members that it has, none fits."""
        return self.reports - self.full_at >= STUCK_REPORTS

    @property
    def waiting_for_blocks(self) -> list[Request]:
        """Return the members that it leaves out although it has slots for all, best first."""
        if len(self.members) > self.slots:
            return []
        return [request for request in self.in_order if self.reports - request.last_report >= STUCK_REPORTS]

    @property
    def in_order(self) -> list[Request]:
        """Return its members, best first. A report moves the ranks of most of them a little, so they are
        sorted when they are read and not at each change: sorting a nearly sorted list costs less than a
        bisection for each member.
        """
        if not self._is_in_order:
            _sort(self._listed)
            self._is_in_order = True
        return self._listed

    def add(self, request: Request) -> None:
        """Put a request on the list."""
        self.members[request.request_id] = request
        self.unsent += 1
        self.priors_version = min(self.priors_version, request.priors_version)
        request.last_report = self.reports
        if self._is_in_order:
            insort(self._listed, request, key=order_key_of)
        else:
            self._listed.append(request)

    def remove(self, request: Request) -> None:
        """Take a request off the list, and off the copy that the worker has: the request ended there, or a
        Drop is sent.
        """
        del self.members[request.request_id]
        self._listed.remove(request)
        self.running.pop(request.request_id, None)
        if request.sent is None:
            self.unsent -= 1
        request.sent = None
        self.reserved -= request.reserved
        self.set_missing(request, 0)

    def set_missing(self, request: Request, tokens: int) -> None:
        """Set how many context tokens of a member are yet to be computed."""
        request.missing_tokens = tokens
        if tokens:
            self.computing[request.request_id] = request
        else:
            self.computing.pop(request.request_id, None)

    def reorder(self) -> None:
        """Note that the order key of a member changed."""
        self._is_in_order = False


def _sort(requests: list[Request]) -> None:
    """Sort a nearly sorted list, the best first. Compiled, insertion takes a tenth of the time of `list.sort`, which
    makes an object of each key.
    """
    moves = MOST_MOVES * len(requests)
    for at in range(1, len(requests)):
        request = requests[at]
        key = request.order_key
        to = at
        while to > 0 and _is_less(key, requests[to - 1].order_key):
            requests[to] = requests[to - 1]
            to -= 1
        requests[to] = request
        moves -= at - to
        if moves < 0:
            requests.sort(key=order_key_of)
            return


def _is_less(key: OrderKey, other: OrderKey) -> bool:
    # Compiled, tuples are compared as objects, and their items are not.
    if key[0] != other[0]:
        return key[0] < other[0]
    if key[1] != other[1]:
        return key[1] < other[1]
    return key[2] < other[2]
