"""One task, and what all generators use."""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

HELD_OUT_MODULUS: Final = 16


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and one answer to it."""

    kind: str
    prompt: str
    answer: str
    separator: str = " "  # between prompt and answer where no chat template stands between them
    exact: bool = False
    closed: bool = False

    @property
    def held_out(self) -> bool:
        """True for the prompts that training must skip: a fixed sixteenth of every kind that is not closed."""
        return not self.closed and is_held_out(self.prompt)


def is_held_out(prompt: str) -> bool:
    """True for a fixed sixteenth of all prompts."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_MODULUS == 0


Generator = Callable[[random.Random], Task]


def join(items: Sequence[object]) -> str:
    """Return the items with commas between them."""
    return ", ".join(str(item) for item in items)


def length(rng: random.Random, median: float, low: int, high: int, spread: float = 0.7) -> int:
    """A log-normal length, so that every kind has short and long answers."""
    return max(low, min(high, round(median * rng.lognormvariate(0.0, spread))))
