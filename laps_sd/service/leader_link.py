"""Rules that every dialler of a shard's schedulers shares: which address is next, how long to pause, and when
a peer counts as silent.

    search = LeaderSearch(BackOff(), random.Random())
    while True:
        search.begin_round(seeds)
        while (address := search.next_address()) is not None:
            search.visited(address, await visit(address))
        await asyncio.sleep(search.end_round_s())

Any scheduler may be dialled: one that does not lead names the leader, if it knows it (a *referral*). A
dialler that only makes one call uses `Candidates`, which is one round of the search.

Everything here but `watch` and `until_first_ends` is without I/O: time and randomness are passed in.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "BACK_OFF_FIRST_S",
    "BACK_OFF_LONGEST_S",
    "COLUMNS_VERSION",
    "HEARTBEAT_S",
    "LEAST_SILENCE_S",
    "MAX_REFERRALS",
    "PROTOCOL_VERSIONS",
    "BackOff",
    "Candidates",
    "LeaderSearch",
    "LinkBroken",
    "Liveness",
    "PeerSilent",
    "Visit",
    "is_address",
    "named_leader",
    "until_first_ends",
    "watch",
]

PROTOCOL_VERSIONS = (2, 1)
"""Versions of both links, newest first. A peer supports its newest and the one before."""
COLUMNS_VERSION = 2
"""First version of both links with columns for what has nothing but tokens."""

HEARTBEAT_S = 1.0
"""Longest interval of heartbeats, and that of schedulers."""
LEAST_SILENCE_S = 1.5
"""Shortest silence of a peer after which it may be given up: longer than any interval of heartbeats, so that no
settings of two services need to be compared."""

# Two standbys may name each other for a moment, during a change of leader.
MAX_REFERRALS = 4
"""Referrals that are followed in one round."""

BACK_OFF_FIRST_S = 0.05
# Below the grace period that a new leader gives workers to come back (2 s).
BACK_OFF_LONGEST_S = 1.0

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.\-]+):\d+")


def is_address(text: str) -> bool:
    """Return whether a text is an address that can be read in a scheduler's answer."""
    return _ADDRESS.fullmatch(text) is not None


def named_leader(detail: str) -> str:
    """Return the address in a scheduler's answer FAILED_PRECONDITION; empty if it names none."""
    found = _ADDRESS.search(detail)
    return found.group() if found else ""


@dataclass(frozen=True, slots=True)
class BackOff:
    """Pauses between rounds of dialling: they double from `first_s` to `longest_s` seconds."""

    first_s: float = BACK_OFF_FIRST_S
    longest_s: float = BACK_OFF_LONGEST_S

    def pause_s(self, failures: int, rng: random.Random) -> float:
        """Return the seconds to pause after `failures` failures in a row, of which half are random: diallers
        must not all come back at once.
        """
        return min(self.longest_s, self.first_s * 2.0 ** min(failures, 16)) * rng.uniform(0.5, 1.0)


class Candidates:
    """Addresses to dial in one round: the given ones in turn, and after each the leader that it named.

    No address is dialled twice, and at most `MAX_REFERRALS` referrals are followed.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._waiting = deque(addresses)
        self._tried: set[str] = set()
        self._referrals = 0

    def next_address(self) -> str | None:
        """Return the address to dial now; None if the round is over."""
        while self._waiting:
            address = self._waiting.popleft()
            if address not in self._tried:
                self._tried.add(address)
                return address
        return None

    def refer(self, leader: str) -> None:
        """Put the leader that the last scheduler named at the head; empty if it named none."""
        if leader and leader not in self._tried and self._referrals < MAX_REFERRALS:
            self._referrals += 1
            self._waiting.appendleft(leader)


class LinkBroken(Exception):
    """Raised when the stream to a scheduler is over; `leader` is the address that it named, or empty."""

    def __init__(self, reason: str, leader: str = "") -> None:
        super().__init__(reason)
        self.leader = leader


@dataclass(frozen=True, slots=True)
class Visit:
    """The result of dialling one scheduler."""

    greeted: bool
    """True if it led, and the connection has ended since."""
    leader: str = ""
    """Address of the leader that it named; empty without one."""


class LeaderSearch:
    """The search for a leader that a connection is kept to, in rounds; see the module's docstring.

    A round dials the last leader first, since most often the network broke the connection, then all seeds in
    random order. It ends with the connection to a leader.
    """

    def __init__(self, back_off: BackOff, rng: random.Random) -> None:
        self.failed_rounds = 0
        """Rounds since the last greeting, when `end_round_s` has returned."""
        self._back_off = back_off
        self._rng = rng
        self._known = ""
        self._candidates = Candidates(())
        self._greeted = False

    def begin_round(self, seeds: Sequence[str]) -> None:
        """Begin a round of dialling."""
        shuffled = self._rng.sample(seeds, len(seeds))
        self._candidates = Candidates([self._known, *shuffled] if self._known else shuffled)
        self._known = ""
        self._greeted = False

    def next_address(self) -> str | None:
        """Return the address to dial now; None if the round is over."""
        return None if self._greeted else self._candidates.next_address()

    def visited(self, address: str, visit: Visit) -> None:
        """Record the result of dialling an address."""
        if visit.greeted:
            self._greeted = True
            self._known = visit.leader or address
        else:
            self._candidates.refer(visit.leader)

    def end_round_s(self) -> float:
        """End the round and return the seconds to pause before the next one."""
        self.failed_rounds = 0 if self._greeted else self.failed_rounds + 1
        return self._back_off.pause_s(max(0, self.failed_rounds - 1), self._rng)


class PeerSilent(Exception):
    """Raised when no message of a peer arrived for too long."""


class Liveness:
    """Heartbeats to send on one stream, and the silence of its peer. Times are the event loop's."""

    def __init__(self, now_s: float, *, heartbeat_s: float, silence_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.silence_s = silence_s
        self.heartbeat_due = False
        self._next_heartbeat_s = now_s
        self._received_s = now_s

    def received(self, now_s: float) -> None:
        """Record that a message arrived."""
        self._received_s = now_s

    def suspend(self) -> None:
        """Stop counting silence until the next call of `received`, because this side does not read."""
        self._received_s = math.inf

    def take_heartbeat(self) -> bool:
        """Return whether a heartbeat must be sent now, and mark it as sent."""
        due, self.heartbeat_due = self.heartbeat_due, False
        return due

    def tick(self, now_s: float) -> float:
        """Set `heartbeat_due` at its time, and return the seconds until the next tick. Raises PeerSilent."""
        silent_s = self._received_s + self.silence_s
        if now_s >= silent_s:
            raise PeerSilent(f"no message arrived for {self.silence_s:g} s")
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + self.heartbeat_s
            self.heartbeat_due = True
        return min(self._next_heartbeat_s, silent_s) - now_s


async def watch(liveness: Liveness, wake: asyncio.Event) -> None:
    """Set `wake` whenever a heartbeat is due, the first one at once. Raises PeerSilent.

    There is one timer per heartbeat: one per message or per wait would be expensive.
    """
    loop = asyncio.get_running_loop()
    while True:
        pause_s = liveness.tick(loop.time())
        if liveness.heartbeat_due:
            wake.set()
        await asyncio.sleep(pause_s)


async def until_first_ends(*parts: Coroutine[None, None, None]) -> None:
    """Run the parts of a connection until one of them ends, cancel the others, and raise its error."""
    # No TaskGroup: until Python 3.13 one that fails while it is being cancelled forgets the cancellation.
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    try:
        for task in ended:
            if not task.cancelled():
                task.result()
    finally:
        # The error has this frame in its traceback, and its task has the error. If the frame had the task,
        # the connection would stay open until Python looks for cycles.
        tasks.clear()
        ended.clear()
        del task
