"""Engines that run in this process: ours and transformers, with the modes of each. Others run by
`bench._peers`."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from bench._engine.cells import MAX_LENGTH, RAMP, Cell, Prompted
from bench._engine.outcomes import Outcome, counted

MAX_DRAFT_LEN = 8
BLOCK_SIZE = 16
SLICE_S = 0.03
"""CPU seconds after which another mode of our engine has its turn: a shared machine that is slower for a
while is slower for both."""
FEW = 4
"""Upper bound of the requests that run together at the foot of the ramp, where its draft lengths are
reported."""
MODES = 2
"""Modes of our engine that the pool has room for: without draft tokens, and with them."""


class Ours:
    """Our engine at one batch size. Its modes share the weights and the pool, so that one mode leaves them in
    the caches for the next.
    """

    def __init__(self, options: argparse.Namespace, batch: int) -> None:
        from bench._synthetic import synthetic
        from worker_svc.engine.interface import blocks_needed
        from worker_svc.engine.load import load_engine
        from worker_svc.engine.options import LoadOptions

        sizes = LoadOptions(
            threads=options.threads,
            dtype=options.dtype,
            slots=batch,
            blocks=MODES * batch * blocks_needed(MAX_LENGTH, MAX_DRAFT_LEN, BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            max_length=MAX_LENGTH,
            max_draft_len=MAX_DRAFT_LEN,
        )
        self._engine = synthetic(load_engine(options.target, options.draft, sizes), options.acceptance)
        self._limit = options.tokens
        self._ends = options.ends

    def mode(self, name: str, draft_len: int | None) -> Callable[[Cell], Generator[None, None, Outcome]]:
        """Return one way to run it: with a constant number of draft tokens, or (None) with as many as pay."""
        # Each mode learns the value and the cost of drafts for itself.
        lengths = replace(copy.deepcopy(self._engine.lengths), fixed=draft_len)
        return lambda cell: self._slices(name, lengths, cell)

    def _slices(self, name: str, lengths: Any, cell: Cell) -> Generator[None, None, Outcome]:
        """Generate first come, first served, as a worker alone would; pause after every `SLICE_S`, and count
        no pause.
        """
        from worker_svc.engine.interface import Sampling, Specification

        engine = self._engine
        waiting = [
            Specification(
                f"{name}-{at}", one.ids, (), Sampling(one.temperature, seed=one.number), self._limit
            )
            for at, one in enumerate(cell.requests)
        ]
        outputs: dict[str, list[int]] = {spec.request_id: [] for spec in waiting}
        waiting.reverse()
        running: list[str] = []
        decode: list[float] = []
        drafting: list[tuple[int, int]] = []  # running requests and their draft tokens, by round
        accepted = tested = 0
        wall_s = cpu_s = 0.0
        engine.lengths = lengths
        wall, cpu = time.monotonic(), time.process_time()
        while waiting or running:
            if time.process_time() - cpu > SLICE_S:
                wall_s, cpu_s = wall_s + time.monotonic() - wall, cpu_s + time.process_time() - cpu
                yield
                engine.lengths = lengths
                wall, cpu = time.monotonic(), time.process_time()
            while waiting and len(running) < cell.at_once(len(cell.requests) - len(waiting)):
                spec = waiting.pop()
                engine.add(spec)
                running.append(spec.request_id)
            whole, began = len(running) == cell.batch, time.process_time()
            result = engine.round(running)
            if whole and not any(step.prefilled for step in result.requests):
                decode.append(time.process_time() - began)
            drafting.append((len(running), sum(step.drafted for step in result.requests)))
            for step in result.requests:
                outputs[step.request_id].extend(step.tokens)
                accepted += step.accepted
                tested += step.tested
                if step.finish is not None:
                    if step.error is not None:
                        raise RuntimeError(step.error)
                    running.remove(step.request_id)
                    engine.drop(step.request_id)
        wall_s, cpu_s = wall_s + time.monotonic() - wall, cpu_s + time.process_time() - cpu
        told = {"draft_len": _per_request(drafting), "accepted_of_tested": accepted / max(1, tested)}
        return replace(
            counted(list(outputs.values()), self._limit, self._ends, cpu_s, wall_s),
            decode_s=statistics.median(decode) if decode else None,
            told=told | (ramp_told(drafting) if cell.kind == RAMP else {}),
        )


def _per_request(drafting: list[tuple[int, int]]) -> float:
    return sum(drafted for _, drafted in drafting) / sum(running for running, _ in drafting)


def ramp_told(drafting: list[tuple[int, int]]) -> dict[str, float]:
    """Return the draft lengths at the foot, at the top and at the foot again. `drafting` has the running
    requests and their draft tokens, by round.
    """
    most = max(running for running, _ in drafting)
    top = [at for at, (running, _) in enumerate(drafting) if running >= 0.9 * most]
    parts = {
        "draft_len_rising": [one for one in drafting[: top[0]] if one[0] <= FEW],
        "draft_len_top": [drafting[at] for at in top],
        "draft_len_falling": [one for one in drafting[top[-1] + 1 :] if one[0] <= FEW],
    }
    return {name: _per_request(part) for name, part in parts.items() if part}


class Transformers:
    """transformers on the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        dtype = getattr(torch, options.dtype)
        self._target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
        self._draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=dtype).eval()
        self._limit = options.tokens
        self._ends = options.ends

    def one_by_one(self, cell: Cell) -> Outcome:
        """Run `generate`, batch 1."""
        return self._timed(lambda: [row for one in cell.requests for row in self._generate([one])])

    def padded(self, cell: Cell) -> Outcome:
        """Run `generate` on left-padded batches, each of which runs until its longest ends."""
        parts = self._parts(cell)
        return self._timed(lambda: [row for part in parts for row in self._generate(part)])

    def assisted(self, length: int | None) -> Callable[[Cell], Outcome]:
        """Return assisted generation with a constant draft length, or with transformers' default."""
        draft = copy.deepcopy(self._draft)
        if length is not None:
            draft.generation_config.num_assistant_tokens = length
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0

        def run(cell: Cell) -> Outcome:
            return self._timed(
                lambda: [row for one in cell.requests for row in self._generate([one], assistant_model=draft)]
            )

        return run

    def continuous(self, cell: Cell) -> Outcome:
        """Run `generate_batch`, at most `batch` requests together; one that ends makes room for the next."""
        return self._timed(lambda: self._generate_batch(list(cell.requests), cell.batch))

    def _timed(self, generate: Callable[[], list[list[int]]]) -> Outcome:
        wall, cpu = time.monotonic(), time.process_time()
        outputs = generate()
        return counted(outputs, self._limit, self._ends, time.process_time() - cpu, time.monotonic() - wall)

    def _parts(self, cell: Cell) -> list[list[Prompted]]:
        requests = list(cell.requests)
        return [requests[at : at + cell.batch] for at in range(0, len(requests), cell.batch)]

    def _settings(self, temperature: float) -> dict[str, Any]:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return {
            "max_new_tokens": self._limit,
            "pad_token_id": min(self._ends, default=0),
            **(sampled if temperature else {"do_sample": False}),
        }

    def _generate(self, requests: list[Prompted], **more: Any) -> list[list[int]]:
        torch = self._torch
        torch.manual_seed(requests[0].number)
        width = max(len(one.ids) for one in requests)
        pad = min(self._ends, default=0)
        ids = torch.tensor([[pad] * (width - len(one.ids)) + list(one.ids) for one in requests])
        mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in requests])
        with torch.inference_mode():
            out = self._target.generate(
                ids, attention_mask=mask, **self._settings(requests[0].temperature), **more
            )
        rows: list[list[int]] = out[:, width:].tolist()
        return rows

    def _generate_batch(self, requests: list[Prompted], batch: int) -> list[list[int]]:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        settings = GenerationConfig(
            **self._settings(requests[0].temperature), eos_token_id=sorted(self._ends) or None
        )
        with self._torch.no_grad():  # it computes in a thread of its own, where inference mode has no effect
            done = self._target.generate_batch(
                [list(one.ids) for one in requests],
                generation_config=settings,
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=32,
                    num_blocks=batch * MAX_LENGTH // 32,
                    max_batch_tokens=512,
                    max_requests_per_batch=batch,
                ),
                progress_bar=False,
            )
        # Its ids are "req_0", "req_1" and so on, in the order of the prompts; the answers arrive as they end.
        by_number = {int(name.rsplit("_", 1)[1]): one for name, one in done.items()}
        return [list(by_number[number].generated_tokens) for number in sorted(by_number)]
