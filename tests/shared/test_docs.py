"""The generated pages agree with the code."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from docs import generate
from laps_sd.cli.app import app
from laps_sd.client import Options
from laps_sd.service import config
from laps_sd.service.metrics import REGISTRY
from laps_sd.service.variables import KNOWN
from scheduler_svc import dump

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("laps_sd", "gateway", "scheduler_svc", "worker_svc")


@pytest.mark.parametrize("name", ["docs/settings.md", "docs/metrics.md", "laps_sd/service/variables.py"])
def test_a_generated_page_is_not_out_of_date(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == generate.pages()[name], (
        "the code has changed: run python docs/generate.py"
    )


def test_every_metric_that_a_service_exposes_is_on_the_page() -> None:
    exposed = {family.name for family in REGISTRY.collect() if family.name.startswith("laps_sd_")}
    on_page = set(re.findall(r"^\| `(laps_sd_\w+?)(?:_total)?` \|", generate.metrics_page(), re.MULTILINE))

    assert on_page == exposed


def test_every_setting_and_metric_says_what_it_means() -> None:
    rows = [
        line for page in generate.pages().values() for line in page.splitlines() if line.startswith("| `")
    ]

    assert len(rows) > 100
    assert [row for row in rows if not row.rstrip("| ").strip() or row.endswith("|  |")] == []


def test_a_stale_page_fails_the_check_and_the_generator_needs_no_torch(tmp_path: Path) -> None:
    # In a process of its own: here another test may have imported torch already.
    program = (
        "import sys; from pathlib import Path; from docs import generate; generate.ROOT = Path(sys.argv[1]);"
        "stale = generate.main(['--check']); generate.main([]);"
        "print(stale, generate.main(['--check']), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=DOCS.parent,
        check=True,
    )

    assert done.stdout == "1 0 False\n"
    assert "docs/settings.md is out of date: run python docs/generate.py" in done.stderr


def test_troubleshooting_quotes_what_the_programs_say() -> None:
    """Each part of a quoted sentence between `…` is in the code."""
    folders = [ROOT / package for package in (*PACKAGES, "k8s/operator")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    said = re.sub(r'"\s*\n\s*f?"', "", code)  # a sentence over several lines is one
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)  # examples
    quotes = [quote.replace("\n", " ") for quote in re.findall(r"`([^`]+)`", page)]
    sentences = [
        quote for quote in quotes if " " in quote and not quote.startswith(("laps-sd ", "redis-cli ", "--"))
    ]
    parts = [part.strip() for sentence in sentences for part in sentence.split("…")]

    assert len(sentences) > 25
    assert [part for part in parts if len(part) > 4 and part not in said] == []


def test_troubleshooting_explains_every_warning_and_error_that_a_service_logs() -> None:
    page = " ".join((DOCS / "troubleshooting.md").read_text(encoding="utf-8").split())

    logged = {message for package in PACKAGES for message in _warnings(ROOT / package)}

    assert len(logged) > 30
    assert sorted(message for message in logged if message not in page) == []


def _warnings(folder: Path) -> Iterator[str]:
    """Yield the messages of a package at warning or above, up to their first colon or part that differs."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="log"), attr="warning" | "error"),
                    args=[ast.Constant(value=str(message)), *_],
                ):
                    parts = re.split(r"%[sd]|:", message)
                    yield next(part.strip() for part in parts if part.strip())


def test_every_variable_that_a_page_names_exists() -> None:
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]
    named = {
        word
        for page in pages
        for word in re.findall(r"\bLAPS_SD_[A-Z][A-Z_]+\b", page.read_text(encoding="utf-8"))
    }

    assert len(named) > 50
    named = {name for name in named if not name.startswith("LAPS_SD_TEST_")}  # the tests' own
    assert named - KNOWN == {"LAPS_SD_STEAL_PAUSE_S"}, "only the one that docs/how-to/add-a-setting.md adds"


def test_every_variable_that_something_reads_is_known() -> None:
    """A variable may be read as a field of a settings class, a flag of the command line, or from the
    environment itself."""
    read = set()
    for path in (path for name in (*PACKAGES, "bench", "tests") for path in (ROOT / name).rglob("*.py")):
        code = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"""(?:environ\.get\(|environ\[|envvar=)\s*["'](LAPS_SD_[A-Z_]+)""", code))

    assert read > {"LAPS_SD_BENCH_DATA", "LAPS_SD_TEST_DEVICE", "LAPS_SD_URL"}
    assert read - KNOWN == set()


def test_one_thing_has_one_name_in_all_services() -> None:
    """Settings of two services with one name have one type and unit; the time until a silent peer is given up
    has the same name everywhere."""
    meant: dict[str, set[tuple[str, str]]] = {}
    silences = set()
    for _, _, cls, _ in generate.SERVICES:
        for field in dataclasses.fields(cls):
            kind = str(config.field_types(cls)[field.name])
            meant.setdefault(field.name, set()).add((kind, config.unit(field)))
            if "has sent nothing for this long" in field.metadata["help"]:
                silences.add((field.name, field.default))

    assert {name: kinds for name, kinds in meant.items() if len(kinds) > 1} == {}
    assert silences == {("silence_s", 5.0)}


def test_every_link_between_the_pages_leads_somewhere() -> None:
    pages = [
        *DOCS.rglob("*.md"),
        *(ROOT / "clients").glob("*/*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
    broken = [
        f"{page.relative_to(DOCS.parent)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]

    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        count = sum(one == name or re.fullmatch(rf"{re.escape(name)}-\d+", one) is not None for one in found)
        found.add(f"{name}-{count}" if count else name)
    return found


def test_every_link_to_a_heading_finds_it() -> None:
    pages = [
        *DOCS.rglob("*.md"),
        *ROOT.glob("*.md"),
        *(ROOT / "bench").glob("*.md"),
        *(ROOT / "k8s").rglob("*.md"),
    ]
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in pages
        for target, anchor in re.findall(
            r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")
        )
        if not (named := page.parent / target if target else page).exists()
        or (named.suffix == ".md" and anchor not in anchors(named))
    ]

    assert broken == []


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", (DOCS / "README.md").read_text(encoding="utf-8")))
    folders = ("", "how-to/", "evidence/")
    pages = {str(page.relative_to(DOCS)) for folder in folders for page in DOCS.glob(f"{folder}*.md")}

    assert pages - linked == {"README.md"}


COMMAND = re.compile(r"(?<![-\w.@])laps-sd ([a-z]+)((?:[^`\n|;]|(?<=\\)\n)*)")
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]+)")


def flags_of_commands() -> dict[str, set[str]]:
    """Return the flags of each command of `laps-sd`, those of its settings included."""
    commands = typer.main.get_command(app).commands | {"record": typer.main.get_command(dump.app)}  # type: ignore[attr-defined]
    found: dict[str, set[str]] = {
        name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in commands.items()
    }
    for _, name, cls, _ in generate.SERVICES:
        flags = {config.flag(field.name) for field in dataclasses.fields(cls)}
        found[name] |= {"--show-settings", *flags, *(f"--no-{flag[2:]}" for flag in flags)}
    return found


def test_every_command_and_flag_that_a_page_names_exists() -> None:
    flags = flags_of_commands()
    pages = [
        *DOCS.glob("*.md"),
        *(DOCS / "how-to").glob("*.md"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
    used = [
        (page.name, command, flag)
        for page in pages
        for command, rest in COMMAND.findall(page.read_text(encoding="utf-8"))
        for flag in ("", *FLAG.findall(rest))
    ]
    unknown = [
        (page, command, flag)
        for page, command, flag in used
        if command not in flags or (flag and command != "bench" and flag not in flags[command])
    ]

    assert len(used) > 200
    assert unknown == [("security.md", "on", ""), ("add-a-setting.md", "scheduler", "--steal-pause-s")]


def test_the_page_of_the_python_client_has_every_option() -> None:
    page = (DOCS / "how-to" / "python-client.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.+?) \|", page.partition("## Options")[2].partition("## Tools")[0], re.MULTILINE
    )

    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(Options.__annotations__)


NAMED_TEST = re.compile(r"`(?:(tests/[\w/]+\.py))?\s*(?:-k\s(\"[^\"]+\"|[^`\"]+))?`")


def named_tests(page: Path) -> list[tuple[str, str]]:
    """Return file and `-k` expression, empty without one; an expression on its own refers to the file named
    before it."""
    found, file = [], ""
    for path, expression in NAMED_TEST.findall(page.read_text(encoding="utf-8")):
        file = path or file
        if path or expression:
            found.append((file, expression.strip('"')))
    return found


def names_of_tests(path: Path) -> Iterator[str]:
    """Return the text that `-k` matches, in lower case: the class, the function, and every text in its
    decorators."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for outer in ("", *classes):
        body, name = (tree.body, "") if isinstance(outer, str) else (outer.body, outer.name)
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                marks = [ast.unparse(decorator) for decorator in node.decorator_list]
                yield " ".join((name, node.name, *marks)).lower()


@pytest.mark.parametrize("name", ["guarantees.md", "security.md", "policies.md"])
def test_every_test_that_a_page_names_exists(name: str) -> None:
    named = named_tests(DOCS / name)
    missing = [
        f"{file} -k {expression}" if expression else file
        for file, expression in named
        if not (ROOT / file).is_file()
        or not all(
            any(word.strip().lower() in test for test in names_of_tests(ROOT / file))
            for word in expression.split(" or ")
        )
    ]

    assert missing == []
    assert len(named) > 20 or name != "guarantees.md"


def test_every_line_of_the_table_of_guarantees_names_a_test() -> None:
    page = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    table = page.split("| what dies |")[1].split("\n\n")[0].splitlines()[2:]
    without = [row for row in table if "`tests/" not in row and "`laps-sd bench chaos`" not in row]

    assert len(table) > 10
    assert without == []


def test_the_index_of_decisions_has_each_of_them_by_its_title() -> None:
    folder = DOCS / "decisions"
    index = dict(
        re.findall(r"^\| \[\d{4}\]\((.+?)\) \| (.+?) \|", (folder / "README.md").read_text(), re.MULTILINE)
    )
    titles = {
        path.name: re.sub(r"^# (\d{4} )?", "", path.read_text().partition("\n")[0])
        for path in sorted(folder.glob("[0-9]*.md"))
    }

    assert index == titles


def test_the_glossary_is_short_and_readers_find_it() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| \*\*(.+?)\*\*.* \| .+ \|$", page, re.MULTILINE)
    rows = [line for line in page.splitlines() if line.startswith("| ") and line != "| term | meaning |"]

    assert len(terms) == len(rows) == len(set(terms))
    assert 20 <= len(terms) <= 40, "a new term takes the place of an old one"
    for name, target in (
        ("README.md", "docs/glossary.md"),
        ("CONTRIBUTING.md", "docs/glossary.md"),
        ("ARCHITECTURE.md", "docs/glossary.md"),
        ("docs/README.md", "glossary.md"),
    ):
        assert f"]({target})" in (ROOT / name).read_text(encoding="utf-8"), name
