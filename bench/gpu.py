"""What does a round cost on a GPU, and how much of that is unavoidable? `laps-sd bench gpu`

A random pair of the shape of real ones (8.0 B and 0.5 B weights in bfloat16), with draft tokens accepted by a random draw. For each batch size and context length: every
request is prefilled to that length, then rounds are timed. A round is compared with the roofline: what its forwards must at least take if
all weights and keys and values cross the memory bus once per forward (bytes over bandwidth), or all products are done at the peak rate (operations
over operations per second), whichever is longer. Its share that is not the draft's and the target's forwards is what the engine adds: choosing,
bookkeeping, waiting for the host.

Forwards are timed by events on the device; what their kernels take, gaps between them left out, by the profiler in a few more rounds. Then swapping, and
transformers' `generate` with the same prompts, decoding alone.

Goal: at batch 32 at most a tenth of a round is not draft or verify kernels. On the CPU (`--device cpu --shape tiny`) it runs to test the driver.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bench._shapes import PAIRS, Shape, random_model
from bench.report import finish, numbers, progress, table

GOAL_OTHER = 0.10
GOAL_BATCH = 32
BLOCK_SIZE = 16
MAX_DRAFT_LEN = 8
WARM_UP = 5
PROFILED = 3
RESERVED = 0.15  # of the device's memory: logits, noise, gathered keys and values
TRANSFORMERS_TOKENS = 32
SWAPS = 5
DRAFT, VERIFY = "laps_sd draft", "laps_sd verify"

DEVICES: dict[str, tuple[float, float]] = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989e12),
    "H100 80GB HBM3": (3.35e12, 989e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100 PCIe": (2.0e12, 756e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100-SXM4-40GB": (1.555e12, 312e12),
    "A100 80GB PCIe": (1.935e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.3e12, 121e12),
    "A10": (0.6e12, 125e12),
    "RTX 4090": (1.008e12, 165e12),
}
"""Bytes per second and dense bfloat16 operations per second, by a part of the device's name. From the makers'
data sheets."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="laps-sd bench gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="8b", choices=list(PAIRS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 128], help="default 1,8,32,128")
    parser.add_argument(
        "--context",
        type=numbers,
        default=[1024, 8192],
        help="tokens before the timed rounds (default 1024,8192)",
    )
    parser.add_argument(
        "--acceptance", type=float, default=0.7, help="chance that a proposal is kept (default 0.7)"
    )
    parser.add_argument("--draft-len", type=int, help="always so many proposals (default: by goodput)")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds (default 50)")
    parser.add_argument("--prefill-chunk", type=int, default=8192, help="context tokens prefilled per round")
    parser.add_argument(
        "--bandwidth", type=float, help="of the device's memory, GB/s, where its name is not known"
    )
    parser.add_argument(
        "--peak", type=float, help="of the device, dense TFLOP/s, where its name is not known"
    )
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(argv)
    if (options.bandwidth is None) != (options.peak is None):
        parser.error("--bandwidth and --peak go together")
    return options


# -- lower bounds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Upper limits of the device."""

    bytes_per_s: float
    flops_per_s: float


def limits_of(name: str, options: argparse.Namespace) -> Limits | None:
    """Return the given limits, otherwise those of the longest name that occurs in the device's; None if it is
    unknown.
    """
    if options.bandwidth is not None:
        return Limits(options.bandwidth * 1e9, options.peak * 1e12)
    known = [part for part in DEVICES if part in name]
    return Limits(*DEVICES[max(known, key=len)]) if known else None


def least_s(shape: Shape, limits: Limits, *, item_bytes: int, rows: int, kv_tokens: int, batch: int) -> float:
    """Return the least seconds of one forward: `rows` tokens of `batch` sequences, which attend to
    `kv_tokens` in all.
    """
    moved = shape.multiplied * item_bytes + (kv_tokens + rows) * shape.kv_bytes(item_bytes)
    per_key = (
        4 * shape.layers * shape.heads * shape.head_size
    )  # a product with the key and one with the value
    done = 2 * shape.multiplied * rows + per_key * kv_tokens * rows / batch
    return max(moved / limits.bytes_per_s, done / limits.flops_per_s)


# -- measurement --------------------------------------------------------------------------------------------------


@dataclass
class Stopwatch:
    """Timer of the forwards of both models, by events where the device has them; it also
    counts their rows.
    """

    cuda: bool
    spans: list[tuple[str, int, Any, Any]] = field(default_factory=list)

    def watch(self, model: Any, name: str) -> None:
        """Record every later forward of this model."""
        from torch.profiler import record_function

        forward = model.forward

        def timed(ids: Any, plan: Any, logit_rows: Any) -> Any:
            began = self._mark()
            with record_function(name):
                logits = forward(ids, plan, logit_rows)
            self.spans.append((name, plan.total - plan.padding, began, self._mark()))
            return logits

        model.forward = timed

    def take(self) -> list[tuple[str, int, float]]:
        """Return (name, rows, seconds) of every forward since the last call; the device has finished them."""
        spans, self.spans = self.spans, []
        return [
            (name, rows, began.elapsed_time(ended) / 1000 if self.cuda else ended - began)
            for name, rows, began, ended in spans
        ]

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


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
                seed=options.seed + at,
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
            one.self_check(lean=True)
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
        self._engine = synthetic(engine, options.acceptance)
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
        rng = random.Random(options.seed)
        vocab = self.shapes[0].vocab
        run = [f"r{number}" for number in range(batch)]
        try:
            for number, name in enumerate(run):
                prompt = tuple(rng.randrange(vocab) for _ in range(context))
                sampling = Sampling(options.temperature, seed=number)
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
        generator = torch.Generator().manual_seed(options.seed)
        ids = torch.randint(self.shapes[0].vocab, (batch, context), generator=generator).to(options.device)
        settings: dict[str, Any] = {"do_sample": False}
        if options.temperature:
            settings = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}

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


@contextmanager
def one_thread(options: argparse.Namespace) -> Iterator[None]:
    """Use one thread on the CPU, as all benchmarks here do."""
    import torch

    before = torch.get_num_threads()
    if options.device == "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each batch size and context, and the device's name."""
    from worker_svc.engine.interface import OutOfBlocks, OutOfMemory

    with one_thread(options):
        bench = Bench(options)
        pairs = [(batch, context) for context in options.context for batch in options.batch]
        speeds: dict[tuple[int, int], float | None] = {}
        for batch, context in [] if options.no_peers else pairs:
            progress(f"transformers, batch {batch}, context {context}")
            speeds[batch, context] = bench.transformers(batch, context)
        bench.build_engine()
        swaps = {context: bench.swap(context) for context in options.context}
        rows = []
        for batch, context in pairs:
            needed = bench.blocks_for(batch, context)
            progress(f"engine, batch {batch}, context {context}")
            try:
                if needed > bench.blocks:
                    raise OutOfMemory(
                        f"keys and values need {needed} blocks, the device holds {bench.blocks}"
                    )
                row = bench.rounds(batch, context)
            except (OutOfMemory, OutOfBlocks) as error:
                rows.append({"batch": batch, "context": context, "skipped": str(error)})
                continue
            theirs = speeds.get((batch, context))
            row |= swaps[context] | {
                "transformers_tokens_per_s": theirs,
                "ratio_transformers": None if theirs is None else row["tokens_per_s"] / theirs,
            }
            rows.append(row)
        return rows, bench.name


def verdict(rows: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    """Return whether the goal is met at every context that could be measured, and the sentence for the
    summary line.
    """
    judged = [row for row in rows if row["batch"] == GOAL_BATCH and row["skipped"] is None]
    if not judged:
        return False, f"no round of batch {GOAL_BATCH} was measured, so nothing is judged"
    told = [
        f"batch {row['batch']}, context {row['context']}: {row['other_share']:.1%} of a round is not draft or verify kernels "
        f"(goal {GOAL_OTHER:.0%})"
        for row in judged
    ]
    return all(row["other_share"] <= GOAL_OTHER for row in judged), "; ".join(told)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here; --device cpu --shape tiny tests the driver.")
    rows, name = measure(options)
    shown = (
        ("round ms", "round_ms"), ("draft", "draft_ms"), ("verify", "verify_ms"), ("kernels", "kernels_ms"), ("other", "other_share"),
        ("roofline ms", "roofline_ms"), ("× roofline", "of_roofline"), ("γ", "draft_len"), ("tokens/round", "tokens_per_round"),
        ("tokens/s", "tokens_per_s"), ("× transformers", "ratio_transformers"), ("prefill tokens/s", "prefill_tokens_per_s"),
        ("swap out GB/s", "swap_out_gb_s"), ("in", "swap_in_gb_s"),
    )  # fmt: skip
    table(
        f"rounds of the {options.shape} pair in {options.dtype} on {name}",
        [
            {
                "batch": row["batch"],
                "context": row["context"],
                **{label: "" if row.get(key) is None else f"{row[key]:.3g}" for label, key in shown},
            }
            for row in rows
        ],
        width=200,
    )
    for row in rows:
        if row["skipped"] is not None:
            print(f"batch {row['batch']}, context {row['context']} was left out: {row['skipped']}")
    met, summary = verdict(rows)
    about = {
        "device": name,
        "shape": options.shape,
        "dtype": options.dtype,
        "acceptance": options.acceptance,
        "draft_len": "auto" if options.draft_len is None else options.draft_len,
        "temperature": options.temperature,
        "rounds": options.rounds,
        "torch": torch.__version__,
    }
    return finish(rows, json_file=options.json, summary=summary, met=met, about=about)


if __name__ == "__main__":
    sys.exit(main())
