"""The bounds of an output format that gateway and worker share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from laps_sd.contract.formats import matcher_of
from laps_sd.service.model_dir import demo_target_dir
from tests.system.hostile_formats import HOSTILE
from worker_svc.engine.interface import FormatKind, OutputFormat
from worker_svc.engine.sampling.formats import Formats

BYTES = LLTokenizer("byte")
GRAMMAR_OF_JSON = r"""
start: value
?value: object | array | STRING | NUMBER | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
STRING: /"([^"\\]|\\.)*"/
NUMBER: /-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?/
%ignore /[ \t\n\r]+/
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 100},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,20}$"}, "maxItems": 10},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

USUAL: dict[str, tuple[str, Any]] = {
    "anything": ("json_schema", True),
    "an object": ("json_schema", {"type": "object"}),
    "a person": ("json_schema", PERSON),
    "1000 properties": ("json_schema", {"properties": {f"property_{n}": {"type": "string"} for n in range(1000)}}),
    "1500 values": ("json_schema", {"enum": [f"Country number {n}" for n in range(1500)]}),
    "numbers without end": ("json_schema", {"type": "array", "items": {"type": "number"}, "minItems": 10**6}),
    "options": ("json_schema", {"type": "object", "x-guidance": {"coerce_one_of": True}}),
    "a date": ("regex", r"\d{4}-\d{2}-\d{2}"),
    "repetitions of repetitions": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "500 words": ("regex", "|".join(f"word{n}" for n in range(500))),
    "JSON": ("grammar", GRAMMAR_OF_JSON),
    "300 keywords": ("grammar", "start: K0\n" + "\n".join(f'K{n}: "keyword{n}"i' for n in range(300))),
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_what_is_usual_is_within_the_bounds(name: str) -> None:
    assert not matcher_of(*USUAL[name], BYTES).is_error()


@pytest.mark.parametrize("name", ["", "7", "false", "null", "[]", '"object"'])
def test_a_schema_is_an_object_or_true(name: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a JSON schema"):
        matcher_of("json_schema", json.loads(name or '""'), BYTES)


def test_a_refusal_names_the_format_and_the_limit() -> None:
    with pytest.raises(ValueError, match=r"^must have at most 65536 characters, got 65537$"):
        matcher_of("regex", "a" * 65_537, BYTES)
    with pytest.raises(ValueError, match=r"^must nest at most 64 levels$"):
        matcher_of("json_schema", json.loads(HOSTILE["a deep schema"][0][1]), BYTES)


WIDE = json.dumps({"properties": {f"property_{n}": {"type": "string"} for n in range(350)}})
DEEP = HOSTILE["a deep schema"][0][1]


def test_a_schema_in_a_grammar_has_the_bounds_of_a_schema() -> None:
    assert not matcher_of("grammar", f'start: "<" object ">"\nobject: %json {WIDE}\n', BYTES).is_error()
    with pytest.raises(ValueError, match=r"^must nest at most 64 levels$"):
        matcher_of("grammar", f"start: object\nobject: %json {DEEP}\n", BYTES)
    with pytest.raises(ValueError, match=r"^must hold patterns of at most 1024 characters"):
        matcher_of("grammar", f'start: a\na: %json {{"pattern": "{"a" * 1025}"}}\n', BYTES)


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param("start: " + "(" * 1001 + '"a"' + ")" * 1001, id="groups"),
        pytest.param(f"start: a // %json {WIDE}\n" + "a: b\n" * 1001, id="after a comment"),
        pytest.param(f"start: (%json {WIDE}) | (%json {WIDE})", id="inside a rule"),
    ],
)
def test_other_rules_of_a_grammar_are_counted_as_before(grammar: str) -> None:
    with pytest.raises(ValueError, match=r"^must have at most 1000 rules"):
        matcher_of("grammar", grammar, BYTES)


@pytest.fixture(scope="module")
def worker_formats() -> Formats:
    return Formats(Path(demo_target_dir()) / "tokenizer.json", 1024, frozenset({1}))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_worker_refuses_in_one_sentence_what_would_end_it(name: str, worker_formats: Formats) -> None:
    """A gateway that lets such a format through is not ours."""
    (kind, text), words = HOSTILE[name]

    with pytest.raises(ValueError, match=r"^format ") as refused:
        worker_formats.open(OutputFormat(FormatKind(kind), text))

    assert words in str(refused.value) or "must be JSON" in words
    assert len(str(refused.value)) < 400
    state = worker_formats.open(OutputFormat(FormatKind.REGEX, "[a-z]+"))
    assert state.mask() is not None
