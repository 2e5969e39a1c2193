"""The states of a client's stream, as a table: state × event → next state and what to do. Pure.

An event that a state does not list changes nothing: an answer that comes late, or to a message that is not sent in
that state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

__all__ = ["STEPS", "StreamAction", "StreamEvent", "StreamState", "step"]


class StreamState(Enum):
    """States of a stream between `submit` or `attach` and its end."""

    SUBMITTING = auto()
    """Its request was submitted and is not accepted."""
    ATTACHING = auto()
    """It attaches to a request of another call, and was not found yet."""
    OPEN = auto()
    """Accepted: tokens arrive."""
    PAUSED = auto()
    """Open, but the buffer was full: deliveries are discarded until the client has read."""
    RESTORING = auto()
    """Open, and submitted again, because the record lost the request."""
    RESTORING_PAUSED = auto()
    """Both."""
    ENDED = auto()
    """Everything has arrived."""
    FAILED = auto()
    """Nothing more will arrive; the client gets an error after the tokens that did."""


class StreamEvent(Enum):
    """Answers and messages of the scheduler, and actions of the client."""

    ACCEPTED = auto()
    """The submission was accepted."""
    ACCEPTED_ELSEWHERE = auto()
    """The submission was accepted as another request, to which its idempotency key leads."""
    REFUSED = auto()
    NO_ROOM = auto()
    """The submission was refused for a reason that passes."""
    ATTACHED = auto()
    UNAVAILABLE = auto()
    """The scheduler cannot read its record now, so the request may exist."""
    LOST = auto()
    """The scheduler does not know the request, and this stream can submit it again."""
    MISSING = auto()
    """The scheduler does not know the request, and only another process can submit it again."""
    MISSING_YET = auto()
    """The same as MISSING, but another process may still submit the request."""
    GIVEN_UP = auto()
    """No other process submitted the request in time."""
    OVERFLOWED = auto()
    """More tokens arrived than the buffer holds."""
    ENDED = auto()
    """The end arrived, with all tokens before it."""
    READ = auto()
    """The client took what had arrived."""


class StreamAction(Enum):
    """The action of a step besides the new state."""

    NONE = auto()
    ACCEPT = auto()
    """Keep the acceptance, which is the first message to the client."""
    ATTACH = auto()
    """Send an Attach from the next token."""
    RESUBMIT = auto()
    """Send the submission again, with the tokens that were shown."""
    RETRY = auto()
    """Send the same message again after a pause."""
    AWAIT = auto()
    """Do the same as for RETRY, until it has taken too long; then the state is GIVEN_UP."""
    FAIL = auto()
    """Keep the error."""


S, E, A = StreamState, StreamEvent, StreamAction
Row = Mapping[StreamEvent, tuple[StreamState, StreamAction]]


def _accepted(here: StreamState, *, restored: StreamState, lost: StreamState) -> Row:
    """Return what all accepted states have in common: an answer never takes the acceptance back."""
    return {
        E.ACCEPTED: (restored, A.NONE),
        # While the record was empty another client used the idempotency key for a request of its own.
        E.ACCEPTED_ELSEWHERE: (S.FAILED, A.FAIL),
        E.REFUSED: (S.FAILED, A.FAIL),
        E.NO_ROOM: (here, A.RETRY),
        E.ATTACHED: (here, A.NONE),
        E.UNAVAILABLE: (here, A.RETRY),
        E.LOST: (lost, A.RESUBMIT),
    }


def _waiting(here: StreamState) -> Row:
    """Return what the states have in common in which another process may have to restore the request."""
    return {
        E.MISSING: (here, A.AWAIT),
        E.MISSING_YET: (here, A.AWAIT),
        E.GIVEN_UP: (S.FAILED, A.FAIL),
    }


STEPS: Mapping[StreamState, Row] = MappingProxyType(
    {
        S.SUBMITTING: {
            E.ACCEPTED: (S.OPEN, A.ACCEPT),
            E.ACCEPTED_ELSEWHERE: (S.OPEN, A.ACCEPT),
            E.REFUSED: (S.FAILED, A.FAIL),
            E.NO_ROOM: (S.FAILED, A.FAIL),
        },
        S.ATTACHING: {
            E.ATTACHED: (S.OPEN, A.ACCEPT),
            E.UNAVAILABLE: (S.ATTACHING, A.RETRY),
            E.MISSING: (S.FAILED, A.FAIL),
            E.MISSING_YET: (S.ATTACHING, A.RETRY),
        },
        S.OPEN: {
            **_accepted(S.OPEN, restored=S.OPEN, lost=S.RESTORING),
            **_waiting(S.OPEN),
            E.OVERFLOWED: (S.PAUSED, A.NONE),
            E.ENDED: (S.ENDED, A.NONE),
        },
        S.PAUSED: {
            **_accepted(S.PAUSED, restored=S.PAUSED, lost=S.RESTORING_PAUSED),
            **_waiting(S.PAUSED),
            E.READ: (S.OPEN, A.ATTACH),
        },
        S.RESTORING: {
            **_accepted(S.RESTORING, restored=S.OPEN, lost=S.RESTORING),
            E.OVERFLOWED: (S.RESTORING_PAUSED, A.NONE),
            E.ENDED: (S.ENDED, A.NONE),
        },
        S.RESTORING_PAUSED: {
            **_accepted(S.RESTORING_PAUSED, restored=S.PAUSED, lost=S.RESTORING_PAUSED),
            E.READ: (S.RESTORING, A.ATTACH),
        },
        S.ENDED: {},
        S.FAILED: {},
    }
)


def step(state: StreamState, event: StreamEvent) -> tuple[StreamState, StreamAction]:
    """Return the next state, and what to do."""
    return STEPS[state].get(event, (state, StreamAction.NONE))
