"""Types of the fields in the bodies: what pydantic's own strict types leave open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    Tag,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gateway.api.openai.field_errors import IDS, PARTS, SEVERAL, TEXT, refused
from gateway.api.openai.limits import (
    INT32,
    INT64_MIN,
    MAX_ITEMS,
    MAX_NUMBER,
    MAX_PROMPTS,
    MAX_TOKEN_IDS,
    UINT32,
    UINT64,
)
from gateway.api.openai.values import kind_of, shown
from gateway.bounded_json import encode

__all__ = [
    "AtMost",
    "Biases",
    "Count",
    "JsonSchema",
    "ListedIds",
    "ListsOfIds",
    "Logprobs",
    "Number",
    "Positive",
    "Priority",
    "Prompt",
    "Seed",
    "Stop",
    "Text",
    "TopK",
    "UnixMs",
    "Unsupported",
    "kind_of_content",
    "text_of_refusal",
]


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """Annotates an `int` with its bounds. A number such as 5.0 is whole, true is none."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        checked = core_schema.int_schema(strict=True, ge=self.least, le=self.most)
        return core_schema.no_info_before_validator_function(self._read, checked)

    def _read(self, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refused(f"must be a whole number, got {kind_of(value)}")
        if not self.least <= value <= self.most:
            raise refused(f"must be from {self.least} to {self.most}, got {shown(value)}")
        return value


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotates a list with its largest length, which is checked before any item is."""

    count: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "maxItems": self.count}

    def _check(self, value: object) -> object:
        if isinstance(value, list) and len(value) > self.count:
            raise refused(f"must be at most {self.count} items, got {len(value)}")
        return value


def _check_unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON can hold
        raise refused("must be valid Unicode") from None
    return value


def _list_of_stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


def kind_of_content(value: object) -> str:
    """Return the alternative of a message's content: a text, or a list of parts."""
    return PARTS if isinstance(value, list) else TEXT


def text_of_refusal(value: object) -> object:
    """Return a part of type `refusal`, which earlier answers of OpenAI have, as a text."""
    if isinstance(value, dict) and value.get("type") == "refusal":
        return {"type": "text", "text": value.get("refusal")}
    return value


def _json_text(value: object) -> object:
    """Return a schema as text. The order of its properties is the order of output."""
    try:
        return encode(value) if isinstance(value, dict) else value
    except ValueError:
        raise refused("must not nest this deeply") from None


def _none_if_false(value: object) -> object:
    return None if value is False else value


def _refuse(value: object) -> object:
    if value:
        raise refused("is not supported: the engine does not have it")
    return value


def _read_biases(value: object) -> dict[int, float]:
    """Return the biases by token id; JSON's keys are texts. The first fault ends it, so that an object full
    of faults costs no more than a valid one."""
    if not isinstance(value, dict):
        raise refused(f"must be an object of token ids, got {kind_of(value)}")
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= UINT32):
            raise refused(f"must name token ids, got {shown(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= MAX_NUMBER:
            raise refused(f"must be a number, got {kind_of(bias)}", item=f"[{key}]")
        biases[int(key)] = float(bias)
    return biases


def _read_ids(value: object) -> list[int]:
    """Return token ids; the first fault ends it."""
    if not isinstance(value, list):
        raise refused(f"must be a list of token ids, got {kind_of(value)}")
    if len(value) > MAX_ITEMS:
        raise refused(f"must be at most {MAX_ITEMS} items, got {len(value)}")
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= UINT32:
            raise refused(f"must be a token id, got {shown(item)}", item=f"[{index}]")
    return value


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return TEXT
    return SEVERAL if value and isinstance(value[0], str | list) else IDS


def _kind_of_one_prompt(value: object) -> str:
    return IDS if isinstance(value, list) else TEXT


def _check_total(prompts: object) -> object:
    ids = sum(len(one) for one in prompts if isinstance(one, list)) if isinstance(prompts, list) else 0
    if ids > MAX_TOKEN_IDS:
        raise refused(f"must be at most {MAX_TOKEN_IDS} token ids in all, got {ids}")
    return prompts


Text = Annotated[str, AfterValidator(_check_unicode)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Count = Annotated[int, WholeNumber(0, UINT32)]
Positive = Annotated[int, WholeNumber(1, UINT32)]
TopK = Annotated[int, WholeNumber(-1, UINT32)]
Seed = Annotated[int, WholeNumber(INT64_MIN, UINT64)]
Priority = Annotated[int, WholeNumber(-INT32, INT32)]
UnixMs = Annotated[int, WholeNumber(0, UINT64)]
Stop = Annotated[
    list[Text],
    Field(fail_fast=True),
    AtMost(MAX_ITEMS),
    BeforeValidator(_list_of_stops, json_schema_input_type=str | list[str]),
]
Biases = Annotated[dict[int, float], PlainValidator(_read_biases, json_schema_input_type=dict[str, float])]
JsonSchema = Annotated[Text, BeforeValidator(_json_text, json_schema_input_type=str | dict[str, Any])]
"""A schema, also one that is written as text."""
Logprobs = Annotated[Count | None, BeforeValidator(_none_if_false, json_schema_input_type=int | bool | None)]
"""The number of alternatives in completions; false requests none."""
Unsupported = Annotated[Any, AfterValidator(_refuse)]
"""A field that the engine has no use for; only a value that requests nothing is accepted."""

# A list may hold a million items, so each stops at its first fault.
TokenId = Annotated[int, Field(ge=0, le=UINT32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True), AtMost(MAX_TOKEN_IDS)]
ListedIds = Annotated[list[int], PlainValidator(_read_ids, json_schema_input_type=list[int])]
"""Token ids of a setting; there may be none."""
ListsOfIds = Annotated[list[ListedIds], Field(fail_fast=True), AtMost(MAX_ITEMS)]
OnePrompt = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[list[TokenId], Field(fail_fast=True), Tag(IDS)],
    Discriminator(_kind_of_one_prompt),
]
Prompts = Annotated[
    list[OnePrompt], Field(min_length=1, fail_fast=True), BeforeValidator(_check_total), AtMost(MAX_PROMPTS)
]
Prompt = Annotated[
    Annotated[Text, Tag(TEXT)] | Annotated[TokenIds, Tag(IDS)] | Annotated[Prompts, Tag(SEVERAL)],
    Discriminator(_kind_of_prompt),
]
"""A text, token ids, or a list of either. The first item decides which: errors then name an item of that
kind."""
