"""vLLM's field `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from gateway.api.openai.field_errors import refused
from gateway.api.openai.field_types import AtMost, JsonSchema, Text
from gateway.api.openai.limits import MAX_ITEMS

__all__ = ["Choices", "StructuredOutputs"]


def _some(value: list[str]) -> list[str]:
    if not value:
        raise refused("must hold at least one text")
    if not all(value):
        raise refused("must hold no empty text", item=f"[{value.index('')}]")
    return value


def _not_supported(value: object) -> object:
    if value:
        raise refused("is not supported here; leave it out")
    return value


Choices = Annotated[list[Text], Field(fail_fast=True), AtMost(MAX_ITEMS), AfterValidator(_some)]
NotSupported = Annotated[Any, AfterValidator(_not_supported)]


class StructuredOutputs(BaseModel):
    """The field `structured_outputs`: exactly one of its formats."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: NotSupported = None
    disable_any_whitespace: NotSupported = None
    disable_additional_properties: NotSupported = None
    whitespace_pattern: NotSupported = None
    disable_fallback: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_requests_nothing(cls, value: object) -> object:
        """Leave out null and false: a client may send all fields of vLLM's own object."""
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if given is not None and given is not False}
