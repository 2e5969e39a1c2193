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
from worker_svc.engine.length_probe.features import COUNT, DIMS, SEED, Features, Projection
from worker_svc.engine.length_probe.regression import Regression

EVERY_TOKENS = 64
"""Output tokens from one look to the next (our choice)."""
LEAST_TOKENS = 16
"""The same after a prediction that was overrun at once (our choice)."""
STUDIED = 4
"""Of this many requests one is looked at as often in any case, and the others only where predictions are good (our
choice): elsewhere a look serves learning alone."""
FIRST_STUDIED = 100
"""Requests at the start that are all looked at as often (our choice)."""
NEVER = 2**62
MOST_KEPT = 32
"""Looks kept of a request, at most (our choice); beyond it every second one is dropped."""
LEAST_REQUESTS = 30
"""Requests to learn from before any prediction is given (our choice)."""
FEWEST_TOGETHER, MOST_TOGETHER, SHARE_TOGETHER = 8, 100, 1 / 8
"""Requests that are learnt from together: this share of all so far, within these bounds (our choice). A solution
takes as long as learning from ten requests, and changes little where few of many are new."""
FORGOTTEN_SHARE = 1 / 4000
"""Share of what was learnt that a request replaces (our choice)."""


@dataclass(slots=True)
class Look:
    """The features of a request at one moment."""

    output_tokens: int
    features: Features
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


@dataclass(slots=True)
class _Rows:
    """Rows to learn from: looks at requests that have ended."""

    features: list[Features] = field(default_factory=list)
    # ln(tokens that remained), or of those that remained up to the cut.
    truths: list[float] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)


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
        self._new_rows = _Rows(), _Rows()
        self._new_requests = 0
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
        features = self._projection.features(hidden, watched.prompt_tokens, output_tokens)
        if features is None:
            return None
        predicted = (self._in_output if output_tokens else self._after_prompt).predict_one(features)
        watched.looks.append(Look(output_tokens, features, predicted))
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
        looks = [look for look in looks if look.output_tokens < output_tokens]
        if not looks:
            return
        for look in looks:
            truth = math.log(output_tokens - look.output_tokens)
            if not cut:
                self.errors.observe(stage_of(look.output_tokens), truth, look.predicted)
            rows = self._new_rows[look.output_tokens > 0]
            rows.features.append(look.features)
            rows.truths.append(truth)
            rows.cut.append(cut)
        self.requests = min(MAX_COUNT, self.requests + 1)
        self._new_requests += 1
        if self._new_requests >= min(MOST_TOGETHER, max(FEWEST_TOGETHER, self.requests * SHARE_TOGETHER)):
            self._take_in()

    def _take_in(self) -> None:
        """Learn from the new rows."""
        share = min(1.0, self._new_requests * FORGOTTEN_SHARE)
        for regression, rows in zip((self._after_prompt, self._in_output), self._new_rows, strict=True):
            regression.forget(share)
            if rows.features:
                regression.learn(np.stack(rows.features), np.array(rows.truths), np.array(rows.cut))
        self._new_rows = _Rows(), _Rows()
        self._new_requests = 0

    # -- from and to other workers ---------------------------------------------------------------------------

    def learnt(self) -> LearntProbe:
        """Return what it has learnt."""
        if self._new_requests:
            self._take_in()
        numbers = [self._after_prompt.pack(), self._in_output.pack(), self.errors.pack()]
        return LearntProbe(self.kind, self.requests, np.concatenate(numbers).astype("<f2").tobytes())

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
        self._new_rows = _Rows(), _Rows()
        self._new_requests = 0
        return True
