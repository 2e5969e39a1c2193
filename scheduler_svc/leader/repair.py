"""Repairs what differs between the record and its leader: a lead in doubt, lost data, refused transitions.

The leader has all that it has committed in its memory, and no other process writes while it leads. So what the
record lacks is written back, and what the record has otherwise replaces what the core has decided in a wrong
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from laps_sd.contract.ends import End
from laps_sd.service.log import get_logger
from scheduler_svc import metrics
from scheduler_svc.core.commands import Commit, Finish
from scheduler_svc.core.events import EndRequested, Event, Refused
from scheduler_svc.leader.live import Live, recovered
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.retries import until_answered
from scheduler_svc.leader.turn import Turn
from scheduler_svc.leader.working_copy import WorkingCopy
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.errors import Fenced, RecordBehind, StoreUnavailable
from scheduler_svc.store.records import ON_RECORD, StoredRequest, TransitionStatus, standing_at_arrival
from scheduler_svc.store.store import Store
from scheduler_svc.wire.checks import MAX_TOKEN_ID

log = get_logger(__name__)

WRITE_BACK_TOGETHER = 32
FORGOTTEN_DETAIL = "the record lost how this request ended"
MISMATCH_DETAIL = "the record holds other outputs than were committed"


class Repair:
    """Repairs for one leader. All of them wait for the record, however long it is away."""

    def __init__(
        self,
        *,
        store: Store,
        working_copy: WorkingCopy,
        outage: Outage,
        clock: Callable[[], float],
    ) -> None:
        self.events: list[Event] = []
        """Events for the next turn: what the core must correct."""
        self._store = store
        self._working_copy = working_copy
        self._outage = outage
        self._clock = clock

    # The lead.

    async def confirm_lead(self) -> None:
        """Confirm the lead after `Fenced`. If the lease only ran out and no other process has led since, it
        is renewed under the same epoch. If the record lost something, it gets back what this leader holds.
        Raises Fenced when another process leads.
        """
        await until_answered(self._outage, self._renew_or_reclaim)

    async def _renew_or_reclaim(self) -> None:
        """Confirm the lead; see `confirm_lead`. Raises Fenced, StoreUnavailable."""
        while True:
            try:
                if not await self._store.renew_leadership():
                    raise Fenced("another leader is or was in force")
                return
            except RecordBehind as error:
                log.warning(
                    "the record may have lost something: writing back what it lacks", reason=str(error)
                )
                try:
                    if await self._store.reclaim_leadership(
                        newest_sequence=self._working_copy.newest_sequence
                    ):
                        await self._write_back()
                        await self._store.reclaimed()
                except Fenced:
                    continue  # lost again during the confirmation
                except StoreUnavailable:
                    self._store.distrust()
                    raise

    async def _write_back(self) -> None:
        """Write back everything that this leader has committed and the record lacks. Raises StoreUnavailable,
        Fenced.
        """
        live = self._working_copy.live
        reached = await self._store.reached(list(live))
        behind: list[Live] = []
        lost = 0
        for copy, found in zip(list(live.values()), reached, strict=True):
            if found is not None and found.lease_epoch < copy.lease_epoch:
                found = None
            if found is None or found.committed < len(copy.committed):
                behind.append(copy)  # tokens of the log too, which goes at the end
                lost += found is None or found.logged < len(copy.committed)
            elif found.deadline_unix_ms != copy.deadline_unix_ms:  # a retry had more time
                await self._store.extend(copy.request_id, copy.deadline_unix_ms)
                lost += 1
        for start in range(0, len(behind), WRITE_BACK_TOGETHER):
            batch = Batch(self._store)
            restored = [copy.to_record() for copy in behind[start : start + WRITE_BACK_TOGETHER]]
            batch.restore(restored)
            await batch.execute()
            await self._store.claim_again(restored)
        ends = list(self._working_copy.recent_ends)
        for start in range(0, len(ends), WRITE_BACK_TOGETHER):
            some = ends[start : start + WRITE_BACK_TOGETHER]
            batch = Batch(self._store)
            restored = [ended.live.to_record() for ended in some]
            batch.restore(restored)
            written = batch.commit([ended.commit for ended in some])
            await batch.execute()
            lost += written.result().count(TransitionStatus.OK)
            await self._store.claim_again(restored)
        self._working_copy.ends_are_written_back(self._clock())
        known = {*live, *self._working_copy.doubtful, *self._working_copy.restoring}
        unknown = [request_id for request_id in await self._store.unfinished_ids() if request_id not in known]
        for start in range(0, len(unknown), WRITE_BACK_TOGETHER):
            # For this leader and its clients these requests ended long ago; the record has lost which end it
            # was.
            batch = Batch(self._store)
            batch.finish(
                [
                    Finish(request_id, End.ERROR, FORGOTTEN_DETAIL, standing_at_arrival(0), ())
                    for request_id in unknown[start : start + WRITE_BACK_TOGETHER]
                ]
            )
            await batch.execute()
        metrics.WRITTEN_BACK.labels("leader").inc(lost)
        if lost or unknown:
            log.warning("written back", requests=lost, unfinished=len(live), ended_again=len(unknown))
        else:
            log.info("the record has lost nothing", unfinished=len(live))

    # One request.

    async def unfoldable(self, lost: Mapping[str, TransitionStatus], now_s: float) -> None:
        """Write back requests that the record was found to have lost."""
        for request_id, status in lost.items():
            if request_id in self._working_copy.live:
                await self.refused(request_id, "fold", status, now_s)

    async def refused(self, request_id: str, kind: str, status: TransitionStatus, now_s: float) -> None:
        """Correct the core's wrong state of a request: the core drops the request, and receives the state on
        the record.
        """
        metrics.REFUSED.labels(kind, status.name.lower()).inc()
        log.warning("the record refused", request_id=request_id, transition=kind, status=status.name)
        self.events.append(Refused(request_id))
        live = self._working_copy.live.get(request_id)
        if live is None:
            return
        stored = await self._read(request_id)
        live.read_again(stored, now_s)
        if stored is not None:
            if stored.end is not None:
                self._working_copy.ended(live, _as_ended(stored), now_s)
                return
            live.mark_dirty()
        if stored is None or len(stored.committed_ids) < len(live.committed):
            # No other process could have ended it or removed tokens: the record has lost them.
            if await self._restore(live.to_record()):
                metrics.WRITTEN_BACK.labels("leader").inc()
            else:
                self.events += [
                    recovered(live),
                    EndRequested(request_id, End.ERROR, MISMATCH_DETAIL),
                ]
                return
        self.events.append(recovered(live))

    async def _restore(self, stored: StoredRequest) -> bool:
        """Write one request back, however long the record is away. Return False if the record holds other
        outputs.
        """

        async def write() -> TransitionStatus:
            batch = Batch(self._store)
            answer = batch.restore([stored])
            await batch.execute()
            return answer.result()[0]

        status = await until_answered(self._outage, write, fenced=self.confirm_lead)
        self._outage.wrote()
        return status in ON_RECORD

    async def continue_after(self, turn: Turn, live: Live, shown: tuple[int, ...]) -> None:
        """Continue a request after the outputs that a client has seen, if they are more than the record has:
        they are kept, and the next worker generates after them.
        """
        if live.end is not None or len(shown) > live.facts.max_tokens or max(shown) > MAX_TOKEN_ID:
            return
        if shown[: len(live.committed)] != tuple(live.committed):
            # Nothing to gain; the stream continues once this request is past the outputs that the client has
            # seen.
            return
        further = replace(
            live.to_record(), committed_ids=shown, lease_epoch=live.lease_epoch + 1, worker_id=None
        )
        if await self._restore(further):
            live.append(0, shown, turn.now_s)
            live.lease(further.lease_epoch, None, turn.now_s)
            live.mark_dirty()
            turn.events.append(recovered(live))

    async def _read(self, request_id: str) -> StoredRequest | None:
        return await until_answered(self._outage, lambda: self._store.read(request_id))


def _as_ended(stored: StoredRequest) -> Commit:
    """Return the end that the record has, as the commit that brought it."""
    return Commit(
        request_id=stored.request_id,
        lease_epoch=stored.lease_epoch,
        position=len(stored.committed_ids),
        tokens=(),
        standing=stored.standing,
        end=stored.end,
        cut_characters=stored.cut_characters,
        detail=stored.detail,
        story=stored.story,
    )
