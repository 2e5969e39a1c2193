"""`laps-sd config`: the value, origin and meaning of every setting."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from laps_sd.cli import dial
from laps_sd.errors import StartupError
from laps_sd.service.config import unknown_sentences

MODULES = {"gateway": "gateway", "scheduler": "scheduler_svc", "worker": "worker_svc"}

# Runs in a process of its own, because shared modules do not import a service.
PROGRAM = """
import dataclasses, importlib, json, sys
from laps_sd.service.config import ConfigError, Settings, provenance
from laps_sd.service.flags import command_line

service, module = sys.argv.pop(1), importlib.import_module(sys.argv.pop(1) + ".settings")
(cls,) = (
    each for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Settings) and each.__module__ == module.__name__
)

def print_rows(overrides):
    try:
        print(json.dumps([dataclasses.asdict(row) for row in provenance(cls, overrides)]))
    except ConfigError as error:
        sys.exit("\\n".join(f"laps-sd {service}: {problem}" for problem in error.problems))
    sys.exit(0)

command_line(service, cls, print_rows)
"""


def config(
    context: typer.Context,
    service: Annotated[
        Literal["gateway", "scheduler", "worker"] | None,
        typer.Argument(help="Service, with any of its flags (default: all that are installed here)."),
    ] = None,
    as_json: dial.JsonOption = False,
) -> None:
    """Print every setting: value, unit, origin (default, environment, override) and meaning."""
    wanted = [service] if service is not None else [name for name in MODULES if _installed(name)]
    settings = {name: _settings(name, context.args) for name in wanted}
    for sentence in unknown_sentences():
        print(f"laps-sd: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps(settings, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for name, rows in settings.items():
        table = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("unit")
        table.add_column("origin", no_wrap=True)
        table.add_column("meaning", ratio=1)
        for row in rows:
            cells = (row["variable"], row["value"] or "-", row["unit"], row["origin"], row["help"])
            table.add_row(*map(escape, cells))
        console.print(table)


def _installed(service: str) -> bool:
    return importlib.util.find_spec(MODULES[service]) is not None


def _settings(service: str, flags: list[str]) -> list[dict[str, Any]]:
    if not _installed(service):
        raise StartupError(f"The {service} is not installed: pip install 'laps-sd[{service}]'.")
    flags = [flag for flag in flags if flag != "--show-settings"]  # this command prints them itself
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, service, MODULES[service], *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise typer.Exit(2)  # its stderr has the errors
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows
