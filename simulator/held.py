"""State of a request on a virtual worker, and its progress in one round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.events import Progress
from simulator.jobs import Job

# Token ids are the positions in the output, so that a lost or repeated token shows; they start again at 0
# after this many. A slice of this table costs less than a new range.
_IDS_REPEAT = 4096
_IDS = tuple(number % _IDS_REPEAT for number in range(_IDS_REPEAT + 256))


@dataclass(slots=True)
class HeldRequest:
    """State of a request on a worker."""

    job: Job
    lease_epoch: int
    rounds: int
    emitted: int
    residency: Residency = Residency.NONE
    blocks: int = 0
    """KV blocks that it holds, shared ones included."""
    names: Sequence[int] = ()
    """Names of the blocks of its context that are known, as numbers."""
    named: int = 0
    """Number of these that are in the prefix cache and in use by it."""
    found_tokens: int = 0
    """Context tokens that the prefix cache had when it was taken up, until a report has them."""
    missing: int = 0
    """Context tokens that are still to be computed."""
    ended: bool = False

    def prefilled(self, computed: int) -> Progress:
        """Return the progress of a round in which only a part of the context was computed."""
        return Progress(
            self.job.request_id,
            self.lease_epoch,
            self.emitted,
            (),
            0,
            0,
            computed,
            None,
            0,
            "",
            cached=self._found(),
        )

    def _found(self) -> int:
        found, self.found_tokens = self.found_tokens, 0
        return min(found, self.job.prompt_tokens)

    def decoded(self, computed: int, draft_len: int) -> Progress:
        """Advance by one round of drafting and verification, and return the progress."""
        job, position = self.job, self.emitted
        pace = job.paces[self.rounds]
        drafted = job.drafted(self.rounds, draft_len)
        self.emitted += pace
        self.rounds += 1
        self.ended = self.rounds == len(job.paces)
        gained = job.uncut_last if self.ended and job.uncut_last is not None else pace
        accepted = min(gained - 1, drafted)
        own_end = End.STOP if job.output_tokens < job.max_tokens else End.LENGTH
        first_id = position % _IDS_REPEAT
        return Progress(
            job.request_id,
            self.lease_epoch,
            position,
            _IDS[first_id : first_id + pace],
            drafted,
            accepted,
            computed,
            own_end if self.ended else None,
            0,
            "",
            cached=self._found(),
        )
