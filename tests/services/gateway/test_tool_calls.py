"""Tool calls in an output: what is read from it does not depend on how it was cut into pieces."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.model.tool_calls.constraint import TooLong, Wanted, closed, grammar
from gateway.model.tool_calls.families import FAMILIES, family_of
from gateway.model.tool_calls.parameters import Schema
from gateway.model.tool_calls.reader import MAX_DEPTH, Arguments, Broken, Call, Done, Event, Text

TOOLS: dict[str, Schema] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "days": {"type": ["integer", "null"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array"},
            "rain": {"type": "boolean"},
            "tree": {"$ref": "#/$defs/Tree"},
            "loop": {"$ref": "#/$defs/Loop"},
        },
        "$defs": {
            "City": {"type": "string"},
            "Tree": {"anyOf": [{"type": "string"}, *({"$ref": "#/$defs/Tree"} for _ in range(9))]},
            "Loop": {"$ref": "#/$defs/Loop"},
        },
    },
    "search": {},
    "now": {},
}
OSLO = '{"city": "Oslo"}'
FORMS = tuple(FAMILIES)
anything = settings(max_examples=300, deadline=None)


def read(family: str, pieces: Iterable[str]) -> list[Event]:
    """Return the events of an output; neighbouring texts, and pieces of one call's arguments, are joined."""
    reader = FAMILIES[family].reader(TOOLS)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    joined: list[Event] = []
    for event in events:
        match (joined[-1] if joined else None), event:
            case Text(before), Text(text):
                joined[-1] = Text(before + text)
            case Arguments(index, before), Arguments(same, text) if index == same:
                joined[-1] = Arguments(index, before + text)
            case _:
                joined.append(event)
    return joined


def call(index: int, name: str, arguments: str) -> list[Event]:
    return [Call(index, name), Arguments(index, arguments), Done(index)]


WELL_FORMED: dict[str, tuple[str, str, list[Event]]] = {
    "hermes": (
        "hermes",
        (
            f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>\n<tool_call>\n'
            f'{{"arguments": {{"q": "a \\"}}\\" </tool_call>"}}, "name": "search"}}\n</tool_call>\n'
        ),
        [
            Text("I look."),
            *call(0, "weather", OSLO),
            *call(1, "search", '{"q": "a \\"}\\" </tool_call>"}'),
        ],
    ),
    "hermes without its last tag": (
        "hermes",
        f'<tool_call>{{"name":"weather","arguments":{OSLO}}}',
        call(0, "weather", OSLO),
    ),
    "hermes, cut in its last tag": (
        "hermes",
        f'<tool_call>{{"name":"weather","arguments":{OSLO}}}\n</tool_c',
        call(0, "weather", OSLO),
    ),
    "hermes with text after": (
        "hermes",
        '<tool_call>{"name":"now"}</tool_call> and done ',
        [*call(0, "now", "{}"), Text(" and done")],
    ),
    "llama": ("llama3_json", f'{{"name": "weather", "parameters": {OSLO}}}', call(0, "weather", OSLO)),
    "llama with a type": (
        "llama3_json",
        f'\n{{"type": "function", "name": "weather", "parameters": {OSLO}}}\n',
        call(0, "weather", OSLO),
    ),
    "llama, two after the tag": (
        "llama3_json",
        f'See: <|python_tag|>{{"name": "weather", "parameters": {OSLO}}}; {{"name": "now", "parameters": {{}}}}',
        [Text("See:"), *call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "mistral": (
        "mistral",
        f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}, "id": "abc"}}]',
        [Text("Well."), *call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "mistral by names": (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}",
        [*call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "mistral by a bare name": ("mistral", f"[TOOL_CALLS]weather{OSLO}", call(0, "weather", OSLO)),
    "json": ("json", f'{{"name": "weather", "arguments": {OSLO}}}', call(0, "weather", OSLO)),
    "json, a list": (
        "json",
        f'[{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "parameters": null}}]',
        [*call(0, "weather", OSLO), *call(1, "now", "{}")],
    ),
    "json, arguments as a text": (
        "json",
        '{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}',
        call(0, "weather", OSLO),
    ),
    "json with text after": (
        "json",
        '{"name":"now"}\n\nThat is all.',
        [*call(0, "now", "{}"), Text("\n\nThat is all.")],
    ),
}

WELL_FORMED |= {
    "qwen coder": (
        "qwen3_coder",
        (
            "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        ),
        [Text("I look."), *call(0, "weather", '{"city": "Oslo", "days": 3}'), *call(1, "now", "{}")],
    ),
    "qwen coder without the outer tags": (
        "qwen3_coder",
        "<function=weather><parameter=city>\n7\n</parameter></function> and done",
        [*call(0, "weather", '{"city": "7"}'), Text(" and done")],
    ),
    "qwen coder, several lines": (
        "qwen3_coder",
        '<tool_call><function=search>\n<parameter=q>\n\n a "b"\n <c>\n\n</parameter>\n</function></tool_call>',
        call(0, "search", '{"q": "\\n a \\"b\\"\\n <c>\\n"}'),
    ),
    "glm": (
        "glm45",
        (
            "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>tags</arg_key>\n"
            '<arg_value>["a", "b"]</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>'
        ),
        [Text("I look."), *call(0, "weather", '{"city": "Oslo", "tags": ["a", "b"]}'), *call(1, "now", "{}")],
    ),
    "glm on one line": (
        "glm45",
        "<tool_call>weather<arg_key>rain</arg_key><arg_value>True</arg_value></tool_call>",
        call(0, "weather", '{"rain": true}'),
    ),
}
VALUES = [
    ("city", "12", '"12"'),
    ("city", "null", '"null"'),
    ("days", "12", "12"),
    ("days", "null", "null"),
    ("days", "None", "null"),
    ("days", "many", '"many"'),
    ("days", "NaN", '"NaN"'),
    ("note", "null", "null"),
    ("note", "7", '"7"'),
    ("rain", "False", "false"),
    ("tree", "7", '"7"'),
    ("loop", "7", "7"),
    ("tags", '{"a": 1}', '{"a": 1}'),
    ("tags", "[1", '"[1"'),
    ("else", "7", "7"),
    ("else", "seven", '"seven"'),
    ("else", "", '""'),
]
"""Parameter of the weather, the text that a model writes, and the JSON that it means."""


@pytest.mark.parametrize(("key", "text", "expected"), VALUES)
def test_the_schema_tells_what_a_text_between_tags_is(key: str, text: str, expected: str) -> None:
    output = f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"

    assert read("glm45", [output]) == call(0, "weather", f'{{"{key}": {expected}}}')


TEXT_ALONE: dict[str, tuple[str, str]] = {
    "an answer": ("hermes", "It rains in Oslo. \n"),
    "a tag begun": ("hermes", "a < b, <tool, <tool_cal"),
    "no JSON": ("hermes", "<tool_call>\nweather(Oslo)\n</tool_call>"),
    "an unknown tool": ("hermes", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
    "arguments of an unknown tool": ("hermes", '<tool_call>{"arguments": {}, "name": "delete"}</tool_call>'),
    "arguments that are no object": ("hermes", '<tool_call>{"name": "now", "arguments": 7}</tool_call>'),
    "a name given twice": ("hermes", '<tool_call>{"name": "now", "name": "now"}</tool_call>'),
    "no name": ("hermes", '<tool_call>{"id": "x"}</tool_call>'),
    "an end before the arguments": ("hermes", 'Wait.\n<tool_call>{"name": "now", "argum'),
    "a call of Python": ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    "a person": ("llama3_json", '{"name": "Ada", "parameters": {}}'),
    "a call in a sentence": ("llama3_json", 'Use {"name": "now", "parameters": {}}.'),
    "an object": ("json", '{"city": "Oslo", "name": "now"} '),
    "a list of numbers": ("json", "[1, 2]"),
    "a footnote": ("json", "[1] and more"),
    "a name without arguments": ("mistral", "[TOOL_CALLS]weather is fine"),
    "a long name": ("mistral", f"[TOOL_CALLS]{'n' * 300} {{}}"),
    "a long key": ("json", '{"' + "k" * 300 + '": 1}'),
    "an unknown function": ("qwen3_coder", "<tool_call>\n<function=delete>\n</function>\n</tool_call>"),
    "a function without its end": ("qwen3_coder", "<tool_call>\n<function=now>"),
    "a call of Hermes": ("qwen3_coder", '<tool_call>\n{"name": "now"}\n</tool_call>'),
    "an unknown name": ("glm45", "<tool_call>delete\n</tool_call>"),
    "a name and words": ("glm45", "<tool_call>weather in Oslo</tool_call>"),
    "nothing": ("json", ""),
    "blanks": ("mistral", " \n "),
}

BROKEN: dict[str, tuple[str, str, list[Event]]] = {
    "an end inside a parameter": (
        "qwen3_coder",
        "<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\n<parameter=r>\nb",
        [
            Call(0, "search"),
            Arguments(0, '{"q": "a"'),
            Broken(
                0,
                "<tool_call>\n<function=search>\n<parameter=q>\na\n</parameter>\n<parameter=r>\nb",
            ),
        ],
    ),
    "a parameter given twice": (
        "glm45",
        "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
        [
            Call(0, "now"),
            Arguments(0, '{"a": 1'),
            Broken(0, "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key>"),
            Text("<arg_value>2</arg_value></tool_call>"),
        ],
    ),
    "a long key between tags": (
        "glm45",
        f"<tool_call>now<arg_key>{'k' * 300}</arg_key>",
        [
            Call(0, "now"),
            Broken(0, f"<tool_call>now<arg_key>{'k' * 257}"),
            Text(f"{'k' * 43}</arg_key>"),
        ],
    ),
    "an end inside the arguments": (
        "hermes",
        'So:\n<tool_call>\n{"name": "search", "arguments": {"q": "a',
        [
            Text("So:"),
            Call(0, "search"),
            Arguments(0, '{"q": "a'),
            Broken(0, '\n<tool_call>\n{"name": "search", "arguments": {"q": "a'),
        ],
    ),
    "arguments that are not JSON": (
        "hermes",
        '<tool_call>{"name": "search", "arguments": {q: 1}}</tool_call>',
        [
            Call(0, "search"),
            Arguments(0, "{q: 1}"),
            Broken(0, '<tool_call>{"name": "search", "arguments": {q: 1}'),
            Text("}</tool_call>"),
        ],
    ),
    "something else after the arguments": (
        "json",
        '[{"name": "now"}, {"name": "search", "arguments": {}, "why": 1}]',
        [
            *call(0, "now", "{}"),
            Call(1, "search"),
            Arguments(1, "{}"),
            Broken(1, ', {"name": "search", "arguments": {}, "why"'),
            Text(": 1}]"),
        ],
    ),
}


@pytest.mark.parametrize("case", WELL_FORMED)
def test_calls_are_read_with_the_text_around_them(case: str) -> None:
    family, output, expected = WELL_FORMED[case]

    assert read(family, [output]) == expected


@pytest.mark.parametrize("case", TEXT_ALONE)
def test_what_is_no_call_of_an_offered_tool_stays_text(case: str) -> None:
    family, output = TEXT_ALONE[case]

    assert read(family, [output]) == ([Text(output)] if output else [])


@pytest.mark.parametrize("case", BROKEN)
def test_an_announced_call_that_breaks_is_text_again(case: str) -> None:
    family, output, expected = BROKEN[case]

    assert read(family, [output]) == expected


EXAMPLES = [
    *((family, output) for family, output, _ in (*WELL_FORMED.values(), *BROKEN.values())),
    *TEXT_ALONE.values(),
]


@pytest.mark.parametrize(("family", "output"), EXAMPLES)
def test_every_cut_gives_the_same_events(family: str, output: str) -> None:
    whole = read(family, [output])

    assert read(family, output) == whole  # character by character
    for cut in range(1, len(output)):
        assert read(family, [output[:cut], output[cut:]]) == whole, f"cut at {cut}"


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "weather", "now",
        "{", "}", "[", "]", '"', ":", ",", ";", " ", "\n", "\\", '"name"', '"arguments"', '"parameters"', '"weather"',
        '{"name": "now", "arguments": {"a": "b"}}', OSLO, "null", "é", "x" * 90, "<tool_", "7", "<function=", ">\n",
        "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ]
)  # fmt: skip


@anything
@given(
    st.sampled_from(FORMS),
    st.lists(FRAGMENTS, max_size=24).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_any_output_gives_the_same_events_however_it_is_cut(
    family: str, output: str, cuts: list[int]
) -> None:
    places = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    pieces = [output[begin:end] for begin, end in pairwise(places)]

    assert read(family, pieces) == read(family, [output])


@anything
@given(st.sampled_from(FORMS), st.lists(FRAGMENTS, max_size=24).map("".join))
def test_without_calls_the_text_is_the_output(family: str, output: str) -> None:
    events = read(family, output)

    if not any(isinstance(event, Done) for event in events):
        shown = "".join(event.text for event in events if isinstance(event, Text | Broken))
        assert shown == output


def test_arguments_that_nest_too_deeply_break_the_call() -> None:
    deep = '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1)
    output = f'<tool_call>{{"name": "search", "arguments": {deep}}}</tool_call>'

    whole = read("hermes", [output])
    assert not any(isinstance(event, Done) for event in whole)
    assert read("hermes", output) == whole


def test_arguments_are_passed_on_as_they_arrive() -> None:
    reader = FAMILIES["hermes"].reader(TOOLS)
    reader.feed('<tool_call>{"name": "search", "arguments": {"q": ')

    assert reader.feed('"first') == [Arguments(0, '"first')]
    assert reader.feed(' second"') == [Arguments(0, ' second"')]


def test_text_that_cannot_become_a_call_is_not_held_back() -> None:
    reader = FAMILIES["json"].reader(TOOLS)

    assert reader.feed('{"city') == []
    assert reader.feed('":') == [Text('{"city"'), Text(":")]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("return <tool_call>\\n{...}\\n</tool_call> tags", "hermes"),
        ("<tool_call>\\n<function=name>\\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{name}\\n<arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name',
            "llama3_json",
        ),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{% for message in messages %}", "json"),
    ],
)
def test_the_family_is_the_one_whose_markup_the_template_mentions(template: str, family: str) -> None:
    assert family_of(template).name == family


def test_ids_have_the_form_that_the_templates_of_a_family_accept() -> None:
    short = FAMILIES["mistral"].id_of("s0.abc", 0)

    assert short.isalnum() and len(short) == 9
    assert FAMILIES["hermes"].id_of("s0.abc", 0).startswith("call_")


@pytest.mark.parametrize("family", FORMS)
def test_the_ids_of_calls_differ_and_stay_the_same(family: str) -> None:
    ids = [FAMILIES[family].id_of(request, index) for request in ("a", "b") for index in range(20)]

    assert len(set(ids)) == 40
    assert FAMILIES[family].id_of("a", 0) == ids[0]


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_a_grammar_is_given_up_where_it_becomes_too_long_for_a_format() -> None:
    shared = {"Long": {"description": "x" * 20_000}}
    schema = {"properties": {f"p{n}": {"type": "array"} for n in range(1000)}, "$defs": shared}
    tracemalloc.start()
    try:
        with pytest.raises(TooLong):
            grammar(Wanted([("f", schema)]), FAMILIES["qwen3_coder"], None, lambda _: None)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 2_000_000, "each of the 1000 parameters has the definitions, in 20 MB"


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, OPEN | {"additionalProperties": False}),
        (OPEN | {"additionalProperties": True}, OPEN | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        (
            {"items": OPEN, "anyOf": [OPEN, True], "$defs": {"properties": OPEN}},
            {
                "items": OPEN | {"additionalProperties": False},
                "anyOf": [OPEN | {"additionalProperties": False}, True],
                "$defs": {"properties": OPEN | {"additionalProperties": False}},
            },
        ),
        ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
    ],
)
def test_arguments_have_no_properties_that_their_schema_does_not_mention(
    schema: dict[str, object], expected: dict[str, object]
) -> None:
    assert closed(schema) == expected
