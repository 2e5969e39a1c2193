"""The list of requests that a scheduler assigns: sent whole, or as changes of the list before."""

from __future__ import annotations

from laps_sd.service.leader_link import LinkBroken
from laps_sd.v1 import worker_link_pb2 as pb
from worker_svc.link.wire import listed
from worker_svc.runner.messages import Listed

__all__ = ["AssignedList"]


class AssignedList:
    """The newest list of one stream."""

    def __init__(self) -> None:
        self._number = 0
        self._entries: dict[str, Listed] = {}

    def take(self, assignment: pb.Assignment) -> tuple[Listed, ...]:
        """Return the list after an assignment. Raises LinkBroken for changes of a list that it does not have."""
        if not assignment.changes:
            self._entries.clear()
        elif assignment.changes != self._number:
            raise LinkBroken(f"it changed list {assignment.changes}; the newest is {self._number}")
        for request_id in assignment.removed:
            self._entries.pop(request_id, None)
        for entry in assignment.entries:
            self._entries[entry.request_id] = listed(entry)
        self._number = assignment.number
        return tuple(self._entries.values())
