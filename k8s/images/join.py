"""Install LAPS-SD into an environment that has packages of its own, such as vLLM's image.

    python3 join.py REQUIREMENTS WHEEL [EXTRA]

REQUIREMENTS is a file of pinned packages with hashes. A package is installed from it only where the
environment lacks it, or has a version that the wheel or a package that it needs excludes. All other packages
stay as they are. Ends with exit code 1 if that breaks a requirement of any package of the environment.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Installed = Callable[[str], tuple[str, Sequence[str]] | None]
"""From a package's name to its version and its requirements; None: it is not installed."""


def installed(name: str) -> tuple[str, Sequence[str]] | None:
    """Return what this environment has of a package."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return found.version, found.requires or ()


def lacking(texts: Iterable[str], extras: Iterable[str] = (), look_up: Installed = installed) -> set[str]:
    """Return the canonical names of packages that are missing or excluded, among these requirements and the
    requirements of the packages that fulfil them.
    """
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(Requirement(text), frozenset(extras)) for text in texts]
    while waiting:
        requirement, of_extras = waiting.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": one}) for one in {"", *of_extras}):
            continue
        name = canonicalize_name(requirement.name)
        here = look_up(name)
        if here is None or not requirement.specifier.contains(here[0], prereleases=True):
            found.add(name)
        elif (key := (name, frozenset(requirement.extras))) not in seen:
            seen.add(key)
            waiting += [(Requirement(text), key[1]) for text in here[1]]
    return found


def pinned(text: str) -> Mapping[str, str]:
    """Return the lines of each package in a requirements file."""
    blocks = re.findall(r"^[A-Za-z0-9].*(?:\n .*)*", text, re.MULTILINE)
    return {canonicalize_name(Requirement(block.partition(" \\")[0]).name): block for block in blocks}


def requirements_of(wheel: str) -> Sequence[str]:
    """Return the requirements in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or ()


def pip(*arguments: str) -> None:
    """Run pip in this environment; raise CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def broken() -> set[str]:
    """Return pip's sentences about requirements that this environment does not fulfil."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    return set(done.stdout.splitlines()) if done.returncode else set()


def main(arguments: Sequence[str]) -> int:
    """Install; return the exit code."""
    path, wheel, *extras = arguments
    pins = pinned(Path(path).read_text(encoding="utf-8"))
    before = broken()
    texts = requirements_of(wheel)
    done: set[str] = set()
    # A package that was just installed may need further ones.
    while names := lacking(texts, extras) - done:
        unknown = sorted(names - set(pins))
        if unknown:
            sys.stderr.write(f"{path} lacks {', '.join(unknown)}, which this environment needs for LAPS-SD\n")
            return 1
        sys.stderr.write(f"installs {', '.join(sorted(names))}\n")
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
            chosen.write("\n".join(pins[name] for name in sorted(names)) + "\n")
            chosen.flush()
            pip("install", "--no-deps", "--require-hashes", "-r", chosen.name)
        done |= names
        importlib.invalidate_caches()
    pip("install", "--no-deps", "--no-index", wheel)
    fresh = sorted(broken() - before)
    sys.stderr.writelines(f"{line}\n" for line in fresh)
    return 1 if fresh else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
