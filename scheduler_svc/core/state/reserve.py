"""The reserved share: which requests may use it.

They are the oldest requests, queued or on a list, whose tenant is not ahead, as many as the workers' reserved
shares add up to. Requests that no worker can hold now, and those that wait to run alone, have no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_svc.core.rank import AHEAD, OrderKey
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.sorted_keys import SortedKeys
from scheduler_svc.core.state.tenants import Account, TenantOrder


class Reserve:
    """The requests of a shard in the queue and on lists by age, the reserved ones apart. Their marks are the shard's to set."""

    def __init__(self, unreserved: SortedKeys[OrderKey] | TenantOrder) -> None:
        self.total = 0
        """Requests that should be reserved, if there are enough."""
        self._reserved: SortedKeys[OrderKey] = SortedKeys()
        self._unreserved = unreserved
        """Those whose tenant is ahead after those whose tenant is not."""

    def __len__(self) -> int:
        return len(self._reserved) + len(self._unreserved)

    def __iter__(self) -> Iterator[OrderKey]:
        """Yield the age keys of the reserved requests, the oldest first."""
        return iter(self._reserved)

    def add(self, request: Request) -> None:
        """Add a request that entered, or that a worker can hold again; it is not reserved yet."""
        self._unreserved.add(request.age_key)

    def remove(self, request: Request) -> None:
        """Remove a request that leaves, or that cannot be leased now."""
        (self._reserved if request.reserved else self._unreserved).remove(request.age_key)

    def add_all(self, requests: Sequence[Request]) -> None:
        """Add requests that a worker can hold again; none of them is reserved yet."""
        self._unreserved.add_all([request.age_key for request in requests])

    def remove_all(self, requests: Sequence[Request]) -> None:
        """Remove requests that no worker can hold any more."""
        for request in requests:
            if request.reserved:
                self._reserved.remove(request.age_key)
        self._unreserved.remove_all([request.age_key for request in requests if not request.reserved])

    def move(self, age_key: OrderKey, reserved: bool) -> None:
        """Move a request to the reserved ones, or from them."""
        if reserved:
            self._unreserved.remove(age_key)
            self._reserved.add(age_key)
        else:
            self._reserved.remove(age_key)
            self._unreserved.add(age_key)

    def turned(self, account: Account) -> None:
        """Update the order after a change of a tenant's turn."""
        if isinstance(self._unreserved, TenantOrder):
            self._unreserved.turned(account)

    def next_move(self) -> tuple[OrderKey, bool] | None:
        """Return the next move that the invariant needs, as the arguments of `move`; None if it holds."""
        reserved, unreserved = self._reserved, self._unreserved
        if len(reserved) > self.total:
            return next(reversed(reserved)), False
        if not unreserved:
            return None
        oldest = unreserved.first()
        if len(reserved) < self.total and not oldest[0] & AHEAD:
            return oldest, True
        # A request that came back from the record, or whose tenant's turn came, may be older than a reserved
        # one.
        youngest = next(reversed(reserved), None)
        return (youngest, False) if youngest is not None and oldest < youngest else None
