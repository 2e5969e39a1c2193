"""What one row of the results is about: a scenario, and what the requests say of their length."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A scenario with or without hints."""

    scenario: str
    sigma: float | None
    """Error of the length hints; None: the requests have neither a hint nor a class."""

    @property
    def hints(self) -> str:
        return "none" if self.sigma is None else f"{self.sigma:g}"


def sigma_of(text: str) -> float | None:
    """Return the error of hints from an option's value, `none` or a number. Raises ValueError if it is
    neither, or below 0.
    """
    if text == "none":
        return None
    sigma = float(text)
    if not sigma >= 0:
        raise ValueError(f"{text} is below 0")
    return sigma
