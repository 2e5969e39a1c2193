"""Fairness between tenants: whose turn it is, and orders of requests that follow it.

The service of a tenant is counted (as in the Virtual Token Counter, arXiv 2401.00588, but in machine
seconds). Within one priority, the least served tenant of which a request waits, in the queue or on a list, is
the mark. A tenant that is more than one *turn* above the mark is *ahead*: its requests come after all requests
of the same priority whose tenant is in turn, until the mark has caught up. A turn is the service of the longest
request (deficit round robin, Shreedhar and Varghese 1995, sets its quantum so), which is learnt as requests run.
A tenant of which all requests run is *behind* while it is below the mark: its requests come before all others,
or those of a tenant that has just caught up would displace them at once.

Bound: two tenants whose requests of one priority are in the queue all the time differ in service by at most
the longest request's, plus one round on each worker (what is under way cannot be taken back). It holds for
what they get by rank and through the reserved share together: a tenant that is ahead has no part in that. The
KV latch of `laps_sd.contract.choose` suspends turns as it suspends all preemption.

A tenant that is ahead waits until every other one with a request that waits has caught up, and none of
these gets more than twice the bound until then. One that cannot use its turn is not waited for beyond `MOST_TURNS`.

The rest is our choice (docs/decisions/0005): three places instead of the exact deficit, so that a request's place
changes only when its tenant's turn comes or goes; and a queue for each tenant, so that this moves one key
however many wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from scheduler_svc.core.rank import AHEAD, OrderKey
from scheduler_svc.core.state.sorted_keys import SortedKeys

MOST_IDLE = 4096
"""Tenants of one priority that are remembered without a request, because they left above the mark."""
MOST_TURNS = 3
"""Turns that the least served waiting account may lack to the most served one: our choice."""
KEPT_PER_END = 1 - 1 / 1024
"""Share of the turn that stays at each end of a request, so that one giant request does not set it
permanently."""


@dataclass(slots=True, eq=False)
class Account:
    """Service of one tenant at one priority. Only `Accounts` changes it."""

    priority: int
    tenant: str
    served_s: float
    """Machine seconds; comparable within the priority only, and only differences count."""
    ahead: bool = False
    behind: bool = False
    unfinished: int = 0
    waiting: int = 0
    """Requests that wait for their turn: in the queue, or on a list and not running."""
    waiting_at_s: float | None = None
    """Value of `served_s` in the order of waiting accounts; None while it is not there."""
    order: SortedKeys[tuple[float, str]] | None = None
    """The order of those that are ahead, idle, or content, if it is in one; and its value of `served_s` there."""
    order_at_s: float = 0.0


class Accounts:
    """All accounts. Events are noted as they come; `settle` computes once a step which tenants are ahead."""

    def __init__(self) -> None:
        self._contests: dict[int, _Contest] = {}
        self._turn_s = 0.0

    def open(self, priority: int, tenant: str) -> Account:
        """Return the account of a request that enters the shard."""
        contest = self._contests.setdefault(priority, _Contest())
        account = contest.accounts.get(tenant)
        if account is None:
            account = contest.accounts[tenant] = Account(priority, tenant, contest.mark_s)
        contest.idle.pop(tenant, None)
        account.unfinished += 1
        contest.touched[tenant] = account
        return account

    def close(self, account: Account) -> None:
        """Count a request of this account that left the shard."""
        account.unfinished -= 1
        self._turn_s *= KEPT_PER_END
        self._contests[account.priority].touched[account.tenant] = account

    def waits(self, account: Account, more: int) -> None:
        """Add `more` to the number of its requests that wait (negative: fewer)."""
        account.waiting += more
        self._contests[account.priority].touched[account.tenant] = account

    def charge(self, account: Account, seconds: float, attained_s: float) -> None:
        """Charge `seconds` of service; the request that was served has had `attained_s` in all.

        Service while no account was waiting is not counted: it delayed no other request.
        """
        self._turn_s = max(self._turn_s, attained_s)
        contest = self._contests[account.priority]
        if len(contest.waiting):
            account.served_s += seconds
            contest.touched[account.tenant] = account

    def settle(self) -> list[Account]:
        """Return the accounts whose turn came or went by the events since the last call."""
        turned = []
        for priority, contest in list(self._contests.items()):
            if contest.touched:
                turned.extend(contest.settle(self._turn_s))
                if not contest.accounts:
                    del self._contests[priority]
        return turned

    def __iter__(self) -> Iterator[Account]:
        """Yield the accounts of all priorities."""
        for contest in self._contests.values():
            yield from contest.accounts.values()

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; for tests, between steps."""
        for contest in self._contests.values():
            contest.check()


class _Contest:
    """The accounts of one priority."""

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.waiting: SortedKeys[tuple[float, str]] = SortedKeys()
        """Accounts with a request that waits, the least served first."""
        self.mark_s = 0.0
        """Service of the least served waiting account, now or when one last waited."""
        self.touched: dict[str, Account] = {}
        self.idle: dict[str, Account] = {}
        """Accounts without a request that have had more than the mark. They are kept, because otherwise a tenant
        could cancel its excess service by leaving and coming back."""
        self._ahead: SortedKeys[tuple[float, str]] = SortedKeys()
        """Accounts that are ahead and have requests."""
        self._debts: SortedKeys[tuple[float, str]] = SortedKeys()
        """Those of `idle`."""
        self._content: SortedKeys[tuple[float, str]] = SortedKeys()
        """Accounts in turn of which all requests run."""

    def settle(self, turn_s: float) -> list[Account]:
        """Bring the orders in line with the accounts; return those whose turn came or went."""
        touched, self.touched = list(self.touched.values()), {}
        self._update_waiting(touched, turn_s)
        turned = []
        for account in touched:
            if account.behind and (
                account.waiting or not account.unfinished or account.served_s >= self.mark_s
            ):
                account.behind = False
                turned.append(account)
            if not account.ahead and self.waiting and account.served_s > self.mark_s + turn_s:
                account.ahead = True
                turned.append(account)
            self._place(account)
            if not account.unfinished:
                self._retire(account)
        self._pass_over(turn_s)
        for order in (self._ahead, self._debts):
            while order and (not self.waiting or order.first()[0] <= self.mark_s):
                account = self.accounts[order.first()[1]]
                self._catch_up(account)
                turned.append(account)
        while self._content and self._content.first()[0] < self.mark_s:
            account = self.accounts[self._content.first()[1]]
            account.behind = True
            self._place(account)
            turned.append(account)
        return turned

    def _update_waiting(self, touched: list[Account], turn_s: float) -> None:
        """Update the order of waiting accounts, by service. An account that begins to wait gains nothing from
        the time before (as in the VTC), except up to a turn if it was behind.
        """
        for account in touched:
            if account.waiting_at_s is not None:
                self.waiting.remove((account.waiting_at_s, account.tenant))
        joining = [account for account in touched if account.waiting_at_s is None and account.waiting]
        for account in touched:
            if account.waiting_at_s is not None:
                self._add_waiting(account)
        self._move_mark()
        for account in joining:
            least_s = self.mark_s - turn_s if account.behind else self.mark_s
            account.served_s = max(account.served_s, least_s)
        for account in joining:
            self._add_waiting(account)
        self._move_mark()

    def _add_waiting(self, account: Account) -> None:
        account.waiting_at_s = account.served_s if account.waiting else None
        if account.waiting:
            self.waiting.add((account.served_s, account.tenant))

    def _move_mark(self) -> None:
        if self.waiting:
            self.mark_s = self.waiting.first()[0]

    def _pass_over(self, turn_s: float) -> None:
        """Raise the service of those that cannot use their turn: what they lack would always be the others'
        excess, and these would not take turns with each other.
        """
        if not self._ahead:
            return
        most_s, _ = self._ahead.last()
        while self.waiting and self.waiting.first()[0] < most_s - MOST_TURNS * turn_s:
            account = self.accounts[self.waiting.first()[1]]
            self.waiting.remove((self.waiting.first()[0], account.tenant))
            account.served_s = most_s - MOST_TURNS * turn_s
            self._add_waiting(account)
            self._place(account)
        self._move_mark()

    def _place(self, account: Account) -> None:
        """Update the place of an account in the other orders."""
        if account.order is not None:
            account.order.remove((account.order_at_s, account.tenant))
        if account.tenant in self.idle:
            account.order = self._debts
        elif account.ahead:
            account.order = self._ahead
        elif account.unfinished and not account.waiting and not account.behind:
            account.order = self._content
        else:
            account.order = None
        account.order_at_s = account.served_s
        if account.order is not None:
            account.order.add((account.served_s, account.tenant))

    def _catch_up(self, account: Account) -> None:
        account.ahead = False
        if self.idle.pop(account.tenant, None) is not None:
            del self.accounts[account.tenant]
        self._place(account)

    def _retire(self, account: Account) -> None:
        """Remove an account without requests. It is kept only while it has had more than the mark, and of those
        only the newest are kept.
        """
        if not self.waiting or account.served_s <= self.mark_s:
            account.ahead = False
            del self.accounts[account.tenant]
        else:
            self.idle[account.tenant] = account
        self._place(account)
        if len(self.idle) > MOST_IDLE:
            self._catch_up(next(iter(self.idle.values())))

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        accounts = self.accounts.values()
        waiting = [(a.waiting_at_s, a.tenant) for a in accounts if a.waiting_at_s is not None]
        assert list(self.waiting) == sorted(waiting)
        assert all(key[0] >= self.mark_s for key in self.waiting)
        for order in (self._ahead, self._debts, self._content):
            assert list(order) == sorted((a.order_at_s, a.tenant) for a in accounts if a.order is order)
        settled = [a for a in accounts if a.tenant not in self.touched]
        assert all((a.waiting > 0) == (a.waiting_at_s is not None) for a in settled)
        assert [a.tenant for a in settled if not a.unfinished] == [
            a.tenant for a in settled if a.tenant in self.idle
        ]
        assert not any(a.unfinished or a.behind for a in self.idle.values())
        assert not any(a.behind and (a.ahead or a.waiting) for a in settled)


class TenantOrder:
    """Order keys with the interface of `SortedKeys`: a queue for each account, and the queues' heads in one
    order.

    A key is stored without the bit for a tenant that is ahead, and returned with it, so that a turn moves one
    key. The cost of the front is that of `SortedKeys`; `position` looks at every account.
    """

    def __init__(self, account_of: Callable[[str], Account]) -> None:
        self._account_of = account_of
        self._queues: dict[Account, SortedKeys[OrderKey]] = {}
        self._heads: SortedKeys[OrderKey] = SortedKeys()
        self._head_of: dict[Account, OrderKey] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[OrderKey]:
        return merge(*[self._keys(account) for account in self._queues])

    def add(self, key: OrderKey) -> None:
        """Add a key that is not there yet."""
        account = self._account_of(key[-1])
        self._queues.setdefault(account, SortedKeys()).add(_bare(key))
        self._size += 1
        self.turned(account)

    def remove(self, key: OrderKey) -> None:
        """Remove a key, whichever turn it was made in; KeyError if it is not there."""
        account = self._account_of(key[-1])
        queue = self._queues[account]
        queue.remove(_bare(key))
        self._size -= 1
        if not queue:
            del self._queues[account]
        self.turned(account)

    def add_all(self, keys: Sequence[OrderKey]) -> None:
        """Add keys that are not there yet."""
        for account, its_keys in self._by_account(keys).items():
            self._queues.setdefault(account, SortedKeys()).add_all(its_keys)
            self._size += len(its_keys)
            self.turned(account)

    def remove_all(self, keys: Sequence[OrderKey]) -> None:
        """Remove keys that are there, whichever turns they were made in."""
        for account, its_keys in self._by_account(keys).items():
            queue = self._queues[account]
            queue.remove_all(its_keys)
            self._size -= len(its_keys)
            if not queue:
                del self._queues[account]
            self.turned(account)

    def _by_account(self, keys: Sequence[OrderKey]) -> dict[Account, list[OrderKey]]:
        found: dict[Account, list[OrderKey]] = {}
        for key in keys:
            found.setdefault(self._account_of(key[-1]), []).append(_bare(key))
        return found

    def position(self, key: OrderKey) -> int:
        """Return the number of smaller keys in the present turns. The key is of these turns too; no request
        need have it.
        """
        return sum(
            queue.position((key[0] - (AHEAD if account.ahead else 0), key[1], key[2]))
            for account, queue in self._queues.items()
        )

    def first(self) -> OrderKey:
        """Return the smallest key; raise IndexError if there is none."""
        return self._heads.first()

    def turned(self, account: Account) -> None:
        """Update the heads after a change of the account's queue or of its turn."""
        queue = self._queues.get(account)
        head = _in_turn_of(account, queue.first()) if queue is not None else None
        before = self._head_of.pop(account, None)
        if before is not None:
            self._heads.remove(before)
        if head is not None:
            self._heads.add(head)
            self._head_of[account] = head

    def _keys(self, account: Account) -> Iterator[OrderKey]:
        for key in self._queues[account]:
            yield _in_turn_of(account, key)


def _bare(key: OrderKey) -> OrderKey:
    return (key[0] & ~AHEAD, key[1], key[2])


def _in_turn_of(account: Account, key: OrderKey) -> OrderKey:
    return (key[0] | AHEAD, key[1], key[2]) if account.ahead else key
