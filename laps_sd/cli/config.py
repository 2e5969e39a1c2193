"""`laps-sd config`: the value, origin and meaning of every setting."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import textwrap
from typing import Annotated, Any, Literal

import typer

from laps_sd.cli import dial
from laps_sd.errors import StartupError
from laps_sd.service.config import unknown_sentences

INDENT = " " * 4
MODULES = {"gateway": "gateway", "scheduler": "scheduler_svc", "worker": "worker_svc"}


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
    width = shutil.get_terminal_size().columns
    for name, rows in settings.items():
        print(name)
        for row in rows:
            print("\n".join(setting_lines(row, width)))


def setting_lines(row: dict[str, Any], width: int) -> list[str]:
    """Return a setting for a person: variable, value, unit and origin, and its meaning below, in `width` columns.

    Only a value that has no blank, such as a path, may be longer.
    """
    value = " ".join(part for part in (row["value"] or "-", row["unit"] if row["value"] else "") if part)
    first = textwrap.wrap(
        f"{row['variable']}  {value}  ({row['origin']})",
        width,
        subsequent_indent=INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return first + textwrap.wrap(
        row["help"].rstrip(".") + ".", width, initial_indent=INDENT, subsequent_indent=INDENT
    )


def _installed(service: str) -> bool:
    return importlib.util.find_spec(MODULES[service]) is not None


def _settings(service: str, flags: list[str]) -> list[dict[str, Any]]:
    if not _installed(service):
        raise StartupError(f"The {service} is not installed: pip install 'laps-sd[{service}]'.")
    flags = [flag for flag in flags if flag != "--show-settings"]  # this command prints them itself
    done = subprocess.run(
        # A process of its own, because shared modules do not import a service.
        [sys.executable, "-m", "laps_sd.cli.settings_json", service, MODULES[service], *flags],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise typer.Exit(2)  # its stderr has the errors
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows
