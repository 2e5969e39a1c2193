"""Lets long words in the tables of the site break after the marks between their parts, so that tables need no scrolling.

mkdocs calls `on_page_content` for each page. A browser breaks a word nowhere else than at hyphens.
"""

from __future__ import annotations

import re

CELL = re.compile(r"(<tr>\s*)?<td\b.*?</td>", re.DOTALL)
TAG_OR_WORD = re.compile(r"<[^>]*>|[^<\s]+")
AFTER_MARK = re.compile(r"(?<=[_./,:=])(?![_./,:=]|$)")
WHOLE = 18
"""Characters up to which a word stays whole; with 24, tables of two pages scroll at 1280 pixels."""
WHOLE_IN_FIRST = 36
"""The same in the first column, which has the names that readers look for."""


def on_page_content(html: str, **_: object) -> str:
    """Return the page with a possible break (`wbr`, which is not copied) after each mark in a long word of a table."""
    return CELL.sub(_breakable, html)


def _breakable(cell: re.Match[str]) -> str:
    whole = WHOLE_IN_FIRST if cell[1] else WHOLE

    def of(found: re.Match[str]) -> str:
        stays = found[0].startswith("<") or len(found[0]) <= whole
        return found[0] if stays else AFTER_MARK.sub("<wbr>", found[0])

    return TAG_OR_WORD.sub(of, cell[0])
