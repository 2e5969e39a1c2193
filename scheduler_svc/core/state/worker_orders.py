"""Workers in order: those that take work by the time that a further request would need there, those with full
lists by where the list ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Final

from scheduler_svc.core.rank import OrderKey
from scheduler_svc.core.state.sorted_keys import SortedKeys
from scheduler_svc.core.state.worker import Worker

_Load = tuple[int, float, float, str]
"""The order of workers: the stage; then the seconds until each request, a further one included, has had a round;
then the requests per slot, and the worker. The requests per slot decide if a round costs the same with any number."""
_Cut = tuple[int, float, str, str]
"""The order key of the last member inside a full list, and the worker."""


class Stage:
    """How full a list is."""

    FREE: Final = 0
    """A slot is free."""
    TAKEN: Final = 1
    """All slots are taken, and no request waits."""
    WAITS: Final = 2
    """Requests wait, and there is room for more."""
    FULL: Final = 3
    """There is no room."""


class WorkerOrders:
    """The orders over the `workers` of a shard, which the shard adds and removes."""

    def __init__(self, workers: dict[str, Worker], list_factor: int) -> None:
        self._workers = workers
        self._list_factor = list_factor
        self._fixed_s = self._sequence_s = 0.0
        self._loads: SortedKeys[_Load] = SortedKeys()
        self._load_of: dict[str, _Load] = {}
        self._cuts: SortedKeys[_Cut] = SortedKeys()
        self._cut_of: dict[str, _Cut] = {}
        self.cut_may_differ: dict[str, Worker] = {}
        """Workers whose list or whose members' ranks changed since the cuts were last read."""

    def list_length(self, worker: Worker) -> int:
        """Return the length its list should have while the queue can fill it."""
        return self._list_factor * worker.slots

    def stage(self, worker: Worker) -> int:
        """Return how full its list is: a `Stage`."""
        count, slots = len(worker.members), worker.slots
        if count < slots:
            return Stage.FREE
        if count >= self.list_length(worker):
            return Stage.FULL
        return Stage.TAKEN if count == slots else Stage.WAITS

    def round_s(self, worker: Worker, batch: int) -> float:
        """Return the expected seconds of a round of a worker with `batch` requests."""
        return worker.slowness * (self._fixed_s + self._sequence_s * batch)

    def turn_s(self, worker: Worker) -> float:
        """Return the expected seconds until each of its requests, a further one included, has had a round."""
        count, slots = len(worker.members) + 1, worker.slots
        if count <= slots:
            return self.round_s(worker, count)
        return self.round_s(worker, slots) * (count / slots)

    def by_load(self) -> Iterator[Worker]:
        """Yield the workers that take work: those with a free slot, then those without, those with requests
        that wait, those with full lists; among these the one that soonest has had a round of each request,
        a further one included.
        """
        for key in self._loads:
            yield self._workers[key[-1]]

    def by_load_reversed(self) -> Iterator[Worker]:
        """Yield the same workers in the opposite order."""
        for key in reversed(self._loads):
            yield self._workers[key[-1]]

    def full_lists_after(self, key: OrderKey) -> Iterator[Worker]:
        """Return the workers with a full list in whose first part a request with this key would be, the worst
        list first.
        """
        self._refresh_cuts()
        behind = takewhile(lambda cut: cut[:3] >= key, reversed(self._cuts))
        return map(lambda cut: self._workers[cut[3]], behind)  # noqa: C417  # lazy when compiled, too

    def some_full_list_after(self, key: OrderKey) -> bool:
        """Return whether there is such a worker."""
        self._refresh_cuts()
        return bool(self._cuts) and self._cuts.last()[:3] >= key

    def list_changed(self, worker: Worker) -> None:
        """Update the orders after a change of a worker's list, or of whether it takes work."""
        self.cut_may_differ[worker.worker_id] = worker
        load = self._load(worker) if worker.takes_work else None
        before = self._load_of.get(worker.worker_id)
        if load != before:
            if before is not None:
                self._loads.remove(before)
                del self._load_of[worker.worker_id]
            if load is not None:
                self._loads.add(load)
                self._load_of[worker.worker_id] = load

    def cost_changed(self, fixed_s: float, sequence_s: float) -> None:
        """Set the expected seconds of a round without sequences, and those that each sequence adds."""
        self._fixed_s, self._sequence_s = fixed_s, sequence_s
        for worker in self._workers.values():
            self.list_changed(worker)

    def forget(self, worker: Worker) -> None:
        """Forget a worker that takes no work and has no members."""
        self._refresh_cut(worker)
        del self.cut_may_differ[worker.worker_id]

    def _load(self, worker: Worker) -> _Load:
        used = len(worker.members) / worker.slots
        return (self.stage(worker), self.turn_s(worker), used, worker.worker_id)

    def _refresh_cuts(self) -> None:
        for worker in self.cut_may_differ.values():
            self._refresh_cut(worker)
        self.cut_may_differ.clear()

    def _refresh_cut(self, worker: Worker) -> None:
        cut = self._cut(worker)
        before = self._cut_of.get(worker.worker_id)
        if cut != before:
            if before is not None:
                self._cuts.remove(before)
                del self._cut_of[worker.worker_id]
            if cut is not None:
                self._cuts.add(cut)
                self._cut_of[worker.worker_id] = cut

    def _cut(self, worker: Worker) -> _Cut | None:
        length = self.list_length(worker)
        if not worker.takes_work or len(worker.members) < length:
            return None
        return (*worker.in_order[length - 1].order_key, worker.worker_id)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests."""
        assert set(self.cut_may_differ) | set(self._cut_of) <= set(self._workers)
        settled = [w for w in self._workers.values() if w.worker_id not in self.cut_may_differ]
        assert all(self._cut_of.get(w.worker_id) == self._cut(w) for w in settled)
        assert sorted(self._cut_of.values()) == list(self._cuts)
        takers = [w for w in self._workers.values() if w.takes_work]
        assert sorted(self._load(w) for w in takers) == list(self._loads)
