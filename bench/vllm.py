"""What does LAPS-SD gain inside one vLLM server, compared with vLLM's own schedulers? `laps-sd bench vllm --vllm PYTHON`

The demo pair is target and draft of vLLM (method draft_model, 4 draft tokens, temperature 0), 8 requests in a
step. The same requests, in turn: vLLM's FCFS; vLLM's priority policy with guessed lengths (true ones times
exp(σ z), σ 0.5) and with the true ones; LAPS-SD without any hint, with a class, with a class and the same
guesses; and LAPS-SD with what it learnt from an earlier burst of other prompts. LAPS-SD predicts lengths from the
words of prompts; without any hint also with that switched off.

  * steps: bursts within 40 steps, and Poisson arrivals at load 0.9; arrivals and latencies are counted in
    engine steps, so that no clock of a busy machine is in them. The engine runs each set of requests once, and
    the modes replay on vLLM's scheduler what each request emitted; the first burst runs in the engine for every
    mode, as a check.
  * speed: tokens per CPU second of the engine while at least a full batch waits.
  * cost: CPU time of the core and `choose` in a step of 64 requests while 1,000 wait, on vLLM's scheduler with a
    virtual runner; interpreted, and with `--compiled DIR` compiled.
  * clock: one OpenAI server of vLLM for each mode, the same requests in turn. Speed, worker, clock and shape have
    the compiled core if there is one (`--compiled DIR`).
  * shape (only if named): on the clock, a model of a real shape with weights at random (`--shape`, Llama 3 8B) in
    vLLM's engine core, without drafts; bursts and Poisson arrivals, with and without async scheduling. Lengths are
    recorded (`--lengths`) or drawn, and no scheduler can see them. It is for GPUs.
  * computed (only if named): the same requests and modes on vLLM's real schedulers without a model, on a virtual
    clock; the time of a step is a formula (`--step-times`). It explains what shape measured, and needs no GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench._peers import Peer
from bench._shapes import PAIRS
from bench._vllm import decisions, in_steps, on_clock, on_shape, workers
from bench._vllm.decisions import COMPILED, INTERPRETED
from bench._vllm.goals import goals, verdict
from bench._vllm.hidden_lengths import drawn_answers, recorded_answers
from bench._vllm.modes import CLOCK
from bench._vllm.options import BY_NAME, arguments
from bench._vllm.tables import tables
from bench.report import about, finish, progress
from worker_svc.demo import DRAFT_DIR, TARGET_DIR

ROOT = Path(__file__).resolve().parents[1]
MAX_LENGTH = 512
BUDGET = 640
MOST_PROMPT = 1024
SHAPE_BUDGET = 4096
"""Tokens of a step with a model of a shape, at most."""
COMPUTED_KV_TOKENS = 466_544
"""KV of the virtual device: what an H100 had left beside an 8B model."""
STEP_PARTS = ("decode_ms", "decode_row_ms", "mixed_ms", "mixed_token_ms")
DRAFT_LEN = 4
COUNTS = (80, 140, 200)
"""Requests of the bursts in steps."""
CLOCK_COUNT = 100
"""Requests of a run on the clock."""
SLOTS, RESIDENTS, TOKENS = 8, 32, 200
"""Requests of a step and with KV, and tokens of a request, at most; `SHAPE_TOKENS` with a model of a shape."""
SHAPE_TOKENS = 1024
LOAD = 0.9
"""Of the other arrivals, in steps and on the clock."""


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv, __doc__)
    setup = {
        "kind": "engine",
        "target": str(TARGET_DIR),
        "draft": str(DRAFT_DIR),
        "slots": SLOTS,
        "residents": RESIDENTS,
        "tokens": TOKENS,
        "max_length": MAX_LENGTH,
        "budget": BUDGET,
        "draft_len": DRAFT_LEN,
        "dtype": options.dtype,
        "eager": options.eager,
        "threads": 1,
    }
    described: dict[str, Any] = {
        **about("vllm", argv),
        "pair": "demo",
        "slots": SLOTS,
        "residents": RESIDENTS,
        "draft_len": DRAFT_LEN,
        "tokens": TOKENS,
        "load": LOAD,
    }
    rows = []
    partial = options.json and options.json.with_suffix(".partial")
    with ExitStack() as stack:
        folder = options.logs
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laps-sd-vllm-")))
        folder.mkdir(parents=True, exist_ok=True)
        for row in _measured(options, setup, folder.absolute(), described):
            rows.append(row)
            if partial is not None:
                # What was measured so far survives an end in the middle.
                with partial.open("a") as file:
                    print(json.dumps(row), file=file)
    if partial is not None:
        partial.unlink(missing_ok=True)
    tables(rows)
    met, summary = verdict(goals(rows))
    if rows and set(options.parts) <= set(BY_NAME):
        met, summary = True, f"{len(rows)} runs; no goal is for them"
    return finish(rows, json_file=options.json, summary=summary, met=met, about=described)


def _measured(
    options: Any, setup: dict[str, Any], folder: Path, described: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts."""
    tree = (options.compiled or ROOT).resolve()
    for part in BY_NAME:
        if part in options.parts:
            yield from _on_shape(part, options, folder, described, tree)
    if "steps" in options.parts:
        with _driver(options.vllm, setup, folder, "engine", ROOT) as peer:
            described |= {"vllm": peer.ready(), "pair_on": peer.ask({"task": "about"})}
            seeds = range(1, options.seeds + 1)
            in_steps.learn(peer, COUNTS, seeds, folder)
            yield from in_steps.measure(peer, COUNTS, seeds, LOAD, SLOTS, folder)
    if "speed" in options.parts:
        with _driver(options.vllm, setup, folder, "speed", tree) as peer:
            described |= {"vllm": peer.ready(), "pair_on": peer.ask({"task": "about"})}
            yield from decisions.speeds(peer, options.turns, folder)
    with ExitStack() as stack:
        if "cost" in options.parts:
            trees = {INTERPRETED: ROOT} | ({COMPILED: options.compiled} if options.compiled else {})
            peers = {}
            for core, tree in trees.items():
                peers[core] = stack.enter_context(
                    _driver(options.vllm, {"kind": "decisions", "threads": 1}, folder, core, tree.resolve())
                )
                described["vllm"] = peers[core].ready()
            yield from decisions.costs(peers, options.turns)
    with ExitStack() as stack:
        if "worker" in options.parts:
            peers = {}
            for mode, sampling in workers.SAMPLING.items():
                more = {"kind": "worker", "sampling": sampling}
                peers[mode] = stack.enter_context(_driver(options.vllm, setup | more, folder, sampling, tree))
                described |= {"vllm": peers[mode].ready(), "pair_on": peers[mode].ask({"task": "about"})}
            yield from workers.workers(peers, options.turns)
    with ExitStack() as stack:
        if "clock" in options.parts:
            servers = [
                stack.enter_context(on_clock.Server(options.vllm, mode, setup, tree, folder))
                for mode in CLOCK
            ]
            yield from on_clock.measure(servers, CLOCK_COUNT, options.clock_seeds, LOAD, setup)


def _on_shape(
    part: str, options: Any, folder: Path, described: dict[str, Any], tree: Path
) -> Iterator[dict[str, Any]]:
    began_s = time.monotonic()
    vocab = PAIRS[options.shape][0].vocab
    if options.lengths is not None:
        answers = recorded_answers(options.lengths, vocab=vocab, most_prompt=MOST_PROMPT)
    else:
        answers = drawn_answers(vocab=vocab, most_prompt=MOST_PROMPT)
    setup = {
        "kind": part,
        "folder": str(folder),
        "shape": options.shape,
        "words": answers.words,
        "slots": options.shape_slots,
        "residents": options.shape_residents,
        "tokens": SHAPE_TOKENS,
        "max_length": MOST_PROMPT + SHAPE_TOKENS,
        "budget": max(SHAPE_BUDGET, options.shape_residents),
        "little_memory": False,
        "dtype": options.dtype,
        "eager": options.eager,
        "quick_start": options.shape_quick_start,
        "step_times": dict(zip(STEP_PARTS, options.step_times, strict=True)),
        "kv_tokens": COMPUTED_KV_TOKENS,
        "threads": 1,
    }
    with _driver(options.vllm, setup, folder, part, tree) as peer:
        version = peer.ready()
        ready_s, on = time.monotonic() - began_s, peer.ask({"task": "about"})
        described |= {
            "vllm": version,
            part: {name: setup[name] for name in ("shape", "slots", "residents", "tokens", "max_length", "budget")}
            | {"load": options.shape_load, "quick_start": options.shape_quick_start, "lengths": "drawn" if options.lengths is None else "recorded", "ready_s": round(ready_s, 1)}
            | on,
        }  # fmt: skip
        progress(f"vLLM {version} is ready after {ready_s:.0f} s: {json.dumps(described[part])}")
        plan = on_shape.Plan(
            count=options.shape_count,
            seeds=range(1, options.shape_seeds + 1),
            tokens=SHAPE_TOKENS,
            load=options.shape_load,
            slots=options.shape_slots,
            until_s=began_s + options.shape_seconds,
            measured=part,
        )
        wanted = {"on": (True,), "off": (False,), "both": (True, False)}[options.shape_async]
        ahead = [how for how in wanted if on["async"] or not how]
        yield from on_shape.measure(peer, answers, plan, ahead, folder)


def _driver(python: str, setup: dict[str, Any], folder: Path, name: str, tree: Path) -> Peer:
    """Return the driver with the code of a checkout."""
    # Without the second one, -m would look into the present folder first.
    more = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    return Peer([python, "-m", "bench._vllm.driver"], setup, folder, name, more)


if __name__ == "__main__":
    sys.exit(main())
