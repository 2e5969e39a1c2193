"""Writes docs/settings.md and docs/metrics.md from the code: every setting, every metric, nothing else.

    python docs/generate.py            # write both
    python docs/generate.py --check    # write nothing; exit 1 when one is out of date

It imports the settings and the metrics of the three services, starts nothing and needs no torch.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

from prometheus_client.metrics import MetricWrapperBase

import gateway.metrics
import scheduler_svc.metrics
import worker_svc.metrics
from gateway.settings import GatewaySettings
from laps_sd import config
from laps_sd.metrics import SECONDS, TOKENS
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

DOCS = Path(__file__).parent
SERVICES: tuple[tuple[str, str, type[config.Settings], ModuleType], ...] = (
    ("Gateway", "gateway", GatewaySettings, gateway.metrics),
    ("Scheduler", "scheduler", SchedulerSettings, scheduler_svc.metrics),
    ("Worker", "worker", WorkerSettings, worker_svc.metrics),
)
GENERATED = "<!-- Written by docs/generate.py from the code. Change the code, then run it again. -->"
USUAL_BUCKETS = {tuple(map(float, SECONDS)): "seconds", tuple(map(float, TOKENS)): "tokens"}


def pages() -> dict[str, str]:
    """File name to text."""
    return {"settings.md": settings_page(), "metrics.md": metrics_page()}


def settings_page() -> str:
    """Every field of the three settings classes."""
    lines = [
        GENERATED,
        "# Settings",
        "",
        "A setting is an environment variable and a flag of the service; the flag wins. `--show-settings` prints the values in",
        "force and where each comes from, for example `laps-sd scheduler --show-settings`. A value out of bounds stops the",
        "service with exit code 2 and a sentence that names the variable. An empty variable stands for *none*.",
        "",
        "`laps-sd up` hands every `LAPS_SD_…` variable of its shell to all three services; what it decides itself (addresses,",
        "ports, names, models) wins.",
    ]
    for title, command, cls, _ in SERVICES:
        lines += ["", f"## {title}", "", f"`laps-sd {command}`", ""]
        lines += table(
            ("variable", "flag", "default", "unit", "bounds", "meaning"),
            (setting_row(cls, field) for field in dataclasses.fields(cls)),
        )
    return "\n".join(lines) + "\n"


def setting_row(cls: type[config.Settings], field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """One field as cells."""
    hint, _ = config.without_none(config.field_types(cls)[field.name])
    flag = config.flag(field.name)
    if field.metadata.get("secret"):
        flags = "none: it is secret"
    elif hint is bool:
        flags = f"`{flag}`, `--no-{flag[2:]}`"
    else:
        flags = f"`{flag}`"
    default = config.shown(field, field.default)
    return (
        f"`{config.variable(field.name)}`",
        flags,
        f"`{default}`" if default else "none",
        config.unit(field),
        bounds(hint, field),
        field.metadata.get("help", "").rstrip("."),
    )


def bounds(hint: Any, field: dataclasses.Field[Any]) -> str:
    """What values are taken."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
    if minimum is not None and maximum is not None:
        return f"{minimum} to {maximum}"
    if minimum is not None:
        return f"from {minimum}"
    return "" if maximum is None else f"to {maximum}"


def metrics_page() -> str:
    """Every metric of the three services."""
    lines = [
        GENERATED,
        "# Metrics",
        "",
        "Each process serves its own at `http://HOST:METRICS_PORT/metrics` (`LAPS_SD_METRICS_PORT`), with those of the Python process",
        "(`process_…`, `python_…`) beside them. A histogram `x` is scraped as `x_bucket`, `x_sum` and `x_count`. No label is a request",
        "id, and a tenant is one only where [the file of keys](how-to/tenants.md) names it.",
    ]
    for title, _, _, module in SERVICES:
        lines += ["", f"## {title}", ""]
        lines += table(("metric", "type", "labels", "meaning"), (metric_row(m) for m in metrics_of(module)))
    lines += ["", "## Buckets", ""]
    lines += [
        f"- {name}: " + ", ".join(f"{bound:g}" for bound in bounds) for bounds, name in USUAL_BUCKETS.items()
    ]
    return "\n".join(lines) + "\n"


def metrics_of(module: ModuleType) -> list[MetricWrapperBase]:
    """The metrics that a module names, in the order of the file; a private name is one label set of another."""
    named = ((name, thing) for name, thing in vars(module).items() if not name.startswith("_"))
    return [thing for _, thing in named if isinstance(thing, MetricWrapperBase)]


def metric_row(metric: MetricWrapperBase) -> tuple[str, ...]:
    """One metric as cells. Labels and buckets have no public name in the library."""
    family = next(iter(metric.describe()))
    name = f"{family.name}_total" if family.type == "counter" else family.name
    kind = family.type
    if kind == "histogram":
        buckets = tuple(metric._kwargs["buckets"])
        kind += ", " + USUAL_BUCKETS.get(buckets, " ".join(f"{bound:g}" for bound in buckets))
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"`{name}`", kind, labels, family.documentation.rstrip(".")


def table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """A table of Markdown."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def main(arguments: Sequence[str]) -> int:
    """Writes or checks; the exit code."""
    stale = []
    for name, text in pages().items():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    verb = "is out of date: run python docs/generate.py" if "--check" in arguments else "written"
    for name in stale:
        sys.stderr.write(f"docs/{name} {verb}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
