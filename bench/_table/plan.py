"""The plan of the table: models, engines in each precision, and the sessions in which they take turns."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OURS = "ours"
PREFILL = "prefill"
LONG_PROMPT_TOKENS = 1000
MAX_LENGTH = 1024
PRECISIONS: dict[str, dict[str, str]] = {
    "float32": {"openvino": "f32", "vllm": "float32", "llamacpp": "f32"},
    "bfloat16": {"openvino": "bf16", "vllm": "bfloat16", "llamacpp": "bf16"},
    "int8": {"openvino": "int8", "llamacpp": "q8_0"},
    "int4": {"openvino": "int4", "llamacpp": "q4_0"},
}
"""The peers of our engine by precision of the weights, and their names for it."""
QUANTIZED = ("int8", "int4")
NAMES = {OURS: "ours", "openvino": "OpenVINO", "vllm": "vLLM", "llamacpp": "llama.cpp"}
BY_THREADS = "threads"
"""The comparison of our engine with itself on one thread."""


@dataclass(frozen=True)
class Model:
    """A model of the table. The numbers keep a turn below about a second."""

    name: str
    steps: int  # decoding steps of a turn
    prompt_tokens: int | None  # of a request that decodes; None: as the demo's prompts are
    # Whether requests restart in each turn. Of a large model their prompts would take most of the time.
    restarts: bool

    def generated_tokens(self, turns: int) -> int:
        """Return the output tokens of a request that are measured or warm the engine up."""
        return self.steps * (1 if self.restarts else turns + 1)

    def prefills(self, turns: int) -> int:
        """Return the turns of the long prompt, which takes longest with a large model."""
        return turns if self.restarts else max(2, turns * 2 // 3)


MODELS = {one.name: one for one in (Model("demo", 192, None, True), Model("qwen2.5-0.5b", 8, 16, False))}


@dataclass(frozen=True)
class Entry:
    """An engine in one precision, on a number of threads."""

    engine: str
    precision: str
    threads: int

    @property
    def label(self) -> str:
        """Return the name of the precision in this engine."""
        return self.precision if self.engine == OURS else PRECISIONS[self.precision][self.engine]

    def __str__(self) -> str:
        return f"{NAMES[self.engine]} {self.label}"


@dataclass(frozen=True)
class Session:
    """Engines that are loaded together and take turns."""

    model: Model
    comparison: str  # a precision, or BY_THREADS
    threads: int  # of all of them; of BY_THREADS the largest
    entries: tuple[Entry, ...]
    tasks: tuple[int | str, ...]  # batch sizes, and PREFILL

    @property
    def reference(self) -> Entry:
        """Return the entry that the others are compared with: ours, or ours on one thread."""
        return self.entries[0]

    @property
    def by_wall_clock(self) -> bool:
        """Return whether speeds are by wall clock: of several threads, CPU time counts all of them."""
        return self.threads > 1

    def __str__(self) -> str:
        if self.comparison == BY_THREADS:
            return f"{self.model.name}, ours on {', '.join(str(one.threads) for one in self.entries)} threads"
        return f"{self.model.name}, {self.comparison}, {threads_in_words(self.threads)}"


def threads_in_words(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def sessions(options: argparse.Namespace) -> list[Session]:
    """Return all sessions of the options, the chief ones first: bfloat16 before what is quantized."""
    tasks: tuple[int | str, ...] = (*options.batch, PREFILL)
    found = [
        Session(MODELS[model], precision, threads, _entries(precision, threads, options.no_peers), tasks)
        for precision in options.precisions
        for model in options.models
        for threads in options.threads
    ]
    if len(options.threads) > 1:
        precision = "bfloat16" if "bfloat16" in options.precisions else options.precisions[0]
        several = tuple(Entry(OURS, precision, threads) for threads in sorted({1, *options.threads}))
        found += [
            Session(MODELS[model], BY_THREADS, several[-1].threads, several, tasks)
            for model in options.models
        ]
    return list(_only(found, options.only))


def _entries(precision: str, threads: int, no_peers: bool) -> tuple[Entry, ...]:
    """Return our engine first. In a quantized precision also in bfloat16: what is gained by it."""
    engines = [OURS, *([] if no_peers else PRECISIONS[precision])]
    found = [Entry(engine, precision, threads) for engine in engines]
    if precision in QUANTIZED:
        found.append(Entry(OURS, "bfloat16", threads))
    return tuple(found)


ONLY = ("model", "precision", "threads", "batch", "engine")


def read_only(text: str) -> dict[str, set[str]]:
    """Return the accepted values by name of `model=demo,batch=16+prefill`. Raise ValueError for another name."""
    found = {}
    for part in text.split(","):
        name, _, values = part.partition("=")
        if name not in ONLY or not values:
            raise ValueError(f"{part!r} is none of {', '.join(f'{one}=VALUE' for one in ONLY)}")
        found[name] = set(values.split("+"))
    return found


def _only(found: Sequence[Session], chosen: dict[str, set[str]]) -> Iterator[Session]:
    """Yield the sessions with what was chosen; our engine stays for the ratios."""

    def wanted(name: str, value: object) -> bool:
        return name not in chosen or str(value) in chosen[name]

    for one in found:
        entries = tuple(
            entry for entry in one.entries if entry == one.reference or wanted("engine", entry.engine)
        )
        tasks = tuple(task for task in one.tasks if wanted("batch", task))
        if (
            tasks
            and wanted("model", one.model.name)
            and wanted("precision", one.comparison)
            and wanted("threads", one.threads)
            and (len(entries) > 1 or len(one.entries) == 1 or wanted("engine", OURS))
        ):
            yield Session(one.model, one.comparison, one.threads, entries, tasks)


def usable_threads() -> int:
    """Return the number of threads that this process may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
