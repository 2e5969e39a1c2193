"""How fast is the worker's engine, beside transformers and beside itself without speculation? `laps-sd bench engine`

One process, one thread, one pair of models, one precision. Every configuration generates from the same prompts (equal parts of each
kind the demo pair knows, half of them at temperature 0, half at 0.8, until the end token or `--tokens`). They take turns, each time in
another order, and what is counted is CPU time of the process: so a busy machine slows all of them alike. A speed is tokens per CPU second;
ratios are paired by turn.

Peers: transformers' `generate` one by one; its assisted generation, with a constant draft length of 4 and as it comes; its left-padded batch of
16; its continuous batching (`generate_batch`) with 16 requests.

Goals: at batch 1 with speculation 2.2 times the faster assisted generation and 1.3 times our own plain decoding; at no batch size less
than 0.97 of our own plain decoding; at batch 16 1.7 times the faster of transformers' batch modes.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.report import finish, progress, ratio_interval, table

GOAL_ASSISTED = 2.2
GOAL_PLAIN_AT_ONE = 1.3
GOAL_PLAIN = 0.97
GOAL_BATCH = 1.7
PEER_BATCH = 16
LEAST_PROMPTS = 16
TEMPERATURES = (0.0, 0.8)
MAX_LENGTH = 512


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(
        prog="laps-sd bench engine", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--target", type=Path, help="directory of the target (default: the demo pair)")
    parser.add_argument("--draft", type=Path, help="directory of the draft")
    parser.add_argument(
        "--batch", type=numbers, default=[1, 4, 16, 64], help="batch sizes (default 1,4,16,64)"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens per request at most (default 96)")
    parser.add_argument("--turns", type=int, default=5, help="turns of every configuration (default 5)")
    parser.add_argument(
        "--prompts", type=int, default=0, help="prompts per temperature; 0: twice the batch, 16 at least"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="threads of an operation (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--lookup", action="store_true", help="measure drafting by look-up too")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers' own modes out")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


@dataclass(frozen=True)
class Prompted:
    """One request: token ids of its prompt, temperature, and a number that seeds it."""

    ids: tuple[int, ...]
    temperature: float
    number: int


@dataclass
class Config:
    """One way to generate. `run` takes requests of one temperature and returns the number of output tokens."""

    name: str
    batch: int
    run: Callable[[list[Prompted]], int]
    prompts: list[Prompted]
    told: Callable[[], dict[str, float]] = dict
    tokens_per_s: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Generate everything once."""
        tokens, seconds = 0, 0.0
        for temperature in TEMPERATURES:
            chosen = [prompt for prompt in self.prompts if prompt.temperature == temperature]
            began = time.process_time()
            tokens += self.run(chosen)
            seconds += time.process_time() - began
        if not tokens:
            raise RuntimeError("it generated nothing")
        self.tokens_per_s.append(tokens / seconds)


def prompts_for(tokenizer: Any, count: int, seed: int) -> list[Prompted]:
    """`count` prompts for each temperature, the same ones for both."""
    from worker_svc.demo.prompts import demo_prompts

    texts = [prompt.text for prompt in demo_prompts(None, count, seed)]
    return [
        Prompted(tuple(tokenizer(text)["input_ids"]), temperature, number)
        for temperature in TEMPERATURES
        for number, text in enumerate(texts)
    ]


# -- ours ---------------------------------------------------------------------------------------------------------


class Ours:
    """Our engine at one batch size."""

    def __init__(
        self, options: argparse.Namespace, batch: int, draft_len: Any, drafter: Any = "auto"
    ) -> None:
        from worker_svc.engine.engine import load_engine

        self._engine = load_engine(
            options.target,
            options.draft,
            dtype=options.dtype,
            slots=batch,
            max_length=MAX_LENGTH,
            draft_len=draft_len,
            drafter=drafter,
        )
        self._tokens = options.tokens
        self._drafted = self._accepted = self._rounds = 0
        self._tested = [0] * 16
        self._kept = [0] * 16

    def run(self, requests: list[Prompted]) -> int:
        """First come, first served, as a worker alone would."""
        from worker_svc.engine.interface import Sampling, Specification

        engine, tokens = self._engine, 0
        waiting = [
            Specification(
                str(one.number), one.ids, (), Sampling(one.temperature, seed=one.number), self._tokens
            )
            for one in requests
        ]
        waiting.reverse()
        running: list[str] = []
        while waiting or running:
            while waiting and len(running) < engine.capacity.slots:
                spec = waiting.pop()
                engine.add(spec)
                running.append(spec.request_id)
            for step in engine.round(running).requests:
                tokens += len(step.tokens)
                self._count(step)
                if step.finish is not None:
                    running.remove(step.request_id)
                    engine.drop(step.request_id)
        return tokens

    def _count(self, step: Any) -> None:
        self._rounds += bool(step.tokens)
        self._drafted += step.drafted
        self._accepted += step.accepted
        for at, (tested, kept) in enumerate(
            zip(step.tested_by_position[:16], step.accepted_by_position[:16], strict=True)
        ):
            self._tested[at] += tested
            self._kept[at] += kept

    def told(self) -> dict[str, float]:
        """What speculation did so far."""
        return {
            "draft_len": self._drafted / max(1, self._rounds),
            "accepted_of_tested": sum(self._kept) / max(1, sum(self._tested)),
            "accepted_at_1": self._kept[0] / max(1, self._tested[0]),
            "accepted_at_4": self._kept[3] / max(1, self._tested[3]),
        }


# -- transformers -------------------------------------------------------------------------------------------------


class Transformers:
    """transformers on the same weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        dtype = getattr(torch, options.dtype)
        self._target = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()
        self._draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=dtype).eval()
        self._tokens = options.tokens
        ends = self._target.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    def _settings(self, temperature: float) -> dict[str, Any]:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return {
            "max_new_tokens": self._tokens,
            "pad_token_id": min(self._ends),
            **(sampled if temperature else {"do_sample": False}),
        }

    def one_by_one(self, requests: list[Prompted]) -> int:
        """`generate`, batch 1."""
        return sum(self._generate([one]) for one in requests)

    def padded(self, requests: list[Prompted]) -> int:
        """`generate` of a left-padded batch, which runs until its longest ends."""
        return sum(
            self._generate(requests[at : at + PEER_BATCH]) for at in range(0, len(requests), PEER_BATCH)
        )

    def assisted(self, length: int | None) -> Callable[[list[Prompted]], int]:
        """Assisted generation with a constant draft length, or as it comes."""
        draft = copy.deepcopy(self._draft)
        if length is not None:
            draft.generation_config.num_assistant_tokens = length
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
        return lambda requests: sum(self._generate([one], assistant_model=draft) for one in requests)

    def _generate(self, requests: list[Prompted], **more: Any) -> int:
        torch = self._torch
        torch.manual_seed(requests[0].number)
        width = max(len(one.ids) for one in requests)
        pad = min(self._ends)
        ids = torch.tensor([[pad] * (width - len(one.ids)) + list(one.ids) for one in requests])
        mask = torch.tensor([[0] * (width - len(one.ids)) + [1] * len(one.ids) for one in requests])
        with torch.inference_mode():
            out = self._target.generate(
                ids, attention_mask=mask, **self._settings(requests[0].temperature), **more
            )
        return sum(self._length(row) for row in out[:, width:].tolist())

    def _length(self, row: list[int]) -> int:
        """Tokens up to the end token; what pads the batch behind it is nobody's."""
        return next((at + 1 for at, token in enumerate(row) if token in self._ends), len(row))

    def continuous(self, requests: list[Prompted]) -> int:
        """`generate_batch`, 16 requests at most together."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        settings = GenerationConfig(
            **self._settings(requests[0].temperature), eos_token_id=sorted(self._ends)
        )
        tokens = 0
        for at in range(0, len(requests), PEER_BATCH):
            part = requests[at : at + PEER_BATCH]
            with (
                self._torch.no_grad()
            ):  # it computes in a thread of its own, where inference mode does not reach
                done = self._target.generate_batch(
                    [list(one.ids) for one in part],
                    generation_config=settings,
                    continuous_batching_config=ContinuousBatchingConfig(
                        page_size=32, num_blocks=PEER_BATCH * MAX_LENGTH // 32, max_batch_tokens=512
                    ),
                    progress_bar=False,
                )
            tokens += sum(len(one.generated_tokens) for one in done.values())
        return tokens


# -- the comparison -----------------------------------------------------------------------------------------------


def configurations(options: argparse.Namespace) -> list[Config]:
    """Everything that takes turns."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = {
        batch: prompts_for(tokenizer, options.prompts or max(LEAST_PROMPTS, 2 * batch), options.seed)
        for batch in {*options.batch, 1, PEER_BATCH}
    }
    found = []
    for batch in options.batch:
        for name, draft_len, drafter in (
            ("plain", 0, "auto"),
            ("speculative", "auto", "auto"),
            *((("lookup", "auto", "lookup"),) if options.lookup else ()),
        ):
            ours = Ours(options, batch, draft_len, drafter)
            found.append(Config(f"ours, {name}", batch, ours.run, prompts[batch], ours.told))
    if not options.no_peers:
        peer = Transformers(options)
        found += [
            Config("generate", 1, peer.one_by_one, prompts[1]),
            Config("assisted, 4", 1, peer.assisted(4), prompts[1]),
            Config("assisted", 1, peer.assisted(None), prompts[1]),
            Config("padded batch", PEER_BATCH, peer.padded, prompts[PEER_BATCH]),
            Config("generate_batch", PEER_BATCH, peer.continuous, prompts[PEER_BATCH]),
        ]
    return found


def measure(configs: list[Config], turns: int) -> None:
    """One turn that does not count, then the turns that do."""
    order = list(configs)
    rng = random.Random(0)
    for turn in range(turns + 1):
        rng.shuffle(order)
        for config in list(order):
            began = time.monotonic()
            try:
                config.turn()
            except Exception as error:
                if turn or config.name.startswith("ours"):
                    raise
                progress(f"{config.name} at batch {config.batch} does not run here: {error!r:.300}")
                configs.remove(config)
                order.remove(config)
                continue
            if turn == 0:
                config.tokens_per_s.clear()
            progress(
                f"turn {turn}/{turns}: {config.name} at batch {config.batch} took {time.monotonic() - began:.1f} s"
                + (f", {config.tokens_per_s[-1]:.0f} tokens per CPU second" if turn else "")
            )


def rows_of(configs: list[Config], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each configuration, with its ratio to our own plain decoding at that batch size and to the best peer there."""
    rows = []
    for config in configs:
        row: dict[str, Any] = {
            "config": config.name,
            "batch": config.batch,
            "tokens_per_cpu_s": statistics.median(config.tokens_per_s),
        }
        for label, other in (
            ("plain", _named(configs, "ours, plain", config.batch)),
            ("assisted", _best(configs, ("assisted, 4", "assisted"), config.batch)),
            ("peer_batch", _best(configs, ("padded batch", "generate_batch"), config.batch)),
        ):
            ratio = None
            if other is not None and other is not config and config.name.startswith("ours"):
                ratio = ratio_interval(list(zip(config.tokens_per_s, other.tokens_per_s, strict=True)))
            row[f"ratio_{label}"] = None if ratio is None else ratio.middle
            row[f"ratio_{label}_low"] = None if ratio is None else ratio.low
            row[f"ratio_{label}_high"] = None if ratio is None else ratio.high
        rows.append({**row, **config.told(), "seeds": options.turns})
    return rows


def _named(configs: list[Config], name: str, batch: int) -> Config | None:
    return next((one for one in configs if one.name == name and one.batch == batch), None)


def _best(configs: list[Config], names: tuple[str, ...], batch: int) -> Config | None:
    found = [one for one in configs if one.name in names and one.batch == batch]
    return max(found, key=lambda one: statistics.median(one.tokens_per_s), default=None)


def verdict(rows: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether all goals are met that these rows can judge, and the sentence that says so."""
    told, met = [], True
    for row in rows:
        if row["config"] != "ours, speculative":
            continue
        for label, goal in (
            ("assisted", GOAL_ASSISTED),
            ("plain", GOAL_PLAIN_AT_ONE if row["batch"] == 1 else GOAL_PLAIN),
            ("peer_batch", GOAL_BATCH),
        ):
            value = row[f"ratio_{label}"]
            if value is not None:
                told.append(f"batch {row['batch']} {value:.2f} of {label.replace('_', ' ')} (goal {goal})")
                met = met and value >= goal
    return met, "; ".join(told)


def main() -> int:
    options = arguments()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    from transformers.utils import logging as transformers_logging

    from worker_svc.loading import DEMO

    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.target is None:
        options.target, options.draft = DEMO / "target", DEMO / "draft"
    if options.draft is None:
        raise SystemExit("--target needs --draft")
    configs = configurations(options)
    measure(configs, options.turns)
    rows = rows_of(configs, options)
    table(
        f"engine, {options.dtype}, {options.threads} thread, tokens per CPU second",
        [
            {
                "config": row["config"],
                "batch": row["batch"],
                "tokens/s": row["tokens_per_cpu_s"],
                **{
                    label.replace("_", " "): "" if row[f"ratio_{label}"] is None
                    else f"{row[f'ratio_{label}']:.2f} [{row[f'ratio_{label}_low']:.2f}, {row[f'ratio_{label}_high']:.2f}]"
                    for label in ("plain", "assisted", "peer_batch")
                },
                "draft": f"{row['draft_len']:.1f}" if "draft_len" in row else "",
                "accepted": f"{row['accepted_of_tested']:.2f}" if row.get("draft_len") else "",
            }
            for row in rows
        ],
    )  # fmt: skip
    met, summary = verdict(rows)
    about = {
        "threads": options.threads,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "turns": options.turns,
        "torch": torch.__version__,
    }
    return finish(rows, json_file=options.json, summary=summary, met=met, about=about)


if __name__ == "__main__":
    sys.exit(main())
