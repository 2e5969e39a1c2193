"""The working copy of a leader: its requests as the record has them. It changes only with what the record has
answered.
"""

from __future__ import annotations

from scheduler_svc import metrics
from scheduler_svc.core.commands import Commit, Finish, Lease, Release
from scheduler_svc.leader.clients import Clients
from scheduler_svc.leader.live import Live
from scheduler_svc.leader.roster import Roster
from scheduler_svc.leader.turn import Transition


class WorkingCopy:
    """Changes of the requests that this leader leads."""

    def __init__(self, clients: Clients, roster: Roster) -> None:
        self._clients = clients
        self._roster = roster

    def recorded(self, command: Transition, now_s: float) -> None:
        """Apply a transition that the record has taken, or had before."""
        live = self._clients.live.get(command.request_id)
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
        """Release a request whose end is on the record: only what must still be delivered is kept."""
        session = self._roster.session(live.worker_id) if live.worker_id is not None else None
        if session is not None:
            session.known.pop(live.request_id, None)
        self._clients.ended(live, commit, now_s)


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
