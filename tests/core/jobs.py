"""Requests and virtual workers of the simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from scheduler_svc.core.events import RequestFacts, WorkerFacts
from simulator import jobs as simulator
from simulator.machine import Machine
from simulator.worker import Round, VirtualWorker

DRAFT_LEN = 5
MACHINE = Machine(draft_len=DRAFT_LEN, draft_s=0.010, host_memory=False)
"""Costs of a round; slots and blocks are in each worker's facts."""


@dataclass(frozen=True)
class Job:
    """A request of the simulation, with its true length."""

    request_id: str
    arrival_s: float
    prompt: int
    output: int
    pace: tuple[int, ...] = (3,)
    """Tokens per round, repeated."""
    priority: int = 0
    workload_class: str = ""
    hint: int | None = None
    max_tokens: int | None = None
    tenant: str = "t"
    length_features: bytes = b""

    def facts(self, sequence: int) -> RequestFacts:
        return RequestFacts(
            request_id=self.request_id,
            sequence=sequence,
            arrival_s=self.arrival_s,
            tenant=self.tenant,
            priority=self.priority,
            workload_class=self.workload_class,
            prompt_tokens=self.prompt,
            max_tokens=self.max_tokens or self.output,
            expected_output_tokens=self.hint,
            length_features=self.length_features,
        )

    def future(self) -> simulator.Job:
        """Return the request for a virtual worker. It ends by itself: its limit there is out of reach."""
        paces: list[int] = []
        for pace in cycle(self.pace):
            paces.append(min(pace, self.output - sum(paces)))
            if sum(paces) == self.output:
                break
        return simulator.Job(
            self.request_id, self.arrival_s, self.prompt, bytes(paces), max_tokens=self.output + 1
        )


def facts(
    worker_id: str, slots: int = 1, blocks: int = 1000, block_size: int = 16, max_length: int = 10_000
) -> WorkerFacts:
    return WorkerFacts(worker_id, slots, blocks, blocks, block_size, max_length, DRAFT_LEN)


class Worker(VirtualWorker):
    """A virtual worker that checks its own books after every round."""

    def run_round(self) -> Round | None:
        done = super().run_round()
        if done is not None:
            assert self.ran == {progress.request_id for progress in done.report.progress}
            assert len(self.ran) <= self.facts.slots
            blocks = sum(held.blocks for held in self.held.values())
            assert blocks <= self.facts.target_blocks
            assert done.report.free_target_blocks == self.facts.target_blocks - blocks
        return done
