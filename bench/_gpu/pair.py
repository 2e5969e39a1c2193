"""The pair on the device: rounds of the engine, swaps, and transformers' `generate`."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from bench._gpu.limits import least_s, limits_of
from bench._gpu.options import ACCEPTANCE, TEMPERATURE
from bench._gpu.stopwatch import DRAFT, VERIFY, Stopwatch
from bench._shapes import PAIRS, random_model

BLOCK_SIZE = 16
MAX_DRAFT_LEN = 8
WARM_UP = 5
PROFILED = 3
RESERVED = 0.15  # of the device's memory: logits, noise, gathered keys and values
TRANSFORMERS_TOKENS = 32
SWAPS = 5


class Bench:
    """The pair on the device, and the engine around it."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self._torch = torch
        self._options = options
        self.cuda = options.device.startswith("cuda")
        self.name = torch.cuda.get_device_name(options.device) if self.cuda else "cpu"
        self.limits = limits_of(self.name, options)
        self.shapes = PAIRS[options.shape]
        self._dtype = getattr(torch, options.dtype)
        self._item = self._dtype.itemsize
        # The draft's own prefill takes rounds too, in which requests that have it continue.
        catch_up = -(-max(options.batch) * max(options.context) // options.prefill_chunk)
        self._growth = (catch_up + WARM_UP + options.rounds + PROFILED) * (1 + MAX_DRAFT_LEN) + 2
        self._length = max(options.context) + self._growth
        self._models = [
            random_model(
                shape,
                dtype=self._dtype,
                device=options.device,
                seed=at,
                max_length=self._length,
            )
            for at, shape in enumerate(self.shapes)
        ]
        self._stopwatch = Stopwatch(self.cuda)
        self._engine: Any = None
        self._target: Any = None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            self._torch.cuda.synchronize()

    def blocks_for(self, batch: int, context: int) -> int:
        """Return the KV blocks that each pool needs for this many requests of this length."""
        return int(batch * -(-(context + self._growth) // BLOCK_SIZE))

    def build_engine(self) -> None:
        """Make an engine of the models; transformers cannot use them any more."""
        from bench._synthetic import synthetic
        from worker_svc.engine.engine import SpeculativeEngine
        from worker_svc.engine.models.model import PackedModel
        from worker_svc.engine.options import EngineOptions

        options = self._options
        packed = []
        for role, model in zip(("target", "draft"), self._models, strict=True):
            one = PackedModel(model, role=role, max_length=self._length, deterministic=False)
            one.self_check(fused=True)
            packed.append(one)
        self._models = []
        wanted = max(
            self.blocks_for(batch, context) for batch in options.batch for context in options.context
        )
        self.blocks = min(wanted, self._room() // self._block_bytes())
        self._target = packed[0]
        engine = SpeculativeEngine(
            packed[0],
            packed[1],
            EngineOptions(
                slots=max(options.batch),
                target_blocks=self.blocks,
                draft_blocks=self.blocks,
                block_size=BLOCK_SIZE,
                max_length=self._length,
                max_draft_len=MAX_DRAFT_LEN,
                prefill_chunk=options.prefill_chunk,
                draft_len=options.draft_len,
            ),
        )
        self._engine = synthetic(engine, ACCEPTANCE)
        if options.draft_len is None:
            self._engine.calibrate(2.0)
        self._stopwatch.watch(packed[0], VERIFY)
        self._stopwatch.watch(packed[1], DRAFT)

    def _block_bytes(self) -> int:
        return BLOCK_SIZE * sum(shape.kv_bytes(self._item) for shape in self.shapes)

    def _room(self) -> int:
        """Return the bytes available for keys and values."""
        if not self.cuda:
            return 2**30
        self._torch.cuda.empty_cache()
        free, total = self._torch.cuda.mem_get_info(self._options.device)
        return int(free - RESERVED * total)

    def rounds(self, batch: int, context: int) -> dict[str, Any]:
        """Time rounds of `batch` requests with `context` tokens each. Raise OutOfMemory
        if they do not fit.
        """
        from worker_svc.engine.interface import Sampling, Specification

        options, engine = self._options, self._engine
        rng = random.Random(0)
        vocab = self.shapes[0].vocab
        run = [f"r{number}" for number in range(batch)]
        try:
            for number, name in enumerate(run):
                prompt = tuple(rng.randrange(vocab) for _ in range(context))
                sampling = Sampling(TEMPERATURE, seed=number)
                engine.add(Specification(name, prompt, (), sampling, self._growth, ignore_eos=True))
            began = time.perf_counter()
            while any(step.prefilled for step in engine.round(run).requests):
                pass
            prefill_s = time.perf_counter() - began
            self._warm_up(run)
            timed = list(self._timed(run, options.rounds))
            kernels_s, all_kernels_s = self._profiled(run)
        finally:
            for name in run:
                engine.drop(name)
            self._stopwatch.take()
        round_s = statistics.median(one["round_s"] for one in timed)
        found: dict[str, Any] = {
            "batch": batch,
            "context": context,
            "skipped": None,
            "round_ms": 1000 * round_s,
            "draft_ms": 1000 * statistics.median(one[DRAFT] for one in timed),
            "verify_ms": 1000 * statistics.median(one[VERIFY] for one in timed),
            "kernels_ms": 1000 * kernels_s,
            "all_kernels_ms": None if all_kernels_s is None else 1000 * all_kernels_s,
            "other_share": 1 - kernels_s / round_s,
            "draft_len": sum(one["drafted"] for one in timed) / (batch * len(timed)),
            "tokens_per_round": sum(one["tokens"] for one in timed) / (batch * len(timed)),
            "tokens_per_s": sum(one["tokens"] for one in timed) / sum(one["round_s"] for one in timed),
            "prefill_tokens_per_s": batch * context / prefill_s,
            "roofline_ms": None,
            "of_roofline": None,
        }
        if self.limits is not None:
            least = statistics.median(one["least_s"] for one in timed)
            found |= {"roofline_ms": 1000 * least, "of_roofline": round_s / least}
        return found

    def _warm_up(self, run: Sequence[str]) -> None:
        """Run a few rounds, and as many more as the draft needs for its own prefill."""
        for at in range(self._growth):
            self._stopwatch.take()
            self._engine.round(run)
            self.synchronize()
            drafted = [rows for name, rows, _ in self._stopwatch.take() if name == DRAFT]
            if at + 1 >= WARM_UP and max(drafted, default=0) <= 2 * len(run):
                return

    def _timed(self, run: Sequence[str], count: int) -> Iterator[dict[str, Any]]:
        engine = self._engine
        for _ in range(count):
            kv_tokens = sum(engine.status(name).tokens for name in run)
            self._stopwatch.take()
            self.synchronize()
            began = time.perf_counter()
            result = engine.round(run)
            self.synchronize()
            found: dict[str, Any] = {
                "round_s": time.perf_counter() - began,
                DRAFT: 0.0,
                VERIFY: 0.0,
                "least_s": 0.0,
            }
            for name, rows, seconds in self._stopwatch.take():
                found[name] += seconds
                if self.limits is not None:
                    shape = self.shapes[name == DRAFT]
                    found["least_s"] += least_s(
                        shape,
                        self.limits,
                        item_bytes=self._item,
                        rows=rows,
                        kv_tokens=kv_tokens,
                        batch=len(run),
                    )
            found["tokens"] = sum(len(step.tokens) for step in result.requests)
            found["drafted"] = sum(step.drafted for step in result.requests)
            yield found

    def _profiled(self, run: Sequence[str]) -> tuple[float, float | None]:
        """Return the seconds per round of the forwards' kernels, and of all kernels (None on the CPU, where
        all computation counts as kernels).
        """
        from torch.autograd import DeviceType  # type: ignore[attr-defined]
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        with profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                self._engine.round(run)
            self.synchronize()
        host = [event for event in profiler.key_averages() if event.device_type == DeviceType.CPU]
        forwards = [event for event in host if event.key in (DRAFT, VERIFY)]
        if not self.cuda:
            return sum(event.cpu_time_total for event in forwards) / PROFILED / 1e6, None
        return (
            sum(event.device_time_total for event in forwards) / PROFILED / 1e6,
            sum(event.self_device_time_total for event in host) / PROFILED / 1e6,
        )

    def swap(self, context: int) -> dict[str, float]:
        """Return the bytes per second of the target's keys and values of one request, to host memory and
        back.
        """
        pool = self._target.pool
        place = pool.new_table()
        blocks = -(-context // BLOCK_SIZE)
        pool.hold([(place, blocks, blocks)])
        place.length = context
        size = context * pool.bytes_per_token()
        out_s, in_s = [], []
        try:
            for _ in range(SWAPS):
                copy, took = self._seconds(lambda: pool.copy_out(place))
                out_s.append(took)
                _, took = self._seconds(partial(pool.copy_in, place, copy))
                in_s.append(took)
        finally:
            pool.release(place)
        return {"swap_out_gb_s": size / min(out_s) / 1e9, "swap_in_gb_s": size / min(in_s) / 1e9}

    def _seconds(self, work: Callable[[], Any]) -> tuple[Any, float]:
        self.synchronize()
        began = time.perf_counter()
        made = work()
        self.synchronize()
        return made, time.perf_counter() - began

    def transformers(self, batch: int, context: int) -> float | None:
        """Return the tokens per second of `generate`, prefill left out; None where it has
        no memory for it.
        """
        torch, options = self._torch, self._options
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.shapes[0].vocab, (batch, context), generator=generator).to(options.device)
        settings: dict[str, Any] = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0}

        def generate(tokens: int) -> float:
            with torch.inference_mode():
                _, took = self._seconds(
                    lambda: self._models[0].generate(
                        ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=tokens,
                        pad_token_id=0,
                        **settings,
                    )
                )
            return took

        try:
            generate(2)
            prefill_s, all_s = generate(1), generate(1 + TRANSFORMERS_TOKENS)
        except torch.OutOfMemoryError:
            return None
        finally:
            if self.cuda:
                torch.cuda.empty_cache()
        return batch * TRANSFORMERS_TOKENS / max(all_s - prefill_s, 1e-9)
