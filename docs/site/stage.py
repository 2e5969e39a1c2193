"""Collects the pages of the documentation site in a folder, for mkdocs.

    python docs/site/stage.py build/site

Pages keep their paths in the repository, so that the links between them hold. A file that a page links to is copied, a link to a
contract leads to its page of the reference, and a link to a folder without a page becomes text: the site has no listings. The words
after the language of a code block (`run`, for the test of the tutorial) are left out: mkdocs takes such a block for text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs.site.api_reference import reference_pages

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)
PROTOS = Path("protos/laps_sd/v1")


def main(out: Path) -> None:
    """Write `mkdocs.yml` and `pages` into an empty or absent folder."""
    shutil.rmtree(out, ignore_errors=True)
    pages = out / "pages"
    pages.mkdir(parents=True)
    for page in tracked_pages():
        text = with_site_links(page, (ROOT / page).read_text(encoding="utf-8"), pages)
        write(pages / page, FENCE.sub(r"\1", text))
    for name, text in reference_pages().items():
        write(pages / "protos" / f"{name}.md", text)
    shutil.copy(ROOT / "docs/site/site.css", pages)
    shutil.copy(ROOT / "docs/site/hooks.py", out)
    decisions = sorted((pages / "docs/decisions").glob("[0-9]*.md"))
    entries = "".join(f"      - {path.relative_to(pages)}\n" for path in decisions)
    write(out / "mkdocs.yml", (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8") + entries)


def tracked_pages() -> list[Path]:
    """Return the paths of all Markdown files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if (ROOT / line).is_file()]


def with_site_links(page: Path, text: str, pages: Path) -> str:
    """Return a page with links that the site can follow. Copy the linked files that are no pages."""

    def of(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        path = Path(os.path.normpath(page.parent / target))
        if not (ROOT / path).exists():
            return match[0]  # code, or a broken link, which mkdocs reports
        if path == PROTOS or path.suffix == ".proto":
            path = Path("protos") / f"{path.stem if path.suffix else 'inference'}.md"
        elif (ROOT / path / "README.md").is_file():
            path /= "README.md"
        elif (ROOT / path).is_dir():
            return label
        elif path.suffix != ".md":
            (pages / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, pages / path)
        return f"{image}[{label}]({os.path.relpath(path, page.parent)}{anchor or ''})"

    return LINK.sub(of, text)


def write(path: Path, text: str) -> None:
    """Write a file, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
