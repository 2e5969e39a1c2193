"""Output formats in a body: OpenAI's `response_format`, vLLM's `structured_outputs` and its earlier `guided_…`, as
one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.api.openai.models import Body
from gateway.bounded_json import encode
from laps_sd.errors import InvalidArgument
from laps_sd.v1.inference_pb2 import OutputFormat

__all__ = ["read_format"]

PUNCTUATION = r"\.+*?()|[]{}^$#&-~/"
"""Characters that a regular expression needs escaped in at least one place."""


KINDS: Final[Mapping[str, Callable[[Any], OutputFormat]]] = {
    "json": lambda text: OutputFormat(json_schema=text),
    "regex": lambda text: OutputFormat(regex=text),
    "choice": lambda texts: OutputFormat(regex=_either(texts)),
    "grammar": lambda text: OutputFormat(grammar=text),
    "json_object": lambda _: OutputFormat(json_object=True),
}
"""The formats by the name that both `structured_outputs` and `guided_…` have for them."""
GUIDED = tuple(f"guided_{kind}" for kind in KINDS if kind != "json_object")


def read_format(body: Body) -> tuple[str, OutputFormat | None]:
    """Return the requested format and the field that has it. Raises InvalidArgument for two different formats,
    and for `structured_outputs` without any."""
    given = list(_given(body))
    # Guidance sends the same grammar under vLLM's earlier and present names.
    if any(output_format != given[0][1] for _, output_format in given):
        names = ", ".join(name for name, _ in given)
        raise InvalidArgument(given[-1][0], f"cannot be used together with another output format ({names})")
    return given[0] if given else ("", None)


def _given(body: Body) -> Iterator[tuple[str, OutputFormat]]:
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        if wanted.type == "json_schema":
            # The order of properties is the order of output. `strict` is not needed: it always holds here.
            try:
                text = encode(wanted.json_schema.schema_)
            except ValueError:
                raise InvalidArgument(
                    "response_format.json_schema.schema", "must not nest this deeply"
                ) from None
            yield "response_format.json_schema", OutputFormat(json_schema=text)
        else:
            yield "response_format", OutputFormat(json_object=True)
    for name in GUIDED:
        if (value := getattr(body, name)) is not None:
            yield name, KINDS[name.removeprefix("guided_")](value)
    structured = body.structured_outputs
    if structured is None:
        return
    formats = {
        "json": structured.json_,
        "regex": structured.regex,
        "choice": structured.choice,
        "grammar": structured.grammar,
        "json_object": structured.json_object or None,
    }
    wanted_kinds = [kind for kind, value in formats.items() if value is not None]
    if not wanted_kinds:
        raise InvalidArgument("structured_outputs", f"must hold one of {', '.join(KINDS)}")
    for kind in wanted_kinds:
        yield f"structured_outputs.{kind}", KINDS[kind](formats[kind])


def _either(texts: Sequence[str]) -> str:
    """Return the regular expression that these texts match, and no other."""
    return "(" + "|".join(map(_literal, texts)) + ")"


def _literal(text: str) -> str:
    return "".join("\\" + letter if letter in PUNCTUATION else letter for letter in text)
