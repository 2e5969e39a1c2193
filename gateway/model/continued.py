"""A rendered chat whose last message is to be continued, as transformers' `continue_final_message` has it."""

from __future__ import annotations

__all__ = ["cut_after"]


def cut_after(rendered: str, content: str) -> str | None:
    """Return the rendered chat up to the end of the last message's content; None: the template has changed the
    content. Blanks at the ends of the content are kept if the template keeps them."""
    core = content.strip()
    begin = rendered.rfind(core) if core else -1
    if begin < 0:
        return None
    whole = content.lstrip()
    return rendered[: begin + len(whole if rendered.startswith(whole, begin) else core)]
