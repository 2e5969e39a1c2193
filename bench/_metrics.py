"""Metrics of the processes of a stack."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from laps_sd.stack.local import LocalStack


def metric(stack: LocalStack, component: str, name: str, **labels: str) -> float:
    """Return one figure of one process. Raise OSError when it cannot be read."""
    with urllib.request.urlopen(stack.metrics_url(component), timeout=5.0) as answer:
        text = answer.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
