"""The working copy of a leader: the requests that it leads, as the record has them. A request enters it when
the record has it, changes only with what the record has answered, and leaves it with its one end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from laps_sd.contract.ends import End
from scheduler_svc import metrics
from scheduler_svc.core.commands import Commit, Finish, Lease, Release
from scheduler_svc.core.events import EndRequested
from scheduler_svc.leader.live import Live
from scheduler_svc.leader.roster import Roster
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import Timer, Timers, Transition

ENDS_KEPT_S = 10.0
"""Seconds for which ended requests are kept, for a record that loses the last of what was written: a server
that syncs every second loses that much, an asynchronous replica its delay.
"""
MAX_ENDS_KEPT = 10_000
"""Most ended requests that are kept."""


@dataclass(frozen=True, slots=True)
class RecentEnd:
    """A request whose end is on the record, and that end as a commit that follows all of its tokens."""

    at_s: float
    live: Live
    commit: Commit


class WorkingCopy:
    """The requests that this leader leads, those that ended a moment ago, and those that the record may
    hold.
    """

    def __init__(self, roster: Roster, timers: Timers, traces: RequestTraces) -> None:
        self.live: dict[str, Live] = {}
        self.prompt_tokens = 0
        """Prompt tokens of these in all, as the record counts them against its limit."""
        self.newest_sequence = 0
        """Largest sequence number of all requests that the record has ever accepted, as far as this leader
        knows.
        """
        self.recent_ends: deque[RecentEnd] = deque(maxlen=MAX_ENDS_KEPT)
        """The ends that the record may still lose, oldest first."""
        self.doubtful: set[str] = set()
        """Ids of submissions that were refused because the record did not answer, and that it may hold all
        the same.
        """
        self.restoring: set[str] = set()
        """Ids of requests that are being submitted, and of those that a gateway or a worker has brought back
        and that are not led yet: the record did not answer, and may hold them all the same, or had no room.
        They come again, or are written without their gateway.
        """
        self._roster = roster
        self._timers = timers
        self._traces = traces

    def adopt(self, live: Live) -> None:
        """Lead this request from now on."""
        self.live[live.request_id] = live
        self.prompt_tokens += live.facts.prompt_tokens
        live.trace = self._traces.begin(live.request_id, live.request.traceparent)
        if live.trace is not None:
            # The request may have been leased under an earlier leader; the record does not hold the time of
            # the lease.
            live.trace.leased(live.lease_epoch, live.worker_id, live.started_s or live.facts.arrival_s)
        self.newest_sequence = max(self.newest_sequence, live.facts.sequence)
        self._set_limits(live)

    def extend(self, live: Live, deadline_s: float | None) -> None:
        """Set the deadline that the record has taken for a request; None: it has none any more."""
        live.deadline_s = deadline_s
        self._set_limits(live)

    def recorded(self, command: Transition, now_s: float) -> None:
        """Apply a transition that the record has taken, or had before."""
        live = self.live.get(command.request_id)
        if live is None:
            return
        match command:
            case Commit():
                live.recorded(command, now_s)
                if command.end is not None:
                    self.ended(live, command, now_s)
            case Finish():
                live.standing = command.standing
                self.ended(live, _as_commit(command, live), now_s)
            case Lease():
                live.lease(command.lease_epoch, command.worker_id, now_s)
                live.pair = self._roster.fingerprint
            case Release():
                live.lease(live.lease_epoch, None, now_s)
                if command.deaths > live.deaths:
                    metrics.observe_death(command.deaths)
                live.deaths, live.death_round = command.deaths, command.death_round

    def ended(self, live: Live, commit: Commit, now_s: float) -> None:
        """Stop leading a request whose end is on the record, and have it delivered to the attached
        clients.
        """
        assert commit.end is not None, "this is the commit that ended it"
        session = self._roster.session(live.worker_id) if live.worker_id is not None else None
        if session is not None:
            session.known.pop(live.request_id, None)
        live.finish(commit.end, commit.detail, commit.cut_characters, now_s)
        live.stop_timers()
        if live.trace is not None:
            live.trace.leased(live.lease_epoch, None, now_s)
            self._traces.ended(
                live.trace,
                live.facts,
                standing=live.standing,
                started_s=live.started_s,
                output_tokens=len(live.committed),
                end=commit.end,
                detail=commit.detail,
                story=commit.story,
                now_s=now_s,
            )
        del self.live[live.request_id]
        self.prompt_tokens -= live.facts.prompt_tokens
        live.mark_dirty()
        self.forget_old_ends(now_s)
        self.recent_ends.append(
            RecentEnd(now_s, live, replace(commit, position=len(live.committed), tokens=()))
        )
        metrics.observe_end(
            commit.end, live.facts, live.started_s, live.first_token_s, len(live.committed), now_s
        )

    def forget_old_ends(self, now_s: float) -> None:
        """Drop the ends that the record can no longer lose. Call it only while the record answers: an outage
        can outlast ENDS_KEPT_S, and what it lost is known afterwards.
        """
        while self.recent_ends and self.recent_ends[0].at_s < now_s - ENDS_KEPT_S:
            self.recent_ends.popleft()

    def ends_are_written_back(self, now_s: float) -> None:
        """Note that the record has the ends since now, and can lose them again."""
        written = [replace(ended, at_s=now_s) for ended in self.recent_ends]
        self.recent_ends.clear()
        self.recent_ends.extend(written)

    def _set_limits(self, live: Live) -> None:
        for timer in live.limits:
            timer.cancel()
        limits = (
            (live.deadline_s, End.DEADLINE, "the client's deadline passed"),
            (live.time_limit_s, End.TIME_LIMIT, "the time limit passed"),
        )
        live.limits = tuple(
            self._end_at(live.request_id, when_s, end, detail)
            for when_s, end, detail in limits
            if when_s is not None
        )

    def _end_at(self, request_id: str, when_s: float, end: End, detail: str) -> Timer:
        return self._timers.at(when_s, lambda turn: turn.events.append(EndRequested(request_id, end, detail)))


def _as_commit(finish: Finish, live: Live) -> Commit:
    """Return the same end as a commit without tokens."""
    return Commit(
        request_id=finish.request_id,
        lease_epoch=live.lease_epoch,
        position=len(live.committed),
        tokens=(),
        standing=finish.standing,
        end=finish.end,
        cut_characters=0,
        detail=finish.detail,
        story=finish.story,
    )
