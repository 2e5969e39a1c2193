"""The base of the models of bodies."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Model"]


class Model(BaseModel):
    """Strict: a text is no number, and true is none either."""

    model_config = ConfigDict(strict=True, extra="ignore")
