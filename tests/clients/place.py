"""The argument of the tools, with few values, so that any model calls them."""

from __future__ import annotations

from typing import Literal

__all__ = ["CITIES", "City"]

City = Literal["Oslo", "Rome"]
CITIES = ("Oslo", "Rome")
