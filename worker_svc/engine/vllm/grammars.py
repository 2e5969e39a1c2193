"""Output formats by vLLM's structured outputs: compiled within the bounds of the torch engine's formats.

Formats come from clients, and llguidance trusts them (`laps_sd.contract.formats`), as vLLM's own backend does.
The backend here is vLLM's with another compiler: that of `sampling.formats`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from laps_sd.contract import formats
from worker_svc.engine.interface import FormatKind, OutputFormat
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.sampling.formats import matcher_of

__all__ = ["bound_formats", "follow_grammar", "format_problem", "structured_outputs", "wait_for_a_grammar"]

OTHER_WAIT_S = 0.001
_KINDS = {
    StructuredOutputOptions.JSON: FormatKind.JSON_SCHEMA,
    StructuredOutputOptions.JSON_OBJECT: FormatKind.JSON_OBJECT,
    StructuredOutputOptions.REGEX: FormatKind.REGEX,
    StructuredOutputOptions.GRAMMAR: FormatKind.GRAMMAR,
}
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


class BoundedGuidance(GuidanceBackend):
    """vLLM's backend over llguidance, with the compiler of the torch engine."""

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> GuidanceGrammar:
        """Return the grammar of a format. Raises ValueError in one sentence for an impossible one."""
        wanted = OutputFormat(_KINDS[request_type], grammar_spec)
        return GuidanceGrammar(matcher_of(wanted, self.ll_tokenizer), self.ll_tokenizer, self.vocab_size)


def bound_formats(core: Any) -> None:
    """Make a core of vLLM compile output formats with `BoundedGuidance`, if it has a tokenizer."""
    config = core.vllm_config
    manager = core.structured_output_manager
    if not config.model_config.skip_tokenizer_init:
        manager.backend = BoundedGuidance(
            config, tokenizer=manager.tokenizer, vocab_size=config.model_config.get_vocab_size()
        )


def follow_grammar(request: Request, committed: Sequence[int]) -> None:
    """Make the grammar of a new request begin after tokens of its output that exist already.

    vLLM compiles grammars in threads and reads a future in `schedule`. The one that it reads from now on is
    done after the tokens were taken in, so that no step sees the grammar before.
    """
    structured = request.structured_output_request
    if structured is None or not committed:
        return
    compiled = structured._grammar
    ready: Future[Any] = Future()

    def follow(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            if not grammar.accept_tokens(request.request_id, list(committed)):
                raise ValueError("format does not allow the output so far")
            ready.set_result(grammar)
        except Exception as error:
            ready.set_exception(error)

    structured.grammar = ready
    if isinstance(compiled, Future):
        compiled.add_done_callback(follow)
    else:  # compiled at once
        done: Future[Any] = Future()
        done.set_result(compiled)
        follow(done)


def wait_for_a_grammar(requests: Iterable[Request], seconds: float) -> None:
    """Return when one of the grammars that still compile is ready, or after `seconds`.

    If none does, vLLM waits for something else, such as KV of a connector: return after `OTHER_WAIT_S`.
    """
    futures = [
        request.structured_output_request._grammar
        for request in requests
        if request.structured_output_request is not None
        and isinstance(request.structured_output_request._grammar, Future)
    ]
    if futures:
        wait(futures, seconds, return_when=FIRST_COMPLETED)
    else:
        time.sleep(OTHER_WAIT_S)


def format_problem(request: Request) -> str:
    """Return why the output format of a request cannot be used or cannot continue; empty if it can."""
    structured = request.structured_output_request
    grammar = None if structured is None else structured.grammar
    if grammar is None:
        return ""
    if isinstance(grammar, Exception):
        return first_line(grammar)
    reason = grammar.ll_matcher.get_error()
    return f"the output format cannot continue: {formats.first_line(reason)}" if reason else ""
