"""How fast is the worker's engine, compared with transformers, other engines, and itself without speculation?
`laps-sd bench engine`

One pair of models, one precision, one thread each. The workload consists of cells: prompts of all kinds in
equal parts, or of one kind alone; temperature 0 or 0.8; a number of requests at a time; each until the end
token or `--tokens`. Cells take turns, and so do the engines within a cell, peers each time in another order;
ours with and without speculation come last, in alternating slices for some seconds. CPU time is measured, so
a busy machine slows all of them alike. A speed is tokens per CPU second; ratios are paired by turn, and a
goal is met by the lower end of the interval.

Peers: transformers' `generate` one by one; its assisted generation, with a constant draft length of 4 and as
it comes; its left-padded batch of 16; its continuous batching (`generate_batch`) of 16 requests. With `--vllm
PYTHON` and `--openvino PYTHON`, interpreters that have them: vLLM eager and compiled, OpenVINO GenAI, both
without speculation and with a draft of 4, on the whole mix at temperature 0.

`--shape memory-bound` is a random pair of 287 M and 15 M weights in bfloat16, where proposals are accepted by
a random draw (`--acceptance`).
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench._generating import (
    MAX_LENGTH,
    MIXED,
    PEER_BATCH,
    RAMP,
    Cell,
    Ours,
    Outcome,
    Prompted,
    Transformers,
    in_turn,
)
from bench._peers import DRIVER, Peer, PeerFailed, convert, setups, taken
from bench.report import Interval, about, finish, numbers, progress, ratio_interval, table

GOAL_ASSISTED = 2.2
GOAL_PLAIN_AT_ONE = 1.3
GOAL_PLAIN = 0.97
GOAL_BATCH = 1.7
GOAL_VLLM = {1: 1.4, 4: 1.25, 16: 1.0, 64: 0.9}
GOAL_FORWARD = 1.1
FORWARD_BATCHES = (1, 4, 16)
CELL_S, LEAST_PASSES = 2.0, 3
"""CPU seconds that the modes of our engine take in a turn over a cell, and the least number of passes: they
are compared more closely than the peers are."""
LEAST_PROMPTS = 48
LEAST_OF_A_KIND = 32
TEMPERATURES = (0.0, 0.8)
BOTH = "both"
SPECULATIVE, PLAIN = "ours, speculative", "ours, plain"
PROMPT_TOKENS = 64  # of a random pair


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench engine", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--target", type=Path, help="directory of the target (default: the demo pair)")
    parser.add_argument("--draft", type=Path, help="directory of the draft")
    parser.add_argument("--shape", choices=["memory-bound", "tiny"], help="a random pair instead")
    parser.add_argument(
        "--acceptance", type=float, help="keep proposals with this chance (default with --shape: 0.7)"
    )
    parser.add_argument(
        "--batch", type=numbers, default=[1, 4, 16, 64], help="batch sizes (default 1,4,16,64)"
    )
    parser.add_argument(
        "--kinds", help="kinds of prompts measured alone, by commas; all (default with the demo pair) or none"
    )
    parser.add_argument("--tokens", type=int, help="tokens per request at most (default 96; with --shape 32)")
    parser.add_argument("--turns", type=int, default=5, help="turns of every cell (default 5)")
    parser.add_argument(
        "--prompts", type=int, default=0,
        help="prompts of a cell; 0: of the mix twice the batch, 48 at least, of one kind the batch, 32 at least; with --shape the batch, 4 at least",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default float32; bfloat16 with --shape memory-bound",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of an operation (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--lookup", action="store_true", help="measure drafting by look-up too")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers' own modes out")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vllm")
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="an interpreter that has openvino-genai and optimum-intel"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(argv)
    if options.shape and options.target:
        parser.error("--shape makes a pair of its own: leave --target out")
    if (options.target is None) != (options.draft is None):
        parser.error("--target and --draft go together")
    if options.turns < 2:
        parser.error("--turns must be 2 at least: one turn has no interval")
    if options.shape and options.acceptance is None:
        options.acceptance = 0.7
    options.kinds = options.kinds or ("none" if options.target else "all")
    options.tokens = options.tokens or (32 if options.shape else 96)
    options.dtype = options.dtype or ("bfloat16" if options.shape == "memory-bound" else "float32")
    return options


# -- requests -----------------------------------------------------------------------------------------------------


def cells_for(options: argparse.Namespace) -> list[Cell]:
    """Return all cells: the mix and each kind alone at every batch size, and the ramp up to the largest."""
    texts = _random_texts(options) if options.shape else _demo_texts(options)
    found = [
        _cell(kind, temperature, batch, ids)
        for batch in sorted({*options.batch, *([] if options.no_peers else [1, PEER_BATCH])})
        for kind, ids in texts(batch)
        if batch in options.batch or kind == MIXED
        for temperature in TEMPERATURES
    ]
    most = max(options.batch)
    if most > 1:
        ramp = next(ids for kind, ids in texts(most) if kind == MIXED)
        found += [_cell(RAMP, temperature, most, ramp) for temperature in TEMPERATURES]
    return found


def _cell(kind: str, temperature: float, batch: int, ids: Sequence[tuple[int, ...]]) -> Cell:
    requests = tuple(Prompted(one, temperature, number) for number, one in enumerate(ids))
    return Cell(kind, temperature, batch, requests)


def _demo_texts(
    options: argparse.Namespace,
) -> Callable[[int], Iterator[tuple[str, list[tuple[int, ...]]]]]:
    from transformers import AutoTokenizer

    from demo.prompts import KINDS, demo_prompts

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    kinds = {"all": list(KINDS), "none": []}.get(options.kinds, options.kinds.split(","))

    def texts(batch: int) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        for kind in (MIXED, *kinds):
            usual = max(LEAST_PROMPTS, 2 * batch) if kind == MIXED else max(LEAST_OF_A_KIND, batch)
            prompts = demo_prompts(None if kind == MIXED else kind, options.prompts or usual, options.seed)
            yield kind, [tuple(tokenizer(prompt.text)["input_ids"]) for prompt in prompts]

    return texts


def _random_texts(
    options: argparse.Namespace,
) -> Callable[[int], Iterator[tuple[str, list[tuple[int, ...]]]]]:
    from bench._shapes import PAIRS

    vocab = PAIRS[options.shape][0].vocab

    def texts(batch: int) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        rng = random.Random(options.seed)
        count = options.prompts or max(4, batch)
        yield MIXED, [tuple(rng.randrange(vocab) for _ in range(PROMPT_TOKENS)) for _ in range(count)]

    return texts


# -- configurations -----------------------------------------------------------------------------------------------


@dataclass
class Config:
    """One way to generate, with its outcomes: one of every turn, by cell; of our engine one of every pass."""

    name: str
    run: Callable[[Cell], Outcome | Generator[None, None, Outcome]]
    """Function that generates a cell. Modes of our engine run in slices, in turn."""
    takes: Callable[[Cell], bool]
    outcomes: dict[tuple[str, float, int], list[Outcome]] = field(default_factory=dict)

    def series(self, kind: str, temperatures: Sequence[float], batch: int) -> list[Outcome]:
        """Return all outcomes, in order, the temperatures together; an empty list if it was not measured
        there.
        """
        parts = [self.outcomes.get((kind, temperature, batch), []) for temperature in temperatures]
        return [_together(turn) for turn in zip(*parts, strict=True)] if all(parts) else []


def _together(parts: Sequence[Outcome]) -> Outcome:
    if len(parts) == 1:
        return parts[0]
    return Outcome(
        [row for part in parts for row in part.outputs],
        sum(part.tokens for part in parts),
        sum(part.cpu_s for part in parts),
        sum(part.wall_s for part in parts),
        told=_means([part.told for part in parts]),
    )


def _paired(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return the outcomes in pairs. If there are several of ours in a turn, they are joined to one and paired
    with the other's of that turn.
    """
    several = len(ours) // len(theirs)
    turns = [ours[at : at + several] for at in range(0, len(ours), several)]
    decodes = [[one.decode_s for one in turn if one.decode_s is not None] for turn in turns]
    together = [
        replace(_together(turn), decode_s=statistics.median(decode) if decode else None)
        for turn, decode in zip(turns, decodes, strict=True)
    ]
    return list(zip(together, theirs, strict=True))


def _means(told: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for one in told for name in one}
    return {name: statistics.fmean(one[name] for one in told if name in one) for name in sorted(names)}


def ours(options: argparse.Namespace) -> list[Config]:
    """Return our engine's configurations: at each batch size without speculation and with it."""
    found = []
    for batch in options.batch:
        engine = Ours(options, batch, modes=2 + options.lookup)
        for name, draft_len, drafter in (
            (PLAIN, 0, None),
            (SPECULATIVE, None, None),
            *((("ours, look-up", None, "lookup"),) if options.lookup else ()),
        ):
            run = engine.mode(name, draft_len, drafter)
            found.append(Config(name, run, _of_batch(batch)))
    return found


def _of_batch(batch: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.batch == batch


def transformers_modes(options: argparse.Namespace) -> list[Config]:
    """Return transformers' own modes. It has no synthetic acceptance: with one, assisted generation would
    have no equivalent to compare with.
    """
    peer = Transformers(options)

    def mix_of(batch: int) -> Callable[[Cell], bool]:
        return lambda cell: cell.kind == MIXED and cell.batch == batch

    return [
        Config("generate", peer.one_by_one, mix_of(1)),
        *(
            [
                Config("assisted, 4", peer.assisted(4), mix_of(1)),
                Config("assisted", peer.assisted(None), mix_of(1)),
            ]
            if options.acceptance is None
            else []
        ),
        Config("padded batch", peer.padded, mix_of(PEER_BATCH)),
        Config("generate_batch", peer.continuous, mix_of(PEER_BATCH)),
    ]


def other_engines(
    options: argparse.Namespace, cells: Sequence[Cell], folder: Path, stack: ExitStack
) -> tuple[list[Config], dict[str, str]]:
    """Return the engines in interpreters of their own, ready, and their versions. An engine that is not
    available is reported and left out.
    """
    found, versions = [], {}
    converted = False
    for python, name, setup in setups(options, cells, folder):
        try:
            if setup["engine"] == "openvino" and not converted:
                progress("converting the pair for OpenVINO")
                convert(options, setup, folder)
                converted = True
            progress(f"starting {name}")
            peer = stack.enter_context(Peer([python, str(DRIVER)], setup, folder, name))
            versions[setup["engine"]] = peer.ready()
        except (PeerFailed, OSError) as error:
            progress(f"{name} does not run here: {error}")
            continue
        found.append(Config(name, peer.run, lambda cell: taken(cell) and cell.batch in options.batch))
    return found, versions


# -- the comparison -----------------------------------------------------------------------------------------------


def measure(configs: list[Config], cells: Sequence[Cell], turns: int) -> None:
    """Run one turn that does not count, then the turns that do."""
    rng = random.Random(0)
    began = time.monotonic()
    passes: dict[tuple[str, int], int] = {}  # by kind and batch size
    for turn in range(turns + 1):
        for cell in rng.sample(list(cells), len(cells)):
            sliced: list[Config] = []
            outcomes: list[tuple[Config, Outcome]] = []
            for config in rng.sample(configs, len(configs)):
                if not config.takes(cell):
                    continue
                try:
                    run = config.run(cell)
                except Exception as error:
                    if turn:
                        raise
                    progress(f"{config.name} does not run here: {error!r:.300}")
                    configs.remove(config)
                    continue
                if isinstance(run, Outcome):
                    outcomes.append((config, run))
                else:
                    sliced.append(config)
            for _ in range(passes.get((cell.kind, cell.batch), 1) if turn else 1):
                done = in_turn(_slices(config, cell) for config in sliced)
                outcomes += zip(sliced, done, strict=True)
                if sliced and not turn:
                    needed = math.ceil(CELL_S / sum(outcome.cpu_s for outcome in done))
                    passes[cell.kind, cell.batch] = max(
                        needed, passes.get((cell.kind, cell.batch), LEAST_PASSES)
                    )
            for config, outcome in outcomes:
                if not outcome.tokens:
                    raise RuntimeError(f"{config.name} generated nothing")
                if turn:
                    config.outcomes.setdefault(cell.key, []).append(outcome)
        progress(f"turn {turn}/{turns} done after {time.monotonic() - began:.0f} s")


def _slices(config: Config, cell: Cell) -> Generator[None, None, Outcome]:
    run = config.run(cell)
    assert not isinstance(run, Outcome)
    return run


def rows_of(configs: Sequence[Config], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each configuration, mix, batch size, and temperature or both, with its ratios to its
    rivals there.
    """
    keys = {key for config in configs for key in config.outcomes}
    order = [
        (kind, temperatures, batch)
        for kind, batch in sorted({(kind, batch) for kind, _, batch in keys}, key=lambda one: (one[0] != MIXED, one))
        for temperatures in (TEMPERATURES, *((one,) for one in TEMPERATURES))
    ]  # fmt: skip
    rows = []
    for kind, temperatures, batch in order:
        here = [(config, found) for config in configs if (found := config.series(kind, temperatures, batch))]
        reference = next((found for config, found in here if config.name == PLAIN), None)
        for config, found in here:
            row: dict[str, Any] = {
                "config": config.name,
                "kind": kind,
                "temperature": BOTH if len(temperatures) > 1 else temperatures[0],
                "batch": batch,
                "tokens_per_cpu_s": statistics.median(_speed(one) for one in found),
                "tokens_per_s": statistics.median(one.tokens / one.wall_s for one in found),
                "decode_ms": None,
                "identical": None,
            }
            if found[0].decode_s is not None:
                row["decode_ms"] = 1000 * statistics.median(one.decode_s or math.nan for one in found)
            if reference is not None and (temperatures == (0.0,) or config.name.startswith("ours")):
                row["identical"] = identical(found[0].outputs, reference[0].outputs)
            for label, rivals in RIVALS.items():
                ratio = None
                others = [(other, series) for other, series in here if other.name.startswith(rivals)]
                if config.name.startswith("ours") and others and not config.name.startswith(rivals):
                    _, best = max(others, key=lambda one: statistics.median(_speed(turn) for turn in one[1]))
                    ratio = ratio_interval(
                        [(_speed(one), _speed(other)) for one, other in _paired(found, best)]
                    )
                _put(row, f"ratio_{label}", ratio)
            _put(row, "forward", _forward(config, found, here))
            rows.append({**row, **_means([one.told for one in found]), "seeds": options.turns})
    return rows


RIVALS: dict[str, tuple[str, ...]] = {
    "plain": (PLAIN,),
    "assisted": ("assisted",),
    "peer_batch": ("padded batch", "generate_batch"),
    "vllm": ("vllm",),
    "openvino": ("openvino",),
}
"""Prefixes of the rivals' names, by label; the best of them is the rival."""


def _speed(outcome: Outcome) -> float:
    return outcome.tokens / outcome.cpu_s


def _forward(
    config: Config, found: Sequence[Outcome], here: Sequence[tuple[Config, list[Outcome]]]
) -> Interval | None:
    """Return the ratio of a plain decoding round of ours to vLLM's shortest."""
    others = [
        series
        for other, series in here
        if other.name.startswith("vllm") and other.name.endswith("plain") and series[0].decode_s is not None
    ]
    if config.name != PLAIN or not others or any(one.decode_s is None for one in found):
        return None
    best = min(others, key=lambda series: statistics.median(one.decode_s or math.inf for one in series))
    return ratio_interval(
        [(one.decode_s or math.nan, other.decode_s or math.nan) for one, other in _paired(found, best)]
    )


def _put(row: dict[str, Any], name: str, interval: Interval | None) -> None:
    row[name] = None if interval is None else interval.middle
    row[f"{name}_low"] = None if interval is None else interval.low
    row[f"{name}_high"] = None if interval is None else interval.high


def identical(outputs: Sequence[list[int]], reference: Sequence[list[int]]) -> float:
    """Return the share of the requests whose output tokens are the same."""
    return statistics.fmean(one == other for one, other in zip(outputs, reference, strict=True))


@dataclass(frozen=True)
class Goal:
    """Result of a row for one goal."""

    text: str
    met: bool
    chief: bool  # of the whole mix; the others are reported only where they are missed


def goals(
    rows: Sequence[Mapping[str, Any]], *, memory_bound: bool = False, exact: bool = False
) -> list[Goal]:
    """Return all goals that these rows can judge. With `exact`, one of them is the same text with and without
    speculation.
    """
    found = []
    for row in rows:
        at = f"batch {row['batch']}"
        whole = row["kind"] == MIXED and row["temperature"] == BOTH
        if not whole:
            at = f"{row['kind']} at temperature {row['temperature']}, {at}"
        least: dict[str, float] = {}
        if row["config"] == SPECULATIVE:
            at_one = whole and row["batch"] == 1 and not memory_bound
            least["ratio_plain"] = GOAL_PLAIN_AT_ONE if at_one else GOAL_PLAIN
            if not memory_bound:
                least |= {"ratio_assisted": GOAL_ASSISTED, "ratio_peer_batch": GOAL_BATCH} if whole else {}
                least |= {"ratio_vllm": GOAL_VLLM[row["batch"]]} if row["batch"] in GOAL_VLLM else {}
            if exact and row["identical"] is not None and row["temperature"] != BOTH:
                text = f"{at}: {row['identical']:.3f} of the texts are as without speculation"
                found.append(Goal(text, row["identical"] == 1, False))
        for name, goal in least.items():
            if row.get(name) is not None:
                text = f"{at}: {told_ratio(row, name)} of {name[6:].replace('_', ' ')} (goal {goal})"
                found.append(Goal(text, row[f"{name}_low"] >= goal, whole or name == "ratio_vllm"))
        if memory_bound and row.get("forward") is not None and row["batch"] in FORWARD_BATCHES:
            text = f"{at}: a forward takes {told_ratio(row, 'forward')} of vllm's (goal {GOAL_FORWARD})"
            found.append(Goal(text, row["forward_high"] <= GOAL_FORWARD, True))
    return found


def told_ratio(row: Mapping[str, Any], name: str) -> str:
    """Return a ratio of a row, with its interval, as text."""
    return f"{row[name]:.2f} [{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]"


def verdict(found: Sequence[Goal]) -> tuple[bool, str]:
    """Return whether all goals are met, and the sentence for the summary line."""
    others = [goal for goal in found if not goal.chief]
    told = [goal.text + ("" if goal.met else " MISSED") for goal in found if goal.chief]
    if others:
        told.append(f"{sum(goal.met for goal in others)} of {len(others)} others")
    return bool(found) and all(goal.met for goal in found), "; ".join(told)


def tables(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print one table of the whole mix, with all rivals, and one of each kind alone."""

    def ratio(row: dict[str, Any], name: str) -> str:
        return "" if row[name] is None else told_ratio(row, name)

    threads = f"{options.threads} thread{'s'[: options.threads > 1]}"
    labels = [label for label in RIVALS if any(row[f"ratio_{label}"] is not None for row in rows)]
    table(
        f"engine, {options.dtype}, {threads}, tokens per CPU second",
        [
            {
                "config": row["config"],
                "batch": row["batch"],
                "temperature": str(row["temperature"]),
                "tokens/s": row["tokens_per_cpu_s"],
                "ms/round": "" if row["decode_ms"] is None else f"{row['decode_ms']:.3g}",
                "identical": "" if row["identical"] is None else f"{row['identical']:.3f}",
                **{label.replace("_", " "): ratio(row, f"ratio_{label}") for label in labels},
                "draft": f"{row['draft_len']:.2f}" if "draft_len" in row else "",
                "accepted": f"{row['accepted_of_tested']:.2f}" if row.get("draft_len") else "",
            }
            for row in rows
            if row["kind"] == MIXED and (row["temperature"] in (BOTH, 0.0))
        ],
        width=160,
    )
    alone = [
        row
        for row in rows
        if row["kind"] != MIXED and row["config"].startswith("ours") and row["config"] != PLAIN
    ]
    if alone:
        batches = sorted({row["batch"] for row in alone})
        by_batch = {(row["config"], row["kind"], row["temperature"], row["batch"]): row for row in alone}
        table(
            "each kind alone, and all kinds with rising and falling numbers of requests: ratio to our own plain decoding",
            [
                {
                    "config": config,
                    "kind": kind,
                    "temperature": str(temperature),
                    **{
                        f"batch {batch}": ratio(found, "ratio_plain")
                        if (found := by_batch.get((config, kind, temperature, batch))) is not None
                        else ""
                        for batch in batches
                    },
                }
                for config, kind, temperature in dict.fromkeys(
                    (row["config"], row["kind"], row["temperature"]) for row in alone
                )
                if temperature != BOTH
            ],
            width=160,
        )
    for row in rows:
        if row["config"] == SPECULATIVE and row["temperature"] == BOTH and "draft_len_top" in row:
            told = [f"{row[name]:.2f} {words}" for name, words in (
                ("draft_len_rising", "with few requests"), ("draft_len_top", f"with {row['batch']}"),
                ("draft_len_falling", "with few again")) if name in row]  # fmt: skip
            print("draft length on the ramp: " + ", ".join(told))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    from transformers.utils import logging as transformers_logging

    from worker_svc.engine.models.load import end_of_sequence_ids
    from worker_svc.loading import DEMO

    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="laps-sd-engine-") as name, ExitStack() as stack:
        folder = Path(name)
        if options.shape:
            from bench._shapes import write_pair

            options.target, options.draft = write_pair(
                options.shape, folder, dtype=options.dtype, seed=options.seed, max_length=MAX_LENGTH
            )
        elif options.target is None:
            options.target, options.draft = DEMO / "target", DEMO / "draft"
        options.ends = _ends(options.target, end_of_sequence_ids)
        cells = cells_for(options)
        others, versions = other_engines(options, cells, folder, stack)
        configs = [*ours(options), *([] if options.no_peers else transformers_modes(options)), *others]
        described = {
            **about("engine", public(sys.argv[1:] if argv is None else argv)),
            "pair": options.shape or ("demo" if options.target == DEMO / "target" else "own"),
            "acceptance": options.acceptance,
            "threads": options.threads,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "turns": options.turns,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            **versions,
        }
        measure(configs, cells, options.turns)
    rows = rows_of(configs, options)
    tables(rows, options)
    memory_bound = options.shape is not None
    exact = options.dtype == "float32" and options.acceptance is None
    judged = goals(rows, memory_bound=memory_bound, exact=exact)
    for goal in judged:
        if not goal.met and not goal.chief:
            print(f"missed: {goal.text}")
    met, summary = verdict(judged)
    return finish(rows, json_file=options.json, summary=summary, met=met, about=described)


def public(given: Sequence[str]) -> list[str]:
    """Return the given options without the paths of interpreters on this machine."""
    hidden = list(given)
    for at, option in enumerate(given):
        name, equals, _ = option.partition("=")
        if name in ("--vllm", "--openvino"):
            if equals:
                hidden[at] = f"{name}=PYTHON"
            elif at + 1 < len(given):
                hidden[at + 1] = "PYTHON"
    return hidden


def _ends(target: Path, read: Callable[[Any], frozenset[int]]) -> frozenset[int]:
    """Return the end tokens of a model directory, as the engine takes them."""
    from types import SimpleNamespace

    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(target)
    try:
        generation = GenerationConfig.from_pretrained(target)
    except OSError:
        generation = None
    return read(SimpleNamespace(config=config, generation_config=generation))


if __name__ == "__main__":
    sys.exit(main())
