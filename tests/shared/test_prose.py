"""Comments, docstrings and pages are plain English: few idioms, counted per package.

The list is short on purpose. It holds words that this project used for things as if they were persons, and
old or colloquial forms that a reader of English as a second language has to decode.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PER_1000_WORDS = 2.0
PACKAGES = (
    "gateway",
    "scheduler_svc",
    "worker_svc",
    "laps_sd",
    "simulator",
    "demo",
    "bench",
    "k8s",
    "tests",
    "docs",
)
ROOT_PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
IDIOMS = re.compile(
    r"""\b(?:
        says? | said | tells? | told | asks? | asked | hears? | heard | ow(?:es?|ed|ing) | obeys? | wishes
      | nobody | whoever | somebody | everybody | anybody
      | of\ late | anew | once\ more | for\ ever | meanwhile | thereof | whence | thither
      | beside | behind\ (?:it|that|the|a|an|each|which|them)
      | so\ many | as\ many\ again | or\ else | goes\ on | go\ on | has\ no\ (?:word|say)
      | (?:what|that|which)\ (?:is|are)\ no
      | octets?
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
WORD = re.compile(r"[A-Za-z][A-Za-z'’-]+")
CODE = re.compile(r"`[^`]*`")
"""Code and quoted messages: not counted."""


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment and docstring, or of each line of a page outside code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced and not line.startswith("    "):
                yield number, CODE.sub("", line)
        return
    if path.suffix == ".proto":
        for number, line in enumerate(text.splitlines(), 1):
            if "//" in line:
                yield number, CODE.sub("", line.partition("//")[2])
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            yield token.start[0], CODE.sub("", token.string)
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(found))):
                yield node.lineno, CODE.sub("", found)


def files_of(package: str) -> list[Path]:
    """Return the hand-written files: without generated stubs, and without the decisions, which stay as
    written."""
    return [
        path
        for path in sorted((ROOT / package).rglob("*"))
        if path.suffix in {".py", ".md", ".proto"}
        and "_pb2" not in path.name
        and not {"decisions", "build", "node_modules"} & set(path.relative_to(ROOT).parts)
        and path != Path(__file__)
    ]


def counted(paths: list[Path]) -> tuple[int, list[str]]:
    """Return the number of words, and one line for each idiom."""
    words, places = 0, []
    for path in paths:
        for line, text in prose_of(path):
            words += len(WORD.findall(text))
            places += [
                f"{path.relative_to(ROOT)}:{line}: {match[0]}: {' '.join(text.split())[:90]}"
                for match in IDIOMS.finditer(text)
            ]
    return words, places


@pytest.mark.parametrize("package", [*PACKAGES, "protos"])
def test_a_package_has_few_idioms(package: str) -> None:
    words, places = counted(files_of(package))

    assert words > 500
    assert 1000 * len(places) / words <= PER_1000_WORDS, "\n".join(places)


def test_the_pages_of_the_root_have_few_idioms() -> None:
    words, places = counted([ROOT / name for name in ROOT_PAGES])

    assert words > 2000
    assert 1000 * len(places) / words <= PER_1000_WORDS, "\n".join(places)


def test_idioms_are_found_in_comments_docstrings_and_pages_only(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        '"""The list tells who waits."""\n# asked of late\nTEXT = "nobody said so"\n', encoding="utf-8"
    )
    page = tmp_path / "page.md"
    page.write_text("It stands beside `what it says`.\n\n```\nnobody\n```\n", encoding="utf-8")

    found = {
        path.name: [match[0] for _, text in prose_of(path) for match in IDIOMS.finditer(text)]
        for path in (code, page)
    }

    assert found == {"code.py": ["asked", "of late", "tells"], "page.md": ["beside"]}
