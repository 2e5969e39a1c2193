"""The queued requests, in parts: each holds those that the same workers can hold, best first.

A worker with room takes the best of the parts that it can hold, so one look at the head of each part finds it,
however many requests wait before it for a larger worker. Where all workers can hold the same there is one part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import merge

from scheduler_svc.core.rank import OrderKey
from scheduler_svc.core.state.sorted_keys import SortedKeys
from scheduler_svc.core.state.tenants import Account, TenantOrder

MOST_KEPT = 64
"""Capacities of workers that are gone which still divide the queue. Our choice: more parts cost a look at more heads, and
to join them costs a pass over their requests."""


class Queue:
    """Order keys of requests that some worker can hold."""

    def __init__(
        self, new_order: Callable[[], SortedKeys[OrderKey] | TenantOrder], tokens_of: Callable[[str], int]
    ) -> None:
        """`tokens_of`: returns the most tokens that a request may have, by its id."""
        self._new_order = new_order
        self._tokens_of = tokens_of
        self._bounds: list[int] = []
        """The different capacities of the workers, ascending, and some of workers that are gone: they may come back."""
        self._parts: dict[int, SortedKeys[OrderKey] | TenantOrder] = {}
        """By the smallest of the bounds that its requests do not exceed; none is empty."""

    def __len__(self) -> int:
        return sum([len(part) for part in self._parts.values()])

    def __iter__(self) -> Iterator[OrderKey]:
        return merge(*self._parts.values())

    def part_of(self, key: OrderKey) -> int:
        """Return the bound of the part that a request belongs to."""
        return self._bounds[bisect_left(self._bounds, self._tokens_of(key[-1]))]

    def first(self, passed: Collection[int] = ()) -> OrderKey | None:
        """Return the best key of all parts but those `passed`; None if there is none."""
        first: OrderKey | None = None
        for bound, part in self._parts.items():
            if bound not in passed:
                key = part.first()
                if first is None or key < first:
                    first = key
        return first

    def position(self, key: OrderKey) -> int:
        """Return the number of smaller keys."""
        return sum([part.position(key) for part in self._parts.values()])

    def add(self, key: OrderKey) -> None:
        """Add a key that is not there yet."""
        self._part(self.part_of(key)).add(key)

    def remove(self, key: OrderKey) -> None:
        """Remove a key; raise KeyError if it is not there."""
        bound = self.part_of(key)
        part = self._parts[bound]
        part.remove(key)
        if not len(part):
            del self._parts[bound]

    def add_all(self, keys: Sequence[OrderKey]) -> None:
        """Add keys that are not there yet."""
        by_part: dict[int, list[OrderKey]] = {}
        for key in keys:
            by_part.setdefault(self.part_of(key), []).append(key)
        for bound, its_keys in by_part.items():
            self._part(bound).add_all(its_keys)

    def turned(self, account: Account) -> None:
        """Update the order after a change of a tenant's turn."""
        for part in self._parts.values():
            if isinstance(part, TenantOrder):
                part.turned(account)

    def set_capacities(self, capacities: list[int]) -> list[OrderKey]:
        """Set the different capacities of the workers, ascending. Return the keys of the requests that none of them
        holds any more, which are removed.
        """
        self._set_bounds(sorted({*self._bounds, *capacities}))
        most_tokens = capacities[-1] if capacities else 0
        too_long: list[OrderKey] = []
        for bound in list(self._parts):
            if bound > most_tokens:
                too_long += self._parts.pop(bound)
        if len(self._bounds) > MOST_KEPT + len(capacities):
            self._set_bounds(capacities)
        return too_long

    def _set_bounds(self, bounds: list[int]) -> None:
        before, self._bounds = self._bounds, bounds
        if bounds != before:
            moved: list[OrderKey] = []
            for bound in list(self._parts):
                if _range_of(bound, bounds) != _range_of(bound, before):
                    moved += self._parts.pop(bound)
            self.add_all(moved)

    def _part(self, bound: int) -> SortedKeys[OrderKey] | TenantOrder:
        part = self._parts.get(bound)
        if part is None:
            part = self._parts[bound] = self._new_order()
        return part

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        assert all(len(part) for part in self._parts.values())
        for bound, part in self._parts.items():
            assert all(self.part_of(key) == bound for key in part)


def _range_of(bound: int, bounds: list[int]) -> tuple[int, int] | None:
    """Return the tokens of the requests in a part: more than the first number, at most the second. None: there is no
    such part.
    """
    at = bisect_left(bounds, bound)
    if at == len(bounds) or bounds[at] != bound:
        return None
    return (bounds[at - 1] if at else 0, bound)
