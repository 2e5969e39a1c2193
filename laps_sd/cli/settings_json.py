"""Prints every setting of a service as JSON: `python -m laps_sd.cli.settings_json SERVICE MODULE [FLAG ...]`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from typing import Any, NoReturn

from laps_sd.service.config import ConfigError, Settings, provenance
from laps_sd.service.flags import command_line


def main() -> NoReturn:
    """Read the settings from the environment and the flags, and print them."""
    service, module = sys.argv.pop(1), importlib.import_module(sys.argv.pop(1) + ".settings")
    (cls,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Settings) and each.__module__ == module.__name__
    )

    def print_rows(overrides: dict[str, Any]) -> NoReturn:
        try:
            print(json.dumps([dataclasses.asdict(row) for row in provenance(cls, overrides)]))
        except ConfigError as error:
            sys.exit("\n".join(f"laps-sd {service}: {problem}" for problem in error.problems))
        sys.exit(0)

    command_line(service, cls, print_rows)


if __name__ == "__main__":
    main()
