"""The output format of an answer that must or may call tools, or that comes after reasoning. Pure."""

from __future__ import annotations

import json
from typing import Any

from gateway.calls.tools import is_single, offered_tools, schemas_of
from gateway.model.files import ModelFiles
from gateway.model.reasoning import State
from gateway.model.tool_calls.constraint import TooLong, Wanted, grammar
from gateway.model.tool_calls.parameters import Unwritable
from laps_sd.contract.limits import MAX_FORMAT_CHARACTERS
from laps_sd.errors import InvalidArgument
from laps_sd.v1 import inference_pb2

__all__ = ["output_format_of"]


def output_format_of(
    request: inference_pb2.GenerateRequest, model: ModelFiles, state: State | None, *, judged: bool = False
) -> inference_pb2.OutputFormat | None:
    """Return the output format that the tools and the reasoning of a checked request make: required calls, or its
    own format after reasoning or as an alternative to calls. None: its own format is enough. Raises
    InvalidArgument for tools that are too long for a format, or that the model's form of calls cannot have.

    `state`: where the output begins, if its reasoning will be read. `judged`: in a form that needs no
    tokenizer, for the check whether it can be used.
    """
    dialect = model.dialect
    wanted = _wanted(
        request,
        single=is_single(request.messages, dialect),
        reasons=state is not None and state is not State.AFTER,
    )
    if wanted is None:
        return None
    reasoning = None if dialect.reasoning is None or state is None else (dialect.reasoning, state)

    def special(text: str) -> int | None:
        token = model.tokenizer.token_to_id(text)
        return None if token not in model.silent_ids else 0 if judged else token

    try:
        text = grammar(wanted, dialect.tools, reasoning, special)
    except Unwritable as error:
        raise InvalidArgument("messages.tools", f"cannot be used: {error}") from None
    except TooLong:
        field = "messages.tools" if wanted.tools else "output_format.json_schema"
        raise InvalidArgument(
            field, f"must be at most {MAX_FORMAT_CHARACTERS} characters as one format"
        ) from None
    return inference_pb2.OutputFormat(grammar=text)


def _wanted(request: inference_pb2.GenerateRequest, *, single: bool, reasons: bool) -> Wanted | None:
    """Return the outputs that need a grammar of our own; None if the request's own format is enough."""
    chat, choice = request.messages, request.messages.tool_choice
    offered = offered_tools(chat)
    answer = None
    if not offered or choice.mode != inference_pb2.ToolChoice.MODE_REQUIRED:
        answer = _answer_schema(request.output_format) if offered or reasons else None
        if answer is None:
            return None
    return Wanted(
        [(name, schema) for name, schema in schemas_of(chat).items() if choice.name in ("", name)],
        single=single or bool(choice.name),
        answer=answer,
    )


def _answer_schema(wanted: inference_pb2.OutputFormat) -> dict[str, Any] | None:
    """Return the schema of an output format of JSON; None for any other."""
    match wanted.WhichOneof("format"):
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            try:
                schema = json.loads(wanted.json_schema)
            except (ValueError, RecursionError):
                return None  # refused when it is judged
            return {} if schema is True else schema if isinstance(schema, dict) else None
        case _:
            return None
