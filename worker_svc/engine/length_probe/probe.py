"""The probe of one engine: when it looks at a request, what it predicts, and how it learns from the end.

    after the prompt, every 64 output tokens,       look: keep the features, predict
    and past the total that was predicted last      (less often where predictions are not good)
    the request ends by itself                      learn the true remainder of each kept look
    it is cut at max_tokens                         learn that each remainder was larger

Looks after the prompt and looks at output are learnt apart: hidden states of the two have little in common, and
one regression for both had an error larger by 8 % on the demo pair.

Requests that are cut at max_tokens are learnt from as far as they are known (`regression`). Left out, long outputs
would be missing: with 60 % of the requests cut at 100 tokens the error was larger by 12 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from laps_sd.contract.length_probe import MAX_COUNT, LearntProbe, ProbeKind, problem_with
from worker_svc.engine.length_probe.errors import StageErrors, stage_of
from worker_svc.engine.length_probe.features import (
    COUNT,
    DIMS,
    SCALARS,
    SEED,
    Features,
    Projection,
    scalars_of,
)
from worker_svc.engine.length_probe.regression import LARGEST, Regression

EVERY_TOKENS = 64
"""Output tokens from one look to the next (our choice)."""
LEAST_TOKENS = 16
"""The same after a prediction that was overrun at once (our choice)."""
STUDIED = 4
"""One request of this many is looked at as often in any case, the others only where predictions are good (our
choice): elsewhere a look serves learning alone."""
FIRST_STUDIED = 100
"""Requests at the start that are all looked at as often (our choice)."""
NEVER = 2**62
LARGEST_PACKED = 65504.0
"""Largest number that float16 holds."""
MOST_KEPT = 32
"""Looks kept of a request, at most (our choice); beyond it every second one is dropped."""
LEAST_REQUESTS = 30
"""Requests to learn from before any prediction is given (our choice)."""
PROJECTED_TOGETHER = 16
"""Hidden states that are projected together (our choice): a call of numpy costs more than its arithmetic."""
FEWEST_TOGETHER, MOST_TOGETHER, SHARE_TOGETHER = 8, 100, 1 / 8
"""Requests that are learnt from together: this share of all so far, within these bounds (our choice). A solution
takes as long as learning from ten requests, and changes little where few of many are new."""
FORGOTTEN_SHARE = 1 / 4000
"""Share of what was learnt that a request replaces (our choice)."""


@dataclass(slots=True)
class Look:
    """What was seen of a request at one moment."""

    prompt_tokens: int
    output_tokens: int
    # Hidden state [hidden]; features [COUNT] once they are computed from it.
    row: Features
    # Prediction of ln(remaining tokens), if there was one.
    predicted: float | None


@dataclass(slots=True)
class Watched:
    """A request that the probe watches."""

    prompt_tokens: int
    # Output tokens at which the next look is due.
    due: int = 0
    looks: list[Look] = field(default_factory=list)
    # It is looked at even where predictions are not good.
    studied: bool = True


# Features of a look at a request that has ended, ln(tokens that remained) or of those up to its cut, and
# whether it was cut.
_Lesson = tuple[Features, float, bool]


@dataclass(slots=True)
class _Reader:
    """The weights of a regression, in the form that predicts from a hidden state."""

    scalars: tuple[float, float, float]
    hidden: Features

    def read(self, hidden: Features, prompt_tokens: int, output_tokens: int) -> float:
        """Return the prediction, 0 to LARGEST; NaN if the hidden state is not finite."""
        found = float(hidden.dot(self.hidden))
        for weight, scalar in zip(self.scalars, scalars_of(prompt_tokens, output_tokens), strict=True):
            found += weight * scalar
        return max(0.0, min(LARGEST, found)) if math.isfinite(found) else math.nan


class LengthProbe:
    """Predicts the output tokens that remain; see the module's docstring."""

    def __init__(self, model: str, layer: int, hidden: int) -> None:
        """`model` identifies the weights, `layer` is the number of decoder layers before the hidden state, and
        `hidden` the size of that."""
        self.kind = ProbeKind(model, layer, SEED, DIMS)
        self.requests = 0
        """Requests that it, or the probe that it continues, has learnt from."""
        self.errors = StageErrors()
        self._projection = Projection(hidden)
        self._after_prompt, self._in_output = Regression(COUNT), Regression(COUNT)
        self._readers: list[_Reader | None] = [None, None]
        self._unprojected: list[Look] = []
        # Looks of each request that has ended and is not learnt from yet, its output tokens, and whether it
        # was cut. They are learnt from together: after a forward, code that runs for one request alone takes
        # several times as long.
        self._ended: list[tuple[list[Look], int, bool]] = []
        self._watched = 0

    def watch(self, prompt_tokens: int) -> Watched:
        """Return a new request to look at, whose prompt has one token at least."""
        self._watched += 1
        studied = self.requests < FIRST_STUDIED or self._watched % STUDIED == 0
        return Watched(prompt_tokens, studied=studied)

    def look(self, watched: Watched, output_tokens: int, hidden: Features) -> float | None:
        """Look at a request by the hidden state [hidden] of its last position, before `output_tokens` becomes more.

        Returns the output tokens that remain, at least 1; None as long as predictions are no better than a constant.
        """
        watched.due = output_tokens + EVERY_TOKENS
        if not watched.studied and not self.errors.good(stage_of(watched.due)):
            watched.due = NEVER
        predicted = None
        reader = self._readers[output_tokens > 0]
        if reader is not None:
            predicted = reader.read(hidden, watched.prompt_tokens, output_tokens)
        if not math.isfinite(float(hidden.dot(hidden)) if predicted is None else predicted):
            return None
        look = Look(watched.prompt_tokens, output_tokens, hidden, predicted)
        watched.looks.append(look)
        self._unprojected.append(look)
        if len(self._unprojected) >= PROJECTED_TOGETHER:
            self._project()
        if len(watched.looks) > MOST_KEPT:
            del watched.looks[1::2]
        if (
            predicted is None
            or self.requests < LEAST_REQUESTS
            or not self.errors.good(stage_of(output_tokens))
        ):
            return None
        remaining = math.exp(predicted)
        overrun = output_tokens + max(LEAST_TOKENS, int(remaining))
        if watched.studied or self.errors.good(stage_of(overrun)):
            watched.due = min(watched.due, overrun)
        return remaining

    def learn(self, watched: Watched, output_tokens: int, *, cut: bool) -> None:
        """Learn from the end of a request after `output_tokens`; `cut`: it would have become longer."""
        looks, watched.looks = watched.looks, []
        if not looks or looks[0].output_tokens >= output_tokens:
            return
        self._ended.append((looks, output_tokens, cut))
        self.requests = min(MAX_COUNT, self.requests + 1)
        if len(self._ended) >= min(MOST_TOGETHER, max(FEWEST_TOGETHER, self.requests * SHARE_TOGETHER)):
            self._take_in()

    def _project(self) -> None:
        """Compute the features of the looks that have none."""
        looks, self._unprojected = self._unprojected, []
        if not looks:
            return
        scalars = np.array([scalars_of(look.prompt_tokens, look.output_tokens) for look in looks], np.float32)
        rows = self._projection.features(np.stack([look.row for look in looks]), scalars)
        for look, row in zip(looks, rows, strict=True):
            look.row = row.copy()

    def _take_in(self) -> None:
        """Learn from the requests that have ended."""
        self._project()
        lessons: tuple[list[_Lesson], list[_Lesson]] = [], []
        for looks, output_tokens, cut in self._ended:
            for look in looks:
                if look.output_tokens >= output_tokens:
                    continue
                truth = math.log(output_tokens - look.output_tokens)
                if not cut:
                    self.errors.observe(stage_of(look.output_tokens), truth, look.predicted)
                lessons[look.output_tokens > 0].append((look.row, truth, cut))
        share = min(1.0, len(self._ended) * FORGOTTEN_SHARE)
        for regression, found in zip((self._after_prompt, self._in_output), lessons, strict=True):
            regression.forget(share)
            if found:
                rows, truths, cuts = zip(*found, strict=True)
                regression.learn(np.stack(rows), np.array(truths), np.array(cuts))
        self._forget_lessons()

    def _forget_lessons(self) -> None:
        self._ended = []
        self._readers = [self._reader_of(regression) for regression in (self._after_prompt, self._in_output)]

    def _reader_of(self, regression: Regression) -> _Reader | None:
        weights = regression.weights
        if weights is None:
            return None
        one, log_output, log_prompt = weights[:SCALARS].tolist()
        return _Reader((one, log_output, log_prompt), self._projection.reader(weights))

    # -- from and to other workers ---------------------------------------------------------------------------

    def learnt(self) -> LearntProbe:
        """Return what it has learnt."""
        if self._ended:
            self._take_in()
        numbers = [self._after_prompt.pack(), self._in_output.pack(), self.errors.pack()]
        packed = np.concatenate(numbers).clip(-LARGEST_PACKED, LARGEST_PACKED).astype("<f2").tobytes()
        return LearntProbe(self.kind, self.requests, packed)

    def adopt(self, learnt: LearntProbe) -> bool:
        """Continue from what another probe has learnt, if that is more.

        Returns False, and changes nothing, if it is not, or if it comes from a probe of another kind or is damaged.
        """
        if learnt.kind != self.kind or learnt.requests <= self.requests or problem_with(learnt):
            return False
        size = Regression.packed(COUNT)
        numbers = np.frombuffer(learnt.numbers, "<f2").astype(np.float64)
        if len(numbers) != 2 * size + StageErrors.PACKED:
            return False
        both = Regression(COUNT), Regression(COUNT)
        if not (both[0].unpack(numbers[:size]) and both[1].unpack(numbers[size : 2 * size])):
            return False
        self._after_prompt, self._in_output = both
        self.errors = StageErrors()
        self.errors.unpack(numbers[2 * size :])
        self.requests = learnt.requests
        self._forget_lessons()
        return True
