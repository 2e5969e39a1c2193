"""The leader's copy of the record's unfinished requests, so that it needs no read before a write: the lease, the
number of committed tokens, and the tail of them that only the log holds.

Only the leader writes, so its copy is exact once a batch is answered. A batch plans its changes in a `Plan`,
which becomes the copy when the record has answered.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.commands import Commit, Lease, Standing
from scheduler_svc.store.codec import recordable
from scheduler_svc.store.log import Log, Row, continued, pack_row
from scheduler_svc.store.records import StoredRequest, standing_at_arrival


@dataclass(slots=True)
class Tail:
    """One unfinished request."""

    sequence: int
    lease_epoch: int
    standing: Standing
    committed: int
    """Committed tokens."""
    folded: int
    """Those that the request's own keys hold."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    """The others."""
    first_ms: int | None = None
    """Unix milliseconds of the first token, if only the log has it."""
    doubted: bool = False
    """Whether the record has answered otherwise than this copy expected. Then the record decides, until it
    is read again."""


@dataclass(slots=True)
class _Planned:
    """Changes to one tail that the record has not answered."""

    tail: Tail
    lease_epoch: int
    standing: Standing
    committed: int
    folded: int
    tokens: list[int]
    """Tokens that the batch adds."""
    first_ms: int | None
    certain: bool = True
    """Whether nothing in the batch before it depends on the record's answer."""
    folds: bool = False
    """Whether the batch writes its own keys."""
    logged: bool = False
    """Whether the batch has a row of it that its own keys do not hold."""


class Logged(NamedTuple):
    """Progress of a request that only the log holds."""

    position: int
    """Tokens that its own keys hold."""
    tokens: list[int]
    """Tokens after these."""
    standing: Standing
    first_ms: int | None
    """Unix milliseconds of the first token, if only the log has it."""


class Unfolded(NamedTuple):
    """Where the oldest row of a request is that its own keys do not hold."""

    entry: int
    at_ms: int
    """Unix milliseconds of its entry."""
    written_bytes: int
    """Bytes that were appended to the log until then."""


class Tails:
    """The unfinished requests of the shard, by id."""

    def __init__(self) -> None:
        self.by_id: dict[str, Tail] = {}
        self.newest = ""
        """Id of the newest entry of the log; empty without one."""
        self.unfolded: dict[str, Unfolded] = {}
        """Requests with rows that are not folded, the oldest first: where the first such row is."""
        self.written_bytes = 0
        """Bytes of all entries that this leader has appended."""
        self.has_entries = False
        """Whether the log has entries."""
        self.ahead = False
        """Whether the record may lack some of this, until it is written back."""

    def oldest_entry(self, number: int) -> int:
        """Return the number of the oldest entry that is still needed; `number` if none is."""
        return next(iter(self.unfolded.values())).entry if self.unfolded else number

    def due(self, before_ms: int, after_bytes: int, most: int) -> list[str]:
        """Return requests whose oldest row is from before `before_ms` (Unix milliseconds), or has more than `after_bytes`
        bytes of the log after it; at most `most` of them.
        """
        found: list[str] = []
        for request_id, oldest in self.unfolded.items():
            recent = oldest.at_ms > before_ms and self.written_bytes - oldest.written_bytes <= after_bytes
            if recent or len(found) == most:
                break
            found.append(request_id)
        return found

    def submitted(self, request_id: str, sequence: int, lease_epoch: int, committed: int) -> None:
        """Add a request that the record has just accepted. A repeat changes nothing."""
        standing = standing_at_arrival(sequence)
        self.by_id.setdefault(
            request_id, Tail(sequence, lease_epoch, standing, committed=committed, folded=committed)
        )

    def read(self, stored: StoredRequest, folded: int, log: Log) -> None:
        """Add a request as it was read; `folded`: committed tokens in its own keys, `log`: what it was
        continued by."""
        rows = log.rows.get(stored.sequence, ())
        first_ms = stored.first_token_unix_ms if rows else None
        self.by_id[stored.request_id] = Tail(
            stored.sequence,
            stored.lease_epoch,
            stored.standing,
            committed=len(stored.committed_ids),
            folded=folded,
            tokens=array("i", stored.committed_ids[folded:]),
            first_ms=first_ms,
        )
        if rows:
            self.unfolded[stored.request_id] = Unfolded(rows[0].entry, rows[0].at_ms, self.written_bytes)

    def all_read(self, log: Log) -> None:
        """Note that all unfinished requests were read, and continued by this log. They came in the order of arrival,
        which is not that of their rows.
        """
        self.newest, self.has_entries = log.newest, bool(log.newest)
        self.unfolded = dict(sorted(self.unfolded.items(), key=lambda item: item[1].entry))

    def continued(self, stored: StoredRequest) -> StoredRequest:
        """Return a request, as its own keys have it, with what the log has of it."""
        tail = self.by_id.get(stored.request_id)
        if tail is None or stored.request_id not in self.unfolded:
            return stored
        unfolded = Row(tail.first_ms or 0, 0, tail.folded, tuple(tail.tokens), recordable(tail.standing))
        return continued(stored, [unfolded])

    def resolved(self, stored: StoredRequest) -> None:
        """Correct the copy of a request that was read from the record."""
        tail = self.by_id.get(stored.request_id)
        if tail is None:
            return
        if stored.end is not None:
            self.forget(stored.request_id)
        else:
            added = stored.committed_ids[tail.committed :]
            tail.tokens.extend(added)
            tail.committed += len(added)
            tail.lease_epoch, tail.doubted = stored.lease_epoch, False

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended or is gone."""
        self.by_id.pop(request_id, None)
        self.unfolded.pop(request_id, None)

    def clear(self) -> None:
        """Forget everything: the next leadership reads the record again."""
        self.by_id.clear()
        self.unfolded.clear()
        self.newest, self.has_entries, self.ahead = "", False, False

    def all_folded(self) -> None:
        """Note that the requests' own keys hold everything, and that the log is gone."""
        for tail in self.by_id.values():
            tail.folded, tail.first_ms = tail.committed, None
            del tail.tokens[:]
        self.unfolded.clear()
        self.newest, self.has_entries, self.ahead = "", False, False


class Plan:
    """Changes that one batch makes to the tails, in its order, if the record takes it as expected."""

    def __init__(self, tails: Tails, now_ms: int) -> None:
        self._tails = tails
        self._now_ms = now_ms
        self._planned: dict[str, _Planned] = {}
        self._ended: set[str] = set()
        self._continued: dict[str, tuple[Tail, list[Commit]]] = {}
        """Progress of requests to which nothing else happens in the batch, which is most of it; by request."""

    def of(self, request_id: str) -> _Planned | None:
        """Return the planned state of an unfinished request; None for one that is unknown or ends here."""
        if request_id in self._ended:
            return None
        planned = self._planned.get(request_id)
        if planned is None and (tail := self._tails.by_id.get(request_id)) is not None:
            planned = self._planned[request_id] = _Planned(
                tail,
                tail.lease_epoch,
                tail.standing,
                tail.committed,
                tail.folded,
                [],
                tail.first_ms,
                certain=not (tail.doubted or self._tails.ahead),
            )
            if request_id in self._continued:  # something else happens to it too
                for commit in self._continued.pop(request_id)[1]:
                    self._add(planned, commit)
        return planned

    def continues(self, commits: Sequence[Commit], first: int, rows: list[bytes]) -> int:
        """Plan a row for each commit from `first` on, as long as it continues a request to which nothing else has
        happened in the batch; add the rows to `rows`. Return where it stopped: about that commit `expects` decides.
        """
        by_id, planned, continued = self._tails.by_id, self._planned, self._continued
        if self._tails.ahead:
            return first
        for at in range(first, len(commits)):
            commit = commits[at]
            request_id, position, tokens = commit.request_id, commit.position, commit.tokens
            tail = by_id.get(request_id)
            if tail is None or tail.lease_epoch != commit.lease_epoch or tail.doubted:
                return at
            if commit.end is not None or not tokens or request_id in planned:
                return at
            before = continued.get(request_id)
            last = None if before is None else before[1][-1]
            if position != (tail.committed if last is None else last.position + len(last.tokens)):
                return at
            rows.append(pack_row(request_id, tail.sequence, position, tokens, commit.standing))
            if before is None:
                continued[request_id] = (tail, [commit])
            else:
                before[1].append(commit)
        return len(commits)

    def expects(self, commit: Commit) -> bool | None:
        """Return whether the copy alone shows what the record would answer to progress: True, it takes it;
        False, it is stale, since tokens before its position are missing; None, the record decides about it,
        and about all that follows of the request in the batch.
        """
        planned = self.of(commit.request_id)
        if planned is None:
            return None
        comes_next = commit.end is None and planned.lease_epoch == commit.lease_epoch
        if planned.certain and comes_next and commit.position >= planned.committed:
            return commit.position == planned.committed
        planned.certain = False
        return None

    def append(self, commit: Commit) -> int | None:
        """Plan a row for progress that `expects` it. Return the request's sequence number; None if the record
        has the same progress: then there is nothing to write."""
        planned = self._planned[commit.request_id]
        was, now = planned.standing, commit.standing
        if not commit.tokens and (was.rounds, was.attained_s) == (now.rounds, now.attained_s):
            return None
        self._add(planned, commit)
        return planned.tail.sequence

    def _add(self, planned: _Planned, commit: Commit) -> None:
        if commit.position == 0 and commit.tokens:
            planned.first_ms = self._now_ms
        planned.tokens += commit.tokens
        planned.committed += len(commit.tokens)
        planned.standing = commit.standing
        planned.logged = True

    def tail_of(self, request_id: str) -> Logged | None:
        """Return what only the log holds of a request; None where its own keys hold everything."""
        planned = self.of(request_id)
        if planned is None or not (planned.logged or request_id in self._tails.unfolded):
            return None
        tail = planned.tail
        tokens = [*tail.tokens, *planned.tokens][planned.folded - tail.folded :]
        return Logged(planned.folded, tokens, planned.standing, planned.first_ms)

    def fold(self, request_id: str) -> None:
        """Plan that its own keys hold everything."""
        planned = self._planned[request_id]
        planned.folded, planned.first_ms = planned.committed, None
        planned.folds, planned.logged = True, False

    def lease(self, lease: Lease) -> None:
        """Plan a lease. What follows in the batch depends on the record's answer."""
        if (planned := self.of(lease.request_id)) is not None:
            planned.lease_epoch, planned.certain = lease.lease_epoch, False

    def restore(self, stored: StoredRequest) -> None:
        """Plan a request as it is written back. What follows in the batch depends on the record's answer."""
        count = len(stored.committed_ids)
        tail = Tail(stored.sequence, stored.lease_epoch, stored.standing, committed=count, folded=count)
        self._ended.discard(stored.request_id)
        self._planned[stored.request_id] = _Planned(
            tail, stored.lease_epoch, stored.standing, count, count, [], None, certain=False, folds=True
        )

    def committed(self, commit: Commit) -> None:
        """Note that the record itself decided about progress, and took it into the request's own keys."""
        planned = self.of(commit.request_id)
        if planned is not None:
            reached = commit.position + len(commit.tokens)
            planned.lease_epoch, planned.standing = commit.lease_epoch, commit.standing
            planned.committed = planned.folded = reached
            planned.tail.committed, planned.tail.folded = reached, reached
            planned.tokens.clear()
            del planned.tail.tokens[:]

    def end(self, request_id: str) -> None:
        """Plan the end of a request."""
        self.of(request_id)
        self._ended.add(request_id)

    def unexpected(self, request_id: str) -> None:
        """Note that the record has answered otherwise than planned for a request. Its rows are in the log
        all the same.
        """
        self._ended.discard(request_id)
        planned = self._planned.pop(request_id, None)
        tail = self._tails.by_id.get(request_id)
        if planned is None or tail is None:
            return
        tail.doubted = True
        if planned.tail is tail and (planned.tokens or planned.logged):
            self._planned[request_id] = _Planned(
                tail,
                tail.lease_epoch,
                planned.standing,
                tail.committed + len(planned.tokens),
                tail.folded,
                planned.tokens,
                tail.first_ms,
                logged=True,
            )

    def apply(self, entry: int, entry_bytes: int) -> None:
        """Make the plan the leader's copy: the record has taken it, with its rows in the entry of this number
        and size; size 0: it has none.
        """
        tails = self._tails
        if entry_bytes:
            tails.newest, tails.has_entries = f"{entry}-0", True
            tails.written_bytes += entry_bytes
        here = Unfolded(entry, self._now_ms, tails.written_bytes)
        for request_id, (tail, commits) in self._continued.items():
            for commit in commits:
                tail.committed += len(commit.tokens)
                tail.tokens.fromlist(list(commit.tokens))  # `extend` takes twice as long for a few of them
                tail.standing = commit.standing
                if commit.position == 0:
                    tail.first_ms = self._now_ms
            if request_id not in tails.unfolded:
                tails.unfolded[request_id] = here
        for request_id, planned in self._planned.items():
            if request_id in self._ended:
                continue
            tail = tails.by_id[request_id] = planned.tail
            tail.lease_epoch, tail.standing = planned.lease_epoch, planned.standing
            tail.committed, tail.first_ms = planned.committed, planned.first_ms
            tail.tokens.extend(planned.tokens)
            del tail.tokens[: planned.folded - tail.folded]
            tail.folded = planned.folded
            if planned.folds:
                tails.unfolded.pop(request_id, None)
            if planned.logged:
                tails.unfolded.setdefault(request_id, here)
        for request_id in self._ended:
            tails.forget(request_id)
