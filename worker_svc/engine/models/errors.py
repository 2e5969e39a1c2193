"""Causes of errors, in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text without a full stop; its type if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
