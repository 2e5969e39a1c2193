"""Requests with lengths that a scheduler cannot see: recorded answers of models, or drawn ones.

A driver ends each request at its length (`shape_driver`); the scheduler receives the prompt, the same bound for
all, and the hints that the mode sends.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench._vllm.workload import Workload

FIRST_TOKEN = 3
"""Smaller ids are special tokens."""
LEARNING_SHARE = 3
"""One in this number of answers of each kind is for learning beforehand, and comes in no run."""
DRAWN = {"chat": (120, 0.8), "code": (240, 0.7), "short": (20, 0.6), "story": (360, 0.6)}
"""Median and σ of lognormal lengths, where none are recorded."""
DRAWN_COUNT = 4000
PROMPT_MEDIAN, PROMPT_SIGMA = 100, 1.0
_WORD = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Answer:
    """A prompt, its kind, and the tokens of its answer."""

    ids: Sequence[int]
    kind: str
    length: int


class Answers:
    """Answers of each kind, from which runs take equal parts."""

    def __init__(
        self, by_kind: Mapping[str, Sequence[Answer]], words: Mapping[str, int] | None = None
    ) -> None:
        self.words = dict(words or {})
        """The token id of each word of the prompts: what a tokenizer needs. Empty where prompts have no words."""
        self._learning: dict[str, list[Answer]] = {}
        self._runs: dict[str, list[Answer]] = {}
        for kind in sorted(by_kind):
            found = list(by_kind[kind])
            random.Random(kind).shuffle(found)
            cut = len(found) // LEARNING_SHARE
            self._learning[kind], self._runs[kind] = found[:cut], found[cut:]

    def learning(self, count: int) -> list[Answer]:
        """Return answers that come in no run, `count` at most."""
        per = -(-count // len(self._learning))
        found = [each for of_kind in self._learning.values() for each in of_kind[:per]][:count]
        random.Random("learning").shuffle(found)
        return found

    def run(self, number: int, count: int) -> list[Answer]:
        """Return the answers of a run. Runs of other numbers have other answers, as long as there are any."""
        per = -(-count // len(self._runs))
        found = []
        for of_kind in self._runs.values():
            found += [of_kind[(number * per + at) % len(of_kind)] for at in range(per)]
        random.Random(f"run/{number}").shuffle(found)
        return found[:count]


def recorded_answers(file: Path, *, vocab: int, most_prompt: int) -> Answers:
    """Return the answers of a file of rows `{source, model, prompt, output_tokens}`, JSON lines, gzip or plain.

    Of each source those of one model count: the one with the most answers, and of several the last by name.
    A token of a prompt is a word, a sign or a line break, since no tokenizer belongs to weights at random. Raises
    ValueError or OSError for a file that is none.
    """
    by_model: dict[tuple[str, str], list[Answer]] = defaultdict(list)
    words: dict[str, int] = {}
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for line in lines:
            row = json.loads(line)
            ids = token_ids(row["prompt"], vocab, words)[:most_prompt]
            if ids and row["output_tokens"] > 0:
                by_model[row["source"], row["model"]].append(Answer(ids, row["source"], row["output_tokens"]))
    counts = Counter({name: len(found) for name, found in by_model.items()})
    chosen = {
        source: max((counts[name], name[1]) for name in counts if name[0] == source)[1]
        for source in {name[0] for name in counts}
    }
    if not chosen:
        raise ValueError(f"{file} has no answers")
    return Answers({source: by_model[source, model] for source, model in chosen.items()}, words)


def drawn_answers(*, vocab: int, most_prompt: int) -> Answers:
    """Return prompts at random, which have no relation to lengths, and lognormal lengths by kind."""
    rng = random.Random("drawn")
    by_kind = {}
    for kind, (median, sigma) in DRAWN.items():
        found = []
        for _ in range(DRAWN_COUNT // len(DRAWN)):
            size = min(most_prompt, max(4, round(PROMPT_MEDIAN * rng.lognormvariate(0, PROMPT_SIGMA))))
            ids = [rng.randrange(FIRST_TOKEN, vocab) for _ in range(size)]
            found.append(Answer(ids, kind, max(1, round(median * rng.lognormvariate(0, sigma)))))
        by_kind[kind] = found
    return Answers(by_kind)


def token_ids(text: str, vocab: int, words: dict[str, int]) -> list[int]:
    """Return an id for each word, sign and line break of a text, and add new ones to `words`. Those that find no place
    in the vocabulary have the last id in common.
    """
    return [words.setdefault(word, min(FIRST_TOKEN + len(words), vocab - 1)) for word in _WORD.findall(text)]


def workload_of(answers: Sequence[Answer], seed: int) -> Workload:
    """Return the prompts and kinds of these answers."""
    return Workload(seed, [each.ids for each in answers], [each.kind for each in answers])
