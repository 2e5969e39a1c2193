"""Command-line flags from settings: flag, environment variable and field have one name.

    @app.command()
    @options(GatewaySettings)
    def gateway(**overrides: Any) -> None:
        settings = load(GatewaySettings, overrides)

Import this module where it is used: typer takes 0.1 s, and a service that is started without flags does not
need it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal, NoReturn, get_args, get_origin

import typer
from typer.core import TyperCommand

from laps_sd import __version__
from laps_sd.service.config import (
    ConfigError,
    Settings,
    field_types,
    flag,
    provenance,
    shown,
    titles,
    unit,
    variable,
    without_none,
)

__all__ = ["GroupedCommand", "VersionOption", "command_line", "options", "print_version", "with_version"]


def print_version(wanted: bool) -> None:
    """Print the version and end the program, if that is `wanted`."""
    if wanted:
        print(f"laps-sd {__version__}")  # noqa: T201  this is the output
        raise typer.Exit


VersionOption = typing.Annotated[
    bool,
    typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
]


def with_version(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with a flag --version."""

    @functools.wraps(command)
    def wrapper(*values: Any, version: bool = False, **named: Any) -> Any:
        return command(*values, **named)

    added = inspect.Parameter(
        "version", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=VersionOption
    )
    _set_parameters(wrapper, [*inspect.signature(command, eval_str=True).parameters.values(), added])
    return wrapper


def _set_parameters(wrapper: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Make typer see these parameters."""
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}


class GroupedCommand(TyperCommand):
    """A command whose --help lists the options in their groups, as plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each group of options as a section."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def options(cls: type[Settings]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register every field of `cls` as a typer option of a command that takes `**overrides`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        # Parameters that the command names itself stay as they are.
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        known = {f.name: f for f in dataclasses.fields(cls)}
        fields = [
            _option(known[name], field_types(cls)[name], title)
            for name, title in titles(cls).items()
            if not known[name].metadata.get("secret")  # all users of the machine can read a command line
        ]
        parameters = [*own, *fields]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            return command(**values)

        _set_parameters(wrapper, parameters)
        return wrapper

    return decorate


def _option(f: dataclasses.Field[Any], hint: Any, title: str) -> inspect.Parameter:
    inner, optional = without_none(hint)
    # Lists, choices, and values that may be none are parsed by `load`, as from the environment.
    texts = get_origin(inner) in (tuple, Literal) or (optional and inner is not bool)
    kind: Any = str if texts else inner
    notes = [variable(f.name)]
    if get_origin(inner) is Literal:
        notes.append("one of " + ", ".join(get_args(inner)))
    default = (
        " ".join(part for part in (shown(f, f.default), unit(f)) if part)
        if f.default not in (None, "")
        else "none"
    )
    notes.append(f"default: {default}")
    name = flag(f.name)
    option = typer.Option(
        f"{name}/--no-{name[2:]}" if kind is bool else name,
        help=f"{f.metadata.get('help', '').rstrip('.')}. ({'; '.join(notes)})",
        show_default=False,
        metavar=f"<{inner.__name__.lower()}>" if optional and texts else None,
        rich_help_panel=title or None,
    )
    return inspect.Parameter(
        f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=typing.Annotated[kind | None, option]
    )


def command_line(service: str, cls: type[Settings], run: Callable[[dict[str, Any]], NoReturn]) -> NoReturn:
    """Parse this process's arguments and call `run` with the given settings."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command(cls=GroupedCommand)
    @with_version
    @options(cls)
    def command(
        show_settings: typing.Annotated[
            bool,
            typer.Option("--show-settings", help="Print every setting and where it comes from, and exit."),
        ] = False,
        **overrides: Any,
    ) -> None:
        if not show_settings:
            run(overrides)
        try:
            _print_settings(cls, overrides)
        except ConfigError as error:
            for problem in error.problems:
                print(f"laps-sd {service}: {problem}", file=sys.stderr)  # noqa: T201
            raise typer.Exit(2) from None

    first_line = (cls.__doc__ or "").splitlines()[0]
    app.registered_commands[0].help = f"Run the {service} of LAPS-SD. {first_line}"
    app(prog_name=f"laps-sd {service}")
    sys.exit(0)


def _print_settings(cls: type[Settings], overrides: dict[str, Any]) -> None:
    rows = provenance(cls, overrides)
    width = max(len(row.variable) for row in rows)
    for row in rows:
        value = " ".join(part for part in (row.value or "-", row.unit if row.value else "") if part)
        print(f"{row.variable:<{width}}  {value:<24} {row.origin}")  # noqa: T201  this is the output
