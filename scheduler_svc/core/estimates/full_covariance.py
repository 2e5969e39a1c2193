"""The full covariance of all weights, given the first requests.

A filter with a diagonal covariance (`prompt_lengths.py`) forgets which words came together: it raises all ten words of a long
request, and does not lower nine of them when the tenth is found to be the cause. Many requests make up for that. Few do not, so the
first ones are learned from exactly, as ridge regression on all of them does.

There are far fewer requests than weights, so everything is kept by request: the variance of a new request
given the earlier ones, and the share of each earlier one in what is expected of it (the kernel form of Bayesian linear
regression: Rasmussen and Williams 2006, chapter 2). Each request adds a row to the inverse of the Cholesky
factor of their covariance.

An observation moves the weights of all requests so far, which takes long. So what it adds to the weights of the earlier
ones is kept by request too, until weights are read one by one.

The start weights are kept apart, since only one of the two sums has them: what is known of their factor is the regression
of what the weights leave over on what they leave over of the start weights' sum.
"""

from __future__ import annotations

import math
from typing import Final, final

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
    """Holds what earlier requests show of another one."""

    __slots__ = ("shares", "start", "variance")

    def __init__(self, shares: list[float], start: float, variance: float) -> None:
        self.shares: Final = shares
        """Share of each earlier request's ln(length) in what is expected of this one."""
        self.start: Final = start
        """The part of its start weights' sum that they do not explain."""
        self.variance: Final = variance
        """Variance of ln(length) that they leave, without the error that no prompt gives away and without the
        factor of the start weights."""


@final
class FullCovariance:
    """The first requests, and the covariance of all weights given these."""

    def __init__(self) -> None:
        self.requests: Final[list[LearnedRequest]] = []
        self.fresh_gains: Final[list[float]] = []
        self.warm_gains: Final[list[float]] = []
        """What is to be added to the weights of each request in either sum, per their variance and the request's scale."""
        self.has_gains = False
        """Whether any of these is not 0."""
        self.start_shares: Final[list[float]] = []
        """Share of each request in the factor of the start weights, per its variance."""
        self.factor_variance = START_VARIANCE
        self._rows: Final[list[list[float]]] = []
        """The inverse of the Cholesky factor of the covariance of the requests' ln(length)."""
        self._by_feature: Final[dict[int, list[int]]] = {}
        """The requests that have each feature."""

    def explained(self, request: LearnedRequest, common: list[int]) -> Explained:
        """Return what the requests so far show of this one; `common` is what `common_features` returned."""
        covariances = self._covariances(request, common)
        shares = [0.0] * len(covariances)
        explained = 0.0
        for row in self._rows:
            part = 0.0
            for j in range(len(row)):
                part += row[j] * covariances[j]
            explained += part * part
            for j in range(len(row)):
                shares[j] = shares[j] + row[j] * part
        start = request.start
        for i, other in enumerate(self.requests):
            start -= shares[i] * other.start
        own = (
            WEIGHT_VARIANCE * request.scale * request.scale * len(request.features)
            + EVERYONE_VARIANCE
            + 2 * LOCATION_VARIANCE
        )
        return Explained(shares, start, own - explained)

    def add(self, request: LearnedRequest, found: Explained, error_variance: float) -> None:
        """Add a request whose length was observed with this error; `found` is what `explained` returned."""
        variance = found.variance + error_variance
        gain = found.start / variance
        for i in range(len(self.requests)):
            self.start_shares[i] -= found.shares[i] * gain
        self.start_shares.append(gain)
        self.factor_variance /= 1 + self.factor_variance * found.start * gain
        factor = 1 / math.sqrt(variance)
        self._rows.append([*[-share * factor for share in found.shares], factor])
        for i in request.features:
            self._by_feature.setdefault(i, []).append(len(self.requests))
        self.requests.append(request)
        self.fresh_gains.append(0.0)
        self.warm_gains.append(0.0)

    def common_features(self, features: bytes) -> list[int]:
        """Return how many of these features each request has."""
        common = [0] * len(self.requests)
        for at in range(0, len(features), 2):
            for i in self._by_feature.get(features[at] | features[at + 1] << 8, ()):
                common[i] += 1
        return common

    def gained(self, scale: float, common: list[int]) -> tuple[float, float]:
        """Return what the gains add to both sums of a request with these features in common."""
        fresh = warm = 0.0
        for i in range(len(self.requests)):
            if common[i]:
                share = WEIGHT_VARIANCE * scale * self.requests[i].scale * common[i]
                fresh += share * self.fresh_gains[i]
                warm += share * self.warm_gains[i]
        return fresh, warm

    def _covariances(self, request: LearnedRequest, common: list[int]) -> list[float]:
        """Return the covariance of this request's ln(length) with that of each earlier one."""
        covariances = []
        for i in range(len(self.requests)):
            other = self.requests[i]
            covariance = EVERYONE_VARIANCE + WEIGHT_VARIANCE * request.scale * other.scale * common[i]
            if other.workload_class == request.workload_class:
                covariance += LOCATION_VARIANCE
            if other.tenant == request.tenant:
                covariance += LOCATION_VARIANCE
            covariances.append(covariance)
        return covariances
