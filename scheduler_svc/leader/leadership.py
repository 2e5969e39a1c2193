"""Leads the shard while this process is the leader on the record; stands by otherwise.

Exactly one `Loop` exists while this process leads, none otherwise. A leader that another one has replaced stops
acting as soon as it learns that: its scripts are fenced, and its streams end. One that cannot reach the record keeps
what it holds, since it may be the only one that has it, and turns its peers away now and then: if another process
leads, they find it.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable

from laps_sd.service.log import get_logger
from laps_sd.service.tracing import QUIET, Tracing
from scheduler_svc import metrics
from scheduler_svc.core import COMPILED
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.placement.routing import router_named
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.leader.loop import Loop
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.probes import Probes
from scheduler_svc.leader.sessions import GatewaySession, WorkerSession
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import LeadInDoubt
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.start_weights import start_weights
from scheduler_svc.store.errors import Fenced, RecordBehind, StoreUnavailable
from scheduler_svc.store.store import Store

log = get_logger(__name__)

TURN_AWAY_S = 0.5
"""Seconds for which a leader that cannot reach the record greets no peer: time for each of them to begin a round of
dialling, which visits all schedulers. They are back before their graces end, which are 5 and 2 s by default.
"""
WRONG_CLOCK_S = 1.0
"""Seconds between the clocks of scheduler and record from which on the difference is logged."""


class Leadership:
    """This process's part in leading one shard."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: Store,
        *,
        on_lead: Callable[[bool], None],
        tracing: Tracing = QUIET,
    ) -> None:
        self.settings = settings
        self.store = store
        self.address = settings.advertise_address
        self.loop: Loop | None = None
        """The leader's loop, once it has recovered; None on a standby."""
        self.epoch = ""
        self.leader_address = ""
        """Address of the leader, as last read."""
        self.sessions: set[WorkerSession | GatewaySession] = set()
        self.outage = Outage()
        self._on_lead = on_lead
        self._waits = False
        self._turns_away_until_s = 0.0
        self._holds_old_lead = False
        """Whether what this process has led is still in its memory."""
        self._traces = RequestTraces(tracing, shard=settings.shard, policy=settings.policy)

    async def run(self) -> None:
        """Stand by, lead, stand by … until cancelled."""
        while True:
            epoch = await self._acquire()
            log.info(
                "leading",
                shard=self.settings.shard,
                leader_epoch=str(epoch),
                core="compiled" if COMPILED else "interpreted",
            )
            self.epoch = str(epoch)
            try:
                await self._lead()
            except Fenced:
                log.warning("fenced: another leader is in force", leader_epoch=self.epoch)
            finally:
                self._step_down("this scheduler no longer leads")

    @property
    def serving(self) -> Loop | None:
        """Return the loop for a peer that dials; None on a standby, and while peers are turned away."""
        return None if asyncio.get_running_loop().time() < self._turns_away_until_s else self.loop

    async def write_back(self) -> None:
        """Write back what the record has lost, if anything, before a graceful stop. Waits at most two lease
        periods.
        """
        if self.loop is None:
            return
        settled = asyncio.Event()
        self.loop.put(LeadInDoubt(settled))
        try:
            async with asyncio.timeout(2 * self.settings.lease_s):
                await settled.wait()
        except TimeoutError:
            log.warning("stopping while the record is unavailable: data that only this leader holds is lost")

    async def resign(self) -> None:
        """Stop leading so that a standby takes over at once; part of a graceful stop."""
        self._step_down("this scheduler is stopping")
        try:
            await self.store.resign()
        except StoreUnavailable as error:
            log.warning("could not resign; the lease runs out by itself", error=str(error))

    async def _acquire(self) -> str:
        while True:
            self._free_old_lead()
            try:
                epoch = await self.store.acquire_leadership(owner=self.address, lease_s=self.settings.lease_s)
                self.outage.answered()
                if epoch is not None:
                    return epoch
                self._log_wait()
                leader = await self.store.leader()
                self.leader_address = leader.owner if leader is not None else ""
                # The leader writes: it finds, and reports, whether the server is full.
                self.outage.answered(writable=leader is not None)
            except StoreUnavailable as error:
                self.outage.began(error)
            await asyncio.sleep(self.settings.lease_s / 8)

    def _free_old_lead(self) -> None:
        """Free what this process has led, once no stream uses it. It is full of cycles, for which Python looks seldom in
        a process that leads and hardly ever in a standby; and the next recovery would freeze it.
        """
        if self._holds_old_lead and not self.sessions:
            self._holds_old_lead = False
            gc.collect()

    def _log_wait(self) -> None:
        if self.store.waits_for_last_leader != self._waits:
            self._waits = self.store.waits_for_last_leader
            if self._waits:
                log.info(
                    "waiting for the last leader: it may hold data that the record lacks",
                    at_most_s=self.store.patience_s(self.settings.lease_s),
                )

    async def _lead(self) -> None:
        renewing = asyncio.create_task(self._renew(), name="leadership renewal")
        leading = asyncio.create_task(self._recover_and_run(), name="scheduling loop")
        try:
            done, _ = await asyncio.wait({renewing, leading}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (renewing, leading):
                task.cancel()
            await asyncio.gather(renewing, leading, return_exceptions=True)
            self.outage.stuck = False  # the write that waited has ended with the loop

    async def _recover_and_run(self) -> None:
        while True:
            try:
                loop = await self._recovered_loop()
                break
            except StoreUnavailable as error:
                self.outage.began(error)
                await asyncio.sleep(self.settings.lease_s / 8)
        self.loop = loop
        metrics.leads(True)
        self._on_lead(True)
        await loop.run()

    async def _recovered_loop(self) -> Loop:
        off_by_s = await self.store.measure_clock()
        self.store.clock.set(off_by_s)
        if abs(off_by_s) > WRONG_CLOCK_S:
            log.warning(
                "the clock of this machine differs from that of the record's server, which is used",
                off_by_s=round(off_by_s, 3),
            )
        blob = await self.store.load_priors()
        core_settings = CoreSettings(
            perceived_levels=self.settings.perceived_levels, tenant_fairness=self.settings.tenant_fairness
        )
        core = Scheduler(
            policy_named(self.settings.policy, core_settings),
            core_settings,
            self._priors(blob),
            router_named(self.settings.placement),
        )
        loop = Loop(
            settings=self.settings,
            core=core,
            store=self.store,
            clock=self.store.clock,
            outage=self.outage,
            traces=self._traces,
            probes=Probes.from_blob(await self.store.load_probes()),
        )
        await loop.recover()
        return loop

    def _priors(self, blob: bytes | None) -> Priors:
        """Return what earlier leaders have learned, if anything. What cannot be used is learned again."""
        start = start_weights(self.settings.length_key)
        if not blob:
            return Priors(PromptLengths(*start))
        try:
            learnt = json.loads(blob)
            priors = Priors.from_dict(learnt, PromptLengths(*start))
        except (ValueError, RecursionError) as error:
            log.warning("what was learnt cannot be used: learning starts again", reason=str(error))
            return Priors(PromptLengths(*start))
        if priors.lacks_words_of(learnt):
            reason = "the words of prompts: LAPS_SD_LENGTH_KEY or the start weights are others"
            log.warning("what was learnt cannot be used: learning starts again", reason=reason)
        return priors

    async def _renew(self) -> None:
        """Renew the lease three times per period. While the record is away for all no other process can lead either,
        so this one keeps trying, often enough to be the first that reaches the record again. It may be away for
        this process alone: so peers are turned away when a standby would lead by now, and after each time as long
        as all before.
        """
        now_s = asyncio.get_running_loop().time
        renewed_s, unknown_s = now_s(), self.store.patience_s(self.settings.lease_s)
        while True:
            await asyncio.sleep(self.settings.lease_s / (8 if self.outage.on else 3))
            try:
                if not await self.store.renew_leadership():
                    raise Fenced("the lease was not renewed in time")
                renewed_s, unknown_s = now_s(), self.store.patience_s(self.settings.lease_s)
                # A full server renews a lease, and an idle leader writes nothing else: this write shows
                # whether the server is full.
                await self.store.try_write()
                self.outage.answered(writable=True)
            except RecordBehind:
                if self.loop is None:
                    raise Fenced("the record was lost before it was read") from None
                self.loop.put(LeadInDoubt())
            except StoreUnavailable as error:
                self.outage.began(error, lasting=True)
                unreachable_s = now_s() - renewed_s
                if unreachable_s >= unknown_s:
                    unknown_s *= 2
                    self._turns_away_until_s = now_s() + TURN_AWAY_S
                    log.warning(
                        "gateways and workers are turned away for a moment, as another scheduler may lead",
                        unreachable_s=round(unreachable_s, 1),
                    )
                    self._end_streams("the record cannot be reached")

    def _step_down(self, reason: str) -> None:
        if self.loop is not None:
            gc.unfreeze()  # what its recovery has frozen can go
            self._holds_old_lead = True
        self.loop = None
        metrics.leads(False)
        self._on_lead(False)
        self._end_streams(reason)

    def _end_streams(self, reason: str) -> None:
        for session in self.sessions:
            session.close(reason)
