"""A rendered chat whose last message is to be continued, as transformers' `continue_final_message` has it."""

from __future__ import annotations

__all__ = ["MARK", "cut_at_mark"]

MARK = "[the last message ends here]\t"
"""What follows the content of the last message while the chat is rendered. The content alone does not show
its end: a template may write the same letters after it. The blank at the end of the mark is lost where the
template removes blanks."""


def cut_at_mark(rendered: str, content: str) -> str | None:
    """Return the rendered chat up to the mark; None: the template has changed the content. Blanks at the end
    of the content are kept if the template keeps them."""
    before, mark, after = rendered.rpartition(MARK.rstrip())
    if not mark or content.strip() not in before:
        return None
    return before if after.startswith("\t") else before.rstrip()
