"""A shard in steady state around the real core: a number of queued requests and of virtual workers, and a new
request for each one that ends.

All randomness comes from one seed, so two shards of the same size see the same events. Requests bring the words of
prompts, as a gateway sends them, and the core has learned lengths from the words of earlier ones.
"""

from __future__ import annotations

import random
from dataclasses import replace

from bench._control.lengths import output_length, prompt_features
from laps_sd.contract.length_features import packed
from scheduler_svc.core.commands import Assign, Command, Commit, Drop
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import Arrived, Event, RequestFacts, WorkerUp
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.start_weights import start_weights
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.worker import Specification, VirtualWorker

DRAFT_LEN = 5
BLOCK_SIZE = 16
MAX_LENGTH = 2048
MAX_TOKENS = 1024
MEDIAN_TOKENS = 148
LEARNED = 1_500
"""Ended requests that the core has learned from: while there are fewer than 1,000, it also learns from those that run."""
TENANT = "tenant"
CLASSES = ("", "chat", "code", "summary")
SEED = 1
ARRIVALS_PER_STEP = 256
"""Arrivals per step while the queue is filled."""
WARM_UP_STEPS = 20
"""Steps of the warm-up, each of `priors_interval_s`: afterwards the core publishes its priors at that
interval."""


class VirtualShard:
    """The core, its workers, and the arrivals that keep the queue at its length."""

    def __init__(self, *, queued: int, workers: int, slots: int, policy: str) -> None:
        """`queued` requests wait in addition to those that fill the workers' lists."""
        self.now_s = 0.0
        self.arrivals = 0
        self._committed: dict[str, tuple[int, int]] = {}
        """Committed rounds and output tokens of unfinished requests that have run."""
        self._rng = random.Random(SEED)
        settings = CoreSettings()
        self.core = Scheduler(policy_named(policy, settings), settings, self._learned())
        self.workers: dict[str, VirtualWorker] = {}
        self._queued = queued
        self._slots = slots
        machine = Machine(
            slots=slots,
            draft_len=DRAFT_LEN,
            draft_s=0.010,
            host_memory=False,
            # Room for the slots and a quarter more: paused requests lose their KV at times, as on a real
            # device.
            kv_tokens=max(MAX_LENGTH, slots * 600 * 5 // 4),
            block_size=BLOCK_SIZE,
            max_length=MAX_LENGTH,
        )
        for number in range(workers):
            facts = machine.facts(f"worker-{number:04d}")
            facts = replace(
                facts, draft_blocks=facts.target_blocks
            )  # the core looks at both pools of a worker
            self.workers[facts.worker_id] = VirtualWorker(facts, machine)

    def _learned(self) -> Priors:
        """Return priors that have learned lengths, from requests that never come."""
        prompts = PromptLengths(*start_weights())
        priors = Priors(prompts)
        for number in range(LEARNED):
            name, tokens = f"learned {number}", self._output_tokens(f"learned {number}")
            workload_class, words = CLASSES[number % len(CLASSES)], self._words(name)
            guesses = Guesses(prompt=prompts.predict(words, workload_class, TENANT))
            priors.observe_length(workload_class, tokens, guesses, TENANT)
            prompts.learn(words, workload_class, TENANT, tokens, cut=False)
        return priors

    def _words(self, request_id: str) -> bytes:
        """Return the hashed words of a prompt, which show something of its output's length."""
        return packed(prompt_features(f"{SEED} {request_id}", MEDIAN_TOKENS))

    def _output_tokens(self, request_id: str) -> int:
        rng = random.Random(f"{SEED} {request_id}")
        return max(1, min(MAX_TOKENS, output_length(rng, MEDIAN_TOKENS)))

    def start(self) -> None:
        """Connect all workers, and queue as many requests as fill their lists."""
        self.step([WorkerUp(worker.facts, ()) for worker in self.workers.values()])
        while self.core.totals().queued == 0:
            self.step([self._arrival() for _ in range(min(self._slots, ARRIVALS_PER_STEP))])
        # Some minutes pass: a core that has just begun computes all ranks again far more often than later.
        for _ in range(WARM_UP_STEPS):
            self.now_s += self.core.settings.priors_interval_s
            self.step([])

    def fill(self) -> None:
        """Queue the rest."""
        while (missing := self._queued - self.core.totals().queued) > 0:
            self.step([self._arrival() for _ in range(min(missing, ARRIVALS_PER_STEP))])

    def step(self, events: list[Event]) -> None:
        self.carry_out(self.core.step(self.now_s, events))

    def next_events(self, worker: VirtualWorker) -> list[Event]:
        """Return the worker's next report, and arrivals in place of the requests that left the queue."""
        done = worker.run_round()
        if done is None:
            raise RuntimeError(f"{worker.facts.worker_id} has no request")
        worker.acknowledge(done.report)
        self.now_s += done.report.total_s / len(self.workers)
        missing = self._queued - self.core.totals().queued
        return [done.report, *(self._arrival() for _ in range(missing))]

    def carry_out(self, commands: list[Command]) -> None:
        """Apply the commands to the workers; the record is assumed to agree."""
        for command in commands:
            if isinstance(command, Commit):
                rounds, _ = self._committed.pop(command.request_id, (0, 0))
                if command.end is None:
                    emitted = command.position + len(command.tokens)
                    self._committed[command.request_id] = (rounds + 1, emitted)
            elif isinstance(command, Assign):
                self.workers[command.worker_id].assign(command.entries, self._specification)
            elif isinstance(command, Drop):
                for request_id, lease_epoch in command.requests:
                    self.workers[command.worker_id].drop(request_id, lease_epoch)

    def _arrival(self) -> Arrived:
        self.arrivals += 1
        rng = self._rng
        request_id = f"shard0-{self.arrivals:026d}"  # as long as real ones
        facts = RequestFacts(
            request_id=request_id,
            sequence=self.arrivals,
            arrival_s=self.now_s,
            tenant=TENANT,
            priority=0,
            workload_class=rng.choice(CLASSES),
            prompt_tokens=rng.randint(16, 512),
            max_tokens=MAX_TOKENS,
            expected_output_tokens=rng.randint(16, 512) if rng.random() < 0.5 else None,
            length_features=self._words(request_id),
        )
        return Arrived(facts)

    def _specification(self, request_id: str) -> Specification:
        return Specification(self._job(request_id), *self._committed.get(request_id, (0, 0)))

    def _job(self, request_id: str) -> Job:
        """Return the true output of a request; it is drawn when the request is leased, equal for each lease."""
        rng = random.Random(f"{SEED} paces of {request_id}")
        prompt = rng.randint(16, 512)
        output = self._output_tokens(request_id)
        acceptance = rng.betavariate(5.4, 2.6)
        paces = bytearray()
        left, gained = output, 0
        while left:
            gained = 1
            while gained <= DRAFT_LEN and rng.random() < acceptance:
                gained += 1
            paces.append(min(gained, left))
            left -= paces[-1]
        # The end is a stop, also that of an output as long as the limit.
        return Job(request_id, 0.0, prompt, bytes(paces), MAX_TOKENS + 1, uncut_last=gained)
