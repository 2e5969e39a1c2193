"""The full covariance of all weights, given the first requests.

A filter with a diagonal covariance (`prompt_lengths.py`) forgets which words came together: it raises all ten words of a long
request, and does not lower nine of them when the tenth is found to be the cause. Many requests make up for that. Few do not, so the
first ones are learned from exactly, as ridge regression on all of them does.

There are far fewer requests than weights, so everything is kept by request (the kernel form of Bayesian linear
regression: Rasmussen and Williams 2006, chapter 2). Each request adds a row to the inverse of the Cholesky
factor of their covariance. Multiplied by these rows, the covariances of a new request with the earlier ones become
parts that are independent of each other: the sum of their squares is the variance that the earlier ones explain.

An observation moves the weights of all requests so far, which takes long. In those parts it is one number for each
request, so what is to be added to weights is kept in them until weights are read one by one.

The start weights are kept apart, since only one of the two sums has them: what is known of their factor is the regression
of what the weights leave over on what they leave over of the start weights' sum.
"""

from __future__ import annotations

import math
from typing import Final, final

from scheduler_svc.core.native import append, vec

WEIGHT_VARIANCE: Final = 1.0
"""Variance of a weight that nothing is known of."""
EVERYONE_VARIANCE: Final = 1.0
"""Variance of the location of all requests."""
LOCATION_VARIANCE: Final = 0.5
"""Variance of the location of a class or a tenant among the others."""
START_VARIANCE: Final = 0.25
"""Variance of the factor of the start weights, around 1."""


@final
class LearnedRequest:
    """Holds what the ln(length) of a request is a sum of."""

    __slots__ = ("features", "scale", "start", "tenant", "workload_class")

    def __init__(self, features: bytes, scale: float, start: float, workload_class: str, tenant: str) -> None:
        self.features: Final[list[int]] = [
            features[at] | features[at + 1] << 8 for at in range(0, len(features), 2)
        ]
        """Unpacked, because they are read many times."""
        self.scale: Final = scale
        """Share of each weight in the sum."""
        self.start: Final = start
        """Sum of its start weights, with that share."""
        self.workload_class: Final = workload_class
        self.tenant: Final = tenant


@final
class Explained:
    """Holds what the first requests show of another one."""

    __slots__ = ("fresh", "parts", "request", "start", "variance", "warm")

    def __init__(
        self,
        request: LearnedRequest,
        parts: vec[float],
        start: float,
        variance: float,
        fresh: float,
        warm: float,
    ) -> None:
        self.request: Final = request
        self.parts: Final = parts
        """Its covariances with the first requests, multiplied by their rows."""
        self.start: Final = start
        """The part of its start weights' sum that they do not explain."""
        self.variance: Final = variance
        """Variance of ln(length) that they leave, without the error that no prompt gives away and without the
        factor of the start weights."""
        self.fresh: Final = fresh
        self.warm: Final = warm
        """What is kept for weights and locations adds to its two sums."""


@final
class FullCovariance:
    """The first requests, and the covariance of all weights given these."""

    def __init__(self) -> None:
        self.requests: Final[list[LearnedRequest]] = []
        self.factor_variance = START_VARIANCE
        self.has_gains = False
        """Whether anything is to be added to weights."""
        self._rows: Final[list[vec[float]]] = []
        """The inverse of the Cholesky factor of the covariance of the requests' ln(length)."""
        self._starts = vec[float]()
        """Their start weights' sums, multiplied by the rows."""
        self._fresh = vec[float]()
        self._warm = vec[float]()
        """What is to be added to the weights and locations of the requests in either sum, per their variance and the
        request's scale, in parts."""
        self._by_feature: Final[dict[int, list[int]]] = {}
        """The requests that have each feature."""

    def explained(self, request: LearnedRequest) -> Explained:
        """Return what the first requests show of this one."""
        covariances = self._covariances(request)
        parts, starts, of_fresh, of_warm = vec[float](), self._starts, self._fresh, self._warm
        own = (
            WEIGHT_VARIANCE * request.scale * request.scale * len(request.features)
            + EVERYONE_VARIANCE
            + 2 * LOCATION_VARIANCE
        )
        start, variance, fresh, warm = request.start, own, 0.0, 0.0
        for i in range(len(self._rows)):
            row = self._rows[i]
            part = 0.0
            for j in range(i + 1):
                part += row[j] * covariances[j]
            parts = append(parts, part)
            start -= part * starts[i]
            variance -= part * part
            fresh += part * of_fresh[i]
            warm += part * of_warm[i]
        return Explained(request, parts, start, variance, fresh, warm)

    def move(self, found: Explained, fresh_gain: float, warm_gain: float, factor_gain: float) -> None:
        """Move the first requests' weights and locations for these gains of another request, which moves its own. The
        factor of the start weights moves by `factor_gain`."""
        parts, starts, fresh, warm = found.parts, self._starts, self._fresh, self._warm
        for i in range(len(self.requests)):
            part = parts[i]
            fresh[i] -= part * fresh_gain
            warm[i] -= part * warm_gain + starts[i] * factor_gain
        self.has_gains = True

    def add(
        self,
        found: Explained,
        error_variance: float,
        fresh_gain: float,
        warm_gain: float,
        factor_gain: float,
    ) -> None:
        """Add a request whose length was observed with this error, and move all for its gains, its own weights too."""
        variance = found.variance + error_variance
        self.factor_variance /= 1 + self.factor_variance * found.start * found.start / variance
        root = math.sqrt(variance)
        row, starts, warm = self._shares(found.parts), self._starts, self._warm
        for i in range(len(self.requests)):
            row[i] = -row[i] / root
            warm[i] -= starts[i] * factor_gain
        # A part of its own, so those of the others need not change.
        self._fresh = append(self._fresh, fresh_gain * root)
        self._warm = append(warm, warm_gain * root)
        self._starts = append(starts, found.start / root)
        self._rows.append(append(row, 1 / root))
        for feature in found.request.features:
            self._by_feature.setdefault(feature, []).append(len(self.requests))
        self.requests.append(found.request)
        self.has_gains = True

    def take_gains(self) -> tuple[vec[float], vec[float]]:
        """Return what is to be added to the weights and locations of each request in either sum, per their variance and
        the request's scale, and keep it no longer."""
        fresh, warm = self._shares(self._fresh), self._shares(self._warm)
        self._fresh = vec[float]([0.0] * len(self.requests))
        self._warm = vec[float]([0.0] * len(self.requests))
        self.has_gains = False
        return fresh, warm

    def _shares(self, parts: vec[float]) -> vec[float]:
        """Return by request what is given in parts."""
        shares = vec[float]([0.0] * len(parts))
        for i in range(len(parts)):
            row, part = self._rows[i], parts[i]
            for j in range(i + 1):
                shares[j] += row[j] * part
        return shares

    def _covariances(self, request: LearnedRequest) -> vec[float]:
        """Return the covariance of this request's ln(length) with that of each first one."""
        common = vec[float]([0.0] * len(self.requests))
        for feature in request.features:
            for i in self._by_feature.get(feature, ()):
                common[i] += 1.0
        covariances = vec[float]()
        for i in range(len(self.requests)):
            other = self.requests[i]
            covariance = EVERYONE_VARIANCE + WEIGHT_VARIANCE * request.scale * other.scale * common[i]
            if other.workload_class == request.workload_class:
                covariance += LOCATION_VARIANCE
            if other.tenant == request.tenant:
                covariance += LOCATION_VARIANCE
            covariances = append(covariances, covariance)
        return covariances
