"""Output formats for llguidance, so that gateway and worker accept the same ones.

The library is imported when it is needed. A format comes from a client, and the library trusts its input: it
follows a grammar's rules on the stack, panics at some schemas, and charges the cost of a step only after the
step. One derivative of n consecutive optional parts costs n² operations, and n doubles with each line of
terminals that refer to each other. So this module bounds the form; the library's own limits, set below their
defaults, bound the size of the compiled result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from laps_sd.contract.limits import MAX_FORMAT_CHARACTERS

__all__ = ["ONE_LINE", "WHITESPACE", "first_line", "matcher_of"]

WHITESPACE = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
"""Whitespace between the parts of JSON (our choice).

The bound is enough to indent, and keeps an output from filling the rest of max_tokens with blanks.
"""
ONE_LINE = {"whitespace_pattern": " "}
"""Whitespace in JSON on one line, as models write calls of tools: one blank at most."""
MAX_REASON_CHARACTERS = 200
"""Most characters of an error about a format: it may quote the whole format, and headers carry the status."""

# All of these limits are our choice.
MAX_DEPTH = 64
"""Most levels of a schema's JSON: deeper ones overflow a stack somewhere, and no client needs one."""
MAX_PATTERN = 1024
"""Most characters of one regular expression in a schema.

The library does not bound the size of the others, see above.
"""
MAX_LEVELS = 1000
"""Most rules, terminals, groups and negations of a grammar, which may all be nested.

The library needs up to 3 KiB of stack for each.
"""
MAX_LEXER_COST = {"json_schema": 20_000, "regex": 8_000, "grammar": 8_000}
"""Most cost of the expressions of a format, in the library's units.

An object of 200 properties has 5,000, an enumeration of 1,500 names 17,000, a grammar of JSON 2,000, 300
keywords in either case 5,000, `\\w` 1,000. The most expensive format within the limits takes 0.1 s once, and
then exceeds its budget for a step.
"""
MAX_SYMBOLS = 50_000
"""Most symbols of the rules of a format. An object has 8 for each property."""
SCHEMA_RULE = re.compile(r"^\w+: %json (\{.*\})$", re.MULTILINE)
"""A rule of a grammar that is a JSON schema and nothing else, on one line."""
FAILS = "the library for formats fails over it"


def matcher_of(kind: str, wanted: Any, tokenizer: Any) -> Any:
    """Return an LLMatcher at the start of a format, within the bounds above.

    `wanted` is a parsed schema if `kind` is json_schema, else the text of a `regex` or a `grammar`;
    `tokenizer` is an LLTokenizer. Raises ImportError, and ValueError with a text that follows the field's
    name in a sentence about the problem.
    """
    problem = _schema_problem(wanted) if kind == "json_schema" else _text_problem(kind, wanted)
    if problem:
        raise ValueError(problem)
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=MAX_LEXER_COST[kind], max_grammar_size=MAX_SYMBOLS)
    try:
        matcher = LLMatcher(tokenizer, _grammar(kind, wanted), log_level=0, limits=limits)
    except (ValueError, TypeError, ArithmeticError) as error:  # valid JSON here, invalid for the library
        reason = str(error)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the panic of Rust, not an Exception
            raise
        reason = FAILS
    else:
        if not matcher.is_error():
            return matcher
        reason = matcher.get_error()
        if reason.startswith("panic:"):
            reason = FAILS
    raise ValueError(f"cannot be used: {first_line(reason)}")


def first_line(reason: str) -> str:
    """Return the first line of an error of llguidance, as part of a sentence."""
    lines = reason.strip().splitlines()
    return lines[0][:MAX_REASON_CHARACTERS].rstrip(".") if lines else "it is not valid"


def _grammar(kind: str, wanted: Any) -> str:
    """Return the format in the form that the library takes."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            schema = {} if wanted is True else wanted
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=WHITESPACE))
        case "regex":
            return str(LLMatcher.grammar_from_regex(wanted))
        case _:
            return str(LLMatcher.grammar_from_lark(wanted))


def _schema_problem(schema: Any) -> str:
    if not isinstance(schema, dict) and schema is not True:
        return "must be a JSON schema: an object, or true"
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict) or not all(
        isinstance(value, bool) or (name, value) in (*WHITESPACE.items(), *ONE_LINE.items())
        for name, value in options.items()
    ):
        return "must hold nothing but true and false in x-guidance"
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        for value in level:
            for pattern in _patterns(value):
                if len(pattern) > MAX_PATTERN:
                    return (
                        f"must hold patterns of at most {MAX_PATTERN} characters, got one of {len(pattern)}"
                    )
        level = [inner for value in level for inner in _inner(value)]
        if not level:
            return ""
    return f"must nest at most {MAX_DEPTH} levels"


def _patterns(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(pattern := value.get("pattern"), str):
            yield pattern
        if isinstance(properties := value.get("patternProperties"), dict):
            yield from properties


def _inner(value: Any) -> Iterator[Any]:
    match value:
        case dict():
            yield from value.values()
        case list():
            yield from value


def _text_problem(kind: str, text: str) -> str:
    if len(text) > MAX_FORMAT_CHARACTERS:
        return f"must have at most {MAX_FORMAT_CHARACTERS} characters, got {len(text)}"
    if kind != "grammar":
        return ""
    if text.lstrip().startswith("{"):  # the library's own notation, which can express anything
        return "must be a grammar in the form of Lark"
    levels = sum(map(text.count, ":([~"))
    for found in SCHEMA_RULE.finditer(text):
        try:
            schema = json.loads(found[1])
        except (ValueError, RecursionError):
            continue  # not a schema: its characters count like those of any rule
        if problem := _schema_problem(schema):
            return problem
        levels -= sum(map(found[1].count, ":([~"))
    if levels > MAX_LEVELS:
        return (
            f"must have at most {MAX_LEVELS} rules, terminals, groups and negations (: ( [ ~), got {levels}"
        )
    return ""
