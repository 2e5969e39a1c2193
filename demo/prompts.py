"""Held-out prompts by kind for tests and benchmarks. Standard library only; the same seed gives the same
prompts.

Kinds that are not closed (see `tasks`) are never trained on the prompts given here.
"""

import random
from dataclasses import dataclass
from typing import Final

from demo.tasks import GENERATORS

_ATTEMPTS_PER_PROMPT: Final = 400

_PROSE_OPENINGS: Final = (
    (
        "The {} {}",
        "captain lady doctor letter king program function stranger window answer",
        "was had would did could",
    ),
    ("My {} {}", "dear friend lord sister uncle", "you I we he it"),
    ("When the {} {}", "door train storm music lesson", "stopped opened ended came began"),
    ("In the {}, {}", "morning evening garden kitchen city", "she he they we nobody"),
    ("If the {} {}", "value string list error type", "is was has does can"),
    ("I do not {} {}", "know believe understand remember like", "what how why the any"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a user would type it, without any template."""

    kind: str
    text: str
    answer: str | None = None  # the only right answer, where there is one


def _prose(rng: random.Random) -> Prompt:
    pattern, first, second = rng.choice(_PROSE_OPENINGS)
    return Prompt("prose", pattern.format(rng.choice(first.split()), rng.choice(second.split())))


def _task(kind: str, rng: random.Random) -> Prompt:
    while True:
        task = GENERATORS[kind](rng)
        if task.closed or task.held_out:
            return Prompt(kind, task.prompt, task.answer if task.exact else None)


KINDS: Final = (*GENERATORS, "prose")


def demo_prompts(kind: str | None, n: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts of one kind, or of all kinds in equal parts and in random order; no text twice if that is
    possible."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    if kind is None:
        rng = random.Random(f"demo/{seed}")
        share, rest = divmod(n, len(KINDS))
        extra = set(rng.sample(KINDS, rest))
        prompts = [prompt for each in KINDS for prompt in demo_prompts(each, share + (each in extra), seed)]
        rng.shuffle(prompts)
        return prompts
    rng = random.Random(f"demo/{seed}/{kind}")
    chosen: dict[str, Prompt] = {}
    repeated: list[Prompt] = []
    for _ in range(n * _ATTEMPTS_PER_PROMPT):
        if len(chosen) == n:
            break
        prompt = _prose(rng) if kind == "prose" else _task(kind, rng)
        if prompt.text in chosen:
            repeated.append(prompt)
        chosen.setdefault(prompt.text, prompt)
    return [*chosen.values(), *repeated[: n - len(chosen)]]
