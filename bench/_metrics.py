"""Metrics of processes under test."""

from __future__ import annotations

import urllib.request

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from laps_sd.stack.local import LocalStack


class MetricsPage:
    """All metrics of one process at one moment."""

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        """Read the page. Raises OSError when it cannot be read."""
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read().decode()
        self._families: list[Metric] = list(text_string_to_metric_families(text))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels."""
        return sum(
            sample.value
            for family in self._families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def metric(stack: LocalStack, component: str, name: str, **labels: str) -> float:
    """Return one figure of one process. Raises OSError when it cannot be read."""
    return MetricsPage(stack.metrics_url(component), timeout_s=5.0).total(name, **labels)
