"""Settings: one frozen dataclass per service, read from defaults < environment < explicit overrides.

    @dataclass(frozen=True, kw_only=True)
    class SchedulerSettings(Settings):
        lease_s: float = field(2.0, help="How long a leader leads without renewing.", minimum=0.1)

        @property
        def renew_s(self) -> float:              # derived values are properties, never stored twice
            return self.lease_s / 3

        def problems(self) -> Iterator[str]:     # optional: checks across several fields
            if ...: yield "LAPS_SD_A must be smaller than LAPS_SD_B, got …"

    settings = load(SchedulerSettings, {"lease_s": 5.0})

One name throughout: the field `lease_s` is the variable LAPS_SD_LEASE_S and the flag --lease-s. The name ends
with the unit. No settings object is out of bounds: the constructor checks, and `ConfigError` holds all
problems at once.

Types: str, int, float, bool, Path, Literal[...], tuple[str, ...] (comma separated), and `X | None` of these
(None is an empty text, or `none` unless X is str; an empty text for a tuple is the empty tuple).
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from laps_sd.service.variables import KNOWN

__all__ = [
    "LENGTH_KEY_HELP",
    "PREFIX",
    "ConfigError",
    "Origin",
    "Provenance",
    "Settings",
    "environment",
    "field",
    "field_types",
    "flag",
    "load",
    "provenance",
    "shown",
    "titles",
    "unit",
    "unknown",
    "unknown_sentences",
    "variable",
    "without_none",
    "without_password",
]

PREFIX = "LAPS_SD_"
MASK = "********"
Origin = Literal["default", "environment", "override"]
UNITS = {"_s": "s", "_ms": "ms", "_bytes": "bytes", "_tokens": "tokens", "_blocks": "blocks"}


class ConfigError(Exception):
    """Error for one or more wrong settings; each problem is a sentence that names its variable.

    Exit code 2.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


T = TypeVar("T")
SettingsT = TypeVar("SettingsT", bound="Settings")


def field(
    default: T,
    *,
    help: str,  # noqa: A002  the word that flags use
    minimum: float | None = None,
    maximum: float | None = None,
    unit: str | None = None,
    secret: bool = False,
) -> T:
    """Define one setting.

    `help`: meaning, and what happens when it is too small or too large. A secret is never shown.
    """
    metadata = {"help": help, "minimum": minimum, "maximum": maximum, "unit": unit, "secret": secret}
    # Typed like dataclasses.field: it declares its default's type as the return type.
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings; the constructor checks the values."""

    GROUPS: ClassVar[Mapping[str, str]] = {}
    """Titles in --help: of the named field of this class and of those that follow it, up to the next title."""

    def __post_init__(self) -> None:
        """Raise ConfigError with the problems of all values that are out of bounds."""
        found = [
            problem for f in dataclasses.fields(self) for problem in _bound_problems(f, getattr(self, f.name))
        ]
        if not found:
            found = list(self.problems())
        if found:
            raise ConfigError(found)

    def problems(self) -> Iterator[str]:
        """Return the problems that no single field can check, as sentences."""
        return iter(())


LENGTH_KEY_HELP = (
    "Key under which the words of prompts are hashed, the same in all gateways and schedulers of a deployment. "
    "Empty: hashes mean the same in every deployment that has no key."
)


def variable(name: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + name.upper()


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def unit(f: dataclasses.Field[Any]) -> str:
    """Return the unit of a field: that given to `field`, else the ending of its name."""
    given: str | None = f.metadata.get("unit")
    if given is not None:
        return given
    return next((word for suffix, word in UNITS.items() if f.name.endswith(suffix)), "")


def titles(cls: type[Settings]) -> dict[str, str]:
    """Return the title of each field's group, a class's own groups before those of its bases.

    A field that a class defines again stays in its group. The title is empty where there is none.
    """
    found: dict[str, str] = {}
    order: list[str] = [""]
    for base in reversed(cls.__mro__):
        groups: Mapping[str, str] = vars(base).get("GROUPS", {})
        title = ""
        for name in inspect.get_annotations(base):
            title = groups.get(name, title)
            found.setdefault(name, title)
        order = [*groups.values(), *order]
    names = [f.name for f in dataclasses.fields(cls)]
    return {name: found[name] for name in sorted(names, key=lambda name: order.index(found[name]))}


def _bound_problems(f: dataclasses.Field[Any], value: Any) -> Iterator[str]:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    minimum, maximum = f.metadata.get("minimum"), f.metadata.get("maximum")
    measure = f" {unit(f)}" if unit(f) else ""
    if value != value:  # NaN passes every comparison
        yield f"{variable(f.name)} must be a number, got nan."
    if maximum is None and value == math.inf:
        yield f"{variable(f.name)} must be finite, got inf."
    if minimum is not None and value < minimum:
        yield f"{variable(f.name)} must be at least {minimum}{measure}, got {value}."
    if maximum is not None and value > maximum:
        yield f"{variable(f.name)} must be at most {maximum}{measure}, got {value}."


def field_types(cls: type[Settings]) -> dict[str, Any]:
    """Return the types of the fields of a class of settings, by name."""
    return typing.get_type_hints(cls)


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type inside `X | None`, and whether None is allowed."""
    if get_origin(hint) in (Union, types.UnionType):
        inner = [part for part in get_args(hint) if part is not type(None)]
        assert len(inner) == 1, f"a setting has one type, not {hint}"
        return inner[0], True
    return hint, False


TRUE, FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def _parse(name: str, hint: Any, text: str) -> Any:
    """Return the value of a text. Raise ValueError with the rest of the sentence "LAPS_SD_X must be …"."""
    hint, optional = without_none(hint)
    if optional and (not text or (text.lower() == "none" and hint is not str)):
        return None
    if hint is str:
        return text
    if hint is bool:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise ValueError("true or false")
    if hint is int or hint is float:
        try:
            return hint(text)
        except ValueError:
            raise ValueError("a whole number" if hint is int else "a number") from None
    if hint is Path:
        return Path(text).expanduser()
    if get_origin(hint) is Literal:
        if text in get_args(hint):
            return text
        raise ValueError("one of " + ", ".join(get_args(hint)))
    if get_origin(hint) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    raise TypeError(f"setting {name} has a type that config does not support: {hint}")


def _convert(name: str, hint: Any, value: Any) -> Any:
    """Return an override as the field's type; text is parsed as from the environment."""
    inner, _ = without_none(hint)
    if isinstance(value, str):
        return _parse(name, hint, value)
    if inner is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if get_origin(inner) is tuple and isinstance(value, list):
        return tuple(value)
    return value


def _gather(
    cls: type[Settings], overrides: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Origin]]:
    fields, hints = {f.name: f for f in dataclasses.fields(cls)}, field_types(cls)
    found = [f"There is no setting named {name}." for name in overrides if name not in fields]
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name in fields:
        hint = hints[name]
        given: Any
        if overrides.get(name) is not None:
            given, origins[name] = overrides[name], "override"
        elif variable(name) in environ:
            given, origins[name] = environ[variable(name)], "environment"
        else:
            origins[name] = "default"
            continue
        try:
            values[name] = _convert(name, hint, given)
        except ValueError as error:
            shown = "a value that is not shown" if fields[name].metadata.get("secret") else repr(given)
            found.append(f"{variable(name)} must be {error}, got {shown}.")
    if found:  # no settings are made then, so their bounds are checked here
        found += [
            problem for name, value in values.items() for problem in _bound_problems(fields[name], value)
        ]
        raise ConfigError(found)
    return values, origins


def load(
    cls: type[SettingsT], overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> SettingsT:
    """Return the settings of a service. An override of None counts as not given."""
    values, _ = _gather(cls, overrides or {}, os.environ if environ is None else environ)
    return cls(**values)


@dataclasses.dataclass(frozen=True)
class Provenance:
    """One setting with the origin of its value and its meaning."""

    name: str
    variable: str
    value: str
    """Value for display: a secret is masked."""
    origin: Origin
    unit: str
    help: str


def provenance(
    cls: type[Settings], overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> list[Provenance]:
    """Return every setting of a service with its origin."""
    values, origins = _gather(cls, overrides or {}, os.environ if environ is None else environ)
    settings = cls(**values)
    return [
        Provenance(
            name=f.name,
            variable=variable(f.name),
            value=shown(f, getattr(settings, f.name)),
            origin=origins[f.name],
            unit=unit(f),
            help=f.metadata.get("help", ""),
        )
        for f in dataclasses.fields(cls)
    ]


def shown(f: dataclasses.Field[Any], value: Any) -> str:
    """Return a value for display: a secret and the password of a URL are masked."""
    if f.metadata.get("secret") and value:
        return MASK
    return without_password(_text(value))


def without_password(text: str) -> str:
    """Return a URL with its password masked; any other text unchanged."""
    return re.sub(r"([?&]password=)[^&]*", rf"\1{MASK}", re.sub(r"(://[^:/@]*:).*@", rf"\1{MASK}@", text))


def _text(value: Any) -> str:
    """Return the text of a value; the inverse of `_parse`."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the variables with our prefix that no program of the project reads.

    Each comes with the most similar known name.

    A service ignores the variables of the others, since one environment often serves them all. The variables
    that Kubernetes adds for its own services (LAPS_SD_GATEWAY_PORT and the like, next to
    LAPS_SD_GATEWAY_SERVICE_HOST) are not meant for us.
    """
    given = os.environ if environ is None else environ
    services = [name.removesuffix("_SERVICE_HOST") for name in given if name.endswith("_SERVICE_HOST")]
    links = tuple(f"{service}_{part}" for service in services for part in ("SERVICE_", "PORT"))
    strangers = (n for n in given if n.startswith(PREFIX) and n not in KNOWN and not n.startswith(links))
    known = sorted(name.removeprefix(PREFIX) for name in KNOWN)
    found: dict[str, str | None] = {}
    for name in sorted(strangers):
        near = difflib.get_close_matches(name.removeprefix(PREFIX).upper(), known, n=1)
        found[name] = PREFIX + near[0] if near else None
    return found


def unknown_sentences(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the result of `unknown` as sentences for a person."""
    return [
        f"{name} is not a setting of LAPS-SD and has no effect"
        + (f"; did you mean {near}?" if near else "; `laps-sd config` lists all settings.")
        for name, near in unknown(environ).items()
    ]


def environment(settings: Settings) -> dict[str, str]:
    """Return the variables that make a child process load the same settings."""
    return {variable(f.name): _text(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
