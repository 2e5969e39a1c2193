"""Writes docs/settings.md, docs/metrics.md and laps_sd/service/variables.py from the code: every setting,
every metric, nothing else.

    python docs/generate.py            # write them
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

import typer
from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

import gateway.metrics
import scheduler_svc.metrics
import worker_svc.metrics
from gateway.api.vllm_metrics import SAME
from gateway.settings import GatewaySettings
from laps_sd.cli.app import app
from laps_sd.service import certificates, config
from laps_sd.service.metrics import SECONDS, TOKENS
from laps_vllm.settings import VllmSettings
from laps_vllm.versions import UNTESTED_VARIABLE
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "k8s" / "operator"))

import laps_sd_operator.metrics  # noqa: E402 — found by the line above

SERVICES: tuple[tuple[str, str, type[config.Settings], ModuleType], ...] = (
    ("Gateway", "gateway", GatewaySettings, gateway.metrics),
    ("Scheduler", "scheduler", SchedulerSettings, scheduler_svc.metrics),
    ("Worker", "worker", WorkerSettings, worker_svc.metrics),
)
GENERATED = "<!-- Written by docs/generate.py from the code. Change the code, then run it again. -->"
OF_A_CHECKOUT = (
    "LAPS_SD_BENCH_DATA",
    "LAPS_SD_TEST_CLIENTS",
    "LAPS_SD_TEST_CHROMIUM",
    "LAPS_SD_TEST_DEVICE",
    "LAPS_SD_TEST_VLLM_DTYPE",
    "LAPS_SD_TEST_VLLM_HEADS",
    "LAPS_SD_TEST_VLLM_PYTHON",
)
"""Variables that only `bench/` and `tests/` read."""
OF_THE_OPERATOR = (
    "LAPS_SD_OPERATOR_HEALTH_PORT",
    "LAPS_SD_OPERATOR_METRICS_PORT",
    "LAPS_SD_OPERATOR_NAMESPACE",
)
USUAL_BUCKETS = {tuple(map(float, SECONDS)): "seconds", tuple(map(float, TOKENS)): "tokens"}


def pages() -> dict[str, str]:
    """Return the text of each page by its path in the repository."""
    return {
        "docs/settings.md": settings_page(),
        "docs/metrics.md": metrics_page(),
        "laps_sd/service/variables.py": variables_module(),
    }


def settings_page() -> str:
    """Return the page of every field of the three settings classes."""
    lines = [
        GENERATED,
        "# Settings",
        "",
        "A setting is an environment variable and a flag of the service; the flag wins. `--show-settings` prints the",
        "values in force and where each comes from, for example `laps-sd scheduler --show-settings`; `laps-sd config`",
        "prints those of all services, with their meaning. A value out of bounds stops the service with exit code 2 and",
        "a message that names the variable. Where a setting may be *none*, an empty value means that, as does `none`",
        "for a number, a file or a directory. Elsewhere an empty number or choice is an error: leave the variable out.",
        "",
        "`laps-sd up` passes every `LAPS_SD_…` variable of its shell to all three services; the values that it sets",
        "itself win: addresses, ports, shard, pool, models, `LAPS_SD_DRAIN_S`, and the level and style of logs.",
    ]
    for title, command, cls, _ in SERVICES:
        lines += ["", f"## {title}", "", f"`laps-sd {command}`", ""]
        rows = (setting_row(cls, field) for field in dataclasses.fields(cls))
        lines += table(
            ("variable and flag", "default", "bounds and unit", "meaning"),
            ((f"{variable}<br>{flags}", *rest) for variable, flags, *rest in rows),
        )
    lines += [
        "",
        "## Scheduler inside vLLM",
        "",
        "Variables of `vllm serve` with LAPS-SD's scheduler class ([its page](vllm.md)); there are no flags.",
        f"`{UNTESTED_VARIABLE}=1` lets it start with another version of vLLM than those that are supported.",
        "",
    ]
    rows = (setting_row(VllmSettings, field) for field in dataclasses.fields(VllmSettings))
    lines += table(
        ("variable", "default", "bounds and unit", "meaning"), ((row[0], *row[2:]) for row in rows)
    )
    return "\n".join(lines) + "\n"


def setting_row(cls: type[config.Settings], field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return one field as cells of a table."""
    hint, _ = config.without_none(config.field_types(cls)[field.name])
    flag = config.flag(field.name)
    if field.metadata.get("secret"):
        flags = "no flag: it is secret"
    elif hint is bool:
        flags = f"`{flag}`, `--no-{flag[2:]}`"
    else:
        flags = f"`{flag}`"
    default = config.shown(field, field.default)
    return (
        f"`{config.variable(field.name)}`",
        flags,
        f"`{default}`" if default else "none",
        f"{bounds(hint, field)} {config.unit(field)}".strip(),
        field.metadata.get("help", "").rstrip("."),
    )


def bounds(hint: Any, field: dataclasses.Field[Any]) -> str:
    """Return the allowed values of a field."""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
    if minimum is not None and maximum is not None:
        return f"{minimum} to {maximum}"
    if minimum is not None:
        return f"from {minimum}"
    return "" if maximum is None else f"to {maximum}"


def variables_module() -> str:
    """Return a module with the names of all variables that a program of the project reads."""
    classes = (*(cls for _, _, cls, _ in SERVICES), VllmSettings)
    fields = (field for cls in classes for field in dataclasses.fields(cls))
    names = {config.variable(field.name) for field in fields} | command_line_variables()
    names |= {*OF_A_CHECKOUT, *OF_THE_OPERATOR, UNTESTED_VARIABLE}
    lines = [
        '"""Every variable that a program of the project reads. Written by docs/generate.py from the code: `make docs`."""',
        "",
        "KNOWN = frozenset(",
        "    {",
        *(f'        "{name}",' for name in sorted(names)),
        "    }",
        ")",
    ]
    return "\n".join(lines) + "\n"


def command_line_variables() -> set[str]:
    """Return the variables that set flags of `laps-sd` itself."""
    command = typer.main.get_command(app)
    context = command.make_context("laps-sd", [], resilient_parsing=True)
    commands = [command.get_command(context, name) for name in command.list_commands(context)]  # type: ignore[attr-defined]
    given = {parameter.envvar for each in commands for parameter in each.params}
    return {name for name in given if isinstance(name, str)}


def metrics_page() -> str:
    """Return the page of every metric of the three services and the operator."""
    lines = [
        GENERATED,
        "# Metrics",
        "",
        "Each process serves its own metrics at `http://HOST:METRICS_PORT/metrics` (`LAPS_SD_METRICS_PORT`), together",
        "with those of the Python process (`process_…`, `python_…`). A histogram `x` is scraped as `x_bucket`, `x_sum`",
        "and `x_count`. No label is a request id, and a tenant is a label only if",
        "[the file of keys](how-to/tenants.md) names it. The metrics of the scheduler inside vLLM are on",
        "[its page](vllm.md#metrics).",
    ]
    modules = [(title, module) for title, _, _, module in SERVICES]
    for title, module in [*modules, ("All services", certificates)]:
        lines += ["", f"## {title}", ""]
        lines += table(("metric", "type", "labels", "meaning"), (metric_row(m) for m in metrics_of(module)))
    lines += [
        "",
        "## Kubernetes operator",
        "",
        "At port 9090 of its pod.",
        "",
    ]
    of_operator = (metric_row(m) for m in metrics_of(laps_sd_operator.metrics))
    lines += table(("metric", "type", "labels", "meaning"), of_operator)
    lines += vllm_names()
    lines += ["", "## Buckets", ""]
    lines += [
        f"- {name}: " + ", ".join(f"{bound:g}" for bound in bounds) for bounds, name in USUAL_BUCKETS.items()
    ]
    return "\n".join(lines) + "\n"


def vllm_names() -> list[str]:
    """Return the section on the metrics under vLLM's names."""
    rows = [
        (f"`{name}_total`" if isinstance(metric, Counter) else f"`{name}`", f"`{family_name(metric)}`")
        for name, metric in SAME.items()
    ]
    rows += [
        ("`vllm:prompt_tokens_total`", "the sum of `laps_sd_gateway_prompt_tokens`"),
        (
            "`vllm:request_success_total`",
            "`laps_sd_gateway_requests_total`: `finished_reason` is `stop`, `length` or `abort` (the client left); no errors",
        ),
        ("`vllm:num_requests_running`", "requests of this gateway that have output"),
        ("`vllm:num_requests_waiting`", "requests of this gateway that have no output yet"),
        (
            "`vllm:kv_cache_usage_perc`, `vllm:gpu_cache_usage_perc`",
            "`laps_sd_scheduler_kv_usage_ratio`, as last reported by the leaders",
        ),
    ]
    return [
        "",
        "## Under vLLM's names",
        "",
        "With `LAPS_SD_VLLM_METRICS=true` a gateway serves these too, with vLLM's labels `model_name` and `engine`: at",
        "its metrics port, and at `/metrics` of its HTTP port, where endpoint pickers read (with a key, where callers",
        "need one). Running and waiting count the requests of one gateway, so the sum over all gateways is the total; KV",
        "usage is that of all workers. Times between tokens are the mean of a request, observed once when it ends.",
        "",
        *table(("vLLM's metric", "ours"), iter(rows)),
    ]


def family_name(metric: MetricWrapperBase) -> str:
    """Return the name of a metric as it is scraped."""
    family = next(iter(metric.describe()))
    return f"{family.name}_total" if family.type == "counter" else family.name


def metrics_of(module: ModuleType) -> list[MetricWrapperBase]:
    """Yield the metrics that a module names, in the order of the file; a private name is one label set of
    another."""
    named = ((name, thing) for name, thing in vars(module).items() if not name.startswith("_"))
    return [thing for _, thing in named if isinstance(thing, MetricWrapperBase)]


def metric_row(metric: MetricWrapperBase) -> tuple[str, ...]:
    """Return one metric as cells of a table. Labels and buckets have no public name in the library."""
    family = next(iter(metric.describe()))
    name = family_name(metric)
    kind = family.type
    if kind == "histogram":
        buckets = tuple(metric._kwargs["buckets"])
        kind += ", " + USUAL_BUCKETS.get(buckets, " ".join(f"{bound:g}" for bound in buckets))
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"`{name}`", kind, labels, family.documentation.rstrip(".")


def table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Return the lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def main(arguments: Sequence[str]) -> int:
    """Write or check the pages; return the exit code."""
    stale = []
    for name, text in pages().items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    verb = "is out of date: run python docs/generate.py" if "--check" in arguments else "written"
    for name in stale:
        sys.stderr.write(f"{name} {verb}\n")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
