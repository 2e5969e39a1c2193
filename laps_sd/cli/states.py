"""The states of requests and workers, in words for people."""

from __future__ import annotations

from laps_sd.v1 import admin_pb2
from laps_sd.v1 import inference_pb2 as pb

__all__ = ["request_state", "worker_state"]

_STATES = {
    state: pb.Explanation.State.Name(state).removeprefix("STATE_").lower()
    for state in pb.Explanation.State.values()
}


def request_state(state: pb.Explanation.State.ValueType) -> str:
    """Return the state of a request; `?` for one that only a scheduler of a later version knows."""
    return _STATES.get(state, "?")


def worker_state(worker: admin_pb2.WorkerStatus) -> str:
    """Return the state of a worker."""
    if not worker.connected:
        return "gone"
    return "draining" if worker.draining else "up"
