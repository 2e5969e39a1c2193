"""Output formats by vLLM's structured outputs, with llguidance as in the torch engine (`sampling.formats`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request

from worker_svc.engine.interface import FormatKind, OutputFormat

__all__ = ["begin_after", "compile_error", "structured_outputs", "wait_for_a_grammar"]

_FIELDS = {FormatKind.JSON_SCHEMA: "json", FormatKind.REGEX: "regex", FormatKind.GRAMMAR: "grammar"}


def structured_outputs(wanted: OutputFormat | None) -> StructuredOutputsParams | None:
    """Return vLLM's parameters of a format. Raises ValueError for a schema that is not JSON."""
    if wanted is None:
        return None
    if wanted.kind is FormatKind.JSON_OBJECT:
        params = StructuredOutputsParams(json_object=True)
    else:
        if wanted.kind is FormatKind.JSON_SCHEMA:
            try:
                json.loads(wanted.text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"format is not valid JSON: {error}") from None
        params = StructuredOutputsParams(**{_FIELDS[wanted.kind]: wanted.text})
    params._backend = "guidance"  # vLLM's front end sets this, and is not used here
    return params


def begin_after(request: Request, committed: Sequence[int]) -> None:
    """Make the grammar of a new request begin after tokens of its output that exist already.

    vLLM compiles grammars in threads and reads a future in `schedule`; this one is done after the tokens were
    taken in, so that no step sees the grammar before.
    """
    structured = request.structured_output_request
    if structured is None or not committed:
        return
    compiled = structured._grammar

    def advanced(grammar: Any) -> Any:
        if not grammar.accept_tokens(request.request_id, list(committed)):
            raise ValueError("the output so far does not match the format")
        return grammar

    if not isinstance(compiled, Future):
        structured.grammar = advanced(compiled)
        return
    ready: Future[Any] = Future()

    def follow(done: Future[Any]) -> None:
        try:
            ready.set_result(advanced(done.result()))
        except Exception as error:
            ready.set_exception(error)

    structured.grammar = ready
    compiled.add_done_callback(follow)


def wait_for_a_grammar(requests: Iterable[Request], seconds: float) -> None:
    """Return when one of the grammars that still compile is ready, or after `seconds`; at once if none does."""
    futures = [
        request.structured_output_request._grammar
        for request in requests
        if request.structured_output_request is not None
        and isinstance(request.structured_output_request._grammar, Future)
    ]
    if futures:
        wait(futures, seconds, return_when=FIRST_COMPLETED)


def compile_error(request: Request) -> Exception | None:
    """Return the error that ended the compilation of a request's grammar."""
    structured = request.structured_output_request
    grammar = None if structured is None else structured.grammar
    return grammar if isinstance(grammar, Exception) else None
