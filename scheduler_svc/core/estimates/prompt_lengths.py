"""Output lengths predicted from prompts, learned online from requests that ended.

A prompt arrives as a set of hashed words (`laps_sd.contract.length_features`). ln(length) is a sum of one
weight for each of them, divided by the root of their number, and of a location for all requests, for its
class and for its tenant. Each weight has a variance, and an ended request moves it as a Kalman filter with a
diagonal covariance does (as in AROW, Crammer et al. 2009): what was seen rarely moves far, what was seen
often moves little. There is no learning rate. The first requests are learned from with the full covariance
(`full_covariance.py`).

Two such sums learn side by side. `fresh` begins with weights of 0, `warm` beside a fixed sum of start weights,
which were learned elsewhere, times a factor that is learned. The prediction is their mean, weighted by how
well each has predicted lately (exponential weights, Vovk 1990). So start weights help where the traffic is
similar to what they were learned from, and elsewhere they are soon ignored.

A request that its limit cut is a censored observation: its length is replaced by the expected one beyond the
cut, given the prediction (Tobin 1958), with a weight that falls to 0 where the cut shows nothing. So is a request
that still runs: of those that run side by side the short ones end first, and without the others the first ends
would make every word look short.

A prediction is a guess like a client's hint: its error is learned, and it is combined with the lengths of the
class, as those are (`calibration.py`, `guesses.py`). All of this is our choice; the paper takes predicted
lengths as they are.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from laps_sd.contract.length_features import FEATURES
from scheduler_svc.core.estimates.full_covariance import (
    EVERYONE_VARIANCE,
    LOCATION_VARIANCE,
    START_VARIANCE,
    WEIGHT_VARIANCE,
    Explained,
    FullCovariance,
    LearnedRequest,
)
from scheduler_svc.core.estimates.lengths import DEFAULT_LOG_MEAN, chance_above, density
from scheduler_svc.core.estimates.plausible import MOST, MOST_LOG, check_size, within
from scheduler_svc.core.native import vec

LEARNED_EXACTLY: Final = 128
"""Ended requests that are learned from with the full covariance. With 256 a burst gains no more, and the last of them take five times as
long (1.1 ms compiled). Our choice."""
PREDICTED_UNSETTLED: Final = 4
"""Predictions after an observation that compare with all first requests. These take as long as bringing the weights up to
date, from which further ones are read."""
ERROR_VARIANCE: Final = 0.7
"""Variance of ln(length) that no prompt gives away. Between 0.3 and 1.4 predictions are as good."""
MOST_ERROR: Final = 2.1
"""Errors of ln(length) are limited to this before anything is learned from them: 2.5 standard deviations."""
LEAST_WEIGHT: Final = 0.01
"""Censored observations that weigh less show nothing, and are left out."""
LEAST_VARIANCE: Final = 0.002
"""Locations, the factor and weights remain movable, so that they follow a drift of the traffic."""
LOSS_WEIGHT: Final = 0.7
"""Share of a difference in loss (squared error over its variance) that counts in the mean of the two sums."""
LOSS_KEEP: Final = 1 - 1 / 300
"""Losses are forgotten over this many requests."""
MOST_TENANTS: Final = 512
LEARNED_ENOUGH: Final = 20.0
"""Ended requests before predictions are made. With start weights they are made at once, and prompts that wait are not
predicted again before."""
SAVED_PER_LEARNED: Final = 0.02
FEWEST_BETWEEN: Final = 20.0
"""Weights are encoded for the record again when they have learned from this share of requests more, and from so
many: a reader of two copies sees the words of all these together, not of one. Our choice."""
LONGEST_LOG: Final = math.log(1e7)
_WEIGHT_STEP: Final = 1 / 48
"""Weights are saved in a byte each, in these steps."""
_VARIANCE_STEPS: Final = 24.0
"""Variances are saved in a byte each, in this many steps per factor of e."""
_COMPRESSION: Final = 3
"""Level of zlib: 6 makes them 8 % shorter and takes seven times as long, while the scheduler does nothing else."""
FORMAT: Final = 1


@final
class _Location:
    """Where the lengths of a class or a tenant lie among all, in ln(length), for either sum."""

    __slots__ = ("fresh", "variance", "warm")

    def __init__(self, fresh: float, warm: float, variance: float) -> None:
        self.fresh = fresh
        self.warm = warm
        self.variance = variance


_NOWHERE: Final = _Location(0.0, 0.0, LOCATION_VARIANCE)


@final
class _Sums:
    """The two sums of one request, and what they were made of."""

    __slots__ = ("explained", "fresh", "scale", "start", "warm")

    def __init__(
        self, fresh: float, warm: float, scale: float, start: float, explained: Explained | None = None
    ) -> None:
        self.fresh: Final = fresh
        self.warm: Final = warm
        self.scale: Final = scale
        self.start: Final = start
        self.explained: Final = explained


@final
class PromptLengths:
    """The predictor of one model."""

    def __init__(self, start_weights: Sequence[float] = (), start_name: str = "") -> None:
        """Begin with these weights of features (`FEATURES`, or none); `start_name` distinguishes them, and the
        key that features are hashed under, from others in the record."""
        self._start: Final = vec[float](start_weights)
        self._has_start: Final = len(start_weights) > 0
        self._start_name: Final = start_name
        self._begin()

    def _begin(self) -> None:
        self._fresh = vec[float]([0.0] * FEATURES)
        # Without start weights the two are the same.
        self._warm = vec[float]([0.0] * FEATURES) if self._has_start else self._fresh
        self._variances = vec[float]([WEIGHT_VARIANCE] * FEATURES)
        self._everyone = _Location(DEFAULT_LOG_MEAN, DEFAULT_LOG_MEAN, EVERYONE_VARIANCE)
        self.classes: dict[str, _Location] = {}
        """Those that `Priors` has a place for."""
        self._tenants: dict[str, _Location] = {}
        """The least recently ended first."""
        self._factor = 1.0
        self._factor_variance = START_VARIANCE
        self._fresh_loss = 0.0
        self._warm_loss = 0.0
        self._first: FullCovariance | None = FullCovariance()
        """Until `LEARNED_EXACTLY` requests have ended, and not after a `restore` of weights."""
        self._unsettled = 0
        """Predictions since the last observation."""
        self.learned = 0.0
        """Ended requests that it has learned from."""
        self._saved_at = 0.0
        self._saved_weights = ""

    def predict(self, features: bytes, workload_class: str, tenant: str) -> float | None:
        """Return the predicted output tokens of a request with these packed features; None without features,
        and while too little is known."""
        if not features:
            return None
        if self._first is not None and self._first.has_gains:
            self._unsettled += 1
            if self._unsettled <= PREDICTED_UNSETTLED:
                return self._predicted(self._explained_sums(features, workload_class, tenant))
            self._settle()
        return self._predicted(self._sums(features, workload_class, tenant))

    def _predicted(self, sums: _Sums) -> float | None:
        if self.learned < LEARNED_ENOUGH and not self._has_start:
            return None
        return math.exp(min(max(0.0, self._mean(sums)), LONGEST_LOG))

    def learn(
        self, features: bytes, workload_class: str, tenant: str, length: int, cut: bool
    ) -> float | None:
        """Learn from a request that ended after `length` tokens (1 or more), by itself or `cut` by its limit. Return
        what `predict` would have returned for it before.
        """
        if not features:
            return None
        sums = self._explained_sums(features, workload_class, tenant)
        before = self._predicted(sums)
        log_length = math.log(length)
        if cut:
            observed = _beyond(log_length - sums.fresh, log_length - sums.warm)
        else:
            observed = (log_length - sums.fresh, log_length - sums.warm, 1.0)
        fresh_error, warm_error, weight = observed
        if weight < LEAST_WEIGHT:
            return before
        fresh_error, warm_error = _limited(fresh_error), _limited(warm_error)
        self._fresh_loss = self._fresh_loss * LOSS_KEEP + weight * fresh_error * fresh_error
        self._warm_loss = self._warm_loss * LOSS_KEEP + weight * warm_error * warm_error
        self._move(features, sums, fresh_error, warm_error, weight, workload_class, tenant, ended=True)
        self.learned += 1
        return before

    def outlived(self, features: bytes, workload_class: str, tenant: str, tokens: int) -> float | None:
        """Learn from a request that runs on after `tokens` output tokens (1 or more). Return what `predict` would
        have returned for it before.
        """
        if not features:
            return None
        sums = self._explained_sums(features, workload_class, tenant)
        before = self._predicted(sums)
        log_tokens = math.log(tokens)
        fresh_error, warm_error, weight = _beyond(log_tokens - sums.fresh, log_tokens - sums.warm)
        if weight >= LEAST_WEIGHT:
            errors = _limited(fresh_error), _limited(warm_error)
            self._move(features, sums, *errors, weight, workload_class, tenant, ended=False)
        return before

    def _settle(self) -> None:
        """Add to weights and locations what is kept for those of the first requests, to read them one by one."""
        first = self._first
        if first is None or not first.has_gains:
            return
        fresh, warm = first.take_gains()
        for i in range(len(first.requests)):
            self._add_to_weights(first.requests[i], fresh[i], warm[i])
            self._add_to_locations(first.requests[i], fresh[i], warm[i])

    def _move_exactly(
        self,
        first: FullCovariance,
        found: Explained,
        fresh_error: float,
        warm_error: float,
        weight: float,
        *,
        ended: bool,
    ) -> None:
        """Move everything by the full covariance, which the first requests give."""
        error_variance = ERROR_VARIANCE / weight
        start = first.factor_variance * found.start
        total = found.variance + error_variance
        fresh_gain, warm_gain = fresh_error / total, warm_error / (total + start * found.start)
        factor_gain = start * warm_gain
        self._factor += factor_gain
        self._unsettled = 0
        request = found.request
        self._of_class(request.workload_class)
        self._of_tenant(request.tenant)
        if not ended:
            self._add_to_weights(request, fresh_gain, warm_gain)
            self._add_to_locations(request, fresh_gain, warm_gain)
            first.move(found, fresh_gain, warm_gain, factor_gain)
            return
        first.add(found, error_variance, fresh_gain, warm_gain, factor_gain)
        if len(first.requests) == LEARNED_EXACTLY:
            self._settle()
            self._first = None

    def _add_to_locations(self, request: LearnedRequest, fresh_gain: float, warm_gain: float) -> None:
        """Add these gains, times the variances, to the locations of this request in both sums."""
        everyone = self._everyone
        everyone.fresh += EVERYONE_VARIANCE * fresh_gain
        everyone.warm += EVERYONE_VARIANCE * warm_gain
        # A location may have made room for another one.
        for location in (
            self.classes.get(request.workload_class),
            self._tenants.get(request.tenant),
        ):
            if location is None:
                continue
            location.fresh += LOCATION_VARIANCE * fresh_gain
            location.warm += LOCATION_VARIANCE * warm_gain

    def _add_to_weights(self, request: LearnedRequest, fresh_gain: float, warm_gain: float) -> None:
        """Add these gains, times the variance and the request's scale, to its weights in both sums."""
        fresh, warm = self._fresh, self._warm
        fresh_gain *= WEIGHT_VARIANCE * request.scale
        warm_gain *= WEIGHT_VARIANCE * request.scale
        if self._has_start:
            for i in request.features:
                fresh[i] += fresh_gain
                warm[i] += warm_gain
        else:
            for i in request.features:
                fresh[i] += fresh_gain

    def _move(
        self,
        features: bytes,
        sums: _Sums,
        fresh_error: float,
        warm_error: float,
        weight: float,
        workload_class: str,
        tenant: str,
        *,
        ended: bool,
    ) -> None:
        """Move everything that the sums were made of towards the observed length: exactly for the first requests, by the
        diagonal variances later. These change with a request that has `ended` only: the end of the others will be
        observed too."""
        if self._first is not None and sums.explained is not None:
            self._move_exactly(self._first, sums.explained, fresh_error, warm_error, weight, ended=ended)
            if not ended:
                return
            # What remains reduces the variances, for when the diagonal ones are all that there is.
            fresh_error = warm_error = 0.0
        variances, fresh, warm, size = self._variances, self._fresh, self._warm, len(features)
        scale, start = sums.scale, sums.start
        locations = [
            self._everyone,
            self._of_class(workload_class),
            self._of_tenant(tenant),
        ]
        total = ERROR_VARIANCE / weight
        for at in range(0, size, 2):
            i = features[at] | features[at + 1] << 8
            total += variances[i] * scale * scale
        for location in locations:
            total += location.variance
        warm_total = total + self._factor_variance * start * start
        fresh_gain, warm_gain = fresh_error / total, warm_error / warm_total
        for location in locations:
            variance = location.variance
            location.fresh += variance * fresh_gain
            location.warm += variance * warm_gain
            if ended:
                location.variance = max(LEAST_VARIANCE, variance - variance * variance / total)
        variance = self._factor_variance
        self._factor += variance * start * warm_gain
        if ended:
            self._factor_variance = max(LEAST_VARIANCE, variance - (variance * start) ** 2 / warm_total)
        if self._has_start:
            warm_gain *= scale
            for at in range(0, size, 2):
                i = features[at] | features[at + 1] << 8
                warm[i] += variances[i] * warm_gain
        fresh_gain *= scale
        shrinks = scale * scale / total
        for at in range(0, size, 2):
            i = features[at] | features[at + 1] << 8
            variance = variances[i]
            fresh[i] += variance * fresh_gain
            if ended:
                variance -= variance * variance * shrinks
                variances[i] = variance if variance > LEAST_VARIANCE else LEAST_VARIANCE

    def _of_class(self, workload_class: str) -> _Location:
        found = self.classes.get(workload_class)
        if found is None:
            found = self.classes[workload_class] = _Location(0.0, 0.0, LOCATION_VARIANCE)
        return found

    def _of_tenant(self, tenant: str) -> _Location:
        """Return the location of a tenant, moved to the end or added there; the one at the front may make room."""
        found = self._tenants.pop(tenant, None)
        if found is None:
            found = _Location(0.0, 0.0, LOCATION_VARIANCE)
        self._tenants[tenant] = found
        if len(self._tenants) > MOST_TENANTS:
            del self._tenants[next(iter(self._tenants))]
        return found

    def _explained_sums(self, features: bytes, workload_class: str, tenant: str) -> _Sums:
        """Return both sums of a request, and, until they are many, what the first requests show of it. Weights need not be
        settled."""
        sums = self._sums(features, workload_class, tenant)
        if self._first is None:
            return sums
        found = self._first.explained(
            LearnedRequest(features, sums.scale, sums.start, workload_class, tenant)
        )
        fresh = sums.fresh + found.fresh
        # Without start weights the two are the same.
        warm = sums.warm + found.warm if self._has_start else fresh
        return _Sums(fresh, warm, sums.scale, sums.start, found)

    def _sums(self, features: bytes, workload_class: str, tenant: str) -> _Sums:
        """Return both sums of a request, from settled weights."""
        of_class = self.classes.get(workload_class, _NOWHERE)
        of_tenant = self._tenants.get(tenant, _NOWHERE)
        everyone = self._everyone
        size = len(features)
        scale = 1 / math.sqrt(size // 2 + 1)
        fresh_weights, warm_weights, start_weights = self._fresh, self._warm, self._start
        fresh = warm = start = 0.0
        # Features are read where they are packed: compiled, a tuple of them takes most of the time.
        if self._has_start:
            for at in range(0, size, 2):
                i = features[at] | features[at + 1] << 8
                fresh += fresh_weights[i]
                warm += warm_weights[i]
                start += start_weights[i]
        else:
            for at in range(0, size, 2):
                fresh += fresh_weights[features[at] | features[at + 1] << 8]
            warm = fresh
        start *= scale
        return _Sums(
            everyone.fresh + of_class.fresh + of_tenant.fresh + scale * fresh,
            everyone.warm + of_class.warm + of_tenant.warm + scale * warm + self._factor * start,
            scale,
            start,
        )

    def _mean(self, sums: _Sums) -> float:
        """Return the mean of the two sums, by their losses."""
        if not self._has_start:
            return sums.fresh
        ahead = (self._warm_loss - self._fresh_loss) * LOSS_WEIGHT / (2 * ERROR_VARIANCE)
        share = 1 / (1 + math.exp(min(max(-50.0, -ahead), 50.0)))
        return share * sums.fresh + (1 - share) * sums.warm

    # The record.

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, for JSON. The weights are those of a little earlier, since
        encoding them takes milliseconds."""
        self._settle()
        more = max(FEWEST_BETWEEN, self._saved_at * SAVED_PER_LEARNED)
        if self.learned >= self._saved_at + more:
            self._saved_at = self.learned
            self._saved_weights = self._encoded()
        return {
            "format": FORMAT,
            "start": self._start_name,
            "learned": self.learned,
            "weights": self._saved_weights,
            "everyone": _numbers(self._everyone),
            "classes": {name: _numbers(found) for name, found in self.classes.items()},
            "tenants": {name: _numbers(found) for name, found in self._tenants.items()},
            "factor": [self._factor, self._factor_variance],
            "losses": [self._fresh_loss, self._warm_loss],
        }

    def restore(self, data: Mapping[str, Any]) -> bool:
        """Take up what `to_dict` gave. With another format, or other start weights or another key, begin
        anew and return False: features would mean something else. Raises ValueError where the weights are
        damaged, or a number is none that can be learned."""
        if data.get("format") != FORMAT or data["start"] != self._start_name:
            return False
        if data["weights"]:
            self._decode(data["weights"])
            # The requests that they were learned from are not saved.
            self._first = None
        within("prompts.learned", data["learned"], 0, MOST)
        self.learned = self._saved_at = data["learned"]
        self._saved_weights = data["weights"]
        check_size("prompts.tenants", data["tenants"], MOST_TENANTS)
        self._everyone = _location("everyone", *data["everyone"])
        self.classes = _locations("classes", data["classes"])
        self._tenants = _locations("tenants", data["tenants"])
        factor, variance = data["factor"]
        within("prompts.factor", factor, -MOST_LOG, MOST_LOG)
        within("prompts.factor", variance, 0, 1)
        self._factor, self._factor_variance = factor, variance
        for loss in data["losses"]:
            within("prompts.losses", loss, 0, MOST)
        self._fresh_loss, self._warm_loss = data["losses"]
        return True

    def _encoded(self) -> str:
        raw, variances, fresh, warm = bytearray(3 * FEATURES), self._variances, self._fresh, self._warm
        for i in range(FEATURES):
            # A word of a long prompt, or of one that runs, has a weight before its variance falls by a step.
            if variances[i] != WEIGHT_VARIANCE or fresh[i] != 0.0 or warm[i] != 0.0:
                raw[i] = min(255, math.floor(-_VARIANCE_STEPS * math.log(variances[i]) + 0.5))
                raw[FEATURES + i] = _byte(fresh[i])
                raw[2 * FEATURES + i] = _byte(warm[i])
        return base64.b64encode(zlib.compress(bytes(raw), _COMPRESSION)).decode()

    def _decode(self, encoded: str) -> None:
        """Set all weights. Raises ValueError where they are damaged."""
        try:
            # Bounded, because a few bytes can decompress to gigabytes.
            raw = zlib.decompressobj().decompress(base64.b64decode(encoded), 3 * FEATURES + 1)
        except zlib.error as error:
            raise ValueError(f"weights are damaged: {error}") from error
        if len(raw) != 3 * FEATURES:
            raise ValueError(f"weights must be {3 * FEATURES} bytes, got {len(raw)}")
        variances, fresh, warm = self._variances, self._fresh, self._warm
        for i in range(FEATURES):
            variances[i] = math.exp(-raw[i] / _VARIANCE_STEPS)
            fresh[i] = _number(raw[FEATURES + i])
            warm[i] = _number(raw[2 * FEATURES + i])


def _beyond(fresh_error: float, warm_error: float) -> tuple[float, float, float]:
    """Return the expected errors of both sums for a length that is known to lie beyond a cut, and the weight of this
    observation. The errors are those of the cut.
    """
    fresh, fresh_weight = _expected_beyond(fresh_error)
    warm, warm_weight = _expected_beyond(warm_error)
    return fresh, warm, max(fresh_weight, warm_weight)


def _expected_beyond(error: float) -> tuple[float, float]:
    """Return the expected error beyond this one, and the weight of the observation: 1 where the cut lies far beyond
    the prediction, 0 far before it.
    """
    spread = math.sqrt(ERROR_VARIANCE)
    z = error / spread
    if z > 8.0:
        return error, 1.0
    hazard = density(z) / chance_above(z)
    return spread * hazard, min(1.0, hazard * (hazard - z))


def _limited(error: float) -> float:
    return min(max(-MOST_ERROR, error), MOST_ERROR)


def _numbers(location: _Location) -> list[float]:
    return [location.fresh, location.warm, location.variance]


def _locations(field: str, data: Mapping[str, Any]) -> dict[str, _Location]:
    return {name: _location(f"{field}[{name!r:.40}]", *found) for name, found in data.items()}


def _location(field: str, fresh: float, warm: float, variance: float) -> _Location:
    within(f"prompts.{field}.fresh", fresh, -MOST_LOG, MOST_LOG)
    within(f"prompts.{field}.warm", warm, -MOST_LOG, MOST_LOG)
    within(f"prompts.{field}.variance", variance, 0, 1)
    return _Location(fresh, warm, variance)


def _byte(weight: float) -> int:
    return min(max(-127, math.floor(weight / _WEIGHT_STEP + 0.5)), 127) & 0xFF


def _number(byte: int) -> float:
    return (byte - 256 if byte > 127 else byte) * _WEIGHT_STEP
