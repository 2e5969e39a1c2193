"""The probe of one engine: when it looks at a request, what it predicts, and how it learns from the end.

    after the prompt, every 64 output tokens,       look: keep the features, predict
    and past the total that was predicted last
    the request ends by itself                      learn the true remainder of each kept look
    it is cut at max_tokens                         learn what the remainder would have been, as far as is known

Looks after the prompt and looks at output are learnt apart: hidden states of the two have little in common, and
one regression for both had an error larger by 8 % on the demo pair.

A remainder that was cut off is only known to be larger than what was left. What is learnt of it is its mean under
the present prediction, given that (J. Buckley and I. James, "Linear regression with censored data", 1979). Left out,
long outputs would be missing: with 60 % of the requests cut at 100 tokens the error was larger by 12 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laps_sd.contract.length_probe import MAX_COUNT, LearntProbe, ProbeKind, problem_with
from worker_svc.engine.length_probe.errors import StageErrors, stage_of
from worker_svc.engine.length_probe.features import COUNT, DIMS, SEED, Features, Projection
from worker_svc.engine.length_probe.regression import Regression

EVERY_TOKENS = 64
"""Output tokens from one look to the next (our choice)."""
LEAST_TOKENS = 16
"""The same after a prediction that was overrun at once (our choice)."""
MOST_KEPT = 32
"""Looks kept of a request, at most (our choice); beyond it every second one is dropped."""
LEAST_REQUESTS = 30
"""Requests to learn from before any prediction is given (our choice)."""
SOLVED_EVERY = 8
"""Requests from one solution to the next (our choice): it takes as long as learning from ten requests."""
FORGOTTEN_SHARE = 1 / 4000
"""Share of what was learnt that a request replaces (our choice)."""
LARGEST_LOG = 20.0
"""Bound of a prediction of ln(remaining tokens), against weights that are wrong."""


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


class LengthProbe:
    """Predicts the output tokens that remain; see the module's docstring."""

    def __init__(self, model: str, layer: int, hidden: int) -> None:
        """`model` identifies the weights, `layer` is the number of decoder layers before the hidden state, and
        `hidden` the size of that."""
        self.kind = ProbeKind(model, layer, SEED, DIMS)
        self.layer = layer
        self.requests = 0
        """Requests that it, or the probe that it continues, has learnt from."""
        self.errors = StageErrors()
        self._projection = Projection(hidden)
        self._after_prompt, self._in_output = Regression(COUNT), Regression(COUNT)

    def look(self, watched: Watched, output_tokens: int, hidden: Features) -> float | None:
        """Look at a request by the hidden state [hidden] of its last position, before `output_tokens` becomes more.

        Returns the output tokens that remain, at least 1; None as long as predictions are no better than a constant.
        """
        watched.due = output_tokens + EVERY_TOKENS
        features = self._projection.features(hidden, watched.prompt_tokens, output_tokens)
        if features is None:
            return None
        found = self._regression(output_tokens).predict(features)
        predicted = None if found is None else float(found.clip(0.0, LARGEST_LOG))
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
        watched.due = output_tokens + int(min(EVERY_TOKENS, max(LEAST_TOKENS, remaining)))
        return remaining

    def learn(self, watched: Watched, output_tokens: int, *, cut: bool) -> None:
        """Learn from the end of a request after `output_tokens`; `cut`: it would have become longer."""
        looks = [look for look in watched.looks if look.output_tokens < output_tokens]
        watched.looks = []
        if not looks:
            return
        for regression in (self._after_prompt, self._in_output):
            regression.forget(FORGOTTEN_SHARE)
            own = [look for look in looks if self._regression(look.output_tokens) is regression]
            if own:
                self._learn_looks(regression, own, output_tokens, cut=cut)
        self.requests = min(MAX_COUNT, self.requests + 1)
        if self.requests % SOLVED_EVERY == 0:
            self._after_prompt.solve()
            self._in_output.solve()

    def _regression(self, output_tokens: int) -> Regression:
        return self._in_output if output_tokens else self._after_prompt

    def _learn_looks(
        self, regression: Regression, looks: list[Look], output_tokens: int, *, cut: bool
    ) -> None:
        rows = np.stack([look.features for look in looks])
        truths = np.log([float(output_tokens - look.output_tokens) for look in looks])
        if cut:
            expected = regression.predict(rows)
            if expected is None:
                return
            truths = _means_above(truths, expected.clip(0.0, LARGEST_LOG), regression.sigma)
        else:
            for look, truth in zip(looks, truths.tolist(), strict=True):
                self.errors.observe(stage_of(look.output_tokens), truth, look.predicted)
            predicted = [look.predicted for look in looks]
            known = [at for at, one in enumerate(predicted) if one is not None]
            if known:
                regression.observe_residuals(truths[known] - np.array([predicted[at] for at in known], float))
        regression.learn(rows, truths)

    # -- from and to other workers ---------------------------------------------------------------------------

    def learnt(self) -> LearntProbe:
        """Return what it has learnt."""
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
        return True


def _means_above(
    bounds: NDArray[np.float64], expected: NDArray[np.float64], sigma: float
) -> NDArray[np.float64]:
    """Return the means of normal numbers around `expected`, given that they are larger than `bounds`."""
    found = np.empty_like(bounds)
    for at, bound in enumerate(bounds.tolist()):
        above = (bound - float(expected[at])) / sigma
        tail = math.erfc(above / math.sqrt(2)) / 2
        # Far above, the quotient approaches the distance itself, and both parts of it vanish.
        hazard = math.exp(-above * above / 2) / math.sqrt(2 * math.pi) / tail if above < 6 else above
        found[at] = expected[at] + sigma * hazard
    return found
